//! The only place that chooses the atomics: std's, or loom's for model checking of the protocols
//! (`--cfg loom`).
//!
//! Only data shared by readers and writers of the record goes through here. Bookkeeping private to
//! this process (free lists, mutexes) uses std directly.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Signals the processor (or loom) that this thread waits for another.
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
