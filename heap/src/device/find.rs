//! What is known of the block that starts at an address.

use crate::device::Device;
use crate::pools::Reuse;
use crate::runs::arena::RunState;
use crate::runs::page_table::Owner;
use crate::small::shard::Shard;
use crate::small::size_class::round;
use crate::small::slab::SlotState;
use crate::sync::lock;

/// A block that is live, or freed and waits for streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The number of its stream.
    pub stream: u32,
    /// Its length, a multiple of 512.
    pub bytes: u64,
    /// Bytes that the program asked for.
    pub requested: u64,
    /// The program has freed it.
    pub is_pending: bool,
    /// Other streams use it.
    pub is_shared: bool,
    /// Who gets its memory; `None`: it is ordinary memory, or a block of `backing:passthrough`.
    pub apart: Option<Reuse>,
}

impl Found {
    /// Whether its memory is not free at once when the program frees it.
    pub fn waits(&self) -> bool {
        self.is_shared || self.apart == Some(Reuse::Never)
    }
}

fn in_slab(shard: &Shard, slab: u32, address: u64, apart: Option<Reuse>) -> Option<Found> {
    let slab = shard.slab(slab)?;
    let slot = slab.slot_at(address)?;
    let state = slab.state(slot);
    let requested = slab.facts(slot).requested;
    (state != SlotState::Free).then(|| Found {
        stream: slab.stream,
        bytes: round(requested),
        requested,
        is_pending: state == SlotState::Pending,
        is_shared: shard.is_used_elsewhere(address),
        apart,
    })
}

impl Device {
    /// The block that starts at `address`, in pages of `owner`; `None`: none does.
    pub(crate) fn block_at(&self, address: u64, owner: Owner) -> Option<Found> {
        match owner {
            Owner::Slab { shard, slab, .. } => {
                self.in_shard(shard, |shard, _, apart| in_slab(shard, slab, address, apart))
            }
            Owner::Large { blocks, .. } => {
                let central = lock(&self.central);
                let (_, run) = central.run_at(address, blocks).filter(|(_, run)| !run.is_slab)?;
                let is_pending = run.state == RunState::Pending;
                let pool = central.pools.of_space(central.arenas.region(run.region).space);
                (is_pending || run.state == RunState::Live).then(|| Found {
                    stream: run.stream,
                    bytes: run.bytes,
                    requested: run.requested(),
                    is_pending,
                    is_shared: run.shared,
                    apart: pool.filter(|pool| !pool.is_ordinary()).map(|pool| pool.rules.reuse),
                })
            }
            Owner::None => {
                let (bytes, requested) = lock(&self.central).direct_block(address)?;
                Some(Found {
                    stream: 0,
                    bytes,
                    requested,
                    is_pending: false,
                    is_shared: false,
                    apart: None,
                })
            }
        }
    }
}
