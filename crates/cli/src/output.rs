//! Standard output and its reader: a closed pipe (`| head`) ends a command quietly and is not its
//! failure; a full disk is. Every command prints this way, so that none loses its answer silently.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::os::fd::RawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::failure::Failure;

/// State of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// It reads, or may.
    There,
    /// It is gone: a command that follows a process ends.
    Gone,
}

/// Prints `text` unchanged, at once.
///
/// # Errors
/// Writing fails: a full disk, for example.
pub fn print(text: impl fmt::Display) -> Result<Audience, Failure> {
    let text = text.to_string();
    write(|out| out.write_all(text.as_bytes()))
}

/// As [`print`], for what is too large for a text: `form` writes it.
///
/// # Errors
/// Writing fails: a full disk, for example.
pub fn write(form: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<Audience, Failure> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = form(&mut out).and_then(|()| out.flush());
    // The rest after an error: dropping the writer would try once more.
    drop(out.into_parts());
    told(written)
}

/// Whether this name of a file means standard output.
pub fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// The outcome of a write to standard output.
///
/// # Errors
/// Writing failed, and not for lack of a reader.
pub fn told(written: io::Result<()>) -> Result<Audience, Failure> {
    match written {
        Ok(()) => Ok(Audience::There),
        Err(error) if is_of_a_reader(&error) => Ok(Audience::Gone),
        Err(error) => Err(Failure::new(format_args!(
            "standard output: {error}; send it to a file system with free space, or to a pipe"
        ))),
    }
}

/// Whether `error` only means that the reader is gone: a closed pipe, a closed terminal.
fn is_of_a_reader(error: &io::Error) -> bool {
    error.kind() == ErrorKind::BrokenPipe || error.raw_os_error() == Some(libc::EIO)
}

/// Waits for `time`, or until standard output loses its reader: the next line may be days away.
pub fn pause(time: Duration) -> Audience {
    match wait_for_the_end(&[libc::STDOUT_FILENO], Some(time)) {
        true => Audience::Gone,
        false => Audience::There,
    }
}

/// Waits until the other side of one of `descriptors` (pipes, terminals, sockets) is gone, for
/// `time` at most; returns whether it is.
pub fn wait_for_the_end(descriptors: &[RawFd], time: Option<Duration>) -> bool {
    let begin = Instant::now();
    let mut asked: Vec<libc::pollfd> =
        descriptors.iter().map(|&fd| libc::pollfd { fd, events: 0, revents: 0 }).collect();
    loop {
        let left = time.map(|time| time.saturating_sub(begin.elapsed()));
        let milliseconds = left.map_or(-1, milliseconds);
        // SAFETY: `descriptors.len()` entries of ours.
        let ended =
            unsafe { libc::poll(asked.as_mut_ptr(), asked.len() as libc::nfds_t, milliseconds) };
        if ended > 0 {
            return true;
        }
        if left.is_some_and(|left| left.is_zero()) {
            return false;
        }
        // Else a signal, or the longest timeout of a call. If poll fails otherwise, sleeps instead.
        if ended < 0 && io::Error::last_os_error().kind() != ErrorKind::Interrupted {
            std::thread::sleep(left.unwrap_or(Duration::from_secs(1)));
        }
    }
}

/// Waits until `descriptor` can be read, for `time` at most, or until a signal; returns whether it
/// can.
pub fn wait_for_input(descriptor: RawFd, time: Duration) -> bool {
    let mut asked = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry of ours.
    unsafe { libc::poll(&raw mut asked, 1, milliseconds(time)) > 0 }
}

/// A timeout as `poll` takes it: rounded up, and at most its longest.
fn milliseconds(time: Duration) -> libc::c_int {
    libc::c_int::try_from(time.as_micros().div_ceil(1000)).unwrap_or(libc::c_int::MAX)
}
