//! The gruyere command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod ps;
mod stat;

/// Gruyère, a CUDA memory allocator with almost no holes: the command that looks at it from outside.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the processes that use gruyere, with what they hold.
    Ps(ps::Arguments),
    /// Print all gauges of one process.
    Stat(stat::Arguments),
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Ps(arguments) => ps::run(&arguments),
        Command::Stat(arguments) => stat::run(&arguments),
    }
}
