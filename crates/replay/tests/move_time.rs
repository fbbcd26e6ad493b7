//! The time that moving pages takes a program, with driver calls at an H200's prices.

use gruyere_replay::Prices;
use gruyere_replay::bench::{Contender, ample, smallest_device};
use gruyere_replay::clock::Clock;
use gruyere_replay::engine::{Blind, End, replay};
use gruyere_replay::ours::Gruyere;
use gruyere_replay::stage::{Charge, PhantomStage, Setup};
use gruyere_replay::trace::Trace;
use std::path::Path;

/// Programs that would move pages at most of their requests: with the moves of `slack:0.1%` they
/// take 99 and 18 times as long.
const MOVERS: [&str; 2] = ["kept/streams/s_prefetch_segment", "kept/big_particle"];

fn open(name: &str) -> Trace {
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../traces");
    Trace::open(&traces.join(format!("{name}.trace.zst"))).unwrap()
}

/// A device of `capacity` bytes, kernels of 20 us, driver calls that take their time.
fn charged(capacity: u64) -> Setup {
    let prices = Prices::open(Prices::MEASURED).unwrap().costs;
    Setup { prices, charge: Charge::DriverCalls, ..Setup::at(Clock::USUAL, capacity) }
}

/// How the program ends, and when its device does, nanoseconds.
fn run(trace: &Trace, setup: Setup) -> (End, u64) {
    let mut stage = PhantomStage::new(trace, setup);
    let mut heap = Gruyere::install(stage.driver(), "").unwrap();
    let end = replay(trace, &mut stage, &mut heap, &mut Blind).unwrap();
    (end, stage.time().device_end)
}

#[test]
fn moves_do_not_take_most_of_a_programs_time() {
    for name in MOVERS {
        let trace = open(name);
        let (_, without) = run(&trace, Setup::at(Clock::USUAL, ample(&trace)));
        let (_, with) = run(&trace, charged(ample(&trace)));
        assert!(with < without * 5 / 2, "{name}: {with} ns for {without} ns without driver calls");
    }
}

#[test]
fn where_little_memory_is_left_pages_move_whatever_time_that_takes() {
    for name in MOVERS {
        let trace = open(name);
        let device = smallest_device(&trace, &Contender::Gruyere(String::new())).unwrap().unwrap();
        let (end, _) = run(&trace, charged(device));
        assert_eq!(end, End::Completed, "{name} on {device} B");
    }
}
