//! States of a graph's pool (its live blocks), taken and restored. One test per promise, and every
//! position of failure in a program of captures and restores.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB, wait};
use crate::flaky;
use crate::world::World;
use gruyere::driver::{ErrorKind, StreamHandle};
use gruyere::heap::history::Action;
use gruyere::heap::snapshot::{Segment, Snapshot};
use gruyere::heap::{Error, Obstacle, PoolState, Restored, StateError};
use gruyere_phantom::{CaptureMode, as_program, vouching};

/// Sizes in slabs, and above them.
const SIZES: [u64; 6] = [512, 5000, 70_000, 900_000, 3 * MIB, 40 * MIB];

/// A segment: address, bytes, and address, length and requested bytes of its blocks.
type Tiled = (u64, u64, Vec<(u64, u64, u64)>);

impl World {
    /// Captures blocks of `sizes`; the graph, and their addresses.
    fn graph(&self, pool: u64, stream: StreamHandle, sizes: &[u64]) -> (u64, Vec<u64>) {
        self.begin(pool, stream);
        let blocks = sizes.iter().map(|&size| self.malloc(size, stream)).collect();
        as_program(|| self.rig.gpu.launch(0, stream.0, 2, 20_000)).unwrap();
        (self.end(pool, stream), blocks)
    }

    fn drop_graph(&self, pool: u64, graph: u64) {
        as_program(|| self.rig.gpu.graph_destroy(0, graph)).unwrap();
        self.rig.heap.release_pool(0, (0, pool)).unwrap();
    }

    fn state(&self, pool: u64) -> PoolState {
        self.rig.heap.pool_state(0, (0, pool)).unwrap()
    }

    fn live(&self, pool: u64) -> Vec<u64> {
        self.state(pool).blocks().map(|block| block.0).collect()
    }

    fn try_restore(&self, pool: u64, state: &PoolState) -> Result<Restored, StateError> {
        let calls = self.driver.calls();
        let restored = self.rig.heap.restore_pool(state)?;
        // Events may be recorded and queried; no memory is taken or released.
        assert!(self.driver.calls() - calls <= 16);
        restored.freed.iter().for_each(|&address| self.rig.gpu.block_free(address));
        let is_new = |block: &(u64, u64)| restored.allocated.contains(&block.0);
        for block in state.blocks().filter(is_new) {
            let stream = self.streams.lock().unwrap()[&block.0];
            self.rig.gpu.block_of_group(self.next_id(), block, 0, stream.0, pool);
        }
        self.check();
        Ok(restored)
    }

    fn restore(&self, pool: u64, state: &PoolState) -> Restored {
        self.try_restore(pool, state).unwrap()
    }

    /// The program's view of the pool: rows of pages (a snapshot reports a row in parts) and their
    /// blocks. Free neighbours count as one, whatever their streams.
    fn layout(&self, pool: u64) -> Vec<Tiled> {
        let Snapshot { segments, .. } = self.rig.heap.snapshot(0).unwrap();
        let of_pool: Vec<Segment> =
            segments.into_iter().filter(|segment| segment.pool == (0, pool)).collect();
        let tiles = |row: &[Segment]| {
            let mut tiles: Vec<(u64, u64, u64)> = Vec::new();
            for block in row.iter().flat_map(|segment| &segment.blocks) {
                match tiles.last_mut() {
                    Some(last) if last.2 == 0 && block.requested == 0 => last.1 += block.bytes,
                    _ => tiles.push((block.address, block.bytes, block.requested)),
                }
            }
            tiles
        };
        let is_one_row = |before: &Segment, next: &Segment| {
            next.stitched && before.address + before.bytes == next.address
        };
        let rows = of_pool.chunk_by(is_one_row);
        rows.map(|row| (row[0].address, row.iter().map(|segment| segment.bytes).sum(), tiles(row)))
            .collect()
    }

