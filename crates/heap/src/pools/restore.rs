//! Restoring a graph pool to a saved state (torch's `getCheckpointState`,
//! `setCheckpointPoolState`).
//!
//! Inductor's graph trees share one pool among many CUDA graphs. A replay makes tensors unknown to
//! the allocator, so before the next capture the program restores the pool to its state right after
//! the replayed graph's capture; torch calls this a checkpoint. A state holds no memory. Memory of
//! a graph's pool stays at its address while a graph uses the pool, free or not
//! ([`Reuse::Private`](super::Reuse::Private)), so the blocks of a state can be had back; once the
//! pool is over, its states are of no use and restoring one is an error.
//!
//! Of the pool's live blocks a restore *keeps* those of the state and *frees* the others; the
//! state's other blocks it *allocates* at their old addresses. Memory returns to the stream that
//! had it, so stream order demands no more than a free and a malloc on that stream.
//! [`Heap::restore_pool`] plans the whole restore under the central lock and changes nothing if one
//! block cannot be put back. It calls the driver only to ask which waits are over.

use crate::central::{Central, SMALL};
use crate::device::Device;
use crate::error::Error;
use crate::heap::Heap;
use crate::lifetime::Lifetime;
use crate::pools::capture::PoolId;
use crate::pools::{PoolNumber, capture_tag, of_capture};
use crate::request::Request;
use crate::runs::arena::{Run, RunState, SpaceId, UNOWNED};
use crate::runs::page_table::Owner;
use crate::shared::Shared;
use crate::small::shard::Shard;
use crate::small::size_class::{SIZE_CLASSES, round};
use crate::small::slab::{Slab, SlotState};
use crate::sync::lock;
use gruyere_record::clock;
use gruyere_record::size::Bytes;
use std::collections::{BTreeMap, HashSet};
use std::fmt;

impl Device {
    /// The live blocks of the pool of graphs `id`.
    ///
    /// # Errors
    /// [`StateError::NoSuchPool`] or [`StateError::Released`] if no graph uses such a pool.
    pub(crate) fn pool_state(&self, id: PoolId) -> Result<PoolState, StateError> {
        let central = lock(&self.central);
        let (number, era) = central.pool_of_graphs(id)?;
        Ok(PoolState { device: self.id, id, era, blocks: central.live_in(number) })
    }

    /// Makes the blocks of `state` the live blocks of its pool, and returns what it did. Calls no
    /// driver.
    ///
    /// # Errors
    /// As [`Device::pool_state`]; [`StateError::Over`]; [`StateError::InTheWay`] if a block cannot
    /// be put back. Nothing was done then.
    pub(crate) fn restore(&self, shared: &Shared, state: &PoolState) -> Result<Plan, StateError> {
        let central = &mut *lock(&self.central);
        let (number, era) = central.pool_of_graphs(state.id)?;
        if era != state.era {
            return Err(StateError::Over(state.id));
        }
        self.collect_completed(shared, central);
        self.return_pool_slabs(shared, central, number);
        let plan = central.plan_restore(number, &state.blocks)?;
        let broken = || Error::Internal("a pool's state cannot be restored though it was planned");
        let start = clock::now();
        for block in &plan.freed {
            self.free_planned(shared, central, number, block, start).ok_or_else(broken)?;
        }
        // Before asking for their memory.
        self.return_pool_slabs(shared, central, number);
        for block in &plan.allocated {
            self.allocate_planned(shared, central, number, block, start).ok_or_else(broken)?;
        }
        Ok(plan)
    }

    /// Asks the streams for their progress, if blocks of the pool wait for some and may be in the
    /// way of a restore. Call with no lock held.
    ///
    /// # Errors
    /// As [`Device::pool_state`].
    pub(crate) fn learn_what_is_over(&self, shared: &Shared, id: PoolId) -> Result<(), StateError> {
        let waits = {
            let central = lock(&self.central);
            let pool = central.pools.get(central.pool_of_graphs(id)?.0);
            let small = pool
                .is_some_and(|pool| pool.shard.as_ref().is_some_and(|shard| shard.has_pending()));
            small || central.pending_bytes() > 0
        };
        if waits && let Some(_guard) = self.query_guard() {
            self.fence_all(shared, None);
            self.streams.poll(&*shared.driver);
        }
        Ok(())
    }

    fn free_planned(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        block: &StateBlock,
        start: u64,
    ) -> Option<()> {
        let address = block.address;
        match shared.table.get(address) {
            Owner::Slab { slab, .. } => {
                self.free_slot_apart(shared, central, number, slab, address, start)
            }
            _ => {
                let page = shared.table.page(address)?;
                central.free_large(page, &self.streams, address, start, None)
            }
        }
    }

