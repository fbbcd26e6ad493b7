//! Address space of `backing:stitch`: reserved in steps, given back where nothing is mapped, and never crossed by one driver call.
//!
//! Addresses are finite (47 bits, less of them under some hypervisors). A pool of a CUDA graph or of a name begins with [`STEP`], and gets as much again, or twice a
//! longer request, whenever no void has room: there may be thousands of pools. The few ordinary spaces take twice the device at once, as long as the driver has that:
//! free memory cannot be joined over the end of a reservation, and in steps the same traces hold more (docs/decisions/moving-pages.md).
//!
//! A reservation is never extended and never joined with its neighbour: blocks lie inside one, and a driver call that maps, unmaps or grants access stays inside one
//! ([`Reservations::rows`]).
//!
//! ```text
//!   reservation   (the driver's) -- a space has no room -->  has voids, pages, shadows
//!                 -- all of it is void -->  idle  -- trim, the end of its pool, want of addresses -->  (the driver's)
//! ```
#![deny(unsafe_code)]

use super::arena::{RegionId, SpaceId};
use super::central::{Central, Growth};
use super::page_table::PageTable;
use super::size_class::{PAGE, round_up};
use crate::driver::{Driver, DriverError, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// What is reserved at a time (bytes), unless a request is longer than half of it.
pub const STEP: u64 = 1 << 30;

/// Mappings next to each other that one driver call may cover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// All of them.
    pub range: Range<u64>,
    /// Each, in the order of addresses.
    pub views: Vec<Range<u64>>,
}

impl Row {
    /// Of one mapping.
    pub fn of(view: Range<u64>) -> Self {
        Self { range: view.clone(), views: vec![view] }
    }
}

/// The reservations of a device.
#[derive(Default)]
pub struct Reservations {
    /// First byte -> one past the last.
    ranges: BTreeMap<u64, u64>,
}

impl Reservations {
    /// The driver gave address space.
    pub fn add(&mut self, address: u64, bytes: u64) {
        self.ranges.insert(address, address + bytes);
    }

    /// The driver has it back.
    pub fn remove(&mut self, address: u64) {
        self.ranges.remove(&address);
    }

    /// One past the last byte of the reservation that `address` lies in; `None`: it lies in none.
    pub fn end_of(&self, address: u64) -> Option<u64> {
        let (_, &end) = self.ranges.range(..=address).next_back()?;
        (address < end).then_some(end)
    }

    /// The mappings `views`, which are in the order of addresses, in as few rows as may be: a row has no hole, and stays inside one reservation though the next may
    /// begin where it ends. A view that is to stand `alone` is a row of its own.
    pub fn rows(&self, views: impl IntoIterator<Item = (Range<u64>, bool)>) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        // Whether more may join the last row, and where the reservation ends.
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

impl Central {
    /// Reserves address space for `space` in which a row of `bytes` fits.
    ///
    /// # Errors
    /// The driver's. Out of memory is want of addresses then, which [`Central::addresses_ran_out`] tells.
    pub(super) fn reserve_addresses(&mut self, ctx: &Growth<'_>, space: SpaceId, bytes: u64) -> Result<()> {
        let (least, step) = (whole_pages(bytes), step_for(bytes));
        let mut result = self.reserve_amply(ctx, space, step);
        if result.as_ref().is_err_and(DriverError::is_out_of_memory) && ctx.steal {
            // Whatever address space is of no use goes back. Unmapping may wait for the device: not while anything captures.
            self.unmap_retired(ctx.driver, ctx.completed);
            for space in self.open_spaces() {
                self.free_addresses(ctx.driver, space);
            }
            result = self.reserve_amply(ctx, space, step);
        }
        if result.as_ref().is_err_and(DriverError::is_out_of_memory) && least < step {
            result = self.reserve(ctx, space, least);
        }
        self.backing.errors += u64::from(result.is_err());
        self.addresses_ran_out = result.as_ref().is_err_and(DriverError::is_out_of_memory);
        result
    }

