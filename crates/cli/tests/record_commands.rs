//! `gruyere ps` and `gruyere stat` from another process.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Output};

use gruyere_record::layout::VERSION;
use gruyere_record::{
    BlockEntry, DeviceFacts, DeviceGauge, EventKind, Record, RecordOptions, SHARDS, SegmentEntry,
    SegmentKind, clock,
};
use serde_json::Value;

#[path = "common/sites.rs"]
mod sites;
use sites::{BASE, PAGE, record_with_sites};

/// A record of this process with a known state: 3 live blocks, one pending.
fn record(directory: &Path) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 256,
        max_blocks: 4096,
        ..RecordOptions::default()
    };
    let facts =
        |n: u8| DeviceFacts { name: format!("Phantom {n}"), uuid: [n; 16], total_memory: 80 << 30 };
    let record: &'static Record =
        Box::leak(Box::new(Record::create(&options, &[facts(0), facts(1)])));
    // The first block is small in torch's sense.
    let (mut small, mut large) = (record.shard(1, 0), record.shard(1, SHARDS as u32 - 1));
    for n in 0..5u64 {
        let shard = if n == 0 { &mut small } else { &mut large };
        let size = 1 << (20 + n);
        let entry = BlockEntry {
            address: n << 30,
            size,
            requested: size - 100,
            lifetime: n as u8 % 4,
            device: 1,
            ..BlockEntry::default()
        };
        let slot = shard.block_insert(&entry);
        shard.event(EventKind::Malloc, entry.lifetime, 0, entry.address, size, clock::now());
        match n {
            0 => shard.block_remove(slot, size, size - 100, entry.lifetime, false),
            1 => shard.block_pending(slot, size, size - 100, entry.lifetime),
            _ => {}
        }
    }
    record.device(1).set(&[
        (DeviceGauge::Reserved, 56 << 20),
        (DeviceGauge::ReservedPeak, 60 << 20),
        (DeviceGauge::Rung4Calls, 3),
        (DeviceGauge::Rung4Microseconds, 1500),
        (DeviceGauge::Lost, 14 << 20),
        (DeviceGauge::LargestRequest, 13 << 20),
        (DeviceGauge::FreeHeld, 26 << 20),
        (DeviceGauge::LargestGrowing, 320 << 20),
    ]);
    let segment = |kind, bytes, chunk, pages| {
        record.segment_insert(&SegmentEntry {
            kind,
            bytes,
            device: 1,
            chunk,
            pages,
            ..SegmentEntry::default()
        });
    };
    segment(SegmentKind::Span, 56 << 20, 0, 0);
    segment(SegmentKind::Chunk, 8 << 20, 3, 0);
    segment(SegmentKind::View, 8 << 20, 3, 0b1011);
    segment(SegmentKind::View, 8 << 20, 3, 0);
    segment(SegmentKind::Reservation, 1 << 40, 0, 0);
    record.latency(true, 3000);
    record
}

fn gruyere(arguments: &[&str], directory: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.args(arguments).arg("--directory").arg(directory);
    command.output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

fn json_of(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    json_of(output)
}

#[test]
fn ps_lists_a_line_for_each_device_that_a_live_process_uses() {
    let folder = tempfile::tempdir().unwrap();
    let empty = gruyere(&["ps"], folder.path());
    assert!(empty.status.success() && text(&empty.stdout).contains("no live process"));
    let record = record(folder.path());
    let output = gruyere(&["ps"], folder.path());
    let table = text(&output.stdout);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 2, "{table}");
    let pid = std::process::id().to_string();
    let head: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(head, ["PID", "RANK", "GPU", "LIVE", "PEAK", "HELD", "IDLE", "LOST", "COMMAND"]);
    let words: Vec<&str> = lines[1].split_whitespace().collect();
    assert_eq!((words[0], words[2]), (pid.as_str(), "1"), "{table}");
    // The timeline has no sample: the current live memory is the peak.
    assert_eq!((words[3], words[5]), ("28.00", "28.00"), "{table}");
    assert!(
        lines[1].contains("28.00 MiB")
            && lines[1].contains("56.00 MiB")
            && lines[1].contains("12.00 MiB")
            && lines[1].contains("25.0%"),
        "{table}"
    );
    assert!(lines[1].contains("record_commands"), "{table}");
    let all = json(&gruyere(&["ps", "--json"], folder.path()));
    let process = &all["processes"][0];
    assert_eq!(process["pid"], std::process::id());
    assert_eq!(process["devices"][1]["live_bytes"], 28 << 20);
    assert_eq!(process["devices"][1]["live_peak_bytes"], 28 << 20);
    assert_eq!(process["devices"][1]["peak_bytes"], 28 << 20);
    let device = &process["devices"][1];
    assert_eq!((&device["fragmentation"], &device["unused"]), (&0.25.into(), &0.5.into()));
    assert_eq!(
        (&device["lost_bytes"], &device["idle_bytes"]),
        (&(14 << 20).into(), &(12 << 20).into())
    );
    record.close();
}

