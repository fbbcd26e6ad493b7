//! The first lines of `gruyere post`, on made-up records: a leak with its line, a healthy program,
//! and a large request.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gruyere_record::sites::{NewSite, Phase, SiteId};
use gruyere_record::{
    BlockEntry, BlockSlot, DeviceFacts, DeviceGauge, EventKind, Record, RecordOptions, SHARDS,
    SegmentEntry, SegmentKind, ShardWriter, clock,
};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A record of a program on one device of 16 GiB that marks steps.
struct Program {
    record: &'static Record,
    shard: ShardWriter,
    step: u32,
    held: u64,
}

impl Program {
    /// Starts with 1 GiB of weights, made at train.py:5.
    fn new(folder: &Path) -> Self {
        let options = RecordOptions {
            directory: folder.to_owned(),
            ring_events: 4096,
            max_blocks: 1 << 12,
            ..RecordOptions::default()
        };
        let facts = DeviceFacts { name: "Phantom".into(), uuid: [1; 16], total_memory: 16 * GIB };
        let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
        let mut program =
            Self { record, shard: record.shard(0, SHARDS as u32 - 1), step: 0, held: 0 };
        let weights = program.site(5, "<module>", "", Phase::Unknown);
        (0..16).for_each(|_| _ = program.block(weights, 64 * MIB));
        program
    }

    fn site(&self, line: u32, function: &str, module: &str, phase: Phase) -> SiteId {
        let torch = "/venv/lib/python3.12/site-packages/torch/nn/functional.py";
        let frames = [
            self.record.frame(torch, "op", 9),
            self.record.frame("/home/me/train.py", function, line),
        ];
        self.record.site(&NewSite { frames: &frames, module, phase, ..NewSite::default() })
    }

    /// A block in pages of its own.
    fn block(&mut self, site: SiteId, size: u64) -> BlockSlot {
        let address = (1 << 40) + self.held;
        self.record.segment_insert(&SegmentEntry {
            kind: SegmentKind::Span,
            address,
            bytes: size,
            ..SegmentEntry::default()
        });
        self.held += size;
        let (step, requested) = (self.step, size);
        let entry = BlockEntry { address, size, requested, step, site, ..BlockEntry::default() };
        self.shard.block_insert(&entry)
    }

    /// Begins the next step.
    fn step(&mut self) {
        self.step += 1;
        // A cell of the timeline takes some milliseconds.
        std::thread::sleep(Duration::from_millis(8));
        let mut device = self.record.device(0);
        device.set(&[
            (DeviceGauge::Step, self.step.into()),
            (DeviceGauge::Reserved, self.held),
            (DeviceGauge::Limit, 16 * GIB),
            (DeviceGauge::TotalMemory, 16 * GIB),
        ]);
        device.sample(self.held);
    }

    /// Runs a step that makes activations and frees them.
    fn activations(&mut self) {
        let forward = self.site(20, "main.<locals>.step", "model.layers.0", Phase::Forward);
        let block = self.block(forward, 32 * MIB);
        self.shard.block_remove(block, 32 * MIB, 32 * MIB, 0, false);
    }

    /// The record that it leaves when killed.
    fn killed(self, folder: &Path) -> PathBuf {
        let copy = folder.join("killed.record");
        std::fs::copy(self.record.path().expect("a file"), &copy).expect("room");
        self.record.close();
        copy
    }
}

