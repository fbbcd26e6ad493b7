//! What an out-of-memory leaves behind, where the configuration wants it.
#![deny(unsafe_code)]

use super::{config, guarded};
use crate::heap::Heap;
use crate::heap::report::oom::Report;

/// Writes the dumps ([`crate::dump`]). Whatever happens there, the program gets its out-of-memory.
pub(super) fn dump(heap: &Heap, report: &Report) {
    guarded((), || {
        heap.flush_trace();
        if let Some(folder) = config().and_then(|config| config.dump_dir.as_deref()) {
            crate::dump::out_of_memory(heap, report, folder);
        }
    });
}
