//! The reader's side: opens a record, checks every offset and length, and never blocks a writer.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::block_map::{BlockCell, SlotRead};
use super::clock::{COUNTER, Scale};
use super::facts::{Process, ProcessFacts, boot_id};
use super::gauges::{BlockCounts, DeviceArea, DeviceFactsRead, Lane};
use super::histogram::{Buckets, Counts};
use super::layout::{Header, MAGIC, PAGE, SECTIONS, Section, Shared, VERSION};
use super::mapping::{Mapping, is_locked};
use super::ring::{Event, Ring, RingCell, RingHead};
use super::segments::SegmentCell;
use super::source::Source;
use super::sync::Ordering;
use super::timeline::{Sample, Timeline, TimelineEntry};
use super::totals;
use super::trail::TrailCell;
use super::{
    BlockEntry, BlockState, DEVICE_GAUGES, DeviceGauge, EventKind, LANES, LIFETIMES, Record, SegmentEntry,
    missing_share,
};

/// Looks at a seqlock before it is called torn: about 30 ms, most of them asleep.
const ATTEMPTS: u32 = 450;

/// Why a record can't be read. The text names the file, the reason, and what to do.
#[derive(Debug)]
pub enum ReadError {
    /// The file can't be opened or read.
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
    /// Not a regular file.
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Its header is not complete.
    NotReady {
        /// The file.
        path: PathBuf,
        /// Whether somebody is making it.
        locked: Option<bool>,
    },
    /// Some other file.
    NotARecord {
        /// The file.
        path: PathBuf,
    },
    /// Another version's layout.
    Version {
        /// The file.
        path: PathBuf,
        /// The version it says.
        version: u32,
        /// Whether somebody holds its lock.
        locked: Option<bool>,
    },
    /// Something in it can't be.
    Damaged {
        /// The file.
        path: PathBuf,
        /// What, and where.
        what: String,
        /// Whether somebody holds its lock.
        locked: Option<bool>,
    },
}

impl ReadError {
    /// The file is not there (any more).
    pub fn is_missing(&self) -> bool {
        matches!(self, ReadError::Open { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        match self {
            ReadError::Open { path, .. }
            | ReadError::NotAFile { path }
            | ReadError::NotReady { path, .. }
            | ReadError::NotARecord { path }
            | ReadError::Version { path, .. }
            | ReadError::Damaged { path, .. } => path,
        }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path().display();
        match self {
            ReadError::Open { error, .. } => {
                write!(f, "{path}: {error}")?;
                match error.raw_os_error() {
                    Some(libc::ENOENT) => write!(f, "; `gruyere ps` lists the records there are"),
                    Some(libc::EACCES | libc::EPERM) => {
                        write!(
                            f,
                            "; records are readable by their owner only: run as the user of that process"
                        )
                    }
                    Some(libc::ELOOP) => write!(f, "; links are refused: name the file itself"),
                    _ => Ok(()),
                }
            }
            ReadError::NotAFile { .. } => {
                write!(f, "{path}: not a regular file; name a record (`gruyere ps` lists them)")
            }
            ReadError::NotReady { locked: Some(true), .. } => {
                write!(f, "{path}: its process is still writing the header; try again in a moment")
            }
            ReadError::NotReady { .. } => {
                write!(
                    f,
                    "{path}: empty or unfinished, and nobody writes it; `gruyere ps --sweep` removes it"
                )
            }
            ReadError::NotARecord { .. } => {
                write!(f, "{path}: not a record of gruyere (no magic); name another file")
            }
            ReadError::Version { version, .. } => write!(
                f,
                "{path}: a record of layout version {version}, this command reads version {VERSION}; use the `gruyere` \
                 command of the version that the process runs"
            ),
            ReadError::Damaged { what, .. } => {
                write!(
                    f,
                    "{path}: damaged: {what}; the file was cut or overwritten: delete it, or read another"
                )
            }
        }
    }
}

impl std::error::Error for ReadError {}

/// What went wrong with the record itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthRead {
    /// Blocks not in the map.
    pub blocks_unrecorded: u64,
    /// Segments not in the table.
    pub segments_unrecorded: u64,
    /// Times that the file system had no room.
    pub no_room: u64,
    /// Bits of [`super::layout::Degraded`].
    pub degraded: u64,
    /// The process made a clean exit.
    pub closed: bool,
}

/// A device at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// Its number in the process.
    pub device: u32,
    /// Name, uuid, memory.
    pub facts: DeviceFactsRead,
    /// Live bytes.
    pub live: u64,
    /// Their peak.
    pub live_peak: u64,
    /// By pool (small, large), then lifetime; sums over lanes.
    pub blocks: [[BlockCounts; LIFETIMES]; 2],
    /// Lanes whose counters are not of one moment: their writer was killed half-way, or never paused.
    pub torn_lanes: u32,
    /// Sizes of all requests so far, rounded as the blocks were.
    pub malloc_sizes: Counts,
    /// The device's gauges, by [`DeviceGauge`].
    pub gauges: Vec<u64>,
    /// The gauges are not of one moment: their writer was killed half-way, or never stopped writing.
    pub torn_gauges: bool,
}

