//! No command panics, hangs or dies on a record that is missing, foreign, cut, of another version,
//! or full of lies. Records are data of other processes.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use gruyere_record::layout::{PAGE, VERSION};
use gruyere_record::{
    BlockEntry, DeviceFacts, DeviceGauge, EventKind, Record, RecordOptions, SegmentEntry,
    SegmentKind, clock,
};

/// Every command that reads a record, with its arguments. RECORD is the file, FOLDER its folder,
/// OUT a writable file.
const COMMANDS: &[&[&str]] = &[
    &["diff", "RECORD", "RECORD", "--json"],
    &["diff", "RECORD", "RECORD"],
    &["export", "--print", "--directory", "FOLDER"],
    &["export", "--print", "--openmetrics", "--directory", "FOLDER"],
    &["map", "RECORD", "--html", "OUT"],
    &["map", "RECORD", "--json"],
    &["map", "RECORD", "--physical", "--by", "age", "--color", "always"],
    &["map", "RECORD"],
    &["address", "RECORD", "0x40000000", "--json"],
    &["address", "RECORD", "12345"],
    &["post", "RECORD", "--json"],
    &["post", "RECORD"],
    &["post", "RECORD", "--html", "OUT"],
    &["ps", "--directory", "FOLDER"],
    &["ps", "--json", "--directory", "FOLDER"],
    &["record", "RECORD", "--for", "10ms", "-o", "OUT"],
    &["report", "RECORD", "--json"],
    &["report", "RECORD"],
    &["snapshot", "RECORD", "--json", "-o", "OUT"],
    &["snapshot", "RECORD", "-o", "OUT"],
    &["stat", "RECORD", "--json"],
    &["stat", "RECORD"],
];

/// The longest time for a command on a record of some MiB.
const PATIENCE: Duration = Duration::from_secs(60);

/// A record with data in each of its parts.
fn record(folder: &Path) -> PathBuf {
    let options = RecordOptions {
        directory: folder.to_owned(),
        ring_events: 256,
        max_blocks: 4096,
        ..RecordOptions::default()
    };
    let facts = DeviceFacts { name: "Phantom".into(), uuid: [7; 16], total_memory: 80 << 30 };
    let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
    let (mut shard, mut device) = (record.shard(0, 0), record.device(0));
    for n in 0..300u64 {
        let size = 512 << (n % 14);
        let entry = BlockEntry {
            address: (7 << 40) + (n << 23),
            size,
            requested: size - 7,
            lifetime: n as u8 % 4,
            step: n as u32 / 10,
            stream: n as u32 % 3,
            ..BlockEntry::default()
        };
        let slot = shard.block_insert(&entry);
        shard.event(
            EventKind::Malloc,
            entry.lifetime,
            entry.stream,
            entry.address,
            size,
            clock::now(),
        );
        if n % 3 == 0 {
            shard.block_remove(slot, size, size - 7, entry.lifetime, false);
            shard.event(
                EventKind::Free,
                entry.lifetime,
                entry.stream,
                entry.address,
                size,
                clock::now(),
            );
        }
        device.set(&[(DeviceGauge::Reserved, n << 23), (DeviceGauge::Step, n / 10)]);
        device.sample(n << 22);
    }
    let segment = |kind, address, bytes, chunk, pages| {
        let entry = SegmentEntry { kind, address, bytes, chunk, pages, ..SegmentEntry::default() };
        record.segment_insert(&entry);
    };
    segment(SegmentKind::Reservation, 7 << 40, 1 << 40, 0, 0);
    for n in 0..64u64 {
        segment(SegmentKind::Chunk, 0, 32 << 20, n as u32, 0);
        segment(SegmentKind::View, (7 << 40) + (n << 25), 32 << 20, n as u32, 0xffff);
    }
    segment(SegmentKind::Slab, 7 << 40, 2 << 20, 0, 0);
    record.event(EventKind::Grow, 0, 0, 0, 7 << 40, 32 << 20, clock::now());
    let path = folder.join("gruyere-1-2-3-0.record");
    // A copy, whose lock is free, so it reads as a dead process's.
    std::fs::copy(record.path().expect("a file"), &path).unwrap();
    record.close();
    path
}

