//! CUDA graphs: the source of a capture's blocks, the calls allowed during a capture, and the reuse
//! of a graph's memory. Every test runs under the oracle, one test per promise.

mod failing;
mod programs;
mod unannounced;

use crate::common::{BACKINGS, DEFAULT, GIB, MIB, Rig, malloc_again, wait};
use crate::world::World;
use gruyere::driver::StreamHandle;
use gruyere::heap::Error;
use gruyere_phantom::{CallKind, Caller, CaptureMode, Config as GpuConfig, Injection, as_program};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// Calls forbidden while a pool scope is open on the device.
const FORBIDDEN: [CallKind; 8] = [
    CallKind::EventCreate,
    CallKind::EventRecord,
    CallKind::EventQuery,
    CallKind::EventSynchronize,
    CallKind::StreamWaitEvent,
    CallKind::DeviceSynchronize,
    CallKind::Free,
    CallKind::Memset,
];

impl World {
    /// Another stream joins the capture of the first.
    fn fork(&self, from: StreamHandle, to: StreamHandle) {
        wait(&self.rig.gpu, 0, [to, from]).unwrap();
    }

    fn captured(&self) -> u64 {
        self.rig.heap.stats(0).unwrap().captured
    }

    fn forbidden_calls(&self) -> Vec<u64> {
        let counts = self.rig.gpu.counts(Caller::Allocator);
        FORBIDDEN.iter().map(|&kind| counts.of(kind)).collect()
    }
}

fn pages(address: u64, bytes: u64) -> std::ops::RangeInclusive<u64> {
    address / (2 * MIB)..=(address + bytes - 1) / (2 * MIB)
}

#[test]
fn nobody_else_gets_the_memory_of_a_graph_while_it_lives() {
    for backing in BACKINGS {
        let world = World::new(2 * GIB, backing);
        let (capturing, other) = (world.rig.stream(), world.rig.stream());
        let sizes = [512, 5000, 300_000, 3 * MIB, 40 * MIB];
        let before: Vec<u64> = sizes.iter().map(|&size| world.malloc(size, capturing)).collect();
        before.into_iter().for_each(|address| world.free(address));

        world.begin(1, capturing);
        let mut private = HashSet::new();
        let mut kept = Vec::new();
        for round in 0..3 {
            for size in sizes {
                let address = world.malloc(size, capturing);
                world.launch(capturing, 1);
                private.extend(pages(address, size));
                if round == 1 { kept.push(address) } else { world.free(address) }
            }
        }
        let graph = world.end(1, capturing);
        kept.into_iter().for_each(|address| world.free(address));

        for round in 0..3 {
            for stream in [capturing, other, DEFAULT] {
                world.replay(graph, other);
                for size in sizes {
                    let address = world.malloc(size, stream);
                    assert!(
                        pages(address, size).all(|page| !private.contains(&page)),
                        "{backing}: {size} B in round {round} lie in the graph's memory"
                    );
                    world.free(address);
                }
            }
            world.rig.heap.trim();
        }
        // Not even when there is nothing else.
        let huge =
            (0..).map_while(|_| world.try_malloc(100 * MIB, 0, other).ok()).collect::<Vec<_>>();
        assert!(world.captured() > 0);
        huge.into_iter().for_each(|address| world.free(address));
        world.check();
        world.destroy(graph);
        world.release(1);
        world.check_all_comes_back();
    }
}

#[test]
fn reuse_inside_a_capture_is_for_the_same_stream_only() {
    let world = World::new(GIB, "headroom:0");
    let (first, second) = (world.rig.stream(), world.rig.stream());
    world.begin(1, first);
    world.fork(first, second);
    for size in [600, 70_000, 5 * MIB] {
        let address = world.malloc(size, first);
        world.launch(first, 1);
        world.free(address);
        let others = world.malloc(size, second);
        assert_ne!(others, address, "{size}");
        // Its own stream gets it back: the block takes no new memory, and the other stream's stays.
        let held = world.captured();
        let again = world.malloc(size, first);
        assert_eq!(world.captured(), held, "{size}");
        assert!(again + size <= others || others + size <= again, "{size}");
        world.free(others);
        world.free(again);
    }
    let graph = world.end(1, first);
    world.check();
    world.destroy(graph);
    world.release(1);
    world.check_all_comes_back();
}

