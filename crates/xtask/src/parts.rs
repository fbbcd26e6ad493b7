//! The parts of the test run, in order: cheap and informative first; parts that use one core stand
//! together, and run side by side.

use std::path::Path;
use std::process::Command;

use crate::runner::Uses::{AllCores, OneCore};
use crate::runner::When::{Always, Named, WithAll};
use crate::runner::{self, Counts, Outcome, Part};
use crate::{
    cuda, deadline, exports, figures, gpu_bundle, header, instructions, rust_tests, site, tools,
    wheels,
};

/// A command in the repository's root.
pub fn command(root: &Path, program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(root);
    command
}

/// The cargo that started us.
pub fn cargo(root: &Path, arguments: &[&str]) -> Command {
    command(root, std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), arguments)
}

/// All parts.
pub fn all(root: &Path) -> Vec<Part> {
    let at = |run: fn(&Path) -> Outcome| {
        let root = root.to_path_buf();
        Box::new(move || run(&root)) as Box<dyn Fn() -> Outcome>
    };
    let part = |name, needs, when, uses, run| Part { name, run: at(run), needs, when, uses };
    vec![
        part("house", &["python3-venv"], Always, OneCore, |root| {
            runner::command(&mut command(root, "python3", &["crates/xtask/house.py"]))
        }),
        part("gpus", &["python3-venv"], Always, OneCore, |root| {
            runner::command(&mut command(root, "python3", &["crates/xtask/gpus.py", "--check"]))
        }),
        part("links", &[], Always, OneCore, |root| check(site::check_links(root))),
        part("cuda headers", &["python3-venv"], Always, OneCore, cuda::part),
        part("site", &["mdbook"], WithAll, OneCore, |root| check(site::build(root).map(|_| ()))),
        // In this process: it counts what it skips.
        part("header", &[], Always, AllCores, header::part),
        part("rust tests", &[], Always, AllCores, rust_tests::part),
        // Alone: it builds the library that `starts` and `memcheck` preload, with other features.
        part("exports", &["binutils"], Always, AllCores, |root| check(exports::check(root))),
        // The longest first.
        part("release", &["python3-venv", "c++"], WithAll, OneCore, wheels::part),
        part("instructions", &["valgrind"], Always, OneCore, |root| {
            check(instructions::check(root))
        }),
        part("loom", &[], Always, OneCore, loom),
        part("starts", &[], WithAll, OneCore, starts),
        part("memcheck", &["valgrind"], Always, OneCore, memcheck),
        part("prometheus", &["prometheus"], WithAll, OneCore, prometheus),
        part("pytorch", &["python3-venv", "c++"], WithAll, AllCores, |root| {
            runner::command(&mut command(root, root.join("tests/pytorch/run"), &[]))
        }),
        part("torch suite", &["python3-venv", "c++"], WithAll, AllCores, |root| {
            runner::command(&mut command(root, root.join("tests/pytorch/suite/run"), &[]))
        }),
        part("figures", &[], Named, AllCores, |root| check(figures::check(root))),
        part("gpu rehearsal", &["binutils"], Named, AllCores, |root| {
            check(gpu_bundle::rehearse(root))
        }),
        part("thorough", &["python3-venv", "c++"], Named, AllCores, |root| {
            runner::command(&mut command(root, root.join("tests/pytorch/run"), &["--thorough"]))
        }),
    ]
}

/// The conclusion on programs with known causes.
pub fn conclusions(root: &Path, names: &[String]) -> Result<(), String> {
    let mut run = command(root, root.join("tests/pytorch/run"), &["--conclusions"]);
    plainly(run.args(names), "a conclusion is wrong, or too many are silent: see above")
}

/// Prints every figure of traces (`crates/replay/examples/proof.rs`).
pub fn proof(root: &Path, arguments: &[std::ffi::OsString]) -> Result<(), String> {
    let build = ["run", "--release", "--quiet", "--package", "gruyere-replay", "--example"];
    let mut run = cargo(root, &build);
    plainly(run.args(["proof", "--"]).args(arguments), "proof: see above")
}

/// Runs a command with our own stdout and without a time limit; `failed` is the error if it fails.
fn plainly(command: &mut Command, failed: &str) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().map_err(|error| format!("{name}: {error}"))?;
    if status.success() { Ok(()) } else { Err(failed.to_owned()) }
}

