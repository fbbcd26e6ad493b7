//! Named pools as the doors see them, over all devices.

use super::Heap;
use crate::device::Device;
use crate::pools::key::{LiveBlock, MAX_NAME, PoolError, PoolKey, PoolStats};
use crate::pools::route;
use crate::small::size_class::{PAGE, round_up};
use crate::sync::lock;

impl Heap {
    pub(crate) fn pool_device(&self, key: PoolKey) -> Result<&Device, PoolError> {
        self.devices().find(|device| device.id == key.device()).ok_or(PoolError::NoSuchPool(key))
    }

    /// A pool of that name on `device`: a new one, or the one that there is, whose reserve is
    /// raised and whose limit is replaced if one is given. `reserve` bytes are mapped for it, in
    /// whole pages; `limit` is a ceiling on its live bytes.
    ///
    /// # Errors
    /// A device, a name or numbers that cannot be; [`PoolError::Reserve`]: the memory could not be
    /// had. A new pool is not made then, and an old one keeps what it had.
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
                return Err(super::Error::Internal("a pool vanished").into());
            };
            let before = pool.rules.reserve;
            pool.rules.limit = limit;
            pool.rules.reserve = reserve.max(before);
            // Until it is filled, nobody takes it away.
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
            // What could be mapped of it goes back; where the driver refuses, the pool stays,
            // empty, and can be made again.
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
    /// There is no such pool, or the thread is in [`crate::pools::route::ROUTE_DEPTH`] pools.
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
    /// It was not.
    pub fn pool_leave(&self, key: PoolKey) -> Result<(), PoolError> {
        if route::leave(key) { Ok(()) } else { Err(PoolError::NotInnermost(key)) }
    }

    /// Gives all memory of a pool back to the device at once, after the device has been
    /// synchronised; the bytes given. The pool can be used again; its reserve is gone.
    ///
    /// # Errors
    /// What keeps it: [`PoolError::Live`] names the blocks.
    pub fn pool_release(&self, key: PoolKey) -> Result<u64, PoolError> {
        self.pool_device(key)?.release_named(&self.shared, key, false)
    }

    /// As [`Heap::pool_release`], and forgets the pool. A thread that is still in it allocates as
    /// if it were not.
    ///
    /// # Errors
    /// As [`Heap::pool_release`].
    pub fn pool_destroy(&self, key: PoolKey) -> Result<u64, PoolError> {
        self.pool_device(key)?.release_named(&self.shared, key, true)
    }

    /// Numbers of a pool.
    ///
    /// # Errors
    /// There is no such pool.
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
