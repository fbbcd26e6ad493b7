//! Permission of this process to run on the simulator. It computes nothing, so no program may take
//! it for a GPU by mistake: a process that outlives the command that started it, or an environment
//! left in a shell or an image, perhaps on a machine with a real GPU.
//!
//! The process that starts the simulator, its owner, holds an `fcntl` write lock on the file that
//! `PHANTOM_OWNER` names, which has its line "PID STARTTIME" (`_stand_in.py`, class `Owner`). The
//! kernel releases the lock when the owner ends, however it ends, and shows it in every namespace
//! of process ids. It is checked at the first use of CUDA and at the creation of a context; a
//! process that has its contexts and outlives its owner goes unnoticed.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// The file with the lock.
const OWNER: &str = "PHANTOM_OWNER";
/// `1`: a dry run reads the program's calls, and itself reports that there is no GPU.
const DRYRUN: &str = "PHANTOM_DRYRUN";
/// A folder to search for a real driver's device files, beside /dev.
const DEV_FOLDER: &str = "PHANTOM_DEV_FOLDER";

/// Files of a real driver in /dev; the last one is a Jetson's.
const DEVICE_FILES: [&str; 5] = ["nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-caps", "nvhost-gpu"];

/// Exit code of a process that may not run on the simulator: EX_CONFIG of `sysexits.h`.
const EXIT: i32 = 78;

/// Reasons to refuse the simulator to a process.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    /// `PHANTOM_OWNER` is unset or empty.
    NoOwner,
    /// The file cannot be read, for this reason.
    Unreadable(PathBuf, String),
    /// No process holds a lock on the file.
    NotHeld(PathBuf),
    /// A real driver's device file exists.
    RealDriver(PathBuf),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoOwner => write!(f, "no command holds it ({OWNER} is not set)"),
            Self::Unreadable(file, why) => {
                write!(f, "the command that held it has ended ({OWNER}={}: {why})", file.display())
            }
            Self::NotHeld(file) => write!(
                f,
                "the command that held it has ended ({OWNER}={}: nobody locks this file)",
                file.display()
            ),
            Self::RealDriver(file) => write!(
                f,
                "this machine has a real GPU's driver ({}), beside which only `gruyere dryrun` \
                 uses it",
                file.display()
            ),
        }
    }
}

/// Whether a dry run reads the program's calls.
pub fn is_dry_run() -> bool {
    std::env::var_os(DRYRUN).is_some_and(|value| value == "1")
}

/// Lets the process go on, and reports on stderr that there is no GPU, unless a dry run does; or
/// ends the process with a line.
pub fn admit() {
    check();
    if !is_dry_run() {
        say(&format!(
            "gruyere: stand-in GPU (PID {}): it keeps books of memory and computes nothing",
            std::process::id()
        ));
    }
}

/// Ends the process with a line if it may not run on the simulator.
pub fn check() {
    let beside = std::env::var_os(DEV_FOLDER).map(PathBuf::from);
    let folders = [Some(PathBuf::from("/dev")), beside];
    let folders: Vec<_> = folders.into_iter().flatten().collect();
    if let Some(refusal) = refusal(std::env::var_os(OWNER), is_dry_run(), &folders) {
        say(&format!(
            "gruyere: PID {} is ended: it would run on the stand-in GPU, which computes nothing, \
             and {refusal}. For a real GPU: unset LD_PRELOAD LD_LIBRARY_PATH ({}, {})",
            std::process::id(),
            in_force("LD_PRELOAD"),
            in_force("LD_LIBRARY_PATH"),
        ));
        // SAFETY: ends the process. Its exit handlers may use CUDA, which it must not.
        unsafe { libc::_exit(EXIT) };
    }
}

/// A variable as the user set it.
fn in_force(name: &str) -> String {
    match std::env::var_os(name) {
        Some(value) => format!("{name}={}", value.to_string_lossy()),
        None => format!("{name} is not set"),
    }
}

