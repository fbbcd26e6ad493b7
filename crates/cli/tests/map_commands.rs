//! `gruyere map` from another process: its picture of a known record, and its errors on bad ones.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use gruyere_record::{
    BlockEntry, DeviceFacts, DeviceGauge, Record, RecordOptions, SegmentEntry, SegmentKind,
};
use serde_json::Value;

#[path = "common/sites.rs"]
mod sites;
use sites::record_with_sites;

const PAGE: u64 = 2 << 20;
const BASE: u64 = 0x7f00_0000_0000;

/// A record of this process: on device 1 a span of 8 pages with blocks and holes, a chunk of 4
/// pages of which one is spare.
fn record(directory: &Path, name: &str) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 256,
        max_blocks: 4096,
        ..RecordOptions::default()
    };
    let facts = DeviceFacts { name: name.to_owned(), uuid: [1; 16], total_memory: 80 << 30 };
    let record: &'static Record =
        Box::leak(Box::new(Record::create(&options, &[facts.clone(), facts])));
    let segment = |kind, address, bytes, slot, pages| {
        let entry = SegmentEntry {
            kind,
            address,
            bytes,
            slot,
            pages,
            chunk: 3,
            device: 1,
            lifetime: 2,
            ..SegmentEntry::default()
        };
        record.segment_insert(&entry);
    };
    segment(SegmentKind::Span, BASE, 8 * PAGE, 0, 0);
    segment(SegmentKind::Slab, BASE + 6 * PAGE, PAGE, 512 << 10, 0);
    segment(SegmentKind::Reservation, BASE + 100 * PAGE, 64 * PAGE, 0, 0);
    segment(SegmentKind::Chunk, 0, 4 * PAGE, 0, 0);
    segment(SegmentKind::View, BASE + 100 * PAGE, 4 * PAGE, 0, 0b0111);
    let mut shard = record.shard(1, 0);
    let mut block = |page: u64, offset: u64, size: u64, lifetime: u8, step: u32| {
        let entry = BlockEntry {
            address: BASE + page * PAGE + offset,
            size,
            requested: size - 100,
            lifetime,
            device: 1,
            step,
            ..BlockEntry::default()
        };
        shard.block_insert(&entry)
    };
    block(0, 0, 3 * PAGE, 3, 0);
    let pending = block(3, 0, PAGE, 1, 1);
    block(4, 512 << 10, 512 << 10, 2, 5);
    block(6, 0, 512 << 10, 0, 5);
    block(100, 0, 2 * PAGE, 2, 5);
    shard.block_pending(pending, PAGE, PAGE - 100, 1);
    record.device(1).set(&[(DeviceGauge::Reserved, 12 * PAGE), (DeviceGauge::Step, 5)]);
    record
}

fn map(arguments: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.arg("map").args(arguments).arg("--directory").arg(folder).env_remove("NO_COLOR");
    command.output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

fn drawn(arguments: &[&str], folder: &Path) -> String {
    let output = map(arguments, folder);
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout)
}

/// A page without the time at which it was made, the only part in which two pages of a record
/// differ.
fn without_its_time(page: &str) -> String {
    let (before, rest) = page.split_once("\"taken\":\"").expect("the time of the page");
    let (_, after) = rest.split_once('"').expect("the end of the time");
    format!("{before}{after}")
}

/// The rows of cells: the lines between the two empty lines.
fn rows(text: &str) -> Vec<&str> {
    text.lines()
        .skip_while(|line| !line.is_empty())
        .skip(1)
        .take_while(|line| !line.is_empty())
        .collect()
}

struct Known {
    folder: tempfile::TempDir,
    record: &'static Record,
    path: PathBuf,
}

impl Known {
    fn new() -> Known {
        Known::named("Phantom 1")
    }

    fn named(name: &str) -> Known {
        let folder = tempfile::tempdir().unwrap();
        let record = record(folder.path(), name);
        Known { path: record.path().unwrap().to_owned(), folder, record }
    }

    fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        self.record.close();
    }
}

