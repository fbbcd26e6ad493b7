//! `gruyere report`: compares runs, for a user and in continuous integration.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gruyere_record::run::{Cell, Run, RunDevice, SCHEMA, VERSION};
use gruyere_record::sites::Line;
use gruyere_record::timeline::Sample;
use gruyere_record::{DeviceFacts, DeviceGauge, Record, RecordOptions};
use serde_json::Value;

#[path = "common/sites.rs"]
mod sites;
use sites::record_with_sites;

const MIB: u64 = 1 << 20;

/// A run of 40 steps: in use is `in_use(step)` MiB; held is a sixteenth more than the highest use
/// so far, plus `extra` MiB.
fn keep(folder: &Path, started: u64, in_use: impl Fn(u64) -> u64, extra: u64) -> PathBuf {
    let mut high = 0;
    let mut cell = |step: u64| {
        let in_use = in_use(step) * MIB;
        high = in_use.max(high);
        let reserved_high = high + high / 16 + extra * MIB;
        let sample = Sample {
            step: step + 1,
            live_high: in_use,
            in_use_high: in_use,
            reserved_high,
            ..Sample::default()
        };
        Cell { nanoseconds: step * 1_000_000, sample }
    };
    let timeline: Vec<Cell> = (0..40).map(&mut cell).collect();
    let device = RunDevice {
        device: 0,
        name: "Phantom".into(),
        live_peak_bytes: high,
        reserved_peak_bytes: timeline.last().unwrap().sample.reserved_high,
        steps: 40,
        mallocs: 1000,
        timeline,
        ..RunDevice::default()
    };
    let run = Run {
        schema: SCHEMA.into(),
        version: VERSION,
        name: "train".into(),
        pid: 7,
        started_nanoseconds: started * 1_000_000_000,
        devices: vec![device],
        ..Run::default()
    };
    let path = folder.join(run.file_name());
    std::fs::write(&path, serde_json::to_string(&run).unwrap()).unwrap();
    path
}

fn report(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.arg("report").args(arguments).current_dir(folder);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn the_latest_run_is_compared_with_the_one_before_it() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), 1_700_000_000, |_| 4000, 0);
    keep(folder.path(), 1_700_000_900, |_| 1000, 0);
    keep(folder.path(), 1_700_001_800, |step| if step < 20 { 1000 } else { 1100 }, 0);
    let output = report(folder.path(), &["--history", ".", "--name", "train", "--parts", "4"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for words in
        ["2023-11-14T22:43:20Z", "2023-11-14T22:28:20Z", "+10.00%", "steps 30 to 39", "1.07 GiB"]
    {
        assert!(shown.contains(words), "{words} is missing in\n{shown}");
    }
    let output = report(folder.path(), &["--history", ".", "--json", "--parts", "2"]);
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let steps = &value["devices"][0]["by_step"];
    assert_eq!(steps[0]["now"]["in_use_bytes"], 1000 * MIB);
    assert_eq!(steps[1]["now"]["in_use_bytes"], 1100 * MIB);
    assert_eq!(steps[1]["before"]["in_use_bytes"], 1000 * MIB);
    assert_eq!(value["against"]["started_nanoseconds"], 1_700_000_900_000_000_000u64);
}

#[test]
fn a_run_that_got_worse_than_a_bound_ends_with_4_and_names_where() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), 1, |_| 1000, 0);
    let same = keep(folder.path(), 2, |_| 1005, 0);
    let grown = keep(folder.path(), 3, |step| if step < 30 { 1000 } else { 1030 }, 0);
    let torn = keep(folder.path(), 4, |_| 1000, 50);
    let bounds = ["--history", ".", "--max-growth", "2%", "--max-ratio", "1%", "--against"];
    let first = "train.rank0.1-7.run.json";
    let check = |run: &Path| {
        let mut arguments = vec![run.file_name().unwrap().to_str().unwrap()];
        arguments.extend(bounds);
        arguments.push(first);
        report(folder.path(), &arguments)
    };
    assert_eq!(check(&same).status.code(), Some(0));
    let output = check(&grown);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(4), "{shown}");
    assert!(shown.contains("device 0: in use in steps 30 to 32 grew by 3.00%"), "{shown}");
    assert!(
        !shown.contains("steps 0 to 2 grew") && !shown.contains("the peak ratio rose"),
        "{shown}"
    );
    let output = check(&torn);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(4), "{shown}");
    assert!(shown.contains("the peak ratio rose from 1.0625 to 1.1125"), "{shown}");
}

