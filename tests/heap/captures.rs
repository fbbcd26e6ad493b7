//! CUDA graphs: the source of a capture's blocks, the calls allowed during a capture, and the reuse
//! of a graph's memory. Every test runs under the oracle, one test per promise.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB, Rig, malloc_again, wait, wait_and_tell};
use crate::world::World;
use gruyere::driver::StreamHandle;
use gruyere::heap::{Error, PoolState, Restored, StateError};
use gruyere_phantom::{
    CallKind, Caller, CaptureMode, CaptureStatus, CapturingIds, Config as GpuConfig, Injection,
    as_program, vouching,
};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

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
    /// A block beside the graphs of a pool.
    fn try_malloc_beside(&self, size: u64, stream: StreamHandle, pool: u64) -> Result<u64, Error> {
        let ask = || self.rig.heap.malloc_for_graphs(size, 0, stream, (0, pool));
        let address = vouching(stream.0, ask)?;
        let (id, place) = (self.next_id(), (address, size));
        let state = self.rig.heap.pool_state(0, (0, pool));
        let is_theirs = state.is_ok_and(|state| state.blocks().any(|block| block.0 == address));
        if is_theirs && !self.rig.gpu.is_capturing(0, stream.0) {
            self.rig.gpu.block_of_group(id, place, 0, stream.0, pool);
        } else {
            self.rig.gpu.block_malloc(id, address, size, 0, stream.0);
        }
        Ok(address)
    }

    /// Restores a state; `facts` has size and stream of the blocks that it may allocate.
    fn restore_noted(
        &self,
        state: &PoolState,
        pool: u64,
        facts: &HashMap<u64, (u64, StreamHandle)>,
    ) -> Result<Restored, StateError> {
        let restored = self.rig.heap.restore_pool(state)?;
        restored.freed.iter().for_each(|&address| self.rig.gpu.block_free(address));
        for address in &restored.allocated {
            let (size, stream) = facts[address];
            let (id, place) = (self.next_id(), (*address, size));
            self.rig.gpu.block_of_group(id, place, 0, stream.0, pool);
        }
        Ok(restored)
    }

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

/// A world without the hooks, with the warnings counted.
fn bare(memory: u64, conf: &str) -> World {
    Warnings::watch();
    World::over(GpuConfig::new(memory), conf)
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
        "captures::without_the_hooks_every_malloc_asks_whether_its_stream_captures_and_one_warning_says_what_is_missing",
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

/// One action of a program with graphs. Numbers are reduced to existing objects.
#[derive(Clone, Debug)]
enum Action {
    Malloc {
        size: u64,
        stream: usize,
    },
    Free {
        block: usize,
    },
    RecordStream {
        block: usize,
        stream: usize,
    },
    Launch {
        stream: usize,
        kernels: u64,
    },
    HostSpend {
        microseconds: u64,
    },
    /// The host waits for a stream; if the stream captures, that breaks the capture.
    HostWait {
        stream: usize,
    },
    /// A stream waits for another; if that one captures, the stream joins.
    Join {
        waiting: usize,
        other: usize,
    },
    OpenScope {
        pool: u64,
    },
    /// On the latest pool scope without a capture, if any.
    BeginCapture {
        stream: usize,
        relaxed: bool,
    },
    /// An unannounced capture, without a pool, on a stream that the heap has seen.
    DestroyStream {
        stream: usize,
        announce: bool,
    },
    BeginUnannounced {
        stream: usize,
    },
    EndUnannounced {
        capture: usize,
    },
    /// Ends a pool scope, and its capture if any.
    Close {
        scope: usize,
    },
    Replay {
        graph: usize,
        stream: usize,
    },
    /// The graph is destroyed, and its pool released.
    Reset {
        graph: usize,
        destroy_first: bool,
    },
    /// As in the warm-up and the input copies of graph trees.
    MallocBeside {
        size: u64,
        stream: usize,
        pool: u64,
    },
    /// Notes the live blocks of a pool.
    TakeState {
        pool: u64,
    },
    Restore {
        state: usize,
    },
    Trim,
    Step,
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 1..8192u64, 3 => 8192..MIB, 4 => MIB..24 * MIB, 1 => 24 * MIB..100 * MIB]
}

