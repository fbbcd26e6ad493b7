//! The `gruyere` command.

mod address;
mod amounts;
mod bench;
mod candidates;
mod command;
mod compare;
mod completions;
mod device_uuid;
mod diff;
mod doctor;
mod driver_calls;
mod dryrun;
mod ending;
mod export;
mod failure;
mod follow;
mod house;
mod launch_line;
mod map;
mod output;
mod post;
mod ps;
mod recent;
mod record;
mod report;
mod run;
mod sandbox;
mod shares;
mod signals;
mod sites;
mod snapshot;
mod stat;
mod target;
mod terminal;
mod top;
mod watch;
mod wrap;

use clap::{Parser, Subcommand};
use std::io::Write as _;
use std::process::ExitCode;

/// The commands by purpose; in each group the most common first.
const HELP: &str = "\
{about-with-newline}
{usage-heading} {usage}

Try it:
  python -m gruyere train.py   run a script under Gruyère (the Python package)
  compare      Run a program under torch's allocators and Gruyère; print a table
  dryrun       Check without a GPU whether a script fits, and what takes memory
  doctor       Check this machine: driver, memory, settings, torch
  run          Run any CUDA program with the library preloaded
  bench        Replay real PyTorch traffic through Gruyère and torch's own

Running processes:
  top          Watch all processes on one screen
  ps           List the processes that use Gruyère and the memory they hold
  stat         Print all gauges of one process
  map          Draw a device's memory: blocks, idle memory, lost memory
  watch        Report when a threshold is passed
  export       Serve Prometheus metrics of all processes

What went wrong:
  post         Show how a process died, and why (default: the last to die)
  diff         Compare two states of a process: growth, new and gone blocks
  address      Show what is, and what was, at a device address
  snapshot     Write a snapshot of a process's memory for PyTorch's memory_viz

Saved runs:
  report       Compare a run with an earlier one
  record       Write a trace of a running process, for `gruyere bench --trace`

  completions  Print the completions of this command for a shell
  help         Print this message or the help of a command

Options:
{options}

A command's process may be left out while there is only one; `post` defaults
to the one that died last.
";

/// The widest help, and its width if the terminal's is unknown. clap wraps longer lines to the
/// terminal, except those of [`HELP`].
const MOST_COLUMNS: usize = 80;

/// A CUDA memory allocator for PyTorch with almost no holes.
#[derive(Parser)]
#[command(name = "gruyere", version, arg_required_else_help = true, help_template = HELP)]
#[command(max_term_width = MOST_COLUMNS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show what is, and what was, at a device address.
    Address(address::Arguments),
    Bench(Box<bench::Args>),
    Compare(Box<compare::Arguments>),
    /// Print the completions of this command for a shell.
    Completions(completions::Arguments),
    /// Compare two states of a process's memory: growth, new and gone blocks.
    Diff(diff::Arguments),
    /// Check this machine: driver, devices, memory, configuration, torch.
    Doctor(doctor::Arguments),
    Dryrun(Box<dryrun::Arguments>),
    /// Serve Prometheus metrics of all processes.
    Export(export::Arguments),
    /// Draw the layout of a device's memory: blocks, idle memory, lost memory.
    Map(map::Arguments),
    /// Show how a process died, and why. Default: the last to die.
    Post(post::Arguments),
    /// List the processes that use Gruyère and the memory they hold.
    Ps(ps::Arguments),
    /// Write a trace of a running process, for `gruyere bench --trace`.
    Record(record::Arguments),
    /// Compare a run with an earlier one.
    Report(report::Arguments),
    /// Run a program with the library preloaded: managed, or only watched.
    Run(run::Arguments),
    /// Write a snapshot of a process's memory for PyTorch's memory_viz.
    Snapshot(snapshot::Arguments),
    /// Print all gauges of one process.
    Stat(stat::Arguments),
    /// Watch all processes on one screen.
    Top(top::Arguments),
    /// Report when a threshold is passed.
    Watch(watch::Arguments),
}

fn main() -> ExitCode {
    // Before a second thread starts.
    if let Some(code) = doctor::run_as_asked(std::env::args_os()) {
        return code;
    }
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        // The help or the version: clap's own way to print them ignores a full disk.
        Err(asked) if !asked.use_stderr() => {
            return match output::told(asked.print().and_then(|()| std::io::stdout().flush())) {
                Ok(_) => ExitCode::SUCCESS,
                Err(failure) => {
                    let _ = writeln!(std::io::stderr(), "gruyere: {failure}");
                    failure::Exit::Failed.into()
                }
            };
        }
        Err(wrong) => wrong.exit(),
    };
    // `run` forwards all signals to its program, which inherits their original dispositions.
    if !matches!(command, Command::Run(_)) {
        signals::listen();
    }
    match command {
        Command::Address(args) => failure::end("address", address::run(&args)),
        Command::Bench(args) => bench::main(&args),
        Command::Compare(args) => compare::main(&args),
        Command::Completions(args) => failure::end(
            "completions",
            completions::run(&args, <Cli as clap::CommandFactory>::command()),
        ),
        Command::Diff(args) => failure::end("diff", diff::run(&args)),
        Command::Doctor(args) => failure::end("doctor", doctor::run(&args)),
        Command::Dryrun(args) => dryrun::main(&args),
        Command::Export(args) => failure::end("export", export::run(&args)),
        Command::Map(args) => failure::end("map", map::run(&args)),
        Command::Post(args) => failure::end("post", post::run(&args)),
        Command::Ps(args) => failure::end("ps", ps::run(&args)),
        Command::Record(args) => failure::end("record", record::run(&args)),
        Command::Report(args) => failure::end("report", report::run(&args)),
        Command::Run(args) => run::main(&args),
        Command::Snapshot(args) => failure::end("snapshot", snapshot::run(&args)),
        Command::Stat(args) => failure::end("stat", stat::run(&args)),
        Command::Top(args) => failure::end("top", top::run(&args)),
        Command::Watch(args) => failure::end("watch", watch::run(&args)),
    }
}

#[cfg(test)]
mod documented;
#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_help_has_each_command_once() {
        for command in Cli::command().get_subcommands() {
            let line = format!("\n  {} ", command.get_name());
            assert_eq!(HELP.matches(&line).count(), 1, "{}", command.get_name());
        }
        Cli::command().debug_assert();
    }
}
