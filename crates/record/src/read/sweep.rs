//! Finds the records in a folder, sorts them by whether their processes live, and sweeps the dead
//! ones. A sweep maps no file: it reads headers and locks.

use std::cmp::Reverse;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::claim::Claim;
use crate::facts::{Process, boot_id};
use crate::mapping::{FILE_PREFIX, FILE_SUFFIX};
use crate::reader::Reader;

pub use crate::open::{Opened, Owners, ReadError, State};

/// A file named like a record.
#[derive(Debug)]
pub struct Found {
    /// Its path.
    pub path: PathBuf,
    /// Whether its process lives.
    pub state: State,
    /// The record, or why it can't be read.
    pub reader: Result<Reader<'static>, ReadError>,
    /// Whether it belongs to the process it names (unknown if it can't be read).
    pub claim: Claim,
}

impl Found {
    /// Why the record can't be read, if its process lives, or may.
    pub fn unread(&self) -> Option<&ReadError> {
        let error = self.reader.as_ref().err()?;
        let may_live = match error {
            ReadError::Open { .. } | ReadError::NotReady { locked: Some(true), .. } => true,
            _ => self.state == State::Live,
        };
        may_live.then_some(error)
    }
}

/// The records in a folder.
#[derive(Debug, Default)]
pub struct Listing {
    /// The opened records, by name.
    pub found: Vec<Found>,
    /// Records of processes that ended without a clean exit, if these were only counted.
    pub stale: Vec<PathBuf>,
    /// Number of other users' records, left alone.
    pub foreign: usize,
}

/// The records of `owners` in `directory` that are `wanted`; the paths of the others count as
/// stale.
///
/// # Errors
/// The system's error from reading the folder.
pub fn read(
    directory: &Path,
    owners: Owners,
    wanted: impl Fn(&Opened) -> bool,
) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for path in names(directory)? {
        match look(path, owners, &wanted) {
            Look::Gone => {}
            Look::Foreign => listing.foreign += 1,
            Look::Unwanted(path) => listing.stale.push(path),
            Look::Found(found) => listing.found.push(*found),
        }
    }
    Ok(listing)
}

/// What lies at the path of a record.
#[derive(Debug)]
pub enum Look {
    /// Nothing any more: the process made a clean exit.
    Gone,
    /// Another user's record, left alone.
    Foreign,
    /// The path of a record that was not wanted.
    Unwanted(PathBuf),
    /// A record, or why it can't be read.
    Found(Box<Found>),
}

/// Looks at `path`, and opens the record there if it is `wanted`, by its state or by the process it
/// names.
pub fn look(path: PathBuf, owners: Owners, wanted: impl Fn(&Opened) -> bool) -> Look {
    let opened = match Opened::new(&path, owners) {
        Ok(opened) => opened,
        Err(error) if error.is_missing() => return Look::Gone,
        Err(error) if error.is_foreign() => return Look::Foreign,
        Err(error) => {
            let (state, claim) = (State::Unknown, Claim::Unseen);
            return Look::Found(Box::new(Found { path, state, reader: Err(error), claim }));
        }
    };
    look_in(path, opened, &wanted)
}

/// As [`look`], in what was opened at `path`.
pub(crate) fn look_in(path: PathBuf, opened: Opened, wanted: &dyn Fn(&Opened) -> bool) -> Look {
    let mut state = opened.state();
    if !wanted(&opened) {
        return Look::Unwanted(path);
    }
    let reader = Reader::over_opened(opened);
    let claim = reader.as_ref().map_or(Claim::Unseen, Claim::of);
    // The process may have been killed since.
    if state == State::Live && reader.as_ref().is_ok_and(|reader| reader.is_live() == Some(false)) {
        state = State::Stale;
    }
    Look::Found(Box::new(Found { path, state, reader, claim }))
}