    /// Frees the pool's live blocks and ends its graphs; nothing is left.
    fn finish(&self, pool: u64, graphs: &[u64]) {
        for address in self.live(pool) {
            self.free(address);
        }
        graphs.iter().for_each(|&graph| self.drop_graph(pool, graph));
        self.rig.heap.trim();
        self.rig.heap.trim();
        self.check();
        assert_eq!(self.rig.gpu.books(0).physical, 0, "memory is lost");
    }
}

#[test]
fn what_died_is_live_again_at_its_old_address_and_the_pool_looks_as_it_did() {
    for backing in BACKINGS {
        let world = World::new(2 * GIB, backing);
        let stream = world.rig.passing_stream();
        let (graph, blocks) = world.graph(1, stream, &SIZES);
        world.free(blocks[1]);
        let (state, layout) = (world.state(1), world.layout(1));
        let live: Vec<u64> = world.live(1);
        assert_eq!(live.len(), SIZES.len() - 1);
        let stats = world.rig.heap.stats(0).unwrap();
        live.iter().for_each(|&address| world.free(address));
        assert!(world.live(1).is_empty());
        let restored = world.restore(1, &state);
        assert!(restored.freed.is_empty() && restored.kept.is_empty(), "{backing}");
        assert_eq!(restored.allocated, live, "{backing}");
        assert_eq!((world.live(1), world.layout(1)), (live, layout), "{backing}");
        let again = world.rig.heap.stats(0).unwrap();
        assert_eq!((again.live, again.reserved), (stats.live, stats.reserved), "{backing}");
        world.finish(1, &[graph]);
    }
}

/// Allocates a block; whether it is at that address.
fn again(world: &World, pool: u64, size: u64, stream: StreamHandle, address: u64) -> bool {
    let calls = world.driver.calls();
    let ask = || world.rig.heap.malloc_at(size, 0, stream, address, Some((0, pool)));
    let served = vouching(stream.0, ask).unwrap();
    // Queries of the stream are allowed, and the event that its frees are owed; no memory is taken
    // or released.
    assert!(world.driver.calls() - calls <= 6);
    if let Some(served) = served {
        assert_eq!(served, address);
        let id = world.next_id();
        world.rig.gpu.block_of_group(id, (address, size), 0, stream.0, pool);
        world.streams.lock().unwrap().insert(address, stream);
    }
    world.check();
    served.is_some()
}

#[test]
fn a_block_of_a_graphs_pool_is_had_back_at_its_address_and_nowhere_else() {
    for backing in BACKINGS {
        let world = World::new(2 * GIB, backing);
        let (stream, other) = (world.rig.passing_stream(), world.rig.passing_stream());
        let (graph, blocks) = world.graph(1, stream, &SIZES);
        let all = || SIZES.iter().copied().zip(blocks.iter().copied());
        for (size, address) in all() {
            assert!(!again(&world, 1, size, stream, address), "{backing}: it is live");
        }
        blocks.iter().for_each(|&address| world.free(address));
        for (size, address) in all() {
            assert!(!again(&world, 1, size, other, address), "{backing}: it is another stream's");
            assert!(
                !again(&world, 1, size, stream, address + 8),
                "{backing}: nothing starts there"
            );
            assert!(!again(&world, 1, size, stream, 1 << 45), "{backing}: nobody's");
        }
        for (size, address) in all().collect::<Vec<_>>().into_iter().rev() {
            assert!(again(&world, 1, size, stream, address), "{backing}: {size}");
            assert!(!again(&world, 1, size, stream, address), "{backing}: {size} is live again");
        }
        assert_eq!(world.live(1).len(), SIZES.len(), "{backing}");
        // In the middle of a free one, whose rest stays free.
        world.free(blocks[5]);
        assert!(again(&world, 1, 3 * MIB, stream, blocks[5] + 8 * MIB), "{backing}");
        assert!(!again(&world, 1, 40 * MIB, stream, blocks[5]), "{backing}");
        assert!(again(&world, 1, 8 * MIB, stream, blocks[5]), "{backing}");
        world.finish(1, &[graph]);
    }
}

