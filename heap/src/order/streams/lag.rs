//! How far the host has run ahead of the device.
//!
//! An event that is not done so long after it was recorded proves it: the device has not come to
//! what the host enqueued then. Events are asked only when memory is needed and at the end of a
//! step, so it may be more, and is never less.
//!
//! | atomic | who writes | from, to |
//! |---|---|---|
//! | `of_this_step` | who asks events | raised (`fetch_max`); 0 when a step begins |
//! | `of_the_last` | who ends a step | what `of_this_step` was |
//!
//! Each is a figure of its own, read by nobody who decides anything: relaxed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest that an event was seen unfinished, nanoseconds.
#[derive(Debug, Default)]
pub struct Lag {
    of_this_step: AtomicU64,
    of_the_last: AtomicU64,
}

impl Lag {
    /// An event was not done so long after it had been recorded.
    pub(super) fn note(&self, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        self.of_this_step.fetch_max(age, Ordering::Relaxed);
    }

    /// A step is over.
    pub fn end_step(&self) {
        let ended = self.of_this_step.swap(0, Ordering::Relaxed);
        self.of_the_last.store(ended, Ordering::Relaxed);
    }

    /// The host was at least so far ahead, in this step or the one before; nanoseconds.
    pub fn nanoseconds(&self) -> u64 {
        let last = self.of_the_last.load(Ordering::Relaxed);
        self.of_this_step.load(Ordering::Relaxed).max(last)
    }
}
