//! The numbers of a device.
#![deny(unsafe_code)]

use crate::heap::capture::CapturePool;
use crate::heap::device::Device;
use crate::heap::lane::SlabSums;
use crate::heap::page_table::Owner;
use crate::heap::shared::Shared;
use crate::heap::size_class::SMALL_MAX;
use crate::heap::size_class::round;
use crate::heap::stats::{CapturePoolHeld, Stats, TorchStats, bound};
use crate::heap::sync::lock;
use crate::nvtx;
use crate::record::DeviceGauge;
use crate::record::peaks::SMALL;

impl Device {
    /// Looks at everything; takes one lock after the other.
    pub fn stats(&self, shared: &Shared) -> Stats {
        let (live, live_peak) = shared.record.live(self.id);
        let counts = self.streams.counts();
        let mut stats = Stats {
            total_memory: self.capabilities.total_memory,
            live,
            live_peak,
            requested: shared.record.live_requested(self.id),
            events_recorded: counts.recorded,
            events_queried: counts.queried,
            ..Stats::default()
        };
        for lane in self.lanes.iter() {
            let cell = lock(lane);
            stats.pending += cell.lane.pending_bytes();
            for (_, slab) in cell.lane.slabs() {
                stats.slab_bytes += slab.size_class().slab_bytes();
                stats.slab_free += slab.free_bytes();
            }
        }
        let central = lock(&self.central);
        stats.limit = central.limit;
        stats.reserved = central.backing.reserved;
        stats.reserved_peak = central.peak_reserved;
        stats.pending += central.pending_bytes();
        stats.retries = central.retries;
        stats.out_of_memories = central.out_of_memories;
        for space in central.spaces.iter() {
            stats.arena_free += central.arenas.free_bytes(space);
            stats.largest_free = stats.largest_free.max(central.arenas.largest_free(space));
        }
        for pool in central.captures.pools.iter().flatten() {
            stats.captured += central.arenas.held_bytes(pool.space);
        }
        stats.largest_request = central.largest_request(shared.shares());
        stats.largest_growing = central.largest_growing(stats.largest_request);
        (stats.low_phase_trims, stats.low_phase_bytes) = central.watch.given();
        for (_, pool) in central.named.iter() {
            stats.pending += pool.lane.pending_bytes();
            stats.arena_free += central.arenas.free_bytes(pool.space);
            for (_, slab) in pool.lane.slabs() {
                stats.slab_bytes += slab.size_class().slab_bytes();
                stats.slab_free += slab.free_bytes();
            }
        }
        stats
    }

    /// Writes the gauges that the straight path leaves alone.
    pub fn publish_gauges(&self, shared: &Shared) {
        let stats = self.stats(shared);
        nvtx::gauges(self.id, stats.live, stats.pending, stats.largest_request);
        let mut central = lock(&self.central);
        let (calls, errors) = (central.backing.calls, central.backing.errors);
        central.gauges.set(&[
            (DeviceGauge::ArenaFree, stats.arena_free),
            (DeviceGauge::LargestFree, stats.largest_free),
            (DeviceGauge::LargestRequest, stats.largest_request),
            (DeviceGauge::LargestGrowing, stats.largest_growing),
            (DeviceGauge::CapturePinned, stats.captured),
            (DeviceGauge::Pending, stats.pending),
            (DeviceGauge::SlabBytes, stats.slab_bytes),
            (DeviceGauge::EventRecords, stats.events_recorded),
            (DeviceGauge::EventQueries, stats.events_queried),
            (DeviceGauge::DriverCalls, calls + stats.events_recorded + stats.events_queried),
            (DeviceGauge::DriverErrors, errors),
        ]);
    }

    /// What torch's `memory_stats` tells; takes one lock after the other.
    pub fn torch_stats(&self, shared: &Shared) -> TorchStats {
        let blocks = shared.record.block_stats(self.id);
        let mut slabs: SlabSums = self.lanes.iter().map(|lane| lock(lane).lane.slab_sums()).sum();
        let mut central = lock(&self.central);
        let captured = central.captures.pools.iter().flatten().map(|pool| pool.lane.slab_sums());
        let named = central.named.iter().map(|(_, pool)| pool.lane.slab_sums());
        slabs = [slabs, captured.chain(named).sum()].into_iter().sum();
        // Small blocks that lie in no slab: direct ones, and those that are runs.
        let direct = central.direct_blocks().map(|block| block.1).filter(|&bytes| bytes <= SMALL_MAX);
        let runs_of_small = central.small_runs.small_blocks();
        let (direct, direct_bytes) = direct.fold(runs_of_small, |sum, bytes| (sum.0 + 1, sum.1 + bytes));
        let free_in = |all: u64, used: u64, direct: u64| all.saturating_sub(used.saturating_sub(direct));
        let free_slots = free_in(slabs.used_slots, blocks.active[SMALL].current, direct);
        let small = free_in(slabs.used_bytes, blocks.active_bytes[SMALL].current, direct_bytes);
        let (runs, bytes) = bound(&central.arenas);
        central.tally.look([free_slots, runs], [small, bytes]);
        let (retries, out_of_memories) = (central.retries, central.out_of_memories);
        TorchStats {
            blocks,
            held: central.tally.stats(retries, out_of_memories),
            limit: central.limit,
            total_memory: self.capabilities.total_memory,
        }
    }

    /// What each capture pool holds that torch has an id for.
    pub fn capture_pools(&self) -> Vec<CapturePoolHeld> {
        let central = lock(&self.central);
        let held = |pool: &CapturePool| {
            let bytes = central.arenas.held_bytes(pool.space);
            Some(CapturePoolHeld { id: pool.id?, bytes, small: pool.lane.slab_sums().bytes })
        };
        central.captures.pools.iter().flatten().filter_map(held).collect()
    }

    /// Peaks of what torch is told begin again at what there is.
    pub fn reset_peaks(&self, shared: &Shared) {
        shared.record.reset_peaks(self.id);
        lock(&self.central).tally.reset_peaks();
    }

    /// What came and went, as torch is told, begins again at nothing.
    pub fn reset_accumulated(&self, shared: &Shared) {
        shared.record.reset_accumulated(self.id);
        let mut central = lock(&self.central);
        let (retries, out_of_memories) = (central.retries, central.out_of_memories);
        central.tally.reset_accumulated(retries, out_of_memories);
    }

    /// The stream and the live bytes of the block that starts at `address`, unless other streams or a graph use it too.
    pub(in crate::heap) fn block_at(&self, address: u64, owner: Owner) -> Option<(u32, u64)> {
        match owner {
            Owner::Slab { lane, slab, .. } => {
                let cell = lock(self.lanes.get(lane as usize)?);
                if cell.lane.is_used_elsewhere(address) {
                    return None;
                }
                let (_, slab) = cell.lane.slabs().find(|(id, _)| *id == slab)?;
                let facts = slab.facts(slab.slot_at(address)?);
                Some((slab.stream, round(facts.requested)))
            }
            Owner::Large { blocks, .. } => {
                let central = lock(&self.central);
                let (_, run) = central.run_at(address, blocks)?;
                let space = central.arenas.region(run.region).space;
                (!run.shared && central.spaces.is_ordinary(space)).then_some((run.stream, run.bytes))
            }
            Owner::None => None,
        }
    }
}
