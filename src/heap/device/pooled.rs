//! A device's blocks in named pools: allocation, free, and giving a pool back whole.
#![deny(unsafe_code)]

use crate::heap::arena::RunId;
use crate::heap::backing::Kind;
use crate::heap::central::{self, Central};
use crate::heap::device::Device;
use crate::heap::error::Error;
use crate::heap::lane::{FreeOutcome, LANES};
use crate::heap::named::{NAMED_LANES, PoolError, PoolKey};
use crate::heap::oom::PoolNote;
use crate::heap::page_table::Owner;
use crate::heap::request::{Request, Want};
use crate::heap::shared::Shared;
use crate::heap::size_class::round;
use crate::heap::size_class::{ALIGNMENT, PAGE, SIZE_CLASSES, SMALL_MAX, class_of};
use crate::heap::slab::Slab;
use crate::heap::sync::{MutexGuard, lock};
use crate::record::BlockTag;

/// How often a release starts again because another thread used the pool meanwhile.
const RELEASE_TRIES: u32 = 4;

impl Device {
    /// As [`Device::malloc`], from pool `number`; from the device's ordinary memory where that pool is gone.
    ///
    /// # Errors
    /// Out of memory; the pool's limit is one cause of it.
    #[cold]
    pub(in crate::heap) fn malloc_pooled(
        &self,
        shared: &Shared,
        request: Request,
        number: u32,
    ) -> Result<u64, Error> {
        let mut guard = lock(&self.central);
        let central = &mut *guard;
        if central.named.get(number).is_none() {
            drop(guard);
            return self.malloc(shared, request);
        }
        if central::is_absurd(request.size) || central.pool_is_full(number, request.size) {
            drop(guard);
            let error = self.out_of_memory(shared, request.size, request.stream);
            return Err(self.with_pool_note(error, number));
        }
        let (bytes, align) = if request.size > SMALL_MAX {
            (round(request.size), ALIGNMENT)
        } else {
            (SIZE_CLASSES[class_of(request.size)].slab_bytes(), PAGE)
        };
        if let Some(address) = pool_block(shared, central, number, &request) {
            return Ok(address);
        }
        let Some(pool) = central.named.get_mut(number) else {
            return Err(Error::Internal("a pool vanished"));
        };
        // From here on nobody takes the pool away.
        pool.busy += 1;
        let (space, waits) = (pool.space, pool.lane.has_pending());
        drop(guard);
        if waits && let Some(_asking) = self.ask() {
            self.seal(shared, Some(request.stream));
            self.streams.poll_some(&*shared.driver);
        }
        self.return_pool_slabs(shared, number);
        let obtained = self.obtain_in(shared, request, Some(space), bytes, align);
        let served = obtained.map(|(mut guard, run)| {
            let address = self.publish_pooled(shared, &mut guard, number, run, &request);
            (guard, address)
        });
        let (mut guard, address) = match served {
            Ok(served) => served,
            Err(error) => {
                let mut guard = lock(&self.central);
                if let Some(pool) = guard.named.get_mut(number) {
                    pool.busy -= 1;
                }
                drop(guard);
                return Err(self.with_pool_note(error, number));
            }
        };
        if let Some(pool) = guard.named.get_mut(number) {
            pool.busy -= 1;
        }
        address.ok_or(Error::Internal("a pool's run vanished"))
    }

    /// Makes a run of the pool's the block that was asked for, or the slab that it comes from.
    fn publish_pooled(
        &self,
        shared: &Shared,
        guard: &mut MutexGuard<'_, Central>,
        number: u32,
        run: RunId,
        request: &Request,
    ) -> Option<u64> {
        let central = &mut **guard;
        if request.size > SMALL_MAX {
            let address = central.publish(&shared.table, run, request, shared.step(), 0);
            count_block(central, number, request.size);
            return Some(address);
        }
        let class = class_of(request.size) as u8;
        let facts = central.arenas.run_mut(run)?;
        facts.is_slab = true;
        let (base, epoch) = (facts.address, facts.epoch);
        let whose = BlockTag::new(self.id as u8, request.lifetime as u8, 0, request.stream);
        let mut slab = Slab::new(base, class, whose, run);
        slab.epoch = epoch;
        let bytes = slab.size_class().slab_bytes();
        central.tally.slab_taken(bytes);
        let slot = u64::from(slab.size_class().slot);
        let segment = central::slab_segment(self.id, base, bytes, slot, request.stream, slab.lifetime, 0);
        slab.segment = shared.record.segment_insert(&segment);
        let id = central.named.get_mut(number)?.lane.add_slab(slab);
        let owner = Owner::Slab { device: self.id, lane: NAMED_LANES + number, slab: id };
        shared.table.set_range(base, bytes, owner);
        pool_block(shared, central, number, request)
    }

