//! Blocks at addresses that the caller names: a tensor of a CUDA graph returns to the address that
//! the graph knows (torch's `allocateWithAddress`).

use crate::central::Central;
use crate::device::Device;
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::heap::Heap;
use crate::lifetime;
use crate::pools::capture::PoolId;
use crate::pools::restore::{SlabPlace, StateBlock};
use crate::pools::{Pool, PoolNumber, route};
use crate::request::{Request, is_absurd};
use crate::runs::arena::{RunId, SpaceId};
use crate::runs::page_table::Owner;
use crate::shared::Shared;
use crate::small::size_class::{ALIGNMENT, SIZE_CLASSES, SLAB, SMALL_MAX, class_of, round};
use crate::supply::Way;
use crate::sync::lock;
use gruyere_record::clock;

impl Device {
    /// Places the block of `request` at `address` and nowhere else, in free memory that is unowned
    /// or its stream's: in the pool that `pool` returns, else in ordinary memory. `None`: there is
    /// no such memory. Calls no driver.
    pub(crate) fn malloc_at(
        &self,
        shared: &Shared,
        request: Request,
        address: u64,
        pool: impl FnOnce(&mut Central) -> Option<PoolNumber>,
    ) -> Option<u64> {
        if !address.is_multiple_of(ALIGNMENT) || is_absurd(request.size) {
            return None;
        }
        let central = &mut *lock(&self.central);
        self.collect_completed(shared, central);
        match pool(central) {
            None => self.ordinary_at(shared, central, &request, address),
            Some(number) if central.pools.get(number).is_some_and(Pool::is_outside) => {
                let spaces = central.pools.get(number)?.spaces().to_vec();
                let run = run_at(central, spaces, &request, address)?;
                central.publish_in_pool(shared, number, run, &request)
            }
            Some(number) => self.pooled_at(shared, central, number, &request, address),
        }
    }

    /// Large blocks only: small blocks of ordinary memory lie in the shards of streams, which this
    /// does not search.
    fn ordinary_at(
        &self,
        shared: &Shared,
        central: &mut Central,
        request: &Request,
        address: u64,
    ) -> Option<u64> {
        if request.size <= SMALL_MAX || !matches!(self.supply.way(request.size), Way::Heap) {
            return None;
        }
        let ordinary = central.pools.iter().filter(|(_, pool)| pool.is_ordinary());
        let spaces = ordinary.flat_map(|(_, pool)| pool.spaces().iter().copied()).collect();
        let run = run_at(central, spaces, request, address)?;
        Some(central.publish(&shared.table, run, request, shared.step(), 0))
    }

    fn pooled_at(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
        request: &Request,
        address: u64,
    ) -> Option<u64> {
        self.return_pool_slabs(shared, central, number);
        let block = |slab| StateBlock {
            address,
            bytes: round(request.size),
            requested: request.size,
            stream: request.stream,
            lifetime: request.lifetime as u8,
            slab,
        };
        let places = match request.size <= SMALL_MAX {
            true => places(shared, central.pools.get(number)?, request, address),
            false => vec![None],
        };
        places.into_iter().find_map(|place| {
            self.allocate_planned(shared, central, number, &block(place), request.start)?;
            Some(address)
        })
    }
}

/// The run at `address`, from the first of `spaces` in which it is free.
fn run_at(
    central: &mut Central,
    spaces: Vec<SpaceId>,
    request: &Request,
    address: u64,
) -> Option<RunId> {
    let bytes = round(request.size);
    let mut spaces = spaces.into_iter();
    spaces.find_map(|space| central.arenas.allocate_at(space, address, bytes, request.stream))
}

/// The slabs that may hold a small block at `address`: the existing one, or each new one whose
/// slots include one that starts exactly there.
fn places(shared: &Shared, pool: &Pool, request: &Request, address: u64) -> Vec<Option<SlabPlace>> {
    if let Owner::Slab { slab, .. } = shared.table.get(address) {
        let found = pool.shard.as_ref().and_then(|shard| shard.slab(slab));
        let fits = found.filter(|slab| {
            let class = &SIZE_CLASSES[slab.class as usize];
            slab.stream == request.stream
                && (slab.base..slab.base + class.slab_bytes()).contains(&address)
                && u64::from(class.slot) >= request.size
        });
        return fits
            .map(|slab| Some(SlabPlace { base: slab.base, class: slab.class }))
            .into_iter()
            .collect();
    }
    let class = class_of(request.size);
    let bytes = SIZE_CLASSES[class].slab_bytes();
    let slot = u64::from(SIZE_CLASSES[class].slot);
    let last = address / SLAB * SLAB;
    let bases = (0..bytes / SLAB).filter_map(|before| last.checked_sub(before * SLAB));
    bases
        .filter(|base| {
            let offset = address - base;
            offset.is_multiple_of(slot) && offset + slot <= bytes
        })
        .map(|base| Some(SlabPlace { base, class: class as u8 }))
        .collect()
}

impl Heap {
    /// As [`Heap::malloc`], at `address` and nowhere else, from free memory of the stream: in the
    /// pool that it captures for, the memory of the graphs of pool `graphs`, the pool that the
    /// thread is in, or ordinary memory, where only large blocks can be placed. `None`: there is no
    /// such memory.
    ///
    /// # Errors
    /// The error for an unknown device; the driver's error on asking whether the stream captures.
    pub fn malloc_at(
        &self,
        size: u64,
        device: i64,
        stream: StreamHandle,
        address: u64,
        graphs: Option<PoolId>,
    ) -> Result<Option<u64>, Error> {
        if size == 0 {
            return Ok(None);
        }
        let start = clock::now();
        let device = self.device(device)?;
        let shared = &self.shared;
        let found = device.named(shared, stream)?;
        let request = Request::new(size, found.number, lifetime::tags().lifetime(), start);
        let capture = device.capture_of(shared, stream, &found)?;
        let served = device.malloc_at(shared, request, address, |central| {
            if let Some(capturing) = capture {
                return Some(central.pool_for_capture(capturing, request.stream));
            }
            let of_graphs = graphs.and_then(|id| central.pool_of_graphs(id).ok());
            of_graphs.map(|(number, _)| number).or_else(|| route::pool_on(device.id))
        });
        if let Some(address) = served {
            self.noted(device, &request, address, stream);
            self.served(device, size, address);
        }
        Ok(served)
    }
}
