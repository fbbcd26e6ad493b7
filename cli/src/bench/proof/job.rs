//! A measurement of the proof, in a process of its own: each process has a single Gruyère heap, so
//! parallel jobs need processes of their own.

use crate::signals;
use gruyere_replay::allocator::AllocError;
use gruyere_replay::bench::{BenchError, Contender, ample, smallest_device};
use gruyere_replay::floor::{self, Ends};
use gruyere_replay::observe::{Observed, observe};
use gruyere_replay::stage::{Charge, Setup};
use gruyere_replay::trace::{Trace, drawn_order};
use gruyere_replay::{Costs, Prices};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A measurement and its trace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The trace.
    pub source: Source,
    /// What to measure.
    pub task: Task,
    /// Prices of driver calls: a name or a file's path.
    pub prices: String,
}

/// Origin of a trace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Source {
    /// The file, or the files to join.
    pub paths: Vec<PathBuf>,
    /// Changes the sizes by this seed.
    pub jitter: Option<u64>,
    /// Joins this many pieces, in an order drawn from the seed.
    pub joined: Option<(usize, u64)>,
}

/// A measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Task {
    /// Best end of the device's work.
    Ends,
    /// A run of an allocator.
    Observe { who: Who, clock: Clock, room: Room },
    /// The smallest device that completes.
    Fit { who: Who },
}

/// An allocator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Who {
    Torch,
    Expandable,
    Gruyere(String),
}

/// Which operations take time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Clock {
    /// Nothing.
    Still,
    /// Kernels and launches; driver calls are free.
    CallsFree,
    /// Kernels, launches and driver calls.
    CallsCharged,
}

/// Size of the device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Room {
    /// Room to spare.
    Ample,
    /// This many times the peak of live.
    Times(f64),
}

/// A job's results.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The trace's name.
    pub trace: String,
    /// Its mallocs and frees.
    pub operations: u64,
    /// Its peak of live, bytes.
    pub peak_live: u64,
    /// The figures.
    pub found: Found,
}

/// The figures of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Found {
    Ends(Ends),
    Observed(Observed),
    /// Smallest device, bytes; `None`: no device completes.
    Fit(Option<u64>),
    /// The configuration was refused.
    Refused(String),
}

impl Source {
    /// A single file, unchanged or with other sizes.
    pub fn file(path: PathBuf, jitter: Option<u64>) -> Self {
        Self { paths: vec![path], jitter, joined: None }
    }

    /// Reads the trace.
    ///
    /// # Errors
    /// A file's error.
    pub fn read(&self) -> Result<Trace, String> {
        let read = |path: &PathBuf| {
            let trace = Trace::open(path).map_err(|error| error.to_string())?;
            Ok::<_, String>(self.jitter.map(|seed| trace.jittered(seed)).unwrap_or(trace))
        };
        let mut traces = self.paths.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        match self.joined {
            None if traces.len() == 1 => Ok(traces.remove(0)),
            None => Err("more than one file, and nothing said of joining them".to_owned()),
            Some((count, seed)) => {
                let pieces: Vec<&Trace> = drawn_order(traces.len(), count, seed)
                    .into_iter()
                    .map(|index| &traces[index])
                    .collect();
                Trace::joined(&format!("{count} joined"), &pieces)
                    .map_err(|error| error.to_string())
            }
        }
    }
}

impl From<&Who> for Contender {
    fn from(who: &Who) -> Self {
        match who {
            Who::Torch => Self::Torch,
            Who::Expandable => Self::Expandable,
            Who::Gruyere(conf) => Self::Gruyere(conf.clone()),
        }
    }
}

impl Job {
    /// Runs the job in this process.
    ///
    /// # Errors
    /// The trace's error, or why it cannot be measured. A refused configuration is a result.
    pub fn run(&self) -> Result<Answer, String> {
        let trace = self.source.read()?;
        let prices = Prices::open(&self.prices).map_err(|error| error.to_string())?.costs;
        let found = match self.measure(&trace, prices) {
            Ok(found) => found,
            Err(BenchError::SetUp(AllocError::Setup(why))) => Found::Refused(why),
            Err(error) => return Err(format!("{}: {error}", trace.name)),
        };
        Ok(Answer {
            operations: trace.operations,
            peak_live: trace.peak_live,
            trace: trace.name,
            found,
        })
    }

    fn measure(&self, trace: &Trace, prices: Costs) -> Result<Found, BenchError> {
        Ok(match &self.task {
            Task::Ends => Found::Ends(floor::ends(trace, &prices)?),
            Task::Fit { who } => Found::Fit(smallest_device(trace, &who.into())?),
            Task::Observe { who, clock, room } => {
                let capacity = match room {
                    Room::Ample => ample(trace),
                    Room::Times(times) => (trace.peak_live as f64 * times) as u64,
                };
                let setup = match clock {
                    Clock::Still => Setup { oracle: true, ..Setup::instant(capacity) },
                    Clock::CallsFree => Setup::timeline(capacity, Charge::Program),
                    Clock::CallsCharged => Setup::timeline(capacity, Charge::DriverCalls),
                };
                Found::Observed(observe(trace, &who.into(), Setup { prices, ..setup })?)
            }
        })
    }

    /// Runs the job in another process of this program.
    ///
    /// # Errors
    /// As [`Job::run`]; or the other process could not run.
    pub fn run_apart(&self) -> Result<Answer, String> {
        let this =
            std::env::current_exe().map_err(|error| format!("this program's own file: {error}"))?;
        let text = serde_json::to_string(self).map_err(|error| error.to_string())?;
        let mut command = Command::new(&this);
        let output = signals::ends_with_us(&mut command)
            .args(["bench", "proof", "--job", &text])
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("{}: {error}", this.display()))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{} ({})", said.trim(), output.status));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| {
            format!(
                "a process of the proof said {:?}: {error}",
                String::from_utf8_lossy(&output.stdout)
            )
        })
    }
}
