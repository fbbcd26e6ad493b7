//! Finds records without a file: those of processes whose folder had no room for one, or could not
//! be written. They are memfds among the descriptors of their processes.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::open::{Opened, Owners, State};
use crate::sweep::{self, Found, Look};

/// The records without a file of `owners` that are `wanted`, of living processes, by pid.
pub fn read(owners: Owners, wanted: impl Fn(&Opened) -> bool) -> Vec<Found> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut pids: Vec<u64> =
        processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    // Forked children have the memfd of their parent among their descriptors, too.
    let mut seen = HashSet::new();
    pids.retain(|pid| {
        std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|of| owners.include(of.uid()))
    });
    let memfds = pids.into_iter().filter_map(of);
    let new = memfds
        .filter(|path| std::fs::metadata(path).is_ok_and(|of| seen.insert((of.dev(), of.ino()))));
    new.filter_map(|path| found(path, owners, &wanted)).collect()
}

/// The record without a file of a process.
pub fn of_process(pid: u64, owners: Owners) -> Option<Found> {
    found(of(pid)?, owners, &|_| true)
}

/// The memfd of a process, as a path.
fn of(pid: u64) -> Option<PathBuf> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    entries.flatten().map(|entry| entry.path()).find(|path| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:gruyere"))
    })
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
