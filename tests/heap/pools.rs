//! Named pools: threads enter them; they return to the device whole, and never too early. Under the
//! oracle, one test per promise.

use crate::common::{DEFAULT, GIB, KEEPING, MIB, Rig};
use crate::world::World;
use gruyere::driver::StreamHandle;
use gruyere::heap::{Error, PoolError, PoolKey, lifetime};
use gruyere_phantom::{CallKind, Caller, CaptureMode, Config as GpuConfig, as_program};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};

const SIZES: [u64; 8] = [1, 512, 70_000, MIB, MIB + 1, 5 * MIB, 33 * MIB, 100 * MIB];

impl World {
    fn pool(&self, name: &str, reserve: u64) -> PoolKey {
        self.rig.heap.pool_create(name, 0, reserve, None).unwrap()
    }

    fn inside<T>(&self, pool: PoolKey, body: impl FnOnce() -> T) -> T {
        self.rig.heap.pool_enter(pool).unwrap();
        let result = body();
        self.rig.heap.pool_leave(pool).unwrap();
        result
    }

    fn work(&self, stream: StreamHandle, nanoseconds: u64) {
        as_program(|| self.rig.gpu.launch(0, stream.0, 1, nanoseconds)).unwrap();
    }

    fn held(&self, pool: PoolKey) -> u64 {
        self.rig.heap.pool_stats(pool).unwrap().held
    }
}

#[test]
fn a_pool_goes_back_to_the_device_whole_and_can_be_used_again() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let other = world.malloc(3 * MIB, DEFAULT);
        let small = world.malloc(1000, DEFAULT);
        world.rig.heap.trim();
        let before = world.physical();
        let pool = world.pool("kv", 0);
        for _ in 0..2 {
            let blocks: Vec<u64> = world
                .inside(pool, || SIZES.iter().map(|&size| world.malloc(size, DEFAULT)).collect());
            let stats = world.rig.heap.pool_stats(pool).unwrap();
            assert_eq!(stats.live_blocks, SIZES.len() as u64);
            assert!(stats.held >= stats.live && stats.live >= SIZES.iter().sum());
            world.rig.check();
            blocks.into_iter().for_each(|address| world.free(address));
            assert!(world.held(pool) > 0, "{conf}: kept until it is released");
            let given = world.rig.heap.pool_release(pool).unwrap();
            assert!(given >= SIZES.iter().sum(), "{conf}: {given}");
            assert_eq!(world.held(pool), 0, "{conf}");
            assert!(world.physical() <= before, "{conf}: {} of {before}", world.physical());
            world.check();
        }
        world.free(other);
        world.free(small);
        assert_eq!(world.rig.heap.pool_destroy(pool).unwrap(), 0);
        world.check();
    }
}

#[test]
fn a_release_names_what_is_live_and_does_nothing() {
    for conf in KEEPING {
        let world = World::new(GIB, &format!("{conf},record:on"));
        let pool = world.pool("weights", 0);
        world.rig.heap.mark_step();
        let (small, large) =
            world.inside(pool, || (world.malloc(1000, DEFAULT), world.malloc(5 * MIB, DEFAULT)));
        world.rig.heap.mark_step();
        let late = world.inside(pool, || world.malloc(7 * MIB, DEFAULT));
        let held = world.held(pool);
        let calls = world.rig.gpu.counts(Caller::Allocator);
        let Err(PoolError::Live { count, bytes, largest }) = world.rig.heap.pool_release(pool)
        else {
            panic!("{conf}: released under live blocks")
        };
        assert_eq!((count, bytes), (3, 1024 + 12 * MIB));
        let named: Vec<_> =
            largest.iter().map(|block| (block.address, block.requested, block.step)).collect();
        assert_eq!(
            named,
            [(late, 7 * MIB, Some(2)), (large, 5 * MIB, Some(1)), (small, 1000, Some(1))],
            "{conf}"
        );
        assert_eq!(world.held(pool), held);
        assert_eq!(
            world.rig.gpu.counts(Caller::Allocator),
            calls,
            "{conf}: a refusal makes no driver call"
        );
        [small, large, late].into_iter().for_each(|address| world.free(address));
        assert_eq!(world.rig.heap.pool_release(pool).unwrap(), held);
        world.check();
    }
}

