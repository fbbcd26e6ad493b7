//! What an out-of-memory leaves behind, where the configuration wants it.
#![deny(unsafe_code)]

use super::{config, guarded, run_file};
use crate::driver::StreamHandle;
use crate::heap::Heap;
use crate::heap::report::oom::Report;

/// An out-of-memory becomes the program's: it is counted, dumped, and noted in the run's file and
/// the history.
pub(super) fn note(heap: &Heap, report: &mut Report, stream: StreamHandle) {
    heap.note_out_of_memory(report, stream);
    dump(heap, report);
    run_file::at_an_out_of_memory(heap);
}

/// Writes the dumps ([`crate::dump`]). Whatever happens there, the program gets its out-of-memory.
fn dump(heap: &Heap, report: &Report) {
    guarded((), || {
        heap.flush_trace();
        if let Some(folder) = config().and_then(|config| config.dump_dir.as_deref()) {
            crate::dump::out_of_memory(heap, report, folder);
        }
    });
}
