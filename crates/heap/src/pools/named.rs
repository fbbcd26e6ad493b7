//! Named pools: memory that the program returns whole (`gruyere.Pool`).
//!
//! The blocks come from threads that have entered the pool ([`super::route`]); [`super::key`] has
//! the pool's key, figures and errors. A release synchronises the device, so that no work uses any
//! of the memory, and returns all of it to the driver at once; a live block prevents it.

use crate::central::{Central, SMALL};
use crate::device::Device;
use crate::error::Error;
use crate::heap::Heap;
use crate::pools::blocks::run_for;
use crate::pools::key::{LiveBlock, MAX_NAME, PoolError, PoolKey, PoolStats};
use crate::pools::{Pool, PoolNumber, route};
use crate::request::{Eviction, Request, is_absurd};
use crate::runs::arena::{Run, RunState};
use crate::shared::Shared;
use crate::small::size_class::{PAGE, round, round_up};
use crate::small::slab::Slab;
use crate::sync::lock;

/// The times that a release starts again because another thread used the pool meanwhile.
const RELEASE_TRIES: u32 = 4;

impl Device {
    /// As [`Device::malloc`], from pool `number`; from ordinary memory if that pool is gone.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] after the whole ladder, or at the pool's limit; the driver's error;
    /// [`Error::NoSegment`] in a pool with outside segments.
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
        // From here on no thread takes the pool away.
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
        let allocated = self.allocate_run(shared, request, Some(space), bytes, align);
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

    /// Synchronises the device, so that no work uses any of a named pool's memory, and returns all
    /// of it to the driver at once; the bytes returned. The pool stays, empty and without a
    /// reserve, unless it is to be forgotten.
    ///
    /// # Errors
    /// [`PoolError::Live`] and [`PoolError::Busy`]: nothing was done. [`PoolError::Unquiet`]:
    /// nothing was returned. [`PoolError::Kept`]: the driver refused some; a further call tries
    /// that again.
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
            // After this, every use of the pool that was ever enqueued is over, on any stream;
            // frees since have later epochs.
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

    /// Whether nothing is left of a pool's memory; if so, forgets the pool where it is to be
    /// forgotten.
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

    /// Returns the memory of a pool that no work uses; its bytes.
    ///
    /// # Errors
    /// [`PoolError::Kept`]: the pool has let go of it, but the driver has not taken all of it yet.
    /// The next trim tries again.
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

impl Heap {
    pub(crate) fn pool_device(&self, key: PoolKey) -> Result<&Device, PoolError> {
        self.devices().find(|device| device.id == key.device()).ok_or(PoolError::NoSuchPool(key))
    }

    /// The pool of that name on `device`, new or existing; an existing pool gets a larger reserve,
    /// and the limit if one is given. Maps `reserve` bytes for it, in whole pages; `limit` is a
    /// ceiling on its live bytes.
    ///
    /// # Errors
    /// An impossible device, name or number; [`PoolError::Reserve`] if the memory could not be had.
    /// A new pool is then not made, and an existing one keeps what it had.
    pub fn pool_create(
        &self,
        name: &str,
        device: i64,
        reserve: u64,
        limit: Option<u64>,
    ) -> Result<PoolKey, PoolError> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(PoolError::Name(name.chars().take(MAX_NAME).collect()));
        }
        let shared = &self.shared;
        let device = self.device(device)?;
        device.supply.may_keep().map_err(|_| PoolError::Passthrough)?;
        let reserve = round_up(reserve, PAGE).unwrap_or(u64::MAX / PAGE * PAGE);
        let (number, is_new, before, space) = {
            let mut guard = lock(&device.central);
            let central = &mut *guard;
            let known = central.pools.find(name);
            let limit = limit.or_else(|| central.pools.get(known?)?.rules.limit);
            if let Some(limit) =
                limit.filter(|&limit| reserve > round_up(limit, PAGE).unwrap_or(u64::MAX))
            {
                return Err(PoolError::ReserveOverLimit { reserve, limit });
            }
            let number = match known {
                Some(number) => number,
                None => central.add_named_pool(name).ok_or(PoolError::Name(name.to_owned()))?,
            };
            let Some(pool) = central.pools.get_mut(number) else {
                return Err(Error::Internal("a pool vanished").into());
            };
            let before = pool.rules.reserve;
            pool.rules.limit = limit;
            pool.rules.reserve = reserve.max(before);
            // Until it is filled, no thread takes it away.
            pool.busy += 1;
            (number, known.is_none(), before, pool.space())
        };
        let filled = device.fill(shared, space, reserve);
        let key = PoolKey::of(device.id, number);
        {
            let mut central = lock(&device.central);
            if let Some(pool) = central.pools.get_mut(number) {
                pool.busy -= 1;
                if filled.is_err() {
                    pool.rules.reserve = before;
                }
            }
        }
        let Err(error) = filled else { return Ok(key) };
        if is_new {
            // The part that could be mapped goes back. If the driver refuses, the pool stays,
            // empty, and the program can make it again.
            let _ = device.release_named(shared, key, true);
        } else {
            device.trim(shared);
        }
        Err(PoolError::Reserve {
            bytes: reserve,
            free: shared.driver.memory_info(device.id).ok().map(|info| info.free),
            headroom: device.headroom(shared),
            error,
        })
    }

    /// Sends the calling thread's next requests on the pool's device to the pool, until
    /// [`Heap::pool_leave`].
    ///
    /// # Errors
    /// [`PoolError::NoSuchPool`]; [`PoolError::TooDeep`] if the thread is in
    /// [`crate::pools::key::ROUTE_DEPTH`] pools.
    pub fn pool_enter(&self, key: PoolKey) -> Result<(), PoolError> {
        let device = self.pool_device(key)?;
        if lock(&device.central).pools.get(key.number()).is_none() {
            return Err(PoolError::NoSuchPool(key));
        }
        if route::enter(key) { Ok(()) } else { Err(PoolError::TooDeep) }
    }

    /// Ends the calling thread's latest [`Heap::pool_enter`], which was of this pool.
    ///
    /// # Errors
    /// [`PoolError::NotInnermost`] if it was of another.
    pub fn pool_leave(&self, key: PoolKey) -> Result<(), PoolError> {
        if route::leave(key) { Ok(()) } else { Err(PoolError::NotInnermost(key)) }
    }

    /// Synchronises the device and returns all memory of a pool to it at once; the bytes returned.
    /// The pool stays usable, without its reserve.
    ///
    /// # Errors
    /// The reason that keeps the memory: [`PoolError::Live`] names the blocks.
    pub fn pool_release(&self, key: PoolKey) -> Result<u64, PoolError> {
        self.pool_device(key)?.release_named(&self.shared, key, false)
    }

    /// As [`Heap::pool_release`], and forgets the pool. A thread still in it allocates as if it had
    /// left.
    ///
    /// # Errors
    /// As [`Heap::pool_release`].
    pub fn pool_destroy(&self, key: PoolKey) -> Result<u64, PoolError> {
        self.pool_device(key)?.release_named(&self.shared, key, true)
    }

    /// The figures of a pool.
    ///
    /// # Errors
    /// [`PoolError::NoSuchPool`].
    pub fn pool_stats(&self, key: PoolKey) -> Result<PoolStats, PoolError> {
        let device = self.pool_device(key)?;
        lock(&device.central).pool_stats(key.number()).ok_or(PoolError::NoSuchPool(key))
    }

    /// The largest live blocks of a pool, at most `most`.
    ///
    /// # Errors
    /// There is no such pool.
    pub fn pool_blocks(&self, key: PoolKey, most: usize) -> Result<Vec<LiveBlock>, PoolError> {
        let device = self.pool_device(key)?;
        let central = lock(&device.central);
        if central.pools.get(key.number()).is_none() {
            return Err(PoolError::NoSuchPool(key));
        }
        Ok(central.pool_blocks(key.number(), most))
    }
}

