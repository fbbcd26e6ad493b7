//! Events behind frees.

use crate::driver::EventHandle;
use crate::order::pending::Work;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// An event behind the frees of an epoch.
#[derive(Clone, Copy)]
pub(crate) struct Fence {
    pub(crate) work: Work,
    pub(crate) event: EventHandle,
    /// The lower of two was recorded first.
    pub(crate) age: u64,
    pub(crate) at: Instant,
}

/// An event not yet seen done, from the view of a stream that could wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unfinished {
    /// Its stream.
    pub(crate) stream: u32,
    /// The work behind which it was recorded.
    pub(crate) work: Work,
    /// Work of its stream before it that is not known to be done, measured in the events that were
    /// recorded on the device meanwhile.
    pub(crate) ahead: u64,
    /// Whether the waiting stream has as much work of its own before the wait: then it need not
    /// idle for the event, if two streams are equally fast.
    pub(crate) is_near: bool,
}

/// Events recorded and not yet seen done, and spare ones.
#[derive(Default)]
pub(crate) struct Fences {
    /// By stream, oldest first. Ordered by number, so that a replay asks its events in the same
    /// order each time.
    pub(crate) pending: BTreeMap<u32, VecDeque<Fence>>,
    /// By the age of a fence of [`crate::order::streams::ALL_STREAMS`]: the epochs of dead streams
    /// that it covers too.
    pub(crate) dead: HashMap<u64, Vec<(u32, u64)>>,
    pub(crate) spare: Vec<EventHandle>,
    /// By stream: the age of its last event seen done.
    pub(crate) reached: HashMap<u32, u64>,
    /// The number at which the next poll starts.
    pub(crate) next: u32,
}

/// The longest that an event was seen unfinished, nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Lag {
    of_this_step: AtomicU64,
    of_the_last: AtomicU64,
}

impl Lag {
    /// Notes that an event was not done `age` after its record.
    pub(crate) fn note(&self, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        self.of_this_step.fetch_max(age, Ordering::Relaxed);
    }

    pub(crate) fn end_step(&self) {
        let ended = self.of_this_step.swap(0, Ordering::Relaxed);
        self.of_the_last.store(ended, Ordering::Relaxed);
    }

    /// How far ahead the host was at least, in this step or the last, nanoseconds.
    pub(crate) fn nanoseconds(&self) -> u64 {
        let last = self.of_the_last.load(Ordering::Relaxed);
        self.of_this_step.load(Ordering::Relaxed).max(last)
    }
}
