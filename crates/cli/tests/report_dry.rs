//! `gruyere report` of dry runs: against each other, and against a run on a GPU.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gruyere_record::run::{Run, RunDevice, SCHEMA, VERSION};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const H100: &str = "NVIDIA H100 80GB HBM3";

/// An answer that the package has written (tests/pytorch/test_dryrun_answer.py), with a row that
/// completed and one that failed.
fn written() -> Value {
    serde_json::from_str(include_str!("dryrun_answer.json")).unwrap()
}

/// Such an answer with other rows; peaks in MiB.
fn answer(started: u64, rows: &[(&str, bool, u64, u64)], kinds: Value, lines: Value) -> Value {
    let mut answer = written();
    let row = |&(allocator, fits, live, held): &(&str, bool, u64, u64)| {
        let mut row = answer["gpus"][0]["runs"][0].clone();
        row["allocator"] = json!(allocator);
        row["fits"] = json!(fits);
        row["peak_live"] = json!(live * MIB);
        row["peak_held"] = json!(held * MIB);
        row
    };
    let runs: Vec<Value> = rows.iter().map(row).collect();
    answer["gpus"][0]["runs"] = json!(runs);
    answer["run"]["started_nanoseconds"] = json!(started * 1_000_000_000);
    answer["peak"]["kinds"] = kinds;
    answer["peak"]["lines"] = lines;
    answer
}

fn plain(started: u64, fits: bool, live: u64, held: u64) -> Value {
    answer(started, &[("gruyere", fits, live, held)], json!({}), json!([]))
}

fn keep(folder: &Path, name: &str, answer: &Value) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, answer.to_string()).unwrap();
    path
}

/// A run on a GPU, kept as `history:` does.
fn run(folder: &Path, started: u64, gpu: &str, live: u64) {
    let device = RunDevice {
        name: gpu.to_owned(),
        live_peak_bytes: live * MIB,
        reserved_peak_bytes: (live + 100) * MIB,
        mallocs: 9,
        ..RunDevice::default()
    };
    let run = Run {
        schema: SCHEMA.into(),
        version: VERSION,
        name: "train".into(),
        started_nanoseconds: started * 1_000_000_000,
        devices: vec![device],
        ..Run::default()
    };
    let path = folder.join(run.file_name());
    std::fs::write(path, serde_json::to_string(&run).unwrap()).unwrap();
}

fn report(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.arg("report").args(arguments).current_dir(folder).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn shown(folder: &Path, arguments: &[&str]) -> String {
    let output = report(folder, arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn json_of(folder: &Path, arguments: &[&str]) -> Value {
    serde_json::from_slice(&report(folder, arguments).stdout).unwrap()
}

#[test]
fn an_answer_as_the_package_writes_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), "dry.json", &written());
    let value = json_of(folder.path(), &["dry.json", "--json"]);
    let about = &value["run"];
    assert_eq!(
        (&about["name"], &about["host"], &about["pid"]),
        (&json!("train"), &json!("box"), &json!(7))
    );
    assert_eq!((&about["command"], &about["steps"]), (&json!("train.py --batch 8"), &json!(3)));
    assert_eq!((&about["torch"], &about["doubts"]), (&json!("2.11.0"), &json!([])));
    let gpus = value["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 1, "the row that failed has no figures: {value}");
    let now = &gpus[0]["now"];
    assert_eq!((&now["gpu"], &now["fits"]), (&json!("h100-80"), &json!(true)));
    assert_eq!((&now["peak_live"], &now["peak_held"]), (&json!(200 * MIB), &json!(210 * MIB)));
    assert!(value["kinds"].as_array().unwrap().iter().any(|kind| kind["name"] == "weights"));
    assert_eq!(value["lines"][0]["name"], "(libraries)");
}

#[test]
fn a_dry_run_is_compared_with_the_dry_run_before_it_and_with_no_run_on_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), "train.10-7.dryrun.json", &plain(10, true, 100, 110));
    run(folder.path(), 15, H100, 400);
    keep(folder.path(), "train.20-7.dryrun.json", &plain(20, true, 120, 130));
    let said = shown(folder.path(), &["--history", ".", "--name", "train"]);
    assert!(said.contains("against  dry run train of 1970-01-01T00:00:10Z"), "{said}");
    assert!(said.contains("100.00 MiB   120.00 MiB   +20.00%"), "{said}");
    run(folder.path(), 30, H100, 500);
    let said = shown(folder.path(), &["--history", "."]);
    assert!(said.contains("400.00 MiB   500.00 MiB   +25.00%"), "{said}");
}

#[test]
fn a_dry_run_that_grew_past_a_bound_ends_with_4() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), "old.json", &plain(1, true, 1000, 1100));
    keep(folder.path(), "same.json", &plain(2, true, 1005, 1105));
    keep(folder.path(), "grown.json", &plain(3, true, 1030, 1133));
    keep(folder.path(), "torn.json", &plain(4, true, 1000, 1115));
    let bounds = ["--against", "old.json", "--max-growth", "2%", "--max-ratio", "1%"];
    let check = |name| report(folder.path(), &[&[name], &bounds[..]].concat());
    assert_eq!(check("same.json").status.code(), Some(0));
    let grown = check("grown.json");
    assert_eq!(grown.status.code(), Some(4));
    let said = text(&grown.stdout);
    assert!(said.contains("h100-80 under gruyere: live at the peak grew by 3.00%"), "{said}");
    let torn = check("torn.json");
    assert_eq!(torn.status.code(), Some(4));
    let said = text(&torn.stdout);
    assert!(said.contains("the peak ratio rose from 1.1000 to 1.1150"), "{said}");
    assert!(!said.contains("grew by"), "{said}");
}