#[test]
fn frees_of_ordinary_blocks_during_a_capture_wait_for_its_end() {
    for backing in
        ["backing:stitch,headroom:0", "backing:pool,headroom:0", "backing:fixed,headroom:0"]
    {
        let world = World::new(256 * MIB, backing);
        let (capturing, one, other) = (world.rig.stream(), world.rig.stream(), world.rig.stream());
        let (large, small) = (world.malloc(140 * MIB, one), world.malloc(9000, one));
        world.launch(one, 1);
        world.begin(1, capturing);
        world.free(large);
        world.free(small);
        let calls = world.forbidden_calls();
        assert!(
            matches!(world.try_malloc(140 * MIB, 0, other), Err(Error::OutOfMemory(_))),
            "{backing}"
        );
        // Its own stream may reuse it at once.
        assert_eq!(world.malloc(140 * MIB, one), large);
        world.free(large);
        assert_eq!(world.forbidden_calls(), calls, "{backing}");
        let graph = world.end(1, capturing);
        let again = world.malloc(140 * MIB, other);
        assert_ne!(world.forbidden_calls(), calls);
        world.free(again);
        world.destroy(graph);
        world.release(1);
        world.check_all_comes_back();
    }
}

#[test]
fn the_begin_hook_turns_what_is_freed_into_events_before_the_stream_captures() {
    let world = World::new(256 * MIB, "headroom:0");
    let (capturing, one) = (world.rig.stream(), world.rig.stream());
    let [large, small] = [50 * MIB, MIB / 2].map(|bytes| {
        [capturing, one].map(|stream| {
            let address = world.malloc(bytes, stream);
            world.launch(stream, 1);
            address
        })
    });
    // The large ones have their events at once; the small ones are too few for a batch.
    large.into_iter().chain(small).for_each(|address| world.free(address));
    for stream in [capturing, one] {
        malloc_again(&world.rig.heap, 0, stream);
    }
    let before = world.count(CallKind::EventRecord);
    world.open(1);
    assert_eq!(world.count(CallKind::EventRecord), before + 2);
    world.capture(1, capturing);
    world.end_capture(capturing);
    world.close(1);
    // One query is enough then.
    world.rig.gpu.host_spend(1_000_000);
    let block = world.malloc(100 * MIB, DEFAULT);
    assert_eq!(world.count(CallKind::EventRecord), before + 2);
    world.free(block);
    world.check();
}

#[test]
fn nothing_is_asked_recorded_or_waited_for_while_a_pool_scope_is_open() {
    for backing in BACKINGS {
        for captures in [true, false] {
            let world = World::new(512 * MIB, backing);
            let (capturing, one, other) =
                (world.rig.stream(), world.rig.stream(), world.rig.stream());
            let mut shared: Vec<u64> =
                [800, 30_000, 20 * MIB].map(|size| world.malloc(size, one)).into();
            for &address in &shared {
                world.record_stream(address, other);
            }
            let held = world.malloc(200 * MIB, one);
            world.launch(one, 3);
            world.launch(other, 3);
            world.open(1);
            if captures {
                world.capture(1, capturing);
            }
            let (calls, waited) =
                (world.forbidden_calls(), world.rig.gpu.host_time().blocked_by_allocator);
            world.free(shared.pop().unwrap());
            world.free(held);
            shared.into_iter().for_each(|address| world.free(address));
            for stream in [capturing, one, other] {
                let some = [800, 30_000, 20 * MIB].map(|size| world.try_malloc(size, 0, stream));
                some.into_iter().flatten().for_each(|address| world.free(address));
                let huge = (0..).map_while(|_| world.try_malloc(40 * MIB, 0, stream).ok());
                huge.collect::<Vec<_>>().into_iter().for_each(|address| world.free(address));
            }
            world.rig.heap.trim();
            world.rig.heap.mark_step();
            world.rig.heap.stats(0).unwrap();
            world.rig.heap.dump();
            // A second pool scope on another stream: its frees get no event, the first stream
            // captures.
            world.open(2);
            world.close(2);
            world.release(2);
            assert_eq!(world.forbidden_calls(), calls, "{backing}");
            assert_eq!(world.rig.gpu.host_time().blocked_by_allocator, waited, "{backing}");
            world.check();
            if captures {
                let graph = world.end_capture(capturing);
                world.destroy(graph);
            }
            world.close(1);
            world.release(1);
            world.check_all_comes_back();
        }
    }
}

