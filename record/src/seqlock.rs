//! A sequence lock with one writer at a time: writers never wait, readers retry.
//!
//! After Hans Boehm, "Can seqlocks get along with programming language memory models?" (MSPC 2012):
//! the data are atomics read and written relaxed, the fences order them against the sequence.
#![deny(unsafe_code)]

use super::sync::{AtomicU64, Ordering, fence, pause};

/// Waits for a writer: a moment at first; then the processor is given away, for the writer may have
/// lost its own in the middle of a write; then for as long as schedulers take.
fn wait(attempt: u32) {
    pause();
    #[cfg(not(loom))]
    match attempt {
        0..64 => {}
        64..256 => std::thread::yield_now(),
        _ => std::thread::sleep(std::time::Duration::from_micros(100)),
    }
    #[cfg(loom)]
    let _ = attempt;
}

/// The sequence word of a seqlock.
///
/// ```text
/// state        who changes it         to
/// even (idle)  the writer             odd, before its first store of data
/// odd (busy)   the writer             even, after its last store of data
/// ```
/// The writer is whoever holds the lock that guards the data (a shard's, a device's); readers never
/// write it. A sequence that stays odd belongs to a writer that was killed half-way.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Sequence(AtomicU64);

impl Sequence {
    /// Runs `body`, whose relaxed stores to the guarded atomics then appear to readers all
    /// together. Two instructions on x86-64 besides `body`. The caller is the only writer.
    #[inline(always)]
    pub fn write<T>(&self, body: impl FnOnce() -> T) -> T {
        let even = self.0.load(Ordering::Relaxed);
        self.0.store(even.wrapping_add(1), Ordering::Relaxed);
        // Orders the odd sequence before the data, for a reader that sees any of the new data.
        fence(Ordering::Release);
        let value = body();
        // Not `even + 2`: reading it again lets the compiler use one `inc` on memory.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        value
    }

    /// Runs `body`, whose relaxed loads of the guarded atomics are accepted only if no writer came
    /// between. `None` after `attempts` failures: torn, which is a busy writer or one killed
    /// mid-write ([`Sequence::is_odd`] tells which is likelier).
    pub fn read<T>(&self, attempts: u32, mut body: impl FnMut() -> T) -> Option<T> {
        for attempt in 0..attempts {
            let before = self.0.load(Ordering::Acquire);
            if before & 1 == 0 {
                let value = body();
                // Orders the data's loads before the second look at the sequence.
                fence(Ordering::Acquire);
                if self.0.load(Ordering::Relaxed) == before {
                    return Some(value);
                }
            }
            wait(attempt);
        }
        None
    }

    /// As [`Sequence::read`], of what two sequences guard, at one moment.
    pub fn read_with<T>(
        &self,
        other: &Sequence,
        attempts: u32,
        mut body: impl FnMut() -> T,
    ) -> Option<T> {
        for attempt in 0..attempts {
            let before = self.0.load(Ordering::Acquire);
            if before & 1 == 0
                && let Some(value) = other.read(1, &mut body)
            {
                fence(Ordering::Acquire);
                if self.0.load(Ordering::Relaxed) == before {
                    return Some(value);
                }
            }
            wait(attempt);
        }
        None
    }

    /// Writes so far. While one is under way (or was, when the writer was killed) it is counted.
    pub fn writes(&self) -> u64 {
        self.0.load(Ordering::Relaxed).div_ceil(2)
    }

    /// Whether a writer is (or was, when it was killed) between its first and its last store.
    pub fn is_odd(&self) -> bool {
        self.0.load(Ordering::Relaxed) & 1 == 1
    }
}
