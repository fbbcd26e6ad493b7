//! Moves: how `backing:stitch` makes a request fit, and gives memory back.
//!
//! The arena plans the row of fewest pages; pages are made while little is held, and moved from where they lie idle past that; the row is
//! mapped, and becomes free memory. What fails half-way leaves every page in one known place (`stitch`).
#![deny(unsafe_code)]

use super::arena::{Arenas, EVERYBODY, Plan, RunId, SpaceId};
use super::central::{Central, Growth, SPAN, Want};
use super::page_table::PageTable;
use super::size_class::PAGE;
use crate::driver::{Driver, DriverError, ErrorKind, Result};
use crate::record::{DeviceGauge, EventKind, Record, clock};

/// `backing:stitch` takes fresh pages while no more is held than the peak of live bytes and one part in this of it.
const SLACK: u64 = 100;
/// Pages are moved in steps of this, where there are so many (bytes).
const STEAL_STEP: u64 = 8 << 20;

impl Central {
    /// Maps pages where they make `want` fit. Up to [`SLACK`] above the peak of live bytes they are fresh; past that, whole pages
    /// that lie idle elsewhere are moved first.
    pub(super) fn stitch(&mut self, ctx: &Growth<'_>, want: Want) -> Result<()> {
        let out_of_memory = DriverError::new("limit", ErrorKind::OutOfMemory, 0);
        let soft = self.soft_ceiling(ctx.record, want.bytes);
        let (mut lean, mut allowance, mut failure) = (false, ctx.fresh, out_of_memory);
        let mut plan = self.plan_row(ctx, want)?;
        // A growing heap takes a span at a time, for fewer calls, from what may be held too much anyway.
        let held = self.backing.pages.held() + plan.bytes.saturating_sub(self.backing.pages.spare());
        let idle = soft.min(self.limit).saturating_sub(held).min(allowance / 2);
        let step = SPAN.saturating_sub(plan.bytes).min(idle / 2 / PAGE * PAGE);
        plan.bytes += step.min(self.arenas.room_behind(&plan));
        // Each turn finds more pages or ends.
        loop {
            let spare = self.backing.pages.spare();
            if spare >= plan.bytes {
                return self.map_row(ctx, want, &plan);
            }
            let missing = plan.bytes - spare;
            let ceiling = if lean { self.limit } else { self.limit.min(soft) };
            let fresh = ceiling.saturating_sub(self.backing.pages.held()).min(allowance) / PAGE * PAGE;
            if missing <= fresh {
                match self.create_pages(ctx, missing) {
                    Ok(()) => {
                        allowance -= missing;
                        continue;
                    }
                    Err(error) if error.is_out_of_memory() => {}
                    Err(error) => failure = error,
                }
            }
            // A few pages more than it takes: the next requests find them.
            if ctx.steal && self.steal(ctx, missing + STEAL_STEP, &plan.needs) > 0 {
                // The move may have opened a better place.
                plan = self.plan_row(ctx, want)?;
                let left_over = self.backing.pages.spare().saturating_sub(plan.bytes);
                plan.bytes += left_over.min(self.arenas.room_behind(&plan));
            } else if lean {
                return Err(failure);
            } else {
                lean = true;
                // Nothing lies idle: the heap grows, and in steps, since what is left over serves the next request.
                if step == 0 {
                    let room =
                        self.limit.saturating_sub(self.backing.pages.held() + missing).min(allowance / 2);
                    let step = STEAL_STEP.min(room / PAGE * PAGE).min(self.arenas.room_behind(&plan));
                    plan.bytes += step;
                } else {
                    plan = self.plan_row(ctx, want)?;
                }
            }
        }
    }

    /// Up to here fresh pages are taken before idle ones are moved: the peak of live bytes, with `bytes` more, and some slack.
    fn soft_ceiling(&self, record: &Record, bytes: u64) -> u64 {
        let (live, peak) = record.live(self.device);
        let wanted = peak.max(live + bytes);
        // A small heap may hold a little more, so that it grows in steps too.
        (wanted + (wanted / SLACK).max((wanted / 8).min(2 * SPAN))).max(SPAN)
    }

    /// Whether growth by `bytes` would move pages, if there are idle ones.
    pub fn is_beyond_slack(&self, record: &Record, bytes: u64) -> bool {
        self.backing.pages.held() + bytes > self.soft_ceiling(record, bytes)
    }

    fn plan_row(&mut self, ctx: &Growth<'_>, want: Want) -> Result<Plan> {
        let plan = |arenas: &Arenas| arenas.plan(want.space, want.bytes, want.align, want.stream);
        if let Some(plan) = plan(&self.arenas) {
            return Ok(plan);
        }
        self.reserve_addresses(ctx, want.space)?;
        plan(&self.arenas).ok_or(DriverError::new("cuMemAddressReserve", ErrorKind::OutOfMemory, 0))
    }

