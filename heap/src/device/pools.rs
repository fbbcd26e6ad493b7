//! A device's blocks in pools of their own: allocation, free, and giving a pool back whole.
//!
//! Pools differ in where a block comes from when the pool itself has none:
//! [`Device::malloc_pooled`] tries the reclaim ladder, and in a capture, where nothing may be
//! waited for, [`Device::malloc_captured`] grows. All else is the same for all.

use crate::central::{Central, SMALL};
use crate::device::Device;
use crate::error::Error;
use crate::pools::key::{PoolError, PoolKey};
use crate::pools::{Pool, PoolNumber, Reuse, capture_tag};
use crate::report::cause::PoolNote;
use crate::request::{Eviction, Request, is_absurd};
use crate::runs::arena::RunId;
use crate::shared::Shared;
use crate::small::shard::FreeOutcome;
use crate::small::size_class::{ALIGNMENT, SIZE_CLASSES, SLAB, SMALL_MAX, class_of, round};
use crate::sync::lock;

/// How often a release starts again because another thread used the pool meanwhile.
const RELEASE_TRIES: u32 = 4;

/// Bytes and alignment of the run that a pool needs where it has nothing free for `request`: the
/// block, or the slab that it is to lie in.
pub(crate) fn run_for(request: &Request) -> (u64, u64) {
    if request.size > SMALL_MAX {
        (round(request.size), ALIGNMENT)
    } else {
        (SIZE_CLASSES[class_of(request.size)].slab_bytes(), SLAB)
    }
}

impl Device {
    /// As [`Device::malloc`], from pool `number`; from the device's ordinary memory where that pool
    /// is gone.
    ///
    /// # Errors
    /// Out of memory; the pool's limit is one cause of it.
    #[cold]
    pub(crate) fn malloc_pooled(
        &self,
        shared: &Shared,
        request: Request,
        number: PoolNumber,
    ) -> Result<u64, Error> {
        let mut guard = lock(&self.central);
        let central = &mut *guard;
        if central.pools.get(number).is_none() {
            drop(guard);
            return self.malloc(shared, request);
        }
        if is_absurd(request.size) || central.pool_is_full(number, request.size) {
            drop(guard);
            let error = self.out_of_memory(shared, request.size, request.stream);
            return Err(self.with_pool_note(error, number));
        }
        if central.pools.get(number).is_some_and(Pool::is_outside) {
            return self.malloc_outside(shared, guard, &request, number);
        }
        if let Some(address) = central.block_of_pool(shared, number, &request) {
            return Ok(address);
        }
        let Some(pool) = central.pools.get_mut(number) else {
            return Err(Error::Internal("a pool vanished"));
        };
        // From here on nobody takes the pool away.
        pool.busy += 1;
        let space = pool.space();
        let waits = pool.shard.as_ref().is_some_and(|shard| shard.has_pending());
        drop(guard);
        if waits && let Some(_guard) = self.query_guard() {
            self.fence(shared, Some(request.stream));
            self.streams.poll_some(&*shared.driver);
        }
        self.return_pool_slabs(shared, &mut lock(&self.central), number);
        let request = self.located(shared, request);
        let (bytes, align) = run_for(&request);
        let allocated = self.allocate_run_in(shared, request, Some(space), bytes, align);
        let served = allocated.map(|(mut central, run)| {
            let address = self.serve_from(shared, &mut central, number, run, &request);
            (central, address)
        });
        let no_longer_busy = |central: &mut Central| {
            if let Some(pool) = central.pools.get_mut(number) {
                pool.busy -= 1;
            }
        };
        match served {
            Ok((mut central, address)) => {
                no_longer_busy(&mut central);
                address.ok_or(Error::Internal("a pool's run vanished"))
            }
            Err(error) => {
                no_longer_busy(&mut lock(&self.central));
                Err(self.with_pool_note(error, number))
            }
        }
    }

    /// Makes a run of a pool's, which has been taken for `request`, the block that was asked for,
    /// or the slab that it comes from.
    pub(crate) fn serve_from(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        run: RunId,
        request: &Request,
    ) -> Option<u64> {
        if request.size > SMALL_MAX {
            return central.publish_in_pool(shared, number, run, request);
        }
        let class = class_of(request.size) as u8;
        let slab = self.make_slab(shared, central, run, class, request, capture_tag(number))?;
        self.add_slab(shared, number, central.pools.shard_mut(number)?, slab);
        central.block_of_pool(shared, number, request)
    }

    /// Adds what is known of the pool to an out-of-memory.
    pub(crate) fn with_pool_note(&self, error: Error, number: PoolNumber) -> Error {
        let Error::OutOfMemory(mut report) = error else { return error };
        let central = lock(&self.central);
        report.pool = central.pools.get(number).and_then(|pool| {
            Some(PoolNote {
                name: pool.name()?.to_owned(),
                held: central.held_by(pool),
                live: pool.live_bytes,
                limit: pool.rules.limit,
            })
        });
        Error::OutOfMemory(report)
    }