#[test]
fn a_row_under_which_the_program_fails_is_worse_and_has_no_peaks() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [("gruyere", true, 100, 110), ("expandable", true, 100, 110)];
    let mut document = answer(1, &rows, json!({}), json!([]));
    keep(folder.path(), "old.json", &document);
    document["gpus"][0]["runs"][1] = written()["gpus"][0]["runs"][1].clone();
    keep(folder.path(), "new.json", &document);
    let output = report(folder.path(), &["new.json", "--against", "old.json"]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.contains("h100-80 under expandable: the program now fails there"), "{said}");
    assert!(said.contains("h100-80 under gruyere\n"), "{said}");
    let compared = json_of(folder.path(), &["new.json", "--against", "old.json", "--json"]);
    assert_eq!(compared["gpus"].as_array().map(Vec::len), Some(1), "{compared}");
    // A failure that is not new is no regression.
    let again = report(folder.path(), &["new.json", "--against", "new.json"]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stdout));
}

#[test]
fn a_dry_run_that_fits_no_more_is_worse_without_any_bound() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), "old.json", &plain(1, true, 1000, 1100));
    keep(folder.path(), "now.json", &plain(2, false, 1001, 1100));
    let output = report(folder.path(), &["now.json", "--against", "old.json", "--json"]);
    assert_eq!(output.status.code(), Some(4));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["worse"], json!(["h100-80 under gruyere: it no longer fits"]));
    // In the other direction, it improved.
    let output = report(folder.path(), &["old.json", "--against", "now.json"]);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn allocators_kinds_and_lines_are_compared_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let line = |name: &str, mib: u64| json!({ "line": name, "bytes": mib * MIB });
    let old = answer(
        1,
        &[("torch", true, 100, 120), ("gruyere", true, 100, 105)],
        json!({ "weights": 60 * MIB, "activations": 40 * MIB, "workspaces": 0 }),
        json!([line("train.py:3", 60), line("train.py:9", 40)]),
    );
    let now = answer(
        2,
        &[("gruyere", true, 90, 95), ("async", true, 90, 99)],
        json!({ "weights": 60 * MIB, "activations": 30 * MIB, "workspaces": 0 }),
        json!([line("train.py:3", 60), line("train.py:11", 30)]),
    );
    keep(folder.path(), "old.json", &old);
    keep(folder.path(), "now.json", &now);
    let value = json_of(folder.path(), &["now.json", "--against", "old.json", "--json"]);
    assert_eq!(value["gpus"][0]["before"]["peak_held"], 105 * MIB);
    assert_eq!(value["gpus"][1]["before"], Value::Null);
    assert_eq!(
        value["kinds"],
        json!([
            { "name": "weights", "now": 60 * MIB, "before": 60 * MIB },
            { "name": "activations", "now": 30 * MIB, "before": 40 * MIB },
        ])
    );
    let said = shown(folder.path(), &["now.json", "--against", "old.json"]);
    assert!(said.contains("h100-80 under async: not in the earlier run"), "{said}");
    let row = |name: &str| said.lines().find(|line| line.contains(name)).unwrap().to_owned();
    assert!(row("train.py:9").ends_with("gone") && row("train.py:11").ends_with("new"), "{said}");
}

#[test]
fn what_a_gpu_took_stands_beside_what_the_dry_run_said() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [("torch", true, 100, 130), ("gruyere", true, 100, 104)];
    let kinds = json!({ "weights": 100 * MIB });
    keep(folder.path(), "dry.json", &answer(1, &rows, kinds, json!([])));
    run(folder.path(), 2, H100, 102);
    let kept = "train.rank0.2-0.run.json";
    let said = shown(folder.path(), &[kept, "--against", "dry.json"]);
    assert!(said.contains("NVIDIA H100 80GB HBM3 under gruyere, against h100-80"), "{said}");
    assert!(said.contains("100.00 MiB   102.00 MiB    +2.00%"), "{said}");
    assert!(said.contains("against  dry run train"), "{said}");
    // A run has no list of what was live at its peak.
    assert!(!said.contains("by kind"), "{said}");
    run(folder.path(), 3, "NVIDIA L4", 102);
    let other =
        json_of(folder.path(), &["train.rank0.3-0.run.json", "--against", "dry.json", "--json"]);
    assert_eq!(other["gpus"][0]["before"], Value::Null, "another GPU");
}

#[test]
fn an_earlier_answer_that_was_not_trusted_says_so_and_other_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut doubted = plain(1, true, 100, 110);
    doubted["trust"]["reasons"] = json!(["the peak moves"]);
    keep(folder.path(), "old.json", &doubted);
    keep(folder.path(), "now.json", &plain(2, true, 100, 110));
    let said = shown(folder.path(), &["now.json", "--against", "old.json"]);
    assert!(said.contains("not trustworthy: the peak moves"), "{said}");
    let mut newer = plain(3, true, 1, 1);
    newer["version"] = json!(2);
    keep(folder.path(), "newer.json", &newer);
    keep(folder.path(), "other.json", &json!({ "schema": "coco", "version": 1 }));
    for (name, words) in [
        ("newer.json", "gruyere.dryrun of version 2, but this command reads version 1"),
        ("other.json", "\"coco\" is not the history of a run; name a file from"),
    ] {
        let output = report(folder.path(), &[name]);
        assert_eq!(output.status.code(), Some(1));
        let error = text(&output.stderr);
        assert!(error.contains(name) && error.contains(words), "{error}");
    }
}