#[test]
fn a_release_waits_for_the_work_that_uses_the_pool() {
    for conf in KEEPING {
        let world = World::new(300 * MIB, conf);
        let (side, other) = (world.rig.stream(), world.rig.stream());
        let pool = world.pool("kv", 0);
        let (block, shared) =
            world.inside(pool, || (world.malloc(90 * MIB, side), world.malloc(4000, side)));
        world.rig.gpu.block_record_stream(shared, 0, other.0);
        assert!(world.rig.heap.record_stream(shared, other));
        world.work(side, 5_000_000);
        world.work(other, 9_000_000);
        world.free(block);
        world.free(shared);
        let end = world.rig.gpu.host_time().device_end;
        world.rig.heap.pool_release(pool).unwrap();
        assert!(
            world.rig.gpu.host_time().now >= end,
            "{conf}: released before its kernels were done"
        );
        assert_eq!(world.physical(), 0, "{conf}");
        // The same physical memory, at once, for another request.
        let again = world.malloc(250 * MIB, other);
        world.work(other, 1000);
        world.free(again);
        world.check();
    }
}

#[test]
fn nothing_is_released_while_a_graph_is_captured() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let stream = world.rig.stream();
        let pool = world.pool("kv", 0);
        let block = world.inside(pool, || world.malloc(5 * MIB, stream));
        world.free(block);
        let held = world.held(pool);
        world.rig.heap.begin_allocate_to_pool(0, (0, 7)).unwrap();
        as_program(|| world.rig.gpu.begin_capture(0, stream.0, CaptureMode::Global, Some(7)))
            .unwrap();
        assert!(matches!(world.rig.heap.pool_release(pool), Err(PoolError::Unquiet)), "{conf}");
        assert_eq!(world.held(pool), held);
        // The graph's allocations belong to the graph, also inside the pool.
        let captured = world.inside(pool, || world.malloc(5 * MIB, stream));
        assert_eq!(world.rig.heap.pool_stats(pool).unwrap().live_blocks, 0, "{conf}");
        as_program(|| world.rig.gpu.end_capture(0, stream.0)).unwrap();
        world.rig.heap.end_allocate_to_pool(0, (0, 7)).unwrap();
        assert_eq!(world.rig.heap.pool_release(pool).unwrap(), held, "{conf}");
        world.free(captured);
        world.check();
    }
}

#[test]
fn pools_share_no_page_with_each_other_or_with_anybody() {
    for conf in KEEPING {
        let world = World::new(8 * GIB, conf);
        let pools = [world.pool("a", 0), world.pool("b", 10 * MIB)];
        let mut pages = BTreeMap::new();
        let mut blocks = Vec::new();
        for round in 0..40u64 {
            for place in 0..3 {
                for size in [512 + round * 1000, 70_000, 3 * MIB / 2] {
                    let address = match pools.get(place) {
                        Some(&pool) => world.inside(pool, || world.malloc(size, DEFAULT)),
                        None => world.malloc(size, DEFAULT),
                    };
                    for page in address / (2 * MIB)..=(address + size - 1) / (2 * MIB) {
                        assert_eq!(*pages.entry(page).or_insert(place), place, "{conf}");
                    }
                    blocks.push(address);
                }
            }
        }
        world.check();
        blocks.into_iter().for_each(|address| world.free(address));
        pools.into_iter().for_each(|pool| assert!(world.rig.heap.pool_destroy(pool).unwrap() > 0));
        world.check();
    }
}

