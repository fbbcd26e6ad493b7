//! What a restore of a pool's state would do, and whether it can be done (`pool/state.rs`).

use crate::central::Central;
use crate::error::Error;
use crate::pools::capture::PoolId;
use crate::pools::state::{Obstacle, SlabPlace, StateBlock, StateError};
use crate::pools::{PoolNumber, of_capture};
use crate::runs::arena::{Run, RunState, SpaceId, UNOWNED};
use crate::small::shard::Shard;
use crate::small::size_class::{SIZE_CLASSES, round};
use crate::small::slab::{Slab, SlotState};
use std::collections::{BTreeMap, HashSet};

/// What a restore does; each by address.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub freed: Vec<StateBlock>,
    pub kept: Vec<StateBlock>,
    pub allocated: Vec<StateBlock>,
}

/// A pool as it will be once what the plan frees is free.
struct Freed<'a> {
    central: &'a Central,
    space: SpaceId,
    shard: &'a Shard,
    /// By their first bytes, and whether nothing will be left of them.
    slabs: BTreeMap<u64, (&'a Slab, bool)>,
}

impl Central {
    /// The pool of graphs that torch calls `id`, while a graph uses it, and its era.
    ///
    /// # Errors
    /// There is none, or its graphs are gone.
    pub(crate) fn pool_of_graphs(&self, id: PoolId) -> Result<(PoolNumber, u64), StateError> {
        let number = self.captures.find(id).ok_or(StateError::NoSuchPool(id))?;
        let used = self.captures.get(number).filter(|_| !self.captures.is_released(number));
        Ok((of_capture(number), used.ok_or(StateError::Released(id))?.era))
    }

    /// The live blocks of a pool, by address.
    pub(crate) fn live_in(&self, number: PoolNumber) -> Vec<StateBlock> {
        let of_run = |run: &Run| StateBlock {
            address: run.address,
            bytes: run.bytes,
            requested: run.requested(),
            stream: run.stream,
            lifetime: run.lifetime,
            slab: None,
        };
        let of_slot = |slab: &Slab, slot| {
            let requested = slab.facts(slot).requested;
            StateBlock {
                address: slab.address(slot),
                bytes: round(requested),
                requested,
                stream: slab.stream,
                lifetime: slab.lifetime,
                slab: Some(SlabPlace { base: slab.base, class: slab.class }),
            }
        };
        let mut blocks = self.live_in_pool(number, of_run, of_slot);
        blocks.sort_unstable_by_key(|block| block.address);
        blocks
    }

    /// What makes `wanted` the live blocks of a pool; both are by address.
    ///
    /// # Errors
    /// [`StateError::InTheWay`]: it cannot be done.
    pub(crate) fn plan_restore(
        &self,
        number: PoolNumber,
        wanted: &[StateBlock],
    ) -> Result<Plan, StateError> {
        let missing = || Error::Internal("a pool vanished");
        let pool = self.pools.get(number).ok_or_else(missing)?;
        let shard = pool.shard.as_ref().ok_or_else(missing)?;
        let mut plan = Plan::default();
        let mut live: BTreeMap<u64, StateBlock> =
            self.live_in(number).into_iter().map(|block| (block.address, block)).collect();
        for &block in wanted {
            if live.get(&block.address).is_some_and(|other| other.is(&block)) {
                live.remove(&block.address);
                plan.kept.push(block);
            } else {
                plan.allocated.push(block);
            }
        }
        plan.freed.extend(live.into_values());
        let kept: HashSet<u64> = plan.kept.iter().map(|block| block.address).collect();
        let facts = |slab| (slab, is_emptied(shard, slab, &kept));
        let slabs = shard.slabs().map(|(_, slab)| (slab.base, facts(slab))).collect();
        let freed = Freed { central: self, space: pool.space(), shard, slabs };
        let mut made = None;
        for block in &plan.allocated {
            freed.takes(block, &mut made).map_err(|(at, obstacle)| StateError::InTheWay {
                address: block.address,
                bytes: block.bytes,
                at,
                obstacle,
            })?;
        }
        if !self.arenas.has_room_for(plan.allocated.len()) {
            return Err(Error::Internal("there are no numbers for more runs").into());
        }
        Ok(plan)
    }
}

impl Freed<'_> {
    /// Whether `block` can be put back; else where something is in the way, and what. `made` is the
    /// slab that will be made for the blocks before it.
    fn takes(
        &self,
        block: &StateBlock,
        made: &mut Option<SlabPlace>,
    ) -> Result<(), (u64, Obstacle)> {
        let Some(place) = block.slab else {
            return self.is_free(block.address, block.bytes, block.stream);
        };
        if *made == Some(place) {
            return Ok(());
        }
        match self.slabs.get(&place.base) {
            Some(&(slab, false)) if slab.class == place.class && slab.stream == block.stream => {
                let is_in_the_way = |slot| waits(self.shard, slab, slot);
                let waits = slab.slot_at(block.address).is_none_or(is_in_the_way);
                if waits { Err((block.address, Obstacle::Waits)) } else { Ok(()) }
            }
            _ => {
                let bytes = SIZE_CLASSES[place.class as usize].slab_bytes();
                self.is_free(place.base, bytes, block.stream)?;
                *made = Some(place);
                Ok(())
            }
        }
    }

    /// Whether `bytes` from `address` on can be a run of `stream`'s.
    fn is_free(&self, address: u64, bytes: u64, stream: u32) -> Result<(), (u64, Obstacle)> {
        let mut end = address;
        for (_, run) in self.central.arenas.runs_over(self.space, address, bytes) {
            let at = run.address.max(address);
            end = run.address + run.bytes;
            let obstacle = match run.state {
                RunState::Unmapped | RunState::StaleAlias | RunState::Unused => Obstacle::Gone,
                RunState::Pending => Obstacle::Waits,
                RunState::Live if run.shared => Obstacle::Waits,
                RunState::Free if run.stream == UNOWNED => continue,
                RunState::Live if run.is_slab => match self.slabs.get(&run.address) {
                    Some((_, false)) => Obstacle::Waits,
                    Some((slab, true)) if slab.stream == stream => continue,
                    _ => Obstacle::Gone,
                },
                RunState::Free | RunState::Live if run.stream == stream => continue,
                RunState::Free | RunState::Live => Obstacle::Gone,
            };
            return Err((at, obstacle));
        }
        if end < address + bytes { Err((end, Obstacle::Gone)) } else { Ok(()) }
    }
}

/// Whether the slot's memory is not free once its block is freed.
fn waits(shard: &Shard, slab: &Slab, slot: u32) -> bool {
    match slab.state(slot) {
        SlotState::Free => false,
        SlotState::Live { .. } => shard.is_used_elsewhere(slab.address(slot)),
        SlotState::Pending => true,
    }
}

/// Whether nothing is left of a slab once all but what is kept is freed.
fn is_emptied(shard: &Shard, slab: &Slab, kept: &HashSet<u64>) -> bool {
    let stays = |slot| {
        slab.state(slot) != SlotState::Free
            && (waits(shard, slab, slot) || kept.contains(&slab.address(slot)))
    };
    !(0..slab.count()).any(stays)
}