#[test]
fn ps_sweeps_the_dead_only_when_told_and_never_the_living() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let dead = folder.path().join("gruyere-1-2-3-0.record");
    std::fs::copy(record.path().unwrap(), &dead).unwrap();
    let output = gruyere(&["ps"], folder.path());
    let table = text(&output.stdout);
    assert!(table.contains("`gruyere ps --sweep` removes their records"), "{table}");
    // A conclusion may continue below its row.
    let (_, died) = table.split_once("Died").unwrap();
    let pid = std::process::id().to_string();
    assert!(died.lines().any(|row| row.trim_start().starts_with(&pid)), "{table}");
    assert!(dead.exists());
    assert_eq!(
        json(&gruyere(&["ps", "--json"], folder.path()))["stale"].as_array().map(Vec::len),
        Some(1),
        "a row for the dead record"
    );
    assert_eq!(json(&gruyere(&["ps", "--json", "--sweep"], folder.path()))["swept"], 1);
    assert!(!dead.exists() && record.path().unwrap().exists());
    record.close();
}

#[test]
fn a_dead_record_that_can_not_be_read_has_its_row_and_post_takes_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let file = |number: u32| folder.path().join(format!("gruyere-1-2-3-{number}.record"));
    std::fs::copy(record.path().unwrap(), file(0)).unwrap();
    std::fs::copy(record.path().unwrap(), file(1)).unwrap();
    // Of two with the same last sign of life, the later name comes first: the damaged record.
    let damaged = std::fs::File::options().write(true).open(file(1)).unwrap();
    damaged.set_len(damaged.metadata().unwrap().len() / 2).unwrap();
    record.close();
    let output = gruyere(&["ps"], folder.path());
    let table = text(&output.stdout);
    let row = table.lines().find(|line| line.contains("can't be read: damaged")).expect("a row");
    assert!(row.contains("  unknown  "), "{table}");
    // As its help says, with a line for those who read the code alone.
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = text(&output.stderr);
    assert!(said.contains("1 record of dead processes can't be read"), "{said}");
    assert!(said.contains("`gruyere ps --sweep` removes"), "{said}");
    let listed = gruyere(&["ps", "--json"], folder.path());
    assert_eq!(listed.status.code(), Some(1), "{listed:?}");
    let all = json_of(&listed);
    let unread = all["dead"].as_array().unwrap().iter().find(|one| one["command"].is_null());
    let unread = unread.expect("its entry");
    assert_eq!((&unread["pid"], &unread["exit"]), (&2.into(), &"unknown".into()), "{all}");
    // This record's parts do not fit together: torn, exit code 3.
    let told = gruyere(&["post", "--json"], folder.path());
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    assert_eq!(told["state"]["process"]["pid"], std::process::id());
    std::fs::remove_file(file(0)).unwrap();
    let none = gruyere(&["post"], folder.path());
    assert_eq!(none.status.code(), Some(1));
    assert!(text(&none.stderr).contains("damaged"), "{none:?}");
}

#[test]
fn a_living_process_whose_record_can_not_be_read_is_told_as_one_that_runs() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    // As of another version: the lock is held, and the header's version is not ours.
    let path = record.path().unwrap();
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&(VERSION + 1).to_le_bytes(), 8).unwrap();
    let pid = std::process::id().to_string();
    let said = |arguments: &[&str]| {
        let output = gruyere(arguments, folder.path());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        text(&output.stderr)
    };
    for arguments in [&["post"][..], &["stat"]] {
        let said = said(arguments);
        assert!(said.contains(&format!("process {pid} runs, but its record can't")), "{said}");
        assert!(said.contains("another version") && !said.contains("none runs"), "{said}");
    }
    let named = said(&["stat", &pid]);
    assert!(named.contains(&format!("the record of process {pid} can't be read")), "{named}");
    assert!(!named.contains("has no record"), "{named}");
    let table = text(&gruyere(&["ps"], folder.path()).stdout);
    assert!(table.contains("no live process is listed: 1 record can't be read"), "{table}");
    assert_eq!(json_of(&gruyere(&["ps", "--json"], folder.path()))["unread"], 1);
    record.close();
}

