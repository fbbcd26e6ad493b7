//! Processes that come and go, followed from look to look: what `top` and `watch` read.
//!
//! A look is cheap: a record is opened once, and then only its gauges are read, and once a second
//! its timeline. The block map is read once at first, and then seldom, of one device at a look, and
//! only where something has happened on it since: it shows what is lost, while the gauge of that is
//! written at events, and is as old as the last one. The record of a process that has ended stays
//! readable for as long as it is followed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gruyere_record::claim::Claim;
use gruyere_record::facts::Process;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sweep::{self, Found, Look, State};
use gruyere_record::timeline::TimelineEntry;
use gruyere_record::watch::{Facts, Forecast, Point, Rate, capacity, forecast};
use gruyere_record::{DeviceGauge, Owners, ReadError, Reader};

use crate::ending::{Ending, left_beside};
use crate::failure::Failure;
use crate::recent;
use crate::sites::is_due;
use crate::target::{Folder, Target, Whose};

/// Between two looks for new processes, and at a device's timeline.
const SECOND: Duration = Duration::from_secs(1);
/// A record that was given up is tried again after so long.
const AGAIN: Duration = Duration::from_secs(30);
/// Processes that ended well are followed for so long after.
const FAREWELL: Duration = Duration::from_secs(10);

/// Which processes are followed.
#[derive(Clone, Debug)]
pub enum Which {
    /// All of a folder, those that come later too.
    All(Folder),
    /// One record.
    One(Target),
}

/// How it stands with a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It runs (or that can't be told).
    Live,
    /// It ended, and took its record away.
    Ended,
    /// It ended without a clean exit, and its record stayed.
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
    /// Its numbers at the last look.
    pub snapshot: DeviceSnapshot,
    /// What it held over the run, as of a second ago at most.
    pub timeline: Vec<TimelineEntry>,
    /// The highest live memory of the last step, or of the last minute where no steps are marked.
    pub peak: u64,
    /// Bytes allocated a second.
    pub rate: Option<f64>,
    /// When its memory will have run out.
    pub forecast: Forecast,
    rates: Rate,
    map: Option<Map>,
    /// Memory has moved since the map was read.
    has_moved: bool,
}

/// What the map of a device said of what is lost.
#[derive(Clone, Copy, Debug)]
struct Map {
    at: Instant,
    /// How often memory had moved by then ([`moves`]).
    moves: u64,
    /// The gauge at that time: with another value it has been written since, and is the newer.
    gauge: u64,
    lost: u64,
}

/// How often memory has moved: while it does not, neither does what is lost.
fn moves(snapshot: &DeviceSnapshot) -> u64 {
    let total = snapshot.total();
    let moved = [
        total.mallocs,
        total.frees,
        total.pending_blocks(),
        snapshot.gauge(DeviceGauge::Reserved),
        snapshot.gauge(DeviceGauge::DriverCalls),
    ];
    // Each counts in its own place; of a wrap all that comes is one look too few.
    moved.iter().fold(0, |sum, &count| sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(count))
}

impl Device {
    /// Takes what is lost from the map, where that is newer than the gauge.
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

    /// Whether anything was ever allocated on it.
    pub fn is_used(&self) -> bool {
        self.snapshot.gauge(DeviceGauge::Limit) > 0 || self.snapshot.live_peak > 0
    }

    /// What thresholds go by.
    pub fn facts(&self) -> Facts<'_> {
        Facts { device: &self.snapshot, rate: self.rate, forecast: self.forecast }
    }
}

/// A process that is followed.
#[derive(Debug)]
pub struct Followed {
    /// Its record.
    pub reader: Reader<'static>,
    /// Who it is.
    pub process: Process,
    /// Whose it is, and who says so.
    pub whose: Whose,
    /// How it stands with it.
    pub life: Life,
    /// Its devices, by number.
    pub devices: Vec<Device>,
    /// How it ended, and what is left of it.
    pub ending: Option<Ending>,
    /// When it was seen to have ended.
    ended: Option<Instant>,
    timelines_at: Option<Instant>,
}

impl Followed {
    fn new(reader: Reader<'static>, claim: &Claim) -> Self {
        let process = reader.process();
        let life = life(&reader);
        let whose = Whose::of(&reader, claim);
        let devices = Vec::new();
        let (ending, ended, timelines_at) = (None, None, None);
        Self { reader, process, whose, life, devices, ending, ended, timelines_at }
    }

    /// The devices that it has used.
    pub fn used(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(|device| device.is_used())
    }

