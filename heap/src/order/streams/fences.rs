//! Events behind frees.

use crate::driver::EventHandle;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

/// An event behind the frees of an epoch.
#[derive(Clone, Copy)]
pub(super) struct Fence {
    pub(super) epoch: u64,
    pub(super) event: EventHandle,
    /// Of two fences the lower was recorded first.
    pub(super) age: u64,
    /// When it was recorded.
    pub(super) at: Instant,
}

/// An event that is not yet seen done, as it looks to a stream that could wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The stream on which it is recorded.
    pub stream: u32,
    /// The epoch that it closes.
    pub epoch: u64,
    /// The work of its stream that comes before it and is not known to be done, measured in the
    /// events that were recorded on the device meanwhile.
    pub ahead: u64,
    /// Whether the waiting stream has as much work of its own before it: then it need not stand
    /// idle for the event, as far as two streams are equally fast.
    pub is_near: bool,
}

/// Events recorded and not yet seen done, and spare ones.
#[derive(Default)]
pub(super) struct Fences {
    /// By stream, oldest first. In the order of numbers, so that a replay asks its events in the
    /// same order each time.
    pub(super) pending: BTreeMap<u32, VecDeque<Fence>>,
    /// By the age of a fence of [`super::ALL_STREAMS`]: the epochs of dead streams that it stands
    /// for too.
    pub(super) dead: HashMap<u64, Vec<(u32, u64)>>,
    pub(super) spare: Vec<EventHandle>,
    /// By stream: the age of its last event that was seen done.
    pub(super) reached: HashMap<u32, u64>,
    /// The number from which on the next poll asks.
    pub(super) next: u32,
}