#[test]
fn cells_show_blocks_whole_pages_and_what_is_lost_in_partly_used_ones() {
    let known = Known::new();
    let pid = std::process::id().to_string();
    // 11 mapped pages and a spare one, in cells of 512 KiB; a bar marks a jump of the address.
    let page =
        drawn(&[&pid, "--width", "40", "--rows", "2", "--by", "lifetime"], known.folder.path());
    let expected =
        ["0x7f0000000000  PPPPPPPPPPPP~~~~!S!!::::", "0x7f0000c00000  A!!!::::|SSSSSSSS...."];
    assert_eq!(rows(&page), expected, "{page}");
    for part in [
        "device 1 Phantom 1, step",
        "a cell is\n512.00 KiB",
        "P persistent 6.00 MiB",
        "S step 4.50 MiB",
    ] {
        assert!(page.contains(part), "no {part:?} in\n{page}");
    }
    let physical =
        drawn(&[&pid, "--width", "40", "--rows", "2", "--physical"], known.folder.path());
    let expected =
        ["chunk 3.0       SSSSSSSS....____PPPPPPPP", "0x7f0000400000  PPPP~~~~!S!!::::A!!!::::"];
    assert_eq!(rows(&physical), expected, "{physical}");
    let age = drawn(&[&pid, "--width", "40", "--rows", "2", "--by", "age"], known.folder.path());
    let expected =
        ["0x7f0000000000  DDDDDDDDDDDD~~~~!A!!::::", "0x7f0000c00000  A!!!::::|AAAAAAAA...."];
    assert_eq!(rows(&age), expected, "{age}");
    assert!(age.contains("A this step 5.00 MiB") && age.contains("D 4-15 steps 6.00 MiB"), "{age}");
    for (by, part) in [("size", "to 16 MiB 10.00 MiB"), ("stream", "stream 0 11.00 MiB")] {
        let page = drawn(&[&pid, "--by", by], known.folder.path());
        assert!(page.contains(part), "{page}");
    }
}

#[test]
fn the_ten_lines_that_hold_most_have_a_colour_each_with_bytes_and_share() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_with_sites(folder.path());
    let path = record.path().unwrap().to_str().unwrap();
    let page = drawn(&[path, "--by", "site", "--width", "80"], folder.path());
    let legend = |page: &str| -> Vec<String> {
        let mut lines: Vec<&str> = page.split("\n\n").nth(2).unwrap().lines().collect();
        lines.truncate(12);
        lines.iter().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    let found = legend(&page);
    assert_eq!(found[0], "A 28.00 MiB 12.9% backward of train.py:10 in step", "{page}");
    assert_eq!(found[1], "B 26.00 MiB 12.0% train.py:130 in step", "{page}");
    // The slab's block belongs to the slab's line: half a MiB more.
    assert_eq!(found[9], "J 10.50 MiB 4.8% train.py:50 in step", "{page}");
    assert_eq!(found[10], "O 25.00 MiB 11.5% 5 others", "{page}");
    assert_eq!(found[11], "X 2.00 MiB 0.9% not known", "{page}");
    let page = drawn(&[path, "--by", "module", "--width", "80"], folder.path());
    let found = legend(&page);
    // Modules that differ only in numbers are one, and a backward's memory belongs to the module
    // too.
    assert_eq!(found[0], "A 126.50 MiB 58.2% model.layers.*", "{page}");
    assert_eq!(found[1], "B 24.00 MiB 11.0% train.py:120 in step", "{page}");
    for (by, width) in [("site", "40"), ("module", "44"), ("phase", "40")] {
        let page = drawn(&[path, "--by", by, "--width", width], folder.path());
        let most = width.parse::<usize>().unwrap();
        let is_long = |line: &&str| line.chars().count() > most;
        assert_eq!(page.lines().find(is_long), None, "{page}");
    }
    record.close();
}

#[test]
fn blocks_without_a_lifetime_are_told_by_what_the_program_was_doing() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_with_sites(folder.path());
    let path = record.path().unwrap().to_str().unwrap();
    let page = drawn(&[path, "--width", "200"], folder.path());
    for part in ["persistent 2.00 MiB", "forward 96.50 MiB", "backward 28.00 MiB"] {
        assert!(page.contains(part), "no {part:?} in\n{page}");
    }
    let page = drawn(&[path, "--width", "200", "--by", "phase"], folder.path());
    assert!(page.contains("forward 98.50 MiB") && page.contains("not known 91.00 MiB"), "{page}");
    record.close();
}

