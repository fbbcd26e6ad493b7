//! The reader's side: opens a record, checks every offset and length, and never blocks a writer.

mod events;
mod snapshot;

pub use events::{Cursor, EventFacts, Events};
pub use snapshot::DeviceSnapshot;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering as PrivateOrdering};
use std::time::{Duration, Instant, SystemTime};

use crate::block_map::{BlockCell, SlotRead};
use crate::calls::{CallTime, CallTimes, Calls, DriverCall};
use crate::clock::{COUNTER, Scale};
use crate::facts::{Process, ProcessFacts, boot_id};
use crate::gauges::{DeviceArea, Shard, ShardSizes, pool_of_shard};
use crate::header;
use crate::histogram::{Buckets, Counts};
use crate::layout::{Header, SECTIONS, Section, Shared};
use crate::mapping::{Mapping, is_locked};
use crate::open::{Opened, Owners, ReadError, seen_alive};
use crate::segments::SegmentCell;
use crate::sites::{FrameCell, SiteCell, SiteReach, Sites};
use crate::source::Source;
use crate::sync::{AtomicU64, Ordering};
use crate::timeline::{Sample, Timeline, TimelineEntry};
use crate::totals;
use crate::{BlockEntry, BlockState, DEVICE_GAUGES, Record, SHARDS, SegmentEntry};

/// Attempts at a seqlock before the reader calls it torn: about 30 ms, mostly asleep.
const ATTEMPTS: u32 = 450;
/// Torn seqlocks that get all attempts in one look at a record, some 250 ms in all. A process
/// stopped half-way leaves one torn for each thread that was writing. Later torn seqlocks get one
/// attempt.
const PATIENCE: u32 = 4;
/// Longest time in one look for the tables of blocks and segments; a hundred million entries take
/// less.
const LONGEST: Duration = Duration::from_secs(5);

/// Faults of the record itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthRead {
    /// Blocks not in the map.
    pub blocks_unrecorded: u64,
    /// Segments not in the table.
    pub segments_unrecorded: u64,
    /// Times that the file system had no room.
    pub no_room: u64,
    /// Bits of [`crate::layout::Degraded`].
    pub degraded: u64,
    /// The process made a clean exit.
    pub closed: bool,
    /// Sites that found no room in the tables.
    pub sites_untold: u64,
}

/// Entries of a table, with the number that could not be read whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table<T> {
    /// The entries read whole.
    pub entries: Vec<T>,
    /// Entries that changed at every attempt, or that no writer of ours makes.
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

/// An open record.
#[derive(Debug)]
pub struct Reader<'a> {
    source: Source<'a>,
    path: PathBuf,
    file: Option<File>,
    /// Offset and number of entries, by section, checked.
    sections: [(u64, u64); SECTIONS],
    devices: u32,
    /// Torn seqlocks that may still get all attempts in this look.
    patience: AtomicU32,
}

impl Reader<'static> {
    /// Opens the record at `path` read-only, if this user owns it. Refuses links, pipes and
    /// devices.
    ///
    /// # Errors
    /// The reason the record can't be read.
    pub fn open(path: &Path) -> Result<Reader<'static>, ReadError> {
        Reader::open_of(path, Owners::Mine)
    }

    /// Opens the record at `path` read-only, if it belongs to `owners`; see [`Reader::open`].
    ///
    /// # Errors
    /// The reason the record can't be read.
    pub fn open_of(path: &Path, owners: Owners) -> Result<Reader<'static>, ReadError> {
        Reader::over_opened(Opened::new(path, owners)?)
    }

    /// Makes a reader of an opened file.
    pub(crate) fn over_opened(opened: Opened) -> Result<Reader<'static>, ReadError> {
        let held = opened.is_locked();
        match held {
            // Before the file is copied, which takes time.
            Some(false) => opened.expect_whole()?,
            _ => opened.expect_ready()?,
        }
        let Opened { path, file, metadata, .. } = opened;
        let length = metadata.len();
        let source = match held {
            Some(false) => Source::copy(&file, length),
            _ => Source::shared(&file, length),
        };
        let source = source.map_err(|error| ReadError::Open { path: path.clone(), error })?;
        Reader::over(source, path, Some(file)).map_err(|error| error.with_lock(held))
    }

    /// Reads a record from its bytes, for instance sent from another machine.
    ///
    /// # Errors
    /// The reason the record can't be read.
    pub fn from_bytes(bytes: &[u8]) -> Result<Reader<'static>, ReadError> {
        let path = PathBuf::from("(bytes)");
        let source =
            Source::bytes(bytes).map_err(|error| ReadError::Open { path: path.clone(), error })?;
        Reader::over(source, path, None)
    }
}

