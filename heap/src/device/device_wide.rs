//! Frees behind streams, and what memory of no stream waits for.

use super::walk::{Visitor, WalkedShard};
use crate::central::Central;
use crate::device::{Device, Owned};
use crate::runs::arena::{Run, RunId, RunState};
use crate::shared::Shared;
use crate::sync::lock;
use gruyere_record::clock;
use std::convert::Infallible;

impl Device {
    /// Before a large block of all streams is cut: what is parked is looked at first. A block that
    /// were cut from another free run instead would leave a gap there and one here, and two driver
    /// calls are little beside what `cudaMalloc` costs otherwise (docs/decisions/preload.md).
    pub(crate) fn poll_parked(&self, shared: &Shared) {
        if lock(&self.central).pending.is_empty() {
            return;
        }
        if let Some(_guard) = self.query_guard() {
            self.fence(shared, None);
            self.streams.poll_some(&*shared.driver);
            self.collect_completed(shared, &mut lock(&self.central));
        }
    }

    /// Frees the block at `address`, not to be reused before stream `user` is past this moment.
    /// `None`, and nothing done: none of the ordinary small ones and none of the large ones starts
    /// there.
    pub(crate) fn free_behind(
        &self,
        shared: &Shared,
        owned: Owned<'_>,
        address: u64,
        user: u32,
    ) -> Option<()> {
        let start = clock::now();
        match owned {
            Owned::Small(_, shard, slab) => {
                let mut guard = lock(self.shards.get(shard as usize)?);
                let cell = &mut *guard;
                let (shard, writer) = (&mut cell.shard, &mut cell.writer);
                let outcome = shard.free_behind(writer, slab, address, start, &self.streams, user);
                self.freed_otherwise(shared, guard, outcome)?;
            }
            Owned::Large(_, page) => {
                lock(&self.central).free_large(page, &self.streams, address, start, Some(user))?;
                self.fence_batch(shared, Some(user));
            }
        }
        Some(())
    }

    /// Where all live blocks start.
    pub(crate) fn live_addresses(&self) -> Vec<u64> {
        let mut live = Live::default();
        let Ok(central) = self.walk(&mut live);
        live.0.extend(central.direct_blocks().map(|(address, _)| address));
        live.0
    }
}

/// Where live blocks start.
#[derive(Default)]
struct Live(Vec<u64>);

impl Visitor for Live {
    type Error = Infallible;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), Infallible> {
        let slabs = walked.shard.slabs().map(|(_, slab)| slab);
        self.0.extend(slabs.flat_map(|slab| slab.live_slots().map(|slot| slab.address(slot))));
        Ok(())
    }

    fn run(&mut self, _: RunId, run: &Run, _: &Central) -> Result<(), Infallible> {
        let is_live = run.state == RunState::Live && !run.is_slab;
        self.0.extend(is_live.then_some(run.address));
        Ok(())
    }
}
