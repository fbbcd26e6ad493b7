//! What the heap says of itself: the numbers of the C call and of the gauges.
#![deny(unsafe_code)]

use super::arena::{Arenas, Movable, RegionId, Run, RunState};
use super::backing::Kind;
use super::capture::{CapturePool, PoolId};
use super::central::Central;
use super::device::Device;
use super::lane::SlabSums;
use super::page_table::Owner;
use super::shared::Shared;
use super::size_class::round;
use super::size_class::{PAGE, SMALL_MAX};
use super::sync::lock;
use super::tally::HeldStats;
use crate::nvtx;
use crate::record::peaks::{BlockStats, SMALL};
use crate::record::{DeviceGauge, missing_share};
use std::collections::BTreeMap;

/// Numbers of one device. Bytes where not said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Physical memory of the device.
    pub total_memory: u64,
    /// The ceiling on what may be reserved.
    pub limit: u64,
    /// Physical memory held.
    pub reserved: u64,
    /// Its peak.
    pub reserved_peak: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// Their peak.
    pub live_peak: u64,
    /// Freed by the program, waiting for streams.
    pub pending: u64,
    /// Free runs of the arenas.
    pub arena_free: u64,
    /// The largest free run.
    pub largest_free: u64,
    /// Memory of slabs.
    pub slab_bytes: u64,
    /// Free slots in them.
    pub slab_free: u64,
    /// Held for CUDA graphs.
    pub captured: u64,
    /// Times the reclaim ladder was climbed.
    pub retries: u64,
    /// Out-of-memory answers.
    pub out_of_memories: u64,
    /// Frees of what was no live block, on all devices.
    pub bad_frees: u64,
    /// Events recorded.
    pub events_recorded: u64,
    /// Events asked about.
    pub events_queried: u64,
    /// Live blocks as they were asked for.
    pub requested: u64,
    /// The largest request that what is held could satisfy, on any stream, once the work on what was freed is done.
    pub largest_request: u64,
    /// The largest request that could be satisfied if the ceiling is reached for it. By our books: what others on the device hold is
    /// not known here.
    pub largest_growing: u64,
    /// The size that 99 of 100 requests so far do not exceed, within 7%; 0 where the record is off. From [`Heap::stats`] only.
    pub request_p99: u64,
    /// Times that a low-memory phase gave memory back.
    pub low_phase_trims: u64,
    /// The memory that went back so.
    pub low_phase_bytes: u64,
}

impl Stats {
    /// 1 - live / reserved.
    pub fn fragmentation(&self) -> f64 {
        missing_share(self.live, self.reserved)
    }

    /// 1 - largest satisfiable request / free bytes held.
    pub fn external_fragmentation(&self) -> f64 {
        missing_share(self.largest_request, self.reserved.saturating_sub(self.live + self.pending))
    }

    /// 1 - requested / live.
    pub fn internal_fragmentation(&self) -> f64 {
        missing_share(self.requested, self.live)
    }
}

/// What torch's `memory_stats` tells of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TorchStats {
    /// Blocks.
    pub blocks: BlockStats,
    /// What is held.
    pub held: HeldStats,
    /// The ceiling on what may be reserved (bytes).
    pub limit: u64,
    /// Physical memory of the device (bytes).
    pub total_memory: u64,
}

/// What a capture pool of torch's holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapturePoolHeld {
    /// torch's id.
    pub id: PoolId,
    /// All of it.
    pub bytes: u64,
    /// In slabs.
    pub small: u64,
}

/// Bytes of a free row that share their pages with others.
pub(super) fn torn(address: u64, bytes: u64) -> u64 {
    let end = (address + bytes) / PAGE * PAGE;
    bytes - end.saturating_sub(address.next_multiple_of(PAGE))
}

/// The free rows among the runs of a region: address and bytes. Neighbours of different streams' are one.
pub(super) fn free_rows<'a>(runs: impl Iterator<Item = &'a Run>) -> Vec<(u64, u64)> {
    let mut rows: Vec<(u64, u64)> = Vec::new();
    for run in runs.filter(|run| run.state == RunState::Free) {
        match rows.last_mut() {
            Some((address, bytes)) if *address + *bytes == run.address => *bytes += run.bytes,
            _ => rows.push((run.address, run.bytes)),
        }
    }
    rows
}

/// Free runs that cannot be given back, and their bytes: all of a span that has a block, what is not whole pages where pages come and go
/// by themselves.
fn bound(arenas: &Arenas) -> (u64, u64) {
    let (mut count, mut bytes) = (0, 0);
    let mut spans: BTreeMap<RegionId, (u64, u64)> = BTreeMap::new();
    for run in arenas.free_runs() {
        if arenas.is_stitched(run.region) {
            let torn = torn(run.address, run.bytes);
            count += u64::from(torn > 0);
            bytes += torn;
        } else {
            let span = spans.entry(run.region).or_default();
            *span = (span.0 + 1, span.1 + run.bytes);
        }
    }
    for (id, span) in spans {
        // A span that is all free can go.
        if span.1 < arenas.region(id).bytes {
            (count, bytes) = (count + span.0, bytes + span.1);
        }
    }
    (count, bytes)
}

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
    pub(super) fn block_at(&self, address: u64, owner: Owner) -> Option<(u32, u64)> {
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

impl Central {
    /// The largest request that what is held could satisfy, on any stream, once the work on what was freed is done.
    ///
    /// Where pages can move (`shares`: they may pass from stream to stream), whole free chunks of the ordinary spaces count, wherever they
    /// lie, and the longest free head and tail of the others: they can be mapped in one row. Or the largest free run of one owner, and the whole
    /// chunks and the longest head elsewhere, mapped behind it. A row between two free runs may hold more: the answer is a lower bound.
    pub(super) fn largest_request(&self, shares: bool) -> u64 {
        let spaces: Vec<_> = self.spaces.iter().collect();
        let run = spaces.iter().map(|&space| self.arenas.largest_free(space)).max().unwrap_or(0);
        if self.backing.kind != Kind::Stitch || !shares {
            return run;
        }
        let loose = self.arenas.loose_runs(&spaces, &|_, _| Movable::Idle);
        let (mut whole, mut tail, mut head) = (0, 0, 0);
        let (mut beside, mut beside_head) = (0, 0);
        let last = loose.len().saturating_sub(1);
        for (at, loose) in loose.iter().enumerate() {
            // The longest run comes last.
            let is_longest = at == last;
            for part in self.backing.pages.parts(&loose.pages) {
                let bytes = u64::from(part.count()) * PAGE;
                let (is_whole, is_head) = (part.first == 0 && part.behind == 0, part.first == 0);
                whole += if is_whole { bytes } else { 0 };
                tail = tail.max(if part.behind == 0 && !is_whole { bytes } else { 0 });
                head = head.max(if is_head && !is_whole { bytes } else { 0 });
                if !is_longest {
                    beside += if is_whole { bytes } else { 0 };
                    beside_head = beside_head.max(if is_head && !is_whole { bytes } else { 0 });
                }
            }
        }
        let spare = self.backing.pages.spare();
        (run + beside + beside_head).max(whole + tail + head) + spare
    }

    /// The largest request that could be satisfied if as much is taken from the driver as the ceiling allows, where what is held
    /// satisfies one of `largest`.
    pub(super) fn largest_growing(&self, largest: u64) -> u64 {
        let room = self.limit.saturating_sub(self.backing.reserved) / PAGE * PAGE;
        // New pages are mapped beside those that move; a span is a piece by itself.
        if self.backing.kind == Kind::Stitch { largest + room } else { largest.max(room) }
    }
}
