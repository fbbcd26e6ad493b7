//! Follows processes that come and go, sample by sample, for `top` and `watch`.
//!
//! A sample is cheap: a record is opened once; each sample then reads its gauges, and once a second
//! its timeline. The block map is read once at first, then seldom, of a single device per sample,
//! and only if memory has moved on it since: it shows lost memory, whereas that gauge is written at
//! events, and is as old as the last event. The record of an ended process stays readable for as
//! long as it is followed. A process that ends by an out-of-memory takes seconds to shut down, and
//! empties its heap first: until it is gone or goes on, it counts as it was at the refusal, by the
//! copy of its record that it left then.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gruyere_record::claim::Claim;
use gruyere_record::facts::Process;
use gruyere_record::memfds;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sweep::{self, Found, Look, State};
use gruyere_record::timeline::TimelineEntry;
use gruyere_record::watch::{self, Facts, Forecast, Point, Rate, capacity, forecast};
use gruyere_record::{DeviceGauge, Owners, ReadError, Reader};

use crate::ending::{Ending, has_gone_on, is_told_by_copy, left_beside};
use crate::failure::Failure;
use crate::recent;
use crate::sites::is_due;
use crate::target::{Folder, Target, Whose};

/// Time between two searches for new processes, and between two reads of a device's timeline.
const SECOND: Duration = Duration::from_secs(1);
/// The shortest time between two samples: more would show no more, and cost.
pub const SHORTEST: Duration = Duration::from_millis(100);
/// Time until a damaged record is tried again.
const AGAIN: Duration = Duration::from_secs(30);
/// How often to look among the descriptors of all processes.
const FOR_MEMFDS: Duration = Duration::from_secs(5);
/// Time to follow a process after a clean exit.
const FAREWELL: Duration = Duration::from_secs(10);

/// Parses the time between two samples.
///
/// # Errors
/// No duration, or one that is too short.
pub fn interval(text: &str) -> Result<Duration, String> {
    let interval = Duration::from(text.parse::<watch::Duration>()?);
    match interval < SHORTEST {
        true => Err("expected 100ms or more".to_owned()),
        false => Ok(interval),
    }
}

/// The followed processes.
#[derive(Clone, Debug)]
pub enum Which {
    /// All of a folder, including later ones.
    All(Folder),
    /// One record.
    One(Target),
}

/// State of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Running (or undecidable).
    Live,
    /// Ended; it removed its record.
    Ended,
    /// Ended without a clean exit; its record stayed.
    Killed,
}

impl Life {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Life::Live => "live",
            Life::Ended => "ended",
            Life::Killed => "killed",
        }
    }
}

/// A device of a process.
#[derive(Debug)]
pub struct Device {
    /// Its numbers at the last sample.
    pub snapshot: DeviceSnapshot,
    /// Its timeline over the run, at most a second old.
    pub timeline: Vec<TimelineEntry>,
    /// The highest live memory of the last step, or of the last minute if no steps are marked.
    pub peak: u64,
    /// Bytes allocated per second.
    pub rate: Option<f64>,
    /// Forecast of out of memory.
    pub forecast: Forecast,
    rates: Rate,
    map: Option<Map>,
    /// Whether memory has moved since the map was read.
    has_moved: bool,
}

/// Lost memory by a device's map.
#[derive(Clone, Copy, Debug)]
struct Map {
    at: Instant,
    /// Number of moves at the time of the map ([`moves`]).
    moves: u64,
    /// The gauge at that time: a different value has been written since, and is newer.
    gauge: u64,
    lost: u64,
}

/// Counts memory's moves: without any, lost memory stays the same.
fn moves(snapshot: &DeviceSnapshot) -> u64 {
    let total = snapshot.total();
    let moved = [
        total.mallocs,
        total.frees,
        total.pending_blocks(),
        snapshot.gauge(DeviceGauge::Reserved),
        snapshot.gauge(DeviceGauge::DriverCalls),
    ];
    // Each counter has a weight of its own; a collision only misses a single read of the map.
    moved.iter().fold(0, |sum, &count| sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(count))
}

impl Device {
    /// Takes lost memory from the map, if the map is newer than the gauge.
    fn take_lost(&mut self) {
        let lost = DeviceGauge::Lost as usize;
        if let (Some(map), Some(gauge)) = (self.map, self.snapshot.gauges.get_mut(lost))
            && *gauge == map.gauge
        {
            *gauge = map.lost;
        }
    }

