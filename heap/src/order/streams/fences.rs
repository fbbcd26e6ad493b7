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
    /// The number from which on the next poll asks.
    pub(super) next: u32,
}
