//! Events behind frees.

use crate::driver::EventHandle;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// An event behind the frees of an epoch.
#[derive(Clone, Copy)]
pub(crate) struct Fence {
    pub(crate) epoch: u64,
    pub(crate) event: EventHandle,
    /// Of two fences the lower was recorded first.
    pub(crate) age: u64,
    pub(crate) at: Instant,
}

/// An event that is not yet seen done, as it looks to a stream that could wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unfinished {
    /// The stream on which it is recorded.
    pub(crate) stream: u32,
    /// The epoch that it closes.
    pub(crate) epoch: u64,
    /// The work of its stream that comes before it and is not known to be done, measured in the
    /// events that were recorded on the device meanwhile.
    pub(crate) ahead: u64,
    /// Whether the waiting stream has as much work of its own before it: then it need not stand
    /// idle for the event, as far as two streams are equally fast.
    pub(crate) is_near: bool,
}

/// Events recorded and not yet seen done, and spare ones.
#[derive(Default)]
pub(crate) struct Fences {
    /// By stream, oldest first. In the order of numbers, so that a replay asks its events in the
    /// same order each time.
    pub(crate) pending: BTreeMap<u32, VecDeque<Fence>>,
    /// By the age of a fence of [`crate::order::streams::ALL_STREAMS`]: the epochs of dead streams
    /// that it stands for too.
    pub(crate) dead: HashMap<u64, Vec<(u32, u64)>>,
    pub(crate) spare: Vec<EventHandle>,
    /// By stream: the age of its last event that was seen done.
    pub(crate) reached: HashMap<u32, u64>,
    /// The number from which on the next poll asks.
    pub(crate) next: u32,
}

/// The longest that an event was seen unfinished, nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Lag {
    of_this_step: AtomicU64,
    of_the_last: AtomicU64,
}

impl Lag {
    /// An event was not done so long after it had been recorded.
    pub(crate) fn note(&self, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        self.of_this_step.fetch_max(age, Ordering::Relaxed);
    }

    pub(crate) fn end_step(&self) {
        let ended = self.of_this_step.swap(0, Ordering::Relaxed);
        self.of_the_last.store(ended, Ordering::Relaxed);
    }

    /// The host was at least so far ahead, in this step or the one before; nanoseconds.
    pub(crate) fn nanoseconds(&self) -> u64 {
        let last = self.of_the_last.load(Ordering::Relaxed);
        self.of_this_step.load(Ordering::Relaxed).max(last)
    }
}
