//! What came from the driver, went back to it, or is mapped elsewhere now, while somebody keeps a
//! history.
//!
//! It is noted where it happens, under the central lock, since the history's own lock is taken
//! before that one and never behind it; who asks for the history puts the two in the order of time.
//! A page that moves is told as two entries: it leaves one address, then it is at another.

use crate::driver::DeviceId;
use crate::report::entry::Latest;
use crate::report::entry::{Action, Entry, context, now};

/// The latest entries of one device.
#[derive(Debug, Default)]
pub struct SegmentLog {
    device: DeviceId,
    latest: Latest,
}

impl SegmentLog {
    /// Notes nothing yet.
    pub fn new(device: DeviceId) -> Self {
        Self { device, ..Self::default() }
    }

    /// Notes the latest `most` from now on (0: nothing). What was noted before stays, unless
    /// `clear` says otherwise.
    pub fn keep(&mut self, most: usize, clear: bool) {
        if clear {
            self.latest = Latest::default();
        }
        self.latest.keep(most);
    }

    /// Notes that `bytes` from `address` on came or went.
    #[inline]
    pub fn note(&mut self, action: Action, address: u64, bytes: u64) {
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
    pub fn told(&self) -> (impl Iterator<Item = Entry> + use<'_>, u64) {
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
