//! `gruyere bench`: real PyTorch traffic through Gruyère and through exact models of torch's own
//! allocators.

mod chart;
mod report;
mod schedule;
mod summary;
mod table;
pub mod torch;

use crate::failure::say;
use crate::output;
use crate::wrap::wrap;
use gruyere::config::Config;
use gruyere_record::file;
use gruyere_replay::Prices;
use gruyere_replay::bench::{Contender, Wanted};
use gruyere_replay::clock::Clock;
use gruyere_replay::trace::Trace;
use report::Report;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use summary::COLUMNS;

/// Failure to read, write or run.
const FAILED: u8 = 1;
/// Fault found by the oracle, the driver's books or an invariant.
const FAULTS: u8 = 3;
/// A trace did not complete although the device had room to spare.
const OUT_OF_MEMORY: u8 = 4;

const EXAMPLES: &str = "\
Examples:
  gruyere bench                     the bundled traces: seven large programs,
                                    and the small ones in a table of their own
  gruyere bench --full --fit --timeline
                                    all figures, with the smallest device that
                                    completes and the device's time
  gruyere bench --trace my.trace.zst --out /tmp
                                    a trace of your own (traces/FORMAT.md)
  gruyere bench --conf share:off --conf backing:fixed
                                    one more column per configuration
  gruyere bench --clock 0,5us,100us
                                    on devices that lag behind the host not at
                                    all, a little and a lot
  gruyere bench --prices by-mapping
                                    the device's time, with access priced per
                                    mapping
  gruyere bench --torch             real PyTorch programs, beside torch's real
                                    allocators (--torch --help)
  gruyere bench --device cuda --trace my.trace.zst
                                    the same on a real GPU

The bundled traces are in the source tree (traces/) and not in the Python package: run the \
command there, or name traces of your own with --trace. `--torch` needs none.

Exit codes: 0 success; 1 something could not be read, written or run; 2 wrong arguments; 3 the \
oracle, the driver's books or an invariant found a fault; 4 a trace did not complete.";

/// Replay real PyTorch traffic through Gruyère and through torch's own allocators.
///
/// Gruyère runs through its C ABI on a stand-in GPU with exact books and an oracle of stream order;
/// torch's default allocator and its expandable segments are models, equal to the real ones to the
/// byte. Prints which allocator holds the least and a table in per cent, and writes bench.json and
/// bench.svg.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Replay this trace, zstd-compressed or plain, in place of the bundled ones; may be repeated.
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Add a column for Gruyère configured with STRING, as in GRUYERE_CONF; may be repeated.
    #[arg(long, value_name = "STRING", conflicts_with = "models_only", value_parser = settings)]
    conf: Vec<String>,
    /// Print all figures, in wider tables: ratios, areas, driver calls, host time.
    #[arg(long)]
    full: bool,
    /// Also find the smallest device that completes each trace, by bisection.
    #[arg(long)]
    fit: bool,
    /// Time that a kernel takes on the stand-in GPU; a launch takes 8 us of host time, and the host
    /// runs at most 10 ms ahead of the device. 0: the device finishes its work at once. With
    /// several values, held memory is measured with each, all else with the first.
    #[arg(long, value_name = "TIME", value_delimiter = ',', default_value = "20us")]
    clock: Vec<Clock>,
    /// Also measure the device's time, with driver calls charged (for `--clock 0`: with 20us).
    #[arg(long)]
    timeline: bool,
    /// Prices of driver calls on the timeline: h200 (measured, the default), by-call, by-mapping,
    /// by-mapping-and-page, or a JSON file (also one from tests/gpu/probe). Implies --timeline.
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "device")]
    prices: Option<String>,
    /// Folder for bench.json and bench.svg.
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Print the JSON report in place of the table.
    #[arg(long)]
    json: bool,
    /// Leave Gruyère out.
    #[arg(long)]
    models_only: bool,
    /// What to replay on. `cuda` is the real driver; it replays Gruyère only, without kernels, and
    /// times the driver calls by kind, and the whole replay.
    #[arg(long, value_enum, default_value_t = Device::StandIn, value_name = "DEVICE")]
    device: Device,
    /// List the bundled traces and stop.
    #[arg(long)]
    list: bool,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    // A subcommand that is written as an option.
    #[command(long_flag = "torch")]
    Torch(Box<torch::Args>),
}

