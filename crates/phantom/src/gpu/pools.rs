//! Stream-ordered pools.

use super::{Gpu, State, fail};
use crate::backing::{Backing, Source};
use crate::books::Part;
use crate::calls::CallKind;
use crate::error::{SimError, SimResult, code};
use crate::oracle::Taken;
use crate::pool::{POOL_ALIGNMENT, POOL_CHUNK, Piece, Pool, PoolAttribute};

/// A pool's account, for tests and reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBooks {
    /// Physical bytes held.
    pub reserved: u64,
    /// Bytes handed out.
    pub used: u64,
    /// Free bytes that any stream may use now.
    pub ready: u64,
    /// The largest range of `ready`, bytes.
    pub largest_ready: u64,
    /// Address space charged for the pool, bytes.
    pub address_space: u64,
}

impl State {
    fn pool(&mut self, kind: CallKind, pool: usize) -> SimResult<&mut Pool> {
        self.pools.get_mut(&pool).ok_or(SimError { call: kind.name(), code: code::INVALID_HANDLE })
    }

    /// Maps chunks that make room for `bytes`: idle ones from elsewhere in the pool, then new ones.
    /// Returns false if there is no memory, no room under the pool's bound, or no address space.
    fn grow_pool(&mut self, handle: usize, bytes: u64) -> bool {
        let Some(pool) = self.pools.get_mut(&handle) else { return false };
        let (device, devices) = (pool.device, u64::from(pool.access.count_ones()));
        if pool.arena.is_none() {
            // The pool paid for its address space at creation; this only picks the numbers. Chunks
            // need somewhere to move: twice what the pool may hold.
            let space = if pool.max_size == 0 { pool.address_space } else { 2 * pool.max_size };
            let space = space.next_multiple_of(POOL_CHUNK);
            let Some(address) = self.addresses.reserve(space, POOL_CHUNK) else { return false };
            pool.settle(address, space);
        }
        let Some((address, room)) = pool.room_for(bytes) else { return false };
        let moving = pool.movable(address).min(room);
        let new = room - moving;
        if pool.max_size != 0 && pool.reserved + new > pool.max_size {
            return false;
        }
        let now = self.time.now();
        if !self.devices[device as usize].books.take(new, Part::Pools, now) {
            return false;
        }
        for _ in 0..moving / POOL_CHUNK {
            let Some(piece) =
                self.pools.get_mut(&handle).and_then(|pool| pool.take_movable(address))
            else {
                break;
            };
            self.time.spend(self.config.costs.unmap_of(piece.bytes, 1));
            self.vacate("a pool's move", piece);
        }
        self.time.spend(self.config.costs.pool_growth_of(new, room, devices));
        let physical = self.number(room);
        if let Some(pool) = self.pools.get_mut(&handle) {
            pool.map(address, room, physical);
        }
        true
    }

    /// Releases idle chunks as long as at least `keep` bytes stay.
    fn shrink_pool(&mut self, call: &'static str, handle: usize, keep: u64) {
        while let Some(pool) = self.pools.get_mut(&handle) {
            let device = pool.device;
            let Some(piece) = pool.shrink(keep) else { return };
            self.drop_chunk(call, device, piece);
        }
    }

    /// Returns a chunk to the device.
    fn drop_chunk(&mut self, call: &'static str, device: u32, piece: Piece) {
        self.time.spend(self.config.costs.pool_shrink_of(piece.bytes));
        let now = self.time.now();
        self.devices[device as usize].books.give(piece.bytes, Part::Pools, now);
        self.vacate(call, piece);
    }

    /// A chunk leaves its address: what was there is lost, and no work may still touch it.
    fn vacate(&mut self, call: &'static str, piece: Piece) {
        self.addresses.vacated(piece.address, piece.bytes);
        let now = self.time.now();
        if let Some(oracle) = &mut self.oracle {
            let Piece { address, bytes, physical } = piece;
            let taken = Taken { address, physical, bytes };
            oracle.taken_from_kernels(call, taken, now);
            oracle.pool_gave_back(call, taken);
        }
    }