fn post(path: &Path, more: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .arg("post")
        .arg(path)
        .args(more)
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("the command runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_leak_is_the_first_line_and_a_thousand_steps_are_a_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut program = Program::new(folder.path());
    let leak = program.site(42, "main.<locals>.step", "", Phase::Unknown);
    for step in 0..40 {
        program.activations();
        if step >= 3 {
            program.block(leak, 64 * MIB);
        }
        program.step();
    }
    let path = program.killed(folder.path());
    let page = post(&path, &[]);
    assert!(
        page.starts_with(
            "train.py:42 in step keeps 64 MiB a step since step 3: 2.2 GiB of the 3.3 GiB live \
             (68%)\n"
        ),
        "{page}"
    );
    let conclusion: Vec<&str> = page.lines().take_while(|line| !line.is_empty()).collect();
    assert!(conclusion.len() <= 10, "{page}");
    assert!(conclusion.iter().any(|line| line.starts_with("To do: ")), "{page}");
    assert!(page.lines().count() <= 60, "{} lines\n{page}", page.lines().count());
    assert!(page.contains("steps 3 to 39"), "{page}");
    let full = post(&path, &["--full"]);
    assert!(full.starts_with(conclusion[0]) && full.contains("of step 3 "), "{full}");
    let json: Value = serde_json::from_str(&post(&path, &["--json"])).expect("JSON");
    assert_eq!(json["conclusion"]["cause"], "leak");
    assert_eq!(json["conclusion"]["lines"][0], conclusion[0]);
    let sites = json["state"]["sites"].as_array().expect("sites");
    assert!(sites.iter().any(|site| site["frames"][1]["line"] == 42), "{sites:?}");
    assert!(!json["state"]["timeline"].is_array(), "it is the device's");
    assert!(json["state"]["devices"][0]["timeline"].as_array().expect("a timeline").len() > 20);
}

#[test]
fn the_page_has_the_conclusion_and_the_leak_over_the_run_and_is_its_owners_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut program = Program::new(folder.path());
    let leak = program.site(42, "main.<locals>.step", "", Phase::Unknown);
    for _ in 0..20 {
        program.activations();
        program.block(leak, 64 * MIB);
        program.step();
    }
    let path = program.killed(folder.path());
    let file = folder.path().join("page.html");
    let said = post(&path, &["--html", file.to_str().expect("text")]);
    assert_eq!(said, format!("{}\n", file.display()));
    assert_eq!(std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
    let page = std::fs::read_to_string(&file).expect("text");
    let printed = post(&path, &["--html", "-"]);
    assert!(printed.contains("id=\"facts\">") && printed.ends_with("</html>\n"), "on stdout");
    assert!(!Path::new("-").exists(), "no file of that name");
    let (_, facts) = page.split_once("id=\"facts\">").expect("facts");
    let (facts, _) = facts.split_once("</script>").expect("their end");
    let facts: Value = serde_json::from_str(facts).expect("JSON");
    let first = facts["conclusion"]["lines"][0].as_str().expect("a line");
    assert!(first.starts_with("train.py:42 in step keeps 64 MiB a step"), "{first}");
    assert_eq!(facts["lines"][0]["name"], "train.py:42 in step");
    // This file does not exist here.
    assert!(facts["lines"][0]["source"].is_null());
    // It grows from step to step, and ends at its current value.
    let layer: Vec<u64> =
        serde_json::from_value(facts["course"]["layers"][0].clone()).expect("numbers");
    assert!(layer.is_sorted() && layer[layer.len() / 2] < layer[layer.len() - 1] * 3 / 4);
    assert_eq!(layer.last(), Some(&(20 * 64 * MIB)));
    // A number means a process, not a file name.
    let output = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .arg("post")
        .arg(&path)
        .args(["--html", "4242"])
        .output()
        .expect("the command runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("post 4242 --html"), "{error}");
}

#[test]
fn a_program_that_goes_on_as_it_began_is_accused_of_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut program = Program::new(folder.path());
    let queue = program.site(12, "put", "", Phase::Unknown);
    let mut queued = std::collections::VecDeque::new();
    for _ in 0..40 {
        program.activations();
        queued.push_back(program.block(queue, 64 * MIB));
        if queued.len() > 8 {
            let oldest = queued.pop_front().expect("one");
            program.shard.block_remove(oldest, 64 * MIB, 64 * MIB, 0, false);
        }
        program.step();
    }
    let page = post(&program.killed(folder.path()), &[]);
    assert!(page.starts_with("Nothing grows (40 steps): 1.5 GiB live"), "{page}");
    let (conclusion, _) = page.split_once("\n\n").expect("more");
    assert!(conclusion.contains("train.py:12 in put holds"), "{page}");
    assert!(conclusion.contains("is level: a queue that is full"), "{page}");
    assert!(conclusion.contains("Most is from train.py:5: 1 GiB"), "{page}");
    assert!(!conclusion.contains("To do"), "{page}");
}

#[test]
fn a_request_that_was_too_large_and_the_death_after_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut program = Program::new(folder.path());
    (0..5).for_each(|_| program.step());
    let asked = 12 * GIB;
    program.record.event(EventKind::OutOfMemory, 0, 0, 0, 0, asked, clock::now());
    let page = post(&program.killed(folder.path()), &[]);
    assert!(
        page.starts_with("One request asks for 12 GiB at once, with 1 GiB live of 16 GiB\n"),
        "{page}"
    );
}

#[test]
fn what_others_took_of_the_device_is_the_first_line_where_it_is_the_most() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut program = Program::new(folder.path());
    (0..5).for_each(|_| program.step());
    program.record.event(EventKind::OutOfMemory, 0, 0, 0, 0, 20 * MIB, clock::now());
    let page = post(&program.killed(folder.path()), &[]);
    assert!(page.starts_with("Others hold at least 15 GiB of the 16 GiB of device 0"), "{page}");
}
