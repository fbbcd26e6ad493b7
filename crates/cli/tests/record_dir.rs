//! `GRUYERE_RECORD_DIR`: programs keep their records there, and the command reads them there.

use std::process::Command;

use gruyere_record::record_dir::{VARIABLE, record_dir};
use gruyere_record::{DeviceFacts, Record, RecordOptions};
use serde_json::Value;

fn listed(set: Option<&str>) -> Vec<u64> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.args(["ps", "--json"]);
    if let Some(set) = set {
        command.env(VARIABLE, set);
    }
    let output = command.output().unwrap();
    let all: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    all["processes"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|process| process["pid"].as_u64())
        .collect()
}

#[test]
fn programs_and_the_command_agree_on_the_folder_of_the_records() {
    let ours = u64::from(std::process::id());
    let record = Record::create(&RecordOptions::default(), &[DeviceFacts::default()]);
    assert!(record.path().unwrap().starts_with(record_dir()));
    assert_eq!(
        listed(None),
        [ours],
        "what this process finds in its environment, the command finds too"
    );
    assert!(!listed(Some("")).contains(&ours), "empty: /dev/shm");
    let other = tempfile::tempdir().unwrap();
    assert!(listed(other.path().to_str()).is_empty());
    let help = Command::new(env!("CARGO_BIN_EXE_gruyere")).args(["ps", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains(VARIABLE) && help.contains("/dev/shm"), "{help}");
    record.close();
}

#[test]
fn a_process_whose_folder_can_not_have_its_record_is_found_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let options = RecordOptions { directory: missing.clone(), ..RecordOptions::default() };
    let record = Record::create(&options, &[DeviceFacts::default()]);
    assert!(record.path().is_none());
    std::fs::create_dir(&missing).unwrap();
    let ours = u64::from(std::process::id());
    assert_eq!(listed(missing.to_str()), [ours]);
    assert!(listed(folder.path().to_str()).is_empty(), "of another folder");
    for arguments in [&["top", "--once"][..], &["stat"], &["export", "--print"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
        let output = command.args(arguments).env(VARIABLE, &missing).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(&ours.to_string()), "{arguments:?} {said} {error}");
    }
    record.close();
}
