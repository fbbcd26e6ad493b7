//! A device's reset: ends its primary context with everything in it.

use super::{Gpu, State};
use crate::backing::{Backing, Source};
use crate::books::Part;
use crate::calls::CallKind;
use crate::error::SimResult;
use crate::pool::Pool;

impl State {
    /// Returns an unused range to its device.
    pub(crate) fn drop_allocation(&mut self, gone: Backing) {
        self.backings.remove(gone.address);
        if let Some(oracle) = &mut self.oracle {
            oracle.vanished(gone.physical, gone.bytes);
        }
        let now = self.time.now();
        self.devices[gone.device as usize].books.give(gone.bytes, Part::Plain, now);
        self.give_space(gone.address, gone.bytes);
    }
}

impl Gpu {
    /// `cuDevicePrimaryCtxReset`: waits for `device`, then drops its plain memory, its pools, its
    /// streams and its events. The pool `keep`, its default one, becomes empty instead. Memory of
    /// virtual memory management belongs to no context and stays.
    pub fn reset_device(&self, device: u32, keep: Option<usize>) -> SimResult<()> {
        const KIND: CallKind = CallKind::DeviceReset;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        state.no_capture_on(KIND, device)?;
        state.wait_for_device(device);
        let gone: Vec<Backing> =
            state.backings.iter().filter(|backing| backing.device == device).copied().collect();
        for backing in gone {
            if let Some(oracle) = &mut state.oracle
                && !matches!(backing.source, Source::Mapping(_))
            {
                oracle.disowned_within(backing.address, backing.bytes);
            }
            match backing.source {
                Source::Mapping(_) => {}
                // Its chunk is released below.
                Source::Pool(_) => drop(state.backings.remove(backing.address)),
                Source::Plain | Source::Graph { .. } => state.drop_allocation(backing),
            }
        }
        let pools: Vec<usize> = state
            .pools
            .iter()
            .filter(|(_, pool)| pool.device == device)
            .map(|(&handle, _)| handle)
            .collect();
        for handle in pools {
            let Some(pool) = state.pools.remove(&handle) else { continue };
            state.dissolve(KIND.name(), &pool);
            if keep == Some(handle) {
                let fresh = Pool::new(device, pool.max_size, pool.address_space);
                state.pools.insert(handle, fresh);
            } else {
                state.space.give(pool.address_space);
            }
        }
        for key in state.streams.of_device(device) {
            state.streams.destroy(key);
            if let Some(oracle) = &mut state.oracle {
                oracle.destroyed(key);
            }
        }
        state.events.retain(|_, event| event.device != device);
        Ok(())
    }
}
