//! Counts the processes that ended, by how.
//!
//! A process's own counters go with it, mostly before they are scraped again, and its record goes
//! too, if newer ones take its place: only a count that the exporter keeps tells of an end later.
//! A record that newer processes have removed before the first look at it counts as `clean`.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};
use std::path::Path;

use gruyere_record::claim::Claim;
use gruyere_record::sweep::{self, Found, Listing, State};
use gruyere_record::{Owners, Reader};

use crate::candidates;
use crate::ending;

/// How processes end, as in `gruyere ps --json`; `clean`: the record is gone.
const EXITS: [&str; 5] = ["clean", "out_of_memory", "refused", "unclean", "unknown"];
const CLEAN: usize = 0;
const UNKNOWN: usize = 4;

/// The processes at the last look, and those that ended since the first.
#[derive(Default)]
pub struct Exits {
    /// Those that ran, and whether they had a file.
    running: HashMap<String, bool>,
    /// Those of which only a record was left; `None` before the first look.
    dead: Option<HashSet<String>>,
    counts: [u64; EXITS.len()],
}

impl Exits {
    /// Compares the records with those of the last look. Records of dead processes that are there
    /// at the first look do not count.
    pub fn look(&mut self, listing: &Listing, owners: Owners) {
        let mut running: HashMap<String, bool> = HashMap::new();
        let mut dead: HashMap<String, Vec<&Path>> = HashMap::new();
        for found in &listing.found {
            match (&found.claim, name(found)) {
                (Claim::False(_), _) | (_, None) => {}
                (_, Some(name)) if found.state == State::Stale => {
                    dead.entry(name).or_default().push(&found.path);
                }
                (_, Some(name)) => {
                    *running.entry(name).or_default() |= sweep::is_record(&found.path)
                }
            }
        }
        for path in &listing.stale {
            if let Some(name) = sweep::stem(path) {
                dead.entry(name.to_owned()).or_default().push(path);
            }
        }
        // A process that leaves a copy has not ended yet.
        dead.retain(|name, _| !running.contains_key(name));
        if let Some(before) = &self.dead {
            for (name, records) in dead.iter().filter(|(name, _)| !before.contains(*name)) {
                if let Some(exit) = exit(records, owners) {
                    self.counts[exit] += 1;
                }
                self.running.remove(name);
            }
            let gone = self.running.iter().filter(|(name, _)| !running.contains_key(*name));
            for (_, had_file) in gone {
                // Without a file, a process leaves nothing, however it ends.
                self.counts[if *had_file { CLEAN } else { UNKNOWN }] += 1;
            }
        }
        self.dead = Some(dead.into_keys().collect());
        self.running = running;
    }

    /// The counts by exit.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        EXITS.into_iter().zip(self.counts)
    }
}

/// A process's name: that of its records without their numbers.
fn name(found: &Found) -> Option<String> {
    match &found.reader {
        Ok(reader) if !sweep::is_record(&found.path) => {
            let process = reader.process();
            let name = gruyere_record::mapping::file_name(
                process.pid_namespace,
                process.pid,
                process.start_time,
                0,
            );
            sweep::stem(Path::new(&name)).map(str::to_owned)
        }
        _ => sweep::stem(&found.path).map(str::to_owned),
    }
}

/// How the process that left these records ended; `None`: it is another user's, or a lie.
fn exit(records: &[&Path], owners: Owners) -> Option<usize> {
    let open = |path: &&Path| match Reader::open_of(path, owners) {
        Err(error) if error.is_foreign() => None,
        opened => Some(opened),
    };
    let opened: Vec<_> = records.iter().filter_map(open).collect();
    let readers: Vec<&Reader<'_>> =
        opened.iter().filter_map(|reader| reader.as_ref().ok()).collect();
    if readers.is_empty() {
        return (!opened.is_empty()).then_some(UNKNOWN);
    }
    let reader = readers[ending::telling(&readers)];
    if matches!(Claim::of(reader), Claim::False(_)) {
        return None;
    }
    Some(match candidates::Exit::of_record(reader) {
        candidates::Exit::OutOfMemory => 1,
        candidates::Exit::Refused => 2,
        candidates::Exit::Unclean => 3,
        candidates::Exit::Runs | candidates::Exit::Unknown => UNKNOWN,
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn listing(stale: &[u64], folder: &Path) -> Listing {
        let path = |pid: &u64| folder.join(gruyere_record::mapping::file_name(1, *pid, 5, 0));
        let stale: Vec<PathBuf> = stale.iter().map(path).collect();
        for path in &stale {
            std::fs::write(path, "damaged").expect("a file");
        }
        Listing { stale, ..Listing::default() }
    }

    #[test]
    fn an_end_counts_once_and_those_before_the_first_look_never() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut exits = Exits::default();
        let mut look = |stale: &[u64]| {
            exits.look(&listing(stale, folder.path()), Owners::Mine);
            exits.counts().map(|(_, count)| count).sum::<u64>()
        };
        assert_eq!(look(&[1, 2]), 0);
        assert_eq!(look(&[1, 2, 3]), 1);
        // Older records go, and the count stays.
        assert_eq!(look(&[3, 4]), 2);
        assert_eq!(look(&[]), 2);
    }

    #[test]
    fn a_process_that_ran_and_left_no_record_ended_cleanly() {
        let mut exits = Exits { dead: Some(HashSet::new()), ..Exits::default() };
        exits.running = HashMap::from([("a".to_owned(), true), ("b".to_owned(), false)]);
        exits.look(&Listing::default(), Owners::Mine);
        assert_eq!(exits.counts[CLEAN], 1);
        assert_eq!(exits.counts[UNKNOWN], 1, "without a file nobody knows");
    }
}
