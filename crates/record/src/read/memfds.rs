//! Finds records without a file: those of processes whose folder had no room for one, or could not
//! be written, and those whose file was removed (by a cleaner, or by systemd's RemoveIPC). They are
//! memfds and deleted files among the descriptors of their processes.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::mapping::{MEMFD_PREFIX, memfd_name};
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
    // As the kernel names it, past links.
    let deleted = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    let is_in = |file: &Path| file.parent() == Some(&deleted);
    let memfds = pids.into_iter().filter_map(|pid| of(pid, |memfd| memfd == name, is_in));
    memfds.filter_map(|path| found(path, owners, &wanted)).collect()
}

/// The record without a file of a process, whatever its folder.
pub fn of_process(pid: u64, owners: Owners) -> Option<Found> {
    let path = of(pid, |memfd| memfd.starts_with(MEMFD_PREFIX), |_| true)?;
    found(path, owners, &|_| true)
}

/// The memfd of a process by its name, or its deleted record by the place where it was, as a path.
fn of(
    pid: u64,
    is_named: impl Fn(&[u8]) -> bool,
    was_at: impl Fn(&Path) -> bool,
) -> Option<PathBuf> {
    let is_named = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| {
            let to = to.as_os_str().as_bytes();
            let (to, is_deleted) = match to.strip_suffix(b" (deleted)") {
                Some(to) => (to, true),
                None => (to, false),
            };
            let file = Path::new(OsStr::from_bytes(to));
            match to.strip_prefix(b"/memfd:") {
                Some(name) => is_named(name),
                None => is_deleted && sweep::is_record(file) && was_at(file),
            }
        })
    };
    // Readers of a record have opened it too, but not for writing.
    let writes =
        |path: &PathBuf| std::fs::symlink_metadata(path).is_ok_and(|link| link.mode() & 0o200 != 0);
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    entries.flatten().map(|entry| entry.path()).find(|path| is_named(path) && writes(path))
}

fn found(path: PathBuf, owners: Owners, wanted: &dyn Fn(&Opened) -> bool) -> Option<Found> {
    let opened = Opened::descriptor(&path, owners).ok()?;
    match sweep::look_in(path, opened, wanted) {
        // A process at its end removes its file itself.
        Look::Found(found) if found.reader.as_ref().is_ok_and(|it| it.health().closed) => None,
        Look::Found(found) if found.state != State::Stale => Some(*found),
        _ => None,
    }
}
