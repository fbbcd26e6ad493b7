//! Pools with segments that the caller brings (torch's MemPools with an allocator of their own).
//!
//! If no free run of the pool fits, a request returns [`Error::NoSegment`]. The caller gets a
//! segment of that length from its own allocator, with no lock of the heap held, hands it over
//! ([`Heap::pool_bring`]) and asks again; [`Heap::pool_take`] returns the idle segments. In the
//! heap they are regions of the pool's spaces, which no supply looks at. Small blocks are runs too:
//! a segment may begin at any multiple of 512 B, where no slab could.

use crate::central::Central;
use crate::device::Device;
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::heap::Heap;
use crate::lifetime::Lifetime;
use crate::order::streams;
use crate::pools::key::{PoolError, PoolKey};
use crate::pools::{Pool, PoolNumber, Source};
use crate::request::{Request, Want};
use crate::runs::arena::SpaceId;
use crate::runs::page_table::PageTable;
use crate::shared::Shared;
use crate::small::size_class::{ALIGNMENT, PAGE, round, round_up};
use crate::supply::backing::Span;
use crate::sync::{MutexGuard, lock};
use gruyere_record::gauges::SMALL_LIMIT;

impl Heap {
    /// From now on a pool without memory gets it from outside. `split`: several blocks may lie in
    /// one segment.
    ///
    /// # Errors
    /// [`PoolError::NoSuchPool`]; [`PoolError::Begun`] if it has memory.
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
        self.pool_device(key).is_ok_and(|device| {
            let central = lock(&device.central);
            central.backing.held.checked_add(bytes).is_some_and(|held| held <= central.limit)
        })
    }

    /// Brings a segment of `bytes` at `address` to a pool, for a block of `size` bytes. The pool
    /// has it until [`Heap::pool_take`] returns it. No work may use it.
    ///
    /// # Errors
    /// [`PoolError::NoSuchPool`]; [`PoolError::Begun`] if the pool's memory does not come from
    /// outside; [`PoolError::Segment`] if the segment cannot be managed. The caller keeps it.
    pub fn pool_bring(
        &self,
        key: PoolKey,
        size: u64,
        address: u64,
        bytes: u64,
    ) -> Result<(), PoolError> {
        let device = self.pool_device(key)?;
        let mut central = lock(&device.central);
        let pool = central.pools.get(key.number()).ok_or(PoolError::NoSuchPool(key))?;
        if !pool.is_outside() {
            return Err(PoolError::Begun(key));
        }
        let space = pool.space_of_size(size);
        if central.add_outside(&self.shared, space, (address, bytes)) {
            Ok(())
        } else {
            Err(PoolError::Segment(address))
        }
    }

    /// Hands the segments of a pool that no work uses back to the caller, with their bytes. None
    /// while a CUDA graph is captured.
    pub fn pool_take(&self, key: PoolKey) -> Vec<(u64, u64)> {
        let Ok(device) = self.pool_device(key) else { return Vec::new() };
        let Ok(epochs) = device.synchronize_epochs(&self.shared) else { return Vec::new() };
        let Some(_guard) = device.release_guard(&self.shared) else { return Vec::new() };
        let completed = |stream| epochs.get(&stream).copied().unwrap_or(0);
        lock(&device.central).take_outside(&self.shared, key.number(), &completed)
    }

    /// Forgets a pool that holds nothing. False: it still holds memory.
    pub fn pool_forget(&self, key: PoolKey) -> bool {
        let Ok(device) = self.pool_device(key) else { return true };
        let mut central = lock(&device.central);
        let Some(pool) = central.pools.get(key.number()) else { return true };
        let space = pool.space();
        pool.busy == 0 && central.forget_pool(key.number(), space)
    }

    /// The out-of-memory error for a request of `size` bytes to a pool.
    pub fn pool_refusal(&self, key: PoolKey, size: u64, stream: StreamHandle) -> Error {
        let Ok(device) = self.pool_device(key) else {
            return Error::NoSuchDevice(key.device().into());
        };
        let number = device.named(&self.shared, stream);
        let number = number.map_or(streams::ALL_STREAMS, |found| found.number);
        device.refusal_outside(&self.shared, key.number(), size, number)
    }

    /// `bytes` of device memory at one fixed address.
    ///
    /// # Errors
    /// The driver's error.
    pub fn plain_segment(&self, key: PoolKey, bytes: u64) -> Result<u64, Error> {
        let device = self.device(key.device().into())?;
        let result = self.shared.driver.alloc(device.id, bytes);
        device.count_plain(result.is_err());
        Ok(result?)
    }

    /// Frees a segment from [`Heap::plain_segment`].
    ///
    /// # Errors
    /// The driver's error; the segment is still there then.
    pub fn free_plain(&self, key: PoolKey, address: u64) -> Result<(), Error> {
        let device = self.device(key.device().into())?;
        let result = self.shared.driver.free(device.id, address);
        device.count_plain(result.is_err());
        Ok(result?)
    }
}

