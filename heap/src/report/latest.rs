//! The latest entries of a history, in a bounded queue: older ones make room, and are counted.

use crate::report::entry::Entry;
use std::collections::VecDeque;

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
