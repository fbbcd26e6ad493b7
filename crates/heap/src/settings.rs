//! A heap's settings: plain data. Their source (`GRUYERE_CONF`, its keys and words) is unknown
//! here.

use gruyere_record::size::Size;
use gruyere_record::watch::Rule;
use std::path::PathBuf;

/// Where device memory comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// [`Backing::Stitch`] on devices with virtual memory management, else [`Backing::Pool`] on
    /// devices with stream-ordered pools, else [`Backing::Fixed`].
    #[default]
    Auto,
    /// Pages of physical memory, mapped wherever a run of them is needed.
    Stitch,
    /// Spans from the driver's stream-ordered pools.
    Pool,
    /// Spans from `cuMemAlloc`: slower to grow, but IPC handles work on them.
    Fixed,
    /// Every call goes straight to the driver.
    Passthrough,
}

/// When the allocator may make streams wait for each other without the program's request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waits {
    /// [`Waits::Budget`] if waits are known to close no cycle, else [`Waits::OutOfMemory`].
    #[default]
    Auto,
    /// Never.
    Off,
    /// To avoid out of memory.
    OutOfMemory,
    /// Also to hold less.
    Budget,
}

/// When a driver pool may hand memory that was freed on one stream to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolReuse {
    /// Whenever the driver can.
    #[default]
    On,
    /// If the program's own events order the streams: not because work happens to be finished, nor
    /// by waits that the driver inserts.
    Exact,
}

/// The switches that answer "is it you?".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Debug {
    /// Fill memory with a pattern when it is handed out and when it comes back.
    pub poison: bool,
    /// Synchronise the device before memory is handed out again.
    pub sync: bool,
    /// Keep old mappings of moved pages, until the alternative is out of memory.
    pub mapped: bool,
}

/// The user's choices for the heap. The default is in force where the user chooses nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Where device memory comes from.
    pub backing: Backing,
    /// Whether memory freed on one stream may serve another (once events prove it safe).
    pub share: bool,
    /// Debugging switches.
    pub debug: Debug,
    /// Ceiling on the physical memory held on each device; `None`: the device's memory.
    pub limit: Option<Size>,
    /// Memory left free on each device for users that cannot call the allocator back.
    pub headroom: Size,
    /// How far held memory may pass the peak of live bytes before idle memory moves, a share of
    /// that peak or bytes; `None`: 0.8%, and more in a small heap.
    pub slack: Option<Size>,
    /// Waits that the program did not ask for.
    pub waits: Waits,
    /// Whether idle memory goes back to the device in low-memory phases.
    pub auto_trim: bool,
    /// Memory mapped on each device at its start, by the number of the lifetime (auto, transient,
    /// step, persistent).
    pub reserve: [Size; 4],
    /// Whether the process writes a record in /dev/shm.
    pub record: bool,
    /// Room for live blocks in the record's block map.
    pub record_blocks: u32,
    /// Records of processes without a clean exit that a new process keeps.
    pub records_kept: u32,
    /// Events that the record's ring keeps.
    pub ring_events: u32,
    /// Bytes that a driver pool keeps at a synchronisation; `None`: all of them.
    pub release_threshold: Option<Size>,
    /// Driver pools: reuse across streams.
    pub pool_reuse: PoolReuse,
    /// File for a trace of all requests.
    pub trace: Option<PathBuf>,
    /// Thresholds, and the action when one is passed.
    pub alert: Vec<Rule>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            backing: Backing::Auto,
            share: true,
            debug: Debug::default(),
            limit: None,
            headroom: Size::Bytes(512 << 20),
            slack: None,
            waits: Waits::Auto,
            auto_trim: true,
            reserve: [Size::Bytes(0); 4],
            record: true,
            record_blocks: 1 << 22,
            records_kept: 8,
            ring_events: 1 << 16,
            release_threshold: None,
            pool_reuse: PoolReuse::On,
            trace: None,
            alert: Vec::new(),
        }
    }
}