/// What the traces are replayed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// The stand-in GPU.
    StandIn,
    /// A real GPU.
    Cuda,
}

pub fn main(args: &Args) -> ExitCode {
    match bench(args) {
        Ok(code) => code,
        Err(error) => {
            say("bench", error);
            ExitCode::from(FAILED)
        }
    }
}

fn bench(args: &Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    if let Some(Command::Torch(args)) = &args.command {
        return Ok(torch::main(args));
    }
    let traces = traces(args)?;
    let small = if args.has_small() { small()? } else { Vec::new() };
    if args.list {
        for trace in traces.iter().chain(&small) {
            let gib = trace.peak_live as f64 / (1u64 << 30) as f64;
            let (name, operations) = (&trace.name, trace.operations);
            output::print(format_args!(
                "{name:<16} {operations:>9} operations  peak live {gib:>6.1} GiB\n"
            ))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    // A wrong `--out` must fail before the run.
    std::fs::create_dir_all(&args.out).map_err(|e| format!("{}: {e}", args.out.display()))?;
    let prices = args.prices()?;
    let wanted = args.wanted(&prices);
    let contenders = contenders(args);
    let runs = match args.device {
        Device::StandIn => schedule::on_phantom(&traces, &contenders, &wanted, true)?,
        Device::Cuda => schedule::on_cuda(&traces, &confs(args))?,
    };
    let of_small = schedule::on_phantom(&small, &contenders, &wanted, false)?;
    let report = Report::new((&traces, runs), (&small, of_small), args, &prices);
    let chart = chart::draw(&report);
    write(&args.out.join("bench.json"), &report.to_json()?)?;
    write(&args.out.join("bench.svg"), &chart)?;
    let text = match args.json {
        true => report.to_json()?,
        false => {
            let tables = if args.full { table::draw(&report) } else { summary::draw(&report) };
            let calls = table::driver_calls(&report);
            let written = written(args);
            format!("{}{tables}{calls}{written}", summary::verdict(&report))
        }
    };
    output::print(text)?;
    Ok(ExitCode::from(verdict(&report)))
}

impl Args {
    /// Whether to add the small programs to the bundled traces: only on the stand-in, since a real
    /// GPU's time is expensive.
    fn has_small(&self) -> bool {
        self.trace.is_empty() && self.device == Device::StandIn
    }

    fn wanted(&self, prices: &Prices) -> Wanted {
        let (clock, more) = self.clock.split_first().unwrap_or((&Clock::USUAL, &[]));
        Wanted {
            clock: *clock,
            more_clocks: more.to_vec(),
            fit: self.fit,
            timeline: self.has_timeline(),
            prices: prices.costs,
        }
    }

    fn has_timeline(&self) -> bool {
        self.timeline || self.prices.is_some()
    }

    /// The prices that `--prices` names, else the measured ones. Prints to stderr the prices
    /// missing from a file, which are by-call's instead.
    fn prices(&self) -> Result<Prices, String> {
        let name = self.prices.as_deref().unwrap_or(Prices::MEASURED);
        let prices = Prices::open(name).map_err(|error| format!("--prices: {error}"))?;
        if !prices.left_out.is_empty() {
            let left_out = prices.left_out.join(", ");
            say("bench", format_args!("prices {name}: missing, so by-call's are used: {left_out}"));
        }
        Ok(prices)
    }
}

/// Paths of the files, and a hint to more figures.
fn written(args: &Args) -> String {
    let (json, chart) = (args.out.join("bench.json"), args.out.join("bench.svg"));
    let more = if args.full { "" } else { "; all figures: --full" };
    let line = format!("written: {} and {}{more}", json.display(), chart.display());
    let lines = wrap(&line, COLUMNS, "  ").join("\n");
    format!("\n{lines}\n")
}

/// Prints problems to stderr, and returns the exit status.
fn verdict(report: &Report) -> u8 {
    let mut status = 0;
    for (trace, run) in report.runs() {
        if !run.completed {
            say(
                "bench",
                format_args!("{} did not complete {}: out of memory", run.allocator, trace.trace),
            );
            status = status.max(OUT_OF_MEMORY);
        }
    }
    for (trace, run) in report.runs().filter(|(_, run)| run.fault_count > 0) {
        say(
            "bench",
            format_args!("{} on {}: {} faults", run.allocator, trace.trace, run.fault_count),
        );
        run.faults.iter().for_each(|fault| say("bench", fault));
        status = FAULTS;
    }
    status
}

/// Settings of `--conf`, unchanged. A wrong one must fail before the replays, which take minutes.
fn settings(text: &str) -> Result<String, String> {
    Config::parse(text).map(|_| text.to_owned()).map_err(|error| error.in_source("--conf"))
}

fn confs(args: &Args) -> Vec<String> {
    std::iter::once(String::new()).chain(args.conf.iter().cloned()).collect()
}

fn contenders(args: &Args) -> Vec<Contender> {
    let models = [Contender::Torch, Contender::Expandable];
    let ours = confs(args).into_iter().map(Contender::Gruyere).filter(|_| !args.models_only);
    models.into_iter().chain(ours).collect()
}

fn traces(args: &Args) -> Result<Vec<Trace>, Box<dyn std::error::Error>> {
    let paths = if args.trace.is_empty() { bundled()? } else { args.trace.clone() };
    let mut traces = Vec::with_capacity(paths.len());
    for path in &paths {
        let trace = Trace::open(path)?;
        if trace.is_cut() {
            say(
                "bench",
                format_args!(
                    "{}: ends in the middle of a compressed piece, so what follows its {} \
                     operations is missing (its writer was killed, or the file was not copied \
                     whole); these are replayed",
                    path.display(),
                    trace.operations
                ),
            );
        }
        traces.push(trace);
    }
    Ok(traces)
}

/// The traces of small programs, if they are there.
fn small() -> Result<Vec<Trace>, Box<dyn std::error::Error>> {
    let bundled = bundled()?;
    let folder = bundled.first().and_then(|path| path.parent()).map(|folder| folder.join("small"));
    let paths = folder.and_then(|folder| Trace::files_in(&folder).ok()).unwrap_or_default();
    Ok(paths.iter().map(|path| Trace::open(path)).collect::<Result<_, _>>()?)
}

/// The traces of the source tree: in the current folder, or in the folder of this command's build.
fn bundled() -> Result<Vec<PathBuf>, String> {
    let here = Path::new("traces");
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../traces");
    for folder in [here, &built] {
        let paths = Trace::files_in(folder).unwrap_or_default();
        if !paths.is_empty() {
            return Ok(paths);
        }
    }
    Err("the bundled traces are missing: run in the source tree, or name traces with --trace FILE"
        .to_owned())
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    file::replace(path, u64::MAX, file::PUBLIC, |out| out.write_all(text.as_bytes())).map_err(
        |error| {
            format!("{}: {error}; name a file in a writable folder with free space", path.display())
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Bench {
        #[command(flatten)]
        args: Args,
    }

    pub(super) fn report(change: impl FnOnce(&mut gruyere_replay::bench::Run)) -> Report {
        let trace = Trace::read("tiny", &b"a 1 512 0 0\nf 1\n"[..]).unwrap();
        let mut run =
            gruyere_replay::bench::run(&trace, &Contender::Torch, &Wanted::default()).unwrap();
        change(&mut run);
        Report::new(
            (&[trace], vec![vec![run]]),
            (&[], Vec::new()),
            &Bench::parse_from(["bench"]).args,
            Prices::by_call(),
        )
    }

    #[test]
    fn status_tells_a_fault_from_an_out_of_memory() {
        assert_eq!(verdict(&report(|_| {})), 0);
        assert_eq!(verdict(&report(|run| run.completed = false)), OUT_OF_MEMORY);
        assert_eq!(verdict(&report(|run| run.fault_count = 1)), FAULTS);
        let both = report(|run| (run.completed, run.fault_count) = (false, 2));
        assert_eq!(verdict(&both), FAULTS);
    }

    #[test]
    fn arguments_are_consistent() {
        use clap::CommandFactory;
        Bench::command().debug_assert();
    }
}
