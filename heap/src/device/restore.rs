//! The state of a graph's pool is taken, and restored (`pool/state.rs`).
//!
//! A restore is planned in full before the first block is touched, under the one lock that guards
//! all of a pool, and calls no driver: it is done whole or not at all.

use crate::central::restore::Plan;
use crate::central::{Central, SMALL};
use crate::device::Device;
use crate::error::Error;
use crate::pools::capture::PoolId;
use crate::pools::lifetime::Lifetime;
use crate::pools::state::{PoolState, SlabPlace, StateBlock, StateError};
use crate::pools::{PoolNumber, capture_tag};
use crate::request::Request;
use crate::runs::page_table::Owner;
use crate::shared::Shared;
use crate::small::size_class::SIZE_CLASSES;
use crate::sync::lock;
use gruyere_record::clock;

impl Device {
    /// Which blocks of the pool of graphs `id` are live.
    ///
    /// # Errors
    /// No graph uses such a pool.
    pub(crate) fn pool_state(&self, id: PoolId) -> Result<PoolState, StateError> {
        let central = lock(&self.central);
        let (number, era) = central.pool_of_graphs(id)?;
        Ok(PoolState { device: self.id, id, era, blocks: central.live_in(number) })
    }

    /// Makes the live blocks of a pool those of `state`; what was done. Calls no driver.
    ///
    /// # Errors
    /// As [`Device::pool_state`]; a block cannot be put back. Nothing has been done then.
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
        // Before their memory is asked for.
        self.return_pool_slabs(shared, central, number);
        for block in &plan.allocated {
            self.allocate_planned(shared, central, number, block, start).ok_or_else(broken)?;
        }
        Ok(plan)
    }

    /// Asks the streams how far they are, where blocks of the pool wait for some, and may be in the
    /// way of a restore. To be called with no lock held.
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

    /// Makes a block of a pool live where it says; `None`, and no block is made, where that is not
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
