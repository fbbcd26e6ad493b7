//! The sender's side of an open: a thread that answers for the memory that the process has named.
//! It starts with the first name, and ends with the process.
//!
//! ```text
//!   receiver -> sender   the token, and the extent
//!   sender -> receiver   CHUNKS, the length of each chunk (8 bytes), and their files
//!   receiver -> sender   a byte: it has mapped them, the next may come
//!                        ... until the extent is complete
//!   sender -> receiver   or REFUSED, and the reason in words
//! ```

use super::super::process::{current, guarded};
use super::name::{extent_of, extent_to_bytes};
use super::socket::{Connection, MOST_BYTES, MOST_FILES, PATIENCE, listening};
use crate::heap::{ChunkFile, Extent, Heap};
use crate::record::signals::without_signals;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// The secret of a process's server. A part of it names the socket, which every process of the
/// network namespace can list; the rest only a receiver of a tensor knows.
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
    let socket = listening(&socket_name(&token))?;
    let number = socket.as_raw_fd();
    let thread = Builder::new().name("gruyere-sharing".into());
    without_signals(|| thread.spawn(move || accept(&socket, token)))?;
    LISTENING.store(number, Ordering::Relaxed);
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
fn socket_name(token: &Token) -> Vec<u8> {
    // Its first eight bytes.
    format!("gruyere-sharing-{:016x}", u128::from_le_bytes(*token) as u64).into_bytes()
}

