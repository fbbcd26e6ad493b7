//! `gruyere watch` and `gruyere top` from another process.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gruyere_record::{
    BlockEntry, DeviceFacts, DeviceGauge, EventKind, Record, RecordOptions, clock,
};
use serde_json::Value;

#[path = "common/sites.rs"]
mod sites;
use sites::record_with_sites;

/// A record of this process: a device of 80 GiB, 60 held and 1 live.
fn record(directory: &Path) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 256,
        max_blocks: 4096,
        ..RecordOptions::default()
    };
    let facts = DeviceFacts {
        name: "Phantom $(touch pwned)".to_owned(),
        uuid: [1; 16],
        total_memory: 80 << 30,
    };
    let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
    let mut shard = record.shard(0, 0);
    let entry =
        BlockEntry { address: 1 << 30, size: 1 << 30, requested: 1 << 30, ..BlockEntry::default() };
    shard.block_insert(&entry);
    record.event(EventKind::Grow, 0, 0, 0, 1 << 30, 60 << 30, clock::now());
    record.device(0).set(&[
        (DeviceGauge::Reserved, 60 << 30),
        (DeviceGauge::Limit, 80 << 30),
        (DeviceGauge::TotalMemory, 80 << 30),
        (DeviceGauge::Step, 7),
        (DeviceGauge::Lost, 59 << 30),
        (DeviceGauge::CapturePinned, 2 << 30),
    ]);
    record
}

fn command(arguments: &[&str], directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.args(arguments).arg("--directory").arg(directory).env_remove("NO_COLOR");
    command
}

fn gruyere(arguments: &[&str], directory: &Path) -> Output {
    command(arguments, directory).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

fn pid() -> String {
    std::process::id().to_string()
}

fn lines(bytes: &[u8]) -> Vec<Value> {
    text(bytes).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Waits for the child; kills it after 20 s.
fn wait(mut child: Child) -> (Option<i32>, String, String) {
    let begin = Instant::now();
    while child.try_wait().expect("waited for").is_none() {
        if begin.elapsed() > Duration::from_secs(20) {
            child.kill().expect("killed");
            panic!("it did not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut out));
    child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut err));
    (child.wait().expect("waited for").code(), out, err)
}

#[test]
fn a_passed_threshold_is_said_once_and_exit_ends_with_4() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let all = [
        "watch",
        "fragmentation>30%",
        "live<2GiB",
        "live>2GiB",
        "lost>1GiB",
        "capture-pinned>1GiB",
        "--for",
        "600ms",
        "--interval",
        "100ms",
    ];
    let output = gruyere(&all, folder.path());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said = text(&output.stdout);
    assert_eq!(said.lines().count(), 4, "each once: {said}");
    assert!(said.contains("lost>1GiB is passed: lost is 59.00 GiB"), "{said}");
    assert!(said.contains("capture_pinned_bytes is 2.00 GiB"), "bytes of any gauge: {said}");
    assert!(said.contains("fragmentation>30% is passed: fragmentation is 98.3%"), "{said}");
    assert!(
        said.contains(&format!("pid {}", pid())) && said.contains("held 60.00 GiB of 80.00 GiB"),
        "{said}"
    );
    let one = gruyere(&["watch", &pid(), "live<2GiB", "--exit"], folder.path());
    assert_eq!(one.status.code(), Some(4), "{one:?}");
    let fine = gruyere(&["watch", &pid(), "live>99%", "--exit", "--for", "300ms"], folder.path());
    assert_eq!((fine.status.code(), text(&fine.stdout)), (Some(0), String::new()));
    record.close();
}

#[test]
fn an_interval_is_100_ms_at_least() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in [
        &["watch", "all", "live>1GiB", "--interval", "1ms"][..],
        &["top", "--json", "--interval", "99ms"],
    ] {
        let output = gruyere(arguments, folder.path());
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(text(&output.stderr).contains("expected 100ms or more"), "{output:?}");
    }
}

#[test]
fn json_has_a_line_each_with_the_facts() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let output = gruyere(&["watch", "all", "reserved>=60GiB", "--json", "--exit"], folder.path());
    let lines = lines(&output.stdout);
    assert_eq!(lines.len(), 1);
    let line = &lines[0];
    assert_eq!((&line["threshold"], &line["metric"]), (&"reserved>=60GiB".into(), &"held".into()));
    assert_eq!(
        (&line["value"], &line["bound"]),
        (&((60u64 << 30) as f64).into(), &((60u64 << 30) as f64).into())
    );
    assert_eq!(
        (&line["pid"], &line["device"], &line["unit"]),
        (&std::process::id().into(), &0.into(), &"bytes".into())
    );
    assert_eq!(line["limit_bytes"], 80u64 << 30);
    record.close();
}