#[test]
fn each_thread_has_its_own_route() {
    let world = World::new(GIB, "");
    let pool = world.pool("kv", 0);
    let barrier = Barrier::new(2);
    let blocks = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for enters in [true, false] {
            let (world, barrier, blocks) = (&world, &barrier, &blocks);
            scope.spawn(move || {
                if enters {
                    world.rig.heap.pool_enter(pool).unwrap();
                }
                barrier.wait();
                let own = [world.malloc(100, DEFAULT), world.malloc(2 * MIB, DEFAULT)];
                barrier.wait();
                blocks.lock().unwrap().extend(own);
                // It ends inside the pool.
            });
        }
    });
    assert_eq!(world.rig.heap.pool_stats(pool).unwrap().live_blocks, 2);
    // Any thread frees them.
    blocks.into_inner().unwrap().into_iter().for_each(|address| world.free(address));
    assert_eq!(world.rig.heap.pool_stats(pool).unwrap().live_blocks, 0);
    assert!(world.rig.heap.pool_release(pool).unwrap() > 0);
    world.check();
}

#[test]
fn pools_nest_and_lifetimes_are_counted_inside_them() {
    let world = World::new(GIB, "record:on");
    let (outer, inner) = (world.pool("outer", 0), world.pool("inner", 0));
    let live = |pool| world.rig.heap.pool_stats(pool).unwrap().live_blocks;
    let heap = &world.rig.heap;
    let mut blocks = Vec::new();
    world.inside(outer, || {
        blocks.push(world.malloc(100, DEFAULT));
        assert!(lifetime::push(lifetime::Lifetime::Persistent));
        world.inside(inner, || blocks.push(world.malloc(100, DEFAULT)));
        assert!(matches!(heap.pool_leave(inner), Err(PoolError::NotInnermost(_))));
        assert!(lifetime::pop());
        blocks.push(world.malloc(100, DEFAULT));
    });
    blocks.push(world.malloc(100, DEFAULT));
    assert_eq!((live(outer), live(inner)), (2, 1));
    assert!(matches!(heap.pool_leave(outer), Err(PoolError::NotInnermost(_))));
    let persistent = live_by_lifetime(&world.rig)[3];
    assert_eq!(persistent, 512);
    blocks.into_iter().for_each(|address| world.free(address));
    world.check();
}

#[test]
fn a_pool_serves_its_own_device_only() {
    let rig = Rig::over(GpuConfig::devices(2, GIB), "");
    rig.heap.announce_hooks(3);
    let pool = rig.heap.pool_create("kv", 1, 0, None).unwrap();
    assert_eq!(pool.device(), 1);
    rig.heap.pool_enter(pool).unwrap();
    let here = rig.heap.malloc(MIB, 1, DEFAULT).unwrap();
    let there = rig.heap.malloc(MIB, 0, DEFAULT).unwrap();
    rig.heap.pool_leave(pool).unwrap();
    assert_eq!(rig.heap.pool_stats(pool).unwrap().live_blocks, 1);
    assert!(rig.heap.free(here) && rig.heap.free(there));
    assert!(rig.heap.pool_destroy(pool).unwrap() > 0);
    rig.check();
}

#[test]
fn the_limit_of_a_pool_is_enforced_and_named() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let pool = world.rig.heap.pool_create("cache", 0, 0, Some(20 * MIB)).unwrap();
        let first = world.inside(pool, || world.malloc(15 * MIB, DEFAULT));
        let refused = world.inside(pool, || world.rig.heap.malloc(6 * MIB, 0, DEFAULT));
        let Err(Error::OutOfMemory(report)) = refused else {
            panic!("{conf}: served over the limit")
        };
        let text = report.to_string();
        assert!(
            text.starts_with("CUDA out of memory. Tried to allocate 6.00 MiB.")
                && text.contains("Pool \"cache\" is full: raise its limit"),
            "{text}"
        );
        // Other memory is unaffected, and the pool goes on.
        let outside = world.malloc(6 * MIB, DEFAULT);
        let second = world.inside(pool, || world.malloc(5 * MIB, DEFAULT));
        [first, outside, second].into_iter().for_each(|address| world.free(address));
        world.check();
    }
}

