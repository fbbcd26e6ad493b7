//! The records in a folder: whose process lives, whose does not, and the sweep of the latter. A
//! sweep maps no file: it asks headers and locks.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::claim::Claim;
use super::facts::boot_id;
use super::mapping::{FILE_PREFIX, FILE_SUFFIX};
use super::reader::Reader;

pub use super::open::{Opened, Owners, ReadError, State};

/// A file that is named like a record.
#[derive(Debug)]
pub struct Found {
    /// Where it is.
    pub path: PathBuf,
    /// Whether its process lives.
    pub state: State,
    /// What is in it, or why it can't be read.
    pub reader: Result<Reader<'static>, ReadError>,
    /// Whether it is the record of the process that it says. (Where it can't be read: not known.)
    pub claim: Claim,
}

/// The records in a folder.
#[derive(Debug, Default)]
pub struct Listing {
    /// Those that were opened, by name.
    pub found: Vec<Found>,
    /// Those of processes that ended without a clean exit, where these were only counted.
    pub stale: Vec<PathBuf>,
    /// How many there are of other users, which were left alone.
    pub foreign: usize,
}

/// The records of `owners` in `directory`.
///
/// # Errors
/// That of reading the folder.
pub fn list(directory: &Path, owners: Owners) -> io::Result<Listing> {
    read(directory, owners, |_| true)
}

/// As [`list`], without those of dead processes, of which only the paths are told: for who looks
/// again and again. (A dead record is read by copying it.)
///
/// # Errors
/// That of reading the folder.
pub fn living(directory: &Path, owners: Owners) -> io::Result<Listing> {
    read(directory, owners, |opened| opened.state() != State::Stale)
}

/// As [`list`], of those that are `wanted`; the paths of the others are told as those of dead ones.
///
/// # Errors
/// That of reading the folder.
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

/// What is at the path of a record.
#[derive(Debug)]
pub enum Look {
    /// Nothing any more: it made a clean exit.
    Gone,
    /// Another user's record, which was left alone.
    Foreign,
    /// A record that was not wanted, and its path.
    Unwanted(PathBuf),
    /// A record, or why it can't be read.
    Found(Box<Found>),
}

/// Looks at `path`, and opens the record there if it is `wanted`, by its state or by the process
/// that it says.
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
    let mut state = opened.state();
    if !wanted(&opened) {
        return Look::Unwanted(path);
    }
    let reader = Reader::over_opened(opened);
    let claim = reader.as_ref().map_or(Claim::Unseen, Claim::of);
    // It may have been killed since.
    if state == State::Live && reader.as_ref().is_ok_and(|reader| reader.is_live() == Some(false)) {
        state = State::Stale;
    }
    Look::Found(Box::new(Found { path, state, reader, claim }))
}

/// Whether a file of this name may be a record.
pub fn is_record_name(name: &str) -> bool {
    name.starts_with(FILE_PREFIX) && name.ends_with(FILE_SUFFIX)
}

/// Which of its process's records a file is, by its name ([`super::mapping::file_name`]); 0 where
/// the name does not say.
pub fn number(path: &Path) -> u32 {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number =
        name.strip_suffix(FILE_SUFFIX).and_then(|name| name.rsplit('-').next()?.parse().ok());
    number.unwrap_or(0)
}

/// The number of a record's process, by the file's name.
pub fn pid(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.split('-').nth(2)?.parse().ok()
}

/// The files in `directory` that are named like records, in order.
///
/// # Errors
/// That of reading the folder.
pub fn names(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if is_record_name(&entry.file_name().to_string_lossy()) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// What a sweep did.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Files removed.
    pub removed: usize,
    /// Files of dead processes that could not be removed.
    pub failed: usize,
}

/// Removes the records of dead processes of `owners` from `directory`; never one whose lock is held
/// or can't be asked.
pub fn sweep(directory: &Path, owners: Owners) -> Swept {
    remove_abandoned(directory, owners, 0, |_| true)
}

/// As [`sweep`], of this user's, but for the `kept` that gave their last sign of life latest: what
/// each new process does. Nobody asked it to; so it leaves alone what another machine may have
/// written, whose locks can't be relied on where the folder is on the network.
pub fn tidy(directory: &Path, kept: usize) -> Swept {
    let here = boot_id();
    let is_of_here = |opened: &Opened| opened.process().is_none_or(|process| process.boot == here);
    remove_abandoned(directory, Owners::Mine, kept, is_of_here)
}

fn remove_abandoned(
    directory: &Path,
    owners: Owners,
    kept: usize,
    chosen: impl Fn(&Opened) -> bool,
) -> Swept {
    let mut abandoned: Vec<(SystemTime, PathBuf, (u64, u64))> = Vec::new();
    for path in names(directory).unwrap_or_default() {
        let Ok(opened) = Opened::new(&path, owners) else { continue };
        if opened.state() == State::Stale && chosen(&opened) {
            let identity = (opened.metadata.dev(), opened.metadata.ino());
            abandoned.push((opened.last_sign(), path, identity));
        }
    }
    // The newest first; the name decides where the clock does not, so that two sweeps at once
    // agree.
    abandoned.sort_by(|one, other| other.cmp(one));
    let mut swept = Swept::default();
    for (_, path, identity) in abandoned.into_iter().skip(kept) {
        match remove(&path, identity) {
            Ok(()) => swept.removed += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => swept.failed += 1,
        }
    }
    swept
}

/// Removes `path` if it still is the file that was judged: names are never used twice, but a name
/// can be replaced.
fn remove(path: &Path, identity: (u64, u64)) -> io::Result<()> {
    let now = std::fs::symlink_metadata(path)?;
    if (now.dev(), now.ino()) != identity {
        return Err(io::ErrorKind::NotFound.into());
    }
    std::fs::remove_file(path)
}
