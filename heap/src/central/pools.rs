//! Pools under the central lock.

use crate::central::{Central, SMALL};
use crate::pools::capture::{CapturePool, Capturing, Found, PoolId};
use crate::pools::key::{LiveBlock, PoolError, PoolKey, PoolStats};
use crate::pools::{Pool, PoolNumber, Purpose, Reuse, capture_tag, of_capture};
use crate::request::{Request, Want};
use crate::runs::arena::{Run, RunId, RunState, SpaceId};
use crate::shared::Shared;
use crate::small::shard::Shard;
use crate::small::size_class::{ALIGNMENT, SMALL_MAX, round};
use crate::small::slab::Slab;

/// Blocks that a refusal names.
const NAMED_BLOCKS: usize = 8;

impl Central {
    /// The ordinary spaces that hold more than is reserved for their lifetimes.
    pub(crate) fn movable_spaces(&self) -> Vec<SpaceId> {
        self.spaces.iter().filter(|&space| self.spare_of(space) > 0).collect()
    }

    /// The spaces whose memory the ladder may give back.
    pub(crate) fn open_spaces(&self) -> Vec<SpaceId> {
        let supplied =
            |&space: &SpaceId| self.pools.of_space(space).is_some_and(|pool| !pool.is_outside());
        self.pools.shared_spaces().filter(supplied).collect()
    }

    /// A new named pool. `None`: so many have been made that there are no numbers left.
    pub(crate) fn add_named_pool(&mut self, name: &str) -> Option<PoolNumber> {
        let space = self.arenas.add_space(false);
        let number = self.pools.add_named(name, space);
        if number.is_none() {
            self.arenas.remove_space(space);
        }
        number
    }

    /// The number among captures of the pool that `id` names, which may be a new one.
    pub(crate) fn capture_pool(&mut self, id: PoolId) -> u32 {
        match self.captures.find(id) {
            Some(number) => number,
            None => {
                let number = self.captures.add(CapturePool::new(id));
                self.add_capture_pool(number, Reuse::Private)
            }
        }
    }

    /// The pool for a stream that captures, which may be a new one.
    pub(crate) fn pool_for_capture(&mut self, capturing: Capturing, stream: u32) -> PoolNumber {
        let number = match self.captures.matched(capturing, stream) {
            Found::Pool(number) => return of_capture(number),
            Found::Tied(ties) => {
                let number = self.captures.add(CapturePool { ties, ..CapturePool::default() });
                self.add_capture_pool(number, Reuse::Private)
            }
            Found::Never => {
                let number = self.captures.add_never();
                self.add_capture_pool(number, Reuse::Never)
            }
        };
        self.captures.adopt(number, capturing, stream);
        of_capture(number)
    }

    fn add_capture_pool(&mut self, number: u32, reuse: Reuse) -> u32 {
        let space = self.arenas.add_space(true);
        self.pools.add(of_capture(number), Purpose::Capture, reuse, space);
        number
    }

    /// The capture pools that are over, with their versions: one that is over before a
    /// synchronisation and after it, and is of the same version, has no replay in flight.
    pub(crate) fn captures_over(&self) -> Vec<(u32, u64)> {
        let over = |(number, version)| {
            let pool = self.pools.get(of_capture(number)).filter(|pool| pool.live == 0)?;
            Some((number, version + pool.served))
        };
        self.captures.released().filter_map(over).collect()
    }

    /// The block that `request` asks for, from what pool `number` has free.
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

    /// Makes a run that has been taken for `request` its large block in pool `number`.
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

    /// Bytes that a pool holds.
    pub(crate) fn held_by(&self, pool: &Pool) -> u64 {
        pool.spaces().iter().map(|&space| self.arenas.held_bytes(space)).sum()
    }

    /// Numbers of a pool.
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

    /// What `of_run` and `of_slot` make of the live blocks of a pool, in no order.
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

    /// Whether a named pool may be given back, as far as its program is concerned.
    ///
    /// # Errors
    /// What is live in it, or who is about to allocate from it.
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

    /// Whether one more block of `bytes` would pass a pool's limit.
    pub(crate) fn pool_is_full(&self, number: PoolNumber, bytes: u64) -> bool {
        self.pools.get(number).is_some_and(|pool| {
            pool.rules
                .limit
                .is_some_and(|limit| pool.live_bytes.saturating_add(round(bytes)) > limit)
        })
    }

    /// Counts the free of a block of `bytes` in `space`, where that is not ordinary memory. True:
    /// nobody may ever use it again.
    #[cold]
    pub(crate) fn note_free_apart(&mut self, space: SpaceId, bytes: u64) -> bool {
        let Some(pool) = self.pools.of_space_mut(space).filter(|pool| !pool.is_ordinary()) else {
            return false;
        };
        pool.note_free(bytes);
        pool.rules.reuse == Reuse::Never
    }

    /// Forgets a pool, if nothing is left of its memory and its addresses. False: it stays.
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