/// A record with room for 512 of the 600 blocks of a MiB that are live.
fn record_without_room(directory: &Path) -> &'static Record {
    let options =
        RecordOptions { directory: directory.to_owned(), max_blocks: 512, ..Default::default() };
    let facts = DeviceFacts { name: "Phantom".into(), uuid: [1; 16], total_memory: 80 << 30 };
    let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
    record.segment_insert(&SegmentEntry {
        address: BASE,
        bytes: 300 * PAGE,
        ..SegmentEntry::default()
    });
    let mut shard = record.shard(0, 0);
    for n in 0..600 {
        let (address, size) = (BASE + (n << 20), 1 << 20);
        shard.block_insert(&BlockEntry { address, size, requested: size, ..Default::default() });
    }
    record.device(0).set(&[(DeviceGauge::Reserved, 600 << 20)]);
    record
}

#[test]
fn what_is_held_is_told_by_the_gauge_where_the_record_had_no_room() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_without_room(folder.path());
    record.device(0).set(&[(DeviceGauge::Reserved, 700 << 20)]);
    let pid = std::process::id().to_string();
    let page = text(&gruyere(&["post", &pid], folder.path()).stdout);
    assert!(page.contains("700.00 MiB held"), "{page}");
    let post = gruyere(&["post", &pid, "--json"], folder.path());
    let post: Value = serde_json::from_str(&text(&post.stdout)).unwrap();
    let held = &post["state"]["devices"][0]["held"];
    assert_eq!(
        (&held["reserved_bytes"], &held["rest_bytes"]),
        (&(700 << 20).into(), &(100 << 20).into())
    );
    record.close();
}

#[test]
fn a_part_of_the_memory_is_never_told_as_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_without_room(folder.path());
    let pid = std::process::id().to_string();
    let told = |arguments: &[&str]| {
        let output = gruyere(arguments, folder.path());
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {output:?}");
        (text(&output.stdout), text(&output.stderr))
    };
    let missing = "88 live blocks (88.00 MiB)";
    let (post, _) = told(&["post", &pid]);
    assert!(post.lines().take(3).any(|line| line.contains(missing)), "{post}");
    assert!(post.contains("600 MiB live"), "the sum is that of all blocks: {post}");
    let (post, _) = told(&["post", &pid, "--json"]);
    let post: Value = serde_json::from_str(&post).unwrap();
    assert_eq!(post["ended"]["unrecorded_blocks"], 88);
    let (snapshot, said) = told(&["snapshot", &pid, "--json", "-o", "-"]);
    assert!(said.contains(missing), "{said}");
    let state: Value = serde_json::from_str(&snapshot).unwrap();
    assert_eq!(state["devices"][0]["unrecorded"]["bytes"], 88 << 20);
    assert_eq!(state["devices"][0]["held"]["live_bytes"], 512 << 20);
    let file = folder.path().join("before.json");
    std::fs::write(&file, snapshot).unwrap();
    let file = file.to_str().unwrap();
    let (_, said) = told(&["diff", file, &pid]);
    assert!(said.contains(&format!("{file}: Incomplete")) && said.contains(&pid), "{said}");
    let (map, _) = told(&["map", &pid]);
    let second = map.lines().nth(1).unwrap();
    assert!(second.starts_with("incomplete: 88 live blocks"), "{map}");
    let (map, _) = told(&["map", &pid, "--json"]);
    let map: Value = serde_json::from_str(&map).unwrap();
    assert_eq!(map["not_in_the_record"]["blocks"], 88);
    record.close();
}

