//! What an out-of-memory leaves behind: a line in the log, and a dump where one is wanted.
#![deny(unsafe_code)]

use crate::heap::{Heap, oom::Report};
use std::fmt::Write as _;

/// Dumps written before it is enough: programs that halve their batch until it fits run out of memory on purpose.
const MAX_DUMPS: u64 = 32;

/// Writes the dump to `dump_dir:`, if one is set. Never fails the program: what goes wrong is logged.
pub(super) fn dump(heap: &Heap, report: &Report) {
    let Some(folder) = &heap.config().dump_dir else { return };
    if report.count > MAX_DUMPS {
        return;
    }
    let name = format!("gruyere-oom-{}-gpu{}-{}.txt", std::process::id(), report.device, report.count);
    let path = folder.join(name);
    let mut text = String::new();
    let _ = writeln!(text, "{report}\n");
    text.push_str(&heap.dump());
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
    match written {
        Ok(()) => log::warn!("out of memory: the dump is in {}", path.display()),
        Err(error) => {
            log::error!("out of memory: the dump could not be written to {}: {error}", path.display())
        }
    }
}