fn action() -> impl Strategy<Value = Action> {
    let n = 0..64usize;
    prop_oneof![
        14 => (size(), n.clone()).prop_map(|(size, stream)| Action::Malloc { size, stream }),
        11 => (0..4096usize).prop_map(|block| Action::Free { block }),
        2 => (0..4096usize, n.clone()).prop_map(
            |(block, stream)| Action::RecordStream { block, stream }
        ),
        5 => (n.clone(), 1..6u64).prop_map(|(stream, kernels)| Action::Launch { stream, kernels }),
        1 => (1..200u64).prop_map(|microseconds| Action::HostSpend { microseconds }),
        1 => n.clone().prop_map(|stream| Action::HostWait { stream }),
        2 => (n.clone(), n.clone()).prop_map(|(waiting, other)| Action::Join { waiting, other }),
        3 => (1..5u64).prop_map(|pool| Action::OpenScope { pool }),
        4 => (n.clone(), any::<bool>()).prop_map(
            |(stream, relaxed)| Action::BeginCapture { stream, relaxed }
        ),
        1 => n.clone().prop_map(|stream| Action::BeginUnannounced { stream }),
        2 => (n.clone(), any::<bool>()).prop_map(
            |(stream, announce)| Action::DestroyStream { stream, announce }
        ),
        1 => n.clone().prop_map(|capture| Action::EndUnannounced { capture }),
        3 => n.clone().prop_map(|scope| Action::Close { scope }),
        3 => (n.clone(), n.clone()).prop_map(|(graph, stream)| Action::Replay { graph, stream }),
        2 => (n.clone(), any::<bool>()).prop_map(
            |(graph, destroy_first)| Action::Reset { graph, destroy_first }
        ),
        2 => (1..5u64).prop_map(|pool| Action::TakeState { pool }),
        3 => n.prop_map(|state| Action::Restore { state }),
        1 => Just(Action::Trim),
        1 => Just(Action::Step),
    ]
}

/// As [`action`], with few streams and pools, mostly inside captures, and with frequent restores.
fn action_with_states() -> impl Strategy<Value = Action> {
    let (n, near) = (0..64usize, 1..3usize);
    prop_oneof![
        24 => (size(), near.clone()).prop_map(|(size, stream)| Action::Malloc { size, stream }),
        10 => (0..4096usize).prop_map(|block| Action::Free { block }),
        2 => (0..4096usize, n.clone()).prop_map(
            |(block, stream)| Action::RecordStream { block, stream }
        ),
        4 => (n.clone(), 1..6u64).prop_map(|(stream, kernels)| Action::Launch { stream, kernels }),
        1 => n.clone().prop_map(|stream| Action::HostWait { stream }),
        1 => (near.clone(), near.clone()).prop_map(
            |(waiting, other)| Action::Join { waiting, other }
        ),
        3 => (1..3u64).prop_map(|pool| Action::OpenScope { pool }),
        6 => (near, any::<bool>()).prop_map(
            |(stream, relaxed)| Action::BeginCapture { stream, relaxed }
        ),
        2 => n.clone().prop_map(|scope| Action::Close { scope }),
        2 => (n.clone(), n.clone()).prop_map(|(graph, stream)| Action::Replay { graph, stream }),
        1 => (n.clone(), any::<bool>()).prop_map(
            |(graph, destroy_first)| Action::Reset { graph, destroy_first }
        ),
        4 => (size(), n.clone(), 1..3u64).prop_map(
            |(size, stream, pool)| Action::MallocBeside { size, stream, pool }
        ),
        6 => (1..3u64).prop_map(|pool| Action::TakeState { pool }),
        10 => n.prop_map(|state| Action::Restore { state }),
        1 => Just(Action::Trim),
    ]
}

