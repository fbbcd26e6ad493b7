//! The private memory of CUDA graphs, from the first capture to the end of its pool.
//!
//! torch opens a pool scope ([`Heap::begin_allocate_to_pool`]) and captures inside it;
//! [`super::capture`] finds the pool of each capturing stream. Once the graphs of a pool are gone
//! ([`Heap::release_pool`]) and its blocks freed, a synchronisation of the device ends the pool
//! ([`Device::free_graph_pool`]).

use crate::central::Central;
use crate::device::Device;
use crate::driver::{CaptureStatus, DriverError, ErrorKind, StreamHandle};
use crate::error::Error;
use crate::heap::{Heap, WATCH_CAPTURES};
use crate::order::streams::{DEFAULT_STREAM, Resolved};
use crate::pools::blocks::run_for;
use crate::pools::capture::{CapturePool, Capturing, PoolId, PoolMatch};
use crate::pools::{PoolNumber, Purpose, Reuse, capture_tag, of_capture};
use crate::request::{Eviction, Growth, Request, Want, is_absurd};
use crate::runs::arena::RunId;
use crate::shared::Shared;
use crate::sync::lock;
use gruyere_record::{DeviceGauge, EventKind};
use std::sync::atomic::Ordering;

impl Device {
    /// The capture that the stream of `handle` is in, if any; asks the driver if that is not known
    /// yet.
    ///
    /// # Errors
    /// The driver's error, if the driver cannot say whether the stream captures.
    pub(crate) fn capture_of(
        &self,
        shared: &Shared,
        handle: StreamHandle,
        found: &Resolved<'_>,
    ) -> Result<Option<Capturing>, Error> {
        let stream = found.number;
        match found.status.unwrap_or_else(|| shared.driver.capture_status(self.id, handle)) {
            Ok(CaptureStatus::Active(id)) => Ok(Some(Capturing::Id(id))),
            // The program can only end it: its work never runs, but its blocks must not pass for
            // ordinary ones.
            Ok(CaptureStatus::Invalidated) => Ok(Some(Capturing::Invalidated)),
            Ok(CaptureStatus::None) => Ok(None),
            // The driver does not answer for the legacy stream while another captures: that one
            // does not capture.
            Err(error) if error.kind == ErrorKind::Capturing && stream == DEFAULT_STREAM => {
                Ok(None)
            }
            Err(error) if error.kind == ErrorKind::Capturing => Ok(Some(Capturing::Unclear)),
            Err(error) if error.kind == ErrorKind::NotSupported => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// As [`Device::malloc`] for a capturing stream: from the private memory of the capture's pool.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if neither the pool nor growth yields memory; the driver's error.
    pub(crate) fn malloc_captured(
        &self,
        shared: &Shared,
        request: Request,
        capturing: Capturing,
    ) -> Result<u64, Error> {
        let pool =
            |central: &mut Central| Some(central.pool_for_capture(capturing, request.stream));
        self.malloc_private(shared, request, pool, false)
    }

    /// As [`Device::malloc`] for a stream that does not capture: from the private memory of the
    /// graphs of pool `id`, or ordinary memory if no graph uses that pool.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the pool, growth and a trim yield no memory; the driver's error.
    pub(crate) fn malloc_for_graphs(
        &self,
        shared: &Shared,
        request: Request,
        id: PoolId,
    ) -> Result<u64, Error> {
        let pool = |central: &mut Central| Some(central.pool_of_graphs(id).ok()?.0);
        if pool(&mut lock(&self.central)).is_none() {
            return self.malloc(shared, request);
        }
        self.malloc_private(shared, request, pool, true)
    }

    /// A block of the pool that `pool` returns. `waits`: the allocator may wait for the device.
    fn malloc_private(
        &self,
        shared: &Shared,
        request: Request,
        pool: impl Fn(&mut Central) -> Option<PoolNumber>,
        waits: bool,
    ) -> Result<u64, Error> {
        if is_absurd(request.size) {
            return Err(self.out_of_memory(shared, request.size, request.stream));
        }
        let request = self.located(shared, request);
        let mut failure = None;
        for attempt in 0..2 + u32::from(waits) {
            match attempt {
                0 => {}
                1 => {
                    // Memory that the streams are known to be past can be returned without a wait.
                    self.return_empty_slabs(shared);
                    self.collect_completed(shared, &mut lock(&self.central));
                }
                _ => {
                    self.trim(shared);
                }
            }
            let central = &mut *lock(&self.central);
            let Some(number) = pool(central) else { break };
            match self.captured_block(shared, central, number, &request) {
                Ok(Some(address)) => return Ok(address),
                Ok(None) => {}
                Err(error) => failure = (!error.is_out_of_memory()).then_some(error),
            }
        }
        Err(self.refusal(shared, &request, failure))
    }

    fn captured_block(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        request: &Request,
    ) -> Result<Option<u64>, DriverError> {
        if let Some(address) = central.block_of_pool(shared, number, request) {
            return Ok(Some(address));
        }
        let run = self.captured_run(shared, central, number, request)?;
        Ok(run.and_then(|run| self.serve_from(shared, central, number, run, request)))
    }

    /// A run of the pool's own memory, else the pool grows. In a capture the allocator may query no
    /// event, and it takes memory from no other pool.
    fn captured_run(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        request: &Request,
    ) -> Result<Option<RunId>, DriverError> {
        let Some(space) = central.pools.get(number).map(|pool| pool.space()) else {
            return Ok(None);
        };
        let (bytes, align) = run_for(request);
        let want = Want { space, bytes, align, stream: request.stream };
        if let Some(run) = want.fit(&mut central.arenas) {
            return Ok(Some(run));
        }
        if self.return_pool_slabs(shared, central, number) > 0
            && let Some(run) = want.fit(&mut central.arenas)
        {
            return Ok(Some(run));
        }
        let capture = capture_tag(number);
        let growth = Growth { capture, ..Growth::of(shared, &self.streams, request.lifetime) };
        if self.supply.extend(central, &growth, want, true).is_err() {
            if let Some(_guard) = self.release_guard(shared) {
                self.supply.evict(central, &Eviction::of(shared, &self.streams));
                self.supply.release(central, &*shared.driver);
                central.publish_reserved();
            }
            self.supply.extend(central, &growth, want, false)?;
        }
        Ok(want.fit_or_join(&mut central.arenas))
    }

    /// Frees the memory of capture pool `number` if the pool was over (released, nothing live)
    /// before the device was synchronised and has served nothing since: the supply keeps it for
    /// others or gives it to the driver. Call only while no stream of the device captures.
    pub(crate) fn free_graph_pool(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: u32,
        version: u64,
    ) {
        if !central.captures_over().contains(&(number, version)) {
            return;
        }
        let pool = of_capture(number);
        central.captures.begin_era(number);
        self.return_pool_slabs(shared, central, pool);
        let Some(space) = central.pools.get(pool).map(|pool| pool.space()) else { return };
        central.arenas.make_unowned(space, &|_| u64::MAX);
        let eviction = Eviction { completed: &|_| u64::MAX, ..Eviction::of(shared, &self.streams) };
        self.supply.evict_space(central, &eviction, space);
        // If memory is left (a block waits for another stream, or the driver refused a span), the
        // pool stays, and the next synchronisation tries again.
        if central.forget_pool(pool, space) {
            central.captures.remove(number);
        }
    }
}

impl Heap {
    /// Opens a pool scope: a capture into pool `id` is about to begin on a stream of `device`.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn begin_allocate_to_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let shared = &self.shared;
        self.forget_failed_captures(device);
        // Turns frees into events now, while no stream captures: during the capture the allocator
        // may record none.
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

    /// Closes a pool scope of pool `id`.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn end_allocate_to_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let mut central = lock(&device.central);
        let closed = central.captures.find(id).is_some_and(|number| central.captures.close(number));
        if !closed {
            drop(central);
            log::warn!("end of an allocation to pool {id:?} without a begin; ignored");
            return Ok(());
        }
        self.pool_scopes_closed(device, 1);
        if central.backing.orphaned() > 0
            && let Some(_guard) = device.release_guard(&self.shared)
        {
            // Memory that could not be returned during the capture.
            device.supply.release(&mut central, &*self.shared.driver);
            central.publish_reserved();
        }
        drop(central);
        self.give_back_imports();
        device.event(&self.shared, EventKind::CaptureEnd, id.0, id.1);
        Ok(())
    }

    /// Notes that `count` pool scopes of `device` have closed.
    pub(crate) fn pool_scopes_closed(&self, device: &Device, count: u32) {
        device.pool_scopes.fetch_sub(count, Ordering::AcqRel);
        let mut pool_scopes = lock(&self.pool_scopes);
        *pool_scopes = pool_scopes.saturating_sub(count);
        if *pool_scopes == 0 && self.shared.hears_of_captures() {
            self.special.fetch_and(!WATCH_CAPTURES, Ordering::AcqRel);
        }
    }

    /// Closes the pool scopes that this thread left open when its capture failed. torch does not
    /// close them, and the allocator could then ask or await nothing any more
    /// ([`crate::pools::capture::Captures::forget_failed`]). Costs one load if no pool scope is
    /// open.
    pub(crate) fn forget_failed_captures(&self, device: &Device) {
        if device.may_query() || !lock(&device.central).captures.has_own() {
            return;
        }
        // Covers other threads too: the heap does not know which thread captures on which stream.
        if !device.streams.none_captures(&*self.shared.driver) {
            return;
        }
        let forgotten = lock(&device.central).captures.forget_failed();
        if forgotten > 0 {
            self.pool_scopes_closed(device, forgotten);
            log::debug!(
                "forgot {forgotten} failed captures on device {}, and reclaimed their memory",
                device.id
            );
        }
    }

    /// Notes that the graph that used pool `id` is gone; its blocks may still be live.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn release_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let mut central = lock(&device.central);
        let number = central.captures.find(id);
        let Some(pool) = number.and_then(|number| central.captures.get_mut(number)) else {
            drop(central);
            log::warn!("release of unknown pool {id:?}; ignored");
            return Ok(());
        };
        pool.uses = pool.uses.saturating_sub(1);
        drop(central);
        device.event(&self.shared, EventKind::CaptureRelease, id.0, id.1);
        Ok(())
    }
}

