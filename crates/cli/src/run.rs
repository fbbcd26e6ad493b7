//! `gruyere run`: loads the library into an unmodified program.

mod child;
mod elf;
mod environment;
pub mod library;
mod program;
mod summary;
mod torch;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use gruyere::config::PreloadMode;
use gruyere_record::quoted;
use gruyere_record::run::program_at;

use crate::failure::{Failure, say};
use crate::target::Folder;
use crate::wrap;
use environment::{Environment, Wanted};
use program::Finding;

/// Exit code of our own failures, as for `env` and `timeout`: the program's codes are its own.
const FAILED: u8 = 125;
const CANNOT_BE_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Runs a program with the library preloaded: Gruyère serves its device memory, or only watches it.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere run -- ./simulation --grid 512
                                    Gruyère serves its cudaMalloc and cudaFree
  gruyere run --observe -- python train.py
                                    nothing changes; `gruyere top`, `map` and
                                    `record` see torch's own allocator
  gruyere run --conf limit:80%,dump_dir:dumps -- ./simulation
                                    settings as in GRUYERE_CONF, added to those
                                    of the environment
  gruyere run --observe --conf preload:driver -- ./program
                                    driver calls too: for programs that link the
                                    CUDA runtime statically (nvcc's default,
                                    JAX, TensorFlow)

The program runs as a child in the same terminal and process group, with the standard streams of \
this command. It receives all signals, and this command ends as the program does: with the same \
exit code, or the same signal. Killing this command with SIGKILL also kills the program. Processes \
that the program starts are covered too.

At the end, this command prints to stderr a line for each process and device: peak live and held \
memory, calls, and failures. If it saw no memory, it says why that may be. `history:FOLDER` saves \
the runs there, for `gruyere report`.

Exit codes: the program's; 125 this command failed before it started the program; 126 the program \
cannot be run; 127 the program was not found; 2 wrong usage.")]
pub struct Arguments {
    /// Only watch: pass every call on unchanged (`preload:observe`).
    #[arg(long, conflicts_with = "manage")]
    observe: bool,
    /// Serve the calls (`preload:manage`), whatever the environment's GRUYERE_CONF says.
    #[arg(long)]
    manage: bool,
    /// Settings as in GRUYERE_CONF, added to the environment's. If both set a key, these win. May
    /// be repeated.
    #[arg(long, value_name = "KEY:VALUE,...")]
    conf: Vec<String>,
    /// Path of libgruyere.so. Default: $GRUYERE_LIBRARY, or the one installed with this command or
    /// with the Python package.
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Print no summary at the end.
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    folder: Folder,
    /// The program and its arguments.
    #[arg(
        value_name = "PROGRAM",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    program: Vec<OsString>,
}

/// Runs the program. Returns, unless a signal ended the program: then it ends this process too.
pub fn main(arguments: &Arguments) -> ExitCode {
    match run(arguments) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            say("run", failure);
            ExitCode::from(FAILED)
        }
    }
}

fn run(arguments: &Arguments) -> Result<u8, Failure> {
    let Some((program, words)) = arguments.program.split_first() else {
        return Err(Failure::new("name a program: gruyere run -- program arguments"));
    };
    let wanted = Wanted {
        observe: arguments.observe,
        manage: arguments.manage,
        conf: &arguments.conf,
        keeps_runs: !arguments.quiet,
    };
    let mut environment = Environment::new(&wanted)?;
    let libraries =
        library::find(arguments.library.as_deref(), environment.needs_driver_library())?;
    environment.preload(&libraries);
    let mut is_told = false;
    match program::examine(program) {
        Finding::Fine => {}
        Finding::Doubtful(reason) => {
            say("run", reason);
            is_told = true;
        }
        Finding::Impossible(reason) => return Err(Failure::new(reason)),
    }
    if !arguments.quiet
        && environment.config().preload.mode != PreloadMode::Observe
        && let Some(note) = caches_above(&arguments.program)
        && torch::is_installed_for(program)
    {
        wrap::say("run", note);
    }
    let ended = match child::run(program, words, environment.variables()) {
        Ok(ended) => ended,
        Err(error) => {
            let name = program.to_string_lossy();
            say("run", format_args!("{name}: {error}"));
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            return Ok(if missing { NOT_FOUND } else { CANNOT_BE_RUN });
        }
    };
    if !arguments.quiet {
        summary::print(&mut environment, &arguments.folder, is_told);
    }
    // Deletes temporary files before a signal ends us.
    drop(environment);
    Ok(ended.pass_on())
}

/// Note for a Python program, which may use torch: torch has a cache of its own above `cudaMalloc`.
fn caches_above(program: &[OsString]) -> Option<String> {
    let words: Vec<_> = program.iter().map(|word| word.to_string_lossy()).collect();
    let interpreter = words.first()?.rsplit('/').next()?.to_owned();
    let is_launched = words.windows(2).any(|pair| pair[0] == "-m" && pair[1] == "gruyere");
    if !interpreter.starts_with("python") || is_launched {
        return None;
    }
    let words: Vec<&str> = words.iter().map(|word| &**word).collect();
    // Python's own options stay before it. The package runs a line of code as well.
    let code = || (words.get(1) == Some(&"-c")).then_some(1);
    let command = program_at(&words).or_else(code).map_or_else(
        || format!("{interpreter} -m gruyere"),
        |at| {
            let (options, program) = words[1..].split_at(at - 1);
            let words = [&[&*interpreter], options, &["-m", "gruyere"], program].concat();
            words.into_iter().map(quoted).collect::<Vec<_>>().join(" ")
        },
    );
    Some(format!(
        "If this is a PyTorch program: PyTorch keeps its own cache above cudaMalloc, so here \
         Gruyère serves the cache, not the tensors; to serve the tensors: {command}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_program_is_pointed_to_the_package_and_others_are_not() {
        let note =
            |line: &str| caches_above(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        let said = note("/usr/bin/python3 train.py --lr 3").unwrap();
        assert!(said.ends_with("python3 -m gruyere train.py --lr 3"), "{said}");
        let said = note("python -u train.py $x;ls").unwrap();
        assert!(said.ends_with(": python -u -m gruyere train.py '$x;ls'"), "{said}");
        let said = note("python -c import_x").unwrap();
        assert!(said.ends_with(": python -m gruyere -c import_x"), "{said}");
        // It runs nothing that could be named.
        let said = note("python -i").unwrap();
        assert!(said.ends_with(": python -m gruyere"), "{said}");
        assert_eq!(note("python -m gruyere train.py"), None);
        assert_eq!(note("./simulation --grid 512"), None);
    }
}
