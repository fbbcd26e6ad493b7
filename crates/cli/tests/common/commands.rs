//! The commands, each with its begin and its end.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::live_record;
use crate::signals::{as_from_a_shell, state, until};
use crate::terminal::Terminal;

/// Switches to the alternate screen.
pub const TAKEN: &str = "\x1b[?1049h";

/// How a command that follows a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By the signal.
    Signal,
    /// With this code, whatever the signal.
    Code(i32),
    /// It continues.
    Not,
}

/// Sign that a command has begun.
pub enum Ready {
    /// It has written this text to the terminal.
    Words(&'static str),
    /// This file exists, and is not empty.
    File(PathBuf),
}

/// A command that follows a process until it is ended.
pub struct Case {
    pub command: &'static str,
    pub arguments: Vec<String>,
    pub ready: Ready,
    /// End by a signal.
    pub ends: End,
    /// End when its terminal closes, and SIGHUP is ignored: a command without any reader ends; one
    /// that works for others continues.
    pub without_terminal: End,
    /// End when its standard output loses its reader.
    pub without_reader: End,
    /// The file with the pid of a process that it started, which ends with it.
    pub helper: Option<PathBuf>,
}

/// A record of this process, and a folder for the commands' files.
pub struct Place {
    pub records: TempDir,
    pub files: TempDir,
}

impl Place {
    pub fn new() -> Place {
        let place =
            Place { records: tempfile::tempdir().unwrap(), files: tempfile::tempdir().unwrap() };
        live_record::record(place.records.path());
        place
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// All commands that follow a process. Each call has its own files.
    pub fn cases(&self, round: &str) -> Vec<Case> {
        let directory = self.records.path().to_str().unwrap();
        let case = |words: &[&str], ready, ends, without_terminal, without_reader| Case {
            command: ["top", "watch", "map", "record", "export", "run", "bench", "doctor"]
                .into_iter()
                .find(|name| *name == words[0])
                .expect("a command"),
            arguments: words.iter().map(|word| (*word).to_owned()).collect(),
            ready,
            ends,
            without_terminal,
            without_reader,
            helper: None,
        };
        let pid = std::process::id().to_string();
        let (trace, metrics) =
            (self.file(&format!("{round}.trace.zst")), self.file(&format!("{round}.prom")));
        let helper = self.file(&format!("{round}.pid"));
        let python = self.file("python");
        if !python.exists() {
            fs::write(&python, "#!/bin/sh\necho $$ > \"$HELPER\"\nexec sleep 100\n").unwrap();
            fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../traces/generate.trace.zst");
        let out = self.files.path().to_str().unwrap();
        use End::{Code, Not, Signal};
        let mut cases = vec![
            case(&["top", "--directory", directory], Ready::Words(TAKEN), Signal, Signal, Not),
            case(
                &[
                    "top",
                    "--json",
                    "--count",
                    "100000",
                    "--interval",
                    "100ms",
                    "--directory",
                    directory,
                ],
                Ready::Words("processes"),
                Signal,
                Code(0),
                Code(0),
            ),
            case(
                &["watch", "live<2GiB", "--every", "1h", "--directory", directory],
                Ready::Words("is passed"),
                Signal,
                Code(0),
                Code(0),
            ),
            case(
                &["map", &pid, "--watch=1000", "--device", "1", "--directory", directory],
                Ready::Words("process"),
                Signal,
                Code(0),
                Code(0),
            ),
            // It finishes the trace before it ends.
            case(
                &["record", &pid, "-o", trace.to_str().unwrap(), "--directory", directory],
                Ready::File(trace.clone()),
                Code(0),
                Not,
                Not,
            ),
            case(
                &["export", "--listen", "127.0.0.1:0", "--directory", directory],
                Ready::Words("serving"),
                Signal,
                Not,
                Not,
            ),
            case(
                &["export", "--textfile", metrics.to_str().unwrap(), "--directory", directory],
                Ready::File(metrics.clone()),
                Signal,
                Not,
                Not,
            ),
            case(
                &["run", "--quiet", "--", "sh", "-c", "echo begun; exec sleep 100"],
                Ready::Words("begun"),
                Signal,
                Not,
                Not,
            ),
            case(
                &["bench", "--trace", bundled, "--fit", "--timeline", "--out", out],
                Ready::Words("0/4"),
                Signal,
                Not,
                Not,
            ),
        ];
        let doctor = ["doctor", "--python", python.to_str().unwrap(), "--time-limit", "100"];
        let mut doctor = case(&doctor, Ready::File(helper.clone()), Signal, Not, Not);
        doctor.helper = Some(helper);
        cases.push(doctor);
        cases
    }
}

impl Case {
    pub fn name(&self) -> String {
        self.arguments.join(" ")
    }

    pub fn command(&self) -> Command {
        let mut command = gruyere();
        command.args(&self.arguments);
        if let Some(helper) = &self.helper {
            command.env("HELPER", helper);
        }
        command
    }

    pub fn has_begun(&self, terminal: &mut Terminal) {
        match &self.ready {
            Ready::Words(words) => drop(terminal.expect(words)),
            Ready::File(path) => self.wait_for(path),
        }
    }

    pub fn wait_for(&self, path: &Path) {
        until(&format!("{}: {}", self.name(), path.display()), || {
            fs::metadata(path).is_ok_and(|file| file.len() > 0)
        });
    }

    pub fn helper_has_ended(&self) {
        let Some(path) = &self.helper else { return };
        let pid = fs::read_to_string(path).unwrap().trim().parse().unwrap();
        until("what it started ends too", || !matches!(state(pid), Some(letter) if letter != 'Z'));
    }
}

pub fn gruyere() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    for name in ["GRUYERE_CONF", "GRUYERE_RUN", "LD_PRELOAD", "NO_COLOR", "COLUMNS", "LINES"] {
        command.env_remove(name);
    }
    as_from_a_shell(&mut command);
    command
}

/// Commands that print and end, with their exit codes if the reader stays.
pub fn that_print(place: &Place) -> Vec<(Vec<String>, i32)> {
    let directory = place.records.path().to_str().unwrap();
    let pid = std::process::id().to_string();
    let runs = place.file("runs");
    let dump = place.file("state.json");
    fs::create_dir_all(&runs).unwrap();
    let snapshot = ["snapshot", &pid, "--json", "--directory", directory];
    let made = gruyere().args(snapshot).arg("-o").arg(&dump).status().unwrap();
    assert!(made.success());
    let dump = dump.to_str().unwrap();
    let record = |name: &str| place.file(name).to_str().unwrap().to_owned();
    let cases: Vec<(Vec<&str>, i32)> = vec![
        (vec!["--help"], 0),
        (vec!["--version"], 0),
        (vec!["address", &pid, "0x1000", "--directory", directory], 0),
        (vec!["bench", "--help"], 0),
        (vec!["bench", "--list"], 0),
        (vec!["completions", "bash"], 0),
        (vec!["diff", dump, dump], 0),
        (vec!["export", "--print", "--directory", directory], 0),
        (vec!["export", "--print", "--openmetrics", "--directory", directory], 0),
        (vec!["map", &pid, "--device", "1", "--directory", directory], 0),
        (vec!["map", &pid, "--device", "1", "--json", "--directory", directory], 0),
        (vec!["post", &pid, "--directory", directory], 0),
        (vec!["ps", "--directory", directory], 0),
        (vec!["ps", "--json", "--directory", directory], 0),
        (vec!["report", &pid, "--directory", directory], 0),
        (vec!["run", "--quiet", "--", "true"], 0),
        (vec!["snapshot", &pid, "--json", "-o", "-", "--directory", directory], 0),
        (vec!["stat", &pid, "--directory", directory], 0),
        (vec!["top", "--once", "--directory", directory], 0),
        (vec!["watch", "live<2GiB", "--for", "100ms", "--directory", directory], 0),
    ];
    let mut cases: Vec<(Vec<String>, i32)> = cases
        .into_iter()
        .map(|(words, code)| (words.into_iter().map(str::to_owned).collect(), code))
        .collect();
    let timed = ["record", &pid, "--for", "100ms", "--directory", directory, "-o"];
    let timed = timed.into_iter().map(str::to_owned).chain([record("printed.trace.zst")]);
    cases.push((timed.collect(), 0));
    cases
}
