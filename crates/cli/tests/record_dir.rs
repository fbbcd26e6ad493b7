//! `GRUYERE_RECORD_DIR`: programs keep their records there, and the command reads them there.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use gruyere_record::memfds;
use gruyere_record::record_dir::{VARIABLE, record_dir};
use gruyere_record::{DeviceFacts, Owners, Record, RecordOptions};
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

/// The environment variable that tells [`one_without_a_file`] that it is a child.
const CHILD: &str = "GRUYERE_TEST_CHILD";

/// In a child: a process whose folder is missing, until its input ends.
#[test]
fn one_without_a_file() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let record = Record::create(&RecordOptions::default(), &[DeviceFacts::default()]);
    assert!(record.path().is_none());
    println!("\nit lives");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    record.close();
}

#[test]
fn a_process_whose_folder_can_not_have_its_record_is_found_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "one_without_a_file", "--nocapture"]);
    command.env(VARIABLE, &missing).env(CHILD, "1");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "it lives"));
    let pid = u64::from(child.id());
    // A reader has it open as well, in a process with a lower pid.
    let reader = memfds::of_process(pid, Owners::Mine).expect("a memfd");
    assert_eq!(listed(missing.to_str()), [pid]);
    let whole = format!("{pid}@{}", gruyere_record::facts::pid_namespace());
    for arguments in
        [&["top", "--once"][..], &["stat"], &["stat", &pid.to_string()], &["stat", &whole]]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
        let output = command.args(arguments).env(VARIABLE, &missing).output().unwrap();
        let (said, error) = (String::from_utf8(output.stdout), String::from_utf8(output.stderr));
        let said = said.unwrap();
        assert!(said.contains(&pid.to_string()), "{arguments:?} {said} {error:?}");
    }
    let mut export = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    let output = export.args(["export", "--print"]).env(VARIABLE, &missing).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("gruyere_exporter_records{state=\"live\"} 1"), "{said}");
    assert!(listed(folder.path().to_str()).is_empty(), "of another folder");
    drop((reader, child.stdin.take()));
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_process_whose_file_was_removed_is_found_until_it_closes_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let pid = u64::from(std::process::id());
    let options = RecordOptions { directory: folder.path().to_owned(), ..RecordOptions::default() };
    let record = Record::create(&options, &[DeviceFacts::default()]);
    // A cleaner, or systemd's RemoveIPC.
    std::fs::remove_file(record.path().unwrap()).unwrap();
    assert_eq!(listed(folder.path().to_str()), [pid]);
    let other = tempfile::tempdir().unwrap();
    assert!(listed(other.path().to_str()).is_empty(), "of another folder");
    record.close();
    assert!(listed(folder.path().to_str()).is_empty(), "it has closed it");
}
