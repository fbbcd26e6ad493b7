//! A device's blocks inside captures: allocation, and the end of a pool.

use crate::central::Central;
use crate::device::Device;
use crate::device::pools::run_for;
use crate::driver::{CaptureStatus, ErrorKind, StreamHandle};
use crate::error::Error;
use crate::order::streams::{DEFAULT_STREAM, Resolved};
use crate::pools::capture::{Capturing, PoolId};
use crate::pools::{PoolNumber, capture_tag, of_capture};
use crate::request::{Eviction, Growth, Request, Want, is_absurd};
use crate::runs::arena::RunId;
use crate::shared::Shared;
use crate::sync::lock;

impl Device {
    /// What the stream of `handle` captures, if anything; it is asked where it was not before.
    ///
    /// # Errors
    /// The driver's.
    pub fn capture_of(
        &self,
        shared: &Shared,
        handle: StreamHandle,
        found: &Resolved<'_>,
    ) -> Result<Option<Capturing>, Error> {
        let stream = found.number;
        match found.status.unwrap_or_else(|| shared.driver.capture_status(self.id, handle)) {
            Ok(CaptureStatus::Active(id)) => Ok(Some(Capturing::Id(id))),
            // It can only be ended: its work never runs, but its blocks must not be taken for
            // ordinary ones.
            Ok(CaptureStatus::Invalidated) => Ok(Some(Capturing::Invalidated)),
            Ok(CaptureStatus::None) => Ok(None),
            // The legacy stream cannot be asked while another captures: it does not capture itself.
            Err(error) if error.kind == ErrorKind::Capturing && stream == DEFAULT_STREAM => {
                Ok(None)
            }
            Err(error) if error.kind == ErrorKind::Capturing => Ok(Some(Capturing::Unclear)),
            Err(error) if error.kind == ErrorKind::NotSupported => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// As [`Device::malloc`] for a stream that captures: from the private memory of the capture's
    /// pool.
    ///
    /// # Errors
    /// Out of memory.
    pub fn malloc_captured(
        &self,
        shared: &Shared,
        request: Request,
        capturing: Capturing,
    ) -> Result<u64, Error> {
        let pool =
            |central: &mut Central| Some(central.pool_for_capture(capturing, request.stream));
        self.malloc_private(shared, request, pool, false)
    }

    /// As [`Device::malloc`] for a stream that does not capture, from the private memory of the
    /// graphs of pool `id`; from ordinary memory where no graph uses that.
    ///
    /// # Errors
    /// Out of memory.
    pub fn malloc_for_graphs(
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

    /// A block of the pool that `pool` says. `waits`: the device may be waited for.
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
        for attempt in 0..2 + u32::from(waits) {
            match attempt {
                0 => {}
                1 => {
                    // What the streams are known to be past can be given back without waiting.
                    self.return_empty_slabs(shared);
                    self.collect_completed(shared, &mut lock(&self.central));
                }
                _ => {
                    self.trim(shared);
                }
            }
            let central = &mut *lock(&self.central);
            let Some(number) = pool(central) else { break };
            if let Some(address) = self.captured_block(shared, central, number, &request) {
                return Ok(address);
            }
        }
        Err(self.refusal(shared, &request))
    }

    fn captured_block(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        request: &Request,
    ) -> Option<u64> {
        if let Some(address) = central.block_of_pool(shared, number, request) {
            return Some(address);
        }
        let run = self.captured_run(shared, central, number, request)?;
        self.serve_from(shared, central, number, run, request)
    }

    /// The pool's own memory, else growth: no event may be asked about, and nobody else's memory
    /// may be taken.
    fn captured_run(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        request: &Request,
    ) -> Option<RunId> {
        let space = central.pools.get(number)?.space();
        let (bytes, align) = run_for(request);
        let want = Want { space, bytes, align, stream: request.stream };
        if let Some(run) = want.fit(&mut central.arenas) {
            return Some(run);
        }
        if self.return_pool_slabs(shared, central, number) > 0
            && let Some(run) = want.fit(&mut central.arenas)
        {
            return Some(run);
        }
        let capture = capture_tag(number);
        let growth = Growth { capture, ..Growth::of(shared, &self.streams, request.lifetime) };
        if self.supply.extend(central, &growth, want, true).is_err() {
            if let Some(_guard) = self.release_guard(shared) {
                self.supply.evict(central, &Eviction::of(shared, &self.streams));
                self.supply.release(central, &*shared.driver);
                central.publish_reserved();
            }
            if let Err(error) = self.supply.extend(central, &growth, want, false) {
                central.failure = (!error.is_out_of_memory()).then_some(error);
                return None;
            }
        }
        want.fit_or_join(&mut central.arenas)
    }

    /// Gives the memory of capture pool `number` back that was over before the device was
    /// synchronised, if nobody has used it since. Nothing may be capturing on the device.
    pub(crate) fn release_capture_pool(
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
        // A block that waits for another stream, or a span that the driver would not take: next
        // time.
        if central.forget_pool(pool, space) {
            central.captures.remove(number);
        }
    }
}
