//! Captures that no hook announces.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB};
use crate::world::World;
use gruyere_phantom::{CallKind, CaptureMode, CapturingIds, Config as GpuConfig, as_program};
use std::collections::HashSet;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// A world without the hooks, with the warnings counted.
fn bare(memory: u64, conf: &str) -> World {
    Warnings::watch();
    World::over(GpuConfig::new(memory), conf)
}

/// Counts the warnings of missing hooks in this process.
struct Warnings;

static WARNINGS: AtomicU32 = AtomicU32::new(0);

impl Warnings {
    fn watch() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            log::set_logger(&Warnings).unwrap();
            log::set_max_level(log::LevelFilter::Warn);
        });
    }
}

impl log::Log for Warnings {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().starts_with("hooks not wired:") {
            WARNINGS.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

#[test]
fn without_the_hooks_captured_memory_is_never_reused() {
    for backing in BACKINGS {
        let world = bare(2 * GIB, backing);
        let (stream, other) = (world.rig.stream(), world.rig.stream());
        let mut captured = HashSet::new();
        for _ in 0..3 {
            as_program(|| world.rig.gpu.begin_capture(0, stream.0, CaptureMode::Global, None))
                .unwrap();
            for size in [700, 700, 90_000, 4 * MIB] {
                let address = world.malloc(size, stream);
                world.launch(stream, 1);
                assert!(captured.insert(address), "{backing}: {address:#x} is handed out twice");
                world.free(address);
            }
            let graph = world.end_capture(stream);
            world.rig.heap.trim();
            world.replay(graph, other);
            for (size, stream) in
                [(700, stream), (90_000, other), (4 * MIB, stream), (200 * MIB, DEFAULT)]
            {
                let address = world.malloc(size, stream);
                assert!(!captured.contains(&address), "{backing}");
                world.free(address);
            }
        }
        world.check();
        assert!(world.captured() < 200 * MIB, "{backing}: {} B for 15 MiB", world.captured());
    }
}

#[test]
fn without_the_hooks_every_malloc_asks_whether_its_stream_captures_and_one_warning_says_what_is_missing()
 {
    // The warning appears once per process.
    if !crate::alone(
        "captures::unannounced::without_the_hooks_every_malloc_asks_whether_its_stream_captures_and_one_warning_says_what_is_missing",
    ) {
        return;
    }
    let world = bare(GIB, "");
    for size in [600, 700, 5 * MIB] {
        let before = world.count(CallKind::CaptureStatus);
        let address = world.malloc(size, DEFAULT);
        assert!(world.count(CallKind::CaptureStatus) > before);
        world.free(address);
    }
    assert_eq!(WARNINGS.load(Ordering::Relaxed), 1);
    world.rig.heap.announce_hooks(3);
    let before = world.count(CallKind::CaptureStatus);
    world.malloc(600, DEFAULT);
    assert_eq!(world.count(CallKind::CaptureStatus), before);
}

#[test]
fn without_the_hooks_streams_share_nothing() {
    let world = bare(GIB, "");
    let (one, other) = (world.rig.stream(), world.rig.stream());
    let mut seen = [HashSet::new(), HashSet::new()];
    for _ in 0..4 {
        for (at, stream) in [one, other].into_iter().enumerate() {
            for size in [600, 90_000, 3 * MIB, 30 * MIB] {
                let address = world.malloc(size, stream);
                world.launch(stream, 1);
                seen[at].extend((0..size.div_ceil(512)).map(|piece| address + piece * 512));
                world.free(address);
            }
        }
        world.rig.gpu.host_spend(10_000_000);
        world.rig.heap.mark_step();
    }
    assert!(seen[0].is_disjoint(&seen[1]));
    world.check();
}

#[test]
fn without_the_hooks_running_out_of_memory_during_a_capture_does_not_synchronise() {
    for backing in BACKINGS {
        let world = bare(256 * MIB, backing);
        let (stream, other) = (world.rig.stream(), world.rig.stream());
        let block = world.malloc(150 * MIB, other);
        world.launch(other, 5);
        as_program(|| world.rig.gpu.begin_capture(0, stream.0, CaptureMode::Global, None)).unwrap();
        let small = world.malloc(512, stream);
        let calls = world.forbidden_calls();
        world.free(block);
        assert!(world.try_malloc(200 * MIB, 0, stream).is_err());
        assert!(world.try_malloc(255 * MIB, 0, other).is_err());
        world.rig.heap.trim();
        assert_eq!(world.forbidden_calls(), calls, "{backing}");
        let graph = world.end_capture(stream);
        world.free(small);
        world.replay(graph, other);
        world.check();
    }
}

#[test]
fn a_capture_that_nobody_announced_lives_and_its_memory_is_nobody_elses_though_all_hooks_are_wired()
{
    for capturing_ids in [CapturingIds::Told, CapturingIds::Refused, CapturingIds::Invalidate] {
        for backing in BACKINGS {
            let world = World::over(GpuConfig { capturing_ids, ..GpuConfig::new(GIB) }, backing);
            world.rig.heap.announce_hooks(3);
            let (stream, other) = (world.rig.stream(), world.rig.stream());
            as_program(|| world.rig.gpu.begin_capture(0, stream.0, CaptureMode::Relaxed, None))
                .unwrap();
            let blocks = [600, 5 * MIB].map(|size| world.malloc(size, stream));
            world.launch(stream, 1);
            blocks.into_iter().for_each(|address| world.free(address));
            let graph = world.end_capture(stream);
            world.rig.heap.trim();
            for size in [600, 5 * MIB] {
                let address = world.malloc(size, other);
                assert!(!blocks.contains(&address), "{backing}, ids {capturing_ids:?}");
                world.launch(other, 1);
                world.free(address);
            }
            world.replay(graph, DEFAULT);
            world.check();
        }
    }
}

#[test]
fn a_stream_first_seen_in_a_capture_is_the_same_stream_outside_of_it() {
    for capturing_ids in [CapturingIds::Told, CapturingIds::Refused, CapturingIds::Invalidate] {
        let world = World::over(GpuConfig { capturing_ids, ..GpuConfig::new(GIB) }, "headroom:0");
        world.rig.heap.announce_hooks(3);
        let stream = world.rig.stream();
        world.begin(1, stream);
        let first = world.malloc(100 * MIB, stream);
        world.free(first);
        let graph = world.end(1, stream);
        // Here the heap queries the stream's id.
        let outside = world.malloc(5000, stream);
        world.free(outside);
        world.begin(1, stream);
        assert_eq!(
            world.malloc(100 * MIB, stream),
            first,
            "ids {capturing_ids:?}: the pool's memory is its own"
        );
        world.free(first);
        let again = world.end(1, stream);
        for graph in [graph, again] {
            world.destroy(graph);
            world.release(1);
        }
        world.check_all_comes_back();
    }
}
