//! The record says how long the driver's calls took: every call that changes memory or waits is in
//! it, by kind and size, and nothing else is.

mod common;

use std::collections::BTreeMap;

use common::{DEFAULT, GIB, MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::record::Reader;
use gruyere::record::calls::{CallTime, CallWriter, DriverCall};
use gruyere_phantom::{CallKind, Caller, Config as GpuConfig, Injection, as_program};

/// A program that takes, shares and gives back memory of many sizes on three streams, runs out of
/// it, and ends.
fn program(rig: &Rig) {
    rig.heap.announce_hooks(3);
    let streams = [DEFAULT, rig.stream(), rig.stream()];
    let mut random = 7u64;
    let mut pick = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % below
    };
    let mut live: Vec<u64> = Vec::new();
    for round in 0..400 {
        let size = if pick(3) == 0 { 512 + pick(MIB) } else { MIB + pick(700 * MIB) };
        let stream: StreamHandle = streams[pick(3) as usize];
        if let Ok(address) = rig.heap.malloc(size, 0, stream) {
            as_program(|| rig.gpu.launch(0, stream.0, 1, 20_000)).unwrap();
            rig.heap.record_stream(address, streams[pick(3) as usize]);
            live.push(address);
        }
        while live.len() > 12 || (pick(2) == 0 && !live.is_empty()) {
            let at = pick(live.len() as u64) as usize;
            assert!(rig.heap.free(live.swap_remove(at)));
        }
        if round % 100 == 99 {
            rig.heap.mark_step();
            rig.heap.trim();
        }
    }
    for address in live {
        assert!(rig.heap.free(address));
    }
    rig.heap.trim();
}

/// Calls by name, and the time of all together.
fn told(rig: &Rig) -> (BTreeMap<&'static str, u64>, u64) {
    let reader = Reader::own(rig.heap.record()).expect("a record");
    let mut counts = BTreeMap::new();
    let mut ticks = 0;
    for calls in reader.driver_calls() {
        *counts.entry(calls.call.name()).or_default() += calls.count();
        assert!(calls.longest <= calls.ticks && calls.quantile(1.0) <= calls.longest);
        ticks += calls.ticks;
    }
    (counts, ticks)
}

/// What the stand-in counted of the kinds that are timed.
fn made(rig: &Rig) -> BTreeMap<&'static str, u64> {
    let counts = rig.gpu.counts(Caller::Allocator);
    let is_timed = |kind: CallKind| {
        DriverCall::ALL.iter().any(|call| call.is_recorded() && call.name() == kind.name())
    };
    counts
        .iter()
        .filter(|&(kind, _)| is_timed(kind))
        .map(|(kind, count)| (kind.name(), count))
        .collect()
}

#[test]
fn every_call_that_changes_memory_or_waits_is_on_the_record() {
    for backing in ["stitch", "pool", "fixed"] {
        let rig = Rig::bare(3 * GIB, &format!("backing:{backing},record:on"));
        program(&rig);
        let (counts, ticks) = told(&rig);
        assert_eq!(counts, made(&rig), "{backing}");
        assert!(counts.len() >= 3 && ticks > 0, "{backing}: {counts:?}");
    }
}

#[test]
fn calls_are_told_by_the_class_of_their_size() {
    let rig = Rig::bare(8 * GIB, "backing:fixed,headroom:0,record:on");
    rig.heap.announce_hooks(3);
    for size in [2 * MIB, 30 * MIB, 200 * MIB, GIB] {
        rig.malloc(size, DEFAULT);
    }
    let reader = Reader::own(rig.heap.record()).unwrap();
    let alloc: Vec<CallTime> =
        reader.driver_call_times().into_iter().filter(|time| time.call == "cuMemAlloc").collect();
    let classes: Vec<_> = alloc.iter().map(|time| time.up_to_bytes).collect();
    assert!(classes.contains(&None) && classes.contains(&Some(256 * MIB)), "{alloc:?}");
    assert!(alloc.iter().all(|time| time.is_sized
        && time.count > 0
        && time.p50_nanoseconds <= time.p99_nanoseconds));
    assert!(alloc.iter().all(|time| time.p99_nanoseconds <= time.max_nanoseconds));
    assert!(alloc.iter().all(|time| time.max_nanoseconds <= time.total_nanoseconds));
}

#[test]
fn a_call_that_fails_is_timed_too() {
    let rig = Rig::bare(GIB, "backing:fixed,record:on");
    rig.heap.announce_hooks(3);
    let failing = Injection { kind: Some(CallKind::Alloc), nth: 1, code: 2, from_then_on: true };
    rig.gpu.inject(failing);
    assert!(rig.heap.malloc(8 * MIB, 0, DEFAULT).is_err());
    let (counts, _) = told(&rig);
    assert!(counts["cuMemAlloc"] > 0);
    assert_eq!(counts, made(&rig));
}

#[test]
fn without_a_record_nothing_is_timed_and_the_heap_works() {
    let rig = Rig::over(
        GpuConfig { oracle: true, ..GpuConfig::new(3 * GIB) },
        "backing:stitch,record:off",
    );
    program(&rig);
    assert!(Reader::own(rig.heap.record()).is_none());
    assert!(rig.heap.record().call_times(DriverCall::Create).is_none());
}

/// Threads that allocate at once lose no call.
#[test]
fn no_call_of_many_threads_is_lost() {
    let rig = Rig::bare(64 * GIB, "backing:fixed,headroom:0,record:on");
    rig.heap.announce_hooks(3);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..200 {
                    let address = rig.malloc((2 + round % 7) * 2 * MIB, DEFAULT);
                    assert!(rig.heap.free(address));
                    if round % 10 == 0 {
                        rig.heap.trim();
                    }
                }
            });
        }
    });
    assert_eq!(told(&rig).0, made(&rig));
    // The same without the heap's locks around the calls.
    let times = rig.heap.record().call_times(DriverCall::Release).unwrap();
    let writer = CallWriter::default();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50_000).for_each(|_| writer.note(times, 0, 1000)));
        }
    });
    let reader = Reader::own(rig.heap.record()).unwrap();
    let calls: Vec<_> = reader
        .driver_calls()
        .into_iter()
        .filter(|calls| calls.call == DriverCall::Release)
        .collect();
    assert_eq!((calls[0].count(), calls[0].ticks, calls[0].longest), (200_000, 200_000_000, 1000));
}
