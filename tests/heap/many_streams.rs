//! A program's driver calls do not grow with its streams: counted calls, so no clock is needed.
//!
//! For the host's cost, see `cargo bench -p gruyere-replay --bench many_streams`, and a bar of
//! `cargo xtask instructions`.

use crate::common::{GIB, MIB, Rig, malloc_again};
use gruyere::driver::StreamHandle;
use gruyere_phantom::{CallKind, Caller, Config as GpuConfig, as_program};

/// Longer than the whole program: no event is done.
const SECONDS: u64 = 100_000_000_000;
const FEW: u64 = 10;
const MANY: u64 = 1000;
/// Rounds that are counted.
const ROUNDS: u64 = 400;
/// Largest ratio of the calls at [`MANY`] streams to those at [`FEW`].
const MOST: f64 = 3.0;

fn rig() -> Rig {
    let quiet = GpuConfig { oracle: false, run_ahead: u64::MAX, ..GpuConfig::new(1024 * GIB) };
    Rig::over(quiet, "")
}

/// Driver calls except those that bring memory: the number of chunks depends on held memory, which
/// grows with the streams.
fn calls(rig: &Rig) -> u64 {
    let counts = rig.gpu.counts(Caller::Allocator);
    let memory = [CallKind::Create, CallKind::Map, CallKind::SetAccess];
    counts.total() - memory.map(|kind| counts.of(kind)).iter().sum::<u64>()
}

/// Driver calls per round, in the counted rounds.
fn counted(rig: &Rig, mut round: impl FnMut(u64)) -> f64 {
    let before = calls(rig);
    (0..ROUNDS).for_each(&mut round);
    (calls(rig) - before) as f64 / ROUNDS as f64
}

/// Streams, each with freed memory.
fn streams_at_work(rig: &Rig, count: u64, work: u64) -> Vec<StreamHandle> {
    let streams: Vec<_> = (0..count).map(|_| rig.stream()).collect();
    for &stream in &streams {
        let address = rig.malloc(3 * MIB, stream);
        as_program(|| rig.gpu.launch(0, stream.0, 1, work)).unwrap();
        rig.heap.free(address);
    }
    streams
}

fn few_and_many(calls: impl Fn(u64) -> f64) {
    let (few, many) = (calls(FEW), calls(MANY));
    assert!(few > 0.0, "nothing was asked: nothing was tried");
    assert!(
        many <= MOST * few,
        "{many:.1} driver calls a round at {MANY} streams, {few:.1} at {FEW}"
    );
}

#[test]
fn a_malloc_that_grows_the_heap_asks_few_of_a_thousand_busy_streams() {
    few_and_many(|count| {
        let rig = rig();
        rig.heap.announce_hooks(3);
        let streams = streams_at_work(&rig, count, SECONDS);
        let calls = counted(&rig, |round| {
            rig.malloc(40 * MIB + round * 512, streams[(round % count) as usize]);
        });
        rig.check();
        calls
    });
}

#[test]
fn a_malloc_beside_a_thousand_idle_streams_asks_the_driver_no_more_than_beside_ten() {
    few_and_many(|count| {
        let rig = rig();
        rig.heap.announce_hooks(3);
        let streams = streams_at_work(&rig, count, 1);
        let calls = counted(&rig, |round| {
            let stream = streams[(round * 7919 % count) as usize];
            let size =
                if round.is_multiple_of(3) { 1 + round * 511 % MIB } else { 4 * MIB + round * 512 };
            let address = rig.malloc(size, stream);
            as_program(|| rig.gpu.launch(0, stream.0, 1, 1)).unwrap();
            rig.heap.free(address);
        });
        rig.check();
        calls
    });
}

#[test]
fn without_the_hooks_growth_does_not_ask_a_thousand_streams_whether_they_capture() {
    few_and_many(|count| {
        let rig = rig();
        let streams = streams_at_work(&rig, count, 1);
        let calls = counted(&rig, |round| {
            rig.malloc(40 * MIB + round * 512, streams[(round % count) as usize]);
        });
        rig.check();
        calls
    });
}

#[test]
fn cuda_malloc_and_cuda_free_beside_a_thousand_streams_ask_the_driver_at_most_three_times_what_they_ask_beside_ten()
 {
    few_and_many(|count| {
        let rig = rig();
        rig.heap.announce_ordered_callers();
        let streams = streams_at_work(&rig, count, SECONDS);
        let calls = counted(&rig, |round| {
            let address = rig.malloc(2 * MIB + round * 512, StreamHandle::ALL_STREAMS);
            as_program(|| rig.gpu.launch(0, streams[0].0, 1, SECONDS)).unwrap();
            assert!(rig.heap.free_device_wide(address));
        });
        rig.check();
        calls
    });
}

#[test]
fn every_busy_stream_is_asked_before_long_however_many_there_are() {
    let rig = rig();
    rig.heap.announce_hooks(3);
    // All are busy except the last, which has the needed memory; the others' events are queried
    // first.
    let busy = streams_at_work(&rig, MANY, SECONDS);
    let done = rig.stream();
    let requester = rig.stream();
    let kept = rig.malloc(40 * MIB, done);
    as_program(|| rig.gpu.launch(0, done.0, 1, 1)).unwrap();
    rig.heap.free(kept);
    malloc_again(&rig.heap, 0, done);
    let before = rig.gpu.counts(Caller::Allocator).of(CallKind::EventQuery);
    let mut asked = 0;
    let served = (0..MANY).any(|round| {
        asked = round + 1;
        let address = rig.malloc(24 * MIB, requester);
        as_program(|| rig.gpu.launch(0, requester.0, 1, SECONDS)).unwrap();
        (kept..kept + 40 * MIB).contains(&address)
    });
    let queries = rig.gpu.counts(Caller::Allocator).of(CallKind::EventQuery) - before;
    assert!(served, "what one stream has freed and is past never served another");
    assert!(queries < 2 * (MANY + 2 * asked), "{queries} events were asked in {asked} mallocs");
    assert!(busy.len() as u64 == MANY);
    rig.check();
}
