//! The figures of a device: [`Stats`] for the C call and the gauges, [`TorchStats`] for torch's
//! `memory_stats`.

use crate::central::Central;
use crate::device::Device;
use crate::error::Error;
use crate::heap::Heap;
use crate::pools::capture::PoolId;
use crate::pools::{Pool, PoolNumber, Purpose, of_capture};
use crate::profiler;
use crate::report::usage::HeldStats;
use crate::report::walk::{Visitor, WalkedShard};
use crate::runs::rows::bound;
use crate::shared::Shared;
use crate::small::shard::SlabSums;
use crate::small::size_class::PAGE;
use crate::sync::lock;
use gruyere_record::gauges::SMALL_LIMIT;
use gruyere_record::held::Held;
use gruyere_record::peaks::{BlockStats, SMALL};
use gruyere_record::{DeviceGauge, Reader, missing_share};
use std::convert::Infallible;
use std::sync::atomic::Ordering;

/// The figures of one device, in bytes unless noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Physical memory of the device.
    pub total_memory: u64,
    /// The ceiling on memory held.
    pub limit: u64,
    /// Physical memory held.
    pub reserved: u64,
    /// The peak of memory held.
    pub reserved_peak: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// The peak of live blocks.
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
    /// Climbs of the reclaim ladder.
    pub retries: u64,
    /// Out-of-memories.
    pub out_of_memories: u64,
    /// Frees of addresses without a live block, on all devices.
    pub bad_frees: u64,
    /// Events recorded.
    pub events_recorded: u64,
    /// Events queried.
    pub events_queried: u64,
    /// Live blocks in requested bytes.
    pub requested: u64,
    /// The largest request that the memory held could serve on any stream, once the work on freed
    /// memory is done.
    pub largest_request: u64,
    /// The largest request that could be served by growth up to the ceiling. By our books: the
    /// memory of others on the device is unknown here.
    pub largest_growing: u64,
    /// The size that 99 of 100 requests so far do not exceed, within 7%; 0 without a record. From
    /// [`Heap::stats`] only.
    pub request_p99: u64,
    /// Times that a low-memory phase returned memory.
    pub low_phase_trims: u64,
    /// Bytes that low-memory phases returned.
    pub low_phase_bytes: u64,
    /// Free, but unable to serve ([`Held::lost`]).
    pub lost: u64,
    /// The typical request assumed for that; 0: whole pages.
    pub typical_request: u64,
}

impl Stats {
    /// The memory held, with the part that serves no request.
    pub fn held(&self) -> Held {
        let Stats { reserved: held, live, pending: waiting, lost, typical_request, .. } = *self;
        Held { held, live, waiting, found_lost: lost, typical_request }
    }

    /// 1 - largest request that can be served / free bytes held.
    pub fn external_fragmentation(&self) -> f64 {
        missing_share(self.largest_request, self.held().free())
    }

    /// 1 - requested / live.
    pub fn internal_fragmentation(&self) -> f64 {
        missing_share(self.requested, self.live)
    }
}

/// A device's figures for torch's `memory_stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TorchStats {
    /// Figures of blocks.
    pub blocks: BlockStats,
    /// Figures of memory held.
    pub held: HeldStats,
    /// The ceiling on memory held (bytes).
    pub limit: u64,
    /// Physical memory of the device (bytes).
    pub total_memory: u64,
}

/// The memory of a capture pool of torch's, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapturePoolHeld {
    /// torch's id.
    pub id: PoolId,
    /// All bytes of the pool.
    pub bytes: u64,
    /// Bytes of slabs.
    pub small: u64,
}

/// The sums over shards and pools.
#[derive(Default)]
struct Sums {
    stats: Stats,
    /// Empty slabs, those of graphs included: address and bytes.
    empty: Vec<(u64, u64)>,
}

