//! The project's commands: `cargo xtask test` and its helpers.

mod arrivals;
mod cuda;
mod deadline;
mod exports;
mod figures;
mod gpu_bundle;
mod header;
mod instructions;
mod observed;
mod parts;
#[path = "../../../tests/common/phantom_owner.rs"]
#[allow(dead_code)]
mod phantom_owner;
mod processes;
mod records;
mod runner;
mod rust_tests;
mod said;
mod shims;
mod site;
mod tools;
mod wheels;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};
use runner::Chosen;

/// What `cargo xtask` can do.
#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's commands")]
enum Arguments {
    /// Run the tests: the header, NVIDIA's headers, Rust, the exports, memcheck, loom, the bar on
    /// instructions. Runs all parts, then fails if one failed.
    Test {
        /// Run what takes long too: thousands of program starts, a real Prometheus, real PyTorch
        /// (it installs a wheel of half a gigabyte the first time), PyTorch's own tests.
        #[arg(long)]
        all: bool,
        /// Run only the parts whose name contains this, of all that there are.
        #[arg(long, value_name = "PART")]
        only: Option<String>,
    },
    /// Run one part, as a run of several does with those that it runs side by side.
    #[command(hide = true)]
    Part {
        /// Its name.
        name: String,
    },
    /// Write something anew that is made from the code.
    #[command(flatten)]
    Write(Write),
    /// Make the folder for the first hour on a GPU: library, command, probe, canaries, traces,
    /// scripts; and its archive.
    GpuBundle {
        /// Where to.
        #[arg(long, value_name = "DIR", default_value = "target/gpu-bundle")]
        out: PathBuf,
    },
    /// Make the files of a release: wheels for x86-64 and aarch64, stripped (zig links them, which
    /// pip fetches; `rustup target add` both), with the native door's shims (as `cargo xtask shims`
    /// for both machines), the source, checksums, notes.
    Wheels {
        /// Where to.
        #[arg(long, value_name = "DIR", default_value = "target/dist")]
        out: PathBuf,
        /// This machine's wheel only, with its own linker and glibc, and its shims.
        #[arg(long)]
        here: bool,
    },
    /// Build the native door's shims that a wheel brings, from torch's wheels, which pip fetches
    /// (half a gigabyte each, once; of each 60 MB stay in target/torch-headers).
    Shims {
        /// For which machine (x86_64, aarch64: apt install g++-aarch64-linux-gnu); this one, where
        /// none is named.
        #[arg(long = "machine", value_name = "MACHINE")]
        machines: Vec<String>,
        /// Which versions of torch; all of python_loader/shims.txt, where none is named.
        versions: Vec<String>,
    },
    /// Say which of the tools that the tests call are there.
    Tools {
        /// Install what is missing (Debian's packages; mdBook by cargo).
        #[arg(long)]
        install: bool,
    },
    /// Run programs with known causes out of memory on the stand-in GPU, write the table of what
    /// the conclusion says of each (tests/pytorch/conclusions/README.md), and fail where one is
    /// wrong. Ten minutes or more.
    Conclusions {
        /// Only programs whose names contain one of these; no table is written.
        names: Vec<String>,
    },
    /// Count the instructions of one malloc and one free, under callgrind.
    Instructions,
    /// Print every figure of traces under torch's models and under Gruyère, as JSON: to compare two
    /// versions of the heap (`cargo xtask proof --help` lists the parts).
    #[command(disable_help_flag = true)]
    Proof {
        /// Arguments of `crates/replay/examples/proof.rs`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<std::ffi::OsString>,
    },
}

#[derive(Subcommand)]
enum Write {
    /// Write include/gruyere.h.
    Header,
    /// Write the tables of the documentation.
    Docs,
    /// Run the bench, and write its figures and its picture where README and docs give them.
    Figures {
        /// Measure the real programs of torch again too: ten minutes or more.
        #[arg(long)]
        torch: bool,
    },
    /// Check every link of the documentation, and build its site (target/site/book); needs mdBook.
    Site,
}

/// The root of the checkout that this runs in, which need not be the one that built it: checkouts
/// may share CARGO_TARGET_DIR.
fn root() -> PathBuf {
    let run_by_cargo = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let package = run_by_cargo.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    package.ancestors().nth(2).unwrap_or(&package).to_path_buf()
}

fn test(root: &Path, all: bool, only: Option<&str>) -> Result<(), String> {
    deadline::patience()?;
    let records = records::Records::begin()?;
    let (names, folder) = records.variables();
    for name in names {
        // SAFETY: the only other thread waits for new files in /dev/shm, and reads no environment.
        unsafe { std::env::set_var(name, folder) };
    }
    deadline::hand_signals_on()?;
    let chosen = match only {
        Some(name) => Chosen::Named(name),
        None if all => Chosen::All,
        None => Chosen::Quick,
    };
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let alone = |name: &str| {
        let mut command = Command::new(&program);
        command.args(["part", name]).current_dir(root);
        command
    };
    runner::run(root, &parts::all(root), chosen, alone, ("records", || records.end()))
}

/// Runs one part in this process, for a run that has made the folder of its records.
fn part(root: &Path, name: &str) -> u8 {
    let run = || {
        deadline::hand_signals_on()?;
        let parts = parts::all(root);
        let part = parts.iter().find(|part| part.name == name).ok_or("no such part")?;
        Ok((part.run)())
    };
    let failed = |reason| runner::Outcome::Failed(runner::Counts::default(), reason);
    runner::end(run().unwrap_or_else(failed))
}

fn main() -> ExitCode {
    let root = root();
    let done = match Arguments::parse() {
        Arguments::Test { all, only } => test(&root, all, only.as_deref()),
        Arguments::Part { name } => return ExitCode::from(part(&root, &name)),
        Arguments::Write(Write::Header) => header::write(&root),
        Arguments::Write(Write::Docs) => parts::write_docs(&root),
        Arguments::Write(Write::Figures { torch }) => figures::write(&root, torch),
        Arguments::Write(Write::Site) => site::write(&root),
        Arguments::GpuBundle { out } => gpu_bundle::make(&root, &out).map(|_| ()),
        Arguments::Wheels { out, here } => wheels::make(&root, &out, here),
        Arguments::Shims { machines, versions } => {
            let which = shims::Which { machines, versions, ..Default::default() };
            shims::make(&root, &which).map(|_| ())
        }
        Arguments::Tools { install: true } => tools::install(&root),
        Arguments::Tools { install: false } => {
            tools::list(&root);
            Ok(())
        }
        Arguments::Conclusions { names } => parts::conclusions(&root, &names),
        Arguments::Instructions => instructions::check(&root),
        Arguments::Proof { arguments } => parts::proof(&root, &arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}
