//! `gruyere dryrun`: its request to the Python side, and its choice of interpreter. tests/pytorch
//! tests the results.

use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// An interpreter that answers the probe, then prints its arguments and ends with 4.
const ABLE: &str =
    "#!/bin/sh\nif [ \"$1\" = -c ]; then echo it can; exit 0; fi\nprintf '%s\\n' \"$@\"\nexit 4\n";

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

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

/// The request to the Python side for the command's `args`.
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
fn without_options_it_asks_for_one_gpu_and_what_the_books_say_of_all() {
    let mut request = asked(&["train.py", "--batch-size", "8", "--json"]);
    let gpus = request["gpus"].take();
    let others = request["others"].take();
    let wanted = json!({
        "script": "train.py", "module": null, "arguments": ["--batch-size", "8", "--json"],
        "python_options": [], "steps": 3,
        "allocators": ["gruyere", "default", "expandable"], "gpus": null, "others": null,
        "sweep": null, "smallest": false, "max_bytes": null,
        "json": null, "html": null, "history": null, "name": "train",
        "gruyere": env!("CARGO_PKG_VERSION"), "timeout": 3600, "jobs": null, "beside": null,
        "sandbox": {"allow_writes": [], "allow_network": false, "scratch": 10_u64 << 30},
    });
    assert_eq!(request, wanted);
    assert_eq!(gpus.as_array().unwrap().len(), 1);
    assert_eq!(gpus[0]["name"], "NVIDIA H100 80GB HBM3");
    assert_eq!(gpus[0]["multiprocessors"], 132);
    assert_eq!(gpus[0]["capability"], "9.0");
    assert!(others.as_array().unwrap().iter().any(|gpu| gpu["id"] == "t4-16"));
}

#[test]
fn options_reach_the_python_side() {
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
        "--timeout",
        "60",
        "python3",
        "train.py",
        "--gpu",
        "0",
    ]);
    let ids: Vec<_> = request["gpus"].as_array().unwrap().iter().map(|gpu| &gpu["id"]).collect();
    assert_eq!(ids, ["rtx4090-24", "a100-40", "23.5gb"]);
    assert_eq!(request["gpus"][2]["memory"], 24064 * MIB);
    for gpu in request["gpus"].as_array().unwrap() {
        assert_eq!(gpu["context"], 300 * MIB);
        assert_eq!(gpu["context_known"], true);
        assert_eq!(gpu["context_source"], "--context");
    }
    assert_eq!(request["others"], json!([]));
    assert_eq!(request["steps"], 5);
    assert_eq!(request["allocators"], json!(["default", "async"]));
    assert_eq!(
        request["sweep"],
        json!({ "name": "batch", "flag": "--batch", "values": [], "range": [1, 64] })
    );
    assert_eq!(request["max_bytes"], 79 * GIB);
    assert_eq!((&request["json"], &request["html"]), (&json!("out.json"), &json!("out.html")));
    assert_eq!((&request["smallest"], &request["jobs"]), (&json!(true), &json!(1)));
    assert_eq!(request["script"], "train.py", "the interpreter may stand before it");
    assert_eq!(request["arguments"], json!(["--gpu", "0"]), "what follows it is its own");
}

#[test]
fn json_without_a_file_goes_to_stdout_and_takes_no_word_of_the_program() {
    let request = asked(&["--json", "train.py"]);
    assert_eq!((&request["json"], &request["script"]), (&json!("-"), &json!("train.py")));
}

#[test]
fn the_list_of_gpus_needs_no_interpreter() {
    let output = dryrun(&["--gpu", "list"]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for id in ["t4-16", "v100-32", "h200-141", "b200-180", "rtx5090-32", "l40s-48"] {
        assert!(text.contains(id), "{id}: {text}");
    }
    assert!(text.contains("MiB?") && text.contains("?: from those on\nsimilar GPUs"), "{text}");
    assert!(!text.contains("https://") && text.lines().all(|line| line.len() <= 105), "{text}");
}

#[test]
fn a_module_and_options_of_python_reach_the_python_side() {
    let request = asked(&["--history", "kept", "--", "python", "-u", "-m", "package.train", "--x"]);
    assert_eq!(request["module"], "package.train");
    assert_eq!(request["python_options"], json!(["-u"]));
    assert_eq!((&request["history"], &request["name"]), (&json!("kept"), &json!("package.train")));
}

#[test]
fn wrong_arguments_are_refused() {
    assert!(refused(&["--gpu", "h99", "train.py"]).contains("h99: unknown GPU"));
    assert!(refused(&["--gpu", "a100", "train.py"]).contains("a100-40, a100-80"));
    assert!(refused(&["--gb", "many", "train.py"]).contains("--gb"));
    assert!(refused(&["--steps", "0", "train.py"]).contains("--steps"));
    assert!(refused(&["--alloc", "jemalloc", "train.py"]).contains("jemalloc"));
    assert!(refused(&["--sweep", "batch=8..1", "train.py"]).contains("1..64"));
    assert!(refused(&["--sweep", "batch=1,2", "train.py"]).contains("{batch}"));
    assert!(refused(&[]).contains("name a program: gruyere dryrun -- python train.py"));
    assert!(refused(&["torchrun", "train.py"]).contains("RANK=0"));
}

#[test]
fn an_interpreter_that_cannot_serve_is_named_with_the_reason_and_the_remedy() {
    let message = refused(&["--python", "/bin/true", "train.py"]);
    assert!(message.starts_with("gruyere dryrun: /bin/true is not usable"), "{message}");
    assert!(message.contains("--python"), "{message}");
}