impl Visitor for Sums {
    type Error = Infallible;
    const RUNS: bool = false;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), Infallible> {
        for id in walked.shard.empty_slabs() {
            let slab = walked.shard.slab(id);
            self.empty.extend(slab.map(|slab| (slab.base, slab.bytes())));
        }
        // A graph's memory counts as a whole.
        if walked.pool.is_none_or(|pool| pool.purpose != Purpose::Capture) {
            self.stats.pending += walked.shard.pending_bytes();
            for (_, slab) in walked.shard.slabs() {
                self.stats.slab_bytes += slab.bytes();
                self.stats.slab_free += slab.free_bytes();
            }
        }
        Ok(())
    }

    fn pool(&mut self, _: PoolNumber, pool: &Pool, central: &Central) -> Result<(), Infallible> {
        if pool.purpose == Purpose::Capture {
            self.stats.captured += central.arenas.held_bytes(pool.space());
            return Ok(());
        }
        for &space in pool.spaces() {
            self.stats.arena_free += central.arenas.free_bytes(space);
            if pool.is_ordinary() {
                self.stats.largest_free =
                    self.stats.largest_free.max(central.arenas.largest_free(space));
            }
        }
        Ok(())
    }
}

/// The slabs of all shards.
#[derive(Default)]
struct Slabs(SlabSums);

impl Visitor for Slabs {
    type Error = Infallible;
    const RUNS: bool = false;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), Infallible> {
        self.0.add(walked.shard.slab_sums());
        Ok(())
    }
}

impl Device {
    /// The figures; takes one lock after the other.
    pub(crate) fn stats(&self, shared: &Shared) -> Stats {
        let (live, live_peak) = shared.record.live(self.id);
        let counts = self.streams.counts();
        let mut sums = Sums {
            stats: Stats {
                total_memory: self.capabilities.total_memory,
                live,
                live_peak,
                requested: shared.record.live_requested(self.id),
                events_recorded: counts.recorded,
                events_queried: counts.queried,
                ..Stats::default()
            },
            ..Sums::default()
        };
        let Ok(central) = self.walk(&mut sums);
        let Sums { mut stats, empty: mut free } = sums;
        stats.limit = central.limit;
        stats.reserved = central.backing.reserved;
        stats.reserved_peak = central.peak_reserved;
        stats.pending += central.pending_bytes();
        stats.retries = central.retries;
        stats.out_of_memories = central.out_of_memories;
        stats.largest_request = self.supply.largest(&central, shared.shares());
        stats.largest_growing = self.supply.largest_growing(&central, stats.largest_request);
        (stats.low_phase_trims, stats.low_phase_bytes) = central.watch.given();
        let typical = || {
            let device = Reader::own(shared.record).and_then(|reader| reader.device(self.id));
            // Without a record, a page stands for it.
            device.map_or(PAGE, |device| device.typical_request())
        };
        free.extend(central.arenas.free_rows());
        free.sort_unstable_by_key(|&(address, _)| address);
        let idle = self.supply.idle(&central, free, &typical);
        stats.typical_request = idle.typical_request;
        stats.lost = stats.held().free().saturating_sub(idle.bytes);
        stats
    }

    /// Updates the gauges that the hot path leaves alone.
    pub(crate) fn publish_gauges(&self, shared: &Shared) {
        let stats = self.stats(shared);
        profiler::gauges(self.id, stats.live, stats.pending, stats.largest_request);
        let mut central = lock(&self.central);
        let (calls, errors) = (central.backing.calls, central.backing.errors);
        central.gauges.set(&[
            (DeviceGauge::ArenaFree, stats.arena_free),
            (DeviceGauge::LargestFree, stats.largest_free),
            (DeviceGauge::LargestRequest, stats.largest_request),
            (DeviceGauge::LargestGrowing, stats.largest_growing),
            (DeviceGauge::Lost, stats.lost),
            (DeviceGauge::TypicalRequest, stats.typical_request),
            (DeviceGauge::FreeHeld, stats.held().free()),
            (DeviceGauge::CapturePinned, stats.captured),
            (DeviceGauge::Pending, stats.pending),
            (DeviceGauge::SlabBytes, stats.slab_bytes),
            (DeviceGauge::EventRecords, stats.events_recorded),
            (DeviceGauge::EventQueries, stats.events_queried),
            (DeviceGauge::DriverCalls, calls + stats.events_recorded + stats.events_queried),
            (DeviceGauge::DriverErrors, errors),
            (DeviceGauge::HostAhead, self.streams.lag.nanoseconds()),
        ]);
    }