    /// Makes a block of a pool live at its own address; `None`, and nothing done, if that is not
    /// free.
    pub(crate) fn allocate_planned(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        block: &StateBlock,
        start: u64,
    ) -> Option<()> {
        let &StateBlock { address, bytes, requested: size, stream, lifetime, slab } = block;
        let lifetime = Lifetime::from_u8(lifetime).unwrap_or_default();
        let request = Request::new(size, stream, lifetime, start);
        let space = central.pools.get(number)?.space();
        let Some(SlabPlace { base, class }) = slab else {
            let run = central.arenas.allocate_at(space, address, bytes, stream)?;
            return central.publish_in_pool(shared, number, run, &request).map(|_| ());
        };
        if !matches!(shared.table.get(base), Owner::Slab { .. }) {
            let bytes = SIZE_CLASSES[class as usize].slab_bytes();
            let run = central.arenas.allocate_at(space, base, bytes, stream)?;
            let capture = capture_tag(number);
            let slab = self.make_slab(shared, central, run, class, &request, capture)?;
            self.add_slab(shared, number, central.pools.shard_mut(number)?, slab);
        }
        let Owner::Slab { slab: id, .. } = shared.table.get(base) else { return None };
        let pool = central.pools.get_mut(number)?;
        let shard = pool.shard.as_mut()?;
        if !shard.allocate_at(&mut central.writers[SMALL], id, address, request, shared.step()) {
            return None;
        }
        pool.note_malloc(bytes);
        Some(())
    }
}

impl Heap {
    /// The live blocks of the pool of graphs `id` on `device`, for any number of calls of
    /// [`Heap::restore_pool`]. The state holds no memory; dropping it changes nothing.
    ///
    /// # Errors
    /// The error for an unknown device; [`StateError::NoSuchPool`] or [`StateError::Released`] if
    /// no graph uses such a pool.
    pub fn pool_state(&self, device: i64, id: PoolId) -> Result<PoolState, StateError> {
        self.device(device)?.pool_state(id)
    }

    /// Makes the blocks of `state` the live blocks of its pool of graphs: frees every other live
    /// block, and allocates those no longer live at their addresses. Calls the driver only to ask
    /// which waits are over.
    ///
    /// # Errors
    /// The error for a pool that no graph uses any more; [`StateError::InTheWay`] if a block cannot
    /// be put back. Nothing was changed then.
    pub fn restore_pool(&self, state: &PoolState) -> Result<Restored, StateError> {
        let device = self.device(i64::from(state.device))?;
        device.learn_what_is_over(&self.shared, state.id)?;
        // The books stay locked, so that the entries are in order with those of other threads.
        let mut history = self.has_history().then(|| self.history_books());
        let done = device.restore(&self.shared, state)?;
        if let Some(books) = &mut history {
            self.note_restored(books, device, &done);
        }
        drop(history);
        if let Some(trace) = &self.trace {
            done.freed.iter().for_each(|block| trace.free(block.address));
            for block in &done.allocated {
                trace.malloc(block.address, block.requested, device.id, block.stream);
            }
        }
        let addresses = |blocks: &[StateBlock]| blocks.iter().map(|block| block.address).collect();
        Ok(Restored {
            freed: addresses(&done.freed),
            kept: addresses(&done.kept),
            allocated: addresses(&done.allocated),
        })
    }
}

/// The steps of a restore, each list by address.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) freed: Vec<StateBlock>,
    pub(crate) kept: Vec<StateBlock>,
    pub(crate) allocated: Vec<StateBlock>,
}

/// A pool as the plan's frees will leave it.
struct Freed<'a> {
    central: &'a Central,
    space: SpaceId,
    shard: &'a Shard,
    /// By first byte; true if nothing will be left of the slab.
    slabs: BTreeMap<u64, (&'a Slab, bool)>,
}

impl Central {
    /// The pool of graphs that torch calls `id`, while a graph uses it, and its era.
    ///
    /// # Errors
    /// [`StateError::NoSuchPool`]; [`StateError::Released`] if its graphs are gone.
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

    /// The plan that makes `wanted` the live blocks of a pool; `wanted` is by address.
    ///
    /// # Errors
    /// [`StateError::InTheWay`] if a block cannot be put back.
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
            return Err(Error::Internal("run numbers are exhausted").into());
        }
        Ok(plan)
    }
}

