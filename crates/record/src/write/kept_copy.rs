//! The copy of a record at an out-of-memory, and which of several is kept.
#![deny(unsafe_code)]

use std::fs::File;
use std::time::{Duration, Instant};

/// A copy of the record at an out-of-memory.
pub struct KeptCopy {
    /// The copy.
    pub file: File,
    /// When it was taken, and what copying had cost by then, beyond its share of the time.
    pub at: Instant,
    pub cost: Duration,
    /// Live bytes and steps then, over all devices.
    pub live: u64,
    pub steps: u64,
}

/// Copies take at most one part in so many of a program's time, and this beyond: it may meet
/// thousands of refusals, but the one that ends it may follow another within a millisecond.
const COPYING: u32 = 10;
const COPYING_BEYOND: Duration = Duration::from_secs(1);
/// How long the exception of a refusal may take to free memory in which others are refused too.
const UNWINDING: Duration = Duration::from_secs(5);

impl KeptCopy {
    /// Whether a refusal belongs to the same failure as this one: another thread is refused while
    /// the exception of this one empties the heap (less than half is live, soon after, in the same
    /// step). The latest failure describes how the program ends.
    pub fn has_failure_of(&self, now: Instant, live: u64, steps: u64) -> bool {
        let goes_on = steps != self.steps || now.duration_since(self.at) >= UNWINDING;
        !goes_on && live < self.live / 2
    }

    /// Whether copies have taken too much of the program's time for another one.
    pub fn was_costly(&self, now: Instant) -> bool {
        self.cost_at(now) >= COPYING_BEYOND
    }

    /// What copying has cost by `now`, beyond its share of the time.
    pub fn cost_at(&self, now: Instant) -> Duration {
        self.cost.saturating_sub(now.duration_since(self.at) / COPYING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_refusal_is_kept_but_none_that_comes_of_the_failure_before_it() {
        let at = Instant::now();
        let file = tempfile::tempfile().expect("a file");
        let cost = Duration::from_millis(5);
        let kept = KeptCopy { file, at, cost, live: 1000, steps: 7 };
        let is_same = |seconds: f64, live, steps| {
            kept.has_failure_of(at + Duration::from_secs_f64(seconds), live, steps)
        };
        // A batch that is halved until it fits: each refusal takes the place of the one before.
        assert!(!is_same(0.2, 1000, 7) && !is_same(0.2, 700, 7));
        // A second thread is refused while the exception of the first frees the heap.
        assert!(is_same(0.2, 100, 7) && is_same(4.0, 100, 7));
        // The program went on: by a step, or for longer than an exception takes.
        assert!(!is_same(0.2, 100, 8) && !is_same(6.0, 100, 7));
    }

    #[test]
    fn refusals_that_follow_at_once_are_kept_but_thousands_cost_a_tenth_of_the_time() {
        let (at, file) = (Instant::now(), tempfile::tempfile().expect("a file"));
        let cost = Duration::from_millis(50);
        let mut kept = KeptCopy { file, at, cost, live: 1000, steps: 7 };
        // The program catches it, fills the heap again within a millisecond, and ends.
        assert!(!kept.was_costly(at));
        kept.cost = COPYING_BEYOND + Duration::from_millis(10);
        let after = |millis| kept.was_costly(at + Duration::from_millis(millis));
        assert!(after(90) && !after(110));
    }
}
