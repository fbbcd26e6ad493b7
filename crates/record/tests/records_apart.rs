//! Test programs keep their records in a folder of their own: `.cargo/test-runner` makes it, and
//! takes it away.

#[path = "../../cli/tests/common/signals.rs"]
#[allow(dead_code)]
mod signals;

use std::path::{Path, PathBuf};
use std::process::Command;

use gruyere_record::record_dir::{DEFAULT, VARIABLE, record_dir};
use gruyere_record::{DeviceFacts, Record, RecordOptions};

#[test]
fn a_test_program_s_records_are_in_a_folder_of_its_own() {
    let set = std::env::var_os(VARIABLE).map(PathBuf::from);
    assert_eq!(set, Some(record_dir()), "run the tests with cargo: its runner sets {VARIABLE}");
    assert!(record_dir() != Path::new(DEFAULT) && record_dir().is_dir());
    let record = Record::create(&RecordOptions::default(), &[DeviceFacts::default()]);
    assert_eq!(record.path().and_then(Path::parent), Some(record_dir().as_path()));
    record.close();
}

/// As from a shell: what is ignored when a shell starts, it can't trap.
fn runner() -> Command {
    let mut command =
        Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cargo/test-runner"));
    signals::as_from_a_shell(&mut command);
    command
}

#[test]
fn the_runner_s_folder_goes_with_the_test_program_however_that_ends() {
    let folder = tempfile::tempdir().unwrap();
    let deps = folder.path().join("deps");
    std::fs::create_dir(&deps).unwrap();
    let (program, temporary) = (deps.join("program"), folder.path().join("temporary"));
    std::fs::create_dir(&temporary).unwrap();
    std::os::unix::fs::symlink("/bin/sh", &program).unwrap();
    for (script, code) in
        [("exit 7", 7), ("kill -9 $$", 128 + 9), ("kill -TERM $PPID; sleep 0.1", 128 + 15)]
    {
        let script =
            format!("ls -d \"$GRUYERE_RECORD_DIR\"; touch \"$GRUYERE_RECORD_DIR/x\"; {script}");
        let output = runner()
            .env("GRUYERE_TEST_MEMORY", &temporary)
            .arg(&program)
            .args(["-c", &script])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(code), "{script}");
        let named = String::from_utf8(output.stdout).unwrap();
        assert!(named.starts_with(temporary.to_str().unwrap()), "{named}");
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "{script}");
    }
}

#[test]
fn what_a_killed_run_left_is_taken_away_after_a_day() {
    let folder = tempfile::tempdir().unwrap();
    let deps = folder.path().join("deps");
    std::fs::create_dir(&deps).unwrap();
    let (program, memory) = (deps.join("program"), folder.path().join("memory"));
    std::os::unix::fs::symlink("/bin/true", &program).unwrap();
    let left = |name: &str, age: &str| {
        let path = memory.join(name);
        std::fs::create_dir_all(&path).unwrap();
        assert!(Command::new("touch").args(["-d", age]).arg(&path).status().unwrap().success());
        path
    };
    let old = left("gruyere-test-records.old", "2 days ago");
    let (young, other) =
        (left("gruyere-test-records.new", "1 hour ago"), left("others", "2 days ago"));
    assert!(runner().env("GRUYERE_TEST_MEMORY", &memory).arg(&program).status().unwrap().success());
    assert!(!old.exists() && young.exists() && other.exists());
}

#[test]
fn what_cargo_run_runs_keeps_the_user_s_folder() {
    let output = runner()
        .env(VARIABLE, "/mine")
        .args(["/bin/sh", "-c", "echo $GRUYERE_RECORD_DIR"])
        .output();
    assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), "/mine\n");
}