impl<'a> Reader<'a> {
    /// This process's own record; `None` while it is off.
    pub fn own(record: &'a Record) -> Option<Reader<'a>> {
        let mapping: &'a Mapping = record.mapping();
        Reader::over(
            Source::Own(mapping),
            record.path().unwrap_or(Path::new("(this process)")).to_owned(),
            None,
        )
        .ok()
    }

    fn over(
        source: Source<'a>,
        path: PathBuf,
        file: Option<File>,
    ) -> Result<Reader<'a>, ReadError> {
        let Some(header) = source.one::<Header>(0) else {
            return Err(header::too_short(source.length(), &path));
        };
        let sections = header::sections(header, source.length(), &path)?;
        let devices = sections[Section::Devices as usize].1;
        let patience = AtomicU32::new(PATIENCE);
        Ok(Reader { source, path, file, sections, devices: devices as u32, patience })
    }

    fn many<T: Shared>(&self, section: Section) -> &[T] {
        let (offset, entries) = self.sections[section as usize];
        // Opening checked this; an empty table rather than a panic all the same.
        self.source.many(offset, entries).unwrap_or(&[])
    }

    /// Reads a seqlock: `read` takes a number of attempts and returns a value and whether that is
    /// whole. A copy never changes, so it gets one attempt.
    fn look_at<T>(&self, read: impl FnOnce(u32) -> (T, bool)) -> (T, bool) {
        let is_copy = matches!(self.source, Source::Copy(_));
        let patience = self.patience.load(PrivateOrdering::Relaxed);
        let (value, whole) = read(if is_copy || patience == 0 { 1 } else { ATTEMPTS });
        if !whole && !is_copy {
            self.patience.store(patience.saturating_sub(1), PrivateOrdering::Relaxed);
        }
        (value, whole)
    }

    /// Begins another look at the record, with full patience.
    pub fn look_again(&self) {
        self.patience.store(PATIENCE, PrivateOrdering::Relaxed);
    }

    /// Checks what was read since [`Reader::look_again`].
    ///
    /// # Errors
    /// The file was cut meanwhile, or nothing in it comes to rest. The caller reports the record
    /// and leaves it out.
    pub fn expect_sound(&self) -> Result<(), ReadError> {
        let what = match &self.source {
            Source::Shared(mapping) if mapping.is_cut() => {
                "it was cut while it was read".to_owned()
            }
            Source::Shared(_) if self.patience.load(PrivateOrdering::Relaxed) == 0 => {
                format!(
                    "{PATIENCE} of its entries or more never come to rest, or its tables have no \
                     end"
                )
            }
            _ => return Ok(()),
        };
        Err(ReadError::Damaged { path: self.path.clone(), what, locked: self.is_live() })
    }

    fn header(&self) -> Option<&Header> {
        self.source.one(0)
    }

    /// Whether its process lives (holds the lock); `None` if unknown.
    pub fn is_live(&self) -> Option<bool> {
        let kind = self.header()?.lock_kind.load(Ordering::Relaxed);
        match (&self.file, &self.source) {
            (Some(file), _) => is_locked(file.as_raw_fd(), kind),
            (None, Source::Own(_)) => Some(true),
            (None, _) => None,
        }
    }

