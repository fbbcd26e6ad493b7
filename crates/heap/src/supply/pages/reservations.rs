//! Address space of `backing:stitch`: reserved in steps, returned when nothing is mapped in it, and
//! never crossed by one driver call.
//!
//! Addresses are finite (47 bits, fewer under some hypervisors). The pool of a CUDA graph or of a
//! name begins with [`STEP`], and gets as much again, or twice a longer request, whenever no
//! unmapped range has room: there may be thousands of pools. The few ordinary spaces take twice the
//! device at once, as long as the driver has that: free memory cannot be joined over the end of a
//! reservation, and in steps the same traces hold more (docs/decisions/moving-pages.md).
//!
//! A reservation is never extended and never joined with its neighbour: blocks lie inside one, and
//! a driver call that maps, unmaps or grants access stays inside one ([`Reservations::rows`]).
//!
//! ```text
//!   reservation   (the driver's) -- a space has no room -->  has unmapped ranges, pages, stale
//!                                                            aliases
//!                 -- all of it is unmapped -->  idle
//!                 -- trim, the end of its pool, want of addresses -->  (the driver's)
//! ```

use crate::small::size_class::{PAGE, round_up};
use std::collections::BTreeMap;
use std::ops::Range;

/// One step of reserved address space (bytes), unless a request is longer than half of it.
pub(crate) const STEP: u64 = 1 << 30;

/// Adjacent mappings that one driver call may cover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The addresses of all mappings of the row.
    pub(crate) range: Range<u64>,
    /// Each mapping, by address.
    pub(crate) views: Vec<Range<u64>>,
}

impl Row {
    pub(crate) fn of(view: Range<u64>) -> Self {
        Self { range: view.clone(), views: vec![view] }
    }
}

#[derive(Default)]
pub(crate) struct Reservations {
    /// First byte -> one past the last.
    ranges: BTreeMap<u64, u64>,
}

impl Reservations {
    /// Adds address space from the driver.
    pub(crate) fn add(&mut self, address: u64, bytes: u64) {
        self.ranges.insert(address, address + bytes);
    }

    /// Removes address space that went back.
    pub(crate) fn remove(&mut self, address: u64) {
        self.ranges.remove(&address);
    }

    /// One past the last byte of the reservation around `address`, if any.
    pub(crate) fn end_of(&self, address: u64) -> Option<u64> {
        let (_, &end) = self.ranges.range(..=address).next_back()?;
        (address < end).then_some(end)
    }

    /// Groups the mappings `views`, given by address, into the fewest rows: a row has no hole, and
    /// stays inside one reservation even if the next begins where it ends. A view that is to stand
    /// `alone` is a row of its own.
    pub(crate) fn rows(&self, views: impl IntoIterator<Item = (Range<u64>, bool)>) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        // Whether the last row may still grow, and the end of its reservation.
        let (mut open, mut end) = (false, 0);
        for (view, alone) in views {
            match rows.last_mut() {
                Some(row) if open && !alone && row.range.end == view.start && view.end <= end => {
                    row.range.end = view.end;
                    row.views.push(view);
                }
                _ => {
                    open = !alone;
                    if view.start >= end {
                        end = self.end_of(view.start).unwrap_or(0);
                    }
                    rows.push(Row::of(view));
                }
            }
        }
        rows
    }
}

pub(crate) fn whole_pages(bytes: u64) -> u64 {
    round_up(bytes, PAGE).unwrap_or(u64::MAX / PAGE * PAGE)
}

/// The least reservation for `bytes` without room, if the driver has it.
pub(crate) fn step_for(bytes: u64) -> u64 {
    let least = whole_pages(bytes);
    least.checked_mul(2).map_or(least, |twice| twice.max(STEP))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(rows: Vec<Row>) -> Vec<(Range<u64>, usize)> {
        rows.into_iter().map(|row| (row.range, row.views.len())).collect()
    }

    #[test]
    fn a_row_ends_where_its_reservation_does() {
        let mut reservations = Reservations::default();
        reservations.add(0x1000, 0x1000);
        reservations.add(0x2000, 0x1000);
        let views =
            [0x1000..0x1800, 0x1800..0x2000, 0x2000..0x2400, 0x2800..0x2c00, 0x2c00..0x3000];
        let rows = reservations.rows(views.map(|view| (view, false)));
        assert_eq!(joined(rows), [(0x1000..0x2000, 2), (0x2000..0x2400, 1), (0x2800..0x3000, 2)]);
        assert_eq!(reservations.end_of(0x2fff), Some(0x3000));
        assert_eq!(reservations.end_of(0x3000), None);
    }

    #[test]
    fn a_step_is_a_gibibyte_or_twice_a_longer_request_in_whole_pages() {
        assert_eq!(step_for(1), STEP);
        assert_eq!(step_for(STEP / 2), STEP);
        assert_eq!(step_for(STEP / 2 + 1), STEP + 2 * PAGE);
        assert!(step_for(u64::MAX).is_multiple_of(PAGE));
    }

    #[test]
    fn what_is_to_stand_alone_joins_nobody() {
        let mut reservations = Reservations::default();
        reservations.add(0, 0x1000);
        let views = [(0..1, false), (1..2, true), (2..3, false), (3..4, false)];
        assert_eq!(joined(reservations.rows(views)), [(0..1, 1), (1..2, 1), (2..4, 2)]);
    }
}
