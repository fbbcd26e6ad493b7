//! The records in a folder: whose process lives, whose does not, and the sweep of the latter.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::mapping::{FILE_PREFIX, FILE_SUFFIX};
use super::reader::{ReadError, Reader};

/// How it stands with a file that is named like a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its writer holds the lock.
    Live,
    /// Nobody does: the process ended without a clean exit.
    Stale,
    /// Being made, or the file system has no locks: can't be told.
    Unknown,
}

/// A file that is named like a record.
#[derive(Debug)]
pub struct Found {
    /// Where it is.
    pub path: PathBuf,
    /// Whether its process lives.
    pub state: State,
    /// What is in it, or why it can't be read.
    pub reader: Result<Reader<'static>, ReadError>,
}

/// A file without a magic this old was left by a process that died while making it.
const MAKING: Duration = Duration::from_secs(60);

/// The records in `directory`, by name. An error is that of reading the folder.
pub fn list(directory: &Path) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for path in names(directory)? {
        found.extend(look(path));
    }
    Ok(found)
}

/// As [`list`], without those of dead processes, which are only counted: for who looks again and again. (A dead record is read by copying it.)
pub fn living(directory: &Path) -> io::Result<(Vec<Found>, usize)> {
    let (mut found, mut stale) = (Vec::new(), 0);
    for path in names(directory)? {
        if Reader::is_abandoned(&path) {
            stale += 1;
            continue;
        }
        match look(path) {
            // Killed since.
            Some(Found { state: State::Stale, .. }) => stale += 1,
            other => found.extend(other),
        }
    }
    Ok((found, stale))
}

/// Opens a file that is named like a record; `None`: it is gone meanwhile, by a clean exit.
fn look(path: PathBuf) -> Option<Found> {
    let reader = Reader::open(&path);
    if matches!(&reader, Err(error) if error.is_missing()) {
        return None;
    }
    Some(Found { state: state(&path, &reader), path, reader })
}

/// The files in `directory` that are named like records, in order.
fn names(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(FILE_PREFIX) && name.ends_with(FILE_SUFFIX) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn state(path: &Path, reader: &Result<Reader<'static>, ReadError>) -> State {
    match reader {
        Ok(reader) => match reader.is_live() {
            Some(true) => State::Live,
            Some(false) => State::Stale,
            None => State::Unknown,
        },
        Err(ReadError::NotReady { locked: Some(false), .. }) => {
            let age = std::fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
            match age.map(|modified| SystemTime::now().duration_since(modified)) {
                Ok(Ok(age)) if age > MAKING => State::Stale,
                _ => State::Unknown,
            }
        }
        // Damaged, or of another version: dead all the same when nobody holds the lock that its header speaks of.
        Err(
            ReadError::Version { locked: Some(locked), .. } | ReadError::Damaged { locked: Some(locked), .. },
        ) => {
            if *locked {
                State::Live
            } else {
                State::Stale
            }
        }
        Err(_) => State::Unknown,
    }
}

/// What a sweep did.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Files removed.
    pub removed: usize,
    /// Files of dead processes that could not be removed.
    pub failed: usize,
}

/// Removes the records of dead processes from `directory`; never one whose lock is held or can't be told.
pub fn sweep(directory: &Path) -> Swept {
    let mut swept = Swept::default();
    for found in list(directory).unwrap_or_default() {
        if found.state != State::Stale {
            continue;
        }
        match remove(&found) {
            Ok(()) => swept.removed += 1,
            Err(_) => swept.failed += 1,
        }
    }
    swept
}

fn remove(found: &Found) -> io::Result<()> {
    // The name must still be the file that we judged: names are never used twice, but a name can be replaced.
    if let Ok(reader) = &found.reader {
        let now = std::fs::symlink_metadata(&found.path)?;
        if reader.identity() != Some((now.dev(), now.ino())) {
            return Err(io::ErrorKind::NotFound.into());
        }
    }
    std::fs::remove_file(&found.path)
}