/// A pool's state, and the program's knowledge of its blocks.
struct Taken {
    state: PoolState,
    pool: u64,
    facts: HashMap<u64, (u64, StreamHandle)>,
}

/// A random program in a world.
struct Program {
    world: World,
    streams: Vec<StreamHandle>,
    live: Vec<u64>,
    /// Size and stream of each live block with an existing stream.
    facts: HashMap<u64, (u64, StreamHandle)>,
    states: Vec<Taken>,
    /// Pools of the open pool scopes, and the stream of each one's capture.
    scopes: Vec<(u64, Option<StreamHandle>)>,
    /// Pools to release, with the graph if the capture succeeded.
    graphs: Vec<(u64, Option<u64>)>,
    /// Streams of unannounced captures, and their graphs, which are never destroyed.
    unannounced: Vec<StreamHandle>,
    nobodys_graphs: Vec<u64>,
    announces_all: bool,
    /// Streams announced as lasting.
    announced: [bool; 5],
}

impl Program {
    fn new(memory: u64, conf: &str) -> Self {
        Self::over(GpuConfig::new(memory), conf)
    }

    fn over(config: GpuConfig, conf: &str) -> Self {
        let world = World::over(GpuConfig { vouched_streams: true, ..config }, conf);
        world.rig.heap.announce_hooks(3);
        let mut streams = vec![DEFAULT];
        streams.extend((0..4).map(|_| world.rig.stream()));
        Self {
            announced: [true; 5],
            world,
            streams,
            live: Vec::new(),
            facts: HashMap::new(),
            states: Vec::new(),
            scopes: Vec::new(),
            graphs: Vec::new(),
            unannounced: Vec::new(),
            nobodys_graphs: Vec::new(),
            announces_all: true,
        }
    }

    /// Adds unannounced captures. The heap has seen every stream: it cannot know of others.
    fn unannounced(mut self) -> Self {
        self.announces_all = false;
        for stream in self.streams.clone() {
            let address = self.world.malloc(600, stream);
            self.world.free(address);
        }
        self
    }

    fn stream(&self, number: usize) -> StreamHandle {
        self.streams[number % self.streams.len()]
    }

