//! A sequence lock with one writer at a time: writers never wait, readers retry.
//!
//! After Hans Boehm, "Can seqlocks get along with programming language memory models?" (MSPC 2012):
//! the data are atomics read and written relaxed; fences order them against the sequence.
#![deny(unsafe_code)]

use crate::sync::{AtomicU64, Ordering, fence, pause};

/// Waits for a writer: a moment at first; then yields the processor, since the writer may have been
/// preempted in a write; then for as long as schedulers take.
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
/// The writer is the holder of the lock that guards the data (a shard's, a device's); readers never
/// write it. A sequence that stays odd belongs to a writer killed half-way.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Sequence(AtomicU64);

impl Sequence {
    /// Runs `body`; readers see its relaxed stores to the guarded atomics all together. Two
    /// instructions on x86-64 besides `body`. The caller is the only writer.
    #[inline(always)]
    pub fn write<T>(&self, body: impl FnOnce() -> T) -> T {
        let even = self.0.load(Ordering::Relaxed);
        self.0.store(even.wrapping_add(1), Ordering::Relaxed);
        // Orders the odd sequence before the data, for a reader that sees any of the new data.
        fence(Ordering::Release);
        let value = body();
        // Not `even + 2`: a second read lets the compiler use one `inc` on memory.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        value
    }

    /// Runs `body`; its relaxed loads of the guarded atomics count only if no writer came between.
    /// `None` after `attempts` failures: torn, by a busy writer or one killed mid-write
    /// ([`Sequence::is_odd`] shows which is likelier).
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

    /// As [`Sequence::read`], for the data of two sequences at one moment.
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

    /// Writes so far, counting one under way (or cut short by the writer's end).
    pub fn writes(&self) -> u64 {
        self.0.load(Ordering::Relaxed).div_ceil(2)
    }

    /// Whether a writer is between its first and its last store (or was when killed).
    pub fn is_odd(&self) -> bool {
        self.0.load(Ordering::Relaxed) & 1 == 1
    }
}
