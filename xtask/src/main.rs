//! The project's commands: `cargo xtask test` and its helpers.

mod exports;
mod header;
mod instructions;
mod observed;
mod parts;
mod runner;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What `cargo xtask` can do.
#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's commands")]
enum Arguments {
    /// Run every test: Rust, loom, the header, the exports, the bar on instructions, a real Prometheus, real PyTorch. Runs all parts, then fails if one failed.
    Test {
        /// Leave real PyTorch out (it installs a wheel of half a gigabyte the first time).
        #[arg(long)]
        fast: bool,
        /// Run only the parts whose name contains this.
        #[arg(long, value_name = "PART")]
        only: Option<String>,
    },
    /// Write something anew that is made from the code.
    #[command(flatten)]
    Write(Write),
    /// Count the instructions of one malloc and one free, under callgrind.
    Instructions,
}

#[derive(Subcommand)]
enum Write {
    /// Write include/gruyere.h.
    Header,
    /// Write the tables of the documentation.
    Docs,
}

/// The root of the repository.
fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map(PathBuf::from).unwrap_or(manifest)
}

fn main() -> ExitCode {
    let root = root();
    let done = match Arguments::parse() {
        Arguments::Test { fast, only } => runner::run(&parts::all(&root, fast), only.as_deref()),
        Arguments::Write(Write::Header) => header::write(&root),
        Arguments::Write(Write::Docs) => parts::write_docs(&root),
        Arguments::Instructions => instructions::check(&root),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}
