//! `gruyere doctor` on several kinds of machines.

#[path = "common/doctor.rs"]
#[allow(dead_code)]
mod common;
#[path = "common/live_record.rs"]
#[allow(dead_code)]
mod live_record;
#[path = "../../../tests/common/phantom_library.rs"]
#[allow(dead_code)]
mod phantom_library;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{doctor, findings, libcuda, of};
use serde_json::Value;

/// An interpreter with this script.
fn python(folder: &Path, script: &str) -> String {
    let path = folder.join("python");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn on_the_stand_in_nothing_is_wrong_and_every_capability_is_told() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(phantom_library::library(), folder.path().join("libcuda.so.1"))
        .unwrap();
    let settings =
        [("PHANTOM_DEVICES", "2"), ("PHANTOM_MEMORY", "16GiB"), ("GRUYERE_CONF", "slack:0.5%")];
    let output = doctor(folder.path(), &["--json"], &settings);
    let value = findings(&output);
    assert_eq!((output.status.code(), &value["problems"]), (Some(0), &Value::from(0)), "{value:#}");
    assert!(of(&value, "driver")[0].starts_with("ok: CUDA "), "{value:#}");
    assert!(of(&value, "driver")[1].starts_with("warning: it is the stand-in GPU"), "{value:#}");
    assert_eq!(value["driver"]["stand_in"], true);
    let devices = of(&value, "device");
    for number in ["0", "1"] {
        for part in ["16.00 GiB", "units of 2.00 MiB", "ways to share"] {
            let mine = |line: &&String| {
                line.starts_with(&format!("ok: {number}: ")) && line.contains(part)
            };
            assert!(devices.iter().any(|line| mine(&line)), "{number} {part}: {devices:?}");
        }
    }
    assert!(of(&value, "configuration")[0].contains("slack:0.5%"));
    assert_eq!(value["driver"]["devices"][1]["granularity_bytes"], 2 << 20);
    let text = doctor(folder.path(), &[], &settings);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("ok       device") && text.contains("no problems"), "{text}");
}

#[test]
fn a_stand_in_that_was_left_in_the_environment_is_a_problem_with_what_to_unset() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(phantom_library::library(), folder.path().join("libcuda.so.1"))
        .unwrap();
    let output = doctor(folder.path(), &["--json"], &[("PHANTOM_OWNER", "")]);
    let value = findings(&output);
    assert_eq!(output.status.code(), Some(1));
    let told = of(&value, "driver");
    assert!(told[0].starts_with("problem: ") && told[0].contains("the stand-in GPU"), "{told:?}");
    let remedy = value["findings"].as_array().unwrap().iter().find(|one| one["area"] == "driver");
    assert!(remedy.unwrap()["remedy"].as_str().unwrap().contains("unset LD_PRELOAD"), "{value:#}");
}

#[test]
fn without_a_device_the_remedy_is_said_and_the_exit_code_is_1() {
    let folder = tempfile::tempdir().unwrap();
    libcuda(folder.path(), "return 100;");
    let output = doctor(folder.path(), &["--json"], &[]);
    assert_eq!(output.status.code(), Some(1));
    let value = findings(&output);
    let driver = of(&value, "driver");
    assert!(
        driver.len() == 1
            && driver[0].starts_with("problem: ")
            && driver[0].contains("sees no device"),
        "{driver:?}"
    );
    let remedy = value["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|finding| finding["area"] == "driver")
        .unwrap();
    assert!(remedy["remedy"].as_str().unwrap().contains("--gpus"), "{remedy}");
    assert!(
        !of(&value, "shared memory").is_empty() && !of(&value, "machine").is_empty(),
        "the rest is told all the same"
    );
    let text = String::from_utf8(doctor(folder.path(), &[], &[]).stdout).unwrap();
    assert!(
        text.contains("problem  driver") && text.contains("-> ") && text.contains("1 problem"),
        "{text}"
    );
}

#[test]
fn a_driver_that_hangs_or_crashes_is_told_in_time() {
    let folder = tempfile::tempdir().unwrap();
    libcuda(folder.path(), "for (;;) pause();");
    let began = Instant::now();
    let output = doctor(folder.path(), &["--json", "--time-limit", "1"], &[]);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(output.status.code(), Some(1));
    assert!(of(&findings(&output), "driver")[0].contains("no answer within 1 s"), "{output:?}");
    libcuda(folder.path(), "__builtin_trap();");
    let output = doctor(folder.path(), &["--json"], &[]);
    assert!(of(&findings(&output), "driver")[0].contains("killed by signal"), "{output:?}");
}

#[test]
fn records_and_configurations_of_others_are_told() {
    let folder = tempfile::tempdir().unwrap();
    libcuda(folder.path(), "return 100;");
    let records = folder.path().join("records");
    std::fs::create_dir(&records).unwrap();
    let record = live_record::record(&records);
    std::fs::copy(record.path().unwrap(), records.join("gruyere-1-2-3-0.record")).unwrap();
    std::fs::write(records.join("gruyere-1-2-4-0.record"), "junk of more than eight bytes")
        .unwrap();
    let value = findings(&doctor(folder.path(), &["--json"], &[("GRUYERE_CONF", "slack:0.5%")]));
    let told = of(&value, "records");
    assert!(told[0].starts_with("ok: 1 of live"), "{told:?}");
    assert!(
        told[1].starts_with("note: 1 of processes that ended") && told[1].contains("--sweep"),
        "{told:?}"
    );
    assert!(told[2].starts_with("warning: ") && told[2].contains("gruyere-1-2-4-0"), "{told:?}");
    let told = of(&value, "configuration");
    assert!(told.iter().any(|line| line.contains("run with the defaults")), "{told:?}");
    record.close();
}

#[test]
fn a_wrong_configuration_is_a_problem_with_the_librarys_own_words() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(phantom_library::library(), folder.path().join("libcuda.so.1"))
        .unwrap();
    let output = doctor(folder.path(), &["--json"], &[("GRUYERE_CONF", "waits:always")]);
    assert_eq!(output.status.code(), Some(1));
    let told = of(&findings(&output), "configuration");
    assert!(
        told[0].starts_with("problem: GRUYERE_CONF") && told[0].contains("off|oom|budget"),
        "{told:?}"
    );
}