impl DeviceSnapshot {
    /// One gauge.
    pub fn gauge(&self, gauge: DeviceGauge) -> u64 {
        self.gauges.get(gauge as usize).copied().unwrap_or(0)
    }

    /// Sums over pools and lifetimes.
    pub fn total(&self) -> BlockCounts {
        self.sum(|_, _| true)
    }

    /// Sums over those pools and lifetimes that `chosen` says.
    pub fn sum(&self, chosen: impl Fn(usize, usize) -> bool) -> BlockCounts {
        let mut sum = BlockCounts::default();
        for (pool, lifetimes) in self.blocks.iter().enumerate() {
            for (lifetime, counts) in lifetimes.iter().enumerate() {
                if chosen(pool, lifetime) {
                    sum.add(*counts);
                }
            }
        }
        sum
    }

    /// 1 - live / reserved: what dashboards call fragmentation. 0 where nothing is reserved.
    pub fn fragmentation(&self) -> f64 {
        missing_share(self.live, self.gauge(DeviceGauge::Reserved))
    }

    /// Bytes held that are neither live nor waiting for streams.
    pub fn free_held(&self) -> u64 {
        let taken = self.live.saturating_add(self.total().pending_bytes());
        self.gauge(DeviceGauge::Reserved).saturating_sub(taken)
    }

    /// 1 - largest satisfiable request / free bytes held. The first was true when the gauges were written last.
    pub fn external_fragmentation(&self) -> f64 {
        missing_share(self.gauge(DeviceGauge::LargestRequest), self.free_held())
    }

    /// 1 - requested / live.
    pub fn internal_fragmentation(&self) -> f64 {
        let total = self.total();
        missing_share(total.live_requested(), total.live_bytes())
    }

    /// The size that 99 of 100 requests so far do not exceed, within 7%. 0 before the first.
    pub fn request_p99(&self) -> u64 {
        if self.malloc_sizes.total() == 0 {
            return 0;
        }
        self.malloc_sizes.to_hdr(1.0).value_at_quantile(0.99)
    }

    /// How many times the 99th-percentile request the largest satisfiable one is, the ceiling reached for it; `None` before the first.
    pub fn p99_fits(&self) -> Option<f64> {
        let request = self.request_p99();
        let largest = self.gauge(DeviceGauge::LargestGrowing);
        (request > 0).then(|| largest as f64 / request as f64)
    }
}

/// Things read from a table, and how many could not be read whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table<T> {
    /// Those read whole.
    pub entries: Vec<T>,
    /// Entries that changed each time we looked, or that no writer of ours makes.
    pub torn: u64,
}

/// Histograms of a process.
#[derive(Clone, Debug, Default)]
pub struct Histograms {
    /// Sizes of mallocs, in bytes.
    pub malloc_sizes: Counts,
    /// Sizes of frees, in bytes.
    pub free_sizes: Counts,
    /// Latency of mallocs, in ticks.
    pub malloc_latency: Counts,
    /// Latency of frees, in ticks.
    pub free_latency: Counts,
}

/// Where a follower of the events has come to; the default is the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    ring: u64,
    trails: Vec<u64>,
}

/// Events, and how many of the same time are lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// In the order of time.
    pub entries: Vec<Event>,
    /// Overwritten before they were read, dropped, or half-written.
    pub lost: u64,
}

/// Counts of a process's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventFacts {
    /// Ever written.
    pub written: u64,
    /// Dropped, because two writers met on a slot of the shared ring a lap apart.
    pub dropped: u64,
    /// The latest that the rings can hold.
    pub capacity: u64,
}

/// An open record.
#[derive(Debug)]
pub struct Reader<'a> {
    source: Source<'a>,
    path: PathBuf,
    file: Option<File>,
    /// Offset and entries, by section, checked.
    sections: [(u64, u64); SECTIONS],
    devices: u32,
}

