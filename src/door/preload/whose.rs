//! Classifies requests and pointers, for the runtime and the driver: ours or the real library's.

use crate::door::process::{current as heap_in_use, guarded};
use crate::heap::Heap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows start at multiples of this (bytes), as the real cudaMallocPitch has it: the largest texture
/// alignment.
pub(crate) const PITCH: usize = 512;

/// The owner of a pointer to be freed.
pub enum Whose {
    /// A live block of ours, on this device.
    Ours(&'static Heap, u32),
    /// In memory of ours, but no live block starts there: freed twice, or never handed out. (The
    /// real function might take it for the span around it.)
    OursAndWrong,
    /// Not in our memory.
    NotOurs,
}

/// Asks the heap. Logs a pointer that is ours and wrong: `call` will return `error`.
pub fn whose(address: u64, call: &str, error: &str) -> Whose {
    let Some(heap) = heap_in_use().filter(|_| address != 0) else { return Whose::NotOurs };
    if let Some(block) = heap.owns(address) {
        return Whose::Ours(heap, block.device);
    }
    if heap.base_of(address).is_none() {
        return Whose::NotOurs;
    }
    log::error!(
        "{call}({address:#x}): no live block starts there (freed before, or an address inside a \
         block); nothing is freed, and the call returns {error}"
    );
    Whose::OursAndWrong
}

/// Whether a pointer freed after the exit handlers is ours: then nothing is left to do.
pub fn is_ours_at_exit(address: u64) -> bool {
    guarded(false, || {
        let heap = heap_in_use().filter(|_| address != 0);
        heap.is_some_and(|heap| heap.owns(address).is_some() || heap.base_of(address).is_some())
    })
}

/// Logs a request that the heap could not serve, and `who` does; the first few times, then ever
/// more rarely.
#[cold]
pub fn complain(reason: &str, who: &str) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    if count <= 10 || count.is_power_of_two() {
        log::warn!("{reason}. The CUDA {who} serves this request, {count} so far");
    }
}