#[test]
fn a_reserve_is_mapped_at_once_and_serves_without_a_driver_call() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let pool = world.pool("kv", 300 * MIB);
        assert!(world.physical() >= 300 * MIB && world.held(pool) >= 300 * MIB, "{conf}");
        let before = world.rig.gpu.counts(Caller::Allocator);
        let block = world.inside(pool, || world.malloc(300 * MIB, DEFAULT));
        assert_eq!(world.rig.gpu.counts(Caller::Allocator), before, "{conf}");
        world.free(block);
        // empty_cache leaves it alone.
        world.rig.heap.trim();
        assert!(world.held(pool) >= 300 * MIB, "{conf}");
        world.rig.heap.pool_release(pool).unwrap();
        assert_eq!(world.physical(), 0, "{conf}");
        world.check();
    }
}

#[test]
fn nobody_takes_the_reserve_of_a_pool_and_what_lies_idle_above_it_is_given_up() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let pool = world.pool("kv", 400 * MIB);
        let blocks = world
            .inside(pool, || [world.malloc(390 * MIB, DEFAULT), world.malloc(200 * MIB, DEFAULT)]);
        blocks.into_iter().for_each(|address| world.free(address));
        assert!(world.held(pool) >= 590 * MIB, "{conf}");
        let outside = world.malloc(550 * MIB, DEFAULT);
        assert!((400 * MIB..474 * MIB).contains(&world.held(pool)), "{conf}: {}", world.held(pool));
        let refused = world.rig.heap.malloc(300 * MIB, 0, DEFAULT);
        let Err(Error::OutOfMemory(report)) = refused else {
            panic!("{conf}: the reserve was taken")
        };
        assert!(report.to_string().contains("held by named pools"), "{report}");
        assert!(world.held(pool) >= 400 * MIB, "{conf}");
        let inside = world.inside(pool, || world.malloc(390 * MIB, DEFAULT));
        world.free(outside);
        world.free(inside);
        world.check();
    }
}

#[test]
fn a_reserve_that_cannot_be_had_is_refused_with_the_reason_and_nothing_is_kept() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let heap = &world.rig.heap;
        let error = heap.pool_create("huge", 0, 2 * GIB, None).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, PoolError::Reserve { .. }), "{conf}: {text}");
        assert!(text.contains("2.00 GiB") && text.contains("1.00 GiB free"), "{text}");
        assert_eq!(world.physical(), 0, "{conf}");
        assert!(heap.pool_create("huge", 0, u64::MAX, None).is_err());
        let pool = world.pool("huge", 100 * MIB);
        assert!(heap.pool_create("huge", 0, 2 * GIB, None).is_err(), "{conf}");
        assert_eq!(
            heap.pool_stats(pool).unwrap().reserve,
            100 * MIB,
            "{conf}: what it had, it keeps"
        );
        assert!(world.held(pool) < 300 * MIB, "{conf}: {}", world.held(pool));
        world.check();
    }
}

#[test]
fn the_idle_memory_of_others_makes_room_for_a_reserve() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let side = world.rig.stream();
        let idle = world.malloc(800 * MIB, side);
        world.work(side, 3_000_000);
        world.free(idle);
        let pool = world.pool("kv", 700 * MIB);
        assert!(world.held(pool) >= 700 * MIB, "{conf}");
        let block = world.inside(pool, || world.malloc(600 * MIB, DEFAULT));
        world.free(block);
        world.check();
    }
}

