//! Waits that the program did not ask for: one stream waits on the device for another, to have
//! memory that the other has freed.
//!
//! An event stands behind the frees of an epoch ([`super::streams`]). Once the requesting stream
//! has been made to wait for it, whatever that stream is given to do comes after those frees: they
//! are ordered before it, though nobody knows yet that they are done. So the requesting stream may
//! have that memory at once, and nobody else may. The host never stands still for it.
//!
//! Waits are cheap, moving pages is not: beyond the slack the stream waits for all that brings it
//! memory, until one free run is long enough, and only then do pages move. What is ordered before a
//! stream's work to come without any wait, it has first, whatever `waits:` says
//! ([`crate::device::Device::allocate_ordered`]).
//!
//! In rare programs such a wait closes a cycle across ranks (tests/heap_waits.rs shows one), hence
//! `waits:off|oom|budget`.

use crate::number_set::NumberSet;
use crate::order::streams::ALL_STREAMS;
use std::collections::HashMap;

/// What streams have been made to wait for.
#[derive(Default)]
pub struct Order {
    /// By (waiter, stream): the last epoch of `stream` that is ordered before the waiter's work to
    /// come.
    epochs: HashMap<(u32, u32), u64>,
}

impl Order {
    /// The last epoch of `stream` that the work to come of `waiter` comes after, as far as waits of
    /// ours tell.
    pub fn of(&self, waiter: u32, stream: u32) -> u64 {
        if waiter == stream && stream != ALL_STREAMS {
            u64::MAX
        } else {
            self.epochs.get(&(waiter, stream)).copied().unwrap_or(0)
        }
    }

    pub(crate) fn add(&mut self, waiter: u32, stream: u32, epoch: u64) {
        let known = self.epochs.entry((waiter, stream)).or_default();
        *known = epoch.max(*known);
    }

    /// Whether no stream has been made to wait.
    pub fn is_empty(&self) -> bool {
        self.epochs.is_empty()
    }

    /// Forgets streams whose numbers will be others'.
    pub fn forget(&mut self, numbers: &[u32]) {
        let mut gone = NumberSet::default();
        numbers.iter().for_each(|&number| gone.insert(number));
        self.epochs.retain(|&(waiter, stream), _| !gone.contains(waiter) && !gone.contains(stream));
    }
}