/// Entry sizes that this version knows, by section.
const ENTRY_BYTES: [usize; SECTIONS] = [
    size_of::<ProcessFacts>(),
    size_of::<DeviceArea>(),
    size_of::<Lane>(),
    size_of::<Buckets>(),
    size_of::<RingHead>(),
    size_of::<RingCell>(),
    size_of::<Timeline>(),
    size_of::<TrailCell>(),
    size_of::<SegmentCell>(),
    size_of::<BlockCell>(),
];
const ALL_SECTIONS: [Section; SECTIONS] = [
    Section::Process,
    Section::Devices,
    Section::Lanes,
    Section::Latency,
    Section::RingHead,
    Section::Ring,
    Section::Timelines,
    Section::Trails,
    Section::Segments,
    Section::Blocks,
];

impl Reader<'static> {
    /// Opens the record at `path`, read-only. Links, pipes and devices are refused.
    pub fn open(path: &Path) -> Result<Reader<'static>, ReadError> {
        // O_NONBLOCK: opening a pipe must not wait for its writer.
        let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
        Reader::open_with(path, flags)
    }

    /// Opens the record of a process that has no file in /dev/shm, through one of its descriptors in /proc.
    pub fn open_descriptor(path: &Path) -> Result<Reader<'static>, ReadError> {
        Reader::open_with(path, libc::O_CLOEXEC | libc::O_NONBLOCK)
    }

    fn open_with(path: &Path, flags: libc::c_int) -> Result<Reader<'static>, ReadError> {
        let open_error = |error| ReadError::Open { path: path.to_owned(), error };
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(open_error)?;
        let metadata = file.metadata().map_err(open_error)?;
        if !metadata.is_file() {
            return Err(ReadError::NotAFile { path: path.to_owned() });
        }
        // The header first, by `pread`: what it says decides how the rest is read.
        let mut head = [0u8; size_of::<Header>()];
        let got = std::os::unix::fs::FileExt::read_at(&file, &mut head, 0).map_err(open_error)?;
        let head = Source::bytes(&head[..got]).map_err(open_error)?;
        let header = head.one::<Header>(0);
        let lock_kind = header.map_or(0, |header| header.lock_kind.load(Ordering::Relaxed));
        let any_lock = |kind: u32| match kind {
            // Not ready: its kind of lock is not written yet either.
            0 => is_locked(file.as_raw_fd(), 1),
            kind => is_locked(file.as_raw_fd(), kind),
        };
        match header.map(|header| header.magic.load(Ordering::Acquire)) {
            Some(MAGIC) => {}
            Some(0) | None if metadata.len() == 0 || header.is_some() => {
                return Err(ReadError::NotReady { path: path.to_owned(), locked: any_lock(lock_kind) });
            }
            _ => return Err(ReadError::NotARecord { path: path.to_owned() }),
        }
        let held = is_locked(file.as_raw_fd(), lock_kind);
        let source = match held {
            Some(false) => Source::copy(&file, metadata.len()),
            _ => Source::shared(&file, metadata.len()),
        };
        Reader::over(source.map_err(open_error)?, path.to_owned(), Some(file)).map_err(|mut error| {
            if let ReadError::Version { locked, .. } | ReadError::Damaged { locked, .. } = &mut error {
                *locked = held;
            }
            error
        })
    }

    /// Whether the file at `path` is a record whose process is gone: its header and its lock are asked, and nothing else of it is read. False
    /// also where that can't be told.
    pub fn is_abandoned(path: &Path) -> bool {
        let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
        let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(path) else { return false };
        let mut head = [0u8; size_of::<Header>()];
        if !file.metadata().is_ok_and(|metadata| metadata.is_file())
            || std::os::unix::fs::FileExt::read_exact_at(&file, &mut head, 0).is_err()
        {
            return false;
        }
        let Ok(head) = Source::bytes(&head) else { return false };
        head.one::<Header>(0).is_some_and(|header| {
            let kind = header.lock_kind.load(Ordering::Relaxed);
            header.magic.load(Ordering::Acquire) == MAGIC && is_locked(file.as_raw_fd(), kind) == Some(false)
        })
    }

    /// A record's bytes, for instance sent from another machine.
    pub fn from_bytes(bytes: &[u8]) -> Result<Reader<'static>, ReadError> {
        let path = PathBuf::from("(bytes)");
        let source = Source::bytes(bytes).map_err(|error| ReadError::Open { path: path.clone(), error })?;
        Reader::over(source, path, None)
    }
}