impl Central {
    /// The number among captures of pool `id`; adds the pool if it is new.
    pub(crate) fn capture_pool(&mut self, id: PoolId) -> u32 {
        match self.captures.find(id) {
            Some(number) => number,
            None => {
                let number = self.captures.add(CapturePool::new(id));
                self.add_capture_pool(number, Reuse::Private)
            }
        }
    }

    /// The pool for a capturing stream; adds the pool if it is new.
    pub(crate) fn pool_for_capture(&mut self, capturing: Capturing, stream: u32) -> PoolNumber {
        let number = match self.captures.matched(capturing, stream) {
            PoolMatch::Pool(number) => return of_capture(number),
            PoolMatch::Tied(ties) => {
                let number = self.captures.add(CapturePool { ties, ..CapturePool::default() });
                self.add_capture_pool(number, Reuse::Private)
            }
            PoolMatch::Never => {
                let number = self.captures.add_never();
                self.add_capture_pool(number, Reuse::Never)
            }
        };
        self.captures.adopt(number, capturing, stream);
        of_capture(number)
    }

    fn add_capture_pool(&mut self, number: u32, reuse: Reuse) -> u32 {
        let space = self.arenas.add_space(true);
        self.pools.add(of_capture(number), Purpose::Capture, reuse, space);
        number
    }

    /// The capture pools that are over, with their versions. A pool that is over before and after a
    /// synchronisation, at the same version, has no replay in flight.
    pub(crate) fn captures_over(&self) -> Vec<(u32, u64)> {
        let over = |(number, version)| {
            let pool = self.pools.get(of_capture(number)).filter(|pool| pool.live == 0)?;
            Some((number, version + pool.served))
        };
        self.captures.released().filter_map(over).collect()
    }
}