#[test]
fn a_pool_of_a_name_that_there_is_is_the_same_pool_with_more_reserve() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let pool = world.pool("kv", 100 * MIB);
        let block = world.inside(pool, || world.malloc(60 * MIB, DEFAULT));
        assert_eq!(world.pool("kv", 50 * MIB), pool);
        assert_eq!(world.rig.heap.pool_stats(pool).unwrap().reserve, 100 * MIB);
        assert_eq!(world.pool("kv", 200 * MIB), pool);
        assert!(world.held(pool) >= 200 * MIB, "{conf}: {}", world.held(pool));
        assert_ne!(world.pool("kv2", 0), pool);
        world.free(block);
        world.check();
    }
}

#[test]
fn wrong_calls_are_refused_with_what_is_wrong() {
    let world = World::new(GIB, "");
    let heap = &world.rig.heap;
    let unknown = PoolKey::new(0, 99);
    for error in [
        heap.pool_create("", 0, 0, None).unwrap_err(),
        heap.pool_create(&"x".repeat(200), 0, 0, None).unwrap_err(),
    ] {
        assert!(
            matches!(error, PoolError::Name(_)) && error.to_string().contains("1 to 128 bytes"),
            "{error}"
        );
    }
    let error = heap.pool_create("a", 5, 0, None).unwrap_err();
    assert!(error.to_string().contains("no device 5"), "{error}");
    let error = heap.pool_create("a", 0, 20 * MIB, Some(10 * MIB)).unwrap_err();
    assert!(matches!(error, PoolError::ReserveOverLimit { .. }), "{error}");
    assert!(matches!(heap.pool_enter(unknown), Err(PoolError::NoSuchPool(_))));
    assert!(matches!(heap.pool_leave(unknown), Err(PoolError::NotInnermost(_))));
    assert!(matches!(heap.pool_release(unknown), Err(PoolError::NoSuchPool(_))));
    assert!(matches!(heap.pool_stats(PoolKey::new(7, 1)), Err(PoolError::NoSuchPool(_))));
    let direct = Rig::new("backing:passthrough");
    assert!(matches!(direct.heap.pool_create("a", 0, 0, None), Err(PoolError::Passthrough)));
    world.check();
}

#[test]
fn a_destroyed_pool_is_gone_and_threads_inside_it_are_served_as_ever() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let pool = world.pool("kv", 30 * MIB);
        world.rig.heap.pool_enter(pool).unwrap();
        let block = world.malloc(MIB, DEFAULT);
        assert!(matches!(world.rig.heap.pool_destroy(pool), Err(PoolError::Live { .. })));
        world.free(block);
        assert!(world.rig.heap.pool_destroy(pool).unwrap() >= 30 * MIB);
        let orphan = world.malloc(MIB, DEFAULT);
        world.rig.heap.pool_leave(pool).unwrap();
        assert!(matches!(world.rig.heap.pool_release(pool), Err(PoolError::NoSuchPool(_))));
        assert_ne!(world.pool("kv", 0), pool, "keys are never used again");
        world.free(orphan);
        world.check();
    }
}

#[test]
fn streams_of_a_pool_share_its_memory_in_stream_order() {
    for conf in KEEPING {
        let world = World::new(GIB, conf);
        let streams = [DEFAULT, world.rig.stream(), world.rig.stream()];
        let pool = world.pool("kv", 0);
        world.rig.heap.pool_enter(pool).unwrap();
        let mut random = 3u64;
        let mut live: Vec<u64> = Vec::new();
        for turn in 0..3000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let pick = |below: u64| (random >> 33) % below;
            let stream = streams[(random >> 60) as usize % 3];
            if live.len() < 12 && pick(5) < 3 {
                live.push(world.malloc(1 + pick(16 * MIB) / (1 << (turn % 9)), stream));
                world.work(stream, 20_000);
            } else if !live.is_empty() {
                let address = live.swap_remove(pick(live.len() as u64) as usize);
                if pick(4) == 0 {
                    world.rig.gpu.block_record_stream(address, 0, stream.0);
                    assert!(world.rig.heap.record_stream(address, stream));
                    world.work(stream, 20_000);
                }
                world.free(address);
            }
            if turn % 50 == 0 {
                world.rig.gpu.host_spend(100_000);
            }
            if turn % 500 == 499 {
                world.rig.check();
            }
        }
        world.rig.heap.pool_leave(pool).unwrap();
        let held = world.held(pool);
        assert!(held < 300 * MIB, "{conf}: {held} B held for at most 12 blocks");
        live.into_iter().for_each(|address| world.free(address));
        world.rig.heap.pool_release(pool).unwrap();
        assert_eq!(world.physical(), 0, "{conf}");
        world.check();
    }
}

