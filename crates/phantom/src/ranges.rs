//! Free ranges of an address space: best fit by size, coalescing by address.

use std::collections::{BTreeMap, BTreeSet};

/// A set of disjoint free ranges. In a timed set each carries the virtual time from which any
/// stream may use it.
#[derive(Debug, Default)]
pub(crate) struct FreeRanges {
    /// Keep an index of the times.
    timed: bool,
    by_address: BTreeMap<u64, (u64, u64)>,
    by_size: BTreeSet<(u64, u64)>,
    by_time: BTreeSet<(u64, u64)>,
}

/// A place for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// The free range, whole.
    pub(crate) range: (u64, u64),
    /// The start of the request in it.
    pub(crate) start: u64,
}

/// Ranges tried for an aligned start, by best size, before the search takes a range that fits at
/// any alignment.
const ALIGNED_TRIES: usize = 32;

impl FreeRanges {
    /// A set whose ranges become ready in time ([`FreeRanges::take_ready`]).
    pub(crate) fn timed() -> Self {
        Self { timed: true, ..Self::default() }
    }

    fn put(&mut self, address: u64, length: u64, time: u64) {
        self.by_address.insert(address, (length, time));
        self.by_size.insert((length, address));
        if self.timed {
            self.by_time.insert((time, address));
        }
    }

    fn pull(&mut self, address: u64) -> Option<(u64, u64)> {
        let (length, time) = self.by_address.remove(&address)?;
        self.by_size.remove(&(length, address));
        if self.timed {
            self.by_time.remove(&(time, address));
        }
        Some((length, time))
    }

    /// Adds a range, joins it with its neighbours and returns the joined range.
    pub(crate) fn insert(&mut self, address: u64, length: u64, time: u64) -> (u64, u64) {
        let (mut start, mut end, mut when) = (address, address + length, time);
        if let Some((&left, &(left_length, _))) = self.by_address.range(..address).next_back()
            && left + left_length == address
            && let Some((_, left_time)) = self.pull(left)
        {
            start = left;
            when = when.max(left_time);
        }
        if let Some((right_length, right_time)) = self.pull(end) {
            end += right_length;
            when = when.max(right_time);
        }
        self.put(start, end - start, when);
        (start, end - start)
    }

    /// The best fit for `length` bytes: the smallest range with room for a start in a multiple of
    /// `align`.
    pub(crate) fn best_fit(&self, length: u64, align: u64) -> Option<Fit> {
        let fits = |&(size, address): &(u64, u64)| {
            let start = address.next_multiple_of(align);
            (start + length <= address + size).then_some(Fit { range: (address, size), start })
        };
        self.by_size.range((length, 0)..).take(ALIGNED_TRIES).find_map(fits).or_else(|| {
            let sure = length.checked_add(align)?;
            self.by_size.range((sure, 0)..).next().and_then(fits)
        })
    }

    /// Cuts `length` bytes at `fit.start` out of its range; the rest on both sides stays free.
    pub(crate) fn cut(&mut self, fit: Fit, length: u64) {
        let (address, size) = fit.range;
        let Some((_, time)) = self.pull(address) else { return };
        if fit.start > address {
            self.put(address, fit.start - address, time);
        }
        let end = fit.start + length;
        if end < address + size {
            self.put(end, address + size - end, time);
        }
    }

    /// Takes `bytes` at `address` out of the range that holds them.
    pub(crate) fn take(&mut self, address: u64, bytes: u64) {
        if let Some((&start, &(length, _))) = self.by_address.range(..=address).next_back() {
            self.cut(Fit { range: (start, length), start: address }, bytes);
        }
    }

    /// Length of the range that begins at `address`.
    pub(crate) fn length_at(&self, address: u64) -> Option<u64> {
        self.by_address.get(&address).map(|&(length, _)| length)
    }

    /// Length of the range that ends at `end`.
    pub(crate) fn ending_at(&self, end: u64) -> Option<u64> {
        let (&start, &(length, _)) = self.by_address.range(..end).next_back()?;
        (start + length == end).then_some(length)
    }

    /// The ranges of at least `length` bytes, shortest first.
    pub(crate) fn longer_than(&self, length: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.by_size.range((length, 0)..).map(|&(length, address)| (address, length))
    }

    /// Takes a range whose time has come.
    pub(crate) fn take_ready(&mut self, now: u64) -> Option<(u64, u64)> {
        let &(time, address) = self.by_time.first()?;
        if time > now {
            return None;
        }
        self.pull(address).map(|(length, _)| (address, length))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_address.is_empty()
    }

    /// The largest range, bytes.
    pub(crate) fn largest(&self) -> u64 {
        self.by_size.last().map_or(0, |&(length, _)| length)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.by_address.iter().map(|(&address, &(length, _))| (address, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_join() {
        let mut ranges = FreeRanges::default();
        ranges.insert(0, 10, 0);
        assert_eq!(ranges.insert(20, 5, 0), (20, 5));
        assert_eq!(ranges.insert(10, 10, 0), (0, 25));
    }

    #[test]
    fn the_smallest_range_with_an_aligned_start_wins() {
        let mut ranges = FreeRanges::default();
        ranges.insert(3, 9, 0);
        ranges.insert(101, 20, 0);
        assert_eq!(ranges.best_fit(8, 8), Some(Fit { range: (101, 20), start: 104 }));
        assert_eq!(ranges.best_fit(8, 1), Some(Fit { range: (3, 9), start: 3 }));
        assert_eq!(ranges.best_fit(21, 1), None);
    }

    #[test]
    fn a_joined_range_is_ready_when_its_last_part_is() {
        let mut ranges = FreeRanges::timed();
        ranges.insert(0, 10, 5);
        ranges.insert(10, 10, 9);
        assert_eq!(ranges.take_ready(8), None);
        assert_eq!(ranges.take_ready(9), Some((0, 20)));
        assert!(ranges.is_empty());
    }
}