    /// The driver may refuse an action (a wait in a capture, a launch in a failed one), which then
    /// has no effect.
    fn run(&mut self, action: &Action) {
        let gpu = self.world.rig.gpu.clone();
        match *action {
            Action::Malloc { size, stream } => {
                match self.world.try_malloc(size, 0, self.stream(stream)) {
                    Ok(address) => {
                        self.live.push(address);
                        self.facts.insert(address, (size, self.stream(stream)));
                    }
                    Err(Error::OutOfMemory(_) | Error::Driver(_)) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Action::MallocBeside { size, stream, pool } => {
                let stream = self.stream(stream);
                match self.world.try_malloc_beside(size, stream, pool) {
                    Ok(address) => {
                        self.live.push(address);
                        self.facts.insert(address, (size, stream));
                    }
                    Err(Error::OutOfMemory(_) | Error::Driver(_)) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Action::TakeState { pool } => self.take_state(pool),
            Action::Restore { state } => {
                if !self.states.is_empty() {
                    self.restore(state % self.states.len());
                }
            }
            Action::Free { block } => {
                if !self.live.is_empty() {
                    let address = self.live.swap_remove(block % self.live.len());
                    self.world.free(address);
                }
            }
            Action::RecordStream { block, stream } => {
                if !self.live.is_empty() {
                    self.world
                        .record_stream(self.live[block % self.live.len()], self.stream(stream));
                }
            }
            Action::Launch { stream, kernels } => {
                let _ = as_program(|| gpu.launch(0, self.stream(stream).0, kernels, 20_000));
            }
            Action::HostSpend { microseconds } => gpu.host_spend(microseconds * 1000),
            Action::HostWait { stream } => {
                let _ = as_program(|| gpu.stream_synchronize(0, self.stream(stream).0));
            }
            Action::Join { waiting, other } => {
                // The legacy stream cannot join a capture.
                let waiting = self.streams[1 + waiting % (self.streams.len() - 1)];
                let streams = [waiting, self.stream(other)];
                let _ = wait_and_tell(&gpu, &self.world.rig.heap, 0, streams);
            }
            Action::OpenScope { pool } => {
                // The heap would take an unannounced capture for the one that a pool scope expects.
                if self.scopes.len() < 3 && self.announces_all {
                    self.world.open(pool);
                    self.scopes.push((pool, None));
                }
            }
            Action::BeginCapture { stream, relaxed } => {
                let stream = self.stream(stream);
                if let Some(scope) = self.scopes.iter_mut().rev().find(|scope| scope.1.is_none()) {
                    let mode = if relaxed { CaptureMode::Relaxed } else { CaptureMode::Global };
                    if as_program(|| gpu.begin_capture(0, stream.0, mode, Some(scope.0))).is_ok() {
                        scope.1 = Some(stream);
                    }
                }
            }
            Action::BeginUnannounced { stream } => {
                let stream = self.stream(stream);
                let begin = || gpu.begin_capture(0, stream.0, CaptureMode::Relaxed, None);
                if !self.announces_all && as_program(begin).is_ok() {
                    self.unannounced.push(stream);
                }
            }
            Action::EndUnannounced { capture } => {
                if !self.unannounced.is_empty() {
                    let stream = self.unannounced.swap_remove(capture % self.unannounced.len());
                    self.nobodys_graphs.extend(as_program(|| gpu.end_capture(0, stream.0)).ok());
                }
            }
            Action::Close { scope } => {
                if !self.scopes.is_empty() {
                    let (pool, stream) = self.scopes.remove(scope % self.scopes.len());
                    let graph =
                        stream.and_then(|stream| as_program(|| gpu.end_capture(0, stream.0)).ok());
                    self.world.close(pool);
                    self.graphs.push((pool, graph));
                }
            }
            Action::Replay { graph, stream } => {
                let all: Vec<u64> = self
                    .graphs
                    .iter()
                    .filter_map(|graph| graph.1)
                    .chain(self.nobodys_graphs.clone())
                    .collect();
                if !all.is_empty() {
                    let graph = all[graph % all.len()];
                    let _ = as_program(|| gpu.replay(0, graph, self.stream(stream).0));
                }
            }
            Action::Reset { graph, destroy_first } => {
                if !self.graphs.is_empty() {
                    let (pool, graph) = self.graphs.swap_remove(graph % self.graphs.len());
                    let destroy = |now: bool| {
                        if let Some(graph) = graph.filter(|_| now) {
                            self.world.destroy(graph);
                        }
                    };
                    destroy(destroy_first);
                    self.world.release(pool);
                    destroy(!destroy_first);
                }
            }
            Action::DestroyStream { stream, announce } => {
                let number = stream % self.streams.len();
                // The heap finds an unannounced capture only on lasting streams.
                if number == 0 || !self.announces_all {
                    return;
                }
                let (rig, stream) = (&self.world.rig, self.streams[number]);
                // The driver does not destroy a capturing stream.
                if as_program(|| gpu.capture_status(0, stream.0)) != Ok(CaptureStatus::None) {
                    return;
                }
                if self.announced[number] {
                    rig.end(stream)
                } else {
                    rig.destroy(stream)
                }
                // Another stream may get its handle, so the harness could not report a block of it
                // to the oracle.
                self.states.retain(|taken| taken.facts.values().all(|facts| facts.1 != stream));
                self.facts.retain(|_, facts| facts.1 != stream);
                self.streams[number] = if announce { rig.stream() } else { rig.passing_stream() };
                self.announced[number] = announce;
            }
            Action::Trim => {
                self.world.rig.heap.trim();
            }
            Action::Step => self.world.rig.heap.mark_step(),
        }
    }

    fn take_state(&mut self, pool: u64) {
        let Ok(state) = self.world.rig.heap.pool_state(0, (0, pool)) else { return };
        let facts = state.blocks().map(|(address, bytes)| {
            let facts = *self.facts.get(&address)?;
            assert_eq!(facts.0.next_multiple_of(512), bytes);
            Some((address, facts))
        });
        if let Some(facts) = facts.collect() {
            self.states.push(Taken { state, pool, facts });
        }
    }

    /// The restore's effect equals the difference between the state and the pool before; a refused
    /// restore has none.
    fn restore(&mut self, number: usize) {
        let heap = &self.world.rig.heap;
        let Taken { state, pool, facts } = &self.states[number];
        let live =
            || heap.pool_state(0, (0, *pool)).map(|state| state.blocks().collect::<Vec<_>>());
        let before = live();
        let refused = match self.world.restore_noted(state, *pool, facts) {
            Ok(restored) => {
                let before: HashSet<_> = before.unwrap().into_iter().map(|block| block.0).collect();
                let after = live().unwrap();
                assert_eq!(after, state.blocks().collect::<Vec<_>>());
                let after: HashSet<_> = after.into_iter().map(|block| block.0).collect();
                let Restored { freed, kept, allocated } = restored;
                assert_eq!(kept.iter().chain(&allocated).copied().collect::<HashSet<_>>(), after);
                assert_eq!(kept.iter().chain(&freed).copied().collect::<HashSet<_>>(), before);
                self.live.retain(|address| !freed.contains(address));
                for address in &allocated {
                    assert!(!self.live.contains(address), "{address:#x} is live twice");
                    self.live.push(*address);
                    self.facts.insert(*address, facts[address]);
                }
                return;
            }
            Err(error) => error,
        };
        let reason = refused.to_string();
        assert!(!reason.contains("bug") && !reason.contains("internal"), "{reason}");
        assert_eq!(live().ok(), before.ok(), "{reason}");
    }

    /// Runs the actions, checks everything after each, and ends with an empty device.
    fn run_all(mut self, actions: &[Action]) {
        for action in actions {
            let asks = self.scopes.is_empty();
            let before = self.world.forbidden_calls();
            self.run(action);
            if !asks && !self.scopes.is_empty() {
                assert_eq!(self.world.forbidden_calls(), before, "{action:?} inside a pool scope");
            }
            self.world.check();
        }
        self.world.rig.gpu.clear_injections();
        while !self.unannounced.is_empty() {
            self.run(&Action::EndUnannounced { capture: 0 });
        }
        while !self.scopes.is_empty() {
            self.run(&Action::Close { scope: 0 });
        }
        while !self.live.is_empty() || !self.graphs.is_empty() {
            self.run(&Action::Free { block: self.graphs.len() });
            self.run(&Action::Reset { graph: self.live.len(), destroy_first: true });
        }
        if self.nobodys_graphs.is_empty() && self.announces_all {
            self.world.check_all_comes_back();
        }
        self.world.check();
    }
}

fn capturing_ids() -> impl Strategy<Value = CapturingIds> {
    prop_oneof![
        Just(CapturingIds::Told),
        Just(CapturingIds::Refused),
        Just(CapturingIds::Invalidate)
    ]
}

proptest! {
    #![
        proptest_config(
            ProptestConfig { cases: 600, max_shrink_iters: 4000, ..ProptestConfig::default() }
        )
    ]

    #[test]
    fn no_program_with_graphs_gets_memory_that_other_work_may_still_use(
        actions in prop::collection::vec(action(), 1..300),
        backing in 0..BACKINGS.len(),
        share in any::<bool>(),
        // From plenty down to far too little.
        pages in prop_oneof![Just(8192u64), 40..300u64],
        capturing_ids in capturing_ids(),
    ) {
        let share = if share { "" } else { ",share:off" };
        let config = GpuConfig { capturing_ids, ..GpuConfig::new(pages * 2 * MIB) };
        Program::over(config, &format!("{}{share}", BACKINGS[backing])).run_all(&actions);
    }

    #[test]
    fn a_restored_block_is_at_its_old_address_and_in_the_order_of_its_stream(
        actions in prop::collection::vec(action_with_states(), 1..300),
        backing in 0..BACKINGS.len(),
        share in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 60..400u64],
    ) {
        let share = if share { "" } else { ",share:off" };
        let config = GpuConfig::new(pages * 2 * MIB);
        Program::over(config, &format!("{}{share}", BACKINGS[backing])).run_all(&actions);
    }

    #[test]
    fn no_state_is_lost_when_any_driver_call_fails(
        actions in prop::collection::vec(action_with_states(), 1..200),
        backing in 0..BACKINGS.len(),
        nth in 1..40u64,
        code in prop_oneof![Just(2u32), Just(1), Just(999)],
        from_then_on in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 60..400u64],
    ) {
        run_failing(&actions, backing, (nth, code, from_then_on), pages);
    }

    #[test]
    fn captures_that_nobody_announced_keep_their_memory_and_are_not_ended_by_us(
        actions in prop::collection::vec(action(), 1..300),
        backing in 0..BACKINGS.len(),
        share in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 40..300u64],
        capturing_ids in capturing_ids(),
    ) {
        let share = if share { "" } else { ",share:off" };
        let config = GpuConfig { capturing_ids, ..GpuConfig::new(pages * 2 * MIB) };
        Program::over(config, &format!("{}{share}", BACKINGS[backing]))
            .unannounced()
            .run_all(&actions);
    }

