//! One look at all records of the folder.
//!
//! Records come and go, some cannot be read, and those of other containers may claim to be anybody: nothing of that may spoil what the
//! others say. Two samples with the same labels would make a scrape invalid as a whole, so a second record of the same process is left out.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::Instant;

use gruyere::record::ReadError;
use gruyere::record::facts;

use super::exposition::{Family, Kind, Labels, Value};
use super::families::{Families, Identity, Of, of_record};
use crate::failure::{Failure, say};
use crate::target::Folder;

/// Looks at records, and remembers what may not fall.
pub struct Collector {
    folder: Folder,
    job: Option<String>,
    most: usize,
    namespace: u64,
    /// By family, labels and birth: where counters were at the last look.
    reached: HashMap<(&'static str, Labels, u64), Value>,
    /// Files whose trouble has been told.
    told: HashSet<PathBuf>,
    read_errors: u64,
    looks: u64,
}

/// How many records of each state there were.
#[derive(Default)]
struct States {
    live: u64,
    stale: u64,
    unreadable: u64,
    forbidden: u64,
    duplicate: u64,
    beyond: u64,
}

impl Collector {
    /// For the records of `folder`. `job` is what all processes are said to belong to; of more than `most` processes the rest are left out.
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
        }
    }

    /// Looks once.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn look(&mut self) -> Result<Vec<Family>, Failure> {
        let began = Instant::now();
        let (mut found, stale) = self.folder.living()?;
        // The newest processes first, should there be too many: those that matter run now.
        found.sort_by_key(|found| {
            std::cmp::Reverse(found.reader.as_ref().map_or(0, |reader| reader.process().created))
        });
        let mut families = Families::default();
        let mut states = States { stale: stale as u64, ..States::default() };
        let mut seen = HashSet::new();
        for found in found {
            match found.reader {
                Ok(reader) => {
                    let process = reader.process();
                    let identity = Identity::new(&process, self.namespace, self.job.as_deref());
                    if seen.contains(identity.unique()) {
                        states.duplicate += 1;
                    } else if seen.len() == self.most {
                        states.beyond += 1;
                    } else {
                        states.live += 1;
                        seen.insert(identity.unique().to_owned());
                        of_record(&mut families, &reader, &process, &identity);
                    }
                }
                // Another user's, of whom we are not meant to know.
                Err(error) if is_forbidden(&error) => states.forbidden += 1,
                Err(error) => {
                    states.unreadable += 1;
                    self.read_errors += 1;
                    self.tell(&error);
                }
            }
        }
        self.looks += 1;
        self.about_us(&mut families, &states);
        let said = (
            "gruyere_exporter_scrape_duration_seconds",
            "seconds",
            "How long this look at the records took.",
        );
        families.number(said, &Of::labels(&[]), began.elapsed().as_secs_f64());
        let mut families = families.into_inner();
        self.hold(&mut families);
        Ok(families)
    }

    fn about_us(&self, families: &mut Families, states: &States) {
        let of = Of::labels(&[("version", env!("CARGO_PKG_VERSION"))]);
        families.add(Kind::Info, ("gruyere_exporter_build", "", "This exporter."), &of, Value::Count(1));
        let States { live, stale, unreadable, forbidden, duplicate, beyond } = *states;
        for (state, count) in [
            ("live", live),
            ("stale", stale),
            ("unreadable", unreadable),
            ("forbidden", forbidden),
            ("duplicate", duplicate),
            ("beyond_limit", beyond),
        ] {
            let said = (
                "gruyere_exporter_records",
                "",
                "Records in the folder; only those that are live are exported.",
            );
            families.gauge(said, &Of::labels(&[("state", state)]), count);
        }
        let of = Of::labels(&[]);
        let said = (
            "gruyere_exporter_read_errors",
            "",
            "Records that could not be read, each time that they were tried.",
        );
        families.counter(said, &of, self.read_errors);
        families.counter(("gruyere_exporter_scrapes", "", "Looks at the records."), &of, self.looks);
    }

    /// Counters only rise, though a record is read while it is written: a sum over lanes may come out one short of what it was.
    fn hold(&mut self, families: &mut [Family]) {
        let mut reached = HashMap::new();
        for family in
            families.iter_mut().filter(|family| matches!(family.kind, Kind::Counter | Kind::Histogram))
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

    /// Tells of a record's trouble once.
    fn tell(&mut self, error: &ReadError) {
        // Names are never used twice, so the set is bounded by forgetting it now and then.
        if self.told.len() >= 1024 {
            self.told.clear();
        }
        if self.told.insert(error.path().to_owned()) {
            say("export", format_args!("{error}"));
        }
    }
}

fn is_forbidden(error: &ReadError) -> bool {
    matches!(error, ReadError::Open { error, .. } if error.kind() == std::io::ErrorKind::PermissionDenied)
}

/// Lifts `value` to what it was before, where it is less.
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
        let folder = Folder { directory: "/nowhere".into() };
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
        assert_eq!(look(Kind::Counter, 1, 8), Value::Count(1), "a process of the same pid that began later");
        assert_eq!(look(Kind::Gauge, 9, 8), Value::Count(9));
        assert_eq!(look(Kind::Gauge, 3, 8), Value::Count(3), "gauges fall");
    }
}