/// Writes a line on stderr, in one piece. Fails only if stderr is closed.
fn say(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

fn refusal(owner: Option<OsString>, is_dry_run: bool, folders: &[PathBuf]) -> Option<Refusal> {
    let device_file = folders
        .iter()
        .flat_map(|folder| DEVICE_FILES.map(|name| folder.join(name)))
        .find(|file| file.symlink_metadata().is_ok());
    if let (Some(file), false) = (device_file, is_dry_run) {
        return Some(Refusal::RealDriver(file));
    }
    let Some(file) = owner.filter(|name| !name.is_empty()).map(PathBuf::from) else {
        return Some(Refusal::NoOwner);
    };
    match is_held(&file) {
        Ok(true) => None,
        Ok(false) => Some(Refusal::NotHeld(file)),
        Err(error) => Some(Refusal::Unreadable(file, error.to_string())),
    }
}

/// Whether a process holds a lock on `file`, or this one is its owner.
fn is_held(file: &Path) -> io::Result<bool> {
    // A process that closes any descriptor of a file gives up its locks on it: this descriptor
    // stays open if the lock may be ours.
    let mut file = ManuallyDrop::new(File::open(file)?);
    // SAFETY: all-zero is a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_RDLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the descriptor is open, and F_GETLK writes one flock.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &mut lock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let is_held_by_another = lock.l_type != libc::F_UNLCK as libc::c_short;
    if !is_held_by_another {
        // A process does not see its own locks.
        let mut line = String::new();
        (&*file).take(64).read_to_string(&mut line)?;
        if Some(line.trim_end()) == this_process().as_deref() {
            return Ok(true);
        }
    }
    // SAFETY: taken out once, and not used after.
    drop(unsafe { ManuallyDrop::take(&mut file) });
    Ok(is_held_by_another)
}

/// "PID STARTTIME" of this process; the start time is field 22 of `stat`.
fn this_process() -> Option<String> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name in parentheses, with arbitrary characters.
    let start = stat.rsplit_once(')')?.1.split_whitespace().nth(22 - 3)?;
    Some(format!("{} {start}", std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(folder: &Path, line: &str) -> Option<OsString> {
        let file = folder.join("owner");
        std::fs::write(&file, line).unwrap();
        Some(file.into())
    }

    #[test]
    fn without_an_owner_it_is_refused() {
        assert_eq!(refusal(None, false, &[]), Some(Refusal::NoOwner));
        assert_eq!(refusal(Some("".into()), true, &[]), Some(Refusal::NoOwner));
        let gone = refusal(Some("/nowhere/owner".into()), false, &[]);
        assert!(matches!(gone, Some(Refusal::Unreadable(..))), "{gone:?}");
    }

    #[test]
    fn the_owner_itself_may_run_and_nobody_without_a_lock() {
        let folder = tempfile::tempdir().unwrap();
        let own = this_process().unwrap();
        assert_eq!(refusal(owner(folder.path(), &format!("{own}\n")), false, &[]), None);
        for other in ["", "1 1\n", &format!("{own}0\n"), &format!("1{own}\n")] {
            let held = refusal(owner(folder.path(), other), true, &[]);
            assert_eq!(held, Some(Refusal::NotHeld(folder.path().join("owner"))), "{other}");
        }
    }

    #[test]
    fn beside_a_real_driver_only_a_dry_run_runs() {
        let folder = tempfile::tempdir().unwrap();
        let owner = || owner(folder.path(), &this_process().unwrap());
        let dev = [folder.path().join("none"), folder.path().join("dev")];
        std::fs::create_dir(&dev[1]).unwrap();
        for name in DEVICE_FILES {
            assert_eq!(refusal(owner(), false, &dev), None);
            let file = dev[1].join(name);
            std::fs::write(&file, "").unwrap();
            assert_eq!(refusal(owner(), false, &dev), Some(Refusal::RealDriver(file.clone())));
            assert_eq!(refusal(owner(), true, &dev), None);
            assert_eq!(refusal(None, true, &dev), Some(Refusal::NoOwner));
            std::fs::remove_file(file).unwrap();
        }
    }
}
