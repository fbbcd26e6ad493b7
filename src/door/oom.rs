//! What an out-of-memory leaves behind, where the configuration wants it.
#![deny(unsafe_code)]

use super::{config, guarded, run_file};
use crate::driver::StreamHandle;
use crate::heap::Heap;
use crate::heap::report::oom::Report;

/// An out-of-memory becomes the program's: it is counted, dumped, and noted in the run's file and
/// the history; and it learns which lines of the program are behind it.
pub(super) fn note(heap: &Heap, report: &mut Report, stream: StreamHandle) {
    heap.note_out_of_memory(report, stream);
    report.conclusion = explain(heap, report);
    run_file::at_an_out_of_memory(heap);
}

/// Writes the dumps ([`crate::dump`]); the conclusion. Whatever happens there, the program gets its
/// out-of-memory.
fn explain(heap: &Heap, report: &Report) -> Vec<String> {
    guarded(Vec::new(), || {
        heap.flush_trace();
        // How the run went, up to now.
        heap.sample();
        let folder = config().and_then(|config| config.dump_dir.as_deref());
        crate::dump::out_of_memory(heap, report, folder)
    })
}