    /// One more step of address space for `space`, beyond what it cannot do without: a row of `bytes` fits. False: it has twice the device, or
    /// the driver has no more.
    pub(super) fn reserve_more(&mut self, ctx: &Growth<'_>, space: SpaceId, bytes: u64) -> bool {
        self.may_reserve(space) && self.reserve_amply(ctx, space, step_for(bytes)).is_ok()
    }

    /// Reserves what `space` is to have that could do with `step`: the more, the fewer ends of reservations. `step` where the driver has not that.
    fn reserve_amply(&mut self, ctx: &Growth<'_>, space: SpaceId, step: u64) -> Result<()> {
        let had = self.arenas.reserved_bytes(space);
        let is_ordinary = self.spaces.is_ordinary(space);
        let ample = if is_ordinary { whole_pages(2 * self.total_memory) } else { had };
        if ample > step && self.reserve(ctx, space, ample).is_ok() {
            return Ok(());
        }
        self.reserve(ctx, space, step)
    }

    fn reserve(&mut self, ctx: &Growth<'_>, space: SpaceId, bytes: u64) -> Result<()> {
        let result = ctx.driver.address_reserve(self.device, bytes, PAGE);
        self.backing.calls += 1;
        let address = result?;
        if !address.is_multiple_of(PAGE) || !PageTable::reaches(address, bytes) {
            let _ = ctx.driver.address_free(self.device, address, bytes);
            log::error!("the driver reserved {address:#x}, which cannot be managed");
            return Err(DriverError::new("address range", ErrorKind::Other, 0));
        }
        self.arenas.add_reservation(space, address, bytes);
        self.backing.pages.reservations.add(address, bytes);
        self.backing.pages.book.reserve(address, bytes, ctx);
        Ok(())
    }

    /// Whether `space` may have more address space before retired views are unmapped for what they take: up to twice the device.
    pub(super) fn may_reserve(&self, space: SpaceId) -> bool {
        self.arenas.reserved_bytes(space) < 2 * self.total_memory
    }

    /// Gives the address space of a space back in which nothing is mapped.
    pub fn free_addresses(&mut self, driver: &dyn Driver, space: SpaceId) {
        let idle = self.arenas.idle_reservations(space);
        self.give_back(driver, &idle);
    }

    /// As [`Central::free_addresses`], of the spaces that are no capture's, but for the lowest reservation of each: a program that trims at every step
    /// and needs no more than that reserves nothing anew. Reservations that become idle between trims stay: they cost addresses only, which the next
    /// growth takes again, and want of addresses takes them all.
    pub(super) fn trim_addresses(&mut self, driver: &dyn Driver) {
        for space in self.open_spaces() {
            let lowest = self.arenas.lowest_region(space);
            let mut idle = self.arenas.idle_reservations(space);
            idle.retain(|&id| Some(id) != lowest);
            self.give_back(driver, &idle);
        }
    }

    fn give_back(&mut self, driver: &dyn Driver, idle: &[RegionId]) {
        for &id in idle {
            let (address, bytes) = self.arenas.region(id).span;
            let freed = driver.address_free(self.device, address, bytes).is_ok();
            self.backing.calls += 1;
            self.backing.errors += u64::from(!freed);
            if freed {
                self.arenas.remove_region(id);
                self.backing.pages.reservations.remove(address);
                self.backing.pages.book.unreserve(address);
            }
        }
    }
}

fn whole_pages(bytes: u64) -> u64 {
    round_up(bytes, PAGE).unwrap_or(u64::MAX / PAGE * PAGE)
}

/// How much is reserved at least where `bytes` have no room, if the driver has it.
fn step_for(bytes: u64) -> u64 {
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
        let views = [0x1000..0x1800, 0x1800..0x2000, 0x2000..0x2400, 0x2800..0x2c00, 0x2c00..0x3000];
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
