//! The history of blocks, while somebody asks for it: what torch calls `_record_memory_history`.
//!
//! Off, it costs nothing: it hangs on the branches that requests take for special reasons anyway.
//! On, each malloc and free adds an entry under one lock, which nobody takes with a lock of the
//! heap held. Where a block was allocated in the program is told by a number, the thread's
//! *context*, which the loader sets around the calls that it knows of (a loader for Python cannot
//! be asked from here: requests come with and without Python's global lock). A free is noted before
//! it is done, and a malloc after, so that the entries of one address are in order whatever threads
//! do.

use crate::journal::{Entry, Latest, now};
use crate::report::cause::Report;
use crate::sync::Mutex;
use std::collections::HashMap;

/// A block that was allocated while the history was on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Where it starts.
    pub address: u64,
    /// Its device.
    pub device: u32,
    /// See [`crate::journal::set_context`].
    pub context: u64,
}

/// All that is known.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// The entries, by time.
    pub entries: Vec<Entry>,
    /// Entries that there was no room for.
    pub lost: u64,
    /// Where the live blocks came from, as far as that is known.
    pub origins: Vec<Origin>,
}

/// Mallocs between two looks at what waits, at least.
pub(crate) const LOOK_EVERY: usize = 256;

/// What is kept.
#[derive(Default)]
pub(crate) struct History(pub(crate) Mutex<Books>);

#[derive(Default)]
pub(crate) struct Books {
    pub(crate) latest: Latest,
    /// Live blocks: device and context, by address.
    pub(crate) origins: HashMap<u64, (u32, u64)>,
    /// Blocks freed by the program that wait for streams: the entry of their end, by address.
    pub(crate) waiting: HashMap<u64, Entry>,
    /// Mallocs since the waits were last looked at.
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
