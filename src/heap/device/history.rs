//! What a history needs to know of a block.
#![deny(unsafe_code)]

use crate::heap::arena::RunState;
use crate::heap::device::Device;
use crate::heap::history::Facts;
use crate::heap::lane::{LANES, Lane};
use crate::heap::named::NAMED_LANES;
use crate::heap::page_table::Owner;
use crate::heap::size_class::round;
use crate::heap::slab::SlotState;
use crate::heap::sync::lock;

fn slab_facts(lane: &Lane, slab: u32, address: u64, frozen: bool) -> Option<Facts> {
    let slab = lane.slab(slab)?;
    let slot = slab.slot_at(address)?;
    let state = slab.state(slot);
    let waits = frozen || lane.is_used_elsewhere(address);
    let is_pending = state == SlotState::Pending;
    let bytes = round(slab.facts(slot).requested);
    (state != SlotState::Free).then_some(Facts { stream: slab.stream, bytes, waits, is_pending })
}

impl Device {
    pub(in crate::heap) fn facts_at(&self, address: u64, owner: Owner) -> Option<Facts> {
        match owner {
            Owner::Slab { lane, slab, .. } if (lane as usize) < LANES => {
                slab_facts(&lock(&self.lanes[lane as usize]).lane, slab, address, false)
            }
            Owner::Slab { lane, slab, .. } if lane >= NAMED_LANES => {
                let central = lock(&self.central);
                let pool = central.named.get(lane - NAMED_LANES)?;
                slab_facts(&pool.lane, slab, address, false)
            }
            Owner::Slab { lane, slab, .. } => {
                let mut central = lock(&self.central);
                let pool = central.captures.get_mut(lane - LANES as u32)?;
                slab_facts(&pool.lane, slab, address, pool.frozen)
            }
            Owner::Large { blocks, .. } => {
                let central = lock(&self.central);
                let (_, run) = central.run_at(address, blocks).filter(|(_, run)| !run.is_slab)?;
                let space = central.arenas.region(run.region).space;
                let frozen =
                    central.captures.pools.iter().flatten().any(|pool| pool.frozen && pool.space == space);
                let is_pending = run.state == RunState::Pending;
                let is_block = is_pending || run.state == RunState::Live;
                is_block.then_some(Facts {
                    stream: run.stream,
                    bytes: run.bytes,
                    waits: run.shared || frozen,
                    is_pending,
                })
            }
            Owner::None => {
                let bytes = lock(&self.central).direct_blocks().find(|block| block.0 == address)?.1;
                Some(Facts { stream: 0, bytes, waits: false, is_pending: false })
            }
        }
    }
}
