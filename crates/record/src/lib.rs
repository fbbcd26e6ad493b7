//! The record of a process's device memory: block map, gauges, event ring and histograms in one
//! shared mapping, and its readers.
//!
//! The heap writes ([`Record`], [`ShardWriter`], [`DeviceWriter`]). A [`Reader`], in this process
//! or another, takes no lock and never makes a writer wait. [`layout`] is the interface between the
//! two. Of the record, the heap needs only the totals of live bytes: without shared memory, the
//! record goes on in private memory.
//!
//! The vocabulary of both sides is here too: the rules of alerts and the forecast ([`watch`]), the
//! state of a process's memory in files ([`dump`]), writing files ([`file`]), sizes as users write
//! them ([`size`]) and the folder of records ([`record_dir`]).

pub mod held;
pub mod near;
mod plain;
pub mod record_dir;
pub mod signals;
pub mod size;
#[cfg(test)]
#[path = "../../../tests/common/skip.rs"]
mod skip;
pub mod stream;

mod read;
mod shared;
mod tell;
mod write;

pub use read::{claim, memfds, open, picture, reader, source, sweep};
pub(crate) use read::{guard, header};
pub use shared::{
    block_map, calls, clock, device_gauge, facts, gauges, histogram, layout, mapping, ring,
    segments, seqlock, shard_ring, sites, sync, timeline, totals,
};
pub use tell::{brief, conclusion, dump, file, page, run, text, trace, watch};
pub use write::peaks;
pub(crate) use write::{shard, slots, writer};

pub use device_gauge::{DEVICE_GAUGES, DeviceGauge};
pub use histogram::bucket_of;
pub use open::{Owners, ReadError};
pub use plain::{counted, cut, plain, quoted};
pub use reader::Reader;
pub use shard::{Block, ShardWriter};
pub use sites::SiteId;
pub use writer::{DeviceWriter, Record};

/// Shards per device. A shard is a set of gauges and a block allocator with one writer at a time
/// (the holder of a heap lock). 32 serve the slabs of streams (a mask finds a stream's), two the
/// central part: one for small blocks, the last for large ones.
pub const SHARDS: usize = 34;
/// Lifetime classes: auto, transient, step, persistent.
pub const LIFETIMES: usize = 4;
/// Names of the lifetime classes, by number.
pub const LIFETIME_NAMES: [&str; LIFETIMES] = ["auto", "transient", "step", "persistent"];

/// One live block of the block map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockEntry {
    /// Its first address on the device.
    pub address: u64,
    /// Bytes taken, rounded.
    pub size: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// The process-wide number of the stream (not the handle).
    pub stream: u32,
    /// The training step of its allocation (`gruyere_mark_step`).
    pub step: u32,
    /// The device's number.
    pub device: u8,
    /// Its lifetime class.
    pub lifetime: u8,
    /// 0 for ordinary blocks, else 1 + the index of the capture pool.
    pub capture: u8,
    /// Whether other processes could open it.
    pub is_sent: bool,
    /// The site in the program that allocated it.
    pub site: SiteId,
}

impl BlockEntry {
    /// The block's tag, for the block map.
    #[inline(always)]
    pub fn tag(&self) -> BlockTag {
        let tag = BlockTag::new(self.device, self.lifetime, self.capture, self.stream);
        if self.is_sent { tag.sent() } else { tag }
    }
}

/// One word about a block: bits 0 to 7 are an event's kind (in a block's tag: 0, or 1 if it was
/// sent), 8 to 15 the device, 16 to 23 the lifetime class, 24 to 31 the capture (numbered as in
/// [`BlockEntry`]), 32 to 63 the stream. Made once for all blocks of a slab.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockTag(pub u64);
impl BlockTag {
    /// Packs the four into a tag.
    #[inline(always)]
    pub const fn new(device: u8, lifetime: u8, capture: u8, stream: u32) -> Self {
        Self(
            (device as u64) << 8
                | (lifetime as u64) << 16
                | (capture as u64) << 24
                | (stream as u64) << 32,
        )
    }
    /// The tag, under another lifetime class.
    pub const fn retagged(self, lifetime: u8) -> Self {
        Self(self.0 & !(0xff << 16) | (lifetime as u64) << 16)
    }
    /// The tag of a block that was sent to other processes.
    pub const fn sent(self) -> Self {
        Self(self.0 | 1)
    }
    /// Whether it is such a tag.
    pub const fn is_sent(self) -> bool {
        self.0 & 1 != 0
    }
    /// The word of an event of this block.
    #[inline(always)]
    pub const fn event(self, kind: EventKind) -> u64 {
        self.0 | kind as u64
    }
    /// An event's kind, as a number.
    pub const fn kind(self) -> u8 {
        self.0 as u8
    }
    /// The device's number.
    pub const fn device(self) -> u8 {
        (self.0 >> 8) as u8
    }
    /// The lifetime class.
    #[inline(always)]
    pub const fn lifetime(self) -> u8 {
        (self.0 >> 16) as u8
    }
    /// The capture.
    pub const fn capture(self) -> u8 {
        (self.0 >> 24) as u8
    }
    /// The stream.
    pub const fn stream(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// State of a block in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockState {
    /// No block.
    Free = 0,
    /// Held by the program.
    Live = 1,
    /// Freed by the program, waiting for streams.
    Pending = 2,
}

/// Kind of a segment: memory or address space held from the driver, or a slab cut out of it.
///
/// With `backing:stitch`, chunks are the physical memory, and each may be mapped at several
/// addresses. A chunk's number and a page's number within it name a page of the device. A page
/// belongs to the arena in at most one view. During a move, a reader may find a page in two views
/// or in none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum SegmentKind {
    /// A span of a driver pool, or a fixed allocation.
    #[default]
    Span = 1,
    /// A slab inside a span or a view; `slot` is its slot size.
    Slab = 2,
    /// Physical memory mapped as a whole or not at all; it has no address. `chunk` is its number on
    /// the device, used again once the chunk is gone.
    Chunk = 3,
    /// A mapping of the whole of `chunk`; blocks may lie in its `pages`. A view without pages is
    /// retired: it serves no request, and is unmapped once the device has finished with its old
    /// blocks.
    View = 4,
    /// Address space in which views lie.
    Reservation = 5,
}

