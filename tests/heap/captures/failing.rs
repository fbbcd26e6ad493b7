//! Captures that fail, and streams that can't be asked whether they capture.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB};
use crate::world::World;
use gruyere::heap::Error;
use gruyere_phantom::{CallKind, Injection, as_program};

#[test]
fn a_capture_that_fails_leaves_nothing_behind() {
    for backing in BACKINGS {
        let world = World::new(512 * MIB, backing);
        let (stream, other) = (world.rig.stream(), world.rig.stream());
        world.begin(1, stream);
        let mut blocks = vec![world.malloc(5000, stream), world.malloc(5 * MIB, stream)];
        // The program waits for its own capturing stream, which breaks the capture.
        assert!(as_program(|| world.rig.gpu.stream_synchronize(0, stream.0)).is_err());
        blocks.extend([world.malloc(5000, stream), world.malloc(5 * MIB, stream)]);
        world.begin(2, other);
        blocks.extend([world.malloc(5000, stream), world.malloc(5 * MIB, stream)]);
        blocks.push(world.malloc(5000, other));
        assert!(as_program(|| world.rig.gpu.end_capture(0, stream.0)).is_err());
        world.close(1);
        let graph = world.end(2, other);
        world.release(1);
        world.check();
        blocks.into_iter().for_each(|address| world.free(address));
        world.destroy(graph);
        world.release(2);
        world.check_all_comes_back();
    }
}

/// If the driver refuses the graph, torch throws, and neither ends nor releases.
#[test]
fn a_failed_capture_that_nobody_ends_or_releases_is_forgotten_at_the_next_request() {
    for backing in BACKINGS {
        for next in ["malloc", "begin", "trim"] {
            let world = World::new(512 * MIB, backing);
            let (stream, other) = (world.rig.stream(), world.rig.stream());
            world.begin(1, stream);
            let block = world.malloc(5 * MIB, stream);
            assert!(as_program(|| world.rig.gpu.stream_synchronize(0, stream.0)).is_err());
            // Failed, but not over: its blocks still come from the pool.
            let late = world.malloc(5000, stream);
            assert!(as_program(|| world.rig.gpu.end_capture(0, stream.0)).is_err());
            for address in [block, late] {
                world.free(address);
            }
            match next {
                "malloc" => {
                    let address = world.malloc(5000, other);
                    world.free(address);
                }
                "begin" => {
                    world.begin(2, other);
                    let graph = world.end(2, other);
                    world.destroy(graph);
                    world.release(2);
                }
                _ => {
                    world.rig.heap.trim();
                }
            }
            world.check_all_comes_back();
        }
    }
}

#[test]
fn the_legacy_stream_that_cannot_be_asked_during_a_capture_gets_ordinary_memory() {
    let world = World::new(GIB, "headroom:0");
    let stream = world.rig.stream();
    world.begin(1, stream);
    let code =
        |code| Injection { kind: Some(CallKind::CaptureStatus), nth: 1, code, from_then_on: true };
    world.rig.gpu.inject(code(906));
    let address = world.malloc(5 * MIB, DEFAULT);
    world.rig.gpu.clear_injections();
    assert_eq!(world.captured(), 0);
    world.free(address);
    let graph = world.end(1, stream);
    world.destroy(graph);
    world.release(1);
    world.check_all_comes_back();
}

#[test]
fn a_capturing_stream_that_cannot_be_asked_gets_memory_that_is_never_reused() {
    let world = World::new(GIB, "headroom:0");
    let stream = world.rig.stream();
    world.begin(1, stream);
    world.rig.gpu.inject(Injection {
        kind: Some(CallKind::CaptureStatus),
        nth: 1,
        code: 906,
        from_then_on: true,
    });
    let blocks = [5000, 5 * MIB].map(|size| world.malloc(size, stream));
    blocks.into_iter().for_each(|address| world.free(address));
    assert!(!blocks.contains(&world.malloc(5000, stream)));
    assert!(!blocks.contains(&world.malloc(5 * MIB, stream)));
    world.rig.gpu.clear_injections();
    let graph = world.end(1, stream);
    world.replay(graph, DEFAULT);
    assert!(!blocks.contains(&world.malloc(5000, stream)));
    assert!(!blocks.contains(&world.malloc(5 * MIB, stream)));
    world.check();
}

#[test]
fn a_status_that_fails_for_another_reason_is_an_error_not_a_guess() {
    let world = World::new(GIB, "headroom:0");
    let stream = world.rig.stream();
    world.begin(1, stream);
    world.rig.gpu.inject(Injection {
        kind: Some(CallKind::CaptureStatus),
        nth: 1,
        code: 999,
        from_then_on: false,
    });
    assert!(matches!(world.try_malloc(5000, 0, stream), Err(Error::Driver(_))));
    let address = world.malloc(5000, stream);
    world.free(address);
    let graph = world.end(1, stream);
    world.destroy(graph);
    world.release(1);
    world.check_all_comes_back();
}
