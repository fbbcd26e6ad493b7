//! A heap that only keeps books: another allocator serves the program, and this one is told of each of its blocks.
//!
//! What is held is what is live: how the other allocator packs its blocks on pages is its own affair, and the driver is never asked
//! ([`crate::driver::absent::AbsentDriver`]). Blocks are on the record as a managing heap's are, so everything that reads a record shows them.
#![deny(unsafe_code)]

use super::address_book::AddressBook;
use super::central::Central;
use super::device::Device;
use super::shared::Shared;
use super::size_class::round;
use super::size_class::round_up;
use super::sync::lock;
use crate::record::{Block, BlockSlot, BlockTag, DeviceGauge, bucket_of, clock};

/// Devices that a watched program may use: no node has more.
pub(super) const DEVICES: u32 = 16;

/// The record's pool of large blocks: all go there, as nobody knows which of them share pages. (And one lock then serves the book and the record.)
const POOL: usize = 1;

/// How often (in blocks that came or went) the timeline is brought up to now.
const SAMPLE_EVERY: u64 = 64;

/// A block of the program's.
#[derive(Clone, Copy, Debug)]
struct Seen {
    size: u64,
    stream: u32,
    slot: BlockSlot,
}

impl Default for Seen {
    fn default() -> Self {
        Self { size: 0, stream: 0, slot: BlockSlot::NONE }
    }
}

/// The blocks of a device.
#[derive(Debug, Default)]
pub struct Watched {
    blocks: AddressBook<Seen>,
    held: u64,
    changes: u64,
}

impl Watched {
    /// Bytes of the blocks, each rounded up to 512.
    pub(super) fn held(&self) -> u64 {
        self.held
    }
}

impl Device {
    #[inline(always)]
    pub(super) fn saw_malloc(&self, shared: &Shared, address: u64, requested: u64, stream: u32) {
        // Beyond all memory there is; nothing is lost by not counting it.
        if round_up(requested, super::size_class::ALIGNMENT).is_none() {
            return;
        }
        let (block, time) = (self.describe(address, requested, stream), clock::now());
        let central = &mut *lock(&self.central);
        let slot = central.writer.place();
        central.writer.malloc(POOL, slot, block, || shared.step(), time);
        let known = central.watched.blocks.insert(address, Seen { size: requested, stream, slot });
        central.watched.held += block.size;
        if let Some(known) = known {
            self.forget(central, address, known, time);
        }
        central.publish_watched();
    }

    /// The blocks that were seen and are not gone.
    pub(super) fn seen(&self) -> Vec<u64> {
        lock(&self.central).watched.blocks.addresses().collect()
    }

    #[inline(always)]
    pub(super) fn saw_free(&self, address: u64) -> bool {
        let time = clock::now();
        let central = &mut *lock(&self.central);
        let Some(known) = central.watched.blocks.remove(address) else { return false };
        let block = self.describe(address, known.size, known.stream);
        central.watched.held -= block.size;
        central.writer.free(POOL, known.slot, block, time);
        central.publish_watched();
        true
    }

    /// Takes a block off the record that was freed in a way that we do not see.
    #[cold]
    #[inline(never)]
    fn forget(&self, central: &mut Central, address: u64, known: Seen, time: u64) {
        let block = self.describe(address, known.size, known.stream);
        central.watched.held -= block.size;
        central.writer.free(POOL, known.slot, block, time);
    }

    /// A block as the record describes it.
    #[inline(always)]
    fn describe(&self, address: u64, requested: u64, stream: u32) -> Block {
        let size = round(requested);
        let tag = BlockTag::new(self.id as u8, 0, 0, stream);
        Block { tag, address, size, requested, bucket: bucket_of(size) }
    }
}

impl Central {
    #[inline(always)]
    fn publish_watched(&mut self) {
        let Watched { held, changes, .. } = &mut self.watched;
        *changes += 1;
        let (held, is_due) = (*held, *changes % SAMPLE_EVERY == 1);
        (self.backing.held, self.backing.reserved) = (held, held);
        if held > self.peak_reserved {
            self.peak_reserved = held;
            self.gauges.set(&[(DeviceGauge::Reserved, held), (DeviceGauge::ReservedPeak, held)]);
        } else {
            self.gauges.set(&[(DeviceGauge::Reserved, held)]);
        }
        if is_due {
            self.sample_watched();
        }
    }

    #[cold]
    #[inline(never)]
    fn sample_watched(&mut self) {
        let held = self.watched.held;
        self.tally.hold(held, self.watched.blocks.len() as u64);
        self.gauges.sample(held);
    }
}
