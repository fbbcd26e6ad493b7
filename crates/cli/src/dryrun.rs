//! `gruyere dryrun`: whether a training program will fit, and what takes the memory, without a GPU.
//!
//! The Python package (`python_loader/gruyere/_dryrun`) does the work, and reads the GPUs and the
//! sweep. Decided here: the launch line, since the interpreter may stand in it; names of runs, by
//! the rule of `history:` (`gruyere_record::run`); and plain values, so that clap's errors name the
//! option.

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;

use gruyere_record::run;
use serde::Serialize;

use crate::failure::say;
use crate::house;
use crate::launch_line::{self, Program};
use crate::sandbox;

/// Exit code: invalid arguments, or arguments that name something unavailable.
const WRONG: u8 = 2;

/// Will it fit? Runs a training program for a few steps on a stand-in GPU, without a real one, and
/// reports the memory that it takes.
///
/// The program runs unchanged, with the real torch and the real allocators; the stand-in keeps
/// exact books of memory and computes nothing.
///
/// It runs several times: twice for analysis, and once for each GPU and allocator. The runs change
/// nothing: the program sees its files as they are and may write, but its writes are discarded, and
/// it has no network.
#[derive(clap::Args, Serialize)]
#[command(after_help = "\
Examples:
  gruyere dryrun train.py --batch-size 8
                                    on an H100, with a prediction for others
  gruyere dryrun --gpu a100-40,rtx4090 train.py
                                    on these, with a real run at each size
  gruyere dryrun -m package.train --batch-size 8
                                    a module, as python -m runs it
  gruyere dryrun --gpu list         the known GPUs
  gruyere dryrun --gb 24 --alloc torch train.py
                                    on any GPU of 24 GiB, torch's allocator only
  gruyere dryrun --gpu a100-80 --sweep batch=--batch-size:1..64 train.py
                                    the largest batch that fits
  gruyere dryrun --gpu h100-80 --ranks 8 fsdp.py
                                    as torchrun --nproc-per-node 8 fsdp.py
  gruyere dryrun --sweep batch=1,2,4,8 train.py --batch-size {batch}
  gruyere dryrun --max-gb 79 --json=dry.json train.py
                                    for continuous integration
  gruyere dryrun --history runs train.py
                                    saves the answer: `gruyere report --history
                                    runs` compares it with the last one

Options go before the program; everything after the program is passed to it. The program runs as \
one process on one device, with --ranks as the first of a job.

Exit codes: 0 it fits; 1 the program failed, in some rows or in all; 2 wrong arguments, or no \
torch or no stand-in; 3 it does not fit; 4 the answer (fits or not) can't be trusted: the \
program's memory depends on values on the device, or the program could not continue without \
something that the sandbox refuses.")]
pub struct Arguments {
    /// GPUs, separated by commas; `list` prints the known ones. Default: h100-80, with a prediction
    /// from the books for all others.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    gpu: Vec<String>,
    /// A GPU with this many GiB, otherwise like an H100; may be repeated.
    #[arg(long, value_name = "GIB", value_parser = gibibytes)]
    gb: Vec<f64>,
    /// End the program after this many optimiser steps.
    #[arg(long, value_name = "COUNT", value_parser = sandbox::count,
          default_value_t = NonZeroU32::new(3).unwrap())]
    steps: NonZeroU32,
    /// Allocators, separated by commas. A program fits if it fits with any of them.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES",
          default_values_t = [Allocator::Gruyere, Allocator::Torch, Allocator::Expandable])]
    alloc: Vec<Allocator>,
    /// Run the first of this many ranks (FSDP, DDP, ZeRO), without the others: its process groups
    /// have this size, and exchange nothing.
    #[arg(long, value_name = "COUNT", value_parser = sandbox::count)]
    ranks: Option<NonZeroU32>,
    /// Vary an argument of the program: `batch=--batch-size:1..64` finds the largest value that
    /// fits, `batch=1,2,4` runs each value ({batch} stands for it in the program's arguments).
    #[arg(long, value_name = "NAME=VALUES")]
    sweep: Option<String>,
    /// Also find the smallest device, by bisection.
    #[arg(long)]
    smallest: bool,
    /// Memory that a CUDA context takes on the GPU, if you know it (as in 512MiB).
    #[arg(long, value_name = "SIZE", value_parser = sandbox::bytes)]
    context: Option<u64>,
    /// Exit with 3 if the memory held at the peak, with the context, is more than this many GiB
    /// with every allocator.
    #[arg(long, value_name = "GIB", value_parser = gibibytes)]
    max_gb: Option<f64>,
    /// Print JSON in place of the page; with FILE, print the page and write the JSON to FILE.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true,
          default_missing_value = "-")]
    json: Option<String>,
    /// Save the answer as a new file in FOLDER, for `gruyere report --history FOLDER`.
    #[arg(long, value_name = "FOLDER")]
    history: Option<String>,
    /// Name of the answer in FOLDER (default: the program's name); `report` compares answers of the
    /// same name.
    #[arg(long, value_name = "NAME", requires = "history", value_parser = name)]
    name: Option<String>,
    /// Write one HTML page with the timeline.
    #[arg(long, value_name = "FILE")]
    html: Option<String>,
    /// The Python interpreter that has torch. Default: the active virtual environment's, the one
    /// beside this command, or python3.
    #[arg(long, value_name = "PYTHON")]
    #[serde(skip)]
    python: Option<PathBuf>,
    /// Seconds after which a run counts as hung.
    #[arg(long, value_name = "SECONDS", value_parser = sandbox::count,
          default_value_t = NonZeroU32::new(3600).unwrap())]
    timeout: NonZeroU32,
    #[command(flatten)]
    sandbox: sandbox::Options,
    /// Parallel runs (default: one per core, as far as host memory allows).
    #[arg(long, value_name = "COUNT", value_parser = sandbox::count)]
    jobs: Option<NonZeroU32>,
    /// The script (or -m and the module) and its arguments, as you would run it (with python before
    /// it or not), without a launcher.
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, allow_hyphen_values = true)]
    #[serde(skip)]
    program: Vec<OsString>,
}

/// Whose allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Allocator {
    /// Gruyère.
    Gruyere,
    /// torch's caching allocator with its default settings.
    Torch,
    /// The same with expandable_segments:True.
    Expandable,
    /// torch's backend cudaMallocAsync.
    Async,
}

fn gibibytes(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (0.001..1e6).contains(number));
    number.ok_or_else(|| "expected GiB, as in 24 or 23.6".to_owned())
}

fn name(text: &str) -> Result<String, String> {
    if run::is_name(text) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "expected at most {} letters, digits and ._-, not beginning with a dot",
        run::MAX_NAME
    ))
}

/// Runs the command. Returns only if nothing could start.
pub fn main(arguments: &Arguments) -> ExitCode {
    let python = arguments.python.as_deref();
    let reason = match arguments.read() {
        Ok(program) => {
            house::turn_into("gruyere._dryrun", "main", arguments, python, program.as_ref())
        }
        Err(reason) => reason,
    };
    say("dryrun", reason);
    ExitCode::from(WRONG)
}

impl Arguments {
    /// The program; `--gpu list` needs none.
    fn read(&self) -> Result<Option<Program>, String> {
        if self.gpu.iter().any(|word| word == "list") {
            return Ok(None);
        }
        let options = launch_line::options(&self.program);
        launch_line::read(&self.program, "dryrun", &options).map(Some)
    }

    /// The error of an invalid launch line.
    #[cfg(test)]
    pub fn fault(&self) -> Option<String> {
        self.read().err()
    }
}