    /// The file's owner, if there is a file.
    pub fn owner(&self) -> Option<u32> {
        Some(self.file.as_ref()?.metadata().ok()?.uid())
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that the file system holds for the file, if there is one.
    pub fn bytes_held(&self) -> Option<u64> {
        Some(self.file.as_ref()?.metadata().ok()?.blocks() * 512)
    }

    /// The process that writes it.
    pub fn process(&self) -> Process {
        self.many::<ProcessFacts>(Section::Process)
            .first()
            .map(ProcessFacts::read)
            .unwrap_or_default()
    }

    /// Faults of the record itself.
    pub fn health(&self) -> HealthRead {
        let Some(header) = self.header() else { return HealthRead::default() };
        let health = &header.health;
        HealthRead {
            blocks_unrecorded: health.blocks_unrecorded.load(Ordering::Relaxed),
            segments_unrecorded: health.segments_unrecorded.load(Ordering::Relaxed),
            no_room: health.no_room.load(Ordering::Relaxed),
            degraded: health.degraded.load(Ordering::Relaxed),
            closed: health.closed.load(Ordering::Relaxed) == 1,
            sites_untold: header.sites.untold.load(Ordering::Relaxed),
        }
    }

    /// Number of devices of the process.
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// A device now. Counters of different shards are read some microseconds apart.
    pub fn device(&self, device: u32) -> Option<DeviceSnapshot> {
        let area = self.many::<DeviceArea>(Section::Devices).get(device as usize)?;
        let shards = self.many::<Shard>(Section::Shards).chunks(SHARDS).nth(device as usize)?;
        let mut snapshot =
            DeviceSnapshot { device, facts: area.read_facts(), ..DeviceSnapshot::default() };
        for (number, shard) in shards.iter().enumerate() {
            let mut torn = false;
            let sums = &mut snapshot.blocks[pool_of_shard(number)];
            for (lifetime, sum) in sums.iter_mut().enumerate() {
                let (counts, whole) = self.look_at(|attempts| shard.read(lifetime, attempts));
                sum.add(counts);
                torn |= !whole;
            }
            snapshot.torn_shards += u32::from(torn);
        }
        let first = device as usize * SHARDS;
        for sizes in self.sizes(first..first + SHARDS) {
            sizes.0[0].add_to(&mut snapshot.malloc_sizes.0);
        }
        snapshot.live = totals::live(totals::BYTES, shards.iter().map(|shard| &shard.totals));
        snapshot.live_peak = area.live_peak.load(Ordering::Relaxed).max(snapshot.live);
        let (gauges, whole) = self.look_at(|attempts| {
            let gauges: Option<[u64; DEVICE_GAUGES]> = area.read(attempts);
            (gauges, gauges.is_some())
        });
        snapshot.torn_gauges = !whole;
        snapshot.gauges = gauges.unwrap_or_else(|| area.read_torn()).to_vec();
        Some(snapshot)
    }

    /// The histograms of the shards that have any.
    fn sizes(&self, shards: std::ops::Range<usize>) -> impl Iterator<Item = &ShardSizes> {
        let has_sizes = |shard: &Shard| shard.has_sizes.load(Ordering::Acquire) == 1;
        let all =
            self.many::<Shard>(Section::Shards).iter().zip(self.many::<ShardSizes>(Section::Sizes));
        let some = all.skip(shards.start).take(shards.len());
        some.filter(move |(shard, _)| has_sizes(shard)).map(|(_, sizes)| sizes)
    }

    /// Snapshots of all devices.
    pub fn device_snapshots(&self) -> Vec<DeviceSnapshot> {
        (0..self.devices).filter_map(|device| self.device(device)).collect()
    }

    /// All blocks, live and pending. Each is whole, but they are of different moments.
    pub fn blocks(&self) -> Table<(BlockEntry, BlockState)> {
        let reach =
            self.header().map_or(0, |header| header.health.blocks_reach.load(Ordering::Acquire));
        let beside = self.reached::<AtomicU64>(Section::BlockSites, |reach| &reach.block_sites);
        self.table(Section::Blocks, reach, |number, cell: &BlockCell, attempts| {
            match cell.read(attempts, beside.get(number)) {
                SlotRead::Taken(entry, state) => SlotRead::Taken((entry, state), state),
                SlotRead::Free => SlotRead::Free,
                SlotRead::Torn => SlotRead::Torn,
            }
        })
    }

    /// The sites of blocks by number. Empty if the process keeps no sites.
    pub fn sites(&self) -> Sites {
        // Whatever a site names was published before the site.
        let sites = self.reached::<SiteCell>(Section::Sites, |reach| &reach.sites);
        let frames = self.reached::<FrameCell>(Section::Frames, |reach| &reach.frames);
        let text = self.reached::<AtomicU64>(Section::Text, |reach| &reach.text);
        Sites::read(sites, frames, text)
    }

    /// Whether the process has published a site.
    pub fn keeps_sites(&self) -> bool {
        self.reached::<SiteCell>(Section::Sites, |reach| &reach.sites).len() > 1
    }

    /// The touched entries of a table, counted by its word of [`SiteReach`].
    fn reached<T: Shared>(
        &self,
        section: Section,
        word: impl Fn(&SiteReach) -> &AtomicU64,
    ) -> &[T] {
        let reach = self.header().map_or(0, |header| word(&header.sites).load(Ordering::Acquire));
        let entries = self.many::<T>(section);
        &entries[..entries.len().min(usize::try_from(reach).unwrap_or(usize::MAX))]
    }

    /// All segments.
    pub fn segments(&self) -> Table<SegmentEntry> {
        let reach =
            self.header().map_or(0, |header| header.health.segments_reach.load(Ordering::Acquire));
        self.table(Section::Segments, reach, |_, cell: &SegmentCell, attempts| cell.read(attempts))
    }

    /// The first `reach` entries of a table.
    fn table<C: Shared, T>(
        &self,
        section: Section,
        reach: u64,
        read: impl Fn(usize, &C, u32) -> SlotRead<T>,
    ) -> Table<T> {
        let cells = self.many::<C>(section);
        let mut table = Table { entries: Vec::new(), torn: 0 };
        let begun = Instant::now();
        let reach = cells.len().min(usize::try_from(reach).unwrap_or(usize::MAX));
        for (number, cell) in cells[..reach].iter().enumerate() {
            if number % 4096 == 0 && begun.elapsed() > LONGEST {
                self.patience.store(0, PrivateOrdering::Relaxed);
                table.torn += (reach - number) as u64;
                break;
            }
            let (slot, _) = self.look_at(|attempts| {
                let slot = read(number, cell, attempts);
                let whole = !matches!(slot, SlotRead::Torn);
                (slot, whole)
            });
            match slot {
                SlotRead::Free => {}
                SlotRead::Taken(entry, _) => table.entries.push(entry),
                SlotRead::Torn => table.torn += 1,
            }
        }
        table
    }

    /// The histograms, summed over shards and devices.
    pub fn histograms(&self) -> Histograms {
        let mut histograms = Histograms::default();
        for sizes in self.sizes(0..usize::MAX) {
            sizes.0[0].add_to(&mut histograms.malloc_sizes.0);
            sizes.0[1].add_to(&mut histograms.free_sizes.0);
        }
        if let [malloc, free] = self.many::<Buckets>(Section::Latency) {
            malloc.add_to(&mut histograms.malloc_latency.0);
            free.add_to(&mut histograms.free_latency.0);
        }
        histograms
    }

    /// Durations of the driver's calls, by kind and class of sizes, in the order of
    /// [`DriverCall::ALL`]; only calls that were made.
    pub fn driver_calls(&self) -> Vec<Calls> {
        let allocated = self.header().map_or(0, |header| header.calls.load(Ordering::Acquire));
        let all = DriverCall::ALL.iter().zip(self.many::<CallTimes>(Section::Calls));
        let made = all.filter(|(call, _)| allocated >> (**call as u8) & 1 == 1);
        made.flat_map(|(&call, times)| times.read(call)).collect()
    }

    /// [`Reader::driver_calls`] in time. Empty where [`Reader::scale`] is `None`.
    pub fn driver_call_times(&self) -> Vec<CallTime> {
        let calls = self.driver_calls();
        let scale = if calls.is_empty() { None } else { self.scale() };
        scale
            .map_or_else(Vec::new, |scale| calls.iter().map(|calls| calls.in_time(scale)).collect())
    }

    /// A device's memory over the whole run, oldest first; at most [`crate::timeline::CELLS`]
    /// entries. [`Table::torn`] is 1 if they are not of one moment: the writer was killed half-way.
    pub fn timeline(&self, device: u32) -> Table<TimelineEntry> {
        let timelines = self.many::<Timeline>(Section::Timelines);
        let areas = self.many::<DeviceArea>(Section::Devices);
        let both = timelines.get(device as usize).zip(areas.get(device as usize));
        let cells = |area: &DeviceArea| {
            usize::try_from(area.timeline_cells.load(Ordering::Acquire)).unwrap_or(usize::MAX)
        };
        let Some((timeline, area)) = both.filter(|(_, area)| cells(area) > 0) else {
            return Table { entries: Vec::new(), torn: 0 };
        };
        let (samples, whole) = self.look_at(|attempts| timeline.read(attempts, || cells(area)));
        let (scale, created) = (self.scale(), self.process().created);
        let entry = |sample: Sample| TimelineEntry {
            realtime_nanoseconds: scale.map_or(created, |scale| scale.realtime(sample.ticks)),
            sample,
        };
        Table { entries: samples.into_iter().map(entry).collect(), torn: u64::from(!whole) }
    }

    /// The last sign of life, by the writer's own clock, which it reads now and then while it
    /// works.
    pub fn last_sign(&self) -> SystemTime {
        let Some(header) = self.header() else { return SystemTime::UNIX_EPOCH };
        let (_, first, latest) = header.clock.read(1);
        SystemTime::UNIX_EPOCH + Duration::from_nanos(latest.unwrap_or(first).realtime)
    }

    /// As [`Opened::last_seen`].
    pub fn last_seen(&self) -> SystemTime {
        let file = std::fs::metadata(self.path());
        file.map_or(self.last_sign(), |file| seen_alive(self.last_sign(), &file))
    }

    /// Converts ticks to time; `None` if the record holds too little for that and was written in
    /// another boot.
    pub fn scale(&self) -> Option<Scale> {
        let clock = &self.header()?.clock;
        let ((counter, first, latest), _) = self.look_at(|attempts| {
            let read = clock.read(attempts);
            (read, read.2.is_some())
        });
        let latest = latest.unwrap_or(first);
        Scale::between(first, latest).or_else(|| {
            let here = counter == COUNTER && self.process().boot == boot_id();
            here.then(|| Scale::until_now(first)).flatten()
        })
    }
}
