//! `gruyere dryrun`: its request to the Python package, and its choice of interpreter. How the
//! package reads the request, and the results, are tested in tests/pytorch.

use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// An interpreter that answers the probe, then prints its arguments and ends with 4.
const ABLE: &str =
    "#!/bin/sh\nif [ \"$1\" = -c ]; then echo it can; exit 0; fi\nprintf '%s\\n' \"$@\"\nexit 4\n";

fn interpreter(folder: &Path) -> PathBuf {
    let file = folder.join("python");
    std::fs::write(&file, ABLE).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file
}

fn dryrun(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.arg("dryrun").args(args).env_remove("GRUYERE_LIBRARY").output().unwrap()
}

/// The request to the package for the command's `args`.
fn asked(args: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path());
    let output = dryrun(&[&["--python", python.to_str().unwrap()], args].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(4), "the exit status is the interpreter's: {text}");
    let words: Vec<_> = text.lines().collect();
    assert_eq!(words[..3], ["-m", "gruyere._dryrun", "main"]);
    let mut request: Value = serde_json::from_str(words[3]).unwrap();
    assert!(request["beside"].take().is_string());
    request
}

fn refused(args: &[&str]) -> String {
    let output = dryrun(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn without_options_the_package_is_asked_for_the_defaults() {
    let wanted = json!({
        "script": "train.py", "arguments": ["--batch-size", "8", "--json"], "python_options": [],
        "run_name": "train", "gpu": [], "gb": [], "steps": 3,
        "alloc": ["gruyere", "torch", "expandable"], "sweep": null, "smallest": false,
        "context": null, "max_gb": null, "json": null, "html": null, "history": null, "name": null,
        "timeout": 3600, "jobs": null, "ranks": null,
        "sandbox": {"allow_writes": [], "allow_network": false, "scratch": 10_u64 << 30},
        "gruyere": env!("CARGO_PKG_VERSION"), "beside": null,
    });
    assert_eq!(asked(&["train.py", "--batch-size", "8", "--json"]), wanted);
}

#[test]
fn options_reach_the_package_as_they_are_typed() {
    let request = asked(&[
        "--gpu",
        "rtx4090,A100-40",
        "--gb",
        "23.5",
        "--steps",
        "5",
        "--alloc",
        "torch,async",
        "--sweep",
        "batch=--batch:1..64",
        "--smallest",
        "--context",
        "300MiB",
        "--max-gb",
        "79",
        "--json=out.json",
        "--html",
        "out.html",
        "--jobs",
        "1",
        "--ranks",
        "8",
        "--timeout",
        "60",
        "python3",
        "train.py",
        "--gpu",
        "0",
    ]);
    let wanted = json!({
        "script": "train.py", "arguments": ["--gpu", "0"], "python_options": [],
        "run_name": "train", "gpu": ["rtx4090", "A100-40"], "gb": [23.5], "steps": 5,
        "alloc": ["torch", "async"], "sweep": "batch=--batch:1..64", "smallest": true,
        "context": 300 << 20, "max_gb": 79.0, "json": "out.json", "html": "out.html",
        "history": null, "name": null, "timeout": 60, "jobs": 1, "ranks": 8,
        "sandbox": {"allow_writes": [], "allow_network": false, "scratch": 10_u64 << 30},
        "gruyere": env!("CARGO_PKG_VERSION"), "beside": null,
    });
    assert_eq!(request, wanted, "python may stand before the program; what follows is its own");
}

#[test]
fn json_without_a_file_goes_to_stdout_and_takes_no_word_of_the_program() {
    let request = asked(&["--json", "train.py"]);
    assert_eq!((&request["json"], &request["script"]), (&json!("-"), &json!("train.py")));
}

#[test]
fn the_list_of_gpus_needs_no_program() {
    let request = asked(&["--gpu", "list"]);
    assert_eq!((&request["gpu"], &request["script"]), (&json!(["list"]), &Value::Null));
}

#[test]
fn a_module_and_options_of_python_reach_the_package() {
    let request = asked(&["--history", "kept", "--", "python", "-u", "-m", "package.train", "--x"]);
    assert_eq!(request["module"], "package.train");
    assert_eq!(request["python_options"], json!(["-u"]));
    assert_eq!(request["history"], "kept");
    assert_eq!(request["run_name"], "package.train");
}

#[test]
fn wrong_arguments_are_refused() {
    assert!(refused(&["--gb", "many", "train.py"]).contains("--gb"));
    assert!(refused(&["--steps", "0", "train.py"]).contains("--steps"));
    assert!(refused(&["--alloc", "jemalloc", "train.py"]).contains("jemalloc"));
    let line = ["--history", "kept", "--name", ".train", "train.py"];
    assert!(refused(&line).contains("at most 64 letters"));
    assert!(refused(&[]).contains("name a program: gruyere dryrun -- python train.py"));
    assert!(refused(&["torchrun", "train.py"]).contains("RANK=0"));
}

#[test]
fn an_interpreter_that_cannot_serve_is_named_with_the_reason_and_the_remedy() {
    let message = refused(&["--python", "/bin/true", "train.py"]);
    assert!(message.starts_with("gruyere dryrun: /bin/true is not usable"), "{message}");
    assert!(message.contains("--python"), "{message}");
}
