//! `gruyere dryrun`: whether a training program will fit, and what takes the memory, without a GPU.
//!
//! The Python package (`python_loader/gruyere/_dryrun`) does the work: this module parses the
//! arguments, knows the GPUs, finds an interpreter that has the package, and executes it.

mod gpus;
mod sweep;

use std::collections::HashSet;
use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use gruyere_record::run;
use serde::Serialize;

use crate::failure::say;
use crate::house::House;
use crate::launch_line;
use crate::output;
use crate::sandbox;
use gpus::Gpu;
use sweep::Sweep;

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
#[derive(clap::Args)]
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
  gruyere dryrun --sweep batch=1,2,4,8 train.py --batch-size {batch}
  gruyere dryrun --max-gb 79 --json=dry.json train.py
                                    for continuous integration
  gruyere dryrun --history runs train.py
                                    saves the answer: `gruyere report --history
                                    runs` compares it with the last one

Options go before the program; everything after the program is passed to it. The program runs as \
one process on one device.

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
    #[arg(long, value_name = "COUNT", default_value_t = NonZeroU32::new(3).unwrap())]
    steps: NonZeroU32,
    /// Allocators, separated by commas. A program fits if it fits with any of them.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES",
          default_values_t = [Allocator::Gruyere, Allocator::Torch, Allocator::Expandable])]
    alloc: Vec<Allocator>,
    /// Vary an argument of the program: `batch=--batch-size:1..64` finds the largest value that
    /// fits, `batch=1,2,4` runs each value ({batch} stands for it in the program's arguments).
    #[arg(long, value_name = "NAME=VALUES")]
    sweep: Option<Sweep>,
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
    python: Option<PathBuf>,
    /// Seconds after which a run counts as hung.
    #[arg(long, value_name = "SECONDS", default_value_t = NonZeroU32::new(3600).unwrap())]
    timeout: NonZeroU32,
    #[command(flatten)]
    sandbox: sandbox::Options,
    /// Parallel runs (default: one per core, as far as host memory allows).
    #[arg(long, value_name = "COUNT")]
    jobs: Option<NonZeroU32>,
    /// The script (or -m and the module) and its arguments, as you would run it (with python before
    /// it or not), without a launcher.
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Whose allocator. Named for the Python side as `bench --torch` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Allocator {
    /// Gruyère.
    Gruyere,
    /// torch's caching allocator with its default settings.
    #[serde(rename = "default")]
    Torch,
    /// The same with expandable_segments:True.
    Expandable,
    /// torch's backend cudaMallocAsync.
    Async,
}

/// Request to the Python side.
#[derive(Serialize)]
struct Request<'a> {
    /// Either a script or a module.
    script: Option<&'a str>,
    module: Option<&'a str>,
    arguments: &'a [String],
    /// Options of the interpreter, in each run.
    python_options: &'a [String],
    steps: NonZeroU32,
    allocators: &'a [Allocator],
    gpus: Vec<Gpu>,
    /// GPUs beyond those requested: the books can predict them.
    others: Vec<Gpu>,
    sweep: Option<&'a Sweep>,
    smallest: bool,
    max_bytes: Option<u64>,
    json: Option<&'a str>,
    html: Option<&'a str>,
    history: Option<&'a str>,
    name: String,
    gruyere: &'a str,
    timeout: NonZeroU32,
    sandbox: &'a sandbox::Options,
    jobs: Option<NonZeroU32>,
    /// A folder that may contain the stand-in.
    beside: Option<&'a Path>,
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
    if arguments.wants_list() {
        return match output::print(gpus::table()) {
            Ok(_) => ExitCode::SUCCESS,
            Err(failure) => refuse(failure),
        };
    }
    let (program, gpus) = match arguments.checked() {
        Ok(found) => found,
        Err(reason) => return refuse(reason),
    };
    let house = House::find();
    let request = Request {
        script: program.main.script(),
        module: program.main.module(),
        arguments: &program.arguments,
        python_options: &program.python_options,
        steps: arguments.steps,
        allocators: &arguments.alloc,
        others: arguments.others(),
        gpus,
        sweep: arguments.sweep.as_ref(),
        smallest: arguments.smallest,
        max_bytes: arguments.max_gb.map(|gib| (gib * f64::from(1 << 30)) as u64),
        json: arguments.json.as_deref(),
        html: arguments.html.as_deref(),
        history: arguments.history.as_deref(),
        name: arguments.name.clone().unwrap_or_else(|| program.main.name_of_run()),
        gruyere: env!("CARGO_PKG_VERSION"),
        timeout: arguments.timeout,
        sandbox: &arguments.sandbox,
        jobs: arguments.jobs,
        beside: house.beside(),
    };
    let request = serde_json::to_string(&request).expect("plain data");
    let python = arguments.python.clone().or(program.python);
    refuse(house.turn_into(python.as_deref(), &["-m", "gruyere._dryrun", "main", &request]))
}

