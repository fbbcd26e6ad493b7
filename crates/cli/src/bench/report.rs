//! The report: the contents of bench.json, and the source of table and chart.

use super::schedule::Runs;
use super::{Args, Device};
use gruyere_replay::Prices;
use gruyere_replay::bench::{Run, live_curve};
use gruyere_replay::clock::Clock;
use gruyere_replay::trace::{Op, Trace};
use serde::Serialize;
use std::path::Path;
use std::process::Command;

/// Raised when a field changes its meaning or is removed, not for new fields.
const SCHEMA_VERSION: u32 = 2;

/// bench.json.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Always `gruyere.bench`.
    pub schema: &'static str,
    /// Version of the schema.
    pub version: u32,
    /// When the report was made, RFC 3339, UTC.
    pub date: String,
    /// Version of the command.
    pub gruyere: &'static str,
    /// The command's commit in a checkout, `-dirty` if files differ from it; absent elsewhere.
    pub git_commit: Option<String>,
    /// The machine of the run.
    pub machine: Machine,
    /// `stand-in` or `cuda`.
    pub device: &'static str,
    /// The requested further configurations of Gruyère.
    pub confs: Vec<String>,
    /// The measurements beside the peaks.
    pub measured: Measured,
    /// The traces.
    pub traces: Vec<TraceReport>,
    /// The small programs (`traces/small`).
    pub small: Vec<TraceReport>,
}

/// The machine of a report.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// Model of the processor.
    pub cpu: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Operating system and architecture.
    pub os: String,
}

/// The measurements beside the peaks.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// The clock of all figures, then the further clocks for held memory.
    pub clocks: Vec<Clock>,
    /// The smallest device that completes.
    pub fit: bool,
    /// Device and host time.
    pub timeline: bool,
    /// The prices of driver calls on the timeline: a name, or a file's path.
    pub prices: String,
}

/// A trace. Bytes.
#[derive(Clone, Debug, Serialize)]
pub struct TraceReport {
    /// Its name.
    pub trace: String,
    /// Whether it has the program's kernels; without, the device is done at once on each clock.
    #[serde(skip)]
    pub has_kernels: bool,
    /// Allocations and frees.
    pub operations: u64,
    /// Streams, the default one included.
    pub streams: usize,
    /// Highest sum of live blocks, each rounded up to 512 bytes.
    pub peak_live: u64,
    /// Live memory over the operations: the highest value in each of equal parts.
    pub live_curve: Vec<u64>,
    /// Each allocator's run.
    pub runs: Vec<Run>,
}

impl Report {
    /// The report of `runs`, a list for each of `traces`, and of the runs of the small programs.
    pub fn new(
        (traces, runs): (&[Trace], Runs),
        (small, of_small): (&[Trace], Runs),
        args: &Args,
        prices: &Prices,
    ) -> Self {
        let each = |(trace, runs): (&Trace, Vec<Run>)| TraceReport {
            trace: trace.name.clone(),
            has_kernels: trace.ops.iter().any(|op| matches!(op, Op::Kernels { .. })),
            operations: trace.operations,
            streams: trace.streams.len(),
            peak_live: trace.peak_live,
            live_curve: live_curve(trace),
            runs,
        };
        Self {
            schema: "gruyere.bench",
            version: SCHEMA_VERSION,
            date: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            gruyere: env!("CARGO_PKG_VERSION"),
            git_commit: git_commit(),
            machine: Machine::here(),
            device: match args.device {
                Device::StandIn => "stand-in",
                Device::Cuda => "cuda",
            },
            confs: args.conf.clone(),
            measured: Measured {
                clocks: args.clock.clone(),
                fit: args.fit,
                timeline: args.has_timeline(),
                prices: prices.name.clone(),
            },
            traces: traces.iter().zip(runs).map(each).collect(),
            small: small.iter().zip(of_small).map(each).collect(),
        }
    }

    /// Every run with its trace, including the small programs.
    pub fn runs(&self) -> impl Iterator<Item = (&TraceReport, &Run)> {
        let all = self.traces.iter().chain(&self.small);
        all.flat_map(|trace| trace.runs.iter().map(move |run| (trace, run)))
    }

    /// The JSON text, ending in a newline.
    ///
    /// # Errors
    /// Never in practice: all maps have strings as keys.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self).map(|text| text + "\n")
    }
}

impl Machine {
    fn here() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Self {
            cpu: model.map_or("unknown", |(_, name)| name).to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            os: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

fn git_commit() -> Option<String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]).current_dir(here);
    let output = git.output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout)
        .ok()
        .map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty())
}