fn accept(socket: &OwnedFd, token: Token) {
    let mut told = None;
    loop {
        let error = match Connection::accepted(socket) {
            // A receiver that stops must not keep the others waiting.
            Ok(connection) => {
                let answer = move || guarded((), || answer(&connection, &token));
                match Builder::new().name("gruyere-sharing".into()).spawn(answer) {
                    Ok(_) => continue,
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        // Once for each kind: another user's process could ask again and again.
        if told.replace(error.kind()) != Some(error.kind()) {
            log::warn!("a process that asked for memory of this one got none: {error}");
        }
        match error.raw_os_error() {
            // The program has closed the socket.
            Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK) => return,
            Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => {
                std::thread::sleep(Duration::from_millis(100));
            }
            _ => {}
        }
    }
}

fn answer(connection: &Connection, token: &Token) {
    let Some(heap) = current() else { return };
    if let Err(error) = try_answer(heap, connection, token) {
        log::info!("the receiver of a CUDA tensor did not take it all: {error}");
    }
}

fn try_answer(heap: &Heap, connection: &Connection, token: &Token) -> Result<()> {
    let mut space = [0; MOST_BYTES];
    let (request, _) = connection.receive(&mut space)?;
    let extent = request.strip_prefix(token).and_then(|extent| extent_of(extent.try_into().ok()?));
    let Some(extent) = extent else {
        return connection.send(&refusal("the request is of another version"), NO_FILES);
    };
    let Extent { address, bytes, .. } = extent;
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
    let connection = Connection::to(&socket_name(token)).map_err(|error| no_answer(&error, 0))?;
    request(&connection, token, extent)?;
    Ok(connection)
}

fn request(
    connection: &Connection,
    token: &Token,
    extent: Extent,
) -> std::result::Result<(), String> {
    let request = [&token[..], &extent_to_bytes(extent)].concat();
    connection.send(&request, NO_FILES).map_err(|error| no_answer(&error, connection.pid))
}

/// Asks for the next chunks: those before are mapped.
///
/// # Errors
/// Why there is no answer, for the user.
pub(super) fn ask_for_more(connection: &Connection) -> std::result::Result<(), String> {
    connection.send(&[CHUNKS], NO_FILES).map_err(|error| no_answer(&error, connection.pid))
}

/// Waits for the next chunks.
///
/// # Errors
/// The sender's reason, or why there is none, for the user.
pub(super) fn receive(connection: &Connection) -> std::result::Result<VecDeque<ChunkFile>, String> {
    let mut space = [0; MOST_BYTES];
    let (message, files) =
        connection.receive(&mut space).map_err(|error| no_answer(&error, connection.pid))?;
    if let [CHUNKS, lengths @ ..] = message
        && let (lengths, []) = lengths.as_chunks()
        && lengths.len() == files.len()
    {
        let lengths = lengths.iter().map(|length| u64::from_le_bytes(*length));
        return Ok(files.into_iter().zip(lengths).collect());
    }
    Err(match message {
        [REFUSED, why @ ..] => format!("its sender refused: {}", String::from_utf8_lossy(why)),
        _ => "its sender's answer is of another version of Gruyère".to_owned(),
    })
}

/// What the user is told of an error between this process and the sender `pid` (0: unknown).
fn no_answer(error: &Error, pid: i32) -> String {
    let sender = if pid > 0 { format!("its sender (PID {pid})") } else { "its sender".to_owned() };
    match (error.raw_os_error(), error.kind()) {
        (Some(libc::EMFILE), _) => "this process has no open files left (ulimit -n)".to_owned(),
        (_, ErrorKind::ConnectionRefused) => format!(
            "{sender} has ended, or is in another network namespace (a container's); the sender \
             must live as long as the tensor is in use"
        ),
        (_, ErrorKind::UnexpectedEof) => {
            format!("{sender} has ended, or has no memory left for it")
        }
        (_, ErrorKind::PermissionDenied) => {
            format!("{sender} is another user's process; both must run as one user")
        }
        (_, ErrorKind::TimedOut) => format!(
            "{sender} has not answered for {} s: it is stopped (by a debugger or SIGSTOP), or \
             waits for the driver",
            PATIENCE.as_secs()
        ),
        _ => format!("{sender} did not answer: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::pair;
    use super::*;
    use crate::config::Config;
    use crate::driver::StreamHandle;
    use crate::heap::Export;
    use gruyere_phantom::{Config as GpuConfig, Gpu};
    use gruyere_phantom_driver::PhantomDriver;
    use std::sync::Arc;

    const TOKEN: Token = [3; 16];

    fn heap() -> Heap {
        let gpu = Arc::new(Gpu::new(GpuConfig::new(1 << 30)));
        // Chunks of a page.
        let settings = Config::parse("slack:0,record:off").unwrap().heap;
        Heap::new(Arc::new(PhantomDriver::new(gpu)), settings).unwrap()
    }

    fn extent(heap: &Heap, bytes: u64) -> (u64, Extent) {
        let block = heap.malloc(bytes, 0, StreamHandle(0)).unwrap();
        let Ok(Export::Chunks(extent)) = heap.export(block) else { panic!("no chunks") };
        (block, extent)
    }

    /// The lengths of the chunks that a receiver gets, and why it gets no more. `between` runs
    /// behind each batch.
    fn received(
        heap: &Heap,
        token: &Token,
        extent: Extent,
        mut between: impl FnMut(),
    ) -> (Vec<u64>, Option<String>) {
        let (ours, theirs) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || try_answer(heap, &theirs, &TOKEN));
            request(&ours, token, extent).unwrap();
            let mut lengths = Vec::new();
            loop {
                match receive(&ours) {
                    Ok(chunks) => lengths.extend(chunks.into_iter().map(|(_, bytes)| bytes)),
                    Err(why) => return (lengths, Some(why)),
                }
                between();
                if lengths.iter().sum::<u64>() >= extent.bytes {
                    return (lengths, None);
                }
                ask_for_more(&ours).unwrap();
            }
        })
    }

    #[test]
    fn a_receiver_gets_all_chunks_in_batches() {
        let heap = heap();
        for pages in [1, MOST_FILES as u64, MOST_FILES as u64 + 1, 50] {
            let (_, extent) = extent(&heap, pages << 21);
            let (lengths, refused) = received(&heap, &TOKEN, extent, || {});
            assert_eq!((lengths.iter().sum(), refused), (extent.bytes, None));
            assert!(lengths.len() as u64 >= pages, "{lengths:?}");
        }
        heap.shut_down();
    }

    #[test]
    fn who_does_not_know_the_token_or_comes_too_late_gets_nothing() {
        let heap = heap();
        let (block, extent) = extent(&heap, 4 << 20);
        let (got, refused) = received(&heap, &[4; 16], extent, || {});
        assert!(got.is_empty() && refused.unwrap().contains("another version"));
        assert!(heap.free(block));
        heap.trim();
        let (got, refused) = received(&heap, &TOKEN, extent, || {});
        assert!(got.is_empty() && refused.unwrap().contains("freed before it was opened"));
        heap.shut_down();
    }

    #[test]
    fn memory_that_goes_between_two_batches_is_refused_from_there_on() {
        let heap = heap();
        let (block, extent) = extent(&heap, 40 << 20);
        let mut is_there = true;
        let (got, refused) = received(&heap, &TOKEN, extent, || {
            if std::mem::take(&mut is_there) {
                assert!(heap.free(block));
                heap.trim();
            }
        });
        assert!(got.len() < 20 && refused.unwrap().contains("freed before it was opened"));
        heap.shut_down();
    }

    #[test]
    fn a_receiver_that_leaves_ends_its_answer() {
        let heap = heap();
        let (_, extent) = extent(&heap, 40 << 20);
        let (ours, theirs) = pair();
        request(&ours, &TOKEN, extent).unwrap();
        drop(ours);
        assert!(try_answer(&heap, &theirs, &TOKEN).is_err());
        heap.shut_down();
    }
}