fn check(result: Result<(), String>) -> Outcome {
    match result {
        Ok(()) => Outcome::Passed(Counts::default()),
        Err(reason) => Outcome::Failed(Counts::default(), reason),
    }
}

// The whole workspace is named below: a single package would build its dependencies, and so the
// library, with other features under the same file name.

/// Starts and exits of a small program under preload: ten thousand if GRUYERE_PROOF_STARTS is set
/// (three minutes or more), else some of them (a plain test run makes a few hundred).
fn starts(root: &Path) -> Outcome {
    let arguments = ["test", "--workspace", "--test", "preload_proof", "programs_start"];
    let starts = std::env::var("GRUYERE_PROOF_STARTS").unwrap_or_else(|_| "2000".into());
    runner::command(cargo(root, &arguments).env("GRUYERE_PROOF_STARTS", starts))
}

/// Programs under preload and memcheck.
fn memcheck(root: &Path) -> Outcome {
    runner::command(&mut cargo(root, &["test", "--workspace", "--test", "preload_memcheck"]))
}

/// The exporter under a real Prometheus: installed, or unpacked by `cargo xtask tools --install`.
fn prometheus(root: &Path) -> Outcome {
    let program = tools::find(root, "prometheus");
    let Some(folder) = program.as_deref().and_then(Path::parent) else {
        return check(Err(format!("no prometheus: {}", tools::COMMAND)));
    };
    let arguments = ["test", "--workspace", "--test", "prometheus"];
    runner::command(cargo(root, &arguments).env("GRUYERE_PROMETHEUS", folder))
}

/// The model-checked tests: every test target of the record's package with "loom" in its name,
/// built with `--cfg loom` in a separate folder (the flag would rebuild the other one each time),
/// optimised (a model visits millions of states).
fn loom(root: &Path) -> Outcome {
    let targets = match test_targets(root, "loom") {
        Ok(targets) if !targets.is_empty() => targets,
        Ok(_) => return check(Err("crates/record/tests/ has no loom test".into())),
        Err(reason) => return check(Err(reason)),
    };
    let mut arguments = vec!["test", "--release", "--package", "gruyere-record"];
    for target in &targets {
        arguments.extend(["--test", target]);
    }
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    runner::command(
        cargo(root, &arguments)
            .env("RUSTFLAGS", format!("{flags} --cfg loom"))
            .env("CARGO_TARGET_DIR", root.join("target/loom"))
            // The models take seconds; linking as for a release would take minutes.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    )
}

/// The files of crates/record/tests/ with `word` in their names, without their ending.
fn test_targets(root: &Path, word: &str) -> Result<Vec<String>, String> {
    let files = std::fs::read_dir(root.join("crates/record/tests"))
        .map_err(|error| format!("crates/record/tests/: {error}"))?;
    let mut targets: Vec<_> = files
        .filter_map(|file| file.ok()?.file_name().into_string().ok())
        .filter_map(|name| Some(name.strip_suffix(".rs")?.to_owned()))
        .filter(|name| name.contains(word))
        .collect();
    targets.sort();
    Ok(targets)
}

/// Runs a command for its effect.
pub fn succeed(command: &mut Command) -> Result<(), String> {
    match runner::command(command) {
        Outcome::Passed(_) => Ok(()),
        Outcome::Skipped(reason) | Outcome::Failed(_, reason) => Err(reason),
    }
}

/// `cargo xtask docs`.
pub fn write_docs(root: &Path) -> Result<(), String> {
    let tables = [
        ["--package", "gruyere", "--test", "docs_fresh"].as_slice(),
        &["--package", "gruyere-cli", "the_page_of_the_commands_is_their_help"],
    ];
    for table in tables {
        succeed(cargo(root, &["test"]).args(table).env("GRUYERE_BLESS", "1"))?;
    }
    succeed(&mut command(root, "python3", &["crates/xtask/gpus.py"]))
}

/// A file's text.
pub fn text(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A command's output.
pub fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut said = Vec::new();
    let limit = deadline::stretched(deadline::COMMAND);
    let ended = deadline::run(command, limit, |_, bytes| said.extend_from_slice(bytes))
        .map_err(|error| format!("{name}: {error}"))?;
    if ended.overdue {
        return Err(format!("{name} took longer than {} s and was ended", limit.as_secs()));
    }
    if !ended.status.success() {
        return Err(format!("{name} ended with {}", ended.status));
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}