#[test]
fn ordinary_memory_is_had_at_an_address_where_it_lies_free_for_the_stream() {
    for backing in &BACKINGS[..3] {
        let world = World::new(2 * GIB, backing);
        let stream = world.rig.passing_stream();
        let (_kept, block) = (world.malloc(40 * MIB, stream), world.malloc(40 * MIB, stream));
        let ask = |size, address| {
            vouching(stream.0, || world.rig.heap.malloc_at(size, 0, stream, address, None)).unwrap()
        };
        assert_eq!(ask(40 * MIB, block), None, "{backing}: it is live");
        world.free(block);
        assert_eq!(ask(3 * MIB, block + MIB), Some(block + MIB), "{backing}");
        world.rig.gpu.block_malloc(900, block + MIB, 3 * MIB, 0, stream.0);
        assert_eq!(ask(40 * MIB, block), None, "{backing}: a part of it is live");
        assert_eq!(ask(512, block), None, "{backing}: small blocks are not had");
        world.check();
        world.free(block + MIB);
        world.check();
    }
}

#[test]
fn what_came_later_is_freed_and_what_stayed_is_left_alone() {
    for backing in BACKINGS {
        let world = World::new(2 * GIB, backing);
        let stream = world.rig.passing_stream();
        let (first, blocks) = world.graph(1, stream, &SIZES);
        let (state, layout) = (world.state(1), world.layout(1));
        let (second, later) = world.graph(1, stream, &[600, 70_000]);
        let restored = world.restore(1, &state);
        let sorted = |mut addresses: Vec<u64>| {
            addresses.sort_unstable();
            addresses
        };
        assert_eq!(restored.freed, sorted(later));
        assert_eq!((restored.kept, restored.allocated), (sorted(blocks), vec![]));
        // What the pool has taken since is free, and stays.
        let (same, new): (Vec<_>, Vec<_>) =
            world.layout(1).into_iter().partition(|segment| layout.contains(segment));
        assert_eq!(same, layout, "{backing}");
        assert!(new.iter().all(|(_, bytes, tiles)| tiles.len() == 1 && tiles[0].1 == *bytes));
        assert!(world.restore(1, &state).freed.is_empty(), "{backing}: it is so already");
        world.finish(1, &[first, second]);
    }
}

#[test]
fn memory_that_serves_other_sizes_by_now_is_what_it_was_again() {
    for backing in BACKINGS {
        let world = World::new(2 * GIB, backing);
        let stream = world.rig.passing_stream();
        // Large blocks where slabs were, slabs where large blocks were, other classes in slabs.
        let (first, blocks) = world.graph(1, stream, &[[700; 40].as_slice(), &SIZES].concat());
        let state = world.state(1);
        blocks.iter().for_each(|&address| world.free(address));
        let sizes = [vec![2 * MIB; 20], vec![300_000; 12], vec![9000; 30]].concat();
        let (second, others) = world.graph(1, stream, &sizes);
        let held = world.rig.heap.stats(0).unwrap().reserved;
        let before = world.state(1);
        let moved = blocks.iter().any(|&block| {
            let mut taken = before.blocks();
            taken.any(|(address, bytes)| (address..address + bytes).contains(&block))
        });
        assert!(moved, "{backing}: the memory was used otherwise");
        for _ in 0..3 {
            assert_eq!(world.restore(1, &state).freed.len(), others.len());
            assert_eq!(world.state(1), state);
            assert_eq!(world.restore(1, &before).allocated.len(), others.len());
            assert_eq!(world.state(1), before);
        }
        assert_eq!(world.rig.heap.stats(0).unwrap().reserved, held);
        world.finish(1, &[first, second]);
    }
}

