//! What an out-of-memory leaves behind: sums that tie up, files that fit their schema, and a
//! program that goes on whatever happens.

mod common;

use common::{BACKINGS, DEFAULT, GIB, MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::dump::state::{BlockKind, Class, State, Sum};
use gruyere::dump::{self, Dumps, gather};
use gruyere::heap::{Error, Lifetime, Report, lifetime};
use gruyere::record::text;
use gruyere_phantom::{CaptureMode, as_program};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Fills a heap of 16 GiB with blocks of all kinds, some freed, some waiting for another stream.
fn fill(rig: &Rig) {
    let side = rig.stream();
    let mut blocks = Vec::new();
    for step in 0..12u64 {
        for (n, lifetime) in Lifetime::ALL.into_iter().enumerate() {
            assert!(lifetime::push(lifetime));
            for size in [700, 5000, 300_000, 3 * MIB + 100, 40 * MIB] {
                blocks.push(
                    rig.malloc(
                        size * (1 + step % 3) + n as u64,
                        if n == 2 { side } else { DEFAULT },
                    ),
                );
            }
            assert!(lifetime::pop());
        }
        rig.heap.mark_step();
    }
    for (n, &block) in blocks.iter().enumerate().filter(|(n, _)| n % 3 == 0) {
        if n % 9 == 0 {
            // Used by a kernel that takes long: the block waits for it.
            assert!(rig.heap.record_stream(block, side));
            as_program(|| rig.gpu.launch(0, side.0, 1, 50_000_000_000)).unwrap();
        }
        assert!(rig.heap.free(block));
    }
}

/// The answer to a request that is too large, the program's.
fn refused(rig: &Rig, bytes: u64) -> Box<Report> {
    match rig.heap.malloc(bytes, 0, DEFAULT) {
        Err(Error::OutOfMemory(mut report)) => {
            rig.heap.note_out_of_memory(&mut report, DEFAULT);
            report
        }
        other => panic!("{other:?}"),
    }
}

fn total<'a>(sums: impl IntoIterator<Item = &'a Sum>) -> Sum {
    sums.into_iter().fold(Sum::default(), |mut all, sum| {
        all.add(*sum);
        all
    })
}

fn classes(classes: &[Class]) -> Sum {
    total(classes.iter().map(|class| &class.sum))
}

/// Every sum of a state against every other.
fn check_sums(state: &State, reserved: u64, live: u64, record: bool) {
    let [device] = &state.devices[..] else { panic!("{} devices", state.devices.len()) };
    let held = &device.held;
    assert_eq!(held.reserved_bytes, reserved);
    assert_eq!(held.parts().iter().map(|part| part.1).sum::<u64>(), reserved, "{held:?}");
    assert_eq!(held.rest_bytes, 0, "{held:?}");
    assert_eq!(held.live_bytes, live);
    let all = device.live.all;
    assert_eq!(all.bytes, live);
    assert_eq!(total(device.live.lifetimes.values()), all);
    assert_eq!(classes(&device.live.sizes), all);
    assert_eq!(classes(&device.live.streams), all);
    let mut steps = classes(&device.live.steps);
    assert_eq!(steps.blocks > 0, record);
    assert_eq!(classes(&device.live.ages), steps);
    steps.add(device.live.other_steps);
    assert_eq!(steps, all);
    let mut kinds = [0u64; 3];
    for segment in &device.segments {
        assert_eq!(
            segment.blocks.iter().map(|block| block.0).sum::<u64>(),
            segment.bytes,
            "blocks tile it"
        );
        segment.blocks.iter().for_each(|block| kinds[block.1 as usize] += block.0);
    }
    assert_eq!(kinds[BlockKind::Live as usize], live);
    assert_eq!(kinds[BlockKind::Pending as usize], held.pending_bytes);
    assert_eq!(kinds.iter().sum::<u64>() + held.unmapped_bytes, reserved);
}