#[test]
fn the_sites_as_json_and_on_the_page_with_their_whole_stacks() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_with_sites(folder.path());
    let path = record.path().unwrap().to_str().unwrap();
    let all: Value = serde_json::from_str(&drawn(&[path, "--json"], folder.path())).unwrap();
    let (sites, largest) = (&all["sites"], &all["largest_live_blocks"][0]);
    assert_eq!(sites.as_array().unwrap().len(), 16, "{sites:#}");
    let (first, second) = (&sites[0], &sites[1]);
    assert_eq!((&first["id"], &first["live_bytes"]), (&largest["site"], &largest["bytes"]));
    assert_eq!(
        (&first["name"], &first["phase"]),
        (&"backward of train.py:10 in step".into(), &"backward".into())
    );
    let line = serde_json::json!({
        "file": "/home/me/train.py", "line": 130, "function": "Model.<locals>.step"
    });
    assert_eq!((&second["line"], &second["module"]), (&line, &"model.layers.13".into()));
    assert_eq!((&second["frames"][1], second["frames"].as_array().unwrap().len()), (&line, 2));
    let forward = sites.as_array().unwrap().iter().find(|site| site["id"] == first["forward"]);
    assert_eq!(forward.unwrap()["name"], "train.py:10 in step");
    let unknown = sites.as_array().unwrap().iter().find(|site| site["id"].is_null()).unwrap();
    assert_eq!((&unknown["name"], &unknown["live_bytes"]), (&"not known".into(), &PAGE.into()));
    let fields = |site: &Value| site.as_object().unwrap().len();
    assert_eq!(fields(unknown), fields(first), "a site has the same fields where it is not known");
    let file = folder.path().join("page.html");
    drawn(&[path, "--html", file.to_str().unwrap()], folder.path());
    let html = std::fs::read_to_string(&file).unwrap();
    for part in
        ["/home/me/train.py:130 in Model.\\u003clocals>.step", "model.layers.13", "of the forward:"]
    {
        assert!(html.contains(part), "{part}");
    }
    record.close();
}

#[test]
fn the_sums_and_ranges_as_json() {
    let known = Known::new();
    let all: Value =
        serde_json::from_str(&drawn(&[known.path(), "--json"], known.folder.path())).unwrap();
    let sums = &all["sums"];
    let kib = 1u64 << 10;
    let of = |name: &str| sums[name].as_u64().unwrap_or_else(|| panic!("{name}: {sums:#}"));
    assert_eq!((of("held_bytes"), of("live_bytes")), (12 * PAGE, 5 * PAGE + 1024 * kib));
    assert_eq!((of("live_blocks"), of("pending_bytes"), of("spare_bytes")), (4, PAGE, PAGE));
    assert_eq!((of("free_whole_bytes"), of("free_whole_bound_bytes")), (3 * PAGE, 2 * PAGE));
    assert_eq!((of("gap_bytes"), of("free_slot_bytes")), (1536 * kib, 1536 * kib));
    assert_eq!(
        of("live_bytes")
            + of("pending_bytes")
            + of("free_whole_bytes")
            + of("free_partial_bytes")
            + of("spare_bytes"),
        of("held_bytes")
    );
    assert_eq!(sums["live_bytes_by_lifetime"]["persistent"], 3 * PAGE);
    assert_eq!(
        (&all["device"], &all["step"], &all["process"]["pid"]),
        (&1.into(), &5.into(), &std::process::id().into())
    );
    let ranges = all["ranges"].as_array().unwrap();
    assert_eq!(ranges.len(), 2);
    assert_eq!(
        (&ranges[0]["address"], &ranges[0]["kind"]),
        (&"0x7f0000000000".into(), &"span".into())
    );
    assert_eq!((&ranges[1]["kind"], &ranges[1]["lifetime"]), (&"stitched".into(), &"step".into()));
    assert_eq!(all["largest_live_blocks"][0]["bytes"], 3 * PAGE);
    assert_eq!(all["largest_free_runs"][0]["bytes"], 1024 * kib + PAGE);
    assert_eq!(
        all["did_not_fit"].as_object().unwrap().values().filter(|count| **count != 0).count(),
        0
    );
    let other: Value = serde_json::from_str(&drawn(
        &[known.path(), "--json", "--device", "0"],
        known.folder.path(),
    ))
    .unwrap();
    assert_eq!(other["sums"]["held_bytes"], 0);
    assert!(
        drawn(&[known.path(), "--device", "0"], known.folder.path())
            .contains("nothing is held on device 0")
    );
}