    /// Adds what is known of the pool to an out-of-memory.
    fn with_pool_note(&self, error: Error, number: u32) -> Error {
        let Error::OutOfMemory(mut report) = error else { return error };
        let central = lock(&self.central);
        report.pool = central.named.get(number).map(|pool| PoolNote {
            name: pool.name.clone(),
            held: central.arenas.held_bytes(pool.space),
            live: pool.live_bytes,
            limit: pool.limit,
        });
        Error::OutOfMemory(report)
    }

    /// Frees the small block at `address`, in a lane that is not one of the device's own: a capture's or a pool's. `None`: no block
    /// starts there.
    pub(in crate::heap) fn free_apart(
        &self,
        shared: &Shared,
        lane: u32,
        slab: u32,
        address: u64,
        start: u64,
    ) -> Option<()> {
        let Some(number) = lane.checked_sub(NAMED_LANES) else {
            return self.free_captured(lane - LANES as u32, slab, address, start);
        };
        let central = &mut *lock(&self.central);
        let pool = central.named.get_mut(number)?;
        let requested = pool.lane.requested(slab, address)?;
        let surplus = match pool.lane.free(&mut central.writer, slab, address, start, &self.streams) {
            FreeOutcome::Freed | FreeOutcome::Waits => None,
            FreeOutcome::Surplus(id) => pool.lane.remove_slab(id),
            FreeOutcome::Unknown => return None,
        };
        pool.live -= 1;
        pool.live_bytes -= round(requested);
        if let Some(slab) = surplus {
            self.unpublish(shared, Some(&slab));
            central.release_slab(slab.run, slab.stream, slab.epoch);
        }
        Some(())
    }

    /// As [`Device::record_stream`] for such a block.
    pub(in crate::heap) fn record_stream_apart(
        &self,
        lane: u32,
        slab: u32,
        address: u64,
        user: u32,
    ) -> Option<()> {
        let central = &mut *lock(&self.central);
        let lane = match lane.checked_sub(NAMED_LANES) {
            Some(number) => &mut central.named.get_mut(number)?.lane,
            None => &mut central.captures.get_mut(lane - LANES as u32)?.lane,
        };
        lane.record_stream(slab, address, user)
    }

    /// Frees the small blocks of a pool whose waits are over, and gives its empty slabs to its space; their bytes.
    fn return_pool_slabs(&self, shared: &Shared, number: u32) -> u64 {
        let central = &mut *lock(&self.central);
        let Some(pool) = central.named.get_mut(number) else { return 0 };
        pool.lane.settle(&mut central.writer, &self.streams);
        let empty = pool.lane.empty_slabs();
        let slabs: Vec<Slab> = empty.iter().filter_map(|&id| pool.lane.remove_slab(id)).collect();
        for slab in &slabs {
            self.unpublish(shared, Some(slab));
            central.release_slab(slab.run, slab.stream, slab.epoch);
        }
        slabs.iter().map(|slab| slab.size_class().slab_bytes()).sum()
    }

    /// As [`Device::return_empty_slabs`] for the slabs of pools.
    pub(in crate::heap) fn return_empty_pool_slabs(&self, shared: &Shared) -> u64 {
        let numbers: Vec<u32> = {
            let central = lock(&self.central);
            if central.named.is_empty() {
                return 0;
            }
            central.named.iter().map(|(number, _)| number).collect()
        };
        numbers.into_iter().map(|number| self.return_pool_slabs(shared, number)).sum()
    }