#[test]
fn a_pool_id_that_serves_several_captures_is_held_until_the_last_is_released() {
    let world = World::new(GIB, "headroom:0");
    let stream = world.rig.stream();
    let graphs = [(); 3].map(|()| {
        world.begin(1, stream);
        let address = world.malloc(10 * MIB, stream);
        world.launch(stream, 1);
        world.free(address);
        world.end(1, stream)
    });
    for graph in graphs {
        world.rig.heap.trim();
        assert!(world.captured() > 0);
        world.replay(graph, DEFAULT);
        world.destroy(graph);
        world.release(1);
    }
    world.check_all_comes_back();
}

#[test]
fn captures_of_one_pool_id_share_its_memory() {
    let world = World::new(GIB, "headroom:0");
    let stream = world.rig.stream();
    let mut addresses = HashSet::new();
    let graphs: Vec<u64> = (0..5)
        .map(|_| {
            world.begin(1, stream);
            for size in [700, 10 * MIB] {
                let address = world.malloc(size, stream);
                addresses.insert(address);
                world.free(address);
            }
            world.end(1, stream)
        })
        .collect();
    assert!(addresses.len() <= 2, "{addresses:x?}");
    for graph in graphs {
        world.destroy(graph);
        world.release(1);
    }
    world.check_all_comes_back();
}

#[test]
fn the_slabs_of_a_pool_serve_other_sizes_of_the_same_stream_when_they_are_empty() {
    let world = World::new(4 * GIB, "headroom:0");
    let stream = world.rig.stream();
    world.begin(1, stream);
    let mut held = 0;
    for size in [512, 3000, 40_000, 900_000, 700_000, 2 * MIB, 3 * MIB] {
        let count = 24 * MIB / size;
        let blocks: Vec<u64> = (0..count).map(|_| world.malloc(size, stream)).collect();
        blocks.into_iter().for_each(|address| world.free(address));
        held = held.max(world.captured());
    }
    assert!(held <= 64 * MIB, "{held} B are held for 24 MiB at a time");
    let graph = world.end(1, stream);
    world.destroy(graph);
    world.release(1);
    world.check_all_comes_back();
}

#[test]
fn with_two_pool_scopes_open_a_capture_is_matched_to_its_pool_at_its_first_allocation() {
    let world = World::new(GIB, "headroom:0");
    let streams = [world.rig.stream(), world.rig.stream()];
    world.begin(1, streams[0]);
    let first = world.malloc(3 * MIB, streams[0]);
    world.begin(2, streams[1]);
    let second = world.malloc(3 * MIB, streams[1]);
    let more = world.malloc(3 * MIB, streams[0]);
    for address in [first, second, more] {
        world.free(address);
    }
    let graphs = [world.end(1, streams[0]), world.end(2, streams[1])];
    // Pool 1 goes alone; what is captured into pool 2 stays.
    world.destroy(graphs[0]);
    world.release(1);
    let before = world.captured();
    world.rig.heap.trim();
    assert!(world.captured() < before && world.captured() > 0);
    world.begin(2, streams[1]);
    assert_eq!(world.malloc(3 * MIB, streams[1]), second, "it is pool 2 that is left");
    world.free(second);
    let third = world.end(2, streams[1]);
    world.check();
    for graph in [graphs[1], third] {
        world.destroy(graph);
        world.release(2);
    }
    world.check_all_comes_back();
}

#[test]
fn a_capture_that_two_pools_may_own_shares_no_memory_with_either() {
    for size in [5000, 3 * MIB] {
        let world = World::new(GIB, "headroom:0");
        let streams = [world.rig.stream(), world.rig.stream()];
        // Each pool has a graph, and memory that its next capture would reuse.
        let old = [0, 1].map(|at| {
            world.begin(at + 1, streams[0]);
            let address = world.malloc(size, streams[0]);
            world.free(address);
            (address, world.end(at + 1, streams[0]))
        });
        // Both pool scopes open before either capture is seen.
        world.open(1);
        world.open(2);
        world.capture(1, streams[0]);
        world.capture(2, streams[1]);
        let new = streams.map(|stream| world.malloc(size, stream));
        assert!(old.iter().all(|(address, _)| !new.contains(address)));
        new.into_iter().for_each(|address| world.free(address));
        let graphs = [world.end(1, streams[0]), world.end(2, streams[1])];
        world.check();
        // The memory goes when both pools have gone.
        for at in [0, 1] {
            world.rig.heap.trim();
            assert!(world.captured() > 0);
            for graph in [old[at].1, graphs[at]] {
                world.replay(graph, DEFAULT);
                world.destroy(graph);
                world.release(at as u64 + 1);
            }
        }
        world.check_all_comes_back();
    }
}

