//! What torch tells of CUDA graphs, and that it will.

use super::{Heap, WATCH_CAPTURES};
use crate::device::Device;
use crate::error::Error;
use crate::pools::capture::PoolId;
use crate::sync::lock;
use gruyere_record::{DeviceGauge, EventKind};
use std::sync::atomic::Ordering;

impl Heap {
    /// A capture into pool `id` begins on a stream of `device`; called before the stream captures.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn begin_allocate_to_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let shared = &self.shared;
        self.forget_failed_captures(device);
        // While nothing captures yet, turn what is freed into events: afterwards nothing may be
        // recorded.
        if let Some(_guard) = device.query_guard() {
            device.fence_all(shared, None);
        }
        device.open_pool_scope();
        let running = if lock(&device.central).captures.has_unmatched() {
            device.streams.running_captures(&*shared.driver)
        } else {
            Vec::new()
        };
        let mut central = lock(&device.central);
        central.captures.match_running(&running);
        let number = central.capture_pool(id);
        central.captures.open(number);
        {
            let mut pool_scopes = lock(&self.pool_scopes);
            *pool_scopes += 1;
            self.special.fetch_or(WATCH_CAPTURES, Ordering::AcqRel);
        }
        central.gauges.add(DeviceGauge::CapturesBegun, 1);
        drop(central);
        device.event(shared, EventKind::CaptureBegin, id.0, id.1);
        Ok(())
    }

    /// The pool scope of pool `id` ends.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn end_allocate_to_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let mut central = lock(&device.central);
        let closed = central.captures.find(id).is_some_and(|number| central.captures.close(number));
        if !closed {
            drop(central);
            log::warn!("end of an allocation to pool {id:?} that was not begun; ignored");
            return Ok(());
        }
        self.pool_scopes_closed(device, 1);
        if central.backing.orphaned() > 0
            && let Some(_guard) = device.release_guard(&self.shared)
        {
            // What could not be given back during the capture.
            device.supply.release(&mut central, &*self.shared.driver);
            central.publish_reserved();
        }
        drop(central);
        device.event(&self.shared, EventKind::CaptureEnd, id.0, id.1);
        Ok(())
    }

    /// `count` pool scopes of `device` are closed.
    pub(crate) fn pool_scopes_closed(&self, device: &Device, count: u32) {
        device.pool_scopes.fetch_sub(count, Ordering::AcqRel);
        let mut pool_scopes = lock(&self.pool_scopes);
        *pool_scopes = pool_scopes.saturating_sub(count);
        if *pool_scopes == 0 && self.shared.hears_of_captures() {
            self.special.fetch_and(!WATCH_CAPTURES, Ordering::AcqRel);
        }
    }

    /// Closes the pool scopes that this thread left open when its capture failed: torch does not,
    /// and nothing could be asked or waited for any more
    /// ([`crate::pools::capture::Captures::forget_failed`]). Costs a load where no pool scope is
    /// open.
    pub(crate) fn forget_failed_captures(&self, device: &Device) {
        if device.may_query() || !lock(&device.central).captures.has_own() {
            return;
        }
        // Those of other threads too: which stream is whose is not known.
        if !device.streams.none_captures(&*self.shared.driver) {
            return;
        }
        let forgotten = lock(&device.central).captures.forget_failed();
        if forgotten > 0 {
            self.pool_scopes_closed(device, forgotten);
            log::debug!(
                "{forgotten} captures that failed on device {} are forgotten, and their memory is \
                 taken back",
                device.id
            );
        }
    }

    /// The graph that used pool `id` is gone; its blocks may still be live.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn release_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let mut central = lock(&device.central);
        let number = central.captures.find(id);
        let Some(pool) = number.and_then(|number| central.captures.get_mut(number)) else {
            drop(central);
            log::warn!("release of pool {id:?}, which is not known; ignored");
            return Ok(());
        };
        pool.uses = pool.uses.saturating_sub(1);
        drop(central);
        device.event(&self.shared, EventKind::CaptureRelease, id.0, id.1);
        Ok(())
    }
}