    /// Gives all memory of a pool back to the driver at once, when no work uses any of it: the device is synchronised for that. The
    /// bytes given. The pool stays, empty and without a reserve, unless it is to be forgotten.
    ///
    /// # Errors
    /// [`PoolError::Live`] and [`PoolError::Busy`]: nothing has been done. [`PoolError::Unquiet`]: nothing has been given.
    /// [`PoolError::Kept`]: the driver refused; what it refused can be tried again.
    pub(in crate::heap) fn release_named(
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
                if self.is_given(shared, &mut central, number, forget) {
                    return Ok(given);
                }
            }
            // Every use of the pool that was ever enqueued is over after this, on whatever stream; frees since are of later epochs.
            let epochs = self.synchronize_epochs(shared).map_err(|_| PoolError::Unquiet)?;
            self.return_pool_slabs(shared, number);
            let Some(_giving) = self.giving(shared) else { return Err(PoolError::Unquiet) };
            let mut central = lock(&self.central);
            central.pool_is_unused(key)?;
            let completed = |stream| epochs.get(&stream).copied().unwrap_or(0);
            given += self.give_named(shared, &mut central, number, &completed)?;
            if self.is_given(shared, &mut central, number, forget) {
                return Ok(given);
            }
        }
        let central = lock(&self.central);
        central.pool_is_unused(key)?;
        Err(PoolError::Kept { bytes: central.pool_stats(number).map_or(0, |stats| stats.held) })
    }

    /// Whether nothing is left of a pool's memory; if so, and if it is to be forgotten, it is.
    fn is_given(&self, shared: &Shared, central: &mut Central, number: u32, forget: bool) -> bool {
        let Some(space) = central.named.get(number).map(|pool| pool.space) else { return true };
        if central.arenas.held_bytes(space) > 0 {
            return false;
        }
        if let Some(pool) = central.named.get_mut(number) {
            pool.reserve = 0;
        }
        if !forget {
            return true;
        }
        central.free_addresses(&*shared.driver, space);
        if !central.arenas.is_empty(space) {
            return false;
        }
        central.named.remove(number);
        central.arenas.remove_space(space);
        true
    }

    /// Gives back what of a pool's memory no work uses; its bytes.
    ///
    /// # Errors
    /// [`PoolError::Kept`]: the pool has let go of it, but the driver has not taken it all yet. The next trim tries again.
    fn give_named(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: u32,
        completed: &dyn Fn(u32) -> u64,
    ) -> Result<u64, PoolError> {
        let driver = &*shared.driver;
        let Some(pool) = central.named.get_mut(number) else { return Ok(0) };
        pool.reserve = 0;
        let space = pool.space;
        // An earlier answer may have been missed, and what is given is told by the difference.
        central.backing.refresh(driver);
        let (before, reserved) = (central.arenas.held_bytes(space), central.backing.reserved);
        if self.kind == Kind::Stitch {
            central.loosen(driver, &self.streams, &[space], completed, u64::MAX);
            central.backing.pages.release(driver, u64::MAX);
            central.free_addresses(driver, space);
            central.backing.refresh_pages();
        } else {
            for region in central.arenas.empty_regions(space, completed) {
                central.shrink(driver, shared.record, region);
            }
            central.backing.trim(driver);
        }
        central.publish_reserved();
        let given = before - central.arenas.held_bytes(space);
        let taken = reserved.saturating_sub(central.backing.reserved);
        if taken < given { Err(PoolError::Kept { bytes: given - taken }) } else { Ok(given) }
    }
}

/// The block that `request` asks for, from what the pool has free.
fn pool_block(shared: &Shared, central: &mut Central, number: u32, request: &Request) -> Option<u64> {
    let pool = central.named.get_mut(number)?;
    let address = if request.size > SMALL_MAX {
        let (space, bytes) = (pool.space, round(request.size));
        let want = Want { space, bytes, align: ALIGNMENT, stream: request.stream };
        let run = want.fit(&mut central.arenas)?;
        central.publish(&shared.table, run, request, shared.step(), 0)
    } else {
        pool.lane.allocate(&mut central.writer, *request, || shared.step())
    };
    if address == 0 {
        return None;
    }
    count_block(central, number, request.size);
    Some(address)
}

/// Counts a block of `requested` bytes.
fn count_block(central: &mut Central, number: u32, requested: u64) {
    if let Some(pool) = central.named.get_mut(number) {
        pool.live += 1;
        pool.live_bytes += round(requested);
    }
}
