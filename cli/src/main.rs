//! The `gruyere` command.

mod bench;

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
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Bench(args) => bench::main(&args),
    }
}
