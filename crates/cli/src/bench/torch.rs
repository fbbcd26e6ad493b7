//! `gruyere bench --torch`: real PyTorch programs under torch's own allocators and under Gruyère.
//!
//! The Python package (`python_loader/gruyere/_bench`) reads the arguments and does the
//! measurements.

use crate::failure::say;
use crate::house;
use crate::sandbox::{self, Steps};
use serde::Serialize;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code: valid arguments that name something unavailable.
pub const WRONG: u8 = 2;

const EXAMPLES: &str = "\
Examples:
  gruyere bench --torch             the built-in programs on this machine's GPU
  gruyere bench --torch --list      list these programs
  gruyere bench --torch --program train.py --steps 20 -- --batch-size 8
                                    20 steps of a script of your own, with its
                                    arguments
  gruyere bench --torch --program moe --conf slack:0.5%,waits:budget
                                    one more row: Gruyère with these settings
  gruyere bench --torch --stand-in --json torch.json
                                    without a GPU: on the stand-in, whose books
                                    are exact
  gruyere bench --torch --no-fit --runs 9 --allocators default,gruyere
                                    host time only, as precise as it gets

On the stand-in GPU, a kernel takes 20 us and a launch 8 us of its clock (PHANTOM_KERNEL_NS, \
PHANTOM_COSTS change this), and the device has 80 GiB (PHANTOM_MEMORY=24GiB changes this). The \
stand-in needs libphantom_cuda.so, beside this command or named by GRUYERE_PHANTOM.

Exit codes: 0 success; 1 a run failed, or the runs of a program did different work; 2 wrong \
arguments, or no GPU; 3 the driver's books or an invariant found a fault; 4 a program ran out of \
memory with the whole device to itself.";

/// Run real PyTorch programs under torch's own allocators and under Gruyère, and compare.
///
/// Each run is a separate process with the allocator's real code: torch's default, torch's
/// expandable segments, cudaMallocAsync, Gruyère. Prints one table: peak live, peak physical, the
/// smallest device that completes, host time per step.
#[derive(clap::Args, Debug, Serialize)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The Python interpreter that has torch. Default: the active virtual environment's, the one
    /// beside this command, or python3.
    #[arg(long, value_name = "PYTHON")]
    #[serde(skip)]
    python: Option<PathBuf>,
    /// A built-in program by name, or a script; may be repeated. Default: all built-in programs.
    #[arg(long, value_name = "NAME|FILE.py")]
    program: Vec<String>,
    /// A module, run as `python -m` runs it; may be repeated.
    #[arg(long, value_name = "NAME")]
    module: Vec<String>,
    /// Steps of each program (default: 12). A program of your own ends after this many optimiser
    /// steps; with `all`, it runs to its end.
    #[arg(long, value_name = "COUNT")]
    steps: Option<Steps>,
    /// Allocators, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES",
          default_values_t =
              [Allocator::Default, Allocator::Expandable, Allocator::Async, Allocator::Gruyere])]
    allocators: Vec<Allocator>,
    /// Add a row for Gruyère configured with STRING, as in GRUYERE_CONF; may be repeated.
    #[arg(long, value_name = "STRING")]
    conf: Vec<String>,
    /// Run on the stand-in GPU, which keeps books of memory and computes nothing.
    #[arg(long)]
    stand_in: bool,
    #[command(flatten)]
    sandbox: sandbox::Options,
    /// Skip the search for the smallest device.
    #[arg(long)]
    no_fit: bool,
    /// Runs of each program under each allocator, in turn; host time is their median.
    #[arg(long, value_name = "COUNT", value_parser = sandbox::count,
          default_value_t = NonZeroU32::new(3).unwrap())]
    runs: NonZeroU32,
    /// Seconds after which a run counts as hung.
    #[arg(long, value_name = "SECONDS", value_parser = sandbox::count,
          default_value_t = NonZeroU32::new(600).unwrap())]
    timeout: NonZeroU32,
    /// Write all numbers to FILE after each program; `-`: to stdout, in place of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// List the built-in programs and stop.
    #[arg(long)]
    list: bool,
    /// Arguments of the scripts and modules.
    #[arg(last = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

/// Whose allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Allocator {
    /// torch's caching allocator with its default settings.
    Default,
    /// The same with expandable_segments:True.
    Expandable,
    /// torch's backend cudaMallocAsync.
    Async,
    /// Gruyère.
    Gruyere,
}

/// Runs the subcommand. Returns only if the Python side could not start.
pub fn main(args: &Args) -> ExitCode {
    let python = args.python.as_deref();
    say("bench --torch", house::turn_into("gruyere._bench", "bench", args, python, None));
    ExitCode::from(WRONG)
}