fn refuse(reason: impl std::fmt::Display) -> ExitCode {
    say("dryrun", reason);
    ExitCode::from(WRONG)
}

impl Arguments {
    fn wants_list(&self) -> bool {
        self.gpu.iter().any(|word| word == "list")
    }

    /// The program, and its GPUs.
    fn checked(&self) -> Result<(launch_line::Program, Vec<Gpu>), String> {
        let program = launch_line::read(&self.program, "dryrun")?;
        let gpus = self.gpus().map_err(|reason| format!("--gpu {reason}"))?;
        match self.sweep.as_ref().and_then(|sweep| sweep.misses(&program.arguments)) {
            Some(reason) => Err(reason),
            None => Ok((program, gpus)),
        }
    }

    /// The error of invalid arguments.
    #[cfg(test)]
    pub fn fault(&self) -> Option<String> {
        if self.wants_list() { None } else { self.checked().err() }
    }

    /// The GPUs to run on.
    fn gpus(&self) -> Result<Vec<Gpu>, String> {
        let mut found = Vec::new();
        for word in &self.gpu {
            found.push(gpus::find(word)?);
        }
        found.extend(self.gb.iter().map(|&gib| gpus::of_size(gib)));
        // `h100,h100-80` names a single GPU.
        let mut ids = HashSet::new();
        found.retain(|gpu: &Gpu| ids.insert(gpu.id.clone()));
        if found.is_empty() {
            found.push(gpus::find(gpus::USUAL)?);
        }
        if let Some(context) = self.context {
            for gpu in &mut found {
                gpu.context = context;
                gpu.context_known = true;
                gpu.context_source = "--context";
            }
        }
        Ok(found)
    }

    /// GPUs predicted from the books alone: none if the user has named any.
    fn others(&self) -> Vec<Gpu> {
        if !self.gpu.is_empty() || !self.gb.is_empty() {
            return Vec::new();
        }
        gpus::all().into_iter().filter(|gpu| gpu.id != gpus::USUAL).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn of(line: &str) -> Arguments {
        Command::parse_from(format!("dryrun {line} train.py").split_whitespace()).arguments
    }

    fn ids(gpus: Vec<Gpu>) -> Vec<String> {
        gpus.into_iter().map(|gpu| gpu.id).collect()
    }

    #[test]
    fn a_gpu_that_is_named_twice_is_run_once() {
        let twice = of("--gpu h100,a100-40,h100-80 --gb 24 --gb 24.0");
        assert_eq!(ids(twice.gpus().unwrap()), ["h100-80", "a100-40", "24gb"]);
        assert_eq!(ids(twice.others()), [""; 0]);
    }

    #[test]
    fn the_gpu_that_is_run_is_none_of_the_others() {
        let usual = of("");
        assert_eq!(ids(usual.gpus().unwrap()), [gpus::USUAL]);
        assert_eq!(usual.others().len(), gpus::all().len() - 1);
        assert!(!ids(usual.others()).contains(&gpus::USUAL.to_owned()));
    }
}