impl Freed<'_> {
    /// Whether `block` can be put back; else the address of the obstacle, and the obstacle. `made`:
    /// the slab planned for the blocks before it.
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

    /// Whether `bytes` from `address` on can be a run of `stream`.
    fn is_free(&self, address: u64, bytes: u64, stream: u32) -> Result<(), (u64, Obstacle)> {
        let mut end = address;
        for (_, run) in self.central.arenas.runs_over(self.space, address, bytes) {
            let at = run.address.max(address);
            end = run.address + run.bytes;
            let obstacle = match run.state {
                RunState::Unmapped | RunState::StaleAlias | RunState::Unused => Obstacle::Gone,
                RunState::Pending => Obstacle::Waits,
                RunState::Live if run.is_shared() => Obstacle::Waits,
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

/// Whether the slot's memory stays taken after its block is freed.
fn waits(shard: &Shard, slab: &Slab, slot: u32) -> bool {
    match slab.state(slot) {
        SlotState::Free => false,
        SlotState::Live { .. } => shard.is_used_elsewhere(slab.address(slot)),
        SlotState::Pending => true,
    }
}

/// Whether a slab is empty once every block outside `kept` is freed.
fn is_emptied(shard: &Shard, slab: &Slab, kept: &HashSet<u64>) -> bool {
    let stays = |slot| {
        slab.state(slot) != SlotState::Free
            && (waits(shard, slab, slot) || kept.contains(&slab.address(slot)))
    };
    !(0..slab.count()).any(stays)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabPlace {
    /// Its first byte.
    pub(crate) base: u64,
    pub(crate) class: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateBlock {
    pub(crate) address: u64,
    /// Its length, a multiple of 512 B.
    pub(crate) bytes: u64,
    /// Bytes that the program asked for.
    pub(crate) requested: u64,
    pub(crate) stream: u32,
    pub(crate) lifetime: u8,
    /// `None`: the block is a run.
    pub(crate) slab: Option<SlabPlace>,
}

impl StateBlock {
    /// Whether the two are one block, which needs no work. The lifetime does not count: it is only
    /// a label.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Self { lifetime: other.lifetime, ..*self } == *other
    }
}

/// The live blocks of a graph's pool at one moment ([`crate::Heap::pool_state`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolState {
    pub(crate) device: u32,
    pub(crate) id: PoolId,
    /// The pool's era when the state was taken.
    pub(crate) era: u64,
    pub(crate) blocks: Vec<StateBlock>,
}

impl PoolState {
    /// The addresses of its blocks, in order, and their bytes.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.blocks.iter().map(|block| (block.address, block.bytes))
    }
}

/// The work of a restore: addresses, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were live and are no longer.
    pub freed: Vec<u64>,
    /// Blocks that were live and still are.
    pub kept: Vec<u64>,
    /// Blocks that were not live and now are.
    pub allocated: Vec<u64>,
}

/// An obstacle to making memory a block again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The memory no longer belongs to the pool, or to the stream: a bug of ours.
    Gone,
    /// Streams may still use it after a free there.
    Waits,
}

/// The reason why a state was not taken or not restored. Nothing has changed.
#[derive(Debug)]
pub enum StateError {
    /// No graph was ever captured into a pool of that id, or all that used it are gone, and its
    /// memory with them.
    NoSuchPool(PoolId),
    /// The graphs that used it are gone; its memory goes with its blocks.
    Released(PoolId),
    /// The pool ended after the state was taken, and its memory went to others.
    Over(PoolId),
    /// A block cannot be put back.
    InTheWay {
        /// Where the block starts.
        address: u64,
        /// Its bytes.
        bytes: u64,
        /// The address in it of the obstacle.
        at: u64,
        /// The obstacle.
        obstacle: Obstacle,
    },
    /// An error of the device.
    Heap(Error),
}

impl From<Error> for StateError {
    fn from(error: Error) -> Self {
        Self::Heap(error)
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => {
                "no longer belongs to its stream, which is a bug of Gruyère: please report it"
            }
            Self::Waits => {
                "may still be used by other streams (record_stream); wait for them first \
                 (torch.cuda.synchronize())"
            }
        })
    }
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchPool((first, second)) => write!(
                f,
                "could not find pool ({first}, {second}): no graph was captured into it, or all of \
                 its graphs are destroyed; keep one of them as long as states of the pool are used"
            ),
            Self::Released((first, second)) => write!(
                f,
                "no graph uses pool ({first}, {second}) any more, and its memory goes with its \
                 blocks; keep a graph of it as long as states of the pool are used"
            ),
            Self::Over((first, second)) => write!(
                f,
                "all graphs of pool ({first}, {second}) were destroyed since its state was taken, \
                 and its memory has gone to others; keep a graph of it as long as states of the \
                 pool are used"
            ),
            Self::InTheWay { address, bytes, at, obstacle } => write!(
                f,
                "the block of {} at {address:#x} cannot be put back, and nothing was changed: \
                 what is at {at:#x} {obstacle}",
                Bytes(*bytes)
            ),
            Self::Heap(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StateError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_block_the_place_the_reason_and_the_remedy() {
        let error = StateError::InTheWay {
            address: 0x4000,
            bytes: 4 << 20,
            at: 0x5000,
            obstacle: Obstacle::Waits,
        };
        let text = error.to_string();
        let start = "the block of 4.00 MiB at 0x4000 cannot be put back, and nothing was changed: \
                     what is at 0x5000 may still be used by other streams";
        assert!(text.starts_with(start) && text.ends_with("(torch.cuda.synchronize())"), "{text}");
        assert!(StateError::NoSuchPool((0, 7)).to_string().contains("pool (0, 7)"));
    }
}
