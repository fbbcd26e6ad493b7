//! What the heap says of itself: the numbers of the C call and of the gauges.
#![deny(unsafe_code)]

use super::device::Device;
use super::lifetime::Lifetime;
use super::page_table::Owner;
use super::{Error, Heap, Shared, lane, lock};
use crate::record::DeviceGauge;

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
        for space in central.ordinary_spaces() {
            stats.arena_free += central.arenas.free_bytes(space).0;
            stats.largest_free = stats.largest_free.max(central.arenas.largest_free(space));
        }
        for pool in central.captures.pools.iter().flatten() {
            stats.captured += central.arenas.held_bytes(pool.space);
        }
        for (_, pool) in central.named.iter() {
            stats.pending += pool.lane.pending_bytes();
            stats.arena_free += central.arenas.free_bytes(pool.space).0;
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
            for (_, pool) in central.named.iter() {
                let held = central.arenas.held_bytes(pool.space);
                let _ = writeln!(
                    text,
                    "  pool {:?}: {held} B held, {} B in {} live blocks",
                    pool.name, pool.live_bytes, pool.live
                );
            }
            for (id, region) in central.arenas.regions() {
                let kind = if central.arenas.is_stitched(id) { "address space" } else { "span" };
                let _ = writeln!(text, "  {kind} {:#x} {:>14} B", region.address, region.bytes);
            }
        }
        text
    }
}