/// The most blocks that a refusal names.
const NAMED_BLOCKS: usize = 8;

impl Central {
    /// Adds a named pool. `None`: the numbers are used up.
    pub(crate) fn add_named_pool(&mut self, name: &str) -> Option<PoolNumber> {
        let space = self.arenas.add_space(false);
        let number = self.pools.add_named(name, space);
        if number.is_none() {
            self.arenas.remove_space(space);
        }
        number
    }

    pub(crate) fn pool_stats(&self, number: PoolNumber) -> Option<PoolStats> {
        let pool = self.pools.get(number)?;
        let runs = self.arenas.blocks().map(|(_, run)| run);
        let large: u64 = runs
            .filter(|run| {
                run.state == RunState::Pending
                    && pool.spaces().contains(&self.arenas.region(run.region).space)
            })
            .map(|run| run.bytes)
            .sum();
        Some(PoolStats {
            reserve: pool.rules.reserve,
            limit: pool.rules.limit,
            held: self.held_by(pool),
            live: pool.live_bytes,
            live_blocks: pool.live,
            pending: large + pool.shard.as_ref()?.pending_bytes(),
        })
    }

    /// The largest live blocks of a pool, at most `most`.
    pub(crate) fn pool_blocks(&self, number: PoolNumber, most: usize) -> Vec<LiveBlock> {
        let of_run = |run: &Run| LiveBlock {
            address: run.address,
            requested: run.requested(),
            step: self.writers[SMALL].step_of(run.slot),
            stream: run.stream,
        };
        let of_slot = |slab: &Slab, slot| {
            let facts = slab.facts(slot);
            LiveBlock {
                address: slab.address(slot),
                requested: facts.requested,
                step: self.writers[SMALL].step_of(facts.block),
                stream: slab.stream,
            }
        };
        let mut blocks = self.live_in_pool(number, of_run, of_slot);
        blocks.sort_unstable_by_key(|block| (std::cmp::Reverse(block.requested), block.address));
        blocks.truncate(most);
        blocks
    }

    /// Whether the program has no use for a named pool at this moment.
    ///
    /// # Errors
    /// [`PoolError::Live`] with the largest live blocks; [`PoolError::Busy`] while a thread
    /// allocates from it; [`PoolError::NoSuchPool`].
    pub(crate) fn pool_is_unused(&self, key: PoolKey) -> Result<(), PoolError> {
        let Some(pool) = self.pools.get(key.number()) else {
            return Err(PoolError::NoSuchPool(key));
        };
        if pool.live > 0 {
            return Err(PoolError::Live {
                count: pool.live,
                bytes: pool.live_bytes,
                largest: self.pool_blocks(key.number(), NAMED_BLOCKS),
            });
        }
        if pool.busy > 0 { Err(PoolError::Busy) } else { Ok(()) }
    }

    /// Whether one more block of `bytes` would exceed a pool's limit.
    pub(crate) fn pool_is_full(&self, number: PoolNumber, bytes: u64) -> bool {
        self.pools.get(number).is_some_and(|pool| {
            pool.rules
                .limit
                .is_some_and(|limit| pool.live_bytes.saturating_add(round(bytes)) > limit)
        })
    }
}
