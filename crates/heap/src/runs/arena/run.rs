//! A run and a region: their state and their place.

use crate::runs::page_table::BlockId;
use crate::small::size_class::ALIGNMENT;
use gruyere_record::{BlockSlot, SegmentSlot};

/// A run's number; a live run's is its block's.
pub(crate) type RunId = BlockId;
/// No run: the end of a list.
pub(super) const NO_RUN: RunId = u32::MAX;
/// The owner of free runs that any stream may use.
pub(crate) const UNOWNED: u32 = u32::MAX;
pub(crate) type RegionId = u32;
pub(crate) type SpaceId = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunState {
    /// The record is on the list of unused records.
    Unused,
    Free,
    Live,
    /// Freed by the caller, waiting for other streams than its own.
    Pending,
    /// Address space of a stitched region in which nothing is mapped.
    Unmapped,
    /// Address space of a stitched region with pages mapped that belong elsewhere, or nowhere.
    StaleAlias,
}

/// Other streams use the block.
pub(crate) const SHARED: u8 = 1;
/// The block's kind is watched ([`crate::runs::kept`]).
pub(crate) const WATCHED: u8 = 2;

#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// First byte.
    pub(crate) address: u64,
    /// Length, a multiple of 512.
    pub(crate) bytes: u64,
    /// Free: no work on `stream` later than this epoch's touches it.
    pub(crate) epoch: u64,
    pub(crate) state: RunState,
    /// Live or pending: the stream of its allocation. Free: its owner, or [`UNOWNED`].
    pub(crate) stream: u32,
    pub(crate) region: RegionId,
    /// Its place in the block map while live or pending.
    pub(crate) slot: BlockSlot,
    /// Of a block: bytes of it that the caller did not ask for.
    pub(crate) slack: u32,
    /// Its bin of the size index while free or unmapped.
    pub(super) bin: u16,
    /// Its block's tag, as the record counts tags.
    pub(crate) lifetime: u8,
    /// Of a block, a sum of [`SHARED`] and [`WATCHED`]: its free takes more than the usual.
    pub(crate) traits: u8,
    pub(crate) is_slab: bool,
    pub(super) previous: RunId,
    pub(super) next: RunId,
    pub(super) bin_previous: RunId,
    pub(super) bin_next: RunId,
}

impl Run {
    /// An unowned free run without neighbours.
    pub(super) fn new(address: u64, bytes: u64, region: RegionId) -> Self {
        Self {
            address,
            bytes,
            epoch: 0,
            state: RunState::Free,
            stream: UNOWNED,
            region,
            slot: BlockSlot::NONE,
            slack: 0,
            bin: 0,
            lifetime: 0,
            traits: 0,
            is_slab: false,
            previous: NO_RUN,
            next: NO_RUN,
            bin_previous: NO_RUN,
            bin_next: NO_RUN,
        }
    }

    /// Notes the block that it is.
    #[inline(always)]
    pub(crate) fn label(&mut self, Label { slack, lifetime, slot }: Label) {
        (self.slack, self.lifetime, self.slot) = (slack, lifetime, slot);
    }

    /// Makes it a block of `stream`.
    #[inline(always)]
    pub(super) fn become_block(&mut self, stream: u32, label: Label) {
        (self.state, self.stream, self.traits, self.is_slab) = (RunState::Live, stream, 0, false);
        self.label(label);
    }

    /// Whether other streams use the block (`Central::users`).
    pub(crate) fn is_shared(&self) -> bool {
        self.traits & SHARED != 0
    }

    #[inline(always)]
    pub(super) fn place(&self) -> RunPlace {
        let Self { address, bytes, region, previous, next, .. } = *self;
        RunPlace { address, bytes, region, previous, next }
    }

    /// Of a block: bytes that the caller asked for.
    #[inline]
    pub(crate) fn requested(&self) -> u64 {
        self.bytes - u64::from(self.slack)
    }

    /// Bytes before the first multiple of `align` in it.
    #[inline]
    pub(crate) fn askew(&self, align: u64) -> u64 {
        self.address.wrapping_neg() & (align - 1)
    }

    /// Whether it holds `bytes` at a multiple of `align`.
    #[inline(always)]
    pub(crate) fn fits(&self, bytes: u64, align: u64) -> bool {
        // Every run begins at a multiple of ALIGNMENT.
        let askew = if align > ALIGNMENT { self.askew(align) } else { 0 };
        self.bytes >= bytes + askew
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RunPlace {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) region: RegionId,
    pub(super) previous: RunId,
    pub(super) next: RunId,
}

/// A run's notes about its block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Label {
    pub(crate) slack: u32,
    pub(crate) lifetime: u8,
    pub(crate) slot: BlockSlot,
}

impl Default for Label {
    fn default() -> Self {
        Self { slack: 0, lifetime: 0, slot: BlockSlot::NONE }
    }
}

/// A run is a cache line: found by a shift, and fetched at once.
const _: () = assert!(size_of::<Run>() == 64);

/// One piece of memory from the driver.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    /// First byte.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The driver's piece, to give back: its address and bytes (a region may be the aligned inside
    /// of it).
    pub(crate) span: (u64, u64),
    pub(crate) space: SpaceId,
    /// Its place in the record's table.
    pub(crate) slot: SegmentSlot,
    pub(super) first: RunId,
    pub(super) in_use: bool,
    pub(super) stitched: bool,
}

impl Region {
    pub(crate) fn contains(&self, address: u64) -> bool {
        (self.address..self.address + self.bytes).contains(&address)
    }
}
