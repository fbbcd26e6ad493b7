//! The `gruyere` command.

mod bench;
mod failure;
mod follow;
mod ps;
mod stat;
mod target;
mod top;
mod watch;

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
    /// List the processes that use Gruyère, with what they hold.
    Ps(ps::Arguments),
    /// Print all gauges of one process.
    Stat(stat::Arguments),
    /// Watch all processes on one screen.
    Top(top::Arguments),
    /// Say when a threshold is passed.
    Watch(watch::Arguments),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Bench(args) => bench::main(&args),
        Command::Ps(args) => failure::end("ps", ps::run(&args)),
        Command::Stat(args) => failure::end("stat", stat::run(&args)),
        Command::Top(args) => failure::end("top", top::run(&args)),
        Command::Watch(args) => failure::end("watch", watch::run(&args)),
    }
}
