//! `cargo xtask proof`: every figure of every trace under every setting, as JSON on stdout.
//!
//! To compare two versions of the heap, or two configurations. Each measurement is a process of its
//! own (a process has a single heap), as many side by side as there are cores; no figure depends on
//! a clock, so two runs of one version print the same bytes. The promises among the figures are
//! held by `crates/replay/tests`. Exits with 3 if the oracle found a fault or a run ended before
//! the floor, with 4 if a trace did not complete with room to spare.

use clap::{Parser, ValueEnum};
use gruyere_replay::Prices;
use gruyere_replay::bench::{Contender, ample, smallest_device};
use gruyere_replay::floor::{self, Ends};
use gruyere_replay::observe::{Observed, observe};
use gruyere_replay::stage::{Charge, Setup};
use gruyere_replay::trace::{Trace, drawn_order};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Size of the small device, in peaks of live.
const SMALL: f64 = 1.02;
/// Seed of the order of the joined traces.
const JOINED_SEED: u64 = 1;
const FAULTS: u8 = 3;
const OUT_OF_MEMORY: u8 = 4;

/// Print every figure of traces under torch's models and under Gruyère, as JSON.
#[derive(Parser)]
#[command(name = "cargo xtask proof")]
struct Arguments {
    /// Traces, or folders of traces; the large ones of the source tree if none is named.
    traces: Vec<PathBuf>,
    /// Configuration of Gruyère (GRUYERE_CONF), beside the default; may be repeated.
    #[arg(long, value_name = "STRING")]
    conf: Vec<String>,
    /// Only this part; may be repeated.
    #[arg(long, value_enum, value_name = "PART")]
    part: Vec<Part>,
    /// Give the traces other sizes, drawn from SEED; may be repeated.
    #[arg(long, value_name = "SEED")]
    jitter: Vec<u64>,
    /// Prices of driver calls: by-call, by-mapping, by-mapping-and-page, or a JSON file.
    #[arg(long, value_name = "NAME|FILE", default_value = "by-call")]
    prices: String,
    /// Length of the part `joined`: this many traces one after the other, in an order drawn from a
    /// fixed seed.
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    joined: usize,
    /// One measurement, as JSON; prints its result.
    #[arg(long, hide = true, value_name = "JSON")]
    job: Option<String>,
}

/// What is measured of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Part {
    /// Held memory where nothing takes time.
    Hold,
    /// Held memory, end of the device's work and host time, with driver calls free and charged.
    Timeline,
    /// The timeline on a device of 1.02 times the peak of live.
    Small,
    /// The smallest device that completes.
    Fit,
    /// Held memory of the traces joined.
    Joined,
}

/// Traces of a measurement: one, or several to join.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Source {
    paths: Vec<PathBuf>,
    jitter: Option<u64>,
    joined: Option<usize>,
}

/// A measurement: a part of a trace under one setting.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Job {
    source: Source,
    part: Part,
    /// `torch`, `expandable`, or Gruyère's configuration.
    setting: Setting,
    prices: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Setting {
    Torch,
    Expandable,
    Gruyere(String),
}

/// The figures of a job; absent ones are of other parts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Row {
    trace: String,
    setting: String,
    operations: u64,
    /// Bytes.
    peak_live: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    hold: Option<Observed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    calls_free: Option<Observed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    calls_charged: Option<Observed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    small: Option<Observed>,
    /// Bounds of the end of the device's work under any allocator.
    #[serde(skip_serializing_if = "Option::is_none")]
    ends: Option<Ends>,
    /// Smallest device / peak live; null: no device completes.
    #[serde(skip_serializing_if = "Option::is_none")]
    fit_ratio: Option<Option<f64>>,
}

impl Source {
    fn read(&self) -> Outcome<Trace> {
        let read = |path: &PathBuf| {
            let trace = Trace::open(path)?;
            Ok::<_, Box<dyn std::error::Error>>(match self.jitter {
                Some(seed) => trace.jittered(seed),
                None => trace,
            })
        };
        let mut traces = self.paths.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let Some(count) = self.joined else { return Ok(traces.remove(0)) };
        let order = drawn_order(traces.len(), count, JOINED_SEED);
        let pieces: Vec<&Trace> = order.into_iter().map(|index| &traces[index]).collect();
        Ok(Trace::joined(&format!("{count} joined"), &pieces)?)
    }
}

impl Job {
    /// Measures in this process.
    fn run(&self) -> Outcome<Row> {
        let trace = self.source.read()?;
        let prices = Prices::open(&self.prices)?.costs;
        let contender = match &self.setting {
            Setting::Torch => Contender::Torch,
            Setting::Expandable => Contender::Expandable,
            Setting::Gruyere(conf) => Contender::Gruyere(conf.clone()),
        };
        let at = |setup| observe(&trace, &contender, Setup { prices, ..setup });
        let room = ample(&trace);
        let mut row = Row {
            trace: trace.name.clone(),
            setting: contender.name(),
            operations: trace.operations,
            peak_live: trace.peak_live,
            ..Row::default()
        };
        match self.part {
            Part::Hold | Part::Joined => {
                row.hold = Some(at(Setup { oracle: true, ..Setup::instant(room) })?);
            }
            Part::Timeline => {
                row.ends = Some(floor::ends(&trace, &prices)?);
                row.calls_free = Some(at(Setup::timeline(room, Charge::Program))?);
                row.calls_charged = Some(at(Setup::timeline(room, Charge::DriverCalls))?);
            }
            Part::Small => {
                let room = (trace.peak_live as f64 * SMALL) as u64;
                row.ends = Some(floor::ends(&trace, &prices)?);
                row.small = Some(at(Setup::timeline(room, Charge::DriverCalls))?);
            }
            Part::Fit => {
                let bytes = smallest_device(&trace, &contender)?;
                row.fit_ratio =
                    Some(bytes.map(|bytes| bytes as f64 / trace.peak_live.max(1) as f64));
            }
        }
        Ok(row)
    }

