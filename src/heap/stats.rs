//! What the heap says of itself: the numbers of the C call and of the gauges.
#![deny(unsafe_code)]

use super::arena::{Arenas, RegionId, Run, RunState};
use super::device::Device;
use super::lifetime::Lifetime;
use super::page_table::Owner;
use super::size_class::{PAGE, SMALL_MAX};
use super::slab::Slab;
use super::tally::HeldStats;
use super::{Error, Heap, Shared, lane, lock};
use crate::record::DeviceGauge;
use crate::record::peaks::{BlockStats, SMALL};

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

/// Free runs of a region that cannot be given back, and their bytes: all of it where a span has a block, what is not whole pages
/// where pages come and go by themselves.
fn bound(arenas: &Arenas, id: RegionId) -> (u64, u64) {
    let free = || arenas.runs_of(id).map(|(_, run)| run).filter(|run| run.state == RunState::Free);
    if !arenas.is_stitched(id) {
        let used = arenas.runs_of(id).any(|(_, run)| run.state != RunState::Free);
        return if used { (free().count() as u64, free().map(|run| run.bytes).sum()) } else { (0, 0) };
    }
    let loose = |run: &Run| {
        ((run.address + run.bytes) / PAGE * PAGE).saturating_sub(run.address.next_multiple_of(PAGE))
    };
    free()
        .map(|run| run.bytes - loose(run))
        .filter(|&bytes| bytes > 0)
        .fold((0, 0), |sum, bytes| (sum.0 + 1, sum.1 + bytes))
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
            events_recorded: counts.recorded,
            events_queried: counts.queried,
            ..Stats::default()
        };
        for lane in &self.lanes {
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
        for space in central.ordinary_spaces() {
            stats.arena_free += central.arenas.free_bytes(space).0;
            stats.largest_free = stats.largest_free.max(central.arenas.largest_free(space));
        }
        for pool in central.captures.pools.iter().flatten() {
            stats.captured += central.arenas.held_bytes(pool.space);
        }
        stats
    }

    /// Writes the gauges that the straight path leaves alone.
    pub fn publish_gauges(&self, shared: &Shared) {
        let stats = self.stats(shared);
        let mut central = lock(&self.central);
        let (calls, errors) = (central.backing.calls, central.backing.errors);
        central.gauges.set(&[
            (DeviceGauge::ArenaFree, stats.arena_free),
            (DeviceGauge::LargestFree, stats.largest_free),
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
        // Of slabs: those that have a used slot, their bytes, and the free slots in them.
        let (mut slabs, mut free_slots) = (0, 0);
        let mut see = |slab: &Slab| {
            if slab.used() > 0 {
                slabs += slab.size_class().slab_bytes();
                free_slots += u64::from(slab.size_class().slots - slab.used());
            }
        };
        for lane in &self.lanes {
            lock(lane).lane.slabs().for_each(|(_, slab)| see(slab));
        }
        let mut central = lock(&self.central);
        for pool in central.captures.pools.iter().flatten() {
            pool.lane.slabs().for_each(|(_, slab)| see(slab));
        }
        // Direct blocks are small ones that lie in no slab; then there are no slabs, but of captures.
        let direct: u64 =
            central.direct_blocks().map(|block| block.1).filter(|&bytes| bytes <= SMALL_MAX).sum();
        let small = slabs.saturating_sub(blocks.active_bytes[SMALL].current.saturating_sub(direct));
        let (runs, bytes) = central
            .arenas
            .regions()
            .map(|(id, _)| bound(&central.arenas, id))
            .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        central.tally.look([free_slots, runs], [small, bytes]);
        let (retries, out_of_memories) = (central.retries, central.out_of_memories);
        TorchStats {
            blocks,
            held: central.tally.stats(retries, out_of_memories),
            limit: central.limit,
            total_memory: self.capabilities.total_memory,
        }
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
                let (_, slab) = cell.lane.slabs().find(|(id, _)| *id == slab)?;
                let facts = slab.facts(slab.slot_at(address)?);
                Some((slab.stream, lane::round(facts.requested)))
            }
            Owner::Large { blocks, .. } => {
                let central = lock(&self.central);
                let mut runs = blocks.into_iter().flatten().filter_map(|id| central.arenas.run(id));
                let run = runs.find(|run| run.address == address)?;
                let space = central.arenas.region(run.region).space;
                let is_ordinary = central.ordinary_spaces().any(|ordinary| ordinary == space);
                (!run.shared && is_ordinary).then_some((run.stream, run.bytes))
            }
            Owner::None => None,
        }
    }
}

impl Heap {
    /// The numbers of a device.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn stats(&self, device: i64) -> Result<Stats, Error> {
        let device = self.device(device)?;
        let mut stats = device.stats(&self.shared);
        stats.bad_frees = self.bad_frees.load(std::sync::atomic::Ordering::Relaxed);
        device.publish_gauges(&self.shared);
        Ok(stats)
    }

    /// What torch's `memory_stats` tells of a device.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn torch_stats(&self, device: i64) -> Result<TorchStats, Error> {
        Ok(self.device(device)?.torch_stats(&self.shared))
    }

    /// Peaks of [`Heap::torch_stats`] begin again at what there is.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn reset_peaks(&self, device: i64) -> Result<(), Error> {
        self.device(device)?.reset_peaks(&self.shared);
        Ok(())
    }

    /// What came and went in [`Heap::torch_stats`] begins again at nothing.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn reset_accumulated(&self, device: i64) -> Result<(), Error> {
        self.device(device)?.reset_accumulated(&self.shared);
        Ok(())
    }

    /// A dump for people: every device in use, by cause.
    pub fn dump(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("gruyere {} pid {}\n", env!("CARGO_PKG_VERSION"), std::process::id());
        for device in self.devices() {
            let stats = device.stats(&self.shared);
            let _ = writeln!(
                text,
                "\ndevice {} ({}), backing {}",
                device.id,
                device.capabilities.name,
                device.kind.name()
            );
            let central = lock(&device.central);
            for (name, bytes) in [
                ("total memory", stats.total_memory),
                ("limit", stats.limit),
                ("reserved", stats.reserved),
                ("reserved, peak", stats.reserved_peak),
                ("live", stats.live),
                ("live, peak", stats.live_peak),
                ("freed, waiting for streams", stats.pending),
                ("free runs", stats.arena_free),
                ("largest free run", stats.largest_free),
                ("slabs", stats.slab_bytes),
                ("slabs, free slots", stats.slab_free),
                ("CUDA graphs", stats.captured),
            ] {
                let _ = writeln!(text, "  {name:<28} {bytes:>16} B");
            }
            for lifetime in Lifetime::ALL {
                let free = central.arenas.free_bytes(central.space(lifetime)).0;
                if free > 0 {
                    let _ = writeln!(text, "  free between {} blocks: {free} B", lifetime.name());
                }
            }
            for (id, region) in central.arenas.regions() {
                let kind = if central.arenas.is_stitched(id) { "address space" } else { "span" };
                let _ = writeln!(text, "  {kind} {:#x} {:>14} B", region.address, region.bytes);
            }
        }
        text
    }
}
