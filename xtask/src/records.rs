//! The records of what a test run starts: in a folder of the run's own, and nothing of them is left
//! when it ends.
//!
//! Test programs have folders of their own (.cargo/test-runner); this is for what the parts start
//! beside them.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::runner::{Counts, Outcome};

/// As in record/src/record_dir.rs.
const VARIABLE: &str = "GRUYERE_RECORD_DIR";
const DEFAULT: &str = "/dev/shm";
/// As in .cargo/test-runner.
const FOLDERS: &str = "gruyere-test-records.";

/// A test run's records.
pub struct Records {
    folder: TempDir,
    places: [Place; 2],
}

/// Where nothing may be left.
struct Place {
    folder: PathBuf,
    prefix: &'static str,
    before: BTreeSet<OsString>,
}

impl Records {
    /// Makes the folder, and notes what is there already. Children are to find it in the
    /// environment: [`Records::variable`].
    ///
    /// # Errors
    /// It can't be made.
    pub fn begin() -> Result<Records, String> {
        // In memory, as records are, where it can be.
        let temporary = std::env::temp_dir();
        let places =
            [Place::new(DEFAULT.into(), "gruyere-"), Place::new(temporary.clone(), FOLDERS)];
        let folder = TempDir::with_prefix_in(FOLDERS, DEFAULT)
            .or_else(|_| TempDir::with_prefix(FOLDERS))
            .map_err(|error| format!("{}: {error}; set TMPDIR", temporary.display()))?;
        Ok(Records { folder, places })
    }

    /// The variable's name and value.
    pub fn variable(&self) -> (&'static str, &Path) {
        (VARIABLE, self.folder.path())
    }

    /// Removes the folder; fails where something of the run is left.
    pub fn end(self) -> Outcome {
        let path = self.folder.path().display().to_string();
        let removed = self.folder.close().map_err(|error| format!("{path}: {error}"));
        let left: Vec<PathBuf> = self.places.iter().flat_map(Place::left).collect();
        match removed {
            Err(reason) => Outcome::Failed(Counts::default(), reason),
            Ok(()) if left.is_empty() => Outcome::Passed(Counts::default()),
            Ok(()) => {
                let names: Vec<_> = left.iter().map(|path| path.display().to_string()).collect();
                let reason = format!(
                    "left behind by a test (or by another program of yours that was killed \
                     meanwhile): {}",
                    names.join(" ")
                );
                Outcome::Failed(Counts::default(), reason)
            }
        }
    }
}

impl Place {
    fn new(folder: PathBuf, prefix: &'static str) -> Place {
        let before = names(&folder, prefix);
        Place { folder, prefix, before }
    }

    /// What has come since, and is not of a process that runs.
    fn left(&self) -> Vec<PathBuf> {
        let now = names(&self.folder, self.prefix);
        now.difference(&self.before)
            .filter(|name| !is_of_a_process_that_runs(&name.to_string_lossy()))
            .map(|name| self.folder.join(name))
            .collect()
    }
}

fn names(folder: &Path, prefix: &str) -> BTreeSet<OsString> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().starts_with(prefix))
        .collect()
}

/// Whether a record's name (`gruyere-NAMESPACE-PID-START-COUNT.record`) is that of a process here,
/// by its number and the time of its start.
fn is_of_a_process_that_runs(name: &str) -> bool {
    let mut parts = name.split('-').skip(2);
    let (Some(pid), Some(start)) = (parts.next(), parts.next()) else { return false };
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The fields behind the command in brackets are the 3rd and on; the 22nd is the start.
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(19)) == Some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_behind_is_found_and_what_was_there_or_runs_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(folder.path().join(name), "").unwrap();
        write("gruyere-1-4194305-7-0.record");
        let place = Place::new(folder.path().to_path_buf(), "gruyere-");
        assert!(place.left().is_empty());
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let start = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().to_owned();
        write(&format!("gruyere-1-{}-{start}-0.record", std::process::id()));
        write("others-1-4194305-7-0.record");
        assert!(place.left().is_empty());
        write(&format!("gruyere-1-{}-1{start}-0.record", std::process::id()));
        write("gruyere-1-4194306-7-0.record");
        assert_eq!(place.left().len(), 2);
    }

    #[test]
    fn the_run_s_folder_goes_with_it() {
        let records = Records::begin().unwrap();
        let folder = records.variable().1.to_path_buf();
        std::fs::write(folder.join("gruyere-1-2-3-0.record"), "").unwrap();
        drop(records.end());
        assert!(!folder.exists());
    }
}
