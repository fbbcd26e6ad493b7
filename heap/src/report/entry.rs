//! An entry of a history, and what each is noted with: the time, and the calling thread's context.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

thread_local! {
    // A plain cell without a destructor, so late calls on a dying thread are safe.
    static CONTEXT: Cell<u64> = const { Cell::new(0) };
}

/// What the calling thread's requests are noted with from now on; 0: nothing. Answers what it was.
pub fn set_context(context: u64) -> u64 {
    CONTEXT.with(|cell| cell.replace(context))
}

/// See [`set_context`].
pub(crate) fn context() -> u64 {
    CONTEXT.with(Cell::get)
}

/// Nanoseconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Action {
    /// A block was handed out.
    Alloc = 0,
    /// The program freed a block.
    FreeRequested = 1,
    /// The block can be used again: at once, or when the streams that used it are past it.
    FreeCompleted = 2,
    /// Memory came from the driver, in one piece with an address of its own: a span.
    SegmentAlloc = 3,
    /// A span went back to the driver.
    SegmentFree = 4,
    /// A request could not be met.
    OutOfMemory = 5,
    /// Pages are at this address now: new ones, or from elsewhere.
    SegmentMap = 6,
    /// Pages are at this address no more.
    SegmentUnmap = 7,
}

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What happened.
    pub action: Action,
    /// The device.
    pub device: u32,
    /// Where; of an out-of-memory, what the driver says is free (bytes).
    pub address: u64,
    /// How much: of a block, what was asked for, as torch notes it; of an out-of-memory, that
    /// rounded up to 512 B.
    pub bytes: u64,
    /// The stream's handle.
    pub stream: u64,
    /// Nanoseconds since 1970.
    pub time: u64,
    /// See [`set_context`].
    pub context: u64,
    /// Of a free: the context of its block's allocation, where that was noted; else 0.
    pub origin: u64,
}

/// At most so many entries, the latest.
#[derive(Debug, Default)]
pub struct Latest {
    most: usize,
    entries: VecDeque<Entry>,
    lost: u64,
}

impl Latest {
    /// How many are kept; 0: none, and none is counted.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Keeps the latest `most` from now on. What there is stays, as far as it fits.
    pub fn keep(&mut self, most: usize) {
        self.most = most;
        self.make_room(most);
    }

    /// Adds one.
    pub fn add(&mut self, entry: Entry) {
        if self.most > 0 {
            self.make_room(self.most - 1);
            self.entries.push_back(entry);
        }
    }

    fn make_room(&mut self, left: usize) {
        while self.entries.len() > left {
            self.entries.pop_front();
            self.lost += 1;
        }
    }

    /// What is known, by time, and how many entries made room for it.
    pub fn told(&self) -> (impl Iterator<Item = Entry> + use<'_>, u64) {
        (self.entries.iter().copied(), self.lost)
    }
}
