//! The blocks of a pool with a shard of its own: a named pool, or the private memory of graphs.
//!
//! Allocation, free and the return of the whole are alike for all. The pools differ in the source
//! of a block when the pool has none free: [`Device::malloc_pooled`] climbs the reclaim ladder; in
//! a capture, where the allocator may wait for nothing, [`Device::malloc_captured`] grows.

use crate::central::{Central, SMALL};
use crate::device::Device;
use crate::pools::{Pool, PoolNumber, Reuse, capture_tag};
use crate::request::{Request, Want};
use crate::runs::arena::{Run, RunId, RunState, SpaceId};
use crate::shared::Shared;
use crate::small::shard::{FreeOutcome, Shard};
use crate::small::size_class::{ALIGNMENT, SIZE_CLASSES, SLAB, SMALL_MAX, class_of, round};
use crate::small::slab::Slab;
use crate::sync::lock;

/// Bytes and alignment of the run that a pool needs for `request` when nothing in it is free: the
/// block, or the slab for it.
pub(crate) fn run_for(request: &Request) -> (u64, u64) {
    if request.size > SMALL_MAX {
        (round(request.size), ALIGNMENT)
    } else {
        (SIZE_CLASSES[class_of(request.size)].slab_bytes(), SLAB)
    }
}

impl Device {
    /// Serves `request` from a run just taken for it in a pool: the run is the block, or becomes
    /// its slab.
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

    /// Frees the small block at `address`, in the shard of a pool. `None`: no block starts there.
    /// Never inlined, so that the frees of streams' blocks save no register for it.
    #[cold]
    #[inline(never)]
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
}

impl Central {
    /// The block for `request`, from the free memory of pool `number`.
    pub(crate) fn block_of_pool(
        &mut self,
        shared: &Shared,
        number: PoolNumber,
        request: &Request,
    ) -> Option<u64> {
        let pool = self.pools.get_mut(number)?;
        if request.size > SMALL_MAX {
            let (space, bytes) = (pool.space(), round(request.size));
            let want = Want { space, bytes, align: ALIGNMENT, stream: request.stream };
            let run = want.fit(&mut self.arenas)?;
            return self.publish_in_pool(shared, number, run, request);
        }
        match pool.shard.as_mut()?.allocate(&mut self.writers[SMALL], *request, || shared.step()) {
            0 => None,
            address => {
                pool.note_malloc(round(request.size));
                Some(address)
            }
        }
    }

    /// Makes a run just taken for `request` its large block in pool `number`.
    pub(crate) fn publish_in_pool(
        &mut self,
        shared: &Shared,
        number: PoolNumber,
        run: RunId,
        request: &Request,
    ) -> Option<u64> {
        let bytes = self.arenas.run(run)?.bytes;
        let address = self.publish(&shared.table, run, request, shared.step(), capture_tag(number));
        if address == 0 {
            return None;
        }
        self.pools.get_mut(number)?.note_malloc(bytes);
        Some(address)
    }

    pub(crate) fn held_by(&self, pool: &Pool) -> u64 {
        pool.spaces().iter().map(|&space| self.arenas.held_bytes(space)).sum()
    }

    /// Maps the live blocks of a pool through `of_run` and `of_slot`, in no order.
    pub(crate) fn live_in_pool<T>(
        &self,
        number: PoolNumber,
        of_run: impl Fn(&Run) -> T,
        of_slot: impl Fn(&Slab, u32) -> T,
    ) -> Vec<T> {
        let Some(pool) = self.pools.get(number) else { return Vec::new() };
        let is_here = |run: &&Run| pool.spaces().contains(&self.arenas.region(run.region).space);
        let is_live = |run: &&Run| run.state == RunState::Live && !run.is_slab;
        let runs = self.arenas.blocks().map(|(_, run)| run).filter(is_live).filter(is_here);
        let mut found: Vec<T> = runs.map(of_run).collect();
        for (_, slab) in pool.shard.iter().flat_map(Shard::slabs) {
            found.extend(slab.live_slots().map(|slot| of_slot(slab, slot)));
        }
        found
    }

    /// Counts the free of a block of `bytes` in `space`, outside ordinary memory. True: no stream
    /// may ever use it again.
    #[cold]
    pub(crate) fn note_free_apart(&mut self, space: SpaceId, bytes: u64) -> bool {
        let Some(pool) = self.pools.of_space_mut(space).filter(|pool| !pool.is_ordinary()) else {
            return false;
        };
        pool.note_free(bytes);
        pool.rules.reuse == Reuse::Never
    }

    /// Forgets a pool if nothing is left of its memory and its addresses. False: it stays.
    pub(crate) fn forget_pool(&mut self, number: PoolNumber, space: SpaceId) -> bool {
        let small = self.pools.get(number).and_then(|pool| pool.spaces().get(1).copied());
        let spaces = || [space].into_iter().chain(small);
        if spaces().any(|space| !self.arenas.is_empty(space)) {
            return false;
        }
        self.pools.remove(number);
        spaces().for_each(|space| self.arenas.remove_space(space));
        true
    }
}
