//! The layout of a record: an interface between processes, versioned, all widths fixed,
//! little-endian.
//!
//! A header of one page, then sections, each page-aligned; the header has the place and the entry
//! size of each. Everything is atomics of fixed width, so a reader never needs a reference to
//! anything that a writer may change under it.

use crate::block_map::BlockCell;
use crate::calls::{CallTimes, RECORDED_CALLS};
use crate::clock::ClockFacts;
use crate::facts::ProcessFacts;
use crate::gauges::{DeviceArea, Shard, ShardSizes};
use crate::histogram::Buckets;
use crate::ring::{RingCell, RingHead};
use crate::segments::SegmentCell;
use crate::shard_ring::{self, ShardRingCell};
use crate::sites::{FrameCell, MAX_FRAMES, MAX_SITES, MAX_TEXT, SiteCell, SiteReach};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::timeline::Timeline;
use crate::{RecordOptions, SHARDS};

/// "GRUYERE" and a byte unlike text. Written last: a header without it is unfinished.
pub const MAGIC: u64 = u64::from_le_bytes(*b"GRUYERE\x93");
/// Version of the layout. A reader accepts only its own.
pub const VERSION: u32 = 7;
/// Sections begin at multiples of this; the header's size.
pub const PAGE: u64 = 4096;

/// Types that may lie in the mapping.
///
/// # Safety
/// `repr(C)` or `repr(transparent)`, atomics of fixed width throughout, any bit pattern a value.
pub unsafe trait Shared {}

/// The sections, by their number in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Section {
    /// One [`ProcessFacts`].
    Process,
    /// One [`DeviceArea`] per device.
    Devices,
    /// [`SHARDS`] [`Shard`]s per device.
    Shards,
    /// Two [`Buckets`]: latency of mallocs, latency of frees.
    Latency,
    /// One [`RingHead`].
    RingHead,
    /// The [`RingCell`]s, a power of two. The first [`Health::ring_reach`] of them are allocated.
    Ring,
    /// One [`Timeline`] per device; the device's area has the number of allocated cells.
    Timelines,
    /// [`ShardSizes`] per shard, allocated if the shard's flag is set.
    Sizes,
    /// One [`CallTimes`] per kind of timed driver call, allocated if its bit in the header is set.
    Calls,
    /// The [`ShardRingCell`]s: equally many per shard, a power of two.
    ShardRings,
    /// [`SegmentCell`]s.
    Segments,
    /// [`BlockCell`]s.
    Blocks,
    /// One word per slot of the block map, for the site of its block. [`SiteReach`] has the number
    /// of allocated entries, as for the tables that follow.
    BlockSites,
    /// [`SiteCell`]s.
    Sites,
    /// [`FrameCell`]s.
    Frames,
    /// Words of text: each text's bytes, then as many words as they take.
    Text,
}

/// Number of sections.
pub const SECTIONS: usize = Section::Text as usize + 1;
/// Sections before this one are allocated whole at the start; this one and the later ones as
/// needed.
const FIRST_GROWING: usize = Section::Ring as usize;
const NAMES: [&str; SECTIONS] = [
    "process facts",
    "devices",
    "lanes",
    "latency histograms",
    "ring head",
    "ring",
    "timelines",
    "size histograms",
    "driver call times",
    "trails",
    "segments",
    "blocks",
    "sites of blocks",
    "sites",
    "frames",
    "text",
];

impl Section {
    /// Name in messages.
    pub fn name(self) -> &'static str {
        NAMES[self as usize]
    }
}

/// Place of a section.
#[repr(C)]
#[derive(Debug, Default)]
pub struct SectionEntry {
    /// From the start of the file, in bytes.
    pub offset: AtomicU64,
    /// Bytes per entry.
    pub entry_bytes: AtomicU64,
    /// Number of entries.
    pub entries: AtomicU64,
    _room: AtomicU64,
}

