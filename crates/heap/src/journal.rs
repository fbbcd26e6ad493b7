//! The latest entries of the memory history, each with its time and the calling thread's context. A
//! supply logs its segments here too.

use crate::driver::DeviceId;
use std::cell::Cell;
use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

thread_local! {
    // A plain cell without a destructor, so late calls on a dying thread are safe.
    static CONTEXT: Cell<u64> = const { Cell::new(0) };
}

/// Sets the context of the calling thread's later requests (0: none); returns the previous one.
pub fn set_context(context: u64) -> u64 {
    CONTEXT.with(|cell| cell.replace(context))
}

pub(crate) fn context() -> u64 {
    CONTEXT.with(Cell::get)
}

/// Nanoseconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

/// The event of an entry.
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
    /// Pages are mapped at this address now: new ones, or from elsewhere.
    SegmentMap = 6,
    /// Pages are mapped at this address no more.
    SegmentUnmap = 7,
}

/// An entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The event.
    pub action: Action,
    /// The device.
    pub device: u32,
    /// The address; of an out-of-memory, what the driver says is free (bytes).
    pub address: u64,
    /// The size: of a block, the bytes asked for, as torch notes them; of an out-of-memory, those
    /// rounded up to 512 B.
    pub bytes: u64,
    /// The stream's handle.
    pub stream: u64,
    /// Nanoseconds since 1970.
    pub time: u64,
    /// See [`set_context`].
    pub context: u64,
    /// Of a free: the context of its block's allocation, if noted; else 0.
    pub origin: u64,
}

/// The latest entries, up to a limit.
#[derive(Debug, Default)]
pub(crate) struct Latest {
    most: usize,
    entries: VecDeque<Entry>,
    lost: u64,
}

impl Latest {
    /// The limit; 0: no entry is kept or counted.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Sets the limit. Entries stay, as far as they fit.
    pub(crate) fn keep(&mut self, most: usize) {
        self.most = most;
        self.make_room(most);
    }

    pub(crate) fn add(&mut self, entry: Entry) {
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

    /// The entries, by time, and how many older ones made room for them.
    pub(crate) fn told(&self) -> (impl Iterator<Item = Entry> + use<'_>, u64) {
        (self.entries.iter().copied(), self.lost)
    }
}

/// The latest entries of one device.
#[derive(Debug, Default)]
pub(crate) struct SegmentLog {
    device: DeviceId,
    latest: Latest,
}

impl SegmentLog {
    /// A log that notes nothing yet.
    pub(crate) fn new(device: DeviceId) -> Self {
        Self { device, ..Self::default() }
    }

    /// Notes the latest `most` from now on (0: nothing). Earlier notes stay, unless `clear` is set.
    pub(crate) fn keep(&mut self, most: usize, clear: bool) {
        if clear {
            self.latest = Latest::default();
        }
        self.latest.keep(most);
    }

    /// Notes that `bytes` from `address` on came or went.
    #[inline]
    pub(crate) fn note(&mut self, action: Action, address: u64, bytes: u64) {
        if self.latest.most() > 0 {
            self.add(action, address, bytes);
        }
    }

    #[cold]
    fn add(&mut self, action: Action, address: u64, bytes: u64) {
        let (device, time, context) = (self.device, now(), context());
        self.latest.add(Entry {
            action,
            device,
            address,
            bytes,
            stream: 0,
            time,
            context,
            origin: 0,
        });
    }

    /// See [`Latest::told`].
    pub(crate) fn told(&self) -> (impl Iterator<Item = Entry> + use<'_>, u64) {
        self.latest.told()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(log: &SegmentLog) -> (Vec<u64>, u64) {
        let (entries, lost) = log.told();
        (entries.map(|entry| entry.address).collect(), lost)
    }

    #[test]
    fn the_latest_are_kept_and_the_others_counted() {
        let mut log = SegmentLog::new(0);
        log.note(Action::SegmentMap, 1, 512);
        assert_eq!(told(&log), (vec![], 0), "nobody asked for it");
        log.keep(2, false);
        (1..=3).for_each(|address| log.note(Action::SegmentMap, address, 512));
        assert_eq!(told(&log), (vec![2, 3], 1));
        log.keep(1, false);
        assert_eq!(told(&log), (vec![3], 2));
        log.keep(2, true);
        assert_eq!(told(&log), (vec![], 0));
    }
}
