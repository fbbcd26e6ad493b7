//! With `nvtx:on`, an NVTX tool is told what the heap does. The tool is ours
//! (fixtures/nvtx_tool.c), injected as Nsight Systems injects its own; what it accepts was checked
//! with NVIDIA's client (docs/operations.md, "NVTX").

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use common::{DEFAULT, GIB, MIB, Rig};
use gruyere::heap::Error;
use gruyere_phantom::as_program;

/// Set in the child: the test that it runs.
const ROLE: &str = "GRUYERE_NVTX_ROLE";

/// The tool, built once; with `without`, as tools were before NVTX had extensions.
fn tool(without: bool) -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        for (name, define) in [("tool.so", "-DWITH"), ("old.so", "-DWITHOUT_EXTENSIONS")] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/nvtx_tool.c");
            let built = Command::new("cc")
                .args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", define, "-o"])
                .arg(folder.path().join(name))
                .arg(source)
                .output()
                .expect("cc runs (Debian: apt install build-essential)");
            assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        }
        folder
    });
    folder.path().join(if without { "old.so" } else { "tool.so" })
}

/// Runs `body` in a process of its own with this tool; what the tool wrote down, and what the
/// process said.
fn told(
    name: &str,
    tool: &Path,
    settings: &[(&str, &str)],
    body: impl FnOnce(),
) -> Option<(String, String)> {
    if std::env::var(ROLE).is_ok_and(|role| role == name) {
        // The library's own log, as in a program that loads it.
        gruyere::config::logging::init();
        body();
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(ROLE, name)
        .env("NVTX_INJECTION64_PATH", tool)
        .env("NVTX_TOOL_LOG", &log)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    Some((std::fs::read_to_string(log).unwrap_or_default(), said))
}

/// A program that grows, makes pages move, waits, trims, marks steps and runs out of memory.
fn program(conf: &str) {
    let rig = Rig::bare(GIB, &format!("headroom:0,record:on,{conf}"));
    rig.heap.announce_hooks(3);
    // Two holes, neither of which is long enough.
    let [left, between, right] = [300, 50, 300].map(|size| rig.malloc(size * MIB, DEFAULT));
    assert!(rig.heap.free(left) && rig.heap.free(right));
    let across = rig.malloc(580 * MIB, DEFAULT);
    assert!(rig.heap.free(across) && rig.heap.free(between));
    let side = rig.stream();
    let (kept, busy) = (rig.malloc(400 * MIB, DEFAULT), rig.malloc(400 * MIB, side));
    as_program(|| rig.gpu.launch(0, side.0, 1, 5_000_000)).unwrap();
    assert!(rig.heap.free(busy));
    let waited = rig.malloc(450 * MIB, DEFAULT);
    let Err(Error::OutOfMemory(mut report)) = rig.heap.malloc(700 * MIB, 0, DEFAULT) else {
        panic!("700 MiB cannot be had")
    };
    rig.heap.note_out_of_memory(&mut report, DEFAULT);
    rig.heap.mark_step();
    assert!(rig.heap.free(kept) && rig.heap.free(waited));
    rig.heap.trim();
    rig.heap.mark_step();
    rig.check();
}

/// How often each line's beginning (up to the bracket) came.
fn counted(log: &str) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for line in log.lines() {
        *counts.entry(line.split(" (").next().unwrap_or(line)).or_default() += 1;
    }
    counts
}