#[test]
fn release_may_come_before_the_frees() {
    for backing in BACKINGS {
        let world = World::new(512 * MIB, backing);
        let (stream, other) = (world.rig.stream(), world.rig.stream());
        world.begin(1, stream);
        let blocks = [900, 30 * MIB].map(|size| world.malloc(size, stream));
        world.launch(stream, 1);
        let graph = world.end(1, stream);
        world.replay(graph, other);
        world.destroy(graph);
        world.release(1);
        world.rig.heap.trim();
        assert!(world.captured() > 0, "{backing}: its blocks are live");
        world.check();
        world.free(blocks[0]);
        world.rig.heap.trim();
        assert!(world.captured() > 0, "{backing}: one is still live");
        world.free(blocks[1]);
        world.check_all_comes_back();
    }
}

#[test]
fn memory_of_a_graph_goes_to_others_after_a_device_wide_point_later_than_release_and_last_free() {
    for release_first in [true, false] {
        let world = World::new(256 * MIB, "headroom:0");
        let (stream, other) = (world.rig.stream(), world.rig.stream());
        world.begin(1, stream);
        let block = world.malloc(150 * MIB, stream);
        world.launch(stream, 100);
        let graph = world.end(1, stream);
        let finish = |release: bool| {
            if release {
                world.destroy(graph);
                world.release(1);
            } else {
                world.free(block);
            }
        };
        finish(release_first);
        world.rig.heap.trim();
        assert!(world.captured() > 0, "one of the two is missing");
        if !release_first {
            world.replay(graph, other);
        }
        finish(!release_first);
        assert!(world.captured() > 0, "no device-wide point has come since");
        let synchronisations = world.count(CallKind::DeviceSynchronize);
        let taken = world.malloc(200 * MIB, DEFAULT);
        assert_eq!(world.count(CallKind::DeviceSynchronize), synchronisations + 1);
        world.check();
        world.free(taken);
        world.check_all_comes_back();
    }
}

/// Only the graph can use its pool's memory: a step that an eager heap takes in advance would be
/// lost, once per graph.
#[test]
fn many_graphs_hold_little_more_than_they_use() {
    const BLOCK: u64 = 4 * MIB;
    const LITTLE: u64 = BLOCK / 8 * 9;
    for (backing, most) in
        [("backing:stitch", LITTLE), ("backing:pool", 32 * MIB), ("backing:fixed", LITTLE)]
    {
        let world = World::new(64 * GIB, backing);
        let stream = world.rig.stream();
        // Of such a heap, an eager program's next span has 230 MiB.
        let eager = world.malloc(20 * GIB, stream);
        let kept: Vec<(u64, u64, u64)> = (1..=300)
            .map(|pool| {
                world.begin(pool, stream);
                let block = world.malloc(BLOCK, stream);
                (pool, block, world.end(pool, stream))
            })
            .collect();
        assert!(world.captured() <= 300 * most, "{backing}: {} MiB", world.captured() / MIB);
        for (pool, block, graph) in kept {
            world.free(block);
            world.destroy(graph);
            world.release(pool);
        }
        world.free(eager);
        world.check_all_comes_back();
    }
}

#[test]
fn what_little_a_graph_captures_takes_a_page_however_much_the_heap_held() {
    // The driver's pools grow by at least one of their steps.
    for (backing, most) in
        [("backing:stitch", 2 * MIB), ("backing:pool", 32 * MIB), ("backing:fixed", 2 * MIB)]
    {
        let world = World::new(64 * GIB, backing);
        let stream = world.rig.stream();
        let eager: Vec<u64> = (0..40).map(|_| world.malloc(GIB / 2, stream)).collect();
        for (at, block) in eager.into_iter().enumerate() {
            world.free(block);
            if at == 20 {
                world.rig.heap.trim();
            }
        }
        world.begin(1, stream);
        let block = world.malloc(512, stream);
        let graph = world.end(1, stream);
        assert_eq!(world.captured(), most, "{backing}");
        world.free(block);
        world.destroy(graph);
        world.release(1);
        world.check_all_comes_back();
    }
}

