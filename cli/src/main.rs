//! The `gruyere` command.

mod bench;
mod diff;
mod failure;
mod post;
mod ps;
mod snapshot;
mod stat;
mod target;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// A CUDA memory allocator for PyTorch with almost no holes.
#[derive(Parser)]
#[command(name = "gruyere", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    /// Compare two states of a process's memory: what is new, what is gone.
    Diff(diff::Arguments),
    /// Show the last state of a process that was killed.
    Post(post::Arguments),
    /// List the processes that use Gruyère, with what they hold.
    Ps(ps::Arguments),
    /// Write a snapshot of a process's memory for PyTorch's memory_viz.
    Snapshot(snapshot::Arguments),
    /// Print all gauges of one process.
    Stat(stat::Arguments),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Bench(args) => bench::main(&args),
        Command::Diff(args) => failure::end("diff", diff::run(&args)),
        Command::Post(args) => failure::end("post", post::run(&args)),
        Command::Ps(args) => failure::end("ps", ps::run(&args)),
        Command::Snapshot(args) => failure::end("snapshot", snapshot::run(&args)),
        Command::Stat(args) => failure::end("stat", stat::run(&args)),
    }
}
