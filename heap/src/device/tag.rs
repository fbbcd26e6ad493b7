//! What the program learns of a block after it was allocated: its lifetime.
//!
//! An optimiser's state cannot be told from the temporaries of its step while the step runs, but
//! when it is over it can. A block that is tagged then is counted under its new lifetime; it is not
//! moved.

use crate::device::Device;
use crate::pools::lifetime::Lifetime;
use crate::runs::page_table::Owner;
use crate::small::size_class::round;
use crate::sync::lock;
use gruyere_record::gauges::pool_of;

impl Device {
    pub(crate) fn tag(&self, address: u64, owner: Owner, lifetime: Lifetime) -> Option<()> {
        let lifetime = lifetime as u8;
        match owner {
            Owner::Slab { shard, slab, .. } => {
                self.in_shard(shard, |shard, writer, _| shard.tag(writer, slab, address, lifetime))
            }
            Owner::Large { blocks, .. } => {
                let central = &mut *lock(&self.central);
                let (id, run) = central.find(address, blocks)?;
                let (slot, requested, from) = (run.slot, run.requested(), run.lifetime);
                if from != lifetime {
                    let (size, writers) = (round(requested), &mut central.writers);
                    writers[pool_of(size)].block_retag(slot, size, requested, from, lifetime);
                    central.arenas.run_mut(id)?.lifetime = lifetime;
                }
                Some(())
            }
            Owner::None => None,
        }
    }
}