/// Whether the file may be a record, by its name: a descriptor in /proc is none.
pub fn is_record(path: &Path) -> bool {
    path.file_name().is_some_and(|name| {
        let name = name.to_string_lossy();
        name.starts_with(FILE_PREFIX) && name.ends_with(FILE_SUFFIX)
    })
}

/// A record's number among its process's records, from its name ([`crate::mapping::file_name`]); 0
/// if the name has none.
pub fn number(path: &Path) -> u32 {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number =
        name.strip_suffix(FILE_SUFFIX).and_then(|name| name.rsplit('-').next()?.parse().ok());
    number.unwrap_or(0)
}

/// Whether this is a copy that a process left when an out-of-memory error that nothing caught ended
/// its program. Its own record has the first number.
pub fn is_copy(path: &Path) -> bool {
    number(path) > 0
}

/// A record's name without its number, which all records of its process share.
pub fn stem(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()?.rsplit_once('-').map(|(stem, _)| stem)
}

/// The pid in a record's name.
pub fn pid(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.split('-').nth(2)?.parse().ok()
}

/// The files in `directory` named like records, in order.
///
/// # Errors
/// The system's error from reading the folder.
pub fn names(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if is_record(Path::new(&entry.file_name())) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// The result of a sweep.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Files removed.
    pub removed: usize,
    /// Files of dead processes that could not be removed.
    pub failed: usize,
}

/// Removes the records of dead processes of `owners` from `directory`; never one whose lock is held
/// or can't be checked.
pub fn sweep(directory: &Path, owners: Owners) -> Swept {
    remove_abandoned(directory, owners, Kept::default(), |opened| opened.state() == State::Stale)
}

/// Sweeps this user's records, but keeps those of `kept` processes: of each its own record and the
/// latest copy that it left. Every new process does this, and notes which others it finds alive.
/// They are those that were seen alive last ([`Opened::last_seen`]), but half of the places are for
/// processes that left a copy, which ran out of memory: workers that end by `_exit` must not drive
/// those out. Together they take up an eighth of the file system at most, but the newest, and the
/// newest with a copy, are kept whatever their size: programs need the room in /dev/shm themselves.
/// Since no user asked for it, it leaves alone records that another machine may have written: on a
/// network folder locks are unreliable.
pub fn tidy(directory: &Path, kept: usize) -> Swept {
    let here = boot_id();
    let is_of_here = |opened: &Opened| opened.process().is_none_or(|process| process.boot == here);
    let kept = Kept { processes: kept, bytes: bytes_of_file_system(directory) / DEAD_PART };
    remove_abandoned(directory, Owners::Mine, kept, |opened| match opened.state() {
        State::Live if is_of_here(opened) => {
            opened.note_alive();
            false
        }
        state => state == State::Stale && is_of_here(opened),
    })
}

/// The part of its file system (one of so many) that dead processes' records may take up.
const DEAD_PART: u64 = 8;

/// What a sweep leaves of dead processes.
#[derive(Clone, Copy, Default)]
struct Kept {
    processes: usize,
    bytes: u64,
}

/// The size of the file system of `directory`; the largest number where it has none or it is not
/// known.
fn bytes_of_file_system(directory: &Path) -> u64 {
    let system = rustix::fs::statvfs(directory);
    match system.map(|system| system.f_blocks.saturating_mul(system.f_frsize)) {
        Ok(bytes) if bytes > 0 => bytes,
        _ => u64::MAX,
    }
}

