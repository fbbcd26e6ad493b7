//! Why memory ran out: what the report says is gathered.
#![deny(unsafe_code)]

use crate::heap::backing::Kind;
use crate::heap::device::Device;
use crate::heap::entry;
use crate::heap::lifetime::{self, Lifetime};
use crate::heap::oom::Report;
use crate::heap::shared::Shared;
use crate::heap::stats::{free_rows, torn};
use crate::heap::sync::lock;

impl Device {
    /// Looks at everything; takes one lock after the other.
    pub(super) fn why_memory_ran_out(&self, shared: &Shared, asked: u64, stream: u32, count: u64) -> Report {
        let (live, live_peak) = shared.record.live(self.id);
        let info = shared.driver.memory_info(self.id).ok();
        let mut report = Report {
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
            capturing: !self.may_ask(),
            apart: !shared.shares(),
            ..Report::default()
        };
        for lane in self.lanes.iter() {
            let cell = lock(lane);
            report.pending += cell.lane.pending_bytes();
            report.slab_free += cell.lane.slabs().map(|(_, slab)| slab.free_bytes()).sum::<u64>();
            let used = cell.lane.slabs().filter(|(_, slab)| slab.used() > 0);
            report.partly += used.map(|(_, slab)| slab.unused_bytes()).sum::<u64>();
        }
        let central = lock(&self.central);
        report.limit = central.limit;
        report.reserved = central.backing.reserved;
        report.pending += central.pending_bytes();
        report.orphaned = central.backing.orphaned();
        report.largest = central.largest_request(shared.shares());
        report.ladder = central.ladder.clone();
        report.addresses = central.addresses_ran_out.then(|| central.arenas.all_reserved_bytes());
        report.immovable = self.capabilities.vmm && central.backing.kind != Kind::Stitch;
        for (id, _) in central.arenas.regions() {
            let rows = free_rows(central.arenas.runs_of(id).map(|(_, run)| run));
            report.partly += rows.into_iter().map(|(address, bytes)| torn(address, bytes)).sum::<u64>();
        }
        for lifetime in Lifetime::ALL {
            let spaces = central.spaces.of_lifetime(lifetime);
            report.arena_free[lifetime as usize] = spaces.map(|space| central.arenas.free_bytes(space)).sum();
        }
        for pool in central.captures.pools.iter().flatten() {
            report.captured += central.arenas.held_bytes(pool.space);
        }
        report.pooled = central.named.iter().map(|(_, pool)| central.arenas.held_bytes(pool.space)).sum();
        report
    }
}