    /// # Errors
    /// The record is not to be believed any more; what was seen of it before stays.
    fn look(&mut self, begin: Instant, now: Instant, owners: Owners) -> Result<(), ReadError> {
        if self.ended.is_some() {
            return Ok(());
        }
        self.reader.look_again();
        let mut snapshots = self.reader.device_snapshots();
        self.reader.expect_sound()?;
        self.life = life(&self.reader);
        if self.life != Life::Live {
            // One look more: these are its last words.
            (self.ended, self.timelines_at) = (Some(now), None);
            self.end(owners);
            snapshots = self.reader.device_snapshots();
            self.reader.expect_sound()?;
        }
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
                Some(map) if self.life == Life::Live => {
                    device.has_moved = map.moves != moves(&device.snapshot);
                    device.take_lost();
                }
                // At first, and the last words of one that has ended.
                _ => device.look_at_map(&self.reader, now),
            }
            device.rate = device.rates.look(seconds, device.snapshot.total().malloc_bytes);
            if is_due {
                device.timeline = self.reader.timeline(number as u32).entries;
                let points: Vec<Point> = device.timeline.iter().map(Point::from).collect();
                device.forecast = forecast(&points, capacity(&device.snapshot));
            }
            device.peak = recent::peak(&device.timeline, &device.snapshot, self.life == Life::Live);
        }
        Ok(())
    }

    /// From now on it is as its record tells that `gruyere post` reads: one that ended by an
    /// out-of-memory left a copy, of the moment before the exception freed what was live.
    fn end(&mut self, owners: Owners) {
        let copy = || left_beside(self.reader.path(), owners);
        match (self.life, copy().filter(|copy| copy.process().created == self.process.created)) {
            (Life::Ended, Some(copy)) => {
                self.ending = Some(Ending::of(&copy));
                self.reader = copy;
            }
            (Life::Killed, _) => self.ending = Some(Ending::of(&self.reader)),
            _ => self.ending = Some(Ending::without_record(&self.reader)),
        }
    }

    /// The record that is left of it.
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
    /// Records of processes that had ended before: there were so many, and nobody asked for them.
    old: BTreeSet<PathBuf>,
    /// What could not be read, and why.
    trouble: BTreeMap<PathBuf, String>,
    /// Of them, those that were open and turned out damaged: when that was.
    given_up: BTreeMap<PathBuf, Instant>,
    /// Records of other users, which were left alone.
    foreign: usize,
    looked_for_new: Option<Instant>,
    /// When a map was read last, and how long that took.
    map_read: (Instant, Duration),
}

impl Follower {
    /// Follows `which`.
    ///
    /// # Errors
    /// One process that there is not, or that can't be read; a folder that can't be read.
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
            map_read: (Instant::now(), Duration::ZERO),
        };
        match &follower.which {
            Which::One(target) => {
                let reader = target.open()?;
                let claim = Claim::of(&reader);
                follower.followed.insert(reader.path().to_owned(), Followed::new(reader, &claim));
            }
            Which::All(folder) => {
                std::fs::read_dir(&folder.directory).map_err(|error| unreadable(folder, &error))?;
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

    /// The processes, by the path of their record.
    pub fn followed(&self) -> &BTreeMap<PathBuf, Followed> {
        &self.followed
    }

    /// Records of processes that had ended before they could be followed.
    pub fn old(&self) -> usize {
        let is_followed = |record: &PathBuf| {
            self.followed.values().any(|followed| followed.left() == Some(record))
        };
        self.old.iter().filter(|record| !is_followed(record)).count()
    }

    /// How many records there are of other users, which are not read.
    pub fn foreign(&self) -> usize {
        self.foreign
    }

    /// Why records could not be read, each with its file's name.
    pub fn trouble(&self) -> impl Iterator<Item = &str> {
        self.trouble.values().map(String::as_str)
    }

    /// Whether there is nobody left to follow, nor will be.
    pub fn is_over(&self) -> bool {
        matches!(self.which, Which::One(_))
            && self.followed.values().all(|followed| followed.life != Life::Live)
    }

    /// Forgets those that ended and left a record.
    pub fn forget_dead(&mut self) {
        if let Which::All(_) = self.which {
            let old = &mut self.old;
            self.followed.retain(|_, one| {
                old.extend(one.left().cloned());
                one.left().is_none()
            });
        }
    }

    /// Looks at all of them at the moment `now`, and for new ones.
    pub fn look(&mut self, now: Instant) {
        if let Which::All(folder) = &self.which
            && self.looked_for_new.is_none_or(|at| now.duration_since(at) >= SECOND)
        {
            self.looked_for_new = Some(now);
            let folder = folder.clone();
            self.look_for_new(&folder, now);
            // A dead one whose record was swept is nobody's any more.
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
                self.trouble.insert(path.clone(), error.to_string());
                self.given_up.insert(path.clone(), now);
                false
            }
        });
        self.look_at_a_map(now);
    }

    /// Reads the map of the device of which it is oldest, of those on which memory has moved since.
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
        let Ok(there) = sweep::names(&folder.directory) else { return };
        self.foreign = 0;
        // A record costs time before it is given up: not at every look.
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
        let there: BTreeSet<PathBuf> = there.into_iter().collect();
        self.old.retain(|path| there.contains(path));
        self.trouble.retain(|path, _| there.contains(path));
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
                self.trouble.insert(path, error.to_string());
            }
        }
    }
}

fn unreadable(folder: &Folder, error: &std::io::Error) -> Failure {
    let folder = folder.directory.display();
    Failure::new(format_args!("{folder}: {error}; name the folder of the records with --directory"))
}