#[test]
fn a_command_gets_the_facts_and_nothing_of_a_record_is_run() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let command_text = "printf '%s|%s|%s|%s' \"$GRUYERE_WATCH_PID\" \"$GRUYERE_WATCH_METRIC\" \
                        \"$GRUYERE_WATCH_DEVICE_NAME\" \"$GRUYERE_WATCH_VALUE_TEXT\" > facts";
    let child = command(
        &["watch", &pid(), "live<2GiB", "--exit", "--command", command_text],
        folder.path(),
    )
    .current_dir(folder.path())
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .expect("runs");
    let (code, _, err) = wait(child);
    assert_eq!(code, Some(4), "{err}");
    let facts = std::fs::read_to_string(folder.path().join("facts"))
        .expect("the command has run, and was waited for");
    assert_eq!(facts, format!("{}|live|Phantom $(touch pwned)|1.00 GiB", pid()));
    assert!(!folder.path().join("pwned").exists());
    let failing =
        gruyere(&["watch", &pid(), "live<2GiB", "--exit", "--command", "exit 3"], folder.path());
    assert!(text(&failing.stderr).contains("--command failed"), "{failing:?}");
    record.close();
}

#[test]
fn a_watch_does_not_wait_for_its_command_and_leaves_it_running() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    // It goes on after the watch: the end of this file tells so.
    let slow = "sleep 6; echo done > done";
    for (end, code) in [(&["--for", "300ms"][..], 0), (&["--exit"], 4)] {
        let done = folder.path().join("done");
        let begin = Instant::now();
        let child = command(
            &[&["watch", &pid(), "live<2GiB", "--command", slow], end].concat(),
            folder.path(),
        )
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(folder.path().join("said")).unwrap())
        .spawn()
        .expect("runs");
        assert_eq!(wait(child).0, Some(code), "{end:?}");
        assert!(!done.exists(), "{end:?}: the watch ends before its command");
        let said = std::fs::read_to_string(folder.path().join("said")).unwrap();
        assert!(said.contains("is left running (pid "), "{end:?}: {said}");
        while !done.exists() {
            assert!(begin.elapsed() < Duration::from_secs(30), "{end:?}: the command was lost");
            std::thread::sleep(Duration::from_millis(50));
        }
        std::fs::remove_file(done).unwrap();
    }
    record.close();
}

#[test]
fn a_watch_ends_when_its_process_does() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let watching = |directory: &Path| {
        command(&["watch", &pid(), "live>99%", "--exit", "--interval", "100ms"], directory)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("runs")
    };
    let child = watching(folder.path());
    // Time to find it, on a busy machine too: a watch of nothing would end with another code.
    std::thread::sleep(Duration::from_secs(3));
    record.close();
    let (code, out, _) = wait(child);
    assert_eq!((code, out.as_str()), (Some(0), ""));
}

#[test]
fn a_closed_pipe_ends_a_watch_without_noise() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let mut child =
        command(&["watch", "live<2GiB", "reserved>1GiB", "--interval", "100ms"], folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("runs");
    let mut line = String::new();
    {
        let out = child.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("a line");
    }
    assert!(line.contains("is passed"), "{line}");
    let (code, _, err) = wait(child);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    record.close();
}

#[test]
fn what_is_wrong_with_a_threshold_is_said_with_code_2() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, part) in [
        (&["watch", "fragmentaton>30%"][..], "did you mean fragmentation?"),
        (&["watch", "oom-in<10"], "10min"),
        (&["watch", "all"], "no threshold"),
        (&["watch"], "required"),
        (&["watch", "live>1GiB", "--every", "soon"], "10min"),
        (&["top", "--sort", "beauty"], "fragmentation"),
        (&["top", "--count", "3"], "--json"),
    ] {
        let output = gruyere(arguments, folder.path());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(text(&output.stderr).contains(part), "{arguments:?}: {}", text(&output.stderr));
    }
    for command in ["watch", "top"] {
        let nobody: &[&str] = if command == "watch" {
            &["watch", "999999999", "live>1GiB"]
        } else {
            &["top", "999999999", "--once"]
        };
        let output = gruyere(nobody, folder.path());
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains("gruyere ps"), "{output:?}");
        let help =
            Command::new(env!("CARGO_BIN_EXE_gruyere")).args([command, "--help"]).output().unwrap();
        let help = text(&help.stdout);
        assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    }
    let missing = gruyere(&["top", "--once"], Path::new("/nowhere"));
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("--directory"), "{missing:?}");
}

