//! Where the bytes of a device are, each counted once, and what its live blocks are like.

use crate::report::segment::{Block, BlockState, Holder};
use gruyere_record::LIFETIMES;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

/// Blocks, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// How many.
    pub blocks: u64,
    /// Their bytes, each rounded up to 512.
    pub bytes: u64,
    /// Bytes that the program asked for.
    pub requested: u64,
}

impl Sum {
    /// Adds one block, or many.
    pub fn add(&mut self, other: Sum) {
        // Saturating: they may be a record's numbers.
        self.blocks = self.blocks.saturating_add(other.blocks);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.requested = self.requested.saturating_add(other.requested);
    }
}

/// Where memory that is no block's lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In slabs that have blocks: free slots, and what is over at the ends of slots and slabs.
    Slab,
    /// Free, on pages that blocks lie on too.
    Between,
    /// Whole pages that nobody uses.
    Idle,
    /// Free, and kept for CUDA graphs.
    Capture,
    /// Free, and kept for named pools.
    Pool,
    /// Held, and mapped nowhere.
    Unmapped,
    /// The driver would not take it back.
    Orphan,
}

/// Number of [`Place`]s.
const PLACES: usize = 7;

impl Place {
    /// Where free memory of a segment lies that would lie in `ordinary`, if it were anybody's.
    pub fn of(holder: &Holder, ordinary: Place) -> Place {
        match holder {
            Holder::Ordinary(_) | Holder::Direct => ordinary,
            Holder::Capture => Place::Capture,
            Holder::Pool(_) => Place::Pool,
            Holder::Orphan => Place::Orphan,
        }
    }
}

/// Steps that are told apart; blocks of more are summed up.
const MOST_STEPS: usize = 1 << 16;
/// The largest blocks that are told.
const LARGEST: usize = 32;

/// What lies where on one device.
#[derive(Clone, Debug, Default)]
pub struct SegmentStats {
    /// Live blocks.
    pub live: Sum,
    /// Blocks that were freed and wait for streams.
    pub pending: Sum,
    free: [u64; PLACES],
    /// Held beyond all that: ends of spans that no page fits into.
    pub rest: u64,
    /// What is held.
    pub reserved: u64,
    /// Live blocks by lifetime.
    pub lifetimes: [Sum; LIFETIMES],
    /// By the power of two that their bytes do not exceed: its exponent.
    pub sizes: BTreeMap<u32, Sum>,
    /// By the step of their allocation.
    pub steps: HashMap<u32, Sum>,
    /// Of which the step is not known (the record is off or full), or that are of too many steps.
    pub stepless: Sum,
    /// By the number of their stream.
    pub streams: BTreeMap<u32, Sum>,
    largest: BinaryHeap<Reverse<Large>>,
}

/// A live block, by size first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Large {
    /// Bytes that the program asked for.
    pub requested: u64,
    /// Where it lies.
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

    /// Adds memory that is no block's.
    pub fn free(&mut self, place: Place, bytes: u64) {
        self.free[place as usize] += bytes;
    }

    /// All is seen, and so much is held.
    pub fn close(&mut self, reserved: u64) {
        self.reserved = reserved;
        let seen = self.live.bytes + self.pending.bytes + self.free.iter().sum::<u64>();
        self.rest = reserved.saturating_sub(seen);
    }

    /// Bytes that lie there.
    pub fn bytes_in(&self, place: Place) -> u64 {
        self.free[place as usize]
    }

    /// The largest live blocks, the largest first.
    pub fn largest(&self) -> Vec<Large> {
        let mut largest: Vec<Large> = self.largest.iter().map(|entry| entry.0).collect();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        largest
    }

    /// Live blocks by how many steps ago they were allocated, seen from step `now`: 0, 1, 2 to 3, 4
    /// to 7 and so on, by the exponent of the power of two above the age.
    pub fn ages(&self, now: u32) -> BTreeMap<u32, Sum> {
        let mut ages: BTreeMap<u32, Sum> = BTreeMap::new();
        for (&step, &sum) in &self.steps {
            let age = now.saturating_sub(step);
            ages.entry(u32::BITS - age.leading_zeros()).or_default().add(sum);
        }
        ages
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