#[test]
fn restored_blocks_are_freed_one_by_one_and_their_memory_is_used_again() {
    let world = World::new(GIB, "headroom:0");
    let stream = world.rig.passing_stream();
    let (graph, blocks) = world.graph(1, stream, &SIZES);
    let state = world.state(1);
    blocks.iter().for_each(|&address| world.free(address));
    world.restore(1, &state);
    let held = world.rig.heap.stats(0).unwrap().reserved;
    for (at, &address) in blocks.iter().enumerate() {
        world.free(address);
        assert_eq!(world.live(1).len(), blocks.len() - 1 - at);
    }
    assert!(!world.rig.heap.free(blocks[0]), "freed twice");
    let (second, again) = world.graph(1, stream, &SIZES);
    assert_eq!(world.rig.heap.stats(0).unwrap().reserved, held);
    assert_eq!(again, blocks, "the same requests in the same order");
    world.finish(1, &[graph, second]);
}

#[test]
fn each_stream_of_a_pool_gets_its_own_blocks_back() {
    let world = World::new(GIB, "headroom:0");
    let (one, other) = (world.rig.passing_stream(), world.rig.passing_stream());
    world.begin(1, one);
    wait(&world.rig.gpu, 0, [other, one]).unwrap();
    let blocks: Vec<u64> = SIZES
        .iter()
        .flat_map(|&size| [one, other].map(|stream| world.malloc(size, stream)))
        .collect();
    let graph = world.end(1, one);
    let state = world.state(1);
    blocks.iter().for_each(|&address| world.free(address));
    assert_eq!(world.restore(1, &state).allocated.len(), blocks.len());
    // What a stream frees comes back to it: the other takes memory of its own.
    blocks.iter().for_each(|&address| world.free(address));
    world.begin(1, other);
    let mine: Vec<u64> = SIZES.iter().map(|&size| world.malloc(size, other)).collect();
    let second = world.end(1, other);
    let of_one = blocks.iter().step_by(2);
    assert!(of_one.clone().all(|block| !mine.contains(block)), "the first stream's memory");
    world.check();
    world.finish(1, &[graph, second]);
}

#[test]
fn a_state_does_not_keep_its_pool_and_says_so_when_the_pool_is_gone() {
    for backing in BACKINGS {
        let world = World::new(GIB, backing);
        let stream = world.rig.passing_stream();
        let (graph, blocks) = world.graph(1, stream, &SIZES);
        let state = world.state(1);
        world.free(blocks[0]);
        world.drop_graph(1, graph);
        // A block is live, so its memory stays; but no request may get the graph's memory.
        let error = world.try_restore(1, &state).unwrap_err();
        assert!(matches!(error, StateError::Released((0, 1))), "{error}");
        blocks[1..].iter().for_each(|&address| world.free(address));
        world.rig.heap.trim();
        assert_eq!(world.rig.gpu.books(0).physical, 0, "{backing}: the state holds nothing");
        let error = world.try_restore(1, &state).unwrap_err();
        assert!(matches!(error, StateError::NoSuchPool((0, 1))), "{error}");
        // Torch may use the id again: other memory, of which the state knows nothing.
        let (graph, _) = world.graph(1, stream, &SIZES);
        let live = world.live(1);
        let error = world.try_restore(1, &state).unwrap_err();
        assert!(matches!(error, StateError::Over((0, 1))), "{error}");
        assert_eq!(world.live(1), live);
        world.finish(1, &[graph]);
    }
}

#[test]
fn memory_of_a_state_stays_while_another_graph_of_the_pool_lives() {
    for backing in BACKINGS {
        let world = World::new(512 * MIB, backing);
        let (stream, other) = (world.rig.passing_stream(), world.rig.passing_stream());
        let (first, blocks) = world.graph(1, stream, &SIZES);
        let state = world.state(1);
        blocks.iter().for_each(|&address| world.free(address));
        let (second, _) = world.graph(1, stream, &[512]);
        world.drop_graph(1, first);
        world.rig.heap.trim();
        // No request gets it, even when memory is short.
        let huge: Vec<u64> =
            (0..).map_while(|_| world.malloc_if_possible(40 * MIB, other)).collect();
        world.restore(1, &state);
        assert_eq!(world.state(1), state, "{backing}");
        huge.into_iter().for_each(|address| world.free(address));
        world.finish(1, &[second]);
    }
}