    /// Measures in a process of its own.
    fn run_apart(&self) -> Result<Row, String> {
        let why = |error: &dyn std::fmt::Display| format!("{self:?}: {error}");
        let this = std::env::current_exe().map_err(|error| why(&error))?;
        let text = serde_json::to_string(self).map_err(|error| why(&error))?;
        let output = Command::new(this)
            .args(["--job", &text])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| why(&error))?;
        if !output.status.success() {
            return Err(why(&output.status));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| why(&error))
    }
}

/// The jobs, in the order of their rows.
fn plan(arguments: &Arguments) -> Outcome<Vec<Job>> {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../traces");
    let named = if arguments.traces.is_empty() { vec![bundled] } else { arguments.traces.clone() };
    let mut paths = Vec::new();
    for path in named {
        match path.is_dir() {
            true => {
                let found = Trace::files_in(&path)?;
                if found.is_empty() {
                    return Err(format!("{}: no *.trace.zst in this folder", path.display()).into());
                }
                paths.extend(found);
            }
            false => paths.push(path),
        }
    }
    let settings: Vec<Setting> = [Setting::Torch, Setting::Expandable]
        .into_iter()
        .chain(
            std::iter::once(&String::new()).chain(&arguments.conf).cloned().map(Setting::Gruyere),
        )
        .collect();
    let wants = |part| arguments.part.is_empty() || arguments.part.contains(&part);
    let seeds: Vec<Option<u64>> = match arguments.jitter.as_slice() {
        [] => vec![None],
        seeds => seeds.iter().copied().map(Some).collect(),
    };
    let mut jobs = Vec::new();
    let mut add = |source: &Source, part: Part| {
        let (source, prices) = (source.clone(), arguments.prices.clone());
        let job = Job { source, part, setting: Setting::Torch, prices };
        jobs.extend(settings.iter().map(|one| Job { setting: one.clone(), ..job.clone() }));
    };
    for &jitter in &seeds {
        for path in &paths {
            let source = Source { paths: vec![path.clone()], jitter, joined: None };
            let parts = [Part::Fit, Part::Timeline, Part::Small, Part::Hold];
            parts.into_iter().filter(|&part| wants(part)).for_each(|part| add(&source, part));
        }
        if wants(Part::Joined) {
            let joined = Some(arguments.joined);
            add(&Source { paths: paths.clone(), jitter, joined }, Part::Joined);
        }
    }
    Ok(jobs)
}

/// Runs the jobs side by side; the rows are in the jobs' order.
fn carry_out(jobs: &[Job]) -> Result<Vec<Row>, String> {
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let rows = Mutex::new(vec![Row::default(); jobs.len()]);
    let (fail, failures) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let (fail, next, rows) = (fail.clone(), &next, &rows);
            scope.spawn(move || {
                while let Some((index, job)) =
                    jobs.iter().enumerate().nth(next.fetch_add(1, Ordering::Relaxed))
                {
                    match job.run_apart() {
                        Ok(row) => rows.lock().expect("no worker panics")[index] = row,
                        Err(error) => {
                            next.store(jobs.len(), Ordering::Relaxed);
                            let _ = fail.send(error);
                        }
                    }
                }
            });
        }
    });
    match failures.try_recv() {
        Ok(error) => Err(error),
        Err(_) => Ok(rows.into_inner().expect("no worker panics")),
    }
}

/// Prints what is wrong to stderr; returns the exit status.
fn verdict(rows: &[Row]) -> u8 {
    let mut status = 0;
    for row in rows {
        let mut say = |code, what: String| {
            eprintln!("{} on {}: {what}", row.setting, row.trace);
            if code == FAULTS || status == 0 {
                status = code;
            }
        };
        let runs = [&row.hold, &row.calls_free, &row.calls_charged];
        for run in runs.into_iter().flatten().filter(|run| !run.completed()) {
            say(OUT_OF_MEMORY, format!("out of memory at {} bytes", run.peak_reserved));
        }
        for run in runs.into_iter().chain([&row.small]).flatten() {
            run.faults.iter().for_each(|fault| say(FAULTS, fault.clone()));
        }
        // An end before the floor says that the floor is wrong.
        let floor = row.ends.map_or(0, |ends| ends.floor_ns);
        for run in [&row.calls_charged, &row.small].into_iter().flatten() {
            if run.completed() && run.device_end_ns < floor {
                say(FAULTS, format!("ends at {} ns, the floor is {floor}", run.device_end_ns));
            }
        }
    }
    status
}

fn main() -> Outcome<ExitCode> {
    let arguments = Arguments::parse();
    if let Some(job) = &arguments.job {
        println!("{}", serde_json::to_string(&serde_json::from_str::<Job>(job)?.run()?)?);
        return Ok(ExitCode::SUCCESS);
    }
    let rows = carry_out(&plan(&arguments)?)?;
    println!("{}", serde_json::to_string_pretty(&rows)?);
    Ok(ExitCode::from(verdict(&rows)))
}