#[test]
fn what_lines_held_at_the_end_is_compared_and_lines_that_are_only_in_one_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let kept = keep(folder.path(), 100, |_| 100, 0);
    let line = |name: &str, live_bytes| Line { name: name.into(), live_bytes, ..Line::default() };
    let mut run: Run = serde_json::from_str(&std::fs::read_to_string(&kept).unwrap()).unwrap();
    run.devices[0].lines =
        vec![line("train.py:130 in step", 13 * MIB), line("gone.py:1 in f", MIB)];
    std::fs::write(&kept, serde_json::to_string(&run).unwrap()).unwrap();
    let record = record_with_sites(folder.path());
    let path = record.path().unwrap().to_str().unwrap();
    let page = text(&report(folder.path(), &[path, "--against", kept.to_str().unwrap()]).stdout);
    let rows: Vec<String> = page
        .lines()
        .skip_while(|line| !line.contains("live at the end, by line"))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    assert!(rows[1].starts_with("backward of train.py:10 in step - 28.00 MiB"), "{page}");
    assert_eq!(rows[2], "train.py:130 in step 13.00 MiB 26.00 MiB +100.00%", "{page}");
    assert!(rows.contains(&"gone.py:1 in f 1.00 MiB -".to_owned()), "{page}");
    let value = report(folder.path(), &[path, "--json"]);
    let value: Value = serde_json::from_slice(&value.stdout).unwrap();
    assert_eq!(value["devices"][0]["now"]["lines"][1]["module"], "model.layers.13");
    record.close();
}

#[test]
fn figures_of_a_run_that_was_killed_are_told_as_those_of_the_last_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = keep(folder.path(), 1, |_| 1000, 0);
    let mut run: Run = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    run.unfinished_at_nanoseconds = Some(61_200_000_000);
    run.devices[0].steps = 1;
    run.devices[0].timeline.clear();
    std::fs::write(&path, serde_json::to_string(&run).unwrap()).unwrap();
    let path = path.to_str().unwrap();
    let page = text(&report(folder.path(), &[path]).stdout);
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for said in [
        "last written 61 s into the run, before the end: it was killed, or still runs.",
        "`gruyere report 7` has it",
        "too few steps were marked by then",
    ] {
        assert!(words.contains(said), "{said} is missing in\n{page}");
    }
    assert!(page.lines().take(4).all(|line| line.len() <= 80), "{page}");
    let value: Value =
        serde_json::from_slice(&report(folder.path(), &[path, "--json"]).stdout).unwrap();
    assert_eq!(value["run"]["unfinished_at_nanoseconds"], 61_200_000_000u64);
}

#[test]
fn two_ranks_with_a_gpu_each_are_compared_although_the_numbers_differ() {
    let folder = tempfile::tempdir().unwrap();
    let first = keep(folder.path(), 1, |_| 1000, 0);
    let second = keep(folder.path(), 2, |_| 1030, 0);
    let mut run: Run = serde_json::from_str(&std::fs::read_to_string(&second).unwrap()).unwrap();
    run.devices[0].device = 1;
    std::fs::write(&second, serde_json::to_string(&run).unwrap()).unwrap();
    let [first, second] = [&first, &second].map(|path| path.to_str().unwrap());
    let output = report(folder.path(), &[second, "--against", first, "--max-growth", "2%"]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(4), "{shown}");
    let grew = "device 1 (against device 0): live at the peak grew by 3.00%";
    assert!(shown.contains(grew), "{shown}");
    assert!(shown.contains("\ndevice 1 (against device 0) Phantom\n"), "{shown}");
    let output = report(folder.path(), &[second, "--against", first, "--json"]);
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["devices"][0]["before_device"], 0, "{value}");
}

