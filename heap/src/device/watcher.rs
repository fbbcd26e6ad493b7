//! Books of a program that is only watched.

use crate::central::Central;
use crate::device::Device;
use crate::shared::Shared;
use crate::small::size_class::round;
use crate::small::size_class::round_up;
use crate::sync::lock;
use crate::watcher::{POOL, Seen};
use gruyere_record::{Block, BlockTag, bucket_of, clock};

impl Device {
    #[inline(always)]
    pub(crate) fn saw_malloc(&self, shared: &Shared, address: u64, requested: u64, stream: u32) {
        // Beyond all memory there is; nothing is lost by not counting it.
        if round_up(requested, crate::small::size_class::ALIGNMENT).is_none() {
            return;
        }
        let (block, time) = (self.describe(address, requested, stream), clock::now());
        let central = &mut *lock(&self.central);
        let slot = central.writers[POOL].place();
        central.writers[POOL].malloc(slot, block, || shared.step(), time);
        let known = central.watched.blocks.insert(address, Seen { size: requested, stream, slot });
        central.watched.held += block.size;
        if let Some(known) = known {
            self.forget(central, address, known, time);
        }
        central.publish_watched();
    }

    /// The blocks that were seen and are not gone.
    pub(crate) fn seen(&self) -> Vec<u64> {
        lock(&self.central).watched.blocks.addresses().collect()
    }

    #[inline(always)]
    pub(crate) fn saw_free(&self, address: u64) -> bool {
        let time = clock::now();
        let central = &mut *lock(&self.central);
        let Some(known) = central.watched.blocks.remove(address) else { return false };
        let block = self.describe(address, known.size, known.stream);
        central.watched.held -= block.size;
        central.writers[POOL].free(known.slot, block, time);
        central.publish_watched();
        true
    }

    /// Takes a block off the record that was freed in a way that we do not see.
    #[cold]
    #[inline(never)]
    fn forget(&self, central: &mut Central, address: u64, known: Seen, time: u64) {
        let block = self.describe(address, known.size, known.stream);
        central.watched.held -= block.size;
        central.writers[POOL].free(known.slot, block, time);
    }

    /// A block as the record describes it.
    #[inline(always)]
    fn describe(&self, address: u64, requested: u64, stream: u32) -> Block {
        let size = round(requested);
        let tag = BlockTag::new(self.id as u8, 0, 0, stream);
        Block { tag, address, size, requested, bucket: bucket_of(size) }
    }
}
