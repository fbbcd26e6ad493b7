//! Named pools under the central lock.
#![deny(unsafe_code)]

use crate::heap::arena::{RunState, SpaceId};
use crate::heap::central::Central;
use crate::heap::lifetime::Lifetime;
use crate::heap::named::{LiveBlock, PoolError, PoolKey, PoolStats};
use crate::heap::size_class::round;
use crate::heap::slab::SlotState;

/// Blocks that a refusal names.
const NAMED_BLOCKS: usize = 8;

impl Central {
    /// Whatever lies idle, a space keeps this much: what was reserved for its lifetime, or for its pool.
    pub(in crate::heap) fn reserve_of(&self, space: SpaceId) -> u64 {
        // A reserve is for what is large; a small block's span is one page.
        match self.spaces.lifetime_of(space) {
            Some(lifetime) if self.spaces.of(Lifetime::ALL[lifetime]) == space => self.reserves[lifetime],
            Some(_) => 0,
            None => self.named.reserve_of(space).unwrap_or(0),
        }
    }

    /// What a space holds above its reserve: as much may be taken from it, where it lies idle.
    pub(in crate::heap) fn spare_of(&self, space: SpaceId) -> u64 {
        self.arenas.held_bytes(space).saturating_sub(self.reserve_of(space))
    }

    /// The ordinary spaces that hold more than is reserved for their lifetimes.
    pub(in crate::heap) fn movable_spaces(&self) -> Vec<SpaceId> {
        self.spaces.iter().filter(|&space| self.spare_of(space) > 0).collect()
    }

    /// The spaces whose memory the ladder may give back: the ordinary ones and those of pools.
    pub(in crate::heap) fn open_spaces(&self) -> Vec<SpaceId> {
        self.spaces.iter().chain(self.named.iter().map(|(_, pool)| pool.space)).collect()
    }

    /// Numbers of a pool.
    pub(in crate::heap) fn pool_stats(&self, number: u32) -> Option<PoolStats> {
        let pool = self.named.get(number)?;
        let runs = self.arenas.blocks().map(|(_, run)| run);
        let large: u64 = runs
            .filter(|run| {
                run.state == RunState::Pending && self.arenas.region(run.region).space == pool.space
            })
            .map(|run| run.bytes)
            .sum();
        Some(PoolStats {
            reserve: pool.reserve,
            limit: pool.limit,
            held: self.arenas.held_bytes(pool.space),
            live: pool.live_bytes,
            live_blocks: pool.live,
            pending: large + pool.lane.pending_bytes(),
        })
    }

    /// The largest live blocks of a pool, at most `most`.
    pub(in crate::heap) fn pool_blocks(&self, number: u32, most: usize) -> Vec<LiveBlock> {
        let Some(pool) = self.named.get(number) else { return Vec::new() };
        let runs = self.arenas.blocks().map(|(_, run)| run).filter(|run| {
            run.state == RunState::Live && !run.is_slab && self.arenas.region(run.region).space == pool.space
        });
        let large = runs.map(|run| LiveBlock {
            address: run.address,
            requested: run.requested(),
            step: self.writer.step_of(run.slot),
            stream: run.stream,
        });
        let small = pool.lane.slabs().flat_map(|(_, slab)| {
            let live = (0..slab.size_class().slots)
                .filter(|&slot| matches!(slab.state(slot), SlotState::Live { .. }));
            live.map(|slot| {
                let facts = slab.facts(slot);
                LiveBlock {
                    address: slab.address(slot),
                    requested: facts.requested,
                    step: self.writer.step_of(facts.block),
                    stream: slab.stream,
                }
            })
        });
        let mut blocks: Vec<LiveBlock> = large.chain(small).collect();
        blocks.sort_unstable_by_key(|block| (std::cmp::Reverse(block.requested), block.address));
        blocks.truncate(most);
        blocks
    }

    /// Whether a pool may be given back, as far as its program is concerned.
    ///
    /// # Errors
    /// What is live in it, or who is about to allocate from it.
    pub(in crate::heap) fn pool_is_unused(&self, key: PoolKey) -> Result<(), PoolError> {
        let Some(pool) = self.named.get(key.number()) else { return Err(PoolError::NoSuchPool(key)) };
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
    pub(in crate::heap) fn pool_is_full(&self, number: u32, bytes: u64) -> bool {
        self.named.get(number).is_some_and(|pool| {
            pool.limit.is_some_and(|limit| pool.live_bytes.saturating_add(round(bytes)) > limit)
        })
    }
}
