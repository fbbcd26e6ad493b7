//! `gruyere doctor --gpu` on the stand-in GPU, and on misbehaving drivers.

#[path = "common/doctor.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../../tests/common/phantom_library.rs"]
#[allow(dead_code)]
mod phantom_library;
#[path = "common/signals.rs"]
#[allow(dead_code)]
mod signals;

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use common::{cc, command, doctor, findings, libcuda, library, of};
use gruyere_phantom::Prices;
use serde_json::Value;
use tempfile::TempDir;

/// A folder with the stand-in under libcuda's name.
fn stand_in() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(phantom_library::library(), folder.path().join("libcuda.so.1"))
        .unwrap();
    folder
}

/// Runs the trial with these extra options; its files are in `folder`.
fn tried(folder: &Path, arguments: &[&str], settings: &[(&str, &str)]) -> (Output, Value) {
    let mut all = vec!["--gpu", "--json"];
    if !arguments.iter().any(|word| word.starts_with("--stress-with")) {
        all.push("--stress-with=--seconds 0.5 --threads 2 --fill 0.02");
    }
    all.extend(arguments);
    let places = [("PHANTOM_QUIET", "1"), ("TMPDIR", folder.to_str().unwrap())];
    let output = doctor(folder, &all, &[&places, settings].concat());
    let value = findings(&output);
    (output, value)
}

/// The remedy of the first finding of an area that has one.
fn remedy<'a>(value: &'a Value, area: &str) -> &'a str {
    let all = value["findings"].as_array().unwrap();
    all.iter()
        .filter(|finding| finding["area"] == area)
        .find_map(|finding| finding["remedy"].as_str())
        .unwrap()
}

/// A driver of the probe's tests: the stand-in, except for that file's changes.
fn driver_called(name: &str, folder: &Path) -> String {
    let source =
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/gpu/probe/test")).join(name);
    let file = folder.join(format!("lib{name}.so"));
    let stand_in =
        ["-L", folder.to_str().unwrap(), "-Wl,--no-as-needed", "-l:libcuda.so.1", "-ldl"];
    cc(&source.with_extension("c"), &file, &stand_in);
    file.to_str().unwrap().to_owned()
}

