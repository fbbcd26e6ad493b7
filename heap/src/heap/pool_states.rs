//! States of graphs' pools, as the doors see them.

use super::Heap;
use crate::pools::capture::PoolId;
use crate::pools::state::{PoolState, Restored, StateBlock, StateError};

impl Heap {
    /// Which blocks of the pool of graphs `id` are live on `device`, to be given to
    /// [`Heap::restore_pool`] as often as wanted. It holds no memory; dropped, it changes nothing.
    ///
    /// # Errors
    /// A device that there is not; no graph uses such a pool.
    pub fn pool_state(&self, device: i64, id: PoolId) -> Result<PoolState, StateError> {
        self.device(device)?.pool_state(id)
    }

    /// Makes the live blocks of a pool of graphs those of `state`: what else is live is freed, and
    /// what was live then and is not now is allocated at its address. Calls the driver only to ask
    /// which waits are over.
    ///
    /// # Errors
    /// No graph uses the pool any more; a block cannot be put back: [`StateError::InTheWay`].
    /// Nothing has been changed then.
    pub fn restore_pool(&self, state: &PoolState) -> Result<Restored, StateError> {
        let device = self.device(i64::from(state.device))?;
        device.learn_what_is_over(&self.shared, state.id)?;
        // An entry is in order with those of other threads: nobody notes anything meanwhile.
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
