//! Memory allocated by a captured stream: it belongs to the graph, not to a pool.

use super::{Gpu, fail};
use crate::GRANULARITY;
use crate::backing::{Backing, Source};
use crate::books::Part;
use crate::calls::CallKind;
use crate::error::{SimResult, code};

impl Gpu {
    /// Allocates memory as part of the capture of `stream`. The memory exists at once; a driver
    /// waits for the graph's first launch. Code 901 if the stream does not capture, or its capture
    /// has failed.
    pub fn graph_alloc(&self, device: u32, bytes: u64, stream: usize) -> SimResult<u64> {
        const KIND: CallKind = CallKind::PoolAlloc;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.pool_hit)?;
        let key = state.stream(KIND, device, stream)?;
        let Some(capture) =
            state.capture_of(key).filter(|capture| !capture.invalidated).map(|c| c.id)
        else {
            return fail(KIND, code::CAPTURE_INVALIDATED);
        };
        let Some(held) = bytes.checked_next_multiple_of(GRANULARITY).filter(|&held| held > 0)
        else {
            return state.refuse(KIND, "allocation of nothing", bytes);
        };
        let device = state.streams.get(key).device;
        let now = state.time.now();
        if !state.devices[device as usize].books.take(held, Part::Plain, now) {
            return fail(KIND, code::OUT_OF_MEMORY);
        }
        let Some(address) = state.take_space(held, GRANULARITY) else {
            state.devices[device as usize].books.give(held, Part::Plain, now);
            return fail(KIND, code::OUT_OF_MEMORY);
        };
        let physical = state.number(held);
        let access = state.all_reaching(device);
        let source = Source::Graph { capture, freed: false };
        state.backings.insert(Backing {
            address,
            bytes: held,
            physical,
            offset: 0,
            device,
            source,
            access,
        });
        Ok(address)
    }

    /// Frees memory of [`Gpu::graph_alloc`]: at once, or, on a capturing stream, with the graph.
    pub fn graph_free(&self, device: u32, address: u64, stream: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::PoolFree;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.pool_hit)?;
        let key = state.stream(KIND, device, stream)?;
        let Some(backing) = state.backings.get(address).copied() else {
            return state.refuse(KIND, "free of an address that no graph has allocated", address);
        };
        let Source::Graph { capture, freed: false } = backing.source else {
            return state.refuse(KIND, "free of an address that no graph has allocated", address);
        };
        if state.capture_of(key).is_some() {
            let source = Source::Graph { capture, freed: true };
            state.backings.insert(Backing { source, ..backing });
        } else {
            state.drop_allocation(backing);
        }
        Ok(())
    }

    /// Drops a graph's self-freed memory with the graph.
    pub(super) fn drop_graph_memory(state: &mut super::State, graph: u64) {
        let freed = Source::Graph { capture: graph, freed: true };
        let gone: Vec<Backing> =
            state.backings.iter().filter(|b| b.source == freed).copied().collect();
        for backing in gone {
            state.drop_allocation(backing);
        }
    }
}
