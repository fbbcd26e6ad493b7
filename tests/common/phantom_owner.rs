//! The lock required to run on the simulator (`crates/phantom/abi/src/owner.rs`): this process
//! holds it until it ends, for its child processes.

use std::fs::File;
use std::io::{Error, Result, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Mutex;

/// The variable for the file, and the file's name: a memory file, so that nothing is left behind
/// however this process ends. Child processes find it among this process's descriptors.
pub fn variable() -> Result<(&'static str, String)> {
    static HELD: Mutex<Option<File>> = Mutex::new(None);
    let mut held =
        HELD.lock().map_err(|_| Error::other("a thread failed while it made the lock"))?;
    let file = match held.take() {
        Some(file) => file,
        None => locked()?,
    };
    let name = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    *held = Some(file);
    Ok(("PHANTOM_OWNER", name))
}

/// A new file with this process's line, and a lock on it.
fn locked() -> Result<File> {
    // SAFETY: a name that ends in NUL, and a flag of the call's.
    let number = unsafe { libc::memfd_create(c"stand-in owner".as_ptr(), libc::MFD_CLOEXEC) };
    if number < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and owned here alone.
    let mut file = unsafe { File::from_raw_fd(number) };
    // SAFETY: all-zero is a valid flock; it means the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the descriptor is open, and F_SETLK reads one flock.
    if unsafe { libc::fcntl(number, libc::F_SETLK, &lock) } != 0 {
        return Err(Error::last_os_error());
    }
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The start time is field 22; the second field, a name in parentheses, may contain any
    // characters.
    let fields = stat.rsplit_once(')').map_or("", |(_, after)| after);
    let start = fields.split_whitespace().nth(22 - 3).unwrap_or_default();
    writeln!(file, "{} {start}", std::process::id())?;
    Ok(file)
}

/// A program's output without the simulator's line that this is no GPU.
pub fn without_its_line(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let lines = said.split_inclusive('\n');
    lines.filter(|line| !line.starts_with("gruyere: stand-in GPU (PID ")).collect()
}
