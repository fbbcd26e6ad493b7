//! The sender's side of an open: a thread that answers for the memory that the process has named.
//! It starts with the first name, and ends with the process.
//!
//! ```text
//!   receiver -> sender   the extent: address, bytes, newest, 8 bytes each
//!   sender -> receiver   CHUNKS, the length of each chunk (8 bytes), and their files
//!   receiver -> sender   a byte: it has mapped them, the next may come
//!                        ... until the extent is complete
//!   sender -> receiver   or REFUSED, and the reason in words
//! ```

use super::super::process::{current, guarded};
use super::socket::{Connection, MOST_BYTES, MOST_FILES, listening};
use crate::heap::{Chunk, Extent, Heap};
use crate::record::signals::without_signals;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

/// What a process is known by to those who open its memory: random, so that no other answers for
/// it.
pub(super) type Token = [u8; 16];

const REFUSED: u8 = 0;
const CHUNKS: u8 = 1;

/// The listening socket, for [`forget`].
///
/// ```text
///   -1   no socket;  -> its number, by the first name;  -> -1, in a forked child
/// ```
static LISTENING: AtomicI32 = AtomicI32::new(-1);

/// The token of this process's server, which the first call starts.
///
/// # Errors
/// Why there is no server, for the user; a later call tries again.
pub(super) fn started() -> std::result::Result<Token, String> {
    static STARTED: Mutex<Option<Token>> = Mutex::new(None);
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    match *started {
        Some(token) => Ok(token),
        None => match start() {
            Ok(token) => Ok(*started.insert(token)),
            Err(error) => Err(format!("no socket for the receivers can be opened ({error})")),
        },
    }
}

fn start() -> Result<Token> {
    let mut token = [0; size_of::<Token>()];
    getrandom(&mut token, GetRandomFlags::empty())?;
    let socket = listening(&name(&token))?;
    LISTENING.store(socket.as_raw_fd(), Ordering::Relaxed);
    without_signals(|| {
        Builder::new().name("gruyere-sharing".into()).spawn(move || accept(&socket))
    })?;
    Ok(token)
}

/// Closes the listening socket in a child made by fork, where no thread answers: receivers that
/// come after the parent's end would wait. Async-signal-safe.
pub(in super::super) fn forget() {
    let socket = LISTENING.swap(-1, Ordering::Relaxed);
    if socket >= 0 {
        // SAFETY: the child's copy; the thread that owns it does not exist here.
        unsafe { libc::close(socket) };
    }
}

/// The name of the abstract socket.
fn name(token: &Token) -> Vec<u8> {
    let mut name = String::from("gruyere-sharing-");
    for byte in token {
        let _ = write!(name, "{byte:02x}");
    }
    name.into_bytes()
}

fn accept(socket: &OwnedFd) {
    loop {
        match Connection::accepted(socket) {
            // A receiver that stops must not keep the others waiting.
            Ok(connection) => {
                let answer = move || guarded((), || answer(&connection));
                if let Err(error) = Builder::new().name("gruyere-sharing".into()).spawn(answer) {
                    log::warn!("a receiver of a CUDA tensor cannot be answered: {error}");
                }
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                log::warn!("another user's process asked for memory of this one, and got none");
            }
            Err(error) => {
                log::warn!("a receiver of a CUDA tensor could not connect: {error}");
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
    }
}

fn answer(connection: &Connection) {
    let Some(heap) = current() else { return };
    if let Err(error) = try_answer(heap, connection) {
        log::info!("the receiver of a CUDA tensor did not take it all: {error}");
    }
}

fn try_answer(heap: &Heap, connection: &Connection) -> Result<()> {
    let mut space = [0; MOST_BYTES];
    let (request, _) = connection.receive(&mut space)?;
    let ([address, bytes, newest], []) = request.as_chunks() else {
        return connection.send(&refusal("the request is of another version"), NO_FILES);
    };
    let [address, bytes, newest] =
        [address, bytes, newest].map(|number| u64::from_le_bytes(*number));
    let extent = Extent { address, bytes, newest };
    let (mut from, end) = (address, address.saturating_add(bytes));
    loop {
        let chunks = match heap.export_chunks(extent, from, MOST_FILES) {
            Ok(chunks) => chunks,
            Err(error) => return connection.send(&refusal(&error.to_string()), NO_FILES),
        };
        let lengths = chunks.iter().flat_map(|(_, bytes)| bytes.to_le_bytes());
        let message: Vec<u8> = std::iter::once(CHUNKS).chain(lengths).collect();
        from += chunks.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let files: Vec<OwnedFd> = chunks.into_iter().map(|(file, _)| file).collect();
        connection.send(&message, &files)?;
        if from >= end {
            return Ok(());
        }
        drop(files);
        connection.receive(&mut space)?;
    }
}

const NO_FILES: &[OwnedFd] = &[];

fn refusal(why: &str) -> Vec<u8> {
    let mut message = vec![REFUSED];
    message.extend(why.bytes().take(MOST_BYTES - 1));
    message
}

/// Asks the process behind `token` for the chunks of an extent.
///
/// # Errors
/// Why there is no answer, for the user.
pub(super) fn ask(token: &Token, extent: Extent) -> std::result::Result<Connection, String> {
    let connection = Connection::to(&name(token)).map_err(|error| match error.kind() {
        ErrorKind::ConnectionRefused => "its sender has ended, or is in another network namespace \
             (a container's); the sender must live as long as the tensor is in use"
            .to_owned(),
        _ => no_answer(&error),
    })?;
    let Extent { address, bytes, newest } = extent;
    let request = [address, bytes, newest].map(u64::to_le_bytes);
    connection.send(request.as_flattened(), NO_FILES).map_err(|error| no_answer(&error))?;
    Ok(connection)
}

/// Tells the sender that the chunks so far are mapped.
///
/// # Errors
/// Why it is not told, for the user.
pub(super) fn ask_for_more(connection: &Connection) -> std::result::Result<(), String> {
    connection.send(&[CHUNKS], NO_FILES).map_err(|error| no_answer(&error))
}

/// Waits for the next chunks.
///
/// # Errors
/// The sender's reason, or why there is none, for the user.
pub(super) fn receive(connection: &Connection) -> std::result::Result<VecDeque<Chunk>, String> {
    let mut space = [0; MOST_BYTES];
    let (message, files) = connection.receive(&mut space).map_err(|error| no_answer(&error))?;
    if let [CHUNKS, lengths @ ..] = message
        && let (lengths, []) = lengths.as_chunks()
        && lengths.len() == files.len()
    {
        let lengths = lengths.iter().map(|length| u64::from_le_bytes(*length));
        return Ok(files.into_iter().zip(lengths).collect());
    }
    Err(match message {
        [REFUSED, why @ ..] => String::from_utf8_lossy(why).into_owned(),
        _ => "its sender's answer is of another version of Gruyère".to_owned(),
    })
}

fn no_answer(error: &Error) -> String {
    if error.raw_os_error() == Some(libc::EMFILE) {
        return "this process has no open files left (ulimit -n)".to_owned();
    }
    format!("its sender did not answer: {error}")
}