#[test]
fn top_prints_the_screen_once_as_text_of_the_size_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    for (width, height) in [(60, 24), (200, 50)] {
        let output = command(&["top", "--once"], folder.path())
            .env("COLUMNS", width.to_string())
            .env("LINES", height.to_string())
            .output()
            .expect("runs");
        assert!(output.status.success(), "{output:?}");
        let screen = text(&output.stdout);
        assert_eq!(screen.lines().count(), height);
        assert!(screen.lines().all(|line| line.chars().count() <= width), "{screen}");
        assert!(
            screen.contains(&pid()) && screen.contains("60.00 GiB") && screen.contains("98.3%"),
            "{screen}"
        );
        assert!(!screen.contains('\u{1b}'), "{screen:?}");
    }
    let screen = text(&gruyere(&["top", &pid(), "--once"], folder.path()).stdout);
    assert!(screen.contains("grow") && screen.contains("from the driver"), "{screen}");
    let no_terminal = gruyere(&["top"], folder.path());
    assert_eq!(no_terminal.status.code(), Some(1));
    assert!(text(&no_terminal.stderr).contains("--once"), "{no_terminal:?}");
    record.close();
}

#[test]
fn top_and_stat_say_the_same_of_a_process_that_configures_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let set = std::env::var("GRUYERE_CONF").unwrap_or_default();
    let said = if set.is_empty() { "all defaults" } else { &set };
    let stat = text(&gruyere(&["stat", &pid()], folder.path()).stdout);
    assert!(stat.contains(&format!("  configuration  {said}\n")), "{stat}");
    let json: Value =
        serde_json::from_slice(&gruyere(&["stat", &pid(), "--json"], folder.path()).stdout)
            .expect("JSON");
    assert_eq!(json["process"]["configuration"], *set);
    record.close();
}

#[test]
fn a_record_that_can_not_be_believed_is_named_and_no_clean_end() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let path = record.path().unwrap().to_owned();
    // Its counters never settle: each shard's are odd. (The header's table: offset, bytes per
    // entry, entries; 32 bytes per section, the shards' is the third.)
    let bytes = std::fs::read(&path).unwrap();
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let length = word(64 + 64 + 8) * word(64 + 64 + 16);
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![0xff; length as usize], word(64 + 64))
        .unwrap();
    for (target, code) in [(path.to_str().unwrap(), 1), ("all", 0)] {
        let output = gruyere(
            &["watch", target, "live>1TiB", "--for", "1500ms", "--interval", "100ms"],
            folder.path(),
        );
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let said = text(&output.stderr);
        assert_eq!(said.matches("never come to rest").count(), 1, "named, once: {said}");
        assert!(said.contains(path.file_name().unwrap().to_str().unwrap()), "{said}");
    }
    record.close();
}

#[test]
fn usage_lines_are_whole() {
    for (arguments, usage) in [
        (&["watch"][..], "Usage: gruyere watch [OPTIONS] [PID|FILE|all] <THRESHOLD>..."),
        (&["top"], "Usage: gruyere top [OPTIONS] [PID|FILE|all]"),
    ] {
        let help = Command::new(env!("CARGO_BIN_EXE_gruyere"))
            .args(arguments)
            .arg("--help")
            .output()
            .unwrap();
        assert!(text(&help.stdout).lines().any(|line| line == usage), "{}", text(&help.stdout));
    }
    // Brackets and angles in every command's help enclose whole arguments.
    let all =
        text(&Command::new(env!("CARGO_BIN_EXE_gruyere")).arg("--help").output().unwrap().stdout);
    let listed = all.split("Options:\n").next().unwrap();
    let groups = listed.lines().filter_map(|line| line.strip_prefix("  ")?.split("  ").next());
    let names: Vec<&str> = groups.filter(|name| !name.contains(' ')).collect();
    assert!(names.len() > 15 && names.contains(&"compare"), "{names:?}");
    for name in names {
        let help =
            Command::new(env!("CARGO_BIN_EXE_gruyere")).args([name, "--help"]).output().unwrap();
        let help = text(&help.stdout);
        let of_arguments = help.lines().filter(|line| {
            let line = line.trim_start();
            line.starts_with("Usage:") || line.starts_with('<') || line.starts_with('[')
        });
        for line in of_arguments {
            let line = line.split("  ").find(|part| !part.is_empty()).unwrap_or_default();
            let mut open = Vec::new();
            for letter in line.chars() {
                match letter {
                    '<' | '[' => open.push(letter),
                    '>' => assert_eq!(open.pop(), Some('<'), "{name}: {line}"),
                    ']' => assert_eq!(open.pop(), Some('['), "{name}: {line}"),
                    _ => {}
                }
            }
            assert!(open.is_empty(), "{name}: {line}");
        }
    }
}