    /// Reads the map.
    fn look_at_map(&mut self, reader: &Reader<'_>, now: Instant) {
        let gauge = self.snapshot.gauge(DeviceGauge::Lost);
        let moves = moves(&self.snapshot);
        self.snapshot.read_lost(reader);
        let lost = self.snapshot.gauge(DeviceGauge::Lost);
        self.map = Some(Map { at: now, moves, gauge, lost });
    }

    /// Whether the device ever had an allocation.
    pub fn is_used(&self) -> bool {
        self.snapshot.gauge(DeviceGauge::Limit) > 0 || self.snapshot.live_peak > 0
    }

    /// Input of the thresholds.
    pub fn facts(&self) -> Facts<'_> {
        Facts { device: &self.snapshot, rate: self.rate, forecast: self.forecast }
    }
}

/// A followed process.
#[derive(Debug)]
pub struct Followed {
    /// Its record, or the copy of it that an out-of-memory left.
    pub reader: Reader<'static>,
    /// Its record, while `reader` is the copy.
    running: Option<Reader<'static>>,
    /// The process's identity.
    pub process: Process,
    /// The record's owner, and how far that is verified.
    pub whose: Whose,
    /// State of the process.
    pub life: Life,
    /// Its devices, by number.
    pub devices: Vec<Device>,
    /// How it ended, or ends while it shuts down, and what it left.
    pub ending: Option<Ending>,
    /// When its end was seen.
    ended: Option<Instant>,
    timelines_at: Option<Instant>,
}

impl Followed {
    fn new(reader: Reader<'static>, claim: &Claim) -> Self {
        let process = reader.process();
        let life = life(&reader);
        let whose = Whose::of(&reader, claim);
        let devices = Vec::new();
        let (running, ending, ended, timelines_at) = (None, None, None, None);
        Self { reader, running, process, whose, life, devices, ending, ended, timelines_at }
    }

    /// The used devices.
    pub fn used(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(|device| device.is_used())
    }

    /// # Errors
    /// The record is no longer credible; earlier samples of it stay.
    fn look(&mut self, begin: Instant, now: Instant, owners: Owners) -> Result<(), ReadError> {
        if self.ended.is_some() {
            return Ok(());
        }
        let running = self.running.as_mut().unwrap_or(&mut self.reader);
        running.look_again();
        let mut snapshots = running.device_snapshots();
        running.expect_sound()?;
        self.life = life(running);
        if self.life != Life::Live {
            // Another sample: the last words of the process.
            (self.ended, self.timelines_at) = (Some(now), None);
            self.run_on();
            self.end(owners);
            snapshots = self.reader.device_snapshots();
            self.reader.expect_sound()?;
        } else if self.running.is_some() {
            if !has_gone_on(&self.reader.device_snapshots(), &snapshots) {
                return Ok(());
            }
            self.run_on();
        } else if self.shuts_down(&snapshots, owners) {
            snapshots = self.reader.device_snapshots();
            self.reader.expect_sound()?;
        }
        let is_running = self.life == Life::Live && self.running.is_none();
        let seconds = now.duration_since(begin).as_secs_f64();
        let is_due = self.timelines_at.is_none_or(|at| now.duration_since(at) >= SECOND);
        if is_due {
            self.timelines_at = Some(now);
        }
        for (number, snapshot) in snapshots.into_iter().enumerate() {
            if self.devices.len() <= number {
                self.devices.push(Device {
                    snapshot: DeviceSnapshot::default(),
                    timeline: Vec::new(),
                    peak: 0,
                    rate: None,
                    forecast: Forecast::default(),
                    rates: Rate::default(),
                    map: None,
                    has_moved: false,
                });
            }
            let device = &mut self.devices[number];
            device.snapshot = snapshot;
            if !device.is_used() {
                continue;
            }
            match device.map {
                Some(map) if is_running => {
                    device.has_moved = map.moves != moves(&device.snapshot);
                    device.take_lost();
                }
                // At first, and for the last words of an ended process.
                _ => {
                    device.look_at_map(&self.reader, now);
                    device.has_moved = false;
                }
            }
            device.rate = device.rates.look(seconds, device.snapshot.total().malloc_bytes);
            if is_due {
                device.timeline = self.reader.timeline(number as u32).entries;
                let points: Vec<Point> = device.timeline.iter().map(Point::from).collect();
                device.forecast = forecast(&points, capacity(&device.snapshot));
            }
            device.peak = recent::peak(&device.timeline, &device.snapshot, is_running);
        }
        Ok(())
    }

