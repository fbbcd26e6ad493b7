//! Why memory ran out: what the report says is gathered.

use super::walk::{Visitor, WalkedShard};
use crate::central::Central;
use crate::device::Device;
use crate::pool::lifetime;
use crate::pool::{Pool, PoolNumber, Purpose};
use crate::report::entry;
use crate::report::oom::Report;
use crate::report::stats::{free_rows, partial_page_bytes};
use crate::runs::arena::{Region, RegionId};
use crate::shared::Shared;
use std::convert::Infallible;

/// The report, while a walk fills it in.
struct Cause(Report);

impl Visitor for Cause {
    type Error = Infallible;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), Infallible> {
        // What a graph or a named pool holds is told as a whole.
        if walked.pool.is_none() {
            self.0.pending += walked.shard.pending_bytes();
            for (_, slab) in walked.shard.slabs() {
                self.0.slab_free += slab.free_bytes();
                self.0.partly += if slab.used() > 0 { slab.unused_bytes() } else { 0 };
            }
        }
        Ok(())
    }

    fn pool(&mut self, _: PoolNumber, pool: &Pool, central: &Central) -> Result<(), Infallible> {
        let held = central.arenas.held_bytes(pool.space());
        match pool.purpose {
            Purpose::Ordinary(lifetime) => {
                let free = pool.spaces().iter().map(|&space| central.arenas.free_bytes(space));
                self.0.arena_free[lifetime as usize] = free.sum();
            }
            Purpose::Capture => self.0.captured += held,
            Purpose::Named(_) => self.0.pooled += held,
        }
        Ok(())
    }

    fn region(&mut self, id: RegionId, _: &Region, central: &Central) -> Result<(), Infallible> {
        let rows = free_rows(central.arenas.runs_of(id).map(|(_, run)| run));
        self.0.partly += rows
            .into_iter()
            .map(|(address, bytes)| partial_page_bytes(address, bytes))
            .sum::<u64>();
        Ok(())
    }
}

impl Device {
    /// Looks at everything; takes one lock after the other.
    pub(super) fn why_memory_ran_out(
        &self,
        shared: &Shared,
        asked: u64,
        stream: u32,
        count: u64,
    ) -> Report {
        let (live, live_peak) = shared.record.live(self.id);
        let info = shared.driver.memory_info(self.id).ok();
        let mut cause = Cause(Report {
            device: self.id,
            count,
            asked,
            stream: (stream, self.streams.handle(stream).map_or(0, |handle| handle.0 as u64)),
            lifetime: lifetime::current(),
            context: entry::context(),
            step: shared.step(),
            total: self.capabilities.total_memory,
            free: info.map(|info| info.free),
            live,
            live_peak,
            capturing: !self.may_query(),
            apart: !shared.shares(),
            ..Report::default()
        });
        let Ok(central) = self.walk(&mut cause);
        let Cause(mut report) = cause;
        report.limit = central.limit;
        report.reserved = central.backing.reserved;
        report.pending += central.pending_bytes();
        report.orphaned = central.backing.orphaned();
        report.largest = self.supply.largest(&central, shared.shares());
        report.ladder = central.ladder.clone();
        report.addresses = central.addresses_ran_out.then(|| central.arenas.all_reserved_bytes());
        report.immovable = self.supply.leaves_pieces(&self.capabilities);
        report
    }
}
