//! Frees behind streams, and what memory of no stream waits for.
#![deny(unsafe_code)]

use crate::heap::arena::RunState;
use crate::heap::capture::CapturePool;
use crate::heap::device::{Device, Owned};
use crate::heap::lane::{FreeOutcome, LANES, Lane};
use crate::heap::named::NAMED_LANES;
use crate::heap::page_table::Owner;
use crate::heap::shared::Shared;
use crate::heap::slab::SlotState;
use crate::heap::sync::lock;
use crate::record::clock;

impl Device {
    /// Before a large block of all streams is cut: what is parked is looked at first. A block that were cut from another free run instead would leave a
    /// gap there and one here, and two driver calls are little beside what `cudaMalloc` costs otherwise (docs/decisions/preload.md).
    pub(in crate::heap) fn take_back(&self, shared: &Shared) {
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
    pub(in crate::heap) fn free_behind(
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
    pub(in crate::heap) fn requested_at(&self, owner: Owner, address: u64) -> Option<u64> {
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
    pub(in crate::heap) fn live_addresses(&self) -> Vec<u64> {
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
