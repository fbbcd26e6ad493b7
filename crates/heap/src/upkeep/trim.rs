//! Returning memory to the driver: on `empty_cache`, in a low-memory phase, at a checkpoint.
//!
//! A checkpoint returns idle memory unless that is little, or memory went back a short while ago:
//! returned memory must be taken from the driver again, at some hundred microseconds for a page of
//! 2 MiB.

use crate::device::{Device, ceiling};
use crate::error::Error;
use crate::heap::Heap;
use crate::profiler::{self, What};
use crate::request::Eviction;
use crate::shared::Shared;
use crate::sync::lock;
use crate::upkeep::phase::{Drain, Occasion, Seen};
use gruyere_record::{DeviceGauge, EventKind};
use std::time::Instant;

impl Device {
    /// Looks at the use of memory, and returns idle memory in a low-memory phase. Call with no lock
    /// held.
    #[cold]
    pub(crate) fn watch(&self, shared: &Shared, occasion: Occasion) {
        let now = Instant::now();
        let (drain, publish) = {
            let central = &mut *lock(&self.central);
            let publish = occasion == Occasion::Due
                && central.watch.is_time_to_publish(central.arenas.most_runs());
            let recent = central.arenas.sample_busy_peak();
            let seen = Seen {
                now: central.arenas.changes(),
                time: now,
                busy: central.arenas.busy(),
                peak: central.arenas.take_busy_peak(),
                held: central.backing.held,
            };
            central.gauges.sample(recent);
            profiler::live(self.id, || shared.record.live(self.id).0);
            (central.watch.look(occasion, seen), publish)
        };
        if publish {
            self.publish_gauges(shared);
        }
        // Where record_stream does not reach the allocator, an event does not prove memory idle.
        if let Some(drain) = drain
            && shared.shares()
        {
            self.drain(shared, drain);
        }
        self.tidy(shared, occasion);
        self.look_at_thresholds(shared, now);
    }

    /// Returns idle memory until `drain.keep` bytes are held or `drain.most` are returned. Memory
    /// is idle if it is unowned, or if its stream is past its last use.
    fn drain(&self, shared: &Shared, drain: Drain) {
        let driver = &*shared.driver;
        {
            let Some(_guard) = self.query_guard() else { return };
            self.fence_all(shared, None);
            self.streams.poll(driver);
        }
        self.return_empty_slabs(shared);
        let mut central = lock(&self.central);
        self.collect_completed(shared, &mut central);
        let Some(_guard) = self.release_guard(shared) else { return };
        let _range = profiler::range(What::LowMemoryTrim, central.backing.reserved);
        let completed = |stream| self.streams.reusable(stream);
        let eviction = Eviction { completed: &completed, ..Eviction::of(shared, &self.streams) };
        let held = central.backing.held;
        let most = held.saturating_sub(drain.keep).min(drain.most);
        self.supply.evict_idle(&mut central, &eviction, most);
        central.publish_reserved();
        let bytes = held.saturating_sub(central.backing.held);
        if bytes > 0 {
            central.headroom_is_open = false;
            let (trims, given) = (central.watch.given.0 + 1, central.watch.given.1 + bytes);
            central.watch.given = (trims, given);
            central
                .gauges
                .set(&[(DeviceGauge::LowPhaseTrims, trims), (DeviceGauge::LowPhaseBytes, given)]);
            drop(central);
            self.event(shared, EventKind::Trim, 0, bytes);
        }
    }
}

/// Memory is low while less than three in four of the peak of live bytes is live.
const LOW: (u64, u64) = (3, 4);

impl Device {
    pub(crate) fn checkpoint(&self, shared: &Shared, now: Instant) -> u64 {
        let (live, peak) = shared.record.live(self.id);
        {
            let mut central = lock(&self.central);
            let idle = central.backing.reserved.saturating_sub(live);
            let is_low = live / LOW.0 < peak / LOW.1 && idle > peak / LOW.1;
            let frees = central.arenas.changes();
            if !is_low || !central.watch.checkpoint(frees, now) {
                return 0;
            }
        }
        self.trim(shared)
    }
}

impl Heap {
    /// `empty_cache`: returns unused memory of all devices to the driver; the bytes returned.
    /// Synchronises each device, unless a stream captures on it.
    pub fn trim(&self) -> u64 {
        self.give_back_imports();
        let devices = self.devices().inspect(|device| self.forget_failed_captures(device));
        devices.map(|device| device.trim(&self.shared)).sum()
    }

    /// Caps the memory held on `device` at `fraction` of its memory, and at `limit:` if that is
    /// less.
    ///
    /// # Errors
    /// The errors for an unknown device, and for a fraction outside of 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64, device: i64) -> Result<(), Error> {
        // NaN is in no range.
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::InvalidFraction(fraction));
        }
        let device = self.device(device)?;
        let total = device.capabilities.total_memory;
        let configured = ceiling(&self.shared.settings, &device.capabilities);
        let mut central = lock(&device.central);
        central.limit = configured.min((total as f64 * fraction) as u64);
        let limit = central.limit;
        central.gauges.set(&[(DeviceGauge::Limit, limit)]);
        Ok(())
    }

    /// Returns idle memory of each device with less than three quarters of the peak live, unless a
    /// checkpoint or a marked phase did so within [`crate::upkeep::phase::CHECKPOINT_INTERVAL`]
    /// before `now`; the bytes returned. Synchronises those devices.
    pub fn checkpoint(&self, now: Instant) -> u64 {
        self.devices().map(|device| device.checkpoint(&self.shared, now)).sum()
    }
}

impl Device {
    /// `empty_cache`: returns all unused memory; the bytes returned to the driver.
    pub(crate) fn trim(&self, shared: &Shared) -> u64 {
        let before = lock(&self.central).backing.reserved;
        let _range = profiler::range(What::Trim, before);
        if !self.synchronize(shared) {
            self.return_empty_slabs(shared);
        }
        let mut central = lock(&self.central);
        central.headroom_is_open = false;
        if let Some(_guard) = self.release_guard(shared) {
            self.supply.evict(&mut central, &Eviction::of(shared, &self.streams));
            self.supply.release(&mut central, &*shared.driver);
            central.trim_addresses(&*shared.driver);
            central.publish_reserved();
        }
        central.gauges.add(DeviceGauge::Trims, 1);
        let bytes = before.saturating_sub(central.backing.reserved);
        drop(central);
        self.event(shared, EventKind::Trim, 0, bytes);
        bytes
    }
}