#[test]
fn stat_prints_all_gauges_by_pid_and_by_file() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let pid = std::process::id().to_string();
    let all = json(&gruyere(&["stat", &pid, "--json"], folder.path()));
    let device = &all["devices"][1];
    assert_eq!(device["live_bytes"], 28 << 20);
    assert_eq!(device["total"]["mallocs"], 5);
    assert_eq!(device["total"]["frees"], 2);
    assert_eq!(device["total"]["pending_bytes"], 2 << 20);
    assert_eq!(device["lifetimes"]["step"]["live_blocks"], 1);
    assert_eq!(device["lifetimes"]["persistent"]["live_bytes"], 8 << 20);
    assert_eq!(device["small_pool"]["mallocs"], 1);
    assert_eq!(device["gauges"]["reserved_peak_bytes"], 60 << 20);
    assert_eq!(device["gauges"]["total_memory_bytes"], 80u64 << 30);
    assert_eq!(device["gauges"]["rung4_microseconds"], 1500);
    // 56 MiB held, 28 live, 2 waiting: 26 free.
    assert_eq!(
        (&device["fragmentation"], &device["external_fragmentation"]),
        (&0.25.into(), &0.5.into())
    );
    assert_eq!(device["peak_ratio"], 60.0 / 28.0);
    let internal = device["internal_fragmentation"].as_f64().unwrap();
    assert!((internal - 300.0 / (28 << 20) as f64).abs() < 1e-12, "{internal}");
    let p99 = device["request_p99_bytes"].as_u64().unwrap();
    assert!(p99.abs_diff(16 << 20) <= 16 << 16, "{p99}");
    let fits = device["p99_fits"].as_f64().unwrap();
    assert!((fits - (320 << 20) as f64 / p99 as f64).abs() < 1e-9, "{fits}");
    assert_eq!(all["blocks"]["live"], 3);
    assert_eq!(all["blocks"]["pending"], 1);
    let segments = &all["segments"];
    assert_eq!(segments["span_bytes"], 56 << 20);
    assert_eq!((&segments["chunks"], &segments["chunk_bytes"]), (&1.into(), &(8 << 20).into()));
    assert_eq!((&segments["views"], &segments["view_bytes"]), (&2.into(), &(16 << 20).into()));
    assert_eq!(
        (&segments["retired_views"], &segments["retired_view_bytes"]),
        (&1.into(), &(8 << 20).into())
    );
    assert_eq!(segments["reserved_address_bytes"], 1u64 << 40);
    assert_eq!(
        (&all["events"]["written"], &all["events"]["lost"]),
        (&Value::from(5), &Value::from(0))
    );
    assert_eq!(all["histograms"]["malloc_bytes"]["count"], 5);
    assert_eq!(all["process"]["live"], true);
    let path = record.path().unwrap().to_str().unwrap();
    let output = gruyere(&["stat", path], folder.path());
    let page = text(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for part in [
        "(live)",
        "device 1 Phantom 1",
        "held, at the peak",
        "56.00 MiB",
        "fragmentation (lost / held)            25.00%",
        "synchronise",
        "persistent",
        "p99.9",
        "lost 0",
        "1.500 ms",
        "99th-percentile request",
        " times",
    ] {
        assert!(page.contains(part), "no {part:?} in\n{page}");
    }
    for part in ["_bytes", "_microseconds", "rung", "retired"] {
        assert!(!page.contains(part), "{part:?} is no word for people:\n{page}");
    }
    record.close();
}

#[test]
fn stat_and_map_fit_the_columns_that_are_asked_for_in_a_pipe_too() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let path = record.path().unwrap().to_str().unwrap();
    let command = std::env::args().next().unwrap();
    for (arguments, columns) in [(["stat", path], 80), (["map", path], 60), (["map", path], 140)] {
        let mut gruyere = Command::new(env!("CARGO_BIN_EXE_gruyere"));
        let output = gruyere.args(arguments).env("COLUMNS", columns.to_string()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let page = text(&output.stdout);
        // A path is a word.
        let lines = page.lines().filter(|line| !line.contains(path) && !line.contains(&command));
        let widest = lines.map(|line| line.chars().count()).max().unwrap();
        assert!((columns - 40..=columns).contains(&widest), "{widest} of {columns}\n{page}");
    }
    record.close();
}

#[test]
fn what_can_not_be_read_is_said_with_its_remedy_and_exit_code_1() {
    let folder = tempfile::tempdir().unwrap();
    let nobody = gruyere(&["stat", "999999999"], folder.path());
    assert_eq!(nobody.status.code(), Some(1));
    assert!(text(&nobody.stderr).contains("gruyere ps"), "{nobody:?}");
    let junk = folder.path().join("gruyere-1-2-3-0.record");
    std::fs::write(&junk, "junk of more than eight bytes").unwrap();
    let output = gruyere(&["stat", junk.to_str().unwrap()], folder.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("not a record"), "{output:?}");
    let listed = gruyere(&["ps"], folder.path());
    assert_eq!(
        listed.status.code(),
        Some(1),
        "a record that can't be read is trouble, said on stderr: {listed:?}"
    );
    let said = text(&listed.stderr);
    assert!(said.contains("gruyere-1-2-3-0.record"), "{said}");
    // Nobody named that file, so "name another" would not help.
    assert!(said.contains("remove it, or move it") && !said.contains("name another"), "{said}");
    let other = folder.path().join("gruyere-1-2-4-0.record");
    std::fs::create_dir(&other).unwrap();
    let said = text(&gruyere(&["ps"], folder.path()).stderr);
    let line = said.lines().find(|line| line.contains("gruyere-1-2-4-0.record")).expect("named");
    assert!(line.contains("remove it") && !line.contains("`gruyere ps`"), "{line}");
    let empty = folder.path().join("gruyere-1-2-5-0.record");
    std::fs::write(&empty, "").unwrap();
    let swept = gruyere(&["ps", "--sweep"], folder.path());
    assert!(empty.exists(), "it may still be made: {swept:?}");
    let said = text(&swept.stderr);
    assert!(said.contains("removes it once its last write is a minute ago"), "{said}");
    let missing = gruyere(&["ps"], Path::new("/nowhere"));
    assert_eq!(missing.status.code(), Some(1));
    assert_eq!(gruyere(&["ps", "--nonsense"], folder.path()).status.code(), Some(2));
}

