//! Time in driver calls appears wherever a process does: `stat`, `export`, `report` and a run's
//! history.

#[path = "common/live_record.rs"]
#[allow(dead_code)]
mod live_record;

use std::path::Path;
use std::process::Command;

use gruyere_record::calls::DriverCall;
use gruyere_record::run::Run;
use gruyere_record::{Reader, clock};
use serde_json::Value;

fn gruyere(directory: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.args(arguments).current_dir(directory);
    let output = command.env("GRUYERE_RECORD_DIR", directory).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn times_of_driver_calls_are_told_by_kind_and_size() {
    let folder = tempfile::tempdir().unwrap();
    let record: &'static _ = live_record::record(folder.path());
    // Ticks of about a microsecond and more: the length of a tick is known only once the record is
    // this old.
    std::thread::sleep(std::time::Duration::from_millis(150));
    let begin = clock::now();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let millisecond = (clock::now() - begin) / 20;
    let create = record.call_times(DriverCall::Create).unwrap();
    (0..99).for_each(|_| create.note(2 << 20, millisecond / 10));
    create.note(2 << 20, 8 * millisecond);
    create.note(1 << 30, millisecond);
    record.call_times(DriverCall::StreamSynchronize).unwrap().note(0, 40 * millisecond);

    let pid = std::process::id().to_string();
    let stat: Value =
        serde_json::from_str(&gruyere(folder.path(), &["stat", &pid, "--json"])).unwrap();
    let calls = stat["driver_calls"].as_array().unwrap();
    // The record had one call of cuMemMap already.
    assert_eq!(calls.len(), 4, "{calls:?}");
    assert_eq!(
        (&calls[0]["call"], &calls[0]["up_to_bytes"]),
        (&"cuMemCreate".into(), &(2 << 20).into())
    );
    assert_eq!((&calls[1]["up_to_bytes"], &calls[1]["is_sized"]), (&Value::Null, &true.into()));
    assert_eq!(
        (&calls[3]["call"], &calls[3]["is_sized"]),
        (&"cuStreamSynchronize".into(), &false.into())
    );
    let close = |value: &Value, milliseconds: f64| {
        let told = value.as_f64().unwrap() / 1e6;
        assert!((told / milliseconds - 1.0).abs() < 0.3, "{told} ms is not {milliseconds} ms");
    };
    assert_eq!(calls[0]["count"], 100);
    close(&calls[0]["p50_nanoseconds"], 0.1);
    close(&calls[0]["p99_nanoseconds"], 0.1);
    close(&calls[0]["max_nanoseconds"], 8.0);
    close(&calls[0]["total_nanoseconds"], 17.9);
    let page = gruyere(folder.path(), &["stat", &pid]);
    for words in
        ["DRIVER CALL", "MEDIAN", "cuMemCreate", "to 2 MiB", "larger", "cuStreamSynchronize"]
    {
        assert!(page.contains(words), "{words} is missing in\n{page}");
    }

    let directory = folder.path().to_str().unwrap();
    let metrics = gruyere(folder.path(), &["export", "--print", "--directory", directory]);
    let value = |name: &str, labels: &[&str]| -> f64 {
        let of =
            |line: &&str| line.starts_with(name) && labels.iter().all(|label| line.contains(label));
        let line = metrics
            .lines()
            .find(of)
            .unwrap_or_else(|| panic!("no {name} {labels:?} in\n{metrics}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let small = ["call=\"cuMemCreate\"", "size=\"2MiB\""];
    let name = "gruyere_driver_call_duration_seconds";
    assert_eq!(value(&format!("{name}_count"), &small), 100.0);
    assert_eq!(value(&format!("{name}_bucket"), &[small[0], small[1], "le=\"0.0005\""]), 99.0);
    assert_eq!(value(&format!("{name}_bucket"), &[small[0], small[1], "le=\"0.01\""]), 100.0);
    assert!((value(&format!("{name}_sum"), &small) / 0.0179 - 1.0).abs() < 0.3);
    assert_eq!(value(&format!("{name}_count"), &["size=\"larger\""]), 1.0);
    assert_eq!(value(&format!("{name}_count"), &["call=\"cuStreamSynchronize\"}"]), 1.0);

    // The kept run, and the comparison of runs.
    let run = Run::of(&Reader::own(record).unwrap(), Some("train"));
    assert_eq!(run.driver_call_times.len(), 4);
    let file = folder.path().join(run.file_name());
    std::fs::write(&file, serde_json::to_string(&run).unwrap()).unwrap();
    let arguments = ["report", file.to_str().unwrap(), "--history", directory];
    let report = gruyere(folder.path(), &arguments);
    assert!(report.contains("driver calls, now") && report.contains("cuMemCreate"), "{report}");
    let json = gruyere(folder.path(), &[&arguments[..], &["--json"]].concat());
    assert_eq!(
        serde_json::from_str::<Value>(&json).unwrap()["run"]["driver_calls"]
            .as_array()
            .unwrap()
            .len(),
        4
    );
}

/// A run kept before times existed is readable, and has none.
#[test]
fn a_run_that_was_kept_without_times_is_still_read() {
    let mut value = serde_json::to_value(Run::default()).unwrap();
    value.as_object_mut().unwrap().remove("driver_call_times");
    assert_eq!(serde_json::from_value::<Run>(value).unwrap(), Run::default());
}
