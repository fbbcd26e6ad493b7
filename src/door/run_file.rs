//! Keeps a run's history on disk, where `history:` names a folder: at exit, at an out-of-memory,
//! and every minute at a step's mark, so that a run that is killed has its history too.
#![deny(unsafe_code)]

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{config, guarded};
use crate::file;
use crate::heap::Heap;
use crate::record::Reader;
use crate::record::run::Run;

/// Between two writings at steps. One takes about a millisecond.
const STEPS: Duration = Duration::from_secs(60);
/// Between two writings at out-of-memories: programs that halve their batch until it fits have
/// many.
const OUT_OF_MEMORIES: Duration = Duration::from_secs(1);

/// How long the end of a process waits for a thread that is writing.
const AT_EXIT: Duration = Duration::from_secs(1);

/// When it was written last; held by who writes.
static WRITTEN: Mutex<Option<Instant>> = Mutex::new(None);

/// A step is over. Never fails the program: what goes wrong is logged.
pub(super) fn at_a_step(heap: &Heap) {
    write_if_due(heap, STEPS);
}

/// A request could not be met.
pub(super) fn at_an_out_of_memory(heap: &Heap) {
    write_if_due(heap, OUT_OF_MEMORIES);
}

fn write_if_due(heap: &Heap, interval: Duration) {
    let Some((folder, name)) = wanted() else { return };
    // Another thread is about to.
    let Some(mut written) = WRITTEN.try_lock() else { return };
    if written.is_none_or(|at| at.elapsed() >= interval) {
        *written = Some(Instant::now());
        // Whatever happens here, the program gets its out-of-memory.
        let ends = interval < STEPS;
        guarded((), || write(heap, folder, name, ends));
    }
}

/// The process ends.
pub(super) fn at_exit(heap: &Heap) {
    if let Some((folder, name)) = wanted()
        && let Some(_written) = WRITTEN.try_lock_for(AT_EXIT)
    {
        write(heap, folder, name, true);
    }
}

/// The folder of histories, where one is kept, and the run's name.
fn wanted() -> Option<(&'static Path, Option<&'static str>)> {
    let config = config()?;
    Some((config.history.as_deref()?, config.name.as_deref()))
}

/// Writes it; where the run may be over, with what lines of the program hold: that takes longer.
fn write(heap: &Heap, folder: &Path, name: Option<&str>, ends: bool) {
    let Some(reader) = Reader::own(heap.record()) else {
        log::warn!("history: nothing is kept while the record is off; take record:off away");
        return;
    };
    heap.sample();
    let mut run = Run::of(&reader, name);
    if ends {
        run = run.with_lines(&reader);
    }
    // A process that only looked at the device is no run.
    if run.devices.is_empty() {
        return;
    }
    if let Err(error) = keep(folder, &run) {
        log::error!("history: {}: {error}; the folder must be writable", folder.display());
    }
}

/// What the folder that `gruyere run` makes for runs that nobody keeps is called, up to what tells
/// it from others.
pub const TEMPORARY: &str = "gruyere-run-";

fn is_temporary(folder: &Path) -> bool {
    folder
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with(TEMPORARY))
}

/// Writes `run` in one piece: a reader finds the old file or the new.
fn keep(folder: &Path, run: &Run) -> io::Result<()> {
    if is_temporary(folder) && !folder.is_dir() {
        // The `gruyere run` that wanted it has gone, and nobody will read it.
        return Ok(());
    }
    file::make_folders(folder)?;
    let text = serde_json::to_string(run).map_err(io::Error::other)?;
    file::replace(&folder.join(run.file_name()), u64::MAX, file::PRIVATE, |out| {
        out.write_all(text.as_bytes())
    })
}
