//! Runs the Rust tests. cargo would run the test programs one after another, so that a core waits
//! for the last test of each; here cargo only builds, and as many programs run side by side as
//! there are cores, each with a single test at a time.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::deadline::{self, Stream};
use crate::parts::{cargo, output};
use crate::runner::{self, Counts, Outcome};

/// Programs that wait for more than half a minute; they begin first, so that the end of the run
/// does not wait for them.
const PATIENT: [&str; 1] = ["forecast"];

/// A test program built by cargo.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: String,
    executable: PathBuf,
    /// Its package's folder, in which cargo runs it.
    folder: PathBuf,
}

/// Unit, integration, property and doc tests of every package, including the check that the
/// documentation is fresh.
pub fn part(root: &Path) -> Outcome {
    let programs = match build(root) {
        Ok(programs) => programs,
        Err(reason) => return Outcome::Failed(Counts::default(), reason),
    };
    let done = run(root, programs, deadline::stretched(deadline::PROGRAM));
    let documented =
        runner::command(&mut cargo(root, &["test", "--workspace", "--doc", "--no-fail-fast"]));
    done.and(documented)
}

fn build(root: &Path) -> Result<VecDeque<Program>, String> {
    // The compiler's messages go to stderr as they come; stdout has a JSON object per line.
    let arguments = ["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"];
    let mut programs: Vec<_> =
        output(&mut cargo(root, &arguments))?.lines().filter_map(program).collect();
    if programs.is_empty() {
        return Err("cargo has built no test program".into());
    }
    programs.sort_by_key(|program| !PATIENT.contains(&program.name.as_str()));
    Ok(programs.into())
}

/// The program in a line of cargo's output, if any.
fn program(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    Some(Program {
        name: message["target"]["name"].as_str()?.to_owned(),
        executable: message["executable"].as_str()?.into(),
        folder: Path::new(message["manifest_path"].as_str()?).parent()?.to_owned(),
    })
}

fn run(root: &Path, programs: VecDeque<Program>, limit: Duration) -> Outcome {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let waiting = Mutex::new(programs);
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let work = || {
        let mut done = Outcome::Passed(Counts::default());
        while let Some(program) = next() {
            done = done.and(run_one(root, &program, limit));
        }
        done
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let ended = workers.into_iter().map(|worker| {
            let failed = |_| {
                Outcome::Failed(Counts::default(), "a thread of the test run has panicked".into())
            };
            worker.join().unwrap_or_else(failed)
        });
        ended.fold(Outcome::Passed(Counts::default()), Outcome::and)
    })
}

/// Runs it as cargo would, and prints its output when it has ended.
fn run_one(root: &Path, program: &Program, limit: Duration) -> Outcome {
    let start = Instant::now();
    let mut command = Command::new(root.join(".cargo/test-runner"));
    command
        .arg(&program.executable)
        .current_dir(&program.folder)
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .env("RUST_TEST_THREADS", "1")
        .stderr(Stdio::piped());
    let (mut text, mut errors) = (String::new(), String::new());
    let outcome = runner::listen(&program.name, &mut command, limit, |stream, said| match stream {
        Stream::Out => text += said,
        Stream::Err => errors += said,
    });
    // A single call, so that the output of two programs does not mix.
    print!(
        "--- {} [{:.1} s]\n{text}{errors}{}",
        program.name,
        start.elapsed().as_secs_f64(),
        match &outcome {
            Outcome::Failed(_, reason) => format!("--- FAILED: {reason}\n"),
            _ => String::new(),
        }
    );
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_program_is_found_in_what_cargo_says_and_nothing_else_is() {
        let line = r#"{"reason":"compiler-artifact","manifest_path":"/a/b/Cargo.toml",
            "target":{"name":"books"},
            "profile":{"test":true},"executable":"/a/target/debug/deps/books-1"}"#
            .replace('\n', "");
        let found = Program {
            name: "books".into(),
            executable: "/a/target/debug/deps/books-1".into(),
            folder: "/a/b".into(),
        };
        assert_eq!(program(&line), Some(found));
        assert_eq!(program(&line.replace("true", "false")), None);
        assert_eq!(program(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(program("warning: nothing"), None);
    }

    #[test]
    fn a_program_that_fails_fails_the_part_and_the_others_still_run() {
        let folder = tempfile::tempdir().unwrap();
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let program = |name: &str, script: &str| {
            use std::os::unix::fs::PermissionsExt;
            let executable = folder.path().join(name);
            std::fs::write(&executable, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&executable, std::fs::Permissions::from_mode(0o755)).unwrap();
            Program { name: name.into(), executable, folder: folder.path().to_owned() }
        };
        let good = || program("good", "echo 'test result: ok. 2 passed; 0 failed'; touch ran");
        let bad = || program("bad", "exit 101");
        let long = Duration::from_secs(60);
        assert!(matches!(
            run(root, [good(), good()].into(), long), Outcome::Passed(counts) if counts.passed == 4
        ));
        std::fs::remove_file(folder.path().join("ran")).unwrap();
        let done = run(root, [bad(), good()].into(), long);
        assert!(matches!(done, Outcome::Failed(_, reason) if reason.contains("bad ended with")));
        assert!(folder.path().join("ran").exists());
        std::fs::remove_file(folder.path().join("ran")).unwrap();
        // Under the runner's shell, in its group.
        let hangs =
            program("hangs", "echo $$; printf 'test quick ... ok\\ntest slow ... '; sleep 300");
        let done = run(root, [hangs, good()].into(), Duration::from_secs(2));
        let Outcome::Failed(_, reason) = done else { panic!("it has not failed") };
        assert!(reason.contains("hangs took longer than 2 s"), "{reason}");
        assert!(reason.ends_with("this test ran: slow"), "{reason}");
        assert!(folder.path().join("ran").exists());
    }
}