#[test]
fn the_parts_of_what_is_held_sum_up_to_it_and_each_live_block_is_in_one_class_of_each_kind() {
    for (backing, record) in
        BACKINGS.into_iter().flat_map(|backing| [(backing, false), (backing, true)])
    {
        let rig = Rig::new(&format!("{backing},record:{}", if record { "on" } else { "off" }));
        fill(&rig);
        let report = refused(&rig, 15 * GIB);
        let state = gather::state(&rig.heap, Some(&report));
        let stats = rig.heap.stats(0).unwrap();
        check_sums(&state, stats.reserved, stats.live, record);
        let cause = &state.out_of_memory.as_ref().unwrap().cause;
        let held = &state.devices[0].held;
        assert_eq!(cause.partly_used_bytes, held.slab_free_bytes + held.between_bytes, "{backing}");
        rig.check();
    }
}

#[test]
fn what_pools_and_captures_hold_is_counted_once_too() {
    for backing in ["backing:stitch", "backing:pool"] {
        let rig = Rig::new(&format!("{backing},record:on"));
        fill(&rig);
        let heap = &rig.heap;
        let pool = heap.pool_create("cache", 0, 64 * MIB, None).unwrap();
        heap.pool_enter(pool).unwrap();
        let pooled: Vec<u64> = [900, 100_000, 5 * MIB].map(|size| rig.malloc(size, DEFAULT)).into();
        assert!(heap.free(pooled[1]));
        heap.pool_leave(pool).unwrap();
        let stream = rig.stream();
        heap.begin_allocate_to_pool(0, (0, 7)).unwrap();
        as_program(|| rig.gpu.begin_capture(0, stream.0, CaptureMode::Global, Some(7))).unwrap();
        let captured: Vec<u64> =
            [2000, 3 * MIB, 9 * MIB].map(|size| rig.malloc(size, stream)).into();
        assert!(heap.free(captured[1]));
        as_program(|| rig.gpu.end_capture(0, stream.0)).unwrap();
        heap.end_allocate_to_pool(0, (0, 7)).unwrap();
        let report = refused(&rig, 15 * GIB);
        let state = gather::state(heap, Some(&report));
        let stats = heap.stats(0).unwrap();
        check_sums(&state, stats.reserved, stats.live, true);
        let device = &state.devices[0];
        assert!(
            device.held.captured_free_bytes > 0 && device.held.pooled_free_bytes > 0,
            "{:?}",
            device.held
        );
        let holders: Vec<&str> =
            device.segments.iter().map(|segment| segment.holder.as_str()).collect();
        assert!(holders.contains(&"captured") && holders.contains(&"pool cache"), "{holders:?}");
        let cause = &state.out_of_memory.as_ref().unwrap().cause;
        assert!(cause.captured_bytes >= device.held.captured_free_bytes + 9 * MIB);
        assert!(cause.pooled_bytes >= 64 * MIB);
        let page = text::text(&state);
        assert!(
            page.contains("free, kept for CUDA graphs")
                && page.contains("free, kept for named pools")
        );
    }
}

fn dump(rig: &Rig, folder: &Path, report: &Report) -> Vec<String> {
    Dumps::new().out_of_memory(&rig.heap, report, Some(folder));
    dumps_in(folder)
}

/// The names of the files in a folder, pages left out.
fn dumps_in(folder: &Path) -> Vec<String> {
    // Pages are few, of all tests of this process together.
    let is_page = |name: &String| name.ends_with(".html");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .map(|entries| {
            entries.flatten().map(|entry| entry.file_name().into_string().unwrap()).collect()
        })
        .unwrap_or_default();
    names.retain(|name| !is_page(name));
    names.sort();
    names
}