    #[test]
    fn nothing_of_a_graph_is_lost_when_any_driver_call_fails(
        actions in prop::collection::vec(action(), 1..200),
        backing in 0..BACKINGS.len(),
        nth in 1..40u64,
        code in prop_oneof![Just(2u32), Just(1), Just(999)],
        from_then_on in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 40..300u64],
    ) {
        run_failing(&actions, backing, (nth, code, from_then_on), pages);
    }
}

/// Runs a program in which the `nth` call fails, of each kind that only the allocator calls.
fn run_failing(
    actions: &[Action],
    backing: usize,
    (nth, code, from_then_on): (u64, u32, bool),
    pages: u64,
) {
    let program = Program::new(pages * 2 * MIB, BACKINGS[backing]);
    // Only calls of the allocator fail: with failures of its own calls the program would be
    // another.
    for kind in ALLOCATOR_CALLS {
        program.world.rig.gpu.inject(Injection { kind: Some(kind), nth, code, from_then_on });
    }
    let own_calls =
        |action: &&Action| !matches!(action, Action::Join { .. } | Action::HostWait { .. });
    let actions: Vec<Action> = actions.iter().filter(own_calls).cloned().collect();
    program.run_all(&actions);
}

/// Kinds that only the allocator calls in [`Program`] without actions that record and wait.
const ALLOCATOR_CALLS: [CallKind; 15] = [
    CallKind::MemoryInfo,
    CallKind::PoolCreate,
    CallKind::PoolSetAttribute,
    CallKind::PoolGetAttribute,
    CallKind::PoolTrim,
    CallKind::PoolAlloc,
    CallKind::PoolFree,
    CallKind::Alloc,
    CallKind::Free,
    CallKind::EventCreate,
    CallKind::EventRecord,
    CallKind::EventQuery,
    CallKind::StreamSynchronize,
    CallKind::DeviceSynchronize,
    CallKind::CaptureStatus,
];