fn remove_abandoned(
    directory: &Path,
    owners: Owners,
    kept: Kept,
    chosen: impl Fn(&Opened) -> bool,
) -> Swept {
    let mut abandoned = Vec::new();
    for path in names(directory).unwrap_or_default() {
        let Ok(opened) = Opened::new(&path, owners) else { continue };
        if chosen(&opened) {
            let identity = (opened.metadata.dev(), opened.metadata.ino());
            let (last_seen, last_sign) = (opened.last_seen(), opened.last_sign());
            let process = opened.process();
            // Records are sparse: their length says nothing.
            let bytes = 512 * opened.metadata.blocks();
            abandoned.push(Abandoned { last_seen, last_sign, path, identity, process, bytes });
        }
    }
    // Newest first; equal times are ordered by name, so that two sweeps at once agree.
    abandoned.sort_by(|one, other| (other.last_seen, &other.path).cmp(&(one.last_seen, &one.path)));
    let mut swept = Swept::default();
    for one in beyond(abandoned, kept) {
        match remove(&one.path, one.identity) {
            Ok(()) => swept.removed += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => swept.failed += 1,
        }
    }
    swept
}

/// A record of a dead process.
struct Abandoned {
    last_seen: SystemTime,
    last_sign: SystemTime,
    path: PathBuf,
    /// Of the file that was judged.
    identity: (u64, u64),
    process: Option<Process>,
    /// What it takes up.
    bytes: u64,
}

/// Of a process's records, by last sign of life and number: the places of its own, and of the copy
/// that it left last, which may be the same. Its own was made first, and goes on when a copy is
/// made.
pub fn own_and_copy(records: &[(SystemTime, u32)]) -> [Option<usize>; 2] {
    let places = || 0..records.len();
    let own = |&place: &usize| (records[place].0, Reverse(records[place].1));
    [places().max_by_key(own), places().max_by_key(|&place| records[place].1)]
}

/// Those of `abandoned`, which are ordered newest first, that are not of the `kept` processes. Of
/// one process, its newest record and the copy that it left last are kept.
fn beyond(abandoned: Vec<Abandoned>, kept: Kept) -> Vec<Abandoned> {
    let mut processes: Vec<Vec<Abandoned>> = Vec::new();
    for one in abandoned {
        let is_its = |records: &&mut Vec<Abandoned>| {
            let other = records.first().and_then(|other| other.process.as_ref());
            let is_named_alike = records.iter().any(|of| stem(&of.path) == stem(&one.path));
            let is_same = one.process.as_ref().zip(other).is_some_and(|(one, of)| one.is_same(of));
            is_named_alike && is_same
        };
        match processes.iter_mut().find(is_its) {
            Some(records) => records.push(one),
            None => processes.push(vec![one]),
        }
    }
    let has_copy = |records: &[Abandoned]| records.iter().any(|one| is_copy(&one.path));
    let with_copy = processes.iter().filter(|records| has_copy(records)).count();
    let mut of_copies = with_copy.min(kept.processes.div_ceil(2));
    let mut of_any = kept.processes - of_copies;
    // The newest has room in any case, and the newest that ran out of memory, whose record workers
    // that end by `_exit` must not drive out.
    let newest_copy = processes.iter().position(|records| has_copy(records));
    let mut taken = 0u64;
    let surplus = |(age, mut records): (usize, Vec<Abandoned>)| {
        let places = match has_copy(&records) && of_copies > 0 {
            true => &mut of_copies,
            false => &mut of_any,
        };
        let of: Vec<_> = records.iter().map(|one| (one.last_sign, number(&one.path))).collect();
        let telling = own_and_copy(&of);
        let is_kept = |place: usize| telling.contains(&Some(place));
        let is_kept_of = |(place, one): (usize, &Abandoned)| is_kept(place).then_some(one.bytes);
        let bytes: u64 = records.iter().enumerate().filter_map(is_kept_of).sum();
        let is_newest = age == 0 || Some(age) == newest_copy;
        if *places > 0 && (is_newest || taken.saturating_add(bytes) <= kept.bytes) {
            *places -= 1;
            taken = taken.saturating_add(bytes);
            let mut place = 0..;
            records.retain(|_| !place.next().is_some_and(is_kept));
        }
        records
    };
    processes.into_iter().enumerate().flat_map(surplus).collect()
}