#[test]
fn the_json_fits_its_schema_and_the_text_names_the_request_the_causes_and_the_ladder() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::new("record:on,headroom:0");
    fill(&rig);
    // How fast the counter runs is known from 5 ms on.
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(lifetime::push(Lifetime::Transient));
    gruyere::heap::history::set_context(77);
    let report = refused(&rig, 15 * GIB);
    gruyere::heap::history::set_context(0);
    assert!(lifetime::pop());
    let folder = folder.path().join("new/one");
    let names = dump(&rig, &folder, &report);
    let stem = names[0].strip_suffix(".json").unwrap_or_default();
    assert!(stem.starts_with(&format!("gruyere-oom-{}-gpu0-1-", std::process::id())), "{stem}");
    assert_eq!(names, ["json", "pickle", "txt"].map(|extension| format!("{stem}.{extension}")));
    let read = |extension: &str| {
        std::fs::read_to_string(folder.join(format!("{stem}.{extension}"))).unwrap()
    };
    let json: serde_json::Value = serde_json::from_str(&read("json")).unwrap();
    let schema: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string("docs/schema/oom-dump.json").unwrap())
            .unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = validator
        .iter_errors(&json)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .take(5)
        .collect();
    assert!(errors.is_empty(), "{errors:#?}");
    let mut wrong = json.clone();
    wrong["devices"][0]["segments"][0]["blocks"][0][1] = "lost".into();
    assert!(!validator.is_valid(&wrong), "the schema sees what is wrong");
    let oom = &json["out_of_memory"];
    assert_eq!((&oom["lifetime"], &oom["context"]), (&"transient".into(), &77.into()));
    assert_eq!((&oom["step"], &oom["asked_bytes"]), (&12.into(), &(15 * GIB).into()));
    let synchronise = &oom["ladder"][4];
    assert_eq!(synchronise["name"], "synchronise");
    assert_eq!(synchronise["this_time"]["calls"], 1);
    let last = json["events"]["entries"].as_array().unwrap().last().unwrap();
    assert_eq!(last["kind"], "out_of_memory");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos()
        as u64;
    assert!(now - last["time_nanoseconds"].as_u64().unwrap() < 600_000_000_000, "real time");
    let page = read("txt");
    let count = json["conclusion"]["lines"].as_array().unwrap().len();
    let conclusion: Vec<&str> = page.lines().skip(1).take(count).collect();
    assert!(conclusion[0].starts_with("One request asks for 15 GiB at once"), "{page}");
    assert_eq!(json["conclusion"]["cause"], "large_request");
    assert_eq!(json["conclusion"]["lines"], serde_json::json!(conclusion));
    for part in [
        "CUDA out of memory. Tried to allocate 15.00 GiB.",
        "lifetime transient, step 12",
        "context 77",
        "lost (free between live blocks)",
        "up to 64.00 MiB",
        "of step 11",
        "The largest live blocks",
        "The map",
        "synchronise",
        "The last events",
    ] {
        assert!(page.contains(part), "no {part:?} in\n{page}");
    }
    // A state that was written can be read: `gruyere diff` does.
    let state: State = serde_json::from_str(&read("json")).unwrap();
    assert_eq!(text::text(&state), page);
}

#[test]
fn the_latest_dumps_stay_and_older_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    let (rig, dumps) = (Rig::bare(GIB, ""), Dumps::new());
    for _ in 0..40 {
        dumps.out_of_memory(&rig.heap, &refused(&rig, 2 * GIB), Some(folder.path()));
    }
    let names = dumps_in(folder.path());
    assert_eq!(names.len(), 3 * dump::MOST_DUMPS);
    let number = |name: &String| name.split('-').nth(4).unwrap().parse::<usize>().unwrap();
    assert!(names.iter().all(|name| number(name) > 40 - dump::MOST_DUMPS), "{names:?}");
}

