//! A heap that only keeps books: another allocator serves the program, and this one is told of each
//! of its blocks.
//!
//! What is held is what is live: how the other allocator packs its blocks on pages is its own
//! affair, and the driver is never asked ([`crate::driver::absent::AbsentDriver`]). Blocks are on
//! the record as a managing heap's are, so everything that reads a record shows them.

use crate::supply::address_book::AddressBook;
use gruyere_record::BlockSlot;

/// Devices that a watched program may use: no node has more.
pub(super) const DEVICES: u32 = 16;

/// The record's pool of large blocks: all go there, as nobody knows which of them share pages. (And
/// one lock then serves the book and the record.)
pub(super) const POOL: usize = 1;

/// How often (in blocks that came or went) the timeline is brought up to now.
pub(super) const SAMPLE_EVERY: u64 = 64;

/// A block of the program's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) size: u64,
    pub(super) stream: u32,
    pub(super) slot: BlockSlot,
}

impl Default for Seen {
    fn default() -> Self {
        Self { size: 0, stream: 0, slot: BlockSlot::NONE }
    }
}

/// The blocks of a device.
#[derive(Debug, Default)]
pub struct Watched {
    pub(super) blocks: AddressBook<Seen>,
    pub(super) held: u64,
    pub(super) changes: u64,
}

impl Watched {
    /// Bytes of the blocks, each rounded up to 512.
    pub(super) fn held(&self) -> u64 {
        self.held
    }
}