    /// Updates the largest request that growth could serve, if the heap has grown by much. The
    /// other gauges would read every slab, and the requests of a program's first step would pay.
    pub(crate) fn publish_growth(&self, shared: &Shared, central: &mut Central) {
        if central.watch.has_outgrown(central.backing.held) {
            let largest = self.supply.largest(central, shared.shares());
            let growing = self.supply.largest_growing(central, largest);
            central.gauges.set(&[(DeviceGauge::LargestGrowing, growing)]);
        }
    }

    /// The figures for torch's `memory_stats`; takes one lock after the other.
    pub(crate) fn torch_stats(&self, shared: &Shared) -> TorchStats {
        let blocks = shared.record.block_stats(self.id);
        let mut slabs = Slabs::default();
        let Ok(mut central) = self.walk(&mut slabs);
        let Slabs(slabs) = slabs;
        // Small blocks outside slabs: direct ones, and those that are runs.
        let direct =
            central.direct_blocks().map(|block| block.1).filter(|&bytes| bytes <= SMALL_LIMIT);
        let runs_of_small = central.usage.small_runs();
        let (direct, direct_bytes) =
            direct.fold(runs_of_small, |sum, bytes| (sum.0 + 1, sum.1 + bytes));
        let free_in =
            |all: u64, used: u64, direct: u64| all.saturating_sub(used.saturating_sub(direct));
        let free_slots = free_in(slabs.used_slots, blocks.active[SMALL].current, direct);
        let small = free_in(slabs.used_bytes, blocks.active_bytes[SMALL].current, direct_bytes);
        let (runs, bytes) = bound(&central.arenas);
        central.usage.look([free_slots, runs], [small, bytes]);
        let (retries, out_of_memories) = (central.retries, central.out_of_memories);
        TorchStats {
            blocks,
            held: central.usage.stats(retries, out_of_memories),
            limit: central.limit,
            total_memory: self.capabilities.total_memory,
        }
    }

    /// The memory of each capture pool with an id of torch's.
    pub(crate) fn capture_pools(&self) -> Vec<CapturePoolHeld> {
        let central = lock(&self.central);
        let held = |(number, id)| {
            let pool = central.pools.get(of_capture(number))?;
            let small = pool.shard.as_ref()?.slab_sums().bytes;
            Some(CapturePoolHeld { id, bytes: central.arenas.held_bytes(pool.space()), small })
        };
        central.captures.iter().filter_map(held).collect()
    }
}

impl Heap {
    /// The figures of a device.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn stats(&self, device: i64) -> Result<Stats, Error> {
        let device = self.device(device)?;
        let mut stats = device.stats(&self.shared);
        stats.bad_frees = self.bad_frees.load(Ordering::Relaxed);
        let snapshot = Reader::own(self.shared.record).and_then(|reader| reader.device(device.id));
        stats.request_p99 = snapshot.map_or(0, |snapshot| snapshot.request_p99());
        device.publish_gauges(&self.shared);
        Ok(stats)
    }

    /// The figures of a device for torch's `memory_stats`.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn torch_stats(&self, device: i64) -> Result<TorchStats, Error> {
        Ok(self.device(device)?.torch_stats(&self.shared))
    }

    /// The memory of each capture pool of a device with an id of torch's. Empty if the device is
    /// unused.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn capture_pools(&self, device: i64) -> Result<Vec<CapturePoolHeld>, Error> {
        Ok(self.device_in_use(device)?.map_or_else(Vec::new, Device::capture_pools))
    }

    /// Restarts the peaks of [`Heap::torch_stats`] at the current figures.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn reset_peaks(&self, device: i64) -> Result<(), Error> {
        let device = self.device(device)?;
        self.shared.record.reset_peaks(device.id);
        lock(&device.central).usage.reset_peaks();
        Ok(())
    }

    /// Restarts the accumulated figures of [`Heap::torch_stats`] at zero.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn reset_accumulated(&self, device: i64) -> Result<(), Error> {
        let device = self.device(device)?;
        self.shared.record.reset_accumulated(device.id);
        let central = &mut *lock(&device.central);
        central.usage.reset_accumulated(central.retries, central.out_of_memories);
        Ok(())
    }
}