#[test]
fn help_has_examples_and_exit_codes() {
    for command in ["ps", "stat"] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_gruyere")).args([command, "--help"]).output().unwrap();
        let help = text(&output.stdout);
        assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    }
}

#[test]
fn an_address_is_told_what_lies_there_and_what_lay_there_before() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let mut shard = record.shard(1, SHARDS as u32 - 1);
    // Another block had the place of the 4 MiB block.
    let place = 2u64 << 30;
    shard.event(EventKind::Malloc, 0, 7, place - 4096, 1 << 20, clock::now());
    shard.event(EventKind::Free, 0, 7, place - 4096, 1 << 20, clock::now());
    let pid = std::process::id().to_string();
    let within = format!("{:#x}", place + 512);
    let told = json(&gruyere(&["address", &pid, &within, "--json"], folder.path()));
    assert_eq!(told["block"]["address"], place);
    assert_eq!(told["block"]["bytes"], 4 << 20);
    assert_eq!(told["backed"], "unmapped", "the record says so: nothing is mapped there");
    assert_eq!(told["before"][0]["bytes"], 1 << 20);
    assert_eq!(told["before"][0]["stream"], 7);
    assert!(
        told["before"][0]["freed_nanoseconds"].as_u64()
            >= told["before"][0]["handed_out_nanoseconds"].as_u64()
    );
    let page = text(&gruyere(&["address", &pid, &within], folder.path()).stdout);
    assert!(page.contains("live block of 4.00 MiB") && page.contains("byte 512 of it"), "{page}");
    assert!(page.contains("record_stream") && page.contains("stream 7"), "{page}");
    let nothing = json(&gruyere(&["address", &pid, "0x7f0000000000", "--json"], folder.path()));
    assert!(nothing["block"].is_null() && nothing["before"].as_array().unwrap().is_empty());
    let wrong = gruyere(&["address", &pid, "7f00"], folder.path());
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("write it as 0x"), "{wrong:?}");
    record.close();
}

#[test]
fn the_block_at_an_address_is_told_with_its_whole_stack() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_with_sites(folder.path());
    let pid = std::process::id().to_string();
    let told = |address: u64, more: &[&str]| {
        let address = format!("{address:#x}");
        gruyere(&[&["address", &pid, &address], more].concat(), folder.path())
    };
    let first = BASE + PAGE;
    let page = text(&told(first + PAGE, &[]).stdout);
    let lines: Vec<&str> = page.lines().map(str::trim).collect();
    let from = lines.iter().position(|line| line.starts_with("from")).unwrap();
    assert_eq!(lines[from], "from    train.py:20 in step", "{page}");
    assert_eq!(lines[from + 2], "/home/me/train.py:20 in Model.<locals>.step", "{page}");
    // In place of `auto`: the program's phase.
    let page = text(&told(first + 3 * PAGE, &[]).stdout);
    assert!(page.contains("stream 0, forward"), "{page}");
    assert!(page.contains("train.py:30 in step, module model.layers.3\n"), "{page}");
    let of_the_slab = json(&told(BASE, &["--json"]));
    assert_eq!(of_the_slab["block"]["site"]["line"]["line"], 50);
    assert_eq!(of_the_slab["block"]["lifetime"], "auto", "programs read what the record says");
    let backward = text(&told(first + 91 * PAGE, &[]).stdout);
    assert!(backward.contains("from    backward of train.py:10 in step"), "{backward}");
    assert!(backward.contains("of the forward:"), "{backward}");
    let unknown = text(&told(first + 105 * PAGE, &[]).stdout);
    assert!(unknown.contains("live block") && !unknown.contains("from  "), "{unknown}");
    record.close();
}
