//! The dump for people, and the switch by which a door hears of each block.

use crate::driver::DeviceId;
use crate::heap::{Heap, TOLD};
use crate::lifetime::Lifetime;
use crate::sync::lock;
use std::sync::atomic::Ordering;

impl Heap {
    /// Sets whether a door reports each block that comes and goes; while it does,
    /// [`Heap::is_plain`] and [`Heap::owner`] say no.
    pub fn tell_of_blocks(&self, wanted: bool) {
        if wanted {
            self.special.fetch_or(TOLD, Ordering::AcqRel);
        } else {
            self.special.fetch_and(!TOLD, Ordering::AcqRel);
        }
    }

    /// Whether a door reports each block.
    pub fn tells_of_blocks(&self) -> bool {
        self.special.load(Ordering::Relaxed) & TOLD != 0
    }

    /// A dump for people: every device in use, by cause.
    pub fn dump(&self) -> String {
        use std::fmt::Write;
        let mut text =
            format!("gruyere {} pid {}\n", env!("CARGO_PKG_VERSION"), std::process::id());
        for device in self.devices() {
            let stats = device.stats(&self.shared);
            let _ = writeln!(
                text,
                "\ndevice {} ({}), backing {}",
                device.id,
                device.capabilities.name,
                device.supply.name()
            );
            let central = lock(&device.central);
            for (name, bytes) in [
                ("total memory", stats.total_memory),
                ("limit", stats.limit),
                ("held", stats.reserved),
                ("held, peak", stats.reserved_peak),
                ("live", stats.live),
                ("live, peak", stats.live_peak),
                ("freed, waiting for streams", stats.pending),
                ("free runs", stats.arena_free),
                ("largest free run", stats.largest_free),
                ("largest request, as held", stats.largest_request),
                ("largest request, growing", stats.largest_growing),
                ("slabs", stats.slab_bytes),
                ("slabs, free slots", stats.slab_free),
                ("CUDA graphs", stats.captured),
            ] {
                let _ = writeln!(text, "  {name:<28} {bytes:>16} B");
            }
            for (name, rung) in central.ladder.tried() {
                let _ = writeln!(text, "  reclaim: {name:<19} {rung}");
            }
            for lifetime in Lifetime::ALL {
                let spaces = central.spaces.of_lifetime(lifetime);
                let free: u64 = spaces.map(|space| central.arenas.free_bytes(space)).sum();
                if free > 0 {
                    let _ = writeln!(text, "  free between {} blocks: {free} B", lifetime.name());
                }
            }
            for (_, pool) in central.pools.iter() {
                let Some(name) = pool.name() else { continue };
                let held = central.held_by(pool);
                let _ = writeln!(
                    text,
                    "  pool {name:?}: {held} B held, {} B in {} live blocks",
                    pool.live_bytes, pool.live
                );
            }
            for (id, region) in central.arenas.regions() {
                let kind = if central.arenas.is_stitched(id) { "address space" } else { "span" };
                let _ = writeln!(text, "  {kind} {:#x} {:>14} B", region.address, region.bytes);
            }
        }
        text
    }

    /// The devices in use.
    pub fn devices_in_use(&self) -> Vec<DeviceId> {
        self.devices().map(|device| device.id).collect()
    }
}
