//! A device's blocks in pools whose memory comes from outside.

use crate::central::{self, Central};
use crate::device::Device;
use crate::driver::DriverError;
use crate::error::Error;
use crate::pools::PoolNumber;
use crate::request::Request;
use crate::shared::Shared;
use crate::sync::{MutexGuard, lock};

impl Device {
    /// As [`Device::malloc_pooled`], where segments come from outside.
    ///
    /// # Errors
    /// [`Error::NoSegment`]: one more is needed, or (with no lock held) whoever brings them is to
    /// be asked what else can be done.
    pub(crate) fn malloc_outside(
        &self,
        shared: &Shared,
        mut central: MutexGuard<'_, Central>,
        request: &Request,
        number: PoolNumber,
    ) -> Result<u64, Error> {
        if let Some(address) = central.block_outside(shared, number, request, false) {
            return Ok(address);
        }
        if let Some(_guard) = self.query_guard() {
            self.fence(shared, Some(request.stream));
            self.streams.poll_some(&*shared.driver);
        }
        self.collect_completed(shared, &mut central);
        if let Some(address) = central.block_outside(shared, number, request, true) {
            return Ok(address);
        }
        drop(central);
        match central::outside::segment_for(request.size) {
            Some(bytes) => Err(Error::NoSegment(bytes)),
            None => Err(self.refusal_outside(shared, number, request.size, request.stream)),
        }
    }

    /// The out-of-memory answer to a request for a pool.
    #[cold]
    pub(crate) fn refusal_outside(
        &self,
        shared: &Shared,
        number: PoolNumber,
        size: u64,
        stream: u32,
    ) -> Error {
        self.with_pool_note(self.out_of_memory(shared, size, stream), number)
    }

    /// Takes out the segments of a pool that no work uses any more: the device is synchronised for
    /// that. None, where it cannot be.
    pub(crate) fn take_outside(&self, shared: &Shared, number: PoolNumber) -> Vec<(u64, u64)> {
        let Ok(epochs) = self.synchronize_epochs(shared) else { return Vec::new() };
        let Some(_guard) = self.release_guard(shared) else { return Vec::new() };
        let completed = |stream| epochs.get(&stream).copied().unwrap_or(0);
        lock(&self.central).take_outside(shared, number, &completed)
    }

    /// A segment of the driver's, of `bytes`.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn plain_segment(&self, shared: &Shared, bytes: u64) -> Result<u64, DriverError> {
        let result = shared.driver.alloc(self.id, bytes);
        self.count_plain(result.is_err());
        result
    }

    /// Gives a segment of the driver's back.
    ///
    /// # Errors
    /// The driver's; the segment is still there then.
    pub(crate) fn free_plain(&self, shared: &Shared, address: u64) -> Result<(), DriverError> {
        let result = shared.driver.free(self.id, address);
        self.count_plain(result.is_err());
        result
    }

    fn count_plain(&self, failed: bool) {
        let mut central = lock(&self.central);
        central.backing.calls += 1;
        central.backing.errors += u64::from(failed);
    }
}
