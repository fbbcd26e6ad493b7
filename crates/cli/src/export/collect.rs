//! Reads all records of the folder once.
//!
//! Records come and go, some are unreadable, and any user may write one that claims to be another
//! process's: none of these may spoil the rest. Two samples with the same labels would make a whole
//! scrape invalid: a second record of a process gets a label of its own, and a record whose claim
//! is known to be false is only counted.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use gruyere_record::claim::Claim;
use gruyere_record::open::effective_user;
use gruyere_record::sweep::{self, Found, Listing};
use gruyere_record::{ReadError, Reader, facts};

use super::exits::Exits;
use super::exposition::{Family, Kind, Labels, Value};
use super::families::{Families, Identity, Of, of_record};
use crate::failure::{Failure, say};
use crate::sites::SeldomRead;
use crate::target::Folder;

/// Reads records, and remembers the values that may not fall.
pub struct Collector {
    folder: Folder,
    job: Option<String>,
    most: usize,
    namespace: u64,
    /// Counters at the last scrape, by family, labels and birth.
    reached: HashMap<(&'static str, Labels, u64), Value>,
    /// Files whose trouble has been reported.
    told: HashSet<PathBuf>,
    read_errors: u64,
    looks: u64,
    lines: SeldomRead,
    exits: Exits,
}

/// Number of records by state.
#[derive(Default)]
struct States {
    live: u64,
    stale: u64,
    unreadable: u64,
    forbidden: u64,
    foreign: u64,
    claimed: u64,
    duplicate: u64,
    beyond: u64,
    /// Of the live ones: the process is in another pid namespace, or hidden, and only the file's
    /// owner vouches for it.
    unseen: u64,
}

impl Collector {
    /// Collects the records of `folder`. `job` overrides the job of all processes; only `most`
    /// processes are exported.
    pub fn new(folder: Folder, job: Option<String>, most: usize) -> Collector {
        Collector {
            folder,
            job,
            most,
            namespace: facts::pid_namespace(),
            reached: HashMap::new(),
            told: HashSet::new(),
            read_errors: 0,
            looks: 0,
            lines: SeldomRead::default(),
            exits: Exits::default(),
        }
    }

    /// Notes which processes run and which have ended: ends count from here on.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn begin(&mut self) -> Result<(), Failure> {
        self.exits.look(&self.folder.living()?, self.folder.owners());
        Ok(())
    }

