//! A heap that only keeps books: another allocator serves the program, and this one is told of each
//! of its blocks.
//!
//! What is held is what is live: how the other allocator packs its blocks on pages is its own
//! affair, and the driver is never asked ([`crate::driver::absent::AbsentDriver`]). Blocks are on
//! the record as a managing heap's are, so everything that reads a record shows them.

use crate::callers::address_book::AddressBook;
use gruyere_record::BlockSlot;

/// Devices that a watched program may use: no node has more.
pub(crate) const DEVICES: u32 = 16;

/// The record's pool of large blocks: all go there, as nobody knows which of them share pages. (And
/// one lock then serves the book and the record.)
pub(crate) const POOL: usize = 1;

/// How often (in blocks that came or went) the timeline is brought up to now.
pub(crate) const SAMPLE_EVERY: u64 = 64;

/// A block of the program's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) size: u64,
    pub(crate) stream: u32,
    pub(crate) slot: BlockSlot,
}

impl Default for Seen {
    fn default() -> Self {
        Self { size: 0, stream: 0, slot: BlockSlot::NONE }
    }
}

/// The blocks of a device.
#[derive(Debug, Default)]
pub struct Watched {
    pub(crate) blocks: AddressBook<Seen>,
    pub(crate) held: u64,
    pub(crate) changes: u64,
}

impl Watched {
    /// Bytes of the blocks, each rounded up to 512.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }
}