/// Free memory not yet returned to the driver lies in the long chunks of the peak.
#[test]
fn what_little_a_graph_captures_takes_no_long_chunk_while_there_is_other_memory() {
    for full in [false, true] {
        let world = World::new(16 * GIB, "backing:stitch,headroom:0");
        let stream = world.rig.stream();
        let failing = |kind| Injection { kind: Some(kind), nth: 1, code: 2, from_then_on: true };
        world.rig.gpu.inject(failing(CallKind::Map));
        world.rig.gpu.inject(failing(CallKind::Release));
        let wanted = if full { 16 * GIB } else { 8 * GIB };
        assert!(world.try_malloc(wanted, 0, stream).is_err());
        world.rig.gpu.clear_injections();
        assert_eq!(world.rig.heap.stats(0).unwrap().reserved, wanted);
        world.begin(1, stream);
        let block = world.malloc(512, stream);
        let graph = world.end(1, stream);
        if full {
            assert!(world.captured() > 2 * MIB, "a long chunk is better than none");
        } else {
            assert_eq!(world.captured(), 2 * MIB);
        }
        world.free(block);
        world.destroy(graph);
        world.release(1);
        world.check_all_comes_back();
    }
}

#[test]
fn a_pool_that_is_begun_again_keeps_its_memory() {
    let world = World::new(256 * MIB, "headroom:0");
    let stream = world.rig.stream();
    world.begin(1, stream);
    let block = world.malloc(100 * MIB, stream);
    world.free(block);
    let first = world.end(1, stream);
    world.destroy(first);
    world.release(1);
    world.begin(1, stream);
    assert_eq!(world.malloc(100 * MIB, stream), block);
    world.free(block);
    let second = world.end(1, stream);
    world.rig.heap.trim();
    assert!(world.captured() > 0);
    assert!(world.try_malloc(200 * MIB, 0, DEFAULT).is_err());
    world.replay(second, DEFAULT);
    world.destroy(second);
    world.release(1);
    world.check_all_comes_back();
}

#[test]
fn a_capture_on_one_device_does_not_stop_another() {
    let world = World::over(GpuConfig::devices(2, 256 * MIB), "headroom:0");
    world.rig.heap.announce_hooks(3);
    let capturing = world.rig.stream();
    world.begin(1, capturing);
    // The other device is full of one stream's freed memory: only a wait makes it available to
    // another.
    let block = world.try_malloc(200 * MIB, 1, DEFAULT).unwrap();
    as_program(|| world.rig.gpu.launch(1, 0, 1, 20_000)).unwrap();
    world.free(block);
    let other =
        as_program(|| world.rig.gpu.stream_create(1, gruyere_phantom::StreamKind::NonBlocking));
    let other = StreamHandle(other.unwrap());
    let block = world.try_malloc(200 * MIB, 1, other).unwrap();
    world.free(block);
    let synchronisations = world.count(CallKind::DeviceSynchronize);
    world.rig.heap.trim();
    assert_eq!(world.count(CallKind::DeviceSynchronize), synchronisations + 1);
    assert_eq!(world.rig.gpu.books(1).physical, 0);
    let graph = world.end(1, capturing);
    world.destroy(graph);
    world.release(1);
    world.check_all_comes_back();
}

#[test]
fn a_captured_block_waits_for_the_streams_that_are_recorded_on_it() {
    for size in [5000, 60 * MIB] {
        let world = World::new(256 * MIB, "headroom:0");
        let (stream, reader) = (world.rig.stream(), world.rig.stream());
        world.begin(1, stream);
        let output = world.malloc(size, stream);
        world.launch(stream, 1);
        let graph = world.end(1, stream);
        world.replay(graph, stream);
        world.fork(stream, reader);
        world.record_stream(output, reader);
        world.launch(reader, 50);
        world.free(output);
        // The same pool, the same stream: not while the reader runs.
        world.begin(1, stream);
        let next = world.malloc(size, stream);
        assert_ne!(next, output);
        world.free(next);
        let again = world.end(1, stream);
        for graph in [graph, again] {
            world.destroy(graph);
            world.release(1);
        }
        world.check_all_comes_back();
    }
}

#[test]
fn a_pool_of_the_users_without_a_capture_gets_ordinary_memory() {
    for backing in BACKINGS {
        let world = World::new(512 * MIB, backing);
        let (stream, other) = (world.rig.stream(), world.rig.stream());
        world.open(7);
        let mut blocks = Vec::new();
        for size in [600, 50_000, 3 * MIB, 60 * MIB] {
            let address = world.malloc(size, stream);
            world.launch(stream, 1);
            world.free(address);
            let others = world.malloc(size, other);
            assert_ne!(others, address, "{backing} {size}");
            blocks.extend([others, world.malloc(size, stream)]);
        }
        assert_eq!(world.captured(), 0, "{backing}");
        world.close(7);
        world.release(7);
        blocks.into_iter().for_each(|address| world.free(address));
        world.check_all_comes_back();
    }
}