    /// Reads all records once.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn look(&mut self) -> Result<Vec<Family>, Failure> {
        let began = Instant::now();
        let listing = self.folder.living()?;
        self.exits.look(&listing, self.folder.owners());
        let Listing { mut found, stale, foreign } = listing;
        // If there are too many: our own before other users', verified before unverified, and the
        // newest first, which run now.
        found.sort_by_cached_key(|Found { reader, claim, .. }| {
            let reader = reader.as_ref().ok();
            let is_ours = reader.and_then(Reader::owner) == Some(effective_user());
            let created = reader.map_or(0, |reader| reader.process().created);
            (!is_ours, *claim != Claim::Seen, std::cmp::Reverse(created))
        });
        let mut families = Families::default();
        let mut states =
            States { stale: stale.len() as u64, foreign: foreign as u64, ..States::default() };
        let mut seen = HashSet::new();
        for Found { path, reader, claim, .. } in found {
            if let Claim::False(lie) = claim {
                states.claimed += 1;
                self.tell(
                    &path,
                    format_args!("{} {lie}; it is counted, but not exported", path.display()),
                );
                continue;
            }
            match reader {
                Ok(_) if states.live == self.most as u64 => states.beyond += 1,
                Ok(reader) => match self.export(&reader, &mut seen) {
                    Ok(None) => states.duplicate += 1,
                    Ok(Some(of_it)) => {
                        states.live += 1;
                        states.unseen += u64::from(claim == Claim::Unseen);
                        families.append(of_it);
                    }
                    Err(error) => self.unreadable(&error, &mut states),
                },
                // Another user's, which we may not read.
                Err(error) if is_forbidden(&error) => states.forbidden += 1,
                Err(error) => self.unreadable(&error, &mut states),
            }
        }
        self.looks += 1;
        self.about_us(&mut families, &states);
        let said = (
            "gruyere_exporter_scrape_duration_seconds",
            "seconds",
            "Time that this scan of the records took.",
        );
        families.number(said, &Of::labels(&[]), began.elapsed().as_secs_f64());
        let mut families = families.into_inner();
        self.hold(&mut families);
        Ok(families)
    }

    /// Exports a record, if it can be believed; `None`: another record claims to be the very same.
    fn export(
        &mut self,
        reader: &Reader<'_>,
        seen: &mut HashSet<String>,
    ) -> Result<Option<Families>, ReadError> {
        let process = reader.process();
        let mut identity = Identity::new(&process, self.namespace, self.job.as_deref());
        identity.of_record(sweep::number(reader.path()));
        if let Some(owner) = reader.owner().filter(|&owner| owner != effective_user()) {
            identity.of_user(owner);
        }
        let mut families = Families::default();
        of_record(&mut families, reader, &process, &identity, &mut self.lines);
        reader.expect_sound()?;
        Ok(seen.insert(identity.unique()).then_some(families))
    }

    fn unreadable(&mut self, error: &ReadError, states: &mut States) {
        states.unreadable += 1;
        self.read_errors += 1;
        self.tell(error.path(), error.in_folder());
    }

    fn about_us(&self, families: &mut Families, states: &States) {
        let of = Of::labels(&[("version", env!("CARGO_PKG_VERSION"))]);
        families.add(
            Kind::Info,
            ("gruyere_exporter_build", "", "This exporter."),
            &of,
            Value::Count(1),
        );
        let States {
            live,
            stale,
            unreadable,
            forbidden,
            foreign,
            claimed,
            duplicate,
            beyond,
            unseen,
        } = *states;
        for (state, count) in [
            ("live", live),
            ("stale", stale),
            ("unreadable", unreadable),
            ("forbidden", forbidden),
            ("of_other_users", foreign),
            ("claimed", claimed),
            ("duplicate", duplicate),
            ("beyond_limit", beyond),
        ] {
            let said = (
                "gruyere_exporter_records",
                "",
                "Records in the folder; only live ones are exported.",
            );
            families.gauge(said, &Of::labels(&[("state", state)]), count);
        }
        for (exit, count) in self.exits.counts() {
            let said = (
                "gruyere_exporter_process_exits",
                "",
                "Processes that ended since the exporter began, by how.",
            );
            families.counter(said, &Of::labels(&[("exit", exit)]), count);
        }
        let of = Of::labels(&[]);
        let said = (
            "gruyere_exporter_unseen_processes",
            "",
            "Live records whose process can't be seen from here; only the file's owner vouches for \
             them.",
        );
        families.gauge(said, &of, unseen);
        let said = (
            "gruyere_exporter_read_errors",
            "",
            "Failed reads of records, counted at each attempt.",
        );
        families.counter(said, &of, self.read_errors);
        families.counter(
            ("gruyere_exporter_scrapes", "", "Scans of the records."),
            &of,
            self.looks,
        );
    }

    /// Keeps counters from falling: a record is read while it is written, so a sum over shards may
    /// come out short of its last value.
    fn hold(&mut self, families: &mut [Family]) {
        let mut reached = HashMap::new();
        for family in families
            .iter_mut()
            .filter(|family| matches!(family.kind, Kind::Counter | Kind::Histogram))
        {
            for sample in &mut family.samples {
                let key = (family.name, sample.labels.clone(), sample.born);
                if let Some(before) = self.reached.get(&key) {
                    raise(&mut sample.value, before);
                }
                reached.insert(key, sample.value.clone());
            }
        }
        self.reached = reached;
    }

    /// Reports a record's trouble once.
    fn tell(&mut self, path: &Path, trouble: impl std::fmt::Display) {
        // Names are never reused, so clearing the set now and then bounds it.
        if self.told.len() >= 1024 {
            self.told.clear();
        }
        if self.told.insert(path.to_owned()) {
            say("export", trouble);
        }
    }
}

fn is_forbidden(error: &ReadError) -> bool {
    matches!(
        error, ReadError::Open { error, .. } if error.kind() == std::io::ErrorKind::PermissionDenied
    )
}

/// Raises `value` to its last value.
fn raise(value: &mut Value, before: &Value) {
    match (value, before) {
        (Value::Count(now), Value::Count(before)) => *now = (*now).max(*before),
        (Value::Number(now), Value::Number(before)) => *now = now.max(*before),
        (Value::Buckets(now, sum), Value::Buckets(before, sum_before)) => {
            *sum = sum.max(*sum_before);
            for ((_, now), (_, before)) in now.iter_mut().zip(before) {
                *now = (*now).max(*before);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::exposition::Sample;

    #[test]
    fn counters_never_fall_unless_it_is_another_process() {
        let folder = Folder { directory: "/nowhere".into(), all_users: false };
        let mut collector = Collector::new(folder, None, 1);
        let mut look = |kind, value: u64, born| {
            let mut family = Family::new("x", kind, "", "X.");
            let labels = Labels::new(&[("pid", "1")]);
            family.samples.push(Sample { labels, value: Value::Count(value), born });
            let mut families = [family];
            collector.hold(&mut families);
            families[0].samples[0].value.clone()
        };
        assert_eq!(look(Kind::Counter, 5, 7), Value::Count(5));
        assert_eq!(look(Kind::Counter, 4, 7), Value::Count(5));
        assert_eq!(look(Kind::Counter, 6, 7), Value::Count(6));
        assert_eq!(
            look(Kind::Counter, 1, 8),
            Value::Count(1),
            "a process of the same pid that began later"
        );
        assert_eq!(look(Kind::Gauge, 9, 8), Value::Count(9));
        assert_eq!(look(Kind::Gauge, 3, 8), Value::Count(3), "gauges fall");
    }
}