#[test]
fn what_the_heap_does_shows_in_a_domain_of_its_own_with_counters() {
    let name = "what_the_heap_does_shows_in_a_domain_of_its_own_with_counters";
    let Some((log, said)) = told(name, &tool(false), &[], || program("nvtx:on")) else { return };
    assert!(!log.contains("bad"), "{log}");
    assert!(log.starts_with("domain gruyere\n"), "{said}{log}");
    let counts = counted(&log);
    for line in [
        "push gruyere: grow",
        "push gruyere: stitch",
        "push gruyere: wait on host",
        "push gruyere: reclaim",
        "push gruyere: trim",
        "mark gruyere: out of memory",
        "category gruyere: 1 grow",
    ] {
        assert!(counts.contains_key(line), "no {line:?} in\n{log}");
    }
    assert_eq!(counts["mark gruyere: step"], 2);
    assert!(
        log.contains("mark gruyere: out of memory (734003200)\n"),
        "the payload is what was asked for: {log}"
    );
    let begun: usize =
        counts.iter().filter(|(line, _)| line.starts_with("push")).map(|(_, count)| count).sum();
    assert_eq!(begun, counts["pop gruyere"], "every range ends");
    // Pages move within a growth.
    let mut open = Vec::new();
    for line in log.lines() {
        match line.split_once(": ") {
            _ if line == "pop gruyere" => drop(open.pop()),
            Some(("push gruyere", what)) => {
                let what = what.split(" (").next().unwrap_or("");
                assert!(what != "stitch" || open.last() == Some(&"grow"), "{what} in {open:?}");
                open.push(what);
            }
            _ => {}
        }
    }
    // Each counter is made once, with its unit in its description, and samples are of those.
    let id = |counter: &str| -> &str {
        let line = format!("counter gruyere: GPU 0 {counter} = ");
        let mut made = log.lines().filter_map(|entry| entry.strip_prefix(&line));
        let first = made.next().unwrap_or_else(|| panic!("no counter {counter} in\n{log}"));
        assert!(made.next().is_none() && first.contains("bytes"), "{first}");
        first.split(' ').next().unwrap_or("")
    };
    let samples = |counter: &str| -> Vec<u64> {
        let line = format!("sample gruyere: {} = ", id(counter));
        log.lines().filter_map(|entry| entry.strip_prefix(&line)?.parse().ok()).collect()
    };
    let live = samples("live");
    assert!(
        live.starts_with(&[850 * MIB]) && live.last() == Some(&0) && live.len() >= 4,
        "{live:?}"
    );
    let reserved = samples("reserved");
    assert!(
        reserved.contains(&(400 * MIB)) || reserved.iter().any(|&bytes| bytes >= 800 * MIB),
        "{reserved:?}"
    );
    assert_eq!(reserved.last(), Some(&0), "all was given back: {reserved:?}");
    assert_eq!(samples("largest request").len(), 2);
    assert_eq!(samples("pending").len(), 2);
}

#[test]
fn a_tool_without_counters_gets_ranges_and_marks_with_bytes() {
    let name = "a_tool_without_counters_gets_ranges_and_marks_with_bytes";
    let settings = [("GRUYERE_LOG", "info")];
    let Some((log, said)) = told(name, &tool(true), &settings, || program("nvtx:on")) else {
        return;
    };
    assert!(!log.contains("bad") && !log.contains("sample") && !log.contains("extension"), "{log}");
    assert!(
        log.contains("push gruyere: grow (314572800)")
            && log.contains("mark gruyere: out of memory"),
        "{log}"
    );
    assert!(said.contains("does not support counters"), "{said}");
}

#[test]
fn nothing_is_loaded_unless_it_is_asked_for() {
    let name = "nothing_is_loaded_unless_it_is_asked_for";
    let Some((log, _)) = told(name, &tool(false), &[], || program("nvtx:off")) else { return };
    assert_eq!(log, "");
}

#[test]
fn a_tool_that_declines_or_is_not_there_is_told_and_changes_nothing() {
    let name = "a_tool_that_declines_or_is_not_there_is_told_and_changes_nothing";
    let run =
        |tool: &Path, settings: &[(&str, &str)]| told(name, tool, settings, || program("nvtx:on"));
    let Some((log, said)) = run(&tool(false), &[("NVTX_TOOL_DECLINES", "1")]) else { return };
    assert!(log.is_empty() && said.contains("declined"), "{said}");
    let Some((_, said)) = run(Path::new("/nowhere/tool.so"), &[]) else { return };
    assert!(said.contains("/nowhere/tool.so") && said.contains("cannot be used"), "{said}");
    let Some((_, said)) = run(Path::new(""), &[("GRUYERE_LOG", "info")]) else { return };
    assert!(said.contains("is not set") && !said.contains("cannot be used"), "{said}");
    // A library that is no tool.
    let Some((_, said)) = run(Path::new("libc.so.6"), &[]) else { return };
    assert!(said.contains("it is not an NVTX tool"), "{said}");
}