#[test]
fn threads_allocate_in_pools_while_others_release_them() {
    for conf in KEEPING {
        let world = World::new(4 * GIB, conf);
        let done = AtomicBool::new(false);
        let released = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for seed in 0..2u64 {
                let (world, done) = (&world, &done);
                scope.spawn(move || {
                    let pool = world.pool("kv", 0);
                    let stream = world.rig.stream();
                    for round in 0..150u64 {
                        world.rig.heap.pool_enter(pool).unwrap();
                        let sizes = [700 + round, 90_000, 3 * MIB + seed * MIB];
                        let blocks = sizes.map(|size| world.malloc(size, stream));
                        world.work(stream, 30_000);
                        world.rig.heap.pool_leave(pool).unwrap();
                        let outside = world.malloc(2 * MIB, stream);
                        blocks.into_iter().chain([outside]).for_each(|address| world.free(address));
                    }
                    done.store(true, Ordering::Relaxed);
                });
            }
            scope.spawn(|| {
                let pool = world.pool("kv", 0);
                while !done.load(Ordering::Relaxed) {
                    match world.rig.heap.pool_release(pool) {
                        Ok(_) => released.fetch_add(1, Ordering::Relaxed),
                        // A thread was inside, or used it again after each wait for the device.
                        Err(PoolError::Live { .. } | PoolError::Busy | PoolError::Kept { .. }) => 0,
                        Err(other) => panic!("{conf}: {other}"),
                    };
                    std::thread::yield_now();
                }
            });
        });
        let pool = world.pool("kv", 0);
        world.rig.heap.pool_release(pool).unwrap();
        world.rig.heap.trim();
        assert_eq!(world.physical(), 0, "{conf}");
        world.check();
    }
}

#[test]
fn a_pool_that_shares_nothing_between_streams_goes_back_whole_too() {
    for conf in KEEPING {
        let world = World::new(GIB, &format!("{conf},share:off"));
        let side = world.rig.stream();
        let pool = world.pool("kv", 0);
        let blocks =
            world.inside(pool, || [world.malloc(40 * MIB, side), world.malloc(9000, DEFAULT)]);
        world.work(side, 1_000_000);
        blocks.into_iter().for_each(|address| world.free(address));
        world.rig.heap.pool_release(pool).unwrap();
        assert_eq!(world.physical(), 0, "{conf}");
        world.check();
    }
}

#[test]
fn the_driver_makes_the_same_calls_with_and_without_a_pool_that_nobody_enters() {
    let calls = |with: bool| {
        let world = World::new(GIB, "backing:pool");
        if with {
            world.pool("kv", 0);
        }
        let blocks: Vec<u64> = SIZES.iter().map(|&size| world.malloc(size, DEFAULT)).collect();
        blocks.into_iter().for_each(|address| world.free(address));
        world.rig.gpu.counts(Caller::Allocator).of(CallKind::PoolAlloc)
    };
    assert_eq!(calls(true), calls(false));
}

/// Live bytes by lifetime, from the record.
fn live_by_lifetime(rig: &Rig) -> [u64; 4] {
    let reader = gruyere::record::Reader::own(rig.heap.record()).unwrap();
    let snapshot = reader.device(0).unwrap();
    std::array::from_fn(|lifetime| snapshot.sum(|_, of| of == lifetime).live_bytes())
}