#[test]
fn a_restore_during_another_capture_calls_no_driver() {
    let world = World::new(GIB, "headroom:0");
    let (stream, other) = (world.rig.passing_stream(), world.rig.passing_stream());
    let (graph, blocks) = world.graph(1, stream, &SIZES);
    let state = world.state(1);
    blocks.iter().for_each(|&address| world.free(address));
    world.begin(2, other);
    let captured = world.malloc(3 * MIB, other);
    let calls = world.driver.calls();
    assert_eq!(world.restore(1, &state).allocated.len(), blocks.len());
    assert_eq!(world.driver.calls(), calls);
    let second = world.end(2, other);
    world.free(captured);
    world.drop_graph(2, second);
    world.finish(1, &[graph]);
}

#[test]
fn what_other_streams_may_still_use_is_in_the_way_until_they_are_past_it() {
    for size in [5000, 3 * MIB] {
        let world = World::new(GIB, "headroom:0");
        let (stream, other) = (world.rig.passing_stream(), world.rig.passing_stream());
        let (graph, blocks) = world.graph(1, stream, &[size]);
        let state = world.state(1);
        let use_elsewhere = |address: u64| {
            as_program(|| world.rig.gpu.launch(0, other.0, 4, 500_000)).unwrap();
            world.rig.gpu.block_record_stream(address, 0, other.0);
            assert!(vouching(other.0, || world.rig.heap.record_stream(address, other)));
        };
        use_elsewhere(blocks[0]);
        assert_eq!(world.restore(1, &state).kept, blocks, "it is live, and stays so");
        world.free(blocks[0]);
        let error = world.try_restore(1, &state).unwrap_err();
        let is_it = |address: u64| {
            address == blocks[0]
                && matches!(error, StateError::InTheWay { obstacle: Obstacle::Waits, .. })
        };
        let StateError::InTheWay { address, .. } = error else { panic!("{error}") };
        assert!(is_it(address), "{error}");
        assert!(world.live(1).is_empty(), "nothing was changed");
        as_program(|| world.rig.gpu.device_synchronize(0)).unwrap();
        assert_eq!(world.restore(1, &state).allocated, blocks);
        // A block to free may have pending work too, if nothing replaces it.
        let empty = {
            world.free(blocks[0]);
            let empty = world.state(1);
            world.restore(1, &state);
            empty
        };
        use_elsewhere(blocks[0]);
        assert_eq!(world.restore(1, &empty).freed, blocks);
        assert!(world.try_restore(1, &state).is_err());
        as_program(|| world.rig.gpu.device_synchronize(0)).unwrap();
        assert_eq!(world.restore(1, &state).allocated, blocks);
        world.finish(1, &[graph]);
    }
}

#[test]
fn a_refused_restore_changes_nothing_though_much_of_it_could_be_done() {
    let world = World::new(GIB, "headroom:0");
    let (stream, other) = (world.rig.passing_stream(), world.rig.passing_stream());
    let (first, blocks) = world.graph(1, stream, &[512, 3 * MIB, 70_000, 5 * MIB]);
    let state = world.state(1);
    blocks.iter().for_each(|&address| {
        if address == blocks[3] {
            as_program(|| world.rig.gpu.launch(0, other.0, 4, 500_000)).unwrap();
            world.rig.gpu.block_record_stream(address, 0, other.0);
            assert!(vouching(other.0, || world.rig.heap.record_stream(address, other)));
        }
        world.free(address);
    });
    let (second, _) = world.graph(1, stream, &[900, 2 * MIB]);
    let (before, layout) = (world.state(1), world.layout(1));
    let error = world.try_restore(1, &state).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("5.00 MiB at {:#x}", blocks[3])), "{text}");
    assert!(text.contains("nothing was changed") && text.contains("synchronize"), "{text}");
    assert_eq!((world.state(1), world.layout(1)), (before, layout));
    as_program(|| world.rig.gpu.device_synchronize(0)).unwrap();
    world.restore(1, &state);
    world.finish(1, &[first, second]);
}