#[test]
fn no_colour_unless_asked_and_no_line_is_longer_than_the_width() {
    let known = Known::new();
    let plain = drawn(&[known.path()], known.folder.path());
    assert!(!plain.contains('\x1b'), "the output is no terminal: {plain}");
    let coloured = drawn(&[known.path(), "--color", "always"], known.folder.path());
    assert!(coloured.contains("\x1b[48;5;160m"), "what is lost is red: {coloured}");
    // Other free memory has the terminal's own background.
    let grounds: Vec<&str> =
        coloured.split("\x1b[48;5;").skip(1).filter_map(|rest| rest.split('m').next()).collect();
    assert!(grounds.iter().all(|ground| *ground == "160"), "{grounds:?}");
    assert!(coloured.contains("\x1b[38;5;244m·"), "free whole pages: {coloured}");
    assert!(coloured.contains('█'));
    for width in ["40", "57", "80", "200"] {
        for view in [
            &["--physical", "--ascii"][..],
            &["--ascii", "--by", "size"],
            &["--ascii", "--color", "always"],
        ] {
            let page =
                drawn(&[&[known.path(), "--width", width], view].concat(), known.folder.path());
            assert!(page.is_ascii(), "{page}");
            let most = width.parse::<usize>().unwrap();
            let is_long = |line: &&str| !line.contains('\x1b') && line.len() > most;
            assert_eq!(page.lines().find(is_long), None, "{width}:\n{page}");
        }
    }
}

#[test]
fn names_of_the_record_reach_neither_the_terminal_nor_the_page_as_commands() {
    let known = Known::named("H\x1b[2J\u{9b}1</script><script>x");
    let page = drawn(&[known.path(), "--width", "100"], known.folder.path());
    assert!(!page.contains('\x1b') && !page.contains('\u{9b}'), "{page:?}");
    let file = known.folder.path().join("page.html");
    assert_eq!(drawn(&[known.path(), "--html", file.to_str().unwrap()], known.folder.path()), "");
    let html = std::fs::read_to_string(&file).unwrap();
    let other = drawn(&[known.path(), "--html", "-"], known.folder.path());
    assert_eq!(without_its_time(&other), without_its_time(&html));
    assert!(!Path::new("-").exists(), "standard output");
    assert!(!html.contains("<script>x") && html.contains("\\u003c/script>"), "escaped");
    serde_json::from_str::<Value>(&drawn(&[known.path(), "--json"], known.folder.path())).unwrap();
}

#[test]
fn what_can_not_be_done_is_said_with_its_remedy_and_its_exit_code() {
    let known = Known::new();
    let folder = known.folder.path();
    let failed = |arguments: &[&str], code: i32, part: &str| {
        let output = map(arguments, folder);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(error.contains(part), "no {part:?} in {error}");
    };
    failed(&["999999999"], 1, "gruyere ps");
    failed(&[known.path(), "--device", "2"], 1, "the process has 2, counted from 0");
    failed(&[known.path(), "--html", "/nowhere/page.html"], 1, "/nowhere/page.html");
    failed(&[known.path(), "--by", "colour"], 2, "lifetime");
    failed(&[known.path(), "--json", "--html", "x"], 2, "--html");
    failed(&[known.path(), "--width", "3"], 2, "40");
    failed(&["/dev/null"], 1, "not a regular file");
    let junk = folder.join("junk");
    std::fs::write(&junk, "junk of more than eight bytes").unwrap();
    failed(&[junk.to_str().unwrap()], 1, "not a record");
}

#[test]
fn a_record_of_a_dead_process_is_watched_once() {
    let known = Known::new();
    let dead = known.folder.path().join("gruyere-1-2-3-0.record");
    std::fs::copy(&known.path, &dead).unwrap();
    let page = drawn(&[dead.to_str().unwrap(), "--watch"], known.folder.path());
    assert_eq!(page.matches("held ").count(), 1, "{page}");
    assert!(page.contains("(ended)"), "{page}");
}