impl<'a> Reader<'a> {
    /// A record of this process; `None` while it is off.
    pub fn own(record: &'a Record) -> Option<Reader<'a>> {
        let mapping: &'a Mapping = record.mapping();
        Reader::over(
            Source::Own(mapping),
            record.path().unwrap_or(Path::new("(this process)")).to_owned(),
            None,
        )
        .ok()
    }

    fn over(source: Source<'a>, path: PathBuf, file: Option<File>) -> Result<Reader<'a>, ReadError> {
        let damaged = |what: String| ReadError::Damaged { path: path.clone(), what, locked: None };
        let Some(header) = source.one::<Header>(0) else {
            return Err(damaged(format!("{} bytes are less than a header", source.length())));
        };
        match header.magic.load(Ordering::Acquire) {
            MAGIC => {}
            0 => return Err(ReadError::NotReady { path, locked: None }),
            _ => return Err(ReadError::NotARecord { path }),
        }
        let version = header.version.load(Ordering::Relaxed);
        if version != VERSION {
            return Err(ReadError::Version { path, version, locked: None });
        }
        let total = header.total_bytes.load(Ordering::Relaxed);
        if total > source.length() {
            return Err(damaged(format!("it says {total} bytes and has {}", source.length())));
        }
        let count = header.section_count.load(Ordering::Relaxed);
        if u64::from(header.header_bytes.load(Ordering::Relaxed)) < PAGE || (count as usize) < SECTIONS {
            return Err(damaged(format!("a header of {count} sections")));
        }
        let mut sections = [(0, 0); SECTIONS];
        for section in ALL_SECTIONS {
            let entry = &header.sections[section as usize];
            let [offset, bytes, entries] =
                [&entry.offset, &entry.entry_bytes, &entry.entries].map(|word| word.load(Ordering::Relaxed));
            let name = section.name();
            if bytes != ENTRY_BYTES[section as usize] as u64 {
                return Err(damaged(format!("entries of {bytes} bytes in {name}")));
            }
            let end = entries.checked_mul(bytes).and_then(|length| length.checked_add(offset));
            if offset < PAGE || offset % PAGE != 0 || end.is_none_or(|end| end > total) {
                return Err(damaged(format!("{entries} entries of {name} at {offset} in {total} bytes")));
            }
            sections[section as usize] = (offset, entries);
        }
        let entries = |section: Section| sections[section as usize].1;
        let devices = entries(Section::Devices);
        let lanes = devices.checked_mul(LANES as u64);
        let sound = devices <= 256
            && Some(entries(Section::Lanes)) == lanes
            && entries(Section::Latency) == 2
            && entries(Section::Process) == 1
            && entries(Section::Timelines) == devices
            && entries(Section::RingHead) == 1
            && entries(Section::Ring).is_power_of_two()
            && entries(Section::Ring) >= 2
            && lanes.is_none_or(|lanes| match lanes {
                0 => entries(Section::Trails) == 0,
                lanes => entries(Section::Trails) % lanes == 0,
            });
        if !sound {
            return Err(damaged("sections that don't fit each other".to_owned()));
        }
        Ok(Reader { source, path, file, sections, devices: devices as u32 })
    }

    fn many<T: Shared>(&self, section: Section) -> &[T] {
        let (offset, entries) = self.sections[section as usize];
        // Checked when it was opened; an empty table rather than a panic all the same.
        self.source.many(offset, entries).unwrap_or(&[])
    }

    /// Looks at a seqlock; nothing changes in a copy.
    fn attempts(&self) -> u32 {
        if matches!(self.source, Source::Copy(_)) { 1 } else { ATTEMPTS }
    }

    fn header(&self) -> Option<&Header> {
        self.source.one(0)
    }

    /// Whether its process lives (holds the lock); `None` where that can't be told.
    pub fn is_live(&self) -> Option<bool> {
        let kind = self.header()?.lock_kind.load(Ordering::Relaxed);
        match (&self.file, &self.source) {
            (Some(file), _) => is_locked(file.as_raw_fd(), kind),
            (None, Source::Own(_)) => Some(true),
            (None, _) => None,
        }
    }

    /// Device and inode of the file.
    pub fn identity(&self) -> Option<(u64, u64)> {
        let metadata = self.file.as_ref()?.metadata().ok()?;
        Some((metadata.dev(), metadata.ino()))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that the file system holds for it, where there is a file.
    pub fn bytes_held(&self) -> Option<u64> {
        Some(self.file.as_ref()?.metadata().ok()?.blocks() * 512)
    }

    /// Who writes it.
    pub fn process(&self) -> Process {
        self.many::<ProcessFacts>(Section::Process).first().map(ProcessFacts::read).unwrap_or_default()
    }

    /// What went wrong with the record itself.
    pub fn health(&self) -> HealthRead {
        let Some(header) = self.header() else { return HealthRead::default() };
        let health = &header.health;
        HealthRead {
            blocks_unrecorded: health.blocks_unrecorded.load(Ordering::Relaxed),
            segments_unrecorded: health.segments_unrecorded.load(Ordering::Relaxed),
            no_room: health.no_room.load(Ordering::Relaxed),
            degraded: health.degraded.load(Ordering::Relaxed),
            closed: health.closed.load(Ordering::Relaxed) == 1,
        }
    }

    /// Devices of the process.
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// A device at this moment. Counters of different lanes are of moments some microseconds apart.
    pub fn device(&self, device: u32) -> Option<DeviceSnapshot> {
        let area = self.many::<DeviceArea>(Section::Devices).get(device as usize)?;
        let lanes = self.many::<Lane>(Section::Lanes).chunks(LANES).nth(device as usize)?;
        let mut snapshot = DeviceSnapshot { device, facts: area.read_facts(), ..DeviceSnapshot::default() };
        for lane in lanes {
            let mut torn = false;
            for (pool, lifetimes) in snapshot.blocks.iter_mut().enumerate() {
                for (lifetime, sum) in lifetimes.iter_mut().enumerate() {
                    let (counts, whole) = lane.read(pool, lifetime, self.attempts());
                    sum.add(counts);
                    torn |= !whole;
                }
            }
            snapshot.torn_lanes += u32::from(torn);
            lane.sizes[0].add_to(&mut snapshot.malloc_sizes.0);
        }
        snapshot.live = totals::live(totals::BYTES, lanes.iter().map(|lane| &lane.totals));
        snapshot.live_peak = area.live_peak.load(Ordering::Relaxed).max(snapshot.live);
        let gauges: Option<[u64; DEVICE_GAUGES]> = area.read(self.attempts());
        snapshot.torn_gauges = gauges.is_none();
        snapshot.gauges = gauges.unwrap_or_else(|| area.read_torn()).to_vec();
        Some(snapshot)
    }

    /// All devices.
    pub fn device_snapshots(&self) -> Vec<DeviceSnapshot> {
        (0..self.devices).filter_map(|device| self.device(device)).collect()
    }

    /// All blocks, live and pending. Each is whole; they are of different moments.
    pub fn blocks(&self) -> Table<(BlockEntry, BlockState)> {
        let reach = self.header().map_or(0, |header| header.health.blocks_reach.load(Ordering::Acquire));
        table(self.many::<BlockCell>(Section::Blocks), reach, |cell| match cell.read(self.attempts()) {
            SlotRead::Taken(entry, state) => SlotRead::Taken((entry, state), state),
            SlotRead::Free => SlotRead::Free,
            SlotRead::Torn => SlotRead::Torn,
        })
    }

    /// All segments.
    pub fn segments(&self) -> Table<SegmentEntry> {
        let reach = self.header().map_or(0, |header| header.health.segments_reach.load(Ordering::Acquire));
        table(self.many::<SegmentCell>(Section::Segments), reach, |cell| cell.read(self.attempts()))
    }

    fn ring(&self) -> Option<Ring> {
        let head = self.many::<RingHead>(Section::RingHead).first()?;
        let cells = self.many::<RingCell>(Section::Ring);
        // SAFETY: a power of two of cells, at least two, checked when it was opened; they live as long as `self`, and so do
        // the callers' uses of the ring.
        Some(unsafe { Ring::new(cells.as_ptr(), cells.len() as u64, head) })
    }

    /// The events after those that `cursor` has seen, in the order of time, and moves the cursor behind them. What was
    /// overwritten or dropped meanwhile is counted in [`Events::lost`].
    pub fn events(&self, cursor: &mut Cursor) -> Events {
        let mut events = Events::default();
        if let Some(ring) = self.ring() {
            let (read, lost, end) = ring.read_since(cursor.ring);
            events.entries.extend(read);
            events.lost = events.lost.saturating_add(lost);
            cursor.ring = end;
        }
        let lanes = self.many::<Lane>(Section::Lanes);
        cursor.trails.resize(lanes.len(), 0);
        let cells = self.many::<TrailCell>(Section::Trails);
        let each = cells.len().checked_div(lanes.len()).unwrap_or(0);
        for (number, (lane, since)) in lanes.iter().zip(&mut cursor.trails).enumerate() {
            if lane.trail.is_open() {
                let cells = cells.get(number * each..(number + 1) * each).unwrap_or(&[]);
                let (read, lost, end) = lane.trail.read_since(cells, *since);
                events.entries.extend(read);
                events.lost = events.lost.saturating_add(lost);
                *since = end;
            }
        }
        events.entries.sort_by_key(|event| event.time);
        events
    }

    /// The events after the position `since` that are neither mallocs nor frees nor uses of a block by a stream, and moves `since` behind them: what a
    /// reader can follow at any pace, since the events of blocks are not even read. Without a trail of its own, a lane writes into the same ring;
    /// [`Events::lost`] counts those too.
    pub fn rare_events(&self, since: &mut u64) -> Events {
        let Some(ring) = self.ring() else { return Events::default() };
        let (read, lost, end) = ring.read_since(*since);
        *since = end;
        let is_rare = |event: &Event| event.kind as u8 > EventKind::RecordStream as u8;
        Events { entries: read.into_iter().filter(is_rare).collect(), lost }
    }

    /// Events ever written, those dropped by writers that met on a slot, and those that the rings can hold.
    pub fn event_facts(&self) -> EventFacts {
        let (position, capacity, dropped) =
            self.ring().map_or((0, 0, 0), |ring| (ring.position(), ring.capacity(), ring.conflicts()));
        let mut facts = EventFacts { written: position, dropped, capacity };
        let lanes = self.many::<Lane>(Section::Lanes);
        let each = self.sections[Section::Trails as usize].1.checked_div(lanes.len() as u64).unwrap_or(0);
        for lane in lanes.iter().filter(|lane| lane.trail.is_open()) {
            facts.written = facts.written.wrapping_add(lane.trail.position());
            facts.capacity += each.saturating_sub(1);
        }
        facts
    }

    /// The histograms, summed over lanes and devices.
    pub fn histograms(&self) -> Histograms {
        let mut histograms = Histograms::default();
        for lane in self.many::<Lane>(Section::Lanes) {
            lane.sizes[0].add_to(&mut histograms.malloc_sizes.0);
            lane.sizes[1].add_to(&mut histograms.free_sizes.0);
        }
        if let [malloc, free] = self.many::<Buckets>(Section::Latency) {
            malloc.add_to(&mut histograms.malloc_latency.0);
            free.add_to(&mut histograms.free_latency.0);
        }
        histograms
    }

    /// What a device held over the whole run, the oldest first; at most [`super::timeline::CELLS`] entries. [`Table::torn`] is 1 where they
    /// are not of one moment: the writer was killed half-way.
    pub fn timeline(&self, device: u32) -> Table<TimelineEntry> {
        let timelines = self.many::<Timeline>(Section::Timelines);
        let Some(timeline) = timelines.get(device as usize) else {
            return Table { entries: Vec::new(), torn: 0 };
        };
        let (samples, whole) = timeline.read(self.attempts());
        let (scale, created) = (self.scale(), self.process().created);
        let entry = |sample: Sample| TimelineEntry {
            realtime_nanoseconds: scale.map_or(created, |scale| scale.realtime(sample.ticks)),
            sample,
        };
        Table { entries: samples.into_iter().map(entry).collect(), torn: u64::from(!whole) }
    }

    /// What turns ticks into time; `None` when the record holds too little to tell and this is not the boot it was written
    /// in.
    pub fn scale(&self) -> Option<Scale> {
        let (counter, first, latest) = self.header()?.clock.read(self.attempts());
        Scale::between(first, latest).or_else(|| {
            let here = counter == COUNTER && self.process().boot == boot_id();
            here.then(|| Scale::until_now(first)).flatten()
        })
    }
}

fn table<C, T>(cells: &[C], reach: u64, read: impl Fn(&C) -> SlotRead<T>) -> Table<T> {
    let mut table = Table { entries: Vec::new(), torn: 0 };
    for cell in &cells[..cells.len().min(usize::try_from(reach).unwrap_or(usize::MAX))] {
        match read(cell) {
            SlotRead::Free => {}
            SlotRead::Taken(entry, _) => table.entries.push(entry),
            SlotRead::Torn => table.torn += 1,
        }
    }
    table
}
