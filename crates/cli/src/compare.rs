//! `gruyere compare`: a program under torch's allocators and under Gruyère, as a table to post. A
//! short form of `bench --torch`.

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::process::ExitCode;

use serde::Serialize;

use crate::bench::torch::WRONG;
use crate::failure::say;
use crate::house;
use crate::launch_line;
use crate::sandbox::{self, Steps};

/// Runs a program under torch's default allocator, expandable segments and Gruyère, one after the
/// other, and prints a Markdown table.
///
/// The runs change nothing: each run sees the program's files as they are and may write, but its
/// writes are discarded, and it has no network.
#[derive(clap::Args, Serialize)]
#[command(after_help = "\
Examples:
  gruyere compare -- python train.py --batch-size 8
  gruyere compare -- python -m package.train      a module
  gruyere compare --steps 20 -- python train.py   20 steps under each allocator
  gruyere compare --stand-in -- python train.py   without a GPU, on the stand-in

Each run is a separate process with the allocator's real code, on this machine's GPU or, with \
--stand-in, on a stand-in GPU that keeps books of memory and computes nothing. `gruyere bench \
--torch` does more: built-in programs, the smallest device, rows for settings.

Exit codes: 0 success; 1 a run failed, or the runs did different work; 2 wrong usage, or no GPU; \
3 the driver's books found a fault; 4 out of memory.")]
pub struct Arguments {
    /// End the program after this many optimiser steps (default: 12); `all`: run it to its end.
    #[arg(long, value_name = "COUNT")]
    steps: Option<Steps>,
    /// Run on the stand-in GPU, which keeps books of memory and computes nothing.
    #[arg(long)]
    stand_in: bool,
    /// Run the first of this many ranks, without the others, whose collectives exchange nothing;
    /// needs --stand-in.
    #[arg(long, value_name = "COUNT", value_parser = sandbox::count)]
    ranks: Option<NonZeroU32>,
    /// Seconds after which a run counts as hung.
    #[arg(long, value_name = "SECONDS", value_parser = sandbox::count,
          default_value_t = NonZeroU32::new(86_400).unwrap())]
    timeout: NonZeroU32,
    #[command(flatten)]
    sandbox: sandbox::Options,
    /// Also write all numbers to FILE.
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// The command as you would run it, without a launcher: interpreter, its options, script (or -m
    /// and the module), arguments.
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    #[serde(skip)]
    command: Vec<OsString>,
}

#[cfg(test)]
impl Arguments {
    /// The command to run.
    pub fn command(&self) -> &[OsString] {
        &self.command
    }
}

/// Runs the command. Returns only if nothing could start.
pub fn main(arguments: &Arguments) -> ExitCode {
    let options = launch_line::options(&arguments.command);
    let reason = match launch_line::read(&arguments.command, "compare", &options) {
        Ok(program) => {
            house::turn_into("gruyere._bench", "compare", arguments, None, Some(&program))
        }
        Err(reason) => reason,
    };
    say("compare", reason);
    ExitCode::from(WRONG)
}