#[test]
fn a_folder_that_can_not_be_written_to_fails_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "a file, not a folder").unwrap();
    for path in [&*file, Path::new("/proc/no/such/folder"), Path::new("/dev/full/x")] {
        let rig = Rig::bare(GIB, "");
        let report = refused(&rig, 2 * GIB);
        Dumps::new().out_of_memory(&rig.heap, &report, Some(path));
        assert!(rig.heap.malloc(5 * MIB, 0, DEFAULT).is_ok());
    }
    let locked = folder.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o500)).unwrap();
    let rig = Rig::bare(GIB, "");
    let written = dump(&rig, &locked, &refused(&rig, 2 * GIB));
    // Root may write anywhere.
    // SAFETY: a plain call.
    assert_eq!(written.len(), if unsafe { libc::geteuid() } == 0 { 3 } else { 0 });
}

#[test]
fn of_very_many_blocks_those_of_a_slab_are_told_as_one_and_the_sums_stay_true() {
    let rig = Rig::new("record:off");
    // Of sizes that lie in slabs.
    let blocks: Vec<u64> = (0..3000).map(|n| rig.malloc(1 + n % 512, DEFAULT)).collect();
    for &block in blocks.iter().step_by(2) {
        assert!(rig.heap.free(block));
    }
    let (whole, all) = rig.heap.segment_stats(0, usize::MAX).unwrap().unwrap();
    let (cut, sums) = rig.heap.segment_stats(0, 100).unwrap().unwrap();
    assert_eq!(whole.merged, 0);
    assert!((1400..=1500).contains(&cut.merged), "{}", cut.merged);
    assert_eq!(all.live.live(0), sums.live.live(0));
    let count = |snapshot: &gruyere::heap::snapshot::Snapshot| -> usize {
        snapshot.segments.iter().map(|segment| segment.blocks.len()).sum()
    };
    assert!(count(&cut) < 300 && count(&whole) > 1500, "{} {}", count(&cut), count(&whole));
    for segment in &cut.segments {
        assert_eq!(segment.blocks.iter().map(|block| block.bytes).sum::<u64>(), segment.bytes);
    }
}

#[test]
fn the_state_from_outside_is_the_state_from_inside() {
    for backing in BACKINGS {
        let rig = Rig::new(&format!("{backing},record:on"));
        fill(&rig);
        let inside = gather::state(&rig.heap, None);
        let reader = gruyere::record::Reader::own(rig.heap.record()).unwrap();
        let outside = gruyere_record::dump::from_record::state(&reader, 100);
        let stats = rig.heap.stats(0).unwrap();
        check_sums(&outside, stats.reserved, stats.live, true);
        let (one, other) = (&inside.devices[0], &outside.devices[0]);
        assert_eq!(one.held, other.held, "{backing}");
        let largest = |device: &gruyere::dump::state::DeviceState| device.live.largest[0].clone();
        assert_eq!((&one.live.sizes, &one.live.steps), (&other.live.sizes, &other.live.steps));
        assert_eq!((&one.live.lifetimes, largest(one)), (&other.live.lifetimes, largest(other)));
        let blocks = |device: &gruyere::dump::state::DeviceState| {
            let blocks = device.segments.iter().flat_map(|segment| {
                segment.blocks.iter().scan(segment.address, |at, block| {
                    *at += block.0;
                    Some((*at - block.0, block.0, block.1, block.2, block.5))
                })
            });
            blocks.filter(|block| block.2 != BlockKind::Free).collect::<Vec<_>>()
        };
        assert_eq!(blocks(one), blocks(other), "{backing}");
    }
}

#[test]
fn what_belongs_to_no_one_stream_is_said_in_words() {
    let rig = Rig::new("record:on");
    // As cudaMalloc does.
    rig.malloc(3 * MIB, StreamHandle::ALL_STREAMS);
    rig.malloc(700, DEFAULT);
    let report = refused(&rig, 17 * GIB);
    let state = gather::state(&rig.heap, Some(&report));
    assert!(state.events.entries.iter().any(|event| event.kind == "grow"));
    let text = text::text(&state);
    assert!(text.contains(" grow ") && text.contains("stream none"), "{text}");
    assert!(text.contains("of stream all ") && text.contains("of stream 0 "), "{text}");
    assert!(!text.contains("4294967295") && !text.contains("4094"), "{text}");
    rig.check();
}