#[test]
fn a_process_that_runs_now_is_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let options = RecordOptions {
        directory: folder.path().to_owned(),
        ring_events: 256,
        max_blocks: 4096,
        ..RecordOptions::default()
    };
    let facts = DeviceFacts { name: "Phantom".into(), uuid: [1; 16], total_memory: 80 << 30 };
    let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
    let mut device = record.device(0);
    for step in 0..3 {
        device.set(&[
            (DeviceGauge::Step, step),
            (DeviceGauge::Reserved, 64 * MIB),
            (DeviceGauge::ReservedPeak, 64 * MIB),
        ]);
        device.sample(48 * MIB);
    }
    let path = record.path().unwrap().to_str().unwrap();
    let output = report(folder.path(), &[path, "--json"]);
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["devices"][0]["now"]["reserved_peak_bytes"], 64 * MIB);
    assert_eq!(value["devices"][0]["by_step"][0]["now"]["in_use_bytes"], 48 * MIB);
    assert_eq!(value["against"], Value::Null);
}

#[test]
fn bad_input_is_named_with_its_reason_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let good = keep(folder.path(), 1, |_| 10, 0);
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("cut.run.json", &std::fs::read_to_string(&good).unwrap()[..200]);
    write("other.run.json", "{\"schema\": 3}");
    let newer = std::fs::read_to_string(&good).unwrap().replace("\"version\":1", "\"version\":99");
    write("newer.run.json", &newer);
    std::fs::create_dir(folder.path().join("folder.run.json")).unwrap();
    let cases: [(&[&str], &str); 8] = [
        (&["."], "a folder; `--history FOLDER` takes the latest run in it"),
        (&["missing.run.json"], "name a file from `history:`"),
        (&["cut.run.json"], "); name a file from `history:`"),
        (&["other.run.json"], "); name a file from `history:`"),
        (&["newer.run.json"], "use the command of the version that wrote it"),
        (&["folder.run.json"], "not the history of a run"),
        (&["--history", "nowhere"], "name the folder of `history:`"),
        (&["--history", ".", "--name", "other"], "no run of \"other\""),
    ];
    for (arguments, words) in cases {
        let output = report(folder.path(), arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
        assert!(
            error.starts_with("gruyere report: ") && error.contains(words),
            "{arguments:?}: {error}"
        );
        assert!(!error.contains("delete"), "it may be a good file of another kind: {error}");
    }
    for arguments in
        [&[][..], &["x.run.json", "--max-growth", "much"], &["x.run.json", "--name", "y"]]
    {
        assert_eq!(report(folder.path(), arguments).status.code(), Some(2), "{arguments:?}");
    }
    // Unreadable files of the folder are skipped, and reported.
    let output = report(folder.path(), &["--history", "."]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stderr).contains("skipped: ./cut.run.json"), "{}", text(&output.stderr));
}

#[test]
fn a_snapshot_in_place_of_a_run_is_told_with_the_command_that_takes_it() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_with_sites(folder.path());
    let pid = std::process::id().to_string();
    let directory = folder.path().to_str().unwrap();
    let snapshot = folder.path().join("before.json");
    let made = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .args(["snapshot", &pid, "--json", "--directory", directory, "-o"])
        .arg(&snapshot)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let output =
        report(folder.path(), &[&pid, "--directory", directory, "--against", "before.json"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("before.json: the state of a process's memory"), "{said}");
    assert!(said.contains("`gruyere diff`") && !said.contains("delete"), "{said}");
    record.close();
}
