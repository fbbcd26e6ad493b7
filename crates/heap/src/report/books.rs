//! The books of the block history, kept on demand: torch's `_record_memory_history`.
//!
//! Off, the history costs nothing: it hangs on branches that requests take for special reasons
//! anyway. On, each malloc and free adds an entry under one lock, which no thread takes with a lock
//! of the heap held. A number, the thread's *context*, says where in the program a block was
//! allocated. The loader sets it around the calls that it knows; a Python loader cannot be asked
//! from here, because requests come with and without Python's global lock. A free is noted before
//! it is done and a malloc after, so that the entries of one address are in order whatever threads
//! do.
//!
//! Segments that come from the driver, go back or move are noted where that happens, under the
//! central lock, in a log of their own ([`crate::journal::SegmentLog`]): the history's lock is
//! taken before the central one and never behind it. `Heap::history` merges both by time. A page
//! that moves is two entries: it leaves one address, then it is at another.

use crate::journal::{Entry, Latest, now};
use crate::report::cause::Report;
use crate::sync::Mutex;
use std::collections::HashMap;

/// A block allocated while the history was on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Its address.
    pub address: u64,
    /// Its device.
    pub device: u32,
    /// See [`crate::journal::set_context`].
    pub context: u64,
}

/// The history so far.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// The entries, by time.
    pub entries: Vec<Entry>,
    /// Entries dropped for want of room.
    pub lost: u64,
    /// The origins of the live blocks, as far as known.
    pub origins: Vec<Origin>,
}

/// The least number of mallocs between two looks at waiting blocks.
pub(crate) const LOOK_EVERY: usize = 256;

#[derive(Default)]
pub(crate) struct History(pub(crate) Mutex<Books>);

#[derive(Default)]
pub(crate) struct Books {
    pub(crate) latest: Latest,
    /// Live blocks: device and context, by address.
    pub(crate) origins: HashMap<u64, (u32, u64)>,
    /// Blocks freed by the program that wait for streams: the entry for the end of the wait, by
    /// address.
    pub(crate) waiting: HashMap<u64, Entry>,
    /// Mallocs since the last look at waiting blocks.
    pub(crate) since: usize,
    pub(crate) latest_oom: Option<Report>,
}

impl Books {
    pub(crate) fn end_wait(&mut self, address: u64) {
        if let Some(entry) = self.waiting.remove(&address) {
            self.latest.add(Entry { time: now(), ..entry });
        }
    }
}
