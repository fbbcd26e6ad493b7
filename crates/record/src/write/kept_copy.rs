//! The copy of a record at an out-of-memory, and which of several is kept.
#![deny(unsafe_code)]

use std::fs::File;
use std::time::{Duration, Instant};

/// A copy of the record at an out-of-memory.
pub struct KeptCopy {
    /// The copy.
    pub file: File,
    /// When it was taken, and how long the copying took.
    pub at: Instant,
    pub took: Duration,
    /// Live bytes and steps then, over all devices.
    pub live: u64,
    pub steps: u64,
}

/// Copies take at most one part in so many of a program's time: it may meet thousands of refusals.
const COPYING: u32 = 10;
/// How long the exception of a refusal may take to free memory in which others are refused too.
const UNWINDING: Duration = Duration::from_secs(5);

impl KeptCopy {
    /// Whether a refusal takes the place of this one. The latest describes how the program ends, so
    /// it does, unless it belongs to the same failure: another thread is refused while the
    /// exception of this one empties the heap (less than half is live, soon after, in the same
    /// step).
    pub fn gives_way(&self, now: Instant, live: u64, steps: u64) -> bool {
        let after = now.duration_since(self.at);
        let goes_on = steps != self.steps || after >= UNWINDING;
        after >= self.took * COPYING && (goes_on || live >= self.live / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_refusal_is_kept_but_none_that_comes_of_the_failure_before_it() {
        let at = Instant::now();
        let file = tempfile::tempfile().expect("a file");
        let took = Duration::from_millis(5);
        let kept = KeptCopy { file, at, took, live: 1000, steps: 7 };
        let after = |seconds: f64, live, steps| {
            kept.gives_way(at + Duration::from_secs_f64(seconds), live, steps)
        };
        // A batch that is halved until it fits: each refusal takes the place of the one before.
        assert!(after(0.2, 1000, 7) && after(0.2, 700, 7));
        // A second thread is refused while the exception of the first frees the heap.
        assert!(!after(0.2, 100, 7) && !after(4.0, 100, 7));
        // The program went on: by a step, or for longer than an exception takes.
        assert!(after(0.2, 100, 8) && after(6.0, 100, 7));
        // Thousands of refusals cost a tenth of the time at most.
        assert!(!after(0.04, 1000, 7));
    }
}
