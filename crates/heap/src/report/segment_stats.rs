//! A device's segments, the blocks in them, and their sums: each byte counted once, by place, and
//! the live blocks in their classes.
//!
//! A segment is a contiguous range of memory held; [`crate::snapshot`] lists them.

use crate::pools::capture::PoolId;
use crate::small::size_class::PAGE;
use gruyere_record::dump::live::{LiveBlock, LiveSums};
use gruyere_record::dump::state::Sum;

/// A place of memory outside blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In slabs with blocks: free slots, and the unused ends of slots and slabs.
    Slab,
    /// Free, on pages shared with blocks.
    Between,
    /// Unused whole pages.
    Idle,
    /// Free, and kept for CUDA graphs.
    Capture,
    /// Free, and kept for named pools.
    Pool,
    /// Held, but mapped nowhere.
    Unmapped,
    /// Refused by the driver when returned.
    Orphan,
}

const PLACES: usize = 7;

impl Place {
    /// The place of free memory in a segment of `holder` that would be `ordinary` in ordinary
    /// memory.
    pub fn of(holder: &Holder, ordinary: Place) -> Place {
        match holder {
            Holder::Ordinary(_) | Holder::Direct => ordinary,
            Holder::Capture => Place::Capture,
            Holder::Pool(_) => Place::Pool,
            Holder::Orphan => Place::Orphan,
        }
    }
}

/// The bytes of one device by place.
#[derive(Clone, Debug, Default)]
pub struct SegmentStats {
    /// Live blocks.
    pub live: LiveSums,
    /// Freed blocks that wait for streams.
    pub pending: Sum,
    free: [u64; PLACES],
    /// The rest of the memory held: ends of spans that no page fits into.
    pub rest: u64,
    /// Memory held.
    pub reserved: u64,
}

impl SegmentStats {
    /// Adds a block.
    pub fn block(&mut self, block: &Block, stream: u32) {
        let &Block { address, bytes, requested, state, lifetime, step, .. } = block;
        match state {
            BlockState::Inactive => {}
            BlockState::PendingFree => {
                self.pending.add(Sum { blocks: 1, bytes, requested_bytes: requested });
            }
            BlockState::Allocated => {
                self.live.add(LiveBlock { requested, address, bytes, lifetime, stream, step });
            }
        }
    }

    /// Adds memory outside blocks.
    pub fn free(&mut self, place: Place, bytes: u64) {
        self.free[place as usize] += bytes;
    }

    /// Closes the sums once all memory was seen; `reserved` is held.
    pub fn close(&mut self, reserved: u64) {
        self.reserved = reserved;
        let seen = self.live.all.bytes + self.pending.bytes + self.free.iter().sum::<u64>();
        self.rest = reserved.saturating_sub(seen);
    }

    /// The bytes in a place.
    pub fn bytes_in(&self, place: Place) -> u64 {
        self.free[place as usize]
    }
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum BlockState {
    /// A free piece.
    Inactive = 0,
    /// A block in the program's hands.
    Allocated = 1,
    /// A block that the program has freed and that waits for streams.
    PendingFree = 2,
}

/// A piece of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First byte.
    pub address: u64,
    /// Length, a multiple of 512 B.
    pub bytes: u64,
    /// Bytes that the program asked for; 0 for free memory.
    pub requested: u64,
    /// The handle of its stream; for free memory, of the stream that owns it, or 0.
    pub stream: u64,
    /// The state of the piece.
    pub state: BlockState,
    /// Its lifetime's number; 0 for free memory.
    pub lifetime: u8,
    /// The step of its allocation, if the record knows it.
    pub step: Option<u32>,
}

/// The holder of a segment's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Holder {
    /// All blocks of this lifetime (its number).
    Ordinary(u8),
    /// A CUDA graph.
    Capture,
    /// The named pool.
    Pool(String),
    /// The driver, which refused to take it back.
    Orphan,
    /// A single block: `backing:passthrough`.
    #[default]
    Direct,
}

/// A contiguous range of memory held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// torch's id of its capture pool; (0, 0): none.
    pub pool: PoolId,
    /// Whether all blocks in it are small; `None`: there are none.
    small: Option<bool>,
    /// Whether it may grow and shrink page by page.
    pub stitched: bool,
    /// The holder of its memory.
    pub holder: Holder,
    /// The blocks that tile the segment, by address.
    pub blocks: Vec<Block>,
}

impl Segment {
    pub(crate) fn new(address: u64, pool: PoolId, stitched: bool, holder: Holder) -> Self {
        Self { address, bytes: 0, pool, small: None, stitched, holder, blocks: Vec::new() }
    }

    /// Notes that a part of it serves `small` blocks, or larger ones.
    pub(crate) fn note_served(&mut self, small: bool) {
        self.small = Some(small && self.small != Some(false));
    }

    /// Whether torch would call it small: it serves blocks of up to 1 MiB and none larger. Free
    /// memory between them does not matter: torch's segments of small blocks have that too.
    pub fn is_small(&self) -> bool {
        self.small == Some(true)
    }

    /// Whether it is whole pages of a row, all free.
    pub(crate) fn is_idle(&self) -> bool {
        let is_whole = self.bytes > 0 && (self.address | self.bytes).is_multiple_of(PAGE);
        is_whole && self.blocks.iter().all(|block| block.state == BlockState::Inactive)
    }

    /// Adds a piece at its end; joins free pieces of one stream.
    pub(crate) fn push(&mut self, block: Block) {
        self.bytes += block.bytes;
        match self.blocks.last_mut() {
            Some(last)
                if (last.state, last.stream) == (BlockState::Inactive, block.stream)
                    && block.state == BlockState::Inactive =>
            {
                last.bytes += block.bytes;
            }
            _ => self.blocks.push(block),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_in_one_place() {
        let block = |state| {
            let (address, bytes, requested) = (1 << 30, 1024, 1000);
            Block { address, bytes, requested, stream: 7, state, lifetime: 2, step: Some(1) }
        };
        let mut segment_stats = SegmentStats::default();
        segment_stats.block(&block(BlockState::Allocated), 7);
        segment_stats.block(&block(BlockState::PendingFree), 7);
        segment_stats.block(&block(BlockState::Inactive), 7);
        segment_stats.free(Place::Slab, 12);
        segment_stats.close(1024 + 1024 + 12 + 5);
        let one = Sum { blocks: 1, bytes: 1024, requested_bytes: 1000 };
        assert_eq!((segment_stats.live.all, segment_stats.pending), (one, one));
        assert_eq!((segment_stats.bytes_in(Place::Slab), segment_stats.rest), (12, 5));
    }
}
