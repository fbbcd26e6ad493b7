//! `gruyere bench --torch`: its request to the Python package, and its choice of interpreter.
//! tests/pytorch tests the results.

use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// An interpreter that answers the probe, then prints its arguments and ends with 7.
const ABLE: &str =
    "#!/bin/sh\nif [ \"$1\" = -c ]; then echo it can; exit 0; fi\nprintf '%s\\n' \"$@\"\nexit 7\n";

fn interpreter(folder: &Path, script: &str) -> PathBuf {
    let file = folder.join("python");
    std::fs::write(&file, script).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file
}

fn bench(python: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.arg("bench").args(args).arg("--python").arg(python);
    command.env_remove("GRUYERE_LIBRARY").output().unwrap()
}

/// The request to the package for the command's `args`.
fn asked(args: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let output = bench(&interpreter(folder.path(), ABLE), args);
    assert_eq!(output.status.code(), Some(7), "the exit status is the interpreter's");
    let text = String::from_utf8(output.stdout).unwrap();
    let words: Vec<_> = text.lines().collect();
    assert_eq!(words[..3], ["-m", "gruyere._bench", "bench"]);
    let mut request: Value = serde_json::from_str(words[3]).unwrap();
    assert!(request["beside"].take().is_string());
    request
}

fn refused(python: &Path, args: &[&str]) -> String {
    let output = bench(python, args);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn without_options_it_asks_for_everything() {
    let wanted = json!({
        "program": [], "module": [], "arguments": [], "steps": null,
        "allocators": ["default", "expandable", "async", "gruyere"], "conf": [],
        "stand_in": false, "no_fit": false, "runs": 3, "timeout": 600, "json": null,
        "list": false, "gruyere": env!("CARGO_PKG_VERSION"), "beside": null, "run_name": null,
        "sandbox": {"allow_writes": [], "allow_network": false, "scratch": 10_u64 << 30},
    });
    assert_eq!(asked(&["--torch"]), wanted);
    assert_eq!(asked(&["torch"]), wanted, "as a subcommand too");
}

#[test]
fn options_reach_the_package_as_they_are_typed() {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path(), ABLE);
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.args(["bench", "--torch", "--program", "moe", "--program", "train.py", "--steps", "5"]);
    command.args(["--module", "package.train"]);
    command.args([
        "--allocators",
        "gruyere,default",
        "--conf",
        "slack:0.5%,waits:budget",
        "--stand-in",
        "--no-fit",
        "--allow-writes=runs",
        "--allow-network",
        "--scratch",
        "1GiB",
    ]);
    command.args(["--runs", "9", "--timeout", "60", "--json", "-", "--python"]).arg(&python);
    let output = command.args(["--", "--epochs", "3"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut request: Value = serde_json::from_str(text.lines().nth(3).unwrap()).unwrap();
    request["beside"].take();
    let wanted = json!({
        "program": ["moe", "train.py"], "module": ["package.train"],
        "arguments": ["--epochs", "3"], "steps": 5, "allocators": ["gruyere", "default"],
        "conf": ["slack:0.5%,waits:budget"], "stand_in": true, "no_fit": true, "runs": 9,
        "timeout": 60, "json": "-", "list": false, "gruyere": env!("CARGO_PKG_VERSION"),
        "beside": null, "run_name": null,
        "sandbox": {"allow_writes": ["runs"], "allow_network": true, "scratch": 1 << 30},
    });
    assert_eq!(request, wanted);
}

#[test]
fn compare_and_dryrun_hand_on_a_module_and_options_of_python() {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path(), ABLE);
    for (command, package) in [("compare", "gruyere._bench"), ("dryrun", "gruyere._dryrun")] {
        let mut line = Command::new(env!("CARGO_BIN_EXE_gruyere"));
        line.args([command, "--"]).arg(&python).args([
            "-uX",
            "utf8",
            "-m",
            "package.train",
            "--x",
            "1",
        ]);
        let output = line.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let words: Vec<_> = text.lines().collect();
        assert_eq!(words[..2], ["-m", package], "{text}");
        let request: Value = serde_json::from_str(words[3]).unwrap();
        assert_eq!(request["arguments"], json!(["--x", "1"]));
        assert_eq!(request["python_options"], json!(["-u", "-X", "utf8"]));
        assert_eq!(
            (&request["module"], &request["script"]),
            (&json!("package.train"), &Value::Null)
        );
    }
}

#[test]
fn a_launcher_is_refused_with_the_line_to_write() {
    for ours in ["compare", "dryrun", "compare --stand-in", "dryrun --gpu a100-40 --alloc torch"] {
        let mut line = Command::new(env!("CARGO_BIN_EXE_gruyere"));
        line.args(ours.split(' '));
        line.args(["--", "torchrun", "--nproc-per-node", "1", "train.py", "--x", "1"]);
        let output = line.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8(output.stderr).unwrap();
        let remedy = format!(" MASTER_PORT=0 gruyere {ours} -- train.py --x 1\n");
        assert!(text.contains("torchrun: a launcher;") && text.contains(&remedy), "{text}");
    }
}

#[test]
fn a_build_of_the_source_tree_brings_package_and_library() {
    let folder = tempfile::tempdir().unwrap();
    let script = "#!/bin/sh\nif [ \"$1\" = -c ]; then echo it can; fi\necho \"$PYTHONPATH\"; echo \
                  \"$GRUYERE_LIBRARY\"\n";
    let text =
        String::from_utf8(bench(&interpreter(folder.path(), script), &["--torch"]).stdout).unwrap();
    let words: Vec<_> = text.lines().collect();
    let package = words[0].split(':').next().unwrap();
    assert!(Path::new(package).join("gruyere/_bench/compare.py").is_file(), "{package}");
    assert!(words[1].ends_with("libgruyere.so") && Path::new(words[1]).is_file(), "{}", words[1]);
}

#[test]
fn wrong_arguments_are_refused() {
    let python = Path::new("/bin/true");
    assert!(refused(python, &["--torch", "--allocators", "default,jemalloc"]).contains("jemalloc"));
    assert!(refused(python, &["--torch", "--steps", "0"]).contains("--steps"));
    assert!(refused(python, &["--torch", "--runs", "many"]).contains("--runs"));
}

#[test]
fn an_interpreter_that_cannot_serve_is_named_with_the_reason_and_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let gone = folder.path().join("gone");
    let message = refused(&gone, &["--torch"]);
    assert!(message.contains("gone cannot be run") && message.contains("--python"), "{message}");
    let script = "#!/bin/sh\necho 'it is Python 3.8, and 3.9 or newer is needed' >&2; exit 1\n";
    let message = refused(&interpreter(folder.path(), script), &["--torch"]);
    assert!(message.contains("it is Python 3.8") && message.contains("--python"), "{message}");
    // It runs, but is not Python.
    let message = refused(Path::new("/bin/true"), &["--torch"]);
    assert!(message.contains("/bin/true is not usable"), "{message}");
}