#[test]
fn only_a_pool_of_graphs_has_states() {
    let world = World::new(GIB, "headroom:0");
    world.malloc(600, DEFAULT);
    let error = world.rig.heap.pool_state(0, (0, 1)).unwrap_err();
    assert!(matches!(error, StateError::NoSuchPool((0, 1))), "{error}");
    let error = world.rig.heap.pool_state(7, (0, 1)).unwrap_err();
    assert!(matches!(error, StateError::Heap(Error::NoSuchDevice(7))), "{error}");
}

#[test]
fn the_history_tells_what_was_freed_and_allocated_and_nothing_of_what_was_kept() {
    let world = World::new(GIB, "headroom:0");
    let stream = world.rig.passing_stream();
    let (first, blocks) = world.graph(1, stream, &[600, 3 * MIB]);
    let state = world.state(1);
    world.free(blocks[1]);
    let (second, later) = world.graph(1, stream, &[70_000]);
    world.rig.heap.start_history(100, true);
    world.restore(1, &state);
    let told: Vec<(Action, u64, u64)> = world
        .rig
        .heap
        .history()
        .entries
        .iter()
        .map(|entry| (entry.action, entry.address, entry.bytes))
        .collect();
    // As requested.
    let small = 70_000;
    assert_eq!(
        told,
        [
            (Action::FreeRequested, later[0], small),
            (Action::FreeCompleted, later[0], small),
            (Action::Alloc, blocks[1], 3 * MIB),
        ]
    );
    assert_eq!(world.rig.heap.history().origins.len(), 1, "of the one that was allocated");
    world.rig.heap.stop_history();
    world.finish(1, &[first, second]);
}

#[test]
fn what_is_allocated_beside_graphs_lies_in_their_memory_and_is_nobody_elses() {
    for backing in BACKINGS {
        let world = World::new(512 * MIB, backing);
        let (stream, other) = (world.rig.passing_stream(), world.rig.passing_stream());
        let beside = |size: u64| {
            let ask = || world.rig.heap.malloc_for_graphs(size, 0, stream, (0, 1));
            let address = vouching(stream.0, ask).unwrap();
            let id = world.next_id();
            world.rig.gpu.block_of_group(id, (address, size), 0, stream.0, 1);
            world.streams.lock().unwrap().insert(address, stream);
            address
        };
        // No graph uses the pool: ordinary memory.
        let ordinary = world.rig.heap.malloc_for_graphs(5000, 0, stream, (0, 1)).unwrap();
        assert!(world.rig.heap.pool_state(0, (0, 1)).is_err());
        assert!(world.rig.heap.free(ordinary));
        let (graph, mut blocks) = world.graph(1, stream, &[512]);
        let inputs: Vec<u64> = SIZES.iter().map(|&size| beside(size)).collect();
        blocks.extend(&inputs);
        blocks.sort_unstable();
        assert_eq!(world.live(1), blocks, "{backing}");
        let state = world.state(1);
        inputs.iter().for_each(|&address| world.free(address));
        world.rig.heap.trim();
        // Only its own stream gets it again.
        let huge: Vec<u64> =
            (0..).map_while(|_| world.malloc_if_possible(40 * MIB, other)).collect();
        let again: Vec<u64> = SIZES.iter().map(|&size| beside(size)).collect();
        assert_eq!(again, inputs, "{backing}");
        again.iter().for_each(|&address| world.free(address));
        world.restore(1, &state);
        assert_eq!(world.live(1), blocks, "{backing}");
        huge.into_iter().for_each(|address| world.free(address));
        world.finish(1, &[graph]);
    }
}

