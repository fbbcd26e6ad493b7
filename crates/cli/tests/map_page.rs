//! `gruyere map --html` of a process with a million live blocks, and the page of an out-of-memory,
//! in a real browser.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use gruyere::config::Config;
use gruyere::driver::StreamHandle;
use gruyere::heap::Heap;
use gruyere_phantom::{Config as GpuConfig, Gpu};
use gruyere_phantom_driver::PhantomDriver;
use gruyere_record::conclusion::Conclusion;
use gruyere_record::dump::state::{Block, BlockKind, DeviceState, Segment, State, Stretch};
use gruyere_record::page;
use gruyere_record::sites::{Frame, Site, SiteId, Sites};
use serde_json::Value;

#[path = "common/sites.rs"]
mod sites;
#[path = "../../../tests/common/skip.rs"]
mod skip;
use sites::record_with_sites;

const BLOCKS: usize = 1_000_000;
/// Limit from the start of the navigation until "interactive".
const MOST_MILLISECONDS: u64 = 3000;
/// Exit code of `measure.py` without a browser.
const SKIPPED: i32 = 77;

/// A heap of this process with a million live blocks of many sizes, lives and ages, and holes
/// between them.
fn heap() -> Heap {
    let gpu = Arc::new(Gpu::new(GpuConfig::new(80 << 30)));
    let config = Config::parse("record:on,headroom:0").unwrap();
    let heap = Heap::new(Arc::new(PhantomDriver::new(gpu)), config.heap).unwrap();
    heap.announce_hooks(3);
    let mut random = 1u64;
    let mut next = |most: u64| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % most
    };
    let mut blocks = Vec::with_capacity(BLOCKS + 1);
    let mut turn = 0;
    while blocks.len() < BLOCKS {
        turn += 1;
        let size = match next(2000) {
            0 => 1 + next(40 << 20),
            1..=40 => 1 + next(200 << 10),
            _ => 1 + next(6 << 10),
        };
        blocks.push(heap.malloc(size, 0, StreamHandle(0)).unwrap());
        if next(8) == 0 {
            let at = next(blocks.len() as u64) as usize;
            assert!(heap.free(blocks.swap_remove(at)));
        }
        if turn % 20_000 == 0 {
            heap.mark_step();
        }
    }
    heap
}

fn measure(page: &Path, arguments: &[&str]) -> Option<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/html/measure.py");
    let output = Command::new("python3")
        .arg(script)
        .arg(page)
        .args(arguments)
        .output()
        .expect("python3 runs");
    if output.status.code() == Some(SKIPPED) {
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        skip::lacks("chromium");
        return None;
    }
    assert!(output.status.success(), "{output:?}");
    Some(serde_json::from_slice(&output.stdout).expect("JSON"))
}

/// Whether the page is ready within the limit, and reacts to each action within half of it.
fn is_quick(found: &Value) -> bool {
    let done = [
        "hover_ms",
        "zoom_ms",
        "select_ms",
        "next_ms",
        "view_ms",
        "colour_ms",
        "theme_ms",
        "all_ms",
    ];
    let done = done
        .iter()
        .all(|name| found[name].as_f64().is_some_and(|time| time < MOST_MILLISECONDS as f64 / 2.0));
    done && found["ready"].as_u64().is_some_and(|time| time <= MOST_MILLISECONDS)
}