#[test]
fn a_living_process_is_watched_until_nobody_reads_on() {
    let known = Known::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .args(["map", known.path(), "--watch=1"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut seen = String::new();
    while seen.matches("a cell is").count() < 2 {
        let mut part = [0; 512];
        let count = out.read(&mut part).unwrap();
        assert!(count > 0, "it ended early: {seen}");
        seen.push_str(&String::from_utf8_lossy(&part[..count]));
    }
    drop(out);
    assert_eq!(child.wait().unwrap().code(), Some(0), "a closed pipe is no trouble");
}

#[test]
fn blocks_that_the_record_has_no_room_for_are_told_of() {
    let folder = tempfile::tempdir().unwrap();
    let options = RecordOptions {
        directory: folder.path().to_owned(),
        ring_events: 256,
        max_blocks: 1024,
        ..RecordOptions::default()
    };
    let record: &'static Record =
        Box::leak(Box::new(Record::create(&options, &[DeviceFacts::default()])));
    let bytes = 8 * PAGE;
    record.segment_insert(&SegmentEntry { address: BASE, bytes, ..SegmentEntry::default() });
    let mut shard = record.shard(0, 0);
    for n in 0..3000 {
        let (address, size) = (BASE + n * 512, 512);
        shard.block_insert(&BlockEntry { address, size, requested: 1, ..BlockEntry::default() });
    }
    let path = record.path().unwrap().to_str().unwrap();
    let drawn = |arguments: &[&str]| {
        let output = map(&[&[path], arguments].concat(), folder.path());
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        text(&output.stdout)
    };
    let all: Value = serde_json::from_str(&drawn(&["--json"])).unwrap();
    let (there, missing) = (&all["sums"]["live_blocks"], &all["not_in_the_record"]["blocks"]);
    assert_eq!(there.as_u64().unwrap() + missing.as_u64().unwrap(), 3000);
    assert_eq!(
        all["not_in_the_record"]["bytes"].as_u64(),
        missing.as_u64().map(|blocks| blocks * 512)
    );
    let note = format!("{missing} live blocks");
    let page = drawn(&["--width", "200"]);
    assert!(page.contains(&note) && page.contains("record_blocks"), "{page}");
    let file = folder.path().join("page.html");
    drawn(&["--html", file.to_str().unwrap()]);
    assert!(std::fs::read_to_string(file).unwrap().contains(&note));
    record.close();
}

/// Every byte of a record may have any value.
#[test]
fn damaged_records_never_make_it_panic() {
    let known = Known::new();
    let whole = std::fs::read(&known.path).unwrap();
    let used: Vec<usize> = (0..whole.len()).filter(|&at| whole[at] != 0).collect();
    let mut random = 7u64;
    let mut next = |most: usize| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % most
    };
    let path = known.folder.path().join("damaged");
    let page = known.folder.path().join("page.html");
    let outputs = [
        &["--width", "60"][..],
        &["--physical", "--rows", "3"],
        &["--json"],
        &["--html", page.to_str().unwrap()],
    ];
    let mut read = 0;
    for turn in 0..240 {
        let mut bytes = whole.clone();
        for _ in 0..1 + next(24) {
            // At or near non-zero data: the rest of the file is empty tables.
            let at = (used[next(used.len())] + next(40)).min(bytes.len() - 1);
            bytes[at] = [0xff, 0, 0x80, next(256) as u8][next(4)];
        }
        if turn % 10 == 9 {
            bytes.truncate(next(bytes.len()));
        }
        std::fs::write(&path, &bytes).unwrap();
        let device = ["--device", "1"];
        let output = map(
            &[&[path.to_str().unwrap()], &device[..], outputs[turn % 4]].concat(),
            known.folder.path(),
        );
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 1 | 3)), "turn {turn}: {output:?}");
        assert!(!text(&output.stderr).contains("panicked"), "turn {turn}: {output:?}");
        assert!(code != Some(1) || text(&output.stderr).starts_with("gruyere map:"), "{output:?}");
        read += usize::from(code != Some(1));
    }
    eprintln!("{read} of 240 were drawn");
    assert!(read > 30, "much damage leaves something to draw: {read}");
}

#[test]
fn help_has_examples_and_exit_codes() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_gruyere")).args(["map", "--help"]).output().unwrap();
    let help = text(&output.stdout);
    assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
}
