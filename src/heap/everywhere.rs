//! Callers that keep CUDA's own rules of order: `cudaMalloc` and its kin, which come in through the LD_PRELOAD door.
//!
//! torch's hooks say on which streams a block is used, and free it as soon as the host is done with it. A CUDA program says less and promises more:
//! - what `cudaMalloc` gives may be used on any stream at once, and `cudaFree` must not let its memory go before all work on the device is past it.
//!   Such blocks belong to [`super::streams::EVERY`]: all streams together. A free waits for an event behind all work of the context, or for a synchronisation,
//!   which the program's own may be ([`super::Heap::synchronized`]); the free itself never waits. One event serves any number of frees, and is recorded
//!   when somebody needs memory.
//! - `cudaFreeAsync` names a stream, and the program vouches that all uses come before that point of it, whichever stream the block is of.
#![deny(unsafe_code)]

use super::arena::RunState;
use super::capture::CapturePool;
use super::device::{Device, Owned};
use super::lane::{FreeOutcome, LANES, Lane};
use super::named::NAMED_LANES;
use super::page_table::Owner;
use super::shared::Shared;
use super::slab::SlotState;
use super::sync::lock;
use crate::record::clock;
use std::collections::HashMap;

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedBlock {
    /// The device that it is on.
    pub device: u32,
    /// Its bytes, rounded up to 512.
    pub bytes: u64,
    /// Bytes that were asked for.
    pub requested: u64,
}

/// A moment before a synchronisation: what was freed until then.
#[derive(Debug, Default)]
#[must_use = "to be handed to Heap::synchronized once the device is"]
pub struct SyncPoint(pub(super) HashMap<u32, u64>);

impl Device {
    /// Before a large block of all streams is cut: what is parked is looked at first. A block that were cut from another free run instead would leave a
    /// gap there and one here, and two driver calls are little beside what `cudaMalloc` costs otherwise (docs/decisions/preload.md).
    pub(super) fn take_back(&self, shared: &Shared) {
        if !lock(&self.central).has_pending() {
            return;
        }
        if let Some(_asking) = self.ask() {
            self.seal(shared, None);
            self.streams.poll_some(&*shared.driver);
            self.take_in(shared, &mut lock(&self.central));
        }
    }

    /// Frees the block at `address`, not to be reused before stream `user` is past this moment. `None`, and nothing done: none of the plain ones starts
    /// there.
    pub(super) fn free_behind(
        &self,
        shared: &Shared,
        owned: Owned<'_>,
        address: u64,
        user: u32,
    ) -> Option<()> {
        let start = clock::now();
        match owned {
            Owned::Small(_, lane, slab) => {
                let mut guard = lock(self.lanes.get(lane as usize)?);
                let cell = &mut *guard;
                let (lane, writer) = (&mut cell.lane, &mut cell.writer);
                match lane.free_behind(writer, slab, address, start, &self.streams, user)? {
                    FreeOutcome::Surplus(id) => self.drop_surplus(shared, guard, id),
                    FreeOutcome::Freed | FreeOutcome::Waits => {}
                    FreeOutcome::Unknown => return None,
                }
            }
            Owned::Large(_, page) => {
                lock(&self.central).free_behind(page, &self.streams, address, user, start)?;
                self.seal_batch(shared, Some(user));
            }
        }
        Some(())
    }

    /// Bytes asked for of the live block that starts at `address`.
    pub(super) fn requested_at(&self, owner: Owner, address: u64) -> Option<u64> {
        let (lane, slab) = match owner {
            Owner::Slab { lane, slab, .. } => (lane, slab),
            Owner::Large { blocks, .. } => {
                return lock(&self.central).find(address, blocks).map(|(_, run)| run.requested());
            }
            Owner::None => return None,
        };
        if let Some(cell) = self.lanes.get(lane as usize) {
            return lock(cell).lane.requested(slab, address);
        }
        let central = lock(&self.central);
        let of_capture = |number| Some(&central.captures.pools.get(number as usize)?.as_ref()?.lane);
        let lane: Option<&Lane> = match lane.checked_sub(NAMED_LANES) {
            Some(number) => central.named.get(number).map(|pool| &pool.lane),
            None => of_capture(lane - LANES as u32),
        };
        lane?.requested(slab, address)
    }

    /// Where all live blocks start.
    pub(super) fn live_addresses(&self) -> Vec<u64> {
        fn of_lane(lane: &Lane, found: &mut Vec<u64>) {
            for (_, slab) in lane.slabs() {
                let live = (0..slab.size_class().slots).map(|slot| slab.address(slot));
                found.extend(live.filter(|&address| {
                    slab.slot_at(address)
                        .is_some_and(|slot| matches!(slab.state(slot), SlotState::Live { .. }))
                }));
            }
        }
        let mut found = Vec::new();
        for cell in self.lanes.iter() {
            of_lane(&lock(cell).lane, &mut found);
        }
        let central = lock(&self.central);
        let pools: Vec<&CapturePool> = central.captures.pools.iter().flatten().collect();
        pools.iter().for_each(|pool| of_lane(&pool.lane, &mut found));
        central.named.iter().for_each(|(_, pool)| of_lane(&pool.lane, &mut found));
        let large = central.arenas.blocks().map(|(_, run)| run);
        found.extend(large.filter(|run| run.state == RunState::Live && !run.is_slab).map(|run| run.address));
        found.extend(central.direct_blocks().map(|(address, _)| address));
        found
    }
}
