//! Out of memory: gathers the cause, and counts it once it reaches the program.
//!
//! A request that the heap refuses is not yet an out-of-memory of the program: a door may have
//! another pool to ask, or a component that gives memory back. So the error only names the cause,
//! and the door that hands it to the program counts it ([`Heap::note_out_of_memory`]).

use crate::central::Central;
use crate::device::Device;
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::heap::Heap;
use crate::journal::{Action, Entry, context, now};
use crate::lifetime;
use crate::pools::{Pool, PoolNumber, Purpose};
use crate::profiler::{self, What};
use crate::report::cause::{PoolNote, Report};
use crate::report::walk::{Visitor, WalkedShard};
use crate::runs::arena::{Region, RegionId, RunState};
use crate::runs::rows::{joined, partial_page_bytes};
use crate::shared::Shared;
use crate::small::size_class::round;
use crate::sync::lock;
use crate::upkeep::alerts::AlertKind;
use gruyere_record::{DeviceGauge, EventKind, clock};
use std::convert::Infallible;

/// The report, filled in by a walk.
struct Gathered(Report);

impl Visitor for Gathered {
    type Error = Infallible;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), Infallible> {
        // The memory of graphs and named pools counts as a whole.
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
        let held = central.held_by(pool);
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
        let free = central.arenas.runs_of(id).filter(|(_, run)| run.state == RunState::Free);
        let rows = joined(free.map(|(_, run)| (run.address, run.bytes)), |_| false);
        self.0.partly += rows
            .into_iter()
            .map(|(address, bytes)| partial_page_bytes(address, bytes))
            .sum::<u64>();
        Ok(())
    }
}

impl Device {
    /// The out-of-memory error for a request of `asked` bytes, with its cause.
    #[cold]
    pub(crate) fn out_of_memory(&self, shared: &Shared, asked: u64, stream: u32) -> Error {
        Error::OutOfMemory(Box::new(self.why_memory_ran_out(shared, asked, stream)))
    }

    /// Counts an out-of-memory of the program and alerts its listeners. Call with no lock held.
    #[cold]
    pub(crate) fn count_out_of_memory(&self, shared: &Shared, report: &mut Report) {
        // Before the lock: this may walk the interpreter's stack.
        let site = shared.site(0);
        {
            let mut central = lock(&self.central);
            central.out_of_memories += 1;
            report.count = central.out_of_memories;
            central.gauges.set(&[(DeviceGauge::OutOfMemories, report.count)]);
        }
        let (asked, stream) = (report.asked, report.stream.0);
        profiler::mark(What::OutOfMemory, asked);
        let kind = AlertKind::OutOfMemory;
        self.alert(shared, kind, asked, report.reserved, report.count);
        let kind = EventKind::OutOfMemory;
        let site = u64::from(site.0);
        shared.record.event(kind, self.id as u8, 0, stream, site, asked, clock::now());
    }

    /// Gathers everything; takes one lock after the other.
    fn why_memory_ran_out(&self, shared: &Shared, asked: u64, stream: u32) -> Report {
        let (live, live_peak) = shared.record.live(self.id);
        let info = shared.driver.memory_info(self.id).ok();
        let mut cause = Gathered(Report {
            device: self.id,
            asked,
            stream: (stream, self.streams.handle(stream).map_or(0, |handle| handle.0 as u64)),
            lifetime: lifetime::current(),
            context: context(),
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
        let Gathered(mut report) = cause;
        report.limit = central.limit;
        report.reserved = central.backing.reserved;
        report.pending += central.pending_bytes();
        report.orphaned = central.backing.orphaned();
        report.largest = self.supply.largest(&central, shared.shares());
        report.ladder = central.ladder.clone();
        report.addresses = central.addresses_ran_out.then(|| central.arenas.all_reserved_bytes());
        report.immovable = self.supply.leaves_pieces(&self.capabilities);
        let slack = shared.settings.slack;
        report.slack_is_loose = self.capabilities.vmm
            && !report.immovable
            && slack.is_none_or(|slack| slack.resolve(report.live_peak) > 0);
        report
    }
}

impl Heap {
    /// Counts and notes an out-of-memory from [`Heap::malloc`] that reaches the program because no
    /// other component could serve the request. Sets its count in `report` too, and alerts the
    /// listeners. Call once, with no lock held.
    pub fn note_out_of_memory(&self, report: &mut Report, stream: StreamHandle) {
        if let Ok(Some(device)) = self.device_in_use(report.device.into()) {
            device.count_out_of_memory(&self.shared, report);
        }
        let mut books = lock(&self.history.0);
        books.latest_oom = Some(report.clone());
        if self.has_history() {
            books.latest.add(Entry {
                action: Action::OutOfMemory,
                device: report.device,
                address: report.free.unwrap_or(0),
                bytes: round(report.asked),
                stream: stream.0 as u64,
                time: now(),
                context: context(),
                origin: 0,
            });
        }
    }

    /// The latest out-of-memory.
    pub fn latest_out_of_memory(&self) -> Option<Report> {
        lock(&self.history.0).latest_oom.clone()
    }
}

impl Device {
    /// Adds the pool's figures to an out-of-memory.
    pub(crate) fn with_pool_note(&self, error: Error, number: PoolNumber) -> Error {
        let Error::OutOfMemory(mut report) = error else { return error };
        let central = lock(&self.central);
        report.pool = central.pools.get(number).and_then(|pool| {
            Some(PoolNote {
                name: pool.name()?.to_owned(),
                held: central.held_by(pool),
                live: pool.live_bytes,
                limit: pool.rules.limit,
            })
        });
        Error::OutOfMemory(report)
    }
}
