//! A device's segments, the blocks in them, and their sums: each byte counted once, by place, and
//! the live blocks by lifetime, size, step and stream.
//!
//! A segment is a contiguous range of memory held; [`crate::snapshot`] lists them.

use crate::pools::capture::PoolId;
use crate::small::size_class::PAGE;
use gruyere_record::LIFETIMES;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

/// A number of blocks, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// Number of blocks.
    pub blocks: u64,
    /// Their bytes, each rounded up to 512 B.
    pub bytes: u64,
    /// Bytes that the program asked for.
    pub requested: u64,
}

impl Sum {
    /// Adds one block, or several.
    pub fn add(&mut self, other: Sum) {
        // Saturating: the numbers may come from a record.
        self.blocks = self.blocks.saturating_add(other.blocks);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.requested = self.requested.saturating_add(other.requested);
    }
}

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

/// Steps counted one by one; blocks of further steps are summed up.
const MOST_STEPS: usize = 1 << 16;
/// Number of largest blocks listed.
const LARGEST: usize = 32;

/// The bytes of one device by place.
#[derive(Clone, Debug, Default)]
pub struct SegmentStats {
    /// Live blocks.
    pub live: Sum,
    /// Freed blocks that wait for streams.
    pub pending: Sum,
    free: [u64; PLACES],
    /// The rest of the memory held: ends of spans that no page fits into.
    pub rest: u64,
    /// Memory held.
    pub reserved: u64,
    /// Live blocks by lifetime.
    pub lifetimes: [Sum; LIFETIMES],
    /// By the exponent of the least power of two that is not below their bytes.
    pub sizes: BTreeMap<u32, Sum>,
    /// By the step of their allocation.
    pub steps: HashMap<u32, Sum>,
    /// Blocks without a known step (the record is off or full), or of too many steps.
    pub stepless: Sum,
    /// By the number of their stream.
    pub streams: BTreeMap<u32, Sum>,
    largest: BinaryHeap<Reverse<Large>>,
}

/// A live block; ordered by size first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Large {
    /// Bytes that the program asked for.
    pub requested: u64,
    /// Its address.
    pub address: u64,
    /// Its lifetime's number.
    pub lifetime: u8,
    /// The number of its stream.
    pub stream: u32,
    /// The step of its allocation.
    pub step: Option<u32>,
}

/// The exponent of the least power of two that is not less than `bytes`.
pub fn size_exponent(bytes: u64) -> u32 {
    bytes.max(1).checked_next_power_of_two().map_or(u64::BITS, u64::trailing_zeros)
}

impl SegmentStats {
    /// Adds a block.
    pub fn block(&mut self, block: &Block, stream: u32) {
        let &Block { address, bytes, requested, state, lifetime, step, .. } = block;
        let sum = Sum { blocks: 1, bytes, requested };
        match state {
            BlockState::Inactive => return,
            BlockState::PendingFree => return self.pending.add(sum),
            BlockState::Allocated => self.live.add(sum),
        }
        self.lifetimes[lifetime as usize % LIFETIMES].add(sum);
        self.sizes.entry(size_exponent(bytes)).or_default().add(sum);
        self.streams.entry(stream).or_default().add(sum);
        match step {
            Some(step) if self.steps.len() < MOST_STEPS || self.steps.contains_key(&step) => {
                self.steps.entry(step).or_default().add(sum);
            }
            _ => self.stepless.add(sum),
        }
        let large = Large { requested, address, lifetime, stream, step };
        if self.largest.len() < LARGEST {
            self.largest.push(Reverse(large));
        } else if self.largest.peek().is_some_and(|least| large > least.0) {
            self.largest.pop();
            self.largest.push(Reverse(large));
        }
    }

    /// Adds memory outside blocks.
    pub fn free(&mut self, place: Place, bytes: u64) {
        self.free[place as usize] += bytes;
    }

    /// Closes the sums once all memory was seen; `reserved` is held.
    pub fn close(&mut self, reserved: u64) {
        self.reserved = reserved;
        let seen = self.live.bytes + self.pending.bytes + self.free.iter().sum::<u64>();
        self.rest = reserved.saturating_sub(seen);
    }

    /// The bytes in a place.
    pub fn bytes_in(&self, place: Place) -> u64 {
        self.free[place as usize]
    }

    /// The largest live blocks, the largest first.
    pub fn largest(&self) -> Vec<Large> {
        let mut largest: Vec<Large> = self.largest.iter().map(|entry| entry.0).collect();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        largest
    }

    /// Live blocks by age in steps, seen from step `now`: 0, 1, 2 to 3, 4 to 7 and so on, by the
    /// exponent of the power of two above the age.
    pub fn ages(&self, now: u32) -> BTreeMap<u32, Sum> {
        let mut ages: BTreeMap<u32, Sum> = BTreeMap::new();
        for (&step, &sum) in &self.steps {
            let age = now.saturating_sub(step);
            ages.entry(u32::BITS - age.leading_zeros()).or_default().add(sum);
        }
        ages
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

    fn block(address: u64, requested: u64, step: u32) -> Block {
        let bytes = requested.next_multiple_of(512);
        let state = BlockState::Allocated;
        Block { address, bytes, requested, stream: 7, state, lifetime: 2, step: Some(step) }
    }

    #[test]
    fn every_live_block_is_in_one_class_of_each_kind() {
        let mut segment_stats = SegmentStats::default();
        for n in 1..=100u64 {
            segment_stats.block(&block(n << 30, n * 1000, n as u32 / 10), n as u32 % 3);
        }
        segment_stats.block(&Block { state: BlockState::PendingFree, ..block(0, 512, 0) }, 0);
        segment_stats.free(Place::Slab, 12);
        segment_stats.close(segment_stats.live.bytes + 512 + 12 + 5);
        let all = |sums: &mut dyn Iterator<Item = &Sum>| {
            let mut whole = Sum::default();
            sums.for_each(|sum| whole.add(*sum));
            whole
        };
        assert_eq!(segment_stats.live.blocks, 100);
        assert_eq!(all(&mut segment_stats.lifetimes.iter()), segment_stats.live);
        assert_eq!(all(&mut segment_stats.sizes.values()), segment_stats.live);
        assert_eq!(all(&mut segment_stats.steps.values()), segment_stats.live);
        assert_eq!(all(&mut segment_stats.streams.values()), segment_stats.live);
        assert_eq!(all(&mut segment_stats.ages(10).values()), segment_stats.live);
        assert_eq!(segment_stats.ages(10)[&0].blocks, 1, "step 10 is this one");
        assert_eq!(segment_stats.ages(10)[&1].blocks, 10, "step 9 is the last one");
        assert_eq!(segment_stats.rest, 5);
        let largest = segment_stats.largest();
        assert_eq!(
            (largest.len(), largest[0].requested, largest[31].requested),
            (32, 100_000, 69_000)
        );
    }

    #[test]
    fn a_size_is_in_the_class_of_the_power_above_it() {
        assert_eq!([0, 1, 512, 513, 1024].map(size_exponent), [0, 0, 9, 10, 10]);
        assert_eq!(size_exponent(u64::MAX), 64);
    }
}