#[test]
fn torch_is_found_without_being_imported() {
    let folder = tempfile::tempdir().unwrap();
    libcuda(folder.path(), "return 100;");
    // A torch and a gruyere that complain when imported.
    let packages = folder.path().join("packages");
    for (name, version) in [("torch", "2.11.0"), ("gruyere", env!("CARGO_PKG_VERSION"))] {
        std::fs::create_dir_all(packages.join(name)).unwrap();
        std::fs::write(packages.join(name).join("__init__.py"), "raise SystemExit('imported')")
            .unwrap();
        let facts = packages.join(format!("{name}-{version}.dist-info"));
        std::fs::create_dir(&facts).unwrap();
        let text = format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n");
        std::fs::write(facts.join("METADATA"), text).unwrap();
    }
    let version = "__version__ = '2.11.0'\ndebug = False\ncuda: Optional[str] = '13.0'\n";
    std::fs::write(packages.join("torch/version.py"), version).unwrap();
    std::fs::write(packages.join("gruyere/libgruyere.so"), "").unwrap();
    let settings = [("PYTHONPATH", packages.to_str().unwrap())];
    let value = findings(&doctor(folder.path(), &["--json"], &settings));
    assert!(of(&value, "torch")[0].starts_with("ok: 2.11.0 for CUDA 13.0"), "{value:#}");
    assert!(of(&value, "package")[0].starts_with("ok: gruyere "), "{value:#}");
}

#[test]
fn an_interpreter_that_hangs_or_is_not_there_is_told() {
    let folder = tempfile::tempdir().unwrap();
    libcuda(folder.path(), "return 100;");
    let hangs = python(folder.path(), "exec sleep 60");
    let began = Instant::now();
    let value =
        findings(&doctor(folder.path(), &["--json", "--time-limit", "1", "--python", &hangs], &[]));
    assert!(began.elapsed() < Duration::from_secs(20));
    assert!(of(&value, "python")[0].contains("no answer within 1 s"), "{value:#}");
    let value = findings(&doctor(folder.path(), &["--json", "--python", "/nowhere/python"], &[]));
    assert!(of(&value, "python")[0].starts_with("problem: /nowhere/python"), "{value:#}");
    let silly = python(folder.path(), "echo hello");
    let value = findings(&doctor(folder.path(), &["--json", "--python", &silly], &[]));
    assert!(of(&value, "python")[0].starts_with("problem: "), "{value:#}");
}

#[test]
fn a_closed_pipe_is_no_trouble_and_help_has_examples_and_exit_codes() {
    let script = format!("{} doctor --time-limit 5 | true", env!("CARGO_BIN_EXE_gruyere"));
    let output = Command::new("sh").args(["-c", &script]).output().expect("a shell");
    assert!(
        output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("panick"),
        "{output:?}"
    );
    let output =
        Command::new(env!("CARGO_BIN_EXE_gruyere")).args(["doctor", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(
        help.contains("Examples:") && help.contains("Exit codes:") && !help.contains("--probe"),
        "{help}"
    );
}