    /// Takes the copy of the record that an out-of-memory left, if the process, with these devices,
    /// has not gone on since.
    fn shuts_down(&mut self, snapshots: &[DeviceSnapshot], owners: Owners) -> bool {
        let is_refused = |device: &DeviceSnapshot| device.gauge(DeviceGauge::OutOfMemories) > 0;
        if !snapshots.iter().any(is_refused) {
            return false;
        }
        let Some(copy) = self.copy(owners) else { return false };
        let ending = Ending::of(&copy);
        let is_current = ending.ran_out && !has_gone_on(&copy.device_snapshots(), snapshots);
        if is_current {
            self.running = Some(std::mem::replace(&mut self.reader, copy));
            (self.ending, self.timelines_at) = (Some(ending), None);
        }
        is_current
    }

    /// Takes its record again, in place of the copy.
    fn run_on(&mut self) {
        if let Some(running) = self.running.take() {
            self.reader = running;
            (self.ending, self.timelines_at) = (None, None);
        }
    }

    /// The copy that the process left.
    fn copy(&self, owners: Owners) -> Option<Reader<'static>> {
        left_beside(self.reader.path(), owners)
            .filter(|copy| copy.process().created == self.process.created)
    }

    /// Takes the state from the record for `gruyere post`: a process that ended by an out-of-memory
    /// left a copy, of the moment before the exception freed the live blocks.
    fn end(&mut self, owners: Owners) {
        match (self.life, self.copy(owners)) {
            (life, Some(copy)) if life == Life::Ended || is_told_by_copy(&self.reader, &copy) => {
                self.ending = Some(Ending::of(&copy));
                self.reader = copy;
            }
            (Life::Killed, _) => self.ending = Some(Ending::of(&self.reader)),
            _ => self.ending = Some(Ending::without_record(&self.reader)),
        }
    }

    /// The record that the process left.
    fn left(&self) -> Option<&PathBuf> {
        self.ending.as_ref()?.record.as_ref()
    }
}

fn life(reader: &Reader<'_>) -> Life {
    if reader.health().closed {
        Life::Ended
    } else if reader.is_live() == Some(false) {
        Life::Killed
    } else {
        Life::Live
    }
}

/// Follows processes.
#[derive(Debug)]
pub struct Follower {
    which: Which,
    begin: Instant,
    followed: BTreeMap<PathBuf, Followed>,
    /// Records of processes that ended before the start: not followed, only counted.
    old: BTreeSet<PathBuf>,
    /// Unreadable files, with the reasons.
    trouble: BTreeMap<PathBuf, String>,
    /// Records among them that turned out damaged while open, with the time.
    given_up: BTreeMap<PathBuf, Instant>,
    /// Number of other users' records, left alone.
    foreign: usize,
    looked_for_new: Option<Instant>,
    looked_for_memfds: Option<Instant>,
    /// Time and duration of the last read of a map.
    map_read: (Instant, Duration),
}

impl Follower {
    /// Follows `which`.
    ///
    /// # Errors
    /// The named process does not exist or is unreadable; or the folder is unreadable.
    pub fn new(which: Which) -> Result<Self, Failure> {
        let mut follower = Self {
            which,
            begin: Instant::now(),
            followed: BTreeMap::new(),
            old: BTreeSet::new(),
            trouble: BTreeMap::new(),
            given_up: BTreeMap::new(),
            foreign: 0,
            looked_for_new: None,
            looked_for_memfds: None,
            map_read: (Instant::now(), Duration::ZERO),
        };
        match &follower.which {
            Which::One(target) => {
                let reader = target.open()?;
                let claim = Claim::of(&reader);
                follower.followed.insert(reader.path().to_owned(), Followed::new(reader, &claim));
            }
            Which::All(folder) => {
                folder.expect_readable()?;
            }
        }
        Ok(follower)
    }

    fn owners(&self) -> Owners {
        match &self.which {
            Which::All(folder) => folder.owners(),
            Which::One(target) => target.folder.owners(),
        }
    }

    /// The processes, by path of record.
    pub fn followed(&self) -> &BTreeMap<PathBuf, Followed> {
        &self.followed
    }

    /// Number of records whose processes ended before we could follow them.
    pub fn old(&self) -> usize {
        let is_followed = |record: &PathBuf| {
            self.followed.values().any(|followed| followed.left() == Some(record))
        };
        self.old.iter().filter(|record| !is_followed(record)).count()
    }

    /// Number of other users' records, which are not read.
    pub fn foreign(&self) -> usize {
        self.foreign
    }

    /// Errors of unreadable records, each with its file name.
    pub fn trouble(&self) -> impl Iterator<Item = &str> {
        self.trouble.values().map(String::as_str)
    }

