//! Reports an out-of-memory, where the configuration wants it.
#![deny(unsafe_code)]

use super::process::{config, current, guarded};
use super::{program, refusal, run_file};
use crate::config::Config;
use crate::driver::StreamHandle;
use crate::dump::{Dumps, Explained};
use crate::heap::{ALERTS, Heap, Report};

static DUMPS: Dumps = Dumps::new();

/// Makes an out-of-memory the program's: counts it, dumps it, notes it in the run's file and in the
/// history, and adds the program's lines that caused it to `report`.
pub(super) fn note(heap: &Heap, report: &mut Report, stream: StreamHandle) {
    report.no_torch = !program::tell(heap).torch;
    heap.note_out_of_memory(report, stream);
    // First: meanwhile other threads go on, or are refused too and free what they held.
    keep_moment(heap);
    guarded((), || refusal::note(heap));
    let explained = explain(heap, report);
    (report.conclusion, report.page) = (explained.conclusion, explained.page);
    run_file::at_an_out_of_memory(heap);
}

/// Counts an out-of-memory of a program that is only watched: its own allocator refused `bytes`.
#[cold]
pub(super) fn saw(heap: &Heap, device: i64, bytes: u64, stream: StreamHandle) {
    heap.saw_refusal(device, bytes, stream);
    keep_moment(heap);
    refusal::note(heap);
}

/// Keeps the record as it is, for [`super::control::gruyere_keep_record`]: `gruyere post` then
/// reports what the exception says.
fn keep_moment(heap: &Heap) {
    guarded((), || {
        if config().is_none_or(|config| config.heap.records_kept == 0) {
            return;
        }
        // The run so far.
        heap.sample();
        if let Err(error) = heap.record().keep_moment() {
            log::debug!("the record of this out-of-memory is not kept: {error}");
        }
    });
}

/// Writes the dumps and the page ([`crate::dump`]); returns their part of the exception. A failure
/// here leaves the program its out-of-memory.
fn explain(heap: &Heap, report: &Report) -> Explained {
    guarded(Explained::default(), || {
        heap.flush_trace();
        // The run so far.
        heap.sample();
        let folder = config().and_then(|config| config.dump_dir.as_deref());
        DUMPS.out_of_memory(heap, report, folder)
    })
}

/// With `dump_dir:`, makes thresholds of `alert:` leave a page too.
pub(super) fn write_pages_at_thresholds(settings: &Config) {
    if settings.dump_dir.is_some() {
        ALERTS.at_threshold(|device, threshold| {
            guarded((), || {
                let folder = config().and_then(|config| config.dump_dir.as_deref());
                if let (Some(heap), Some(folder)) = (current(), folder) {
                    crate::dump::page::of_threshold(heap, device, threshold, folder);
                }
            });
        });
    }
}