#[test]
fn hooks_out_of_order_are_harmless() {
    let world = World::new(512 * MIB, "headroom:0");
    let (stream, other) = (world.rig.stream(), world.rig.stream());
    // None of it was begun.
    world.close(1);
    world.release(1);
    world.release(1);
    for device in [-1, 9] {
        assert!(world.rig.heap.begin_allocate_to_pool(device, (0, 1)).is_err());
        assert!(world.rig.heap.end_allocate_to_pool(device, (0, 1)).is_err());
        assert!(world.rig.heap.release_pool(device, (0, 1)).is_err());
    }
    // Ended twice; released before the end, and once more than begun.
    world.begin(1, stream);
    let block = world.malloc(5 * MIB, stream);
    world.release(1);
    world.free(block);
    world.rig.heap.trim();
    assert!(world.captured() > 0);
    let graph = world.end(1, stream);
    world.close(1);
    world.destroy(graph);
    world.release(1);
    world.check_all_comes_back();
    // The heap asks and waits as ever.
    let block = world.malloc(400 * MIB, other);
    world.launch(other, 1);
    world.free(block);
    let block = world.malloc(400 * MIB, stream);
    world.free(block);
    world.check_all_comes_back();
}

#[test]
fn a_block_freed_twice_after_its_pool_has_gone_is_counted_and_harmless() {
    let world = World::new(512 * MIB, "headroom:0");
    let stream = world.rig.stream();
    for pool in 1..4 {
        world.begin(pool, stream);
        let blocks = [5000, 5 * MIB].map(|size| world.malloc(size, stream));
        blocks.into_iter().for_each(|address| world.free(address));
        let graph = world.end(pool, stream);
        world.destroy(graph);
        world.release(pool);
        assert!(blocks.into_iter().all(|address| !world.rig.heap.free(address)));
        world.rig.heap.trim();
        assert!(blocks.into_iter().all(|address| !world.rig.heap.free(address)));
    }
    assert_eq!(world.rig.heap.stats(0).unwrap().bad_frees, 12);
    world.check_all_comes_back();
}

#[test]
fn poison_leaves_the_memory_of_graphs_alone() {
    let world = World::new(512 * MIB, "debug:poison");
    let stream = world.rig.stream();
    world.begin(1, stream);
    let blocks = [5000, 5 * MIB].map(|size| world.malloc(size, stream));
    let graph = world.end(1, stream);
    let fills = world.count(CallKind::Memset);
    world.replay(graph, DEFAULT);
    blocks.into_iter().for_each(|address| world.free(address));
    assert_eq!(world.count(CallKind::Memset), fills);
    world.destroy(graph);
    world.release(1);
    world.check_all_comes_back();
}

#[test]
fn captures_survive_threads_that_run_out_of_memory_beside_them() {
    let rig = Rig::over(GpuConfig::new(256 * MIB), "headroom:0");
    rig.heap.announce_hooks(3);
    let streams: Vec<StreamHandle> = (0..3).map(|_| rig.stream()).collect();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for &stream in &streams[1..] {
            let (rig, done) = (&rig, &done);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    if let Ok(address) = rig.heap.malloc(150 * MIB, 0, stream) {
                        assert!(rig.heap.free(address));
                    }
                    rig.heap.trim();
                }
            });
        }
        for pool in 0..1000 {
            rig.heap.begin_allocate_to_pool(0, (0, pool)).unwrap();
            as_program(|| rig.gpu.begin_capture(0, streams[0].0, CaptureMode::Global, None))
                .unwrap();
            let addresses = [600, 2 * MIB].map(|size| rig.heap.malloc(size, 0, streams[0]));
            // A device-wide synchronisation meanwhile would have broken it.
            let graph = as_program(|| rig.gpu.end_capture(0, streams[0].0));
            rig.heap.end_allocate_to_pool(0, (0, pool)).unwrap();
            addresses.into_iter().flatten().for_each(|address| assert!(rig.heap.free(address)));
            rig.heap.release_pool(0, (0, pool)).unwrap();
            assert!(graph.is_ok(), "capture {pool}: {graph:?}");
        }
        done.store(true, Ordering::Relaxed);
    });
    rig.heap.trim();
    rig.check();
    assert_eq!(rig.gpu.books(0).physical, 0);
}
