//! Waiting on the host for a whole device: everything freed before is free for every stream after.
//!
//! It costs the program its lead over the device, so only the last rungs of the ladder,
//! `empty_cache`, a release of a pool, the last close of another process's memory and a lack of
//! stream numbers do it; never while a stream captures.

use crate::device::Device;
use crate::driver::DriverError;
use crate::profiler::{self, What};
use crate::request::Eviction;
use crate::shared::Shared;
use crate::sync::lock;
use gruyere_record::{DeviceGauge, EventKind, clock};
use std::collections::HashMap;
use std::time::Instant;

/// Why a device was not synchronised.
pub(crate) enum Unsynchronized {
    /// A stream captures, or may: synchronising would break the capture.
    Capturing,
    /// The driver refused, or could not say whether a stream captures.
    Refused(DriverError),
}

impl Device {
    /// Synchronises the device and makes everything freed available. False, and nothing done, if a
    /// capture is open or the driver refused.
    pub(crate) fn synchronize(&self, shared: &Shared) -> bool {
        self.synchronize_epochs(shared).is_ok()
    }

    /// As [`Device::synchronize`]; returns the epoch that each stream is certainly past.
    pub(crate) fn synchronize_epochs(
        &self,
        shared: &Shared,
    ) -> Result<HashMap<u32, u64>, Unsynchronized> {
        let driver = &*shared.driver;
        let _guard = self.query_guard().ok_or(Unsynchronized::Capturing)?;
        // Unannounced captures must not be broken either.
        if self.streams.capturing(driver).map_err(Unsynchronized::Refused)? {
            return Err(Unsynchronized::Capturing);
        }
        let epochs = self.streams.open_epochs();
        let over = lock(&self.central).captures_over();
        let mut refused = Ok(());
        self.host_wait(shared, || {
            refused = driver.device_synchronize(self.id);
            refused.is_ok()
        });
        refused.map_err(Unsynchronized::Refused)?;
        self.streams.passed(&epochs);
        self.streams.poll(driver);
        self.return_empty_slabs(shared);
        let mut central = lock(&self.central);
        central.usage.synchronised();
        self.collect_completed(shared, &mut central);
        for (pool, version) in over {
            self.free_graph_pool(shared, &mut central, pool, version);
        }
        if !shared.shares() {
            // Streams keep what they used, but an empty region returns to the device.
            let completed = |stream| self.streams.reusable(stream);
            let eviction =
                Eviction { completed: &completed, ..Eviction::of(shared, &self.streams) };
            self.supply.evict(&mut central, &eviction);
        }
        drop(central);
        Ok(epochs)
    }

    pub(crate) fn host_wait(&self, shared: &Shared, wait: impl FnOnce() -> bool) -> bool {
        let start = Instant::now();
        let range = profiler::range(What::HostWait, 0);
        let done = wait();
        drop(range);
        if done {
            let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let mut central = lock(&self.central);
            central.gauges.add(DeviceGauge::HostWaits, 1);
            central.gauges.add(DeviceGauge::HostWaitNanoseconds, nanoseconds);
            drop(central);
            shared.record.event(EventKind::Wait, self.id as u8, 0, 0, 0, nanoseconds, clock::now());
        }
        done
    }
}