/// A segment of the segment table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentEntry {
    /// What it is.
    pub kind: SegmentKind,
    /// Its first address on the device.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Slot size of a slab, else 0.
    pub slot: u64,
    /// The process-wide number of the stream.
    pub stream: u32,
    /// The device's number.
    pub device: u8,
    /// Its lifetime class.
    pub lifetime: u8,
    /// 0 for ordinary segments, else 1 + the index of the capture pool.
    pub capture: u8,
    /// The chunk's number; set for a chunk and for its views.
    pub chunk: u32,
    /// For a view: bit `n` is set if page `n` of its chunk (2 MiB each) belongs to the arena here.
    pub pages: u128,
    /// For a slab: the site of the request that made it.
    pub site: SiteId,
}

impl SegmentEntry {
    /// Whether this is a view without pages.
    pub fn is_retired(&self) -> bool {
        self.kind == SegmentKind::View && self.pages == 0
    }
}

/// A block's place in the block map; `NONE` if the map is full or off. Every call accepts `NONE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSlot(pub u32);
impl BlockSlot {
    /// No place.
    pub const NONE: Self = Self(u32::MAX);
}
/// A segment's place in the segment table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSlot(pub u32);
impl SegmentSlot {
    /// No place.
    pub const NONE: Self = Self(u32::MAX);
}

/// Defines an enum with numbers and names, and the conversion from a number.
macro_rules! numbered {
    (
        $(#[$meta:meta])* $vis:vis enum $name:ident {
            $($(#[$doc:meta])* $variant:ident = $number:literal $text:literal,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        $vis enum $name { $($(#[$doc])* $variant = $number,)* }
        impl $name {
            /// All of them.
            pub const ALL: &[$name] = &[$($name::$variant,)*];
            /// The one with this number in the record.
            pub fn from_number(number: u8) -> Option<$name> {
                match number { $($number => Some($name::$variant),)* _ => None }
            }
            /// Its name in reports.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }
        }
    };
}

numbered! {
    /// Events of the ring.
    pub enum EventKind {
        /// A block was handed out.
        Malloc = 1 "malloc",
        /// The program freed a block.
        Free = 2 "free",
        /// The program said that a stream uses a block.
        RecordStream = 3 "record_stream",
        /// Memory taken from the driver.
        Grow = 4 "grow",
        /// Memory given back to the driver.
        Release = 5 "release",
        /// A driver pool trimmed.
        Trim = 6 "trim",
        /// A wait on the host; its size is nanoseconds.
        Wait = 7 "wait",
        /// A request that could not be met. In place of an address: where in the program it came
        /// from ([`SiteId`], 0 where that is not known).
        OutOfMemory = 8 "out_of_memory",
        /// A training step began.
        Step = 9 "step",
        /// A capture began.
        CaptureBegin = 10 "capture_begin",
        /// A capture ended.
        CaptureEnd = 11 "capture_end",
        /// A capture's pool was released.
        CaptureRelease = 12 "capture_release",
        /// A free of something that is not a live block.
        BadFree = 13 "bad_free",
        /// A driver call failed.
        DriverError = 14 "driver_error",
        /// Pages that lay idle elsewhere were mapped where a row of them was needed; its size is
        /// theirs.
        Move = 15 "move",
    }
}

/// 1 - `part` / `whole`, at least 0; 0 if `whole` is 0. Every kind of fragmentation is one of
/// these.
pub fn missing_share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 1.0 - part.min(whole) as f64 / whole as f64 }
}

/// Facts of a device, written once.
#[derive(Clone, Debug, Default)]
pub struct DeviceFacts {
    /// The driver's name for it.
    pub name: String,
    /// The driver's identity for it.
    pub uuid: [u8; 16],
    /// Physical bytes.
    pub total_memory: u64,
}

/// Options for a new record.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// Off: nothing is written (calls do nothing, except for the totals of live bytes and their
    /// peak, which the heap needs).
    pub enabled: bool,
    /// $GRUYERE_RECORD_DIR, else /dev/shm; another folder in tests.
    pub directory: std::path::PathBuf,
    /// Events in the shared ring, rounded up to a power of two; 32 bytes each, allocated at once.
    /// Each used shard gets an event ring of a quarter of it.
    pub ring_events: u32,
    /// Blocks in the block map at most (address space; 40 bytes per block are touched as needed).
    pub max_blocks: u32,
    /// Records kept in the folder of this user's processes that ended without a clean exit: the
    /// newest; older ones are removed.
    pub kept: usize,
}

impl Default for RecordOptions {
    fn default() -> Self {
        RecordOptions {
            enabled: true,
            directory: crate::record_dir::record_dir(),
            ring_events: 1 << 16,
            max_blocks: 1 << 24,
            kept: 8,
        }
    }
}
