//! What is known: block map, gauges, event ring and histograms in one shared mapping.
//!
//! This is the contract between the heap (the only writer) and the record. STUB: replaced by the record's author.

#![allow(unused_variables, missing_docs)]

/// Lanes a device: each is a set of gauges and a block allocator with one writer at a time (the holder of a heap lock).
pub const LANES: usize = 32;
/// Lifetime classes: auto, transient, step, persistent.
pub const LIFETIMES: usize = 4;

/// One live block, as the block map tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockEntry {
    pub address: u64,
    /// Bytes taken, rounded.
    pub size: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// The process-wide number of the stream (not the handle).
    pub stream: u32,
    /// The training step of its allocation (`gruyere_mark_step`).
    pub step: u32,
    pub device: u8,
    pub lifetime: u8,
    /// 0 for ordinary blocks, else 1 + the index of the capture pool.
    pub capture: u8,
}

/// State of a block in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockState {
    Free = 0,
    Live = 1,
    /// Freed by the program, waiting for streams.
    Pending = 2,
}

/// What a segment (memory held from the driver, or a slab cut out of it) is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SegmentKind {
    /// A span of a driver pool, a fixed allocation, or a mapped range of an arena.
    Span = 1,
    /// A slab inside a span; `slot` is its slot size.
    Slab = 2,
}

/// A segment, as the segment table tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentEntry {
    pub kind: SegmentKind,
    pub address: u64,
    pub bytes: u64,
    /// Slot size of a slab, else 0.
    pub slot: u64,
    pub stream: u32,
    pub device: u8,
    pub lifetime: u8,
    pub capture: u8,
}

/// A block's place in the block map. `NONE` where the map is full or off: every call accepts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSlot(pub u32);
impl BlockSlot {
    pub const NONE: Self = Self(u32::MAX);
}
/// A segment's place in the segment table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSlot(pub u32);
impl SegmentSlot {
    pub const NONE: Self = Self(u32::MAX);
}

/// Events of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    Malloc = 1,
    Free = 2,
    RecordStream = 3,
    /// Memory taken from the driver.
    Grow = 4,
    /// Memory given back to the driver.
    Release = 5,
    Trim = 6,
    /// A wait on the host.
    Wait = 7,
    OutOfMemory = 8,
    Step = 9,
    CaptureBegin = 10,
    CaptureEnd = 11,
    CaptureRelease = 12,
    BadFree = 13,
    DriverError = 14,
}

/// Device-wide counters, written under the device's lock (one writer), published under a seqlock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum DeviceGauge {
    /// Physical bytes held from the driver.
    Reserved,
    ReservedPeak,
    /// Free bytes of arenas (whole spans included) and the largest satisfiable request in them.
    ArenaFree,
    LargestFree,
    /// Bytes pinned by captures, and bytes waiting for streams.
    CapturePinned,
    Pending,
    /// Bytes of slabs, and of their free slots.
    SlabBytes,
    Limit,
    TotalMemory,
    DriverCalls,
    DriverErrors,
    Grows,
    Releases,
    Trims,
    EventRecords,
    EventQueries,
    HostWaits,
    HostWaitNanoseconds,
    Retries,
    OutOfMemories,
    BadFrees,
    CapturesBegun,
    Step,
    /// Rungs of the reclaim ladder: calls and bytes, six rungs.
    Rung0Calls,
    Rung0Bytes,
    Rung1Calls,
    Rung1Bytes,
    Rung2Calls,
    Rung2Bytes,
    Rung3Calls,
    Rung3Bytes,
    Rung4Calls,
    Rung4Bytes,
    Rung5Calls,
    Rung5Bytes,
}
/// Number of [`DeviceGauge`]s.
pub const DEVICE_GAUGES: usize = DeviceGauge::Rung5Bytes as usize + 1;

/// Facts of this process and its devices, written once.
#[derive(Clone, Debug, Default)]
pub struct DeviceFacts {
    pub name: String,
    pub uuid: [u8; 16],
    pub total_memory: u64,
}

/// How to make the record.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// Off: nothing is written anywhere (all calls are no-ops but `lane_totals` and the live peak, which the heap needs).
    pub enabled: bool,
    /// /dev/shm, or another folder in tests.
    pub directory: std::path::PathBuf,
    /// Events the ring holds, rounded up to a power of two.
    pub ring_events: u32,
    /// Blocks the block map can hold (address space; touched pages only).
    pub max_blocks: u32,
}

/// The writer's side of a process's record.
pub struct Record {}

impl Record {
    /// Makes the record; never fails: on any trouble it falls back to a memfd, then to private memory, and logs once.
    pub fn create(options: &RecordOptions, devices: &[DeviceFacts]) -> Record {
        Record {}
    }
    /// The writer of lane `lane` of `device`. The caller holds one lock around all uses of it.
    pub fn lane(&'static self, device: u32, lane: u32) -> LaneWriter {
        LaneWriter {}
    }
    /// The device-wide gauges' writer (under the device's lock).
    pub fn device(&'static self, device: u32) -> DeviceWriter {
        DeviceWriter {}
    }
    /// Adds a segment (rare; takes an inner lock).
    pub fn segment_insert(&self, entry: &SegmentEntry) -> SegmentSlot {
        SegmentSlot::NONE
    }
    pub fn segment_remove(&self, slot: SegmentSlot) {}
    /// One ring event. `time` is [`clock::now`]'s.
    #[inline]
    pub fn event(
        &self,
        kind: EventKind,
        device: u8,
        lifetime: u8,
        stream: u32,
        address: u64,
        size: u64,
        time: u64,
    ) {
    }
    /// Live bytes and their peak on `device`, over all lanes (exact).
    pub fn live(&self, device: u32) -> (u64, u64) {
        (0, 0)
    }
    pub fn reset_peaks(&self, device: u32) {}
    /// Latency of one call in clock ticks (sampled by the caller).
    #[inline]
    pub fn latency(&self, malloc: bool, ticks: u64) {}
    /// The path of the file in /dev/shm, where there is one.
    pub fn path(&self) -> Option<&std::path::Path> {
        None
    }
    /// A clean exit: unlinks the file. Called at most once, never in a forked child.
    pub fn close(&self) {}
}

/// One lane: block map entries, gauges. Not Sync: its user holds the lane's heap lock.
pub struct LaneWriter {}
impl LaneWriter {
    /// A block became live: map entry, lane gauges (live, requested and counts by lifetime; small/large), device live and
    /// peak, size histogram.
    #[inline]
    pub fn block_insert(&mut self, entry: &BlockEntry) -> BlockSlot {
        BlockSlot::NONE
    }
    /// The program freed it and it waits for streams: not live any more, but not reusable.
    #[inline]
    pub fn block_pending(&mut self, slot: BlockSlot, size: u64, requested: u64, lifetime: u8) {}
    /// The program freed it (`was_pending` false), or its wait is over (true): the entry is free.
    #[inline]
    pub fn block_remove(
        &mut self,
        slot: BlockSlot,
        size: u64,
        requested: u64,
        lifetime: u8,
        was_pending: bool,
    ) {
    }
}

/// Writer of the device-wide gauges.
pub struct DeviceWriter {}
impl DeviceWriter {
    /// Publishes a set of gauges under one turn of the seqlock.
    pub fn set(&mut self, values: &[(DeviceGauge, u64)]) {}
    /// Adds to a counter.
    pub fn add(&mut self, gauge: DeviceGauge, n: u64) {}
}

/// Time for the ring: the cheapest monotonic counter of the machine.
pub mod clock {
    #[inline]
    pub fn now() -> u64 {
        0
    }
}