#[test]
fn on_the_stand_in_nothing_is_wrong_and_all_of_it_can_be_kept() {
    let folder = stand_in();
    let kept = folder.path().join("kept");
    let (output, value) = tried(folder.path(), &["--out", kept.to_str().unwrap()], &[]);
    assert_eq!((output.status.code(), &value["problems"]), (Some(0), &Value::from(0)), "{value:#}");
    let rules = of(&value, "rules");
    assert!(
        rules[0].starts_with("ok: Phantom H100 (stand-in): ")
            && rules[0].contains("relies on hold"),
        "{rules:?}"
    );
    assert!(rules.iter().any(|line| line.starts_with("note: no kernel runs here")), "{rules:?}");
    assert!(of(&value, "prices")[0].starts_with("ok: of 2 MiB: creating "), "{value:#}");
    let stress = of(&value, "stress");
    assert!(stress[0].starts_with("ok: every word read back as written"), "{stress:?}");
    assert!(value["gpu"]["stress"]["blocks"].as_u64().unwrap() > 10, "{value:#}");
    assert_eq!(value["gpu"]["folder"], kept.to_str().unwrap());
    let probe = std::fs::read_to_string(kept.join("probe.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&probe).unwrap(), value["gpu"]["probe"]);
    assert_eq!(Prices::read("probe.json", &probe).unwrap().left_out, [""; 0]);
    for (file, word) in [
        ("probe.txt", "[facts]"),
        ("stress.txt", "ok: 0 wrong words"),
        ("stress.json", "\"result\": 0"),
    ] {
        assert!(std::fs::read_to_string(kept.join(file)).unwrap().contains(word), "{file}");
    }
    assert!(output.stderr.is_empty(), "no terminal, no progress: {output:?}");
    assert_eq!(left_in(folder.path()), [""; 0]);
}

/// The remaining folders of trials.
fn left_in(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("gruyere-gpu-")).collect()
}

/// The probe checks each rule that we rely on wherever kernels run, under a unique name.
#[test]
fn where_kernels_run_nothing_is_left_unknown() {
    let folder = stand_in();
    let running = format!("--probe-with=--library {}", driver_called("running", folder.path()));
    for backing in ["backing:auto", "backing:pool"] {
        let (output, value) = tried(folder.path(), &[&running], &[("GRUYERE_CONF", backing)]);
        assert_eq!(output.status.code(), Some(0), "{value:#}");
        let rules = of(&value, "rules");
        assert!(rules.len() == 1 && rules[0].starts_with("ok: "), "{backing}: {rules:?}");
    }
}

#[test]
fn stale_aliases_are_a_problem_for_who_moves_pages_alone() {
    let folder = stand_in();
    let one = "--probe-with=--only alias_copies";
    let (output, value) = tried(folder.path(), &[one], &[]);
    assert_eq!(output.status.code(), Some(1));
    let rules = of(&value, "rules");
    assert!(
        rules[1].starts_with("problem: ")
            && rules[1].contains("alias.copies_see_fills_in_stream_order is false (2000 of"),
        "{rules:?}"
    );
    assert!(remedy(&value, "rules").starts_with("GRUYERE_CONF=backing:pool"));
    let (output, value) = tried(folder.path(), &[one], &[("GRUYERE_CONF", "backing:pool")]);
    assert_eq!(output.status.code(), Some(0), "{value:#}");
}

#[test]
fn corruption_is_a_problem_and_its_files_are_kept() {
    let folder = stand_in();
    let overwrite = "--stress-with=--seconds 0.5 --fill 0.02 --overwrite";
    let (output, value) = tried(folder.path(), &["--probe-with=--only facts", overwrite], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(of(&value, "stress")[0].starts_with("problem: CORRUPTION: "), "{value:#}");
    let kept = Path::new(value["gpu"]["folder"].as_str().unwrap());
    assert!(
        remedy(&value, "stress").contains("do not train")
            && remedy(&value, "stress").contains(kept.to_str().unwrap())
    );
    assert_eq!(left_in(folder.path()), [kept.file_name().unwrap().to_str().unwrap()]);
    let said = std::fs::read_to_string(kept.join("stress.txt")).unwrap();
    assert!(said.lines().any(|line| line.starts_with("CORRUPTION: ")), "{said}");
}

/// Within the probe each case has a limit of its own.
#[test]
fn cases_that_crash_or_hang_are_told_and_the_rest_goes_on() {
    let folder = stand_in();
    let refusing =
        format!("--probe-with=--limit 2 --library {}", driver_called("refusing", folder.path()));
    let (output, value) = tried(folder.path(), &[&refusing], &[]);
    assert_eq!(output.status.code(), Some(0), "a warning is no problem: {value:#}");
    let probe = of(&value, "probe");
    assert!(
        probe[0].starts_with("warning: ") && probe[0].contains("reservations gave up"),
        "{probe:?}"
    );
    let hung = "handle_type.posix_is_exported is false (hung for 2 s)";
    assert!(
        of(&value, "rules").iter().any(|line| line.starts_with("note: ") && line.contains(hung)),
        "{value:#}"
    );
    assert!(of(&value, "stress")[0].starts_with("ok: "), "{value:#}");
    assert_eq!(left_in(folder.path()).len(), 1, "a warning's files are kept");
}

/// A driver for the probe alone, in which cuInit never returns; the pids of the probe and its child
/// go to the file `pids`.
fn hanging(folder: &Path) -> String {
    let file = folder.join("libhanging.so");
    let text = r#"
        #include <stdio.h>
        #include <unistd.h>
        int cuInit(unsigned flags) {
            FILE *to = fopen("PIDS", "w");
            fprintf(to, "%d %d\n", getppid(), getpid());
            fclose(to);
            for (;;) pause();
        }"#;
    library(&text.replace("PIDS", folder.join("pids").to_str().unwrap()), &file);
    format!("--probe-with=--library {}", file.display())
}

/// Waits for the pids from [`hanging`].
fn pids(folder: &Path) -> Vec<i32> {
    let mut told = String::new();
    signals::until("the probe has begun", || {
        told = std::fs::read_to_string(folder.join("pids")).unwrap_or_default();
        told.ends_with('\n')
    });
    told.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn wait_for_the_end_of(pids: &[i32]) {
    for &pid in pids {
        signals::until("its end", || matches!(signals::state(pid), None | Some('Z' | 'X')));
    }
}

#[test]
fn a_probe_that_hangs_or_crashes_is_told_and_ends_with_its_children() {
    let folder = stand_in();
    let began = Instant::now();
    let (output, value) = tried(folder.path(), &[&hanging(folder.path()), "--gpu-limit", "1"], &[]);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(of(&value, "probe"), ["problem: no answer within 1 s"]);
    assert!(of(&value, "stress")[0].starts_with("note: not run"), "{value:#}");
    assert!(remedy(&value, "probe").contains("the driver hangs"));
    wait_for_the_end_of(&pids(folder.path()));

    let crashing = folder.path().join("libcrashing.so");
    library(
        "__attribute__((constructor)) static void crash(void) { __builtin_trap(); }",
        &crashing,
    );
    let crashing = format!("--probe-with=--library {}", crashing.display());
    let (output, value) = tried(folder.path(), &[&crashing], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(of(&value, "probe")[0].starts_with("problem: killed by signal "), "{value:#}");
    assert!(of(&value, "driver")[0].starts_with("ok: "), "the rest is told all the same");
}

#[test]
fn who_ends_the_command_ends_the_probe_and_its_case() {
    for signal in [libc::SIGINT, libc::SIGKILL] {
        let folder = stand_in();
        let mut doctor = command(folder.path(), &["--gpu", &hanging(folder.path())], &[]);
        signals::as_from_a_shell(&mut doctor).env("TMPDIR", folder.path());
        let mut running = doctor.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let pids = pids(folder.path());
        signals::send(running.id(), signal);
        assert_eq!(running.wait().unwrap().signal(), Some(signal));
        wait_for_the_end_of(&pids);
    }
}

#[test]
fn what_is_not_there_or_cannot_be_written_is_told() {
    let folder = stand_in();
    let facts = "--probe-with=--only facts";
    let (output, value) =
        tried(folder.path(), &[facts, "--library", "/nowhere/libgruyere.so"], &[]);
    assert_eq!(output.status.code(), Some(1));
    let stress = of(&value, "stress");
    assert!(
        stress[0].starts_with("problem: not run: --library /nowhere/libgruyere.so: no such file"),
        "{stress:?}"
    );
    assert_eq!(value["gpu"]["stress"], Value::Null);

    let (output, value) = tried(folder.path(), &[facts, "--out", "/proc/nowhere"], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(of(&value, "files")[0].starts_with("problem: /proc/nowhere: "), "{value:#}");

    let taken = folder.path().join("taken");
    std::fs::create_dir_all(taken.join("stress.json/x")).unwrap();
    let (output, value) = tried(folder.path(), &[facts, "--out", taken.to_str().unwrap()], &[]);
    assert_eq!(output.status.code(), Some(1));
    let files = of(&value, "files");
    assert!(files[0].contains("stress.json: ") && files[0].contains("stay in "), "{files:?}");
    assert_eq!(left_in(folder.path()).len(), 1);

    // Documents that are not written.
    let (output, value) = tried(folder.path(), &["--probe-with=--list"], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(of(&value, "probe")[0].starts_with("problem: its document: "), "{value:#}");
    let (output, value) = tried(folder.path(), &[facts, "--stress-with=--seconds none"], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(of(&value, "stress")[0].starts_with("problem: ended with 2: "), "{value:#}");

    let folder = tempfile::tempdir().unwrap();
    libcuda(folder.path(), "return 100;");
    let (output, value) = tried(folder.path(), &[], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(of(&value, "driver")[0].starts_with("problem: "), "{value:#}");
    assert!(of(&value, "probe")[0].starts_with("note: not run"), "{value:#}");
    assert_eq!(value["gpu"]["probe"], Value::Null);
}
