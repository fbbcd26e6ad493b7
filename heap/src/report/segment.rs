//! A contiguous range of memory held, and the blocks in it, as a snapshot tells of them.

use crate::pools::capture::PoolId;
use crate::small::size_class::PAGE;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum BlockState {
    /// A free piece.
    Inactive = 0,
    /// A block in the program's hands.
    Allocated = 1,
    /// A block that the program has freed, and that waits for streams.
    PendingFree = 2,
}

/// A piece of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First byte.
    pub address: u64,
    /// Length, a multiple of 512.
    pub bytes: u64,
    /// Bytes that the program asked for; 0 where it is nobody's.
    pub requested: u64,
    /// The stream's handle; of free memory, that of whose it is, or 0.
    pub stream: u64,
    /// What it is.
    pub state: BlockState,
    /// Its lifetime's number; 0 where it is nobody's.
    pub lifetime: u8,
    /// The step of its allocation, where the record knows it.
    pub step: Option<u32>,
}

/// Whose memory a segment is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Holder {
    /// Anybody's with blocks of this lifetime (its number).
    Ordinary(u8),
    /// A CUDA graph's.
    Capture,
    /// The named pool's.
    Pool(String),
    /// The driver's, which would not take it back.
    Orphan,
    /// One block's: `backing:passthrough`.
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
    /// torch's id of the capture pool that it belongs to; (0, 0): none.
    pub pool: PoolId,
    /// Whether all blocks in it are small; `None`: there are none.
    small: Option<bool>,
    /// It may grow and shrink page by page.
    pub stitched: bool,
    /// Whose memory the segment is.
    pub holder: Holder,
    /// The blocks that tile the segment, by address.
    pub blocks: Vec<Block>,
}

impl Segment {
    pub(crate) fn new(address: u64, pool: PoolId, stitched: bool, holder: Holder) -> Self {
        Self { address, bytes: 0, pool, small: None, stitched, holder, blocks: Vec::new() }
    }

    /// Notes that a part of it serves `small` blocks, or a larger one.
    pub(crate) fn note_served(&mut self, small: bool) {
        self.small = Some(small && self.small != Some(false));
    }

    /// Whether torch would call it small: it serves blocks of up to 1 MiB, and no larger one. What
    /// lies free between them says nothing: torch's segments of small blocks have that too.
    pub fn is_small(&self) -> bool {
        self.small == Some(true)
    }

    /// Whether it is whole pages of a row, all of them free.
    pub(crate) fn is_idle(&self) -> bool {
        let is_whole = self.bytes > 0 && (self.address | self.bytes).is_multiple_of(PAGE);
        is_whole && self.blocks.iter().all(|block| block.state == BlockState::Inactive)
    }

    /// Adds a piece at its end. Free pieces of one stream are one.
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
