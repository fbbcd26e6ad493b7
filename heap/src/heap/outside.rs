//! Pools whose memory somebody else brings, in whole segments.
//!
//! A request that nothing fits answers [`Error::NoSegment`]. Whoever made the pool gets a segment
//! of that length from wherever it likes, with no lock of the heap held, brings it
//! ([`Heap::pool_bring`]) and asks again. What lies idle is taken out again by
//! [`Heap::pool_take`].

use super::Heap;
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::order::streams;
use crate::pools::named::{PoolError, PoolKey};
use crate::sync::lock;

impl Heap {
    /// The memory of a pool that has none yet comes from outside from now on. `split`: several
    /// blocks may lie in one segment.
    ///
    /// # Errors
    /// There is no such pool, or it has memory.
    pub fn pool_from_outside(&self, key: PoolKey, split: bool) -> Result<(), PoolError> {
        let device = self.pool_device(key)?;
        let mut central = lock(&device.central);
        if central.pools.get(key.number()).is_none() {
            return Err(PoolError::NoSuchPool(key));
        }
        if central.open_to_outside(key.number(), split) {
            Ok(())
        } else {
            Err(PoolError::Begun(key))
        }
    }

    /// Whether the ceiling on the pool's device has room for a segment of `bytes`.
    pub fn pool_has_room(&self, key: PoolKey, bytes: u64) -> bool {
        self.pool_device(key).is_ok_and(|device| lock(&device.central).has_room_outside(bytes))
    }

    /// Brings a segment of `bytes` at `address` for a block of `size` bytes to a pool, which has it
    /// until [`Heap::pool_take`] answers with it. No work uses it.
    ///
    /// # Errors
    /// It cannot be managed; it is still the caller's.
    pub fn pool_bring(
        &self,
        key: PoolKey,
        size: u64,
        address: u64,
        bytes: u64,
    ) -> Result<(), PoolError> {
        let device = self.pool_device(key)?;
        let segment = (address, bytes);
        if lock(&device.central).add_outside(&self.shared, key.number(), size, segment) {
            Ok(())
        } else {
            Err(PoolError::Segment(address))
        }
    }

    /// The segments of a pool that no work uses any more, with their bytes: they are the caller's
    /// again. None while a CUDA graph is captured.
    pub fn pool_take(&self, key: PoolKey) -> Vec<(u64, u64)> {
        self.pool_device(key)
            .map_or_else(|_| Vec::new(), |device| device.take_outside(&self.shared, key.number()))
    }

    /// Forgets a pool that holds nothing. False: it holds something.
    pub fn pool_forget(&self, key: PoolKey) -> bool {
        let Ok(device) = self.pool_device(key) else { return true };
        let mut central = lock(&device.central);
        let Some(pool) = central.pools.get(key.number()) else { return true };
        let space = pool.space();
        pool.busy == 0 && central.forget_pool(key.number(), space)
    }

    /// The out-of-memory answer to a request of `size` bytes for a pool.
    pub fn pool_refusal(&self, key: PoolKey, size: u64, stream: StreamHandle) -> Error {
        let Ok(device) = self.pool_device(key) else {
            return Error::NoSuchDevice(key.device().into());
        };
        let number = device.named(&self.shared, stream);
        let number = number.map_or(streams::ALL_STREAMS, |found| found.number);
        device.refusal_outside(&self.shared, key.number(), size, number)
    }

    /// A piece of `bytes` of device memory, at one address for as long as it is there.
    ///
    /// # Errors
    /// The driver's.
    pub fn plain_segment(&self, key: PoolKey, bytes: u64) -> Result<u64, Error> {
        let device = self.device(key.device().into())?;
        Ok(device.plain_segment(&self.shared, bytes)?)
    }

    /// Gives back what [`Heap::plain_segment`] gave.
    ///
    /// # Errors
    /// The driver's; it is still there then.
    pub fn free_plain(&self, key: PoolKey, address: u64) -> Result<(), Error> {
        let device = self.device(key.device().into())?;
        Ok(device.free_plain(&self.shared, address)?)
    }
}