#[test]
fn a_request_beside_graphs_has_idle_memory_given_back_before_it_is_refused() {
    for backing in &BACKINGS[..3] {
        let world = World::new(400 * MIB, backing);
        let stream = world.rig.passing_stream();
        let (graph, _) = world.graph(1, stream, &[512]);
        let idle = world.malloc(300 * MIB, DEFAULT);
        world.free(idle);
        let ask = || world.rig.heap.malloc_for_graphs(250 * MIB, 0, stream, (0, 1));
        let address = vouching(stream.0, ask).unwrap();
        assert!(world.live(1).contains(&address), "{backing}");
        let more = vouching(stream.0, ask);
        assert!(matches!(more, Err(Error::OutOfMemory(_))), "{backing}: {more:?}");
        let id = world.next_id();
        world.rig.gpu.block_of_group(id, (address, 250 * MIB), 0, stream.0, 1);
        world.finish(1, &[graph]);
    }
}

/// Captures graphs that share a pool; takes states, and restores them in any order, whatever fails
/// meanwhile.
fn program(world: &World) -> Vec<u64> {
    let (stream, other) = (world.rig.passing_stream(), world.rig.passing_stream());
    let (mut states, mut graphs) = (vec![], vec![]);
    for round in 0..4 {
        if world.rig.heap.begin_allocate_to_pool(0, (0, 1)).is_err() {
            continue;
        }
        let mode = CaptureMode::Relaxed;
        as_program(|| world.rig.gpu.begin_capture(0, stream.0, mode, Some(1))).unwrap();
        for size in SIZES {
            world.malloc_if_possible(size + round * 512, stream);
        }
        graphs.push(world.end(1, stream));
        states.push(world.state(1));
        let live = world.live(1);
        for (at, &address) in live.iter().enumerate() {
            if (at as u64 + round).is_multiple_of(3) {
                if at % 2 == 0 {
                    world.rig.gpu.block_record_stream(address, 0, other.0);
                    vouching(other.0, || world.rig.heap.record_stream(address, other));
                }
                world.free(address);
            }
        }
        as_program(|| world.rig.gpu.launch(0, other.0, 1, 40_000)).unwrap();
        world.check();
        for at in [0, round as usize / 2, states.len() - 1] {
            let Some(state) = states.get(at) else { continue };
            let before = world.state(1);
            match world.try_restore(1, state) {
                Ok(_) => assert_eq!(world.state(1), *state),
                Err(StateError::InTheWay { obstacle: Obstacle::Waits, .. }) => {
                    assert_eq!(world.state(1), before);
                }
                Err(error) => panic!("{error}"),
            }
        }
        let eager = world.malloc_if_possible(30 * MIB, other);
        world.rig.heap.trim();
        eager.into_iter().for_each(|address| world.free(address));
        world.check();
    }
    graphs
}

#[test]
fn no_state_and_no_memory_is_lost_whichever_driver_call_fails() {
    for backing in BACKINGS {
        let run = |(world, graphs): &mut (World, Vec<u64>), nth| {
            *graphs = program(world);
            assert!(nth > 0 || world.driver.calls() > 20, "{backing}");
        };
        let end = |(world, graphs): &mut (World, Vec<u64>), _| {
            if world.rig.heap.pool_state(0, (0, 1)).is_ok() {
                world.finish(1, graphs);
            }
        };
        flaky::fail_every_call(
            backing,
            &[ErrorKind::OutOfMemory, ErrorKind::InvalidValue],
            || (World::new(400 * MIB, backing), Vec::new()),
            |(world, _)| &world.driver,
            run,
            end,
        );
    }
}