/// Faults of the record itself, and the ends of its growing sections.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Health {
    /// Slots of the block map before this one are allocated and may hold blocks. Only grows, under
    /// the map's mutex.
    pub blocks_reach: AtomicU64,
    /// The same for the segment table.
    pub segments_reach: AtomicU64,
    /// Blocks not in the map: no slot, or no memory for one.
    pub blocks_unrecorded: AtomicU64,
    /// Segments not in the table.
    pub segments_unrecorded: AtomicU64,
    /// Times that the file system had no room for a growing section.
    pub no_room: AtomicU64,
    /// Bits of [`Degraded`].
    pub degraded: AtomicU64,
    /// 1: the process made a clean exit.
    pub closed: AtomicU64,
    /// Cells of the ring before this one are allocated. Only grows, under the writer's mutex.
    pub ring_reach: AtomicU64,
}

/// Bits of [`Health::degraded`]: the concessions when the record, or a copy of it, was made.
pub struct Degraded;
impl Degraded {
    /// The ring is smaller than asked for.
    pub const SMALL_RING: u64 = 1;
    /// The block map is smaller than asked for.
    pub const SMALL_MAP: u64 = 2;
    /// No file in /dev/shm: a memfd, reachable through /proc.
    pub const MEMFD: u64 = 4;
    /// Private memory: unreadable from outside.
    pub const PRIVATE: u64 = 8;
    /// The file system has no locks: liveness is unknown.
    pub const NO_LOCK: u64 = 16;
    /// In a copy that an out-of-memory left: later ones have none, since copies took too long.
    pub const LATER_REFUSED: u64 = 32;
}

/// The header: the first page.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Header {
    /// ```text
    /// 0       being made                 its process: MAGIC, when all else is written and the lock
    ///                                    is held
    /// MAGIC   ready                      never changes
    /// ```
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// Bytes of this header: [`PAGE`].
    pub header_bytes: AtomicU32,
    /// Bytes of the file.
    pub total_bytes: AtomicU64,
    /// Sign of liveness: 0 none, 1 an open-file-description lock, 2 flock.
    pub lock_kind: AtomicU32,
    /// [`SECTIONS`].
    pub section_count: AtomicU32,
    /// Bit `n`: the [`CallTimes`] of call number `n` are allocated. Any thread sets a bit after the
    /// allocation; none clears it.
    pub calls: AtomicU64,
    _room: [AtomicU64; 3],
    /// Room for more sections, so that their number may grow within a version.
    pub sections: [SectionEntry; 24],
    /// See [`Health`].
    pub health: Health,
    /// See [`ClockFacts`].
    pub clock: ClockFacts,
    /// See [`SiteReach`].
    pub sites: SiteReach,
}

// SAFETY: repr(C), atomics throughout.
unsafe impl Shared for Header {}
// SAFETY: an atomic of fixed width; every bit pattern is a value.
unsafe impl Shared for AtomicU64 {}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<SectionEntry>() == 32);
    assert!(size_of::<Health>() == 64);
    assert!(std::mem::offset_of!(Header, sections) == 64);
    assert!(std::mem::offset_of!(Header, health) == 832);
    assert!(std::mem::offset_of!(Header, clock) == 896);
    assert!(size_of::<Header>() as u64 <= PAGE);
};

/// Slots of a growing section allocated together: five pages of the block map.
pub const MAP_STEP: u64 = 512;
/// Cells of the ring allocated together: 32 KiB.
pub const RING_STEP: u64 = 1024;
/// Segments per record at most.
const MAX_SEGMENTS: u64 = 1 << 20;
/// The smallest ring.
pub const MIN_RING: u32 = 256;

/// The writer's choice of sizes and places of the sections.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Offset, entry bytes, entries, by section.
    pub sections: [(u64, u64, u64); SECTIONS],
    /// Bytes to allocate at the start.
    pub fixed_bytes: u64,
    /// Bytes of the file.
    pub total_bytes: u64,
}