/// Removes `path` if it still is the file judged before: names are never used twice, but a file can
/// be replaced.
fn remove(path: &Path, identity: (u64, u64)) -> io::Result<()> {
    let now = std::fs::symlink_metadata(path)?;
    if (now.dev(), now.ino()) != identity {
        return Err(io::ErrorKind::NotFound.into());
    }
    std::fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A record of the process with this pid, and its name's last number.
    fn abandoned(pid: u64, number: u32, seconds: u64) -> Abandoned {
        let last_sign = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        Abandoned {
            last_seen: last_sign,
            last_sign,
            path: PathBuf::from(format!("gruyere-1-{pid}-5-{number}.record")),
            identity: (0, 0),
            process: Some(Process { pid, created: 9, ..Process::default() }),
            bytes: 10,
        }
    }

    fn places(processes: usize) -> Kept {
        Kept { processes, bytes: u64::MAX }
    }

    #[test]
    fn what_dead_processes_keep_fits_a_part_of_the_file_system_but_the_newest_is_kept() {
        let of = |pid: u64, bytes| Abandoned { bytes, ..abandoned(pid, 0, 90 - pid) };
        let removed = |records: Vec<Abandoned>, bytes| -> Vec<Option<u64>> {
            let beyond = beyond(records, Kept { processes: 8, bytes });
            beyond.iter().map(|one| pid(&one.path)).collect()
        };
        // The third has no room, the fourth has.
        let records = || vec![of(1, 40), of(2, 40), of(3, 40), of(4, 20)];
        assert_eq!(removed(records(), 100), [Some(3)]);
        assert_eq!(removed(records(), 10), [Some(2), Some(3), Some(4)]);
        // The copy counts with the process's own record, and the newest copy has room.
        let copy = |pid| Abandoned { bytes: 70, ..abandoned(pid, 1, 1) };
        let with_copies = vec![of(9, 40), of(7, 40), of(6, 40), copy(7), copy(6)];
        assert_eq!(removed(with_copies, 100), [Some(6), Some(6)]);
    }

    #[test]
    fn a_process_takes_up_one_place_with_its_own_record_and_its_latest_copy() {
        // The newest first. The process 7 left three copies, and was killed later.
        let records = || {
            vec![
                abandoned(7, 0, 90),
                abandoned(8, 0, 80),
                abandoned(7, 3, 70),
                abandoned(7, 2, 60),
                abandoned(7, 1, 50),
                abandoned(9, 0, 40),
            ]
        };
        let removed = |kept: usize| -> Vec<String> {
            let beyond = beyond(records(), places(kept)).into_iter();
            beyond.map(|one| one.path.display().to_string()).collect()
        };
        let copies = ["gruyere-1-7-5-2.record", "gruyere-1-7-5-1.record"];
        assert_eq!(removed(3), copies);
        assert_eq!(removed(2), [&copies[..], &["gruyere-1-9-5-0.record"]].concat());
        assert_eq!(removed(0).len(), 6);
        // Workers that left no copy take half of the places.
        let workers = || (0..4).map(|worker| abandoned(20 + worker, 0, 99));
        let left = beyond(workers().chain(records()).collect(), places(4));
        let left: Vec<String> = left.iter().map(|one| one.path.display().to_string()).collect();
        assert!(!left.iter().any(|path| path.contains("-7-5-0") || path.contains("-7-5-3")));
        assert_eq!(left.len(), workers().count() - 3 + records().len() - 2, "{left:?}");
        // It did nothing after the copy.
        assert!(beyond(vec![abandoned(7, 1, 90), abandoned(7, 0, 90)], places(1)).is_empty());
        // Unreadable ones belong to nobody known: each counts.
        let unknown = |seconds| Abandoned { process: None, ..abandoned(7, 0, seconds) };
        assert_eq!(beyond(vec![unknown(2), unknown(1)], places(1)).len(), 1);
    }
}
