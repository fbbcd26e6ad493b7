//! Address space for rows of pages: when a space gets more, and when idle reservations go back
//! ([`super::reservations`] has the books).

use crate::central::Central;
use crate::driver::{Driver, DriverError, ErrorKind, Result};
use crate::request::Growth;
use crate::runs::arena::{RegionId, SpaceId};
use crate::runs::page_table::PageTable;
use crate::small::size_class::PAGE;
use crate::supply::pages::reservations::{step_for, whole_pages};

impl Central {
    /// Reserves address space for `space` in which a row of `bytes` fits.
    ///
    /// # Errors
    /// The driver's error. Out of memory here means out of addresses, noted in
    /// [`Central::addresses_ran_out`].
    pub(crate) fn reserve_addresses(
        &mut self,
        ctx: &Growth<'_>,
        space: SpaceId,
        bytes: u64,
    ) -> Result<()> {
        let (least, step) = (whole_pages(bytes), step_for(bytes));
        let mut result = self.reserve_amply(ctx, space, step);
        if result.as_ref().is_err_and(DriverError::is_out_of_memory) && ctx.moves {
            // Useless address space goes back. Unmapping may wait for the device: not during a
            // capture.
            self.unmap_retired(ctx.driver, ctx.completed, 0);
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

    /// Adds a further step of address space to `space`, beyond its bare need: a row of `bytes`
    /// fits. False: the space has twice the device, or the driver has no more.
    pub(crate) fn reserve_more(&mut self, ctx: &Growth<'_>, space: SpaceId, bytes: u64) -> bool {
        self.may_reserve(space) && self.reserve_amply(ctx, space, step_for(bytes)).is_ok()
    }

    /// Reserves address space for `space`, which needs `step`: more if the driver has it, for fewer
    /// ends of reservations, else `step`.
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

    /// Whether `space` may get more address space before retired views are unmapped for theirs: up
    /// to twice the device.
    pub(crate) fn may_reserve(&self, space: SpaceId) -> bool {
        self.arenas.reserved_bytes(space) < 2 * self.total_memory
    }

    /// Returns the reservations of a space in which nothing is mapped.
    pub(crate) fn free_addresses(&mut self, driver: &dyn Driver, space: SpaceId) {
        let idle = self.arenas.idle_reservations(space);
        self.give_back(driver, &idle);
    }

    /// As [`Central::free_addresses`], for the spaces of no capture, except for the lowest
    /// reservation of each: so a program that trims at every step and needs no more reserves
    /// nothing anew. Reservations that become idle between trims stay: they cost addresses only.
    /// The next growth uses them, and a want of addresses takes them all.
    pub(crate) fn trim_addresses(&mut self, driver: &dyn Driver) {
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