    /// Frees the small block at `address`, in the shard of a pool. `None`: no block starts there.
    pub(crate) fn free_apart(
        &self,
        shared: &Shared,
        number: PoolNumber,
        slab: u32,
        address: u64,
        start: u64,
    ) -> Option<()> {
        self.free_slot_apart(shared, &mut lock(&self.central), number, slab, address, start)
    }

    /// As [`Device::free_apart`].
    pub(crate) fn free_slot_apart(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        slab: u32,
        address: u64,
        start: u64,
    ) -> Option<()> {
        let pool = central.pools.get_mut(number)?;
        let shard = pool.shard.as_mut()?;
        let requested = shard.requested(slab, address)?;
        let outcome = match pool.rules.reuse {
            Reuse::Never => shard.freeze(&mut central.writers[SMALL], slab, address, start),
            Reuse::Shared | Reuse::Private => {
                shard.free(&mut central.writers[SMALL], slab, address, start, &self.streams)
            }
        };
        let surplus = match outcome {
            FreeOutcome::Freed | FreeOutcome::Waits => None,
            FreeOutcome::Surplus(id) => self.remove_slab(shared, shard, id),
            FreeOutcome::Unknown => return None,
        };
        pool.note_free(round(requested));
        if let Some(slab) = surplus {
            central.release_slab(&slab);
        }
        Some(())
    }

    /// Gives all memory of a named pool back to the driver at once, when no work uses any of it:
    /// the device is synchronised for that. The bytes given. The pool stays, empty and without a
    /// reserve, unless it is to be forgotten.
    ///
    /// # Errors
    /// [`PoolError::Live`] and [`PoolError::Busy`]: nothing has been done. [`PoolError::Unquiet`]:
    /// nothing has been given. [`PoolError::Kept`]: the driver refused; what it refused can be
    /// tried again.
    pub(crate) fn release_named(
        &self,
        shared: &Shared,
        key: PoolKey,
        forget: bool,
    ) -> Result<u64, PoolError> {
        let number = key.number();
        let mut given = 0;
        for _ in 0..RELEASE_TRIES {
            {
                let mut central = lock(&self.central);
                central.pool_is_unused(key)?;
                if central.pools.get(number).is_some_and(Pool::is_outside) {
                    return Err(PoolError::Outside(key));
                }
                if self.is_given(shared, &mut central, number, forget) {
                    return Ok(given);
                }
            }
            // Every use of the pool that was ever enqueued is over after this, on whatever stream;
            // frees since are of later epochs.
            let epochs = self.synchronize_epochs(shared).map_err(|_| PoolError::Unquiet)?;
            self.return_pool_slabs(shared, &mut lock(&self.central), number);
            let Some(_guard) = self.release_guard(shared) else { return Err(PoolError::Unquiet) };
            let mut central = lock(&self.central);
            central.pool_is_unused(key)?;
            let completed = |stream| epochs.get(&stream).copied().unwrap_or(0);
            given += self.release_named_space(shared, &mut central, number, &completed)?;
            if self.is_given(shared, &mut central, number, forget) {
                return Ok(given);
            }
        }
        let central = lock(&self.central);
        central.pool_is_unused(key)?;
        Err(PoolError::Kept { bytes: central.pool_stats(number).map_or(0, |stats| stats.held) })
    }

    /// Whether nothing is left of a pool's memory; if so, and if it is to be forgotten, it is.
    fn is_given(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        forget: bool,
    ) -> bool {
        let Some(pool) = central.pools.get_mut(number) else { return true };
        let space = pool.space();
        if central.arenas.held_bytes(space) > 0 {
            return false;
        }
        pool.rules.reserve = 0;
        if !forget {
            return true;
        }
        central.free_addresses(&*shared.driver, space);
        central.forget_pool(number, space)
    }

    /// Gives back what of a pool's memory no work uses; its bytes.
    ///
    /// # Errors
    /// [`PoolError::Kept`]: the pool has let go of it, but the driver has not taken it all yet. The
    /// next trim tries again.
    fn release_named_space(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        completed: &dyn Fn(u32) -> u64,
    ) -> Result<u64, PoolError> {
        let Some(pool) = central.pools.get_mut(number) else { return Ok(0) };
        pool.rules.reserve = 0;
        let space = pool.space();
        let eviction = Eviction { completed, ..Eviction::of(shared, &self.streams) };
        let (given, taken) = self.supply.release_space(central, &eviction, space);
        if taken < given { Err(PoolError::Kept { bytes: given - taken }) } else { Ok(given) }
    }
}