impl Device {
    /// As [`Device::malloc_pooled`], for a pool with outside segments.
    ///
    /// # Errors
    /// [`Error::NoSegment`] if the caller, with no lock held, is to bring a further segment or find
    /// other help; [`Error::OutOfMemory`] for a request beyond all bounds.
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
        match segment_for(request.size) {
            Some(bytes) => Err(Error::NoSegment(bytes)),
            None => Err(self.refusal_outside(shared, number, request.size, request.stream)),
        }
    }

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

    fn count_plain(&self, failed: bool) {
        let mut central = lock(&self.central);
        central.backing.calls += 1;
        central.backing.errors += u64::from(failed);
    }
}

/// A block of at least this size (bytes) has a segment of its own at first; smaller ones share
/// segments of [`LARGE_SEGMENT`]: torch's `kMinLargeAlloc` and `kLargeBuffer`.
const MIN_LARGE: u64 = 10 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;

/// The length of a segment for a block of `size` bytes, as torch asks its allocators for them;
/// `None`: beyond all bounds.
pub(crate) fn segment_for(size: u64) -> Option<u64> {
    let size = round_up(size, ALIGNMENT)?;
    if size <= SMALL_LIMIT {
        Some(PAGE)
    } else if size < MIN_LARGE {
        Some(LARGE_SEGMENT)
    } else {
        round_up(size, PAGE)
    }
}

impl Central {
    /// From now on a pool without memory gets it from outside. False: it has memory or a reserve,
    /// or there is no such pool.
    pub(crate) fn open_to_outside(&mut self, number: PoolNumber, split: bool) -> bool {
        let Some(pool) = self.pools.get(number) else { return false };
        let is_empty = pool.spaces().iter().all(|&space| self.arenas.is_empty(space));
        if !is_empty || pool.rules.reserve > 0 || pool.busy > 0 {
            return false;
        }
        let small = self.arenas.add_space(false);
        if !self.pools.open_to_outside(number, small, split) {
            self.arenas.remove_space(small);
        }
        true
    }

    /// The block for `request` from the free memory of a pool. `join`: also joins neighbours of
    /// different streams that the request's stream may use.
    pub(crate) fn block_outside(
        &mut self,
        shared: &Shared,
        number: PoolNumber,
        request: &Request,
        join: bool,
    ) -> Option<u64> {
        let pool = self.pools.get(number)?;
        let (space, bytes) = (pool.space_of_size(request.size), round(request.size));
        let want = Want { space, bytes, align: ALIGNMENT, stream: request.stream };
        let run = match pool.rules.source {
            Source::Outside { split: false } => {
                self.arenas.allocate_whole(space, bytes, request.stream)
            }
            _ if join => want.fit_or_join(&mut self.arenas),
            _ => want.fit(&mut self.arenas),
        }?;
        self.publish_in_pool(shared, number, run, request)
    }

    /// Takes a segment into a space of a pool. False, and nothing done: it cannot be managed.
    fn add_outside(
        &mut self,
        shared: &Shared,
        space: SpaceId,
        (address, bytes): (u64, u64),
    ) -> bool {
        if !address.is_multiple_of(ALIGNMENT)
            || !PageTable::reaches(address, bytes)
            || !shared.table.cover(address, bytes)
        {
            return false;
        }
        self.backing.hold_outside(address, bytes);
        let span = Span { address, bytes, origin: address, taken: bytes };
        self.add_span(shared.record, space, span, Lifetime::Auto, 0);
        true
    }

    /// Takes out the idle segments of a pool, with their bytes; `completed` returns the last epoch
    /// that a stream is past.
    pub(crate) fn take_outside(
        &mut self,
        shared: &Shared,
        number: PoolNumber,
        completed: &dyn Fn(u32) -> u64,
    ) -> Vec<(u64, u64)> {
        let spaces = self.pools.get(number).filter(|pool| pool.is_outside()).map(Pool::spaces);
        let spaces = spaces.map_or_else(Vec::new, <[_]>::to_vec);
        let mut taken = Vec::new();
        for space in spaces {
            for id in self.arenas.empty_regions(space, completed) {
                let (address, bytes) = self.arenas.region(id).span;
                self.backing.unhold_outside(address, bytes);
                self.remove_span(shared.record, id);
                taken.push((address, bytes));
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_as_long_as_torchs() {
        const MIB: u64 = 1 << 20;
        let lengths = [1, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB - 511, 10 * MIB + 1, 30 * MIB];
        assert_eq!(
            lengths.map(segment_for),
            [2, 2, 20, 20, 10, 12, 30].map(|length| Some(length * MIB))
        );
        assert_eq!(segment_for(u64::MAX), None);
    }
}