impl Plan {
    /// The plan for `options` and `devices` devices.
    pub fn new(options: &RecordOptions, devices: usize) -> Plan {
        let devices = devices.min(256) as u64;
        let shards = devices * SHARDS as u64;
        let ring = u64::from(options.ring_events.clamp(2, 1 << 26)).next_power_of_two();
        let shard_ring = if options.max_blocks == 0 { 0 } else { shard_ring::cells(ring) };
        // Indices are u32, the last of them is NONE.
        let blocks = u64::from(options.max_blocks).min(1 << 31).next_multiple_of(MAP_STEP);
        let segments = blocks.min(MAX_SEGMENTS);
        let told = |most| if blocks == 0 { 0 } else { most };
        let entries: [(usize, u64); SECTIONS] = [
            (size_of::<ProcessFacts>(), 1),
            (size_of::<DeviceArea>(), devices),
            (size_of::<Shard>(), shards),
            (size_of::<Buckets>(), 2),
            (size_of::<RingHead>(), 1),
            (size_of::<RingCell>(), ring),
            (size_of::<Timeline>(), devices),
            (size_of::<ShardSizes>(), shards),
            (size_of::<CallTimes>(), RECORDED_CALLS as u64),
            (size_of::<ShardRingCell>(), shards * shard_ring),
            (size_of::<SegmentCell>(), segments),
            (size_of::<BlockCell>(), blocks),
            (size_of::<AtomicU64>(), blocks),
            (size_of::<SiteCell>(), told(MAX_SITES)),
            (size_of::<FrameCell>(), told(MAX_FRAMES)),
            (size_of::<AtomicU64>(), told(MAX_TEXT)),
        ];
        let mut offset = PAGE.max((size_of::<Header>() as u64).next_multiple_of(PAGE));
        let mut plan = Plan { sections: [(0, 0, 0); SECTIONS], fixed_bytes: 0, total_bytes: 0 };
        for (number, (bytes, count)) in entries.into_iter().enumerate() {
            if number == FIRST_GROWING {
                // The latest events are kept even without room for anything more.
                plan.fixed_bytes = offset + bytes as u64 * count.min(RING_STEP);
            }
            plan.sections[number] = (offset, bytes as u64, count);
            offset = (offset + bytes as u64 * count).next_multiple_of(PAGE);
        }
        plan.total_bytes = offset;
        plan
    }

    /// The start of `section`.
    pub fn offset(&self, section: Section) -> u64 {
        self.sections[section as usize].0
    }

    /// Number of entries of `section`.
    pub fn entries(&self, section: Section) -> u64 {
        self.sections[section as usize].2
    }

    /// Writes the header, except the magic.
    pub fn write(&self, header: &Header) {
        header.version.store(VERSION, Ordering::Relaxed);
        header.header_bytes.store(PAGE as u32, Ordering::Relaxed);
        header.total_bytes.store(self.total_bytes, Ordering::Relaxed);
        header.section_count.store(SECTIONS as u32, Ordering::Relaxed);
        for (entry, &(offset, bytes, count)) in header.sections.iter().zip(&self.sections) {
            entry.offset.store(offset, Ordering::Relaxed);
            entry.entry_bytes.store(bytes, Ordering::Relaxed);
            entry.entries.store(count, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_follow_each_other_on_page_boundaries_without_overlap() {
        let options =
            RecordOptions { ring_events: 1000, max_blocks: 1_000_000, ..RecordOptions::default() };
        let plan = Plan::new(&options, 3);
        let mut end = PAGE;
        for (offset, bytes, count) in plan.sections {
            assert_eq!(offset % PAGE, 0);
            assert_eq!(offset, end);
            end = (offset + bytes * count).next_multiple_of(PAGE);
        }
        assert_eq!(plan.total_bytes, end);
        assert_eq!(plan.fixed_bytes, plan.offset(Section::Ring) + 1024 * 32);
        assert_eq!(plan.entries(Section::Ring), 1024);
        assert!(plan.entries(Section::Blocks) >= 1_000_000);
    }
}
