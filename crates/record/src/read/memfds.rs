//! Finds records without a file: those of processes whose folder had no room for one, or could not
//! be written. They are memfds among the descriptors of their processes.

use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::mapping::memfd_name;
use crate::open::{Opened, Owners, State};
use crate::sweep::{self, Found, Look};

/// The records of living processes of `owners` that stand for files in `directory`, if they are
/// `wanted`; by pid.
pub fn read(directory: &Path, owners: Owners, wanted: impl Fn(&Opened) -> bool) -> Vec<Found> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pid = |entry: std::fs::DirEntry| -> Option<u64> {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        owners.include(entry.metadata().ok()?.uid()).then_some(pid)
    };
    let mut pids: Vec<u64> = processes.flatten().filter_map(pid).collect();
    pids.sort_unstable();
    let name = memfd_name(directory);
    let memfds = pids.into_iter().filter_map(|pid| of(pid, &name));
    // Forked children have the memfd of their parent among their descriptors, too.
    let mut seen = HashSet::new();
    let mut is_new = |path: &PathBuf| {
        std::fs::metadata(path).is_ok_and(|file| seen.insert((file.dev(), file.ino())))
    };
    let memfds = memfds.filter(|path| is_new(path));
    memfds.filter_map(|path| found(path, owners, &wanted)).collect()
}

/// The record of a process that stands for a file in `directory`.
pub fn of_process(directory: &Path, pid: u64, owners: Owners) -> Option<Found> {
    found(of(pid, &memfd_name(directory))?, owners, &|_| true)
}

/// The memfd of a process, as a path.
fn of(pid: u64, name: &[u8]) -> Option<PathBuf> {
    let is_named = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| {
            let to = to.as_os_str().as_bytes().strip_prefix(b"/memfd:");
            to.is_some_and(|to| to.strip_suffix(b" (deleted)").unwrap_or(to) == name)
        })
    };
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    entries.flatten().map(|entry| entry.path()).find(is_named)
}

fn found(path: PathBuf, owners: Owners, wanted: &dyn Fn(&Opened) -> bool) -> Option<Found> {
    let opened = Opened::descriptor(&path, owners).ok()?;
    // A child may have outlived the process.
    if opened.state() == State::Stale {
        return None;
    }
    match sweep::look_in(path, opened, wanted) {
        Look::Found(found) if found.state != State::Stale => Some(*found),
        _ => None,
    }
}