fn run(arguments: &[&str], record: &Path, output: &Path) -> (ExitStatus, String) {
    let place = |argument: &&str| match *argument {
        "RECORD" => record.display().to_string(),
        "FOLDER" => record.parent().unwrap().display().to_string(),
        "OUT" => output.display().to_string(),
        other => other.to_owned(),
    };
    let mut child = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .args(arguments.iter().map(place))
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if began.elapsed() > PATIENCE => {
                let _ = child.kill();
                panic!("{arguments:?} hangs on {}", record.display());
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let mut error = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut error).unwrap();
    (status, error)
}

/// All commands on this record end with a code that their help names, and without a panic.
fn all_survive(record: &Path, what: &str) {
    let output = record.with_extension("out");
    for arguments in COMMANDS {
        let (status, error) = run(arguments, record, &output);
        assert!(
            status.code().is_some_and(|code| matches!(code, 0 | 1 | 3)),
            "{arguments:?}, {what}: {status}\n{error}"
        );
        assert!(!error.contains("panicked"), "{arguments:?}, {what}: {error}");
        let _ = std::fs::remove_file(&output);
    }
}

#[test]
fn what_is_no_record_is_refused_with_its_name_and_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let good = std::fs::read(record(folder.path())).unwrap();
    std::fs::remove_file(folder.path().join("gruyere-1-2-3-0.record")).unwrap();
    let path = folder.path().join("gruyere-9-9-9-0.record");
    let other_version = {
        let mut bytes = good.clone();
        bytes[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
        bytes
    };
    let cases: [(&str, Option<Vec<u8>>); 6] = [
        ("missing", None),
        ("empty", Some(Vec::new())),
        ("text", Some(b"hello, I am a text and not a record of anything at all".repeat(100))),
        ("cut in the header", Some(good[..100].to_vec())),
        ("cut", Some(good[..good.len() / 2].to_vec())),
        ("of another version", Some(other_version)),
    ];
    for (what, bytes) in cases {
        match bytes {
            Some(bytes) => std::fs::write(&path, bytes).unwrap(),
            None => assert!(!path.exists()),
        }
        for arguments in COMMANDS.iter().filter(|arguments| arguments.contains(&"RECORD")) {
            let (status, error) = run(arguments, &path, &folder.path().join("out"));
            assert_eq!(status.code(), Some(1), "{arguments:?}, {what}: {error}");
            assert!(error.contains(path.to_str().unwrap()), "{arguments:?}, {what}: {error}");
            assert!(
                error.contains(';') || error.contains("delete"),
                "a remedy; {arguments:?}, {what}: {error}"
            );
            assert!(!error.contains("panicked"), "{arguments:?}, {what}: {error}");
        }
        all_survive(&path, what);
    }
}

#[test]
fn a_record_full_of_lies_is_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = record(folder.path());
    let good = std::fs::read(&path).unwrap();
    all_survive(&path, "as it was");
    // Words with non-zero bytes: the rest of the file is holes.
    let used: Vec<usize> = (0..good.len() / 8)
        .filter(|word| good[word * 8..word * 8 + 8].iter().any(|&byte| byte != 0))
        .collect();
    let mut random = 0x2545_F491_4F6C_DD1Du64;
    let mut pick = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    for round in 0..40 {
        let mut bytes = good.clone();
        for _ in 0..1 + pick(60) {
            let word = match pick(10) {
                // The header, behind the magic and the version.
                0 => 2 + pick(PAGE as usize / 8 - 2),
                _ => used[pick(used.len())].max(2),
            };
            let value = match pick(8) {
                0 => 0,
                1 => u64::MAX,
                2 => 1 << 63,
                3 => 1 << pick(64),
                4 => u64::from_le_bytes(*b"\x1b[2J\x07<b>"),
                5 => u64::from_le_bytes(good[word * 8..word * 8 + 8].try_into().unwrap())
                    .wrapping_add(1),
                6 => (7 << 40) + ((pick(1 << 20) as u64) << 9),
                _ => pick(usize::MAX) as u64,
            };
            bytes[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        std::fs::write(&path, bytes).unwrap();
        all_survive(&path, &format!("round {round}"));
    }
}
