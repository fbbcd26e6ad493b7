//! Programs with a new stream for each request: far more streams than the allocator's numbers.

use crate::common::{DEFAULT, GIB, MIB, Rig};
use crate::flaky::Plan;
use crate::world::World;
use gruyere::driver::{ErrorKind, StreamHandle};
use gruyere::heap::{Error, MAX_STREAMS};
use gruyere_phantom::{Config as GpuConfig, as_program};
use std::collections::VecDeque;

/// `requests` streams, `alive` of them at a time; blocks outlive their streams, and streams of
/// other requests use them. The oracle's clocks grow with the square of all streams so far, so it
/// watches only the shorter runs.
fn many_short_lived_streams(conf: &str, requests: u64, alive: usize) {
    let oracle = requests < 20_000;
    let rig =
        Rig::over(GpuConfig { oracle, vouched_streams: true, ..GpuConfig::new(16 * GIB) }, conf);
    rig.heap.announce_hooks(3);
    let mut streams = VecDeque::new();
    let mut blocks = VecDeque::new();
    for request in 0..requests {
        let stream = rig.passing_stream();
        let size =
            if request % 5 == 0 { MIB + request % 7 * 100_000 } else { 1 + request % 100_000 };
        let address = rig.malloc(size, stream);
        rig.gpu.block_malloc(request + 1, address, size, 0, stream.0);
        as_program(|| rig.gpu.launch(0, stream.0, 1, 50_000)).unwrap();
        if request % 3 == 0
            && let Some(&other) = streams.front()
        {
            let other: StreamHandle = other;
            rig.gpu.block_record_stream(address, 0, other.0);
            assert!(rig.record_stream(address, other));
            as_program(|| rig.gpu.launch(0, other.0, 1, 50_000)).unwrap();
        }
        blocks.push_back(address);
        if blocks.len() > 300 {
            // An old block: its stream is long gone.
            let address = blocks.remove((request % 300) as usize).unwrap();
            rig.gpu.block_free(address);
            assert!(rig.heap.free(address));
        }
        streams.push_back(stream);
        if streams.len() > alive {
            rig.destroy(streams.pop_front().unwrap());
        }
    }
    for address in blocks {
        rig.gpu.block_free(address);
        assert!(rig.heap.free(address));
    }
    rig.heap.trim();
    rig.check();
    assert_eq!(rig.gpu.faults(), []);
    assert_eq!(rig.heap.stats(0).unwrap().live, 0);
    assert_eq!(rig.gpu.books(0).physical, 0);
}

#[test]
fn a_hundred_thousand_short_lived_streams_are_served() {
    many_short_lived_streams("backing:pool", 100_000, 20);
}

#[test]
fn blocks_that_outlive_their_streams_keep_stream_order_when_numbers_are_used_again() {
    many_short_lived_streams("backing:pool", 9_500, 20);
}

#[test]
fn short_lived_streams_that_share_nothing_are_served_too() {
    many_short_lived_streams("backing:pool,share:off", 9_500, 1);
}

#[test]
fn streams_that_are_all_alive_are_refused_past_the_last_number_and_their_uses_still_kept_apart() {
    let rig = Rig::new("");
    let streams: Vec<StreamHandle> = (1..MAX_STREAMS).map(|_| rig.passing_stream()).collect();
    // A heap that holds much grows by many pages at a time: blocks share them, so none goes back to
    // the driver with one of its blocks.
    rig.malloc(8 * GIB, DEFAULT);
    let blocks: Vec<u64> = streams.iter().map(|&stream| rig.malloc(MIB + 1, stream)).collect();
    let one_more = rig.passing_stream();
    assert!(matches!(rig.heap.malloc(1, 0, one_more), Err(Error::TooManyStreams)));

    // It may use others' blocks: what it uses is not reused before the device is done.
    let (address, stream) = (blocks[0], streams[0]);
    rig.gpu.block_malloc(1, address, MIB + 1, 0, stream.0);
    rig.gpu.block_record_stream(address, 0, one_more.0);
    assert!(rig.heap.record_stream(address, one_more));
    as_program(|| rig.gpu.launch(0, one_more.0, 1, 1_000_000_000)).unwrap();
    rig.gpu.block_free(address);
    assert!(rig.heap.free(address));
    let other = rig.malloc(MIB + 1, stream);
    assert_ne!(other, address);
    rig.gpu.block_malloc(2, other, MIB + 1, 0, stream.0);
    rig.heap.trim();
    assert_eq!(rig.malloc(MIB + 1, stream), address);
    assert_eq!(rig.gpu.faults(), []);

    // The first of them to end, with its block, makes room.
    assert!(rig.heap.free(blocks[7]));
    rig.destroy(streams[7]);
    assert_ne!(rig.malloc(1, one_more), 0);
    rig.check();
}

#[test]
fn a_driver_call_that_fails_while_numbers_are_looked_for_is_not_blamed_on_the_program() {
    let mut refused = 0;
    for call in 1.. {
        let world = World::over(GpuConfig { oracle: false, ..GpuConfig::new(16 * GIB) }, "");
        let (heap, driver) = (&world.rig.heap, &world.driver);
        heap.announce_hooks(3);
        let passing = || world.rig.passing_stream();
        // All numbers are taken, by streams without a block.
        for _ in 1..MAX_STREAMS {
            assert!(heap.free(heap.malloc(MIB + 1, 0, passing()).unwrap()));
        }
        let one_more = passing();
        driver.set(Plan::Nth(call, ErrorKind::Other));
        let found = heap.malloc(1, 0, one_more);
        let calls = driver.calls();
        driver.set(Plan::Sound);
        match found {
            Ok(address) => assert!(heap.free(address)),
            Err(Error::Driver(_)) => refused += 1,
            Err(error) => panic!("with failing call {call}: {error}"),
        }
        assert!(heap.free(heap.malloc(1, 0, one_more).unwrap()), "after call {call}");
        heap.validate().unwrap();
        if calls < call {
            break;
        }
    }
    assert!(refused > 0, "no call failed where numbers are looked for");
}

#[test]
fn threads_that_have_ended_leave_their_per_thread_streams_numbers() {
    let rig = Rig::new("");
    for _ in 0..MAX_STREAMS + 100 {
        let served = std::thread::scope(|scope| {
            scope.spawn(|| rig.heap.free(rig.heap.malloc(1000, 0, StreamHandle(2)).unwrap())).join()
        });
        assert!(served.unwrap());
    }
    rig.check();
}