    fn create_pages(&mut self, ctx: &Growth<'_>, bytes: u64) -> Result<()> {
        for _ in 0..bytes / PAGE {
            self.backing.pages.create(ctx.driver)?;
        }
        Ok(())
    }

    /// Unmaps whole pages that lie idle, the shortest rows first, until `bytes` are spare more. The bytes found.
    fn steal(&mut self, ctx: &Growth<'_>, bytes: u64, needed: &[Option<RunId>]) -> u64 {
        let now = (self.arenas.changes(), ctx.learnt);
        if self.barren == Some(now) {
            return 0;
        }
        let spaces = self.movable_spaces();
        let mut found = 0;
        for loose in self.arenas.loose_runs(&spaces, needed, ctx.completed) {
            if found >= bytes {
                break;
            }
            let take = loose.bytes.min(bytes - found).min(self.spare_around(loose.run) / PAGE * PAGE);
            let address = loose.address + loose.bytes - take;
            if take > 0 && self.backing.pages.unmap(ctx.driver, address, take).is_ok() {
                self.arenas.take_out(loose.run, address, take);
                found += take;
            }
        }
        if found == 0 {
            self.barren = Some(now);
        }
        found
    }

    /// Maps spare pages at the planned row and makes it free memory of the stream's.
    fn map_row(&mut self, ctx: &Growth<'_>, want: Want, plan: &Plan) -> Result<()> {
        ctx.table.cover(plan.address, plan.bytes);
        let result = self.backing.pages.map(ctx.driver, plan.address, plan.bytes);
        match result {
            Ok(()) => {
                self.arenas.commit(plan, want.stream);
                self.gauges.add(DeviceGauge::Grows, 1);
                let device = self.device as u8;
                ctx.record.event(
                    EventKind::Grow,
                    device,
                    ctx.lifetime as u8,
                    EVERYBODY,
                    plan.address,
                    plan.bytes,
                    clock::now(),
                );
            }
            Err(_) => {
                let row = plan.address..plan.address + plan.bytes;
                let stuck: Vec<u64> = self.backing.pages.stuck().filter(|page| row.contains(page)).collect();
                for page in stuck {
                    if let Some(run) = self.arenas.quarantine(want.space, page) {
                        self.quarantine.insert(page, run);
                    }
                }
            }
        }
        result
    }

    /// Bytes of void that cannot be used, since pages are stuck there.
    pub fn quarantined(&self) -> u64 {
        self.quarantine.len() as u64 * PAGE
    }

    fn reserve_addresses(&mut self, ctx: &Growth<'_>, space: SpaceId) -> Result<()> {
        // Twice the device: voids between blocks take address space too.
        let bytes = (2 * self.total_memory).next_multiple_of(SPAN).max(2 * SPAN);
        self.backing.calls += 1;
        let address = ctx.driver.address_reserve(self.device, bytes)?;
        if !address.is_multiple_of(PAGE) || !PageTable::reaches(address, bytes) {
            let _ = ctx.driver.address_free(self.device, address, bytes);
            log::error!("the driver reserved {address:#x}, which cannot be managed");
            return Err(DriverError::new("address range", ErrorKind::Other, 0));
        }
        self.arenas.add_reservation(space, address, bytes);
        Ok(())
    }

    /// Unmaps the whole pages of `spaces` that lie idle, so that they can be given back.
    pub fn loosen(&mut self, driver: &dyn Driver, spaces: &[SpaceId], completed: &dyn Fn(u32) -> u64) {
        for page in self.backing.pages.unstick(driver) {
            if let Some(run) = self.quarantine.remove(&page) {
                self.arenas.clear_quarantine(run);
            }
        }
        for &space in spaces {
            let mut spare = self.spare_of(space) / PAGE * PAGE;
            for loose in self.arenas.loose_pages(&[space], completed) {
                // What is reserved stays; of a row, its lowest pages.
                let take = loose.bytes.min(spare);
                let address = loose.address + loose.bytes - take;
                if take > 0 && self.backing.pages.unmap(driver, address, take).is_ok() {
                    self.arenas.take_out(loose.run, address, take);
                    spare -= take;
                }
            }
        }
    }

    /// Gives the address space of a space back in which nothing is mapped.
    pub fn free_addresses(&mut self, driver: &dyn Driver, space: SpaceId) {
        for id in self.arenas.idle_reservations(space) {
            let (address, bytes) = self.arenas.region(id).span;
            self.backing.calls += 1;
            if driver.address_free(self.device, address, bytes).is_ok() {
                self.arenas.remove_region(id);
            }
        }
    }
}