    /// Returns all memory of a pool that has left the table, and its addresses.
    pub(crate) fn dissolve(&mut self, call: &'static str, pool: &Pool) {
        for piece in pool.chunks() {
            self.drop_chunk(call, pool.device, piece);
        }
        if let Some((address, bytes)) = pool.arena {
            self.addresses.release(address, bytes);
        }
    }

    /// The effect of a host synchronisation on a device's pools: complete frees become available to
    /// all streams, and idle chunks above the release threshold go back to the device.
    pub(crate) fn synchronize_pools(&mut self, device: u32) {
        if self.pools.is_empty() {
            return;
        }
        let now = self.time.now();
        let mut shrink = Vec::new();
        for (&handle, pool) in self.pools.iter_mut().filter(|(_, pool)| pool.device == device) {
            pool.complete_frees(now);
            shrink.extend(pool.above_threshold().map(|keep| (handle, keep)));
        }
        for (handle, keep) in shrink {
            self.shrink_pool("the release threshold", handle, keep);
        }
    }
}

impl Gpu {
    /// Creates a pool on `device` of at most `max_size` bytes (0: no bound). It takes `max_size` of
    /// address space; without a bound, twice the device's memory. Code 2 if no address space is
    /// left.
    pub fn pool_create(&self, device: u32, max_size: u64) -> SimResult<usize> {
        const KIND: CallKind = CallKind::PoolCreate;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.pool_create)?;
        if !state.config.devices[device as usize].pools {
            return fail(KIND, code::NOT_SUPPORTED);
        }
        let space = if max_size == 0 {
            2 * state.devices[device as usize].books.capacity
        } else {
            max_size
        };
        if !state.space.take(space) {
            return fail(KIND, code::OUT_OF_MEMORY);
        }
        state.next_pool += 1;
        let handle = 0x6000_0000 + state.next_pool * 0x100;
        state.pools.insert(handle, Pool::new(device, max_size, space));
        Ok(handle)
    }

    /// Destroys a pool from which nothing is allocated.
    pub fn pool_destroy(&self, device: u32, pool: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::PoolDestroy;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.pool_create)?;
        if !state.pool(KIND, pool)?.is_unused() {
            return state.refuse(KIND, "destruction of a pool that is in use", pool as u64);
        }
        if let Some(gone) = state.pools.remove(&pool) {
            state.dissolve(KIND.name(), &gone);
            state.space.give(gone.address_space);
        }
        Ok(())
    }

    /// Reads an attribute.
    pub fn pool_attribute(
        &self,
        device: u32,
        pool: usize,
        attribute: PoolAttribute,
    ) -> SimResult<u64> {
        const KIND: CallKind = CallKind::PoolGetAttribute;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.query)?;
        Ok(state.pool(KIND, pool)?.attribute(attribute))
    }

    /// Sets an attribute; code 1 if it cannot take the value.
    pub fn pool_set_attribute(
        &self,
        device: u32,
        pool: usize,
        attribute: PoolAttribute,
        value: u64,
    ) -> SimResult<()> {
        const KIND: CallKind = CallKind::PoolSetAttribute;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.query)?;
        if !state.pool(KIND, pool)?.set_attribute(attribute, value) {
            return state.refuse(KIND, "value that the attribute cannot take", value);
        }
        Ok(())
    }

    /// Releases idle chunks as long as `keep` bytes stay reserved.
    pub fn pool_trim(&self, device: u32, pool: usize, keep: u64) -> SimResult<()> {
        const KIND: CallKind = CallKind::PoolTrim;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.pool_hit)?;
        let now = state.time.now();
        state.pool(KIND, pool)?.complete_frees(now);
        state.shrink_pool(KIND.name(), pool, keep);
        Ok(())
    }

    /// Grants `peer` read and write access to the pool's memory.
    pub fn pool_allow_peer(&self, device: u32, pool: usize, peer: u32) -> SimResult<()> {
        const KIND: CallKind = CallKind::PoolSetAccess;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.pool_access)?;
        let owner = state.pool(KIND, pool)?.device;
        if !state.reaches(peer, owner) {
            return state.refuse(KIND, "access for a device that is no peer", u64::from(peer));
        }
        state.pool(KIND, pool)?.access |= 1 << peer;
        state.backings.grant_all(Source::Pool(pool), 1 << peer);
        Ok(())
    }

    /// Allocates `bytes` from `pool`, usable in the order of `stream`. Code 2 if the pool cannot
    /// grow.
    pub fn pool_alloc(
        &self,
        device: u32,
        pool: usize,
        bytes: u64,
        stream: usize,
    ) -> SimResult<u64> {
        const KIND: CallKind = CallKind::PoolAlloc;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.pool_hit)?;
        let key = state.stream(KIND, device, stream)?;
        state.refused_by_capture(KIND, key)?;
        if bytes == 0 {
            return state.refuse(KIND, "allocation of nothing", 0);
        }
        let Some(rounded) = bytes.checked_next_multiple_of(POOL_ALIGNMENT) else {
            return fail(KIND, code::OUT_OF_MEMORY);
        };
        let now = state.time.now();
        let found = match state.pool(KIND, pool)?.alloc(rounded, key, now) {
            Some(address) => Some(address),
            None if state.grow_pool(pool, rounded) => {
                state.pool(KIND, pool)?.alloc(rounded, key, now)
            }
            None => None,
        };
        let Some(address) = found else { return fail(KIND, code::OUT_OF_MEMORY) };
        let owner = state.pool(KIND, pool)?;
        let (owner_device, access) = (owner.device, owner.access);
        for Piece { address, bytes, physical } in owner.pieces(address, rounded) {
            state.backings.insert(Backing {
                address,
                bytes,
                physical,
                offset: physical,
                device: owner_device,
                source: Source::Pool(pool),
                access,
            });
            if let Some(oracle) = &mut state.oracle {
                oracle.pool_handed_out(physical, bytes, key);
            }
        }
        state.follow_default_stream(key);
        Ok(address)
    }

    /// Frees an address of [`Gpu::pool_alloc`] in the order of `stream`.
    pub fn pool_free(&self, device: u32, address: u64, stream: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::PoolFree;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.pool_hit)?;
        let key = state.stream(KIND, device, stream)?;
        state.refused_by_capture(KIND, key)?;
        let owner = state.backings.get(address).and_then(|backing| match backing.source {
            Source::Pool(pool) => Some(pool),
            _ => None,
        });
        let block =
            owner.and_then(|pool| Some((pool, state.pools.get(&pool)?.length_of(address)?)));
        let Some((pool, bytes)) = block else {
            return state.refuse(KIND, "free of an address that no pool has handed out", address);
        };
        state.follow_default_stream(key);
        let pieces: Vec<_> = state.backings.pieces(address, bytes).collect();
        for backing in pieces {
            state.backings.remove(backing.address);
            if let Some(oracle) = &mut state.oracle {
                oracle.pool_took_back(Taken::of(&backing), key);
            }
        }
        // Behind open work the memory stays with its stream: the time of completion is unknown.
        let stream = state.streams.get(key);
        let (now, tail) = (state.time.now(), stream.open.map_or(stream.tail, |_| u64::MAX));
        state.pool(KIND, pool)?.free(address, key, tail, now);
        Ok(())
    }

    /// A pool's account; `None`: no such pool.
    pub fn pool_books(&self, pool: usize) -> Option<PoolBooks> {
        let state = self.lock();
        let pool = state.pools.get(&pool)?;
        let (ready, largest_ready) = pool.ready_bytes();
        let Pool { reserved, used, address_space, .. } = *pool;
        Some(PoolBooks { reserved, used, ready, largest_ready, address_space })
    }
}