#[test]
fn a_number_of_samples_of_which_none_is_printed_is_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let output = gruyere(&["top", "--json", "--count", "0"], folder.path());
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("--count"), "{}", text(&output.stderr));
}

#[test]
fn top_prints_samples_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let one: Value =
        serde_json::from_slice(&gruyere(&["top", "--json"], folder.path()).stdout).expect("JSON");
    let device = &one["processes"][0]["devices"][0];
    assert_eq!(
        (&device["live_bytes"], &device["reserved_bytes"]),
        (&(1u64 << 30).into(), &(60u64 << 30).into())
    );
    assert_eq!((&device["step"], &device["forecast"]), (&7.into(), &"unknown".into()));
    assert_eq!(device["allocated_bytes_per_second"], 0.0);
    assert_eq!(one["processes"][0]["state"], "live");
    let three = gruyere(&["top", "--json", "--count", "3", "--interval", "100ms"], folder.path());
    assert_eq!(lines(&three.stdout).len(), 3);
    record.close();
}

#[test]
fn top_and_stat_tell_what_the_lines_of_the_program_hold_and_what_grows() {
    let folder = tempfile::tempdir().unwrap();
    let without = record(folder.path());
    let sample = |folder: &Path| -> Value {
        serde_json::from_slice(&gruyere(&["top", "--json"], folder).stdout).expect("JSON")
    };
    assert!(sample(folder.path())["processes"][0]["devices"][0]["lines"].is_null());
    without.close();
    let folder = tempfile::tempdir().unwrap();
    let record = record_with_sites(folder.path());
    let lines = &sample(folder.path())["processes"][0]["devices"][0]["lines"];
    let first = &lines[0];
    assert_eq!(
        (&first["name"], &first["live_bytes"], &first["live_blocks"]),
        (&"backward of train.py:10 in step".into(), &(28u64 << 20).into(), &1.into())
    );
    assert_eq!(lines[1]["module"], "model.layers.13");
    // It holds little, and appears because it grows.
    let leak = lines.as_array().unwrap().iter().find(|line| line["name"] == "losses.py:7 in keep");
    let growth = serde_json::json!({ "bytes_a_step": 1 << 20, "since_step": 1, "bytes": 3 << 20 });
    assert_eq!(leak.unwrap()["growth"], growth, "{lines:#}");
    assert_eq!(lines.as_array().unwrap().len(), 11);
    for (width, name) in [("80", "train.py:130 in step"), ("160", "train.py:130 in step")] {
        let screen = command(&["top", "--once"], folder.path())
            .env("COLUMNS", width)
            .env("LINES", "50")
            .output()
            .unwrap();
        let screen = text(&screen.stdout);
        assert!(screen.contains(name) && screen.contains("26.00 MiB   12%"), "{screen}");
        assert!(screen.contains("forward"), "in the place of auto: {screen}");
    }
    let page = text(&gruyere(&["stat", &pid()], folder.path()).stdout);
    assert!(page.contains("\n    forward 45%, backward 13%, not known 42%\n"), "{page}");
    record.close();
}

#[test]
fn a_record_of_a_killed_process_and_one_that_is_none_are_shown_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let dead = folder.path().join("gruyere-1-2-3-0.record");
    std::fs::copy(record.path().unwrap(), &dead).unwrap();
    std::fs::write(folder.path().join("gruyere-1-2-4-0.record"), "junk of more than eight bytes")
        .unwrap();
    let sample: Value =
        serde_json::from_slice(&gruyere(&["top", "--json"], folder.path()).stdout).expect("JSON");
    assert_eq!(
        (&sample["stale"], sample["processes"].as_array().map(Vec::len)),
        (&1.into(), Some(1))
    );
    assert!(sample["unreadable"][0].as_str().unwrap().contains("not a record"), "{sample}");
    let named = gruyere(&["top", dead.to_str().unwrap(), "--once"], folder.path());
    assert!(named.status.success() && text(&named.stdout).contains("killed"), "{named:?}");
    let watched = gruyere(&["watch", dead.to_str().unwrap(), "live<2GiB"], folder.path());
    assert_eq!(watched.status.code(), Some(0), "{watched:?}");
    assert!(text(&watched.stdout).contains("is passed"), "its last words count: {watched:?}");
    assert!(text(&watched.stderr).contains("without a clean exit"), "{watched:?}");
    record.close();
}
