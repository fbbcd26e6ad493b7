//! Keeps a run's history on disk, where `history:` names a folder: at exit, at an out-of-memory,
//! and every minute at a step's mark, so that a killed run has its history too.
#![deny(unsafe_code)]

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::process::{config, guarded};
use crate::file;
use crate::heap::Heap;
use crate::record::Reader;
use crate::record::clock::Moment;
use crate::record::run::Run;

/// Between two writes at steps. One takes about a millisecond.
const STEPS: Duration = Duration::from_secs(60);
/// Between two writes at out-of-memories: a program that halves its batch until it fits has many.
const OUT_OF_MEMORIES: Duration = Duration::from_secs(1);

/// How long the end of a process waits for a thread that writes.
const AT_EXIT: Duration = Duration::from_secs(1);

/// Time of the last write; the writing thread holds the lock.
static WRITTEN: Mutex<Option<Instant>> = Mutex::new(None);

/// Why the file is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Occasion {
    Step,
    OutOfMemory,
    Exit,
}

/// Writes at a step's end, if due. Never fails the program: errors are logged.
pub(super) fn at_a_step(heap: &Heap) {
    write_if_due(heap, Occasion::Step, STEPS);
}

/// Writes at an out-of-memory, if due.
pub(super) fn at_an_out_of_memory(heap: &Heap) {
    write_if_due(heap, Occasion::OutOfMemory, OUT_OF_MEMORIES);
}

fn write_if_due(heap: &Heap, occasion: Occasion, interval: Duration) {
    let Some((folder, name)) = wanted() else { return };
    // Another thread is about to write.
    let Some(mut written) = WRITTEN.try_lock() else { return };
    if written.is_none_or(|at| at.elapsed() >= interval) {
        *written = Some(Instant::now());
        // A failure here leaves the program its out-of-memory.
        guarded((), || write(heap, folder, name, occasion));
    }
}

/// Writes at the end of the process.
pub(super) fn at_exit(heap: &Heap) {
    if let Some((folder, name)) = wanted()
        && let Some(_written) = WRITTEN.try_lock_for(AT_EXIT)
    {
        write(heap, folder, name, Occasion::Exit);
    }
}

/// The folder of histories, where one is kept, and the run's name.
fn wanted() -> Option<(&'static Path, Option<&'static str>)> {
    let config = config()?;
    Some((config.history.as_deref()?, config.name.as_deref()))
}

/// Writes the run's file; where the run may be over, with the lines that hold memory: that takes
/// longer.
fn write(heap: &Heap, folder: &Path, name: Option<&str>, occasion: Occasion) {
    let Some(reader) = Reader::own(heap.record()) else {
        log::warn!("history: nothing is kept while the record is off; remove record:off");
        return;
    };
    heap.sample();
    let mut run = Run::of(&reader, name);
    if occasion != Occasion::Step {
        run = run.with_lines(&reader);
    }
    // A killed process writes no other.
    if occasion != Occasion::Exit {
        run.unfinished_at_nanoseconds =
            Some(Moment::take().realtime.saturating_sub(run.started_nanoseconds));
    }
    // A process that only queried the device is not a run.
    if run.devices.is_empty() {
        return;
    }
    let Err(error) = keep(folder, &run) else { return };
    if is_temporary(folder) {
        // Not the user's folder: `gruyere run` made it for its summary.
        log::warn!(
            "the summary of `gruyere run` will lack how this process ended ({}: {error}): it can \
             no longer write there, after setuid or chroot for example",
            folder.display()
        );
    } else {
        let remedy = match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => "free space there, or name another folder",
            _ => "the folder must be writable",
        };
        log::error!("history: {}: {error}; {remedy}", folder.display());
    }
}

/// Prefix of the folder that `gruyere run` makes for a run that it will not keep.
pub const TEMPORARY: &str = "gruyere-run-";

/// Whether `gruyere run` made the folder, for its summary.
pub(super) fn is_temporary(folder: &Path) -> bool {
    folder
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with(TEMPORARY))
}

/// Writes `run` in one piece: a reader finds the old file or the new.
fn keep(folder: &Path, run: &Run) -> io::Result<()> {
    if is_temporary(folder) && !folder.is_dir() {
        // The `gruyere run` behind it is gone: the file would have no reader.
        return Ok(());
    }
    file::make_folders(folder)?;
    let text = serde_json::to_string(run).map_err(io::Error::other)?;
    file::replace(&folder.join(run.file_name()), u64::MAX, file::PRIVATE, |out| {
        out.write_all(text.as_bytes())
    })
}
