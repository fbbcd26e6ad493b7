//! The one place that chooses the atomics: std's, or loom's when the protocols are model-checked
//! (`--cfg loom`).
//!
//! Only what readers and writers of the record share goes through here. Bookkeeping private to this
//! process (free lists, mutexes) uses std directly.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Tells the processor (or loom) that this thread waits for another.
#[inline]
pub fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::hint::spin_loop();
}

/// Adds to a word that only this thread writes: a plain read and a plain write, no locked
/// instruction (one `add` on x86-64).
#[inline(always)]
pub fn bump(word: &AtomicU64, n: u64) {
    word.store(word.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}