#[test]
fn the_page_of_a_million_blocks_is_interactive_within_3_seconds() {
    let heap = heap();
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("heap.html");
    let record = heap.record().path().unwrap().to_owned();
    let output = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .args(["map", record.to_str().unwrap(), "--html", page.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    eprintln!("the page has {} KiB", std::fs::metadata(&page).unwrap().len() >> 10);
    // The page's name stays; the record is no longer needed.
    heap.record().close();
    let Some(mut found) = measure(&page, &[]) else { return };
    // A machine busy with other work gets two more tries.
    for _ in 0..2 {
        if is_quick(&found) {
            break;
        }
        found = measure(&page, &[]).expect("it was there a moment ago");
    }
    eprintln!("{found:#}");
    let text = |name: &str| found[name].as_str().unwrap_or_default().to_owned();
    assert_eq!(found["exceptions"].as_array().map(Vec::len), Some(0), "{found:#}");
    assert!(found["strokes"].as_u64().unwrap() >= BLOCKS as u64, "{found:#}");
    assert!(is_quick(&found), "{found:#}");
    assert!(found["colours"].as_u64().unwrap() > 4, "something is drawn: {found:#}");
    // Effects of the pointer and the keys.
    assert!(text("tip").contains("address: 0x"), "{found:#}");
    assert!(
        text("selected").contains("bytes") && text("selected") != text("after_next"),
        "{found:#}"
    );
    assert_eq!((text("view"), text("by")), ("physical".into(), "age".into()));
    assert!(text("found").contains(&text("searched")), "an address is found: {found:#}");
    // The other colour scheme, and a narrow window.
    let picture = folder.path().join("dark.png");
    let arguments = ["--dark", "--size", "480x900", "--screenshot", picture.to_str().unwrap()];
    let found = measure(&page, &arguments).expect("it was there a moment ago");
    assert_eq!(
        (&found["theme"], found["exceptions"].as_array().map(Vec::len)),
        (&"dark".into(), Some(0)),
        "{found:#}"
    );
    assert!(std::fs::metadata(picture).unwrap().len() > 10_000);
}

/// A state with names of maximum length, and a timeline.
fn wordy() -> State {
    let long = "a_function_with_a_name_that_nobody_can_break_".repeat(2);
    let site = |line| Site {
        frames: vec![Frame {
            file: format!("/home/me/{}/train.py", "folder/".repeat(20)),
            function: format!("{long}{line}"),
            line,
        }],
        module: format!("model.{}", "blocks.0.attention.".repeat(9)),
        ..Site::default()
    };
    let block = |n: u32| {
        let bytes = u64::from(n) * (32 << 20);
        Block(bytes, BlockKind::Live, bytes, 0, 0, Some(n), SiteId(n))
    };
    let blocks: Vec<Block> = (1..=12).map(block).collect();
    let bytes = blocks.iter().map(|block| block.0).sum();
    let stretch = |n: u64| Stretch {
        time_nanoseconds: n * 1_000_000_000,
        step: n / 20,
        live_low_bytes: n * (8 << 20),
        live_high_bytes: n * (13 << 20),
        reserved_high_bytes: bytes,
        ..Stretch::default()
    };
    let mut device = DeviceState {
        name: "A GPU with a name of many words and 80 GB".into(),
        step: 12,
        total_bytes: 80 << 30,
        live_peak_bytes: bytes,
        timeline: (1..=240).map(stretch).collect(),
        segments: vec![Segment { address: 1 << 40, bytes, blocks, ..Segment::default() }],
        ..DeviceState::default()
    };
    device.held.reserved_bytes = bytes;
    device.held.live_bytes = bytes;
    device.live.all.bytes = bytes;
    let mut state =
        State { sites: Sites::new((1..=12).map(site)), devices: vec![device], ..State::default() };
    state.process.command = format!("python /{long}{long}.py --{long}");
    state.process.host = "a-node-of-a-cluster.with.a.long.name.example".into();
    state.conclusion = Some(Conclusion::of(&state, &[]));
    state
}

#[test]
fn on_a_phone_nothing_of_a_page_is_cut_or_scrolled_sideways() {
    let folder = tempfile::tempdir().unwrap();
    let (heap, oom) = (folder.path().join("heap.html"), folder.path().join("oom.html"));
    let record = record_with_sites(folder.path());
    let output = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .args(["map", record.path().unwrap().to_str().unwrap(), "--html"])
        .arg(&heap)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    record.close();
    let mut text = Vec::new();
    page::write(&mut text, &wordy(), &page::About::default()).unwrap();
    std::fs::write(&oom, text).unwrap();
    for (page, arguments) in
        [(&oom, &["--dark"][..]), (&oom, &[]), (&heap, &[])].map(|(page, more)| {
            (page, ["--look", "--size", "420x900"].iter().chain(more).copied().collect::<Vec<_>>())
        })
    {
        let Some(found) = measure(page, &arguments) else { return };
        assert_eq!(found["exceptions"].as_array().map(Vec::len), Some(0), "{found:#}");
        assert_eq!(found["cut"].as_array().map(Vec::len), Some(0), "{found:#}");
        // Eight lines and the others, over the run, and the freed memory.
        let drawn = found["drawn"].as_u64().unwrap();
        assert!(page == &heap || drawn == 10, "{found:#}");
    }
}

#[test]
fn the_page_is_coloured_by_line_and_says_where_a_block_came_from() {
    let folder = tempfile::tempdir().unwrap();
    let record = record_with_sites(folder.path());
    let path = record.path().unwrap().to_owned();
    let page = folder.path().join("sites.html");
    let output = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .args(["map", path.to_str().unwrap(), "--html"])
        .arg(&page)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let Some(found) = measure(&page, &["--hash", "by=site"]) else { return record.close() };
    let tip = found["tip"].as_str().unwrap();
    let stack = "stack:\nlinear.py:9 in forward\ntrain.py:40 in Model.<locals>.step";
    assert!(tip.contains("line: train.py:40 in step\n") && tip.ends_with(stack), "{found:#}");
    let zoomed = found["selected"].as_str().unwrap();
    let said = ["phaseforward", "linetrain.py:50 in step", "modulemodel.layers.5"];
    assert!(said.iter().all(|part| zoomed.contains(part)), "{found:#}");
    let legend = found["legend"].as_str().unwrap();
    let colours = ["backward of train.py:10 in step", "train.py:50 in step", "5 others"];
    assert!(colours.iter().all(|part| legend.contains(part)), "{found:#}");
    assert_eq!(
        (&found["by"], found["exceptions"].as_array().unwrap().len()),
        (&"module".into(), 0)
    );
    // The page opens by line if lines are known, unless the user chooses otherwise.
    let opened = |by: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_gruyere"))
            .args(["map", path.to_str().unwrap(), "--html", page.to_str().unwrap()])
            .args(by)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let html = std::fs::read_to_string(&page).unwrap();
        ["site", "age"].map(|by| html.contains(&format!("\"by\":\"{by}\"")))
    };
    assert_eq!(opened(&[]), [true, false]);
    assert_eq!(opened(&["--by", "age"]), [false, true]);
    record.close();
    // Each colour that is not highlighted fades.
    assert!(found["highlighted"].as_bool().unwrap(), "{found:#}");
}