    /// Whether no process is left to follow, and none can come.
    pub fn is_over(&self) -> bool {
        matches!(self.which, Which::One(_))
            && self.followed.values().all(|followed| followed.life != Life::Live)
    }

    /// Forgets the ended processes that left a record.
    pub fn forget_dead(&mut self) {
        if let Which::All(_) = self.which {
            let old = &mut self.old;
            self.followed.retain(|_, one| {
                old.extend(one.left().cloned());
                one.left().is_none()
            });
        }
    }

    /// Samples all processes at the moment `now`, and searches for new ones.
    pub fn look(&mut self, now: Instant) {
        if let Which::All(folder) = &self.which
            && self.looked_for_new.is_none_or(|at| now.duration_since(at) >= SECOND)
        {
            self.looked_for_new = Some(now);
            let folder = folder.clone();
            self.look_for_new(&folder, now);
            // Drops a dead process whose record was swept.
            self.followed.retain(|_, followed| match (followed.left(), followed.ended) {
                (Some(record), _) => record.exists(),
                (_, Some(ended)) => now.duration_since(ended) < FAREWELL,
                _ => true,
            });
        }
        let (begin, owners) = (self.begin, self.owners());
        self.followed.retain(|path, followed| match followed.look(begin, now, owners) {
            Ok(()) => true,
            Err(error) => {
                self.trouble.insert(path.clone(), error.in_folder());
                self.given_up.insert(path.clone(), now);
                false
            }
        });
        self.look_at_a_map(now);
    }

    /// Reads the oldest map, among devices on which memory has moved since.
    fn look_at_a_map(&mut self, now: Instant) {
        let (at, took) = self.map_read;
        if !is_due(at, took, now) {
            return;
        }
        let all = self.followed.values_mut().filter(|followed| followed.life == Life::Live);
        let devices = all.flat_map(|Followed { reader, devices, .. }| {
            devices.iter_mut().map(|device| (&*reader, device))
        });
        let moved = devices.filter(|(_, device)| device.has_moved);
        if let Some((reader, device)) = moved.min_by_key(|(_, device)| device.map.map(|map| map.at))
        {
            let begin = Instant::now();
            device.look_at_map(reader, now);
            device.has_moved = false;
            self.map_read = (now, begin.elapsed());
        }
    }

    fn look_for_new(&mut self, folder: &Folder, now: Instant) {
        let there = match sweep::names(&folder.directory) {
            Ok(there) => there,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(_) => return,
        };
        self.foreign = 0;
        // A damaged record costs time before it is given up: not at every sample.
        self.given_up.retain(|_, at| now.duration_since(*at) < AGAIN);
        for path in &there {
            let is_known = self.followed.contains_key(path) || self.old.contains(path);
            if is_known || self.given_up.contains_key(path) {
                continue;
            }
            match sweep::look(path.clone(), folder.owners(), |opened| {
                opened.state() != State::Stale
            }) {
                Look::Gone => {}
                Look::Foreign => self.foreign += 1,
                Look::Unwanted(path) => {
                    self.old.insert(path);
                }
                Look::Found(found) => self.enter(*found),
            }
        }
        if self.looked_for_memfds.is_none_or(|at| now.duration_since(at) >= FOR_MEMFDS) {
            self.looked_for_memfds = Some(now);
            self.trouble.retain(|path, _| !is_memfd(path));
            for found in memfds::read(&folder.directory, folder.owners(), |_| true) {
                // The path of one that has ended may be another's by now.
                let followed = self.followed.get(&found.path);
                let is_known = followed.is_some_and(|one| one.life == Life::Live);
                if !is_known && !self.given_up.contains_key(&found.path) {
                    self.enter(found);
                }
            }
        }
        let there: BTreeSet<PathBuf> = there.into_iter().collect();
        self.old.retain(|path| there.contains(path));
        self.trouble.retain(|path, _| there.contains(path) || is_memfd(path));
    }

    fn enter(&mut self, Found { path, reader, claim, .. }: Found) {
        self.trouble.remove(&path);
        match (reader, claim) {
            (Ok(_), Claim::False(lie)) => {
                self.trouble.insert(path.clone(), format!("{} {lie}; left out", path.display()));
            }
            (Ok(reader), claim) => {
                let followed = Followed::new(reader, &claim);
                if followed.life == Life::Live {
                    self.followed.insert(path, followed);
                } else {
                    self.old.insert(path);
                }
            }
            (Err(error), _) => {
                self.trouble.insert(path, error.in_folder());
            }
        }
    }
}

/// Whether this is the path of a record without a file.
fn is_memfd(path: &Path) -> bool {
    path.starts_with("/proc")
}
