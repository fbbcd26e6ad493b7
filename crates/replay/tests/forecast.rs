//! The forecast of out of memory against reality: real traces with a planted leak run through the
//! heap on the simulator until memory runs out, and the tests compare the earlier forecasts of the
//! record's timeline with that time.
//!
//! The operations set the record's clock (which needs debug assertions), so the machine's load does
//! not matter.
#![cfg(debug_assertions)]

use gruyere::record::{Reader, clock};
use gruyere::watch::{Forecast, Point, capacity, forecast};
use gruyere_replay::engine::{End, Watch, replay};
use gruyere_replay::ours::Gruyere;
use gruyere_replay::stage::{PhantomStage, Setup};
use gruyere_replay::trace::{Op, Trace};
use std::path::Path;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn bundled(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../traces/{name}.trace.zst"));
    Trace::open(&path).unwrap().allocator_calls_only()
}

/// The steps of `trace` after the first two, repeated up to `steps` steps; after each, the blocks
/// of `leak`, which are never freed.
fn long(trace: &Trace, steps: usize, leak: &[u64]) -> Trace {
    let mut long = Trace {
        ops: Vec::new(),
        ids: Vec::new(),
        name: format!("long {}", trace.name),
        ..trace.clone()
    };
    let ends: Vec<usize> = trace
        .ops
        .iter()
        .enumerate()
        .filter(|(_, op)| **op == Op::Step)
        .map(|(at, _)| at + 1)
        .collect();
    let (begin, end) = (ends[1], *ends.last().unwrap());
    // The blocks by their number in the trace; `None`: not live.
    let mut now: Vec<Option<u32>> = vec![None; trace.blocks()];
    let mut done = 0;
    let mut turn = 0..end;
    while done < steps {
        for op in &trace.ops[turn.clone()] {
            match *op {
                Op::Alloc { size, block, stream, device } => {
                    let new = long.ids.len() as u32;
                    long.ids.push(u64::from(new) + 1);
                    now[block as usize] = Some(new);
                    long.ops.push(Op::Alloc { size, block: new, stream, device });
                }
                // Blocks from before the first turn are gone in the later ones.
                Op::Free { block } => {
                    long.ops.extend(now[block as usize].take().map(|block| Op::Free { block }));
                }
                Op::RecordStream { block, stream } => {
                    let known = now[block as usize];
                    long.ops.extend(known.map(|block| Op::RecordStream { block, stream }));
                }
                Op::Step => {
                    for &size in leak {
                        let block = long.ids.len() as u32;
                        long.ids.push(u64::from(block) + 1);
                        long.ops.push(Op::Alloc { size, block, stream: 0, device: 0 });
                    }
                    long.ops.push(Op::Step);
                    done += 1;
                    if done >= steps {
                        break;
                    }
                }
                _ => {}
            }
        }
        // Blocks left live by the repeated steps would leak too.
        for op in &trace.ops[begin..end] {
            if let Op::Alloc { block, .. } = *op {
                long.ops.extend(now[block as usize].take().map(|block| Op::Free { block }));
            }
        }
        turn = begin..end;
    }
    long.operations =
        long.ops.iter().filter(|op| matches!(op, Op::Alloc { .. } | Op::Free { .. })).count()
            as u64;
    long
}

/// A forecast, after a number of operations.
struct Said {
    at: f64,
    forecast: Forecast,
}

/// Ticks between two points in distinct cells of the timeline: a cell begins with 2^24.
const CELL: u64 = 20_000_000;
/// Start of the clock: 0 means no time.
const START: u64 = 1 << 40;

/// Reads the record at intervals, as a reader does, and sets its clock: a fixed number of ticks per
/// operation.
struct Observer {
    operations: u64,
    every: u64,
    ticks: u64,
    said: Vec<Said>,
    marks: bool,
}

impl Observer {
    /// The operations at a time: the test's seconds.
    fn seconds(&self, ticks: u64) -> f64 {
        (ticks - START) as f64 / self.ticks as f64
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        clock::set(None);
    }
}

impl Watch for Observer {
    fn after(&mut self, _live: u64, _held: impl FnOnce() -> u64) {
        self.operations += 1;
        clock::set(Some(START + self.operations * self.ticks));
        if self.operations.is_multiple_of(self.every) {
            let reader = Reader::own(gruyere::door::heap().unwrap().record()).unwrap();
            let timeline = reader.timeline(0);
            assert_eq!(timeline.torn, 0);
            let points: Vec<Point> = timeline
                .entries
                .iter()
                .map(|entry| Point {
                    seconds: self.seconds(entry.sample.ticks),
                    step: if self.marks { entry.sample.step } else { 0 },
                    ..Point::from(entry)
                })
                .collect();
            let forecast = forecast(&points, capacity(&reader.device(0).unwrap()));
            self.said.push(Said { at: self.operations as f64, forecast });
        }
    }
}

fn steps(trace: &Trace) -> u32 {
    trace.ops.iter().filter(|op| **op == Op::Step).count() as u32
}

/// Replays `trace` on a device of `memory`: the forecasts, and the operation at which memory ran
/// out.
fn observed(trace: &Trace, memory: u64, marks: bool) -> (Vec<Said>, Option<f64>) {
    let mut stage = PhantomStage::new(trace, Setup::instant(memory));
    let looks = (trace.operations / 400).max(1);
    let cells = 3 * u64::from(steps(trace)).max(100);
    let ticks = (cells * CELL / trace.operations).max(1);
    let mut observer = Observer { operations: 0, every: looks, ticks, said: Vec::new(), marks };
    clock::set(Some(START));
    let mut gruyere =
        Gruyere::install(stage.driver(), "headroom:0,record_blocks:65536").unwrap().quietly();
    let end = replay(trace, &mut stage, &mut gruyere, &mut observer).unwrap();
    let out = matches!(end, End::OutOfMemory { .. }).then_some(observer.operations as f64);
    (std::mem::take(&mut observer.said), out)
}

/// From half-way to 95% of the way, the forecasts are right within a fifth of the rest. `round`:
/// one of this many steps needs more than the others grow meanwhile. Memory can run out only in
/// that step, so the forecast may come true a round later.
fn is_right(name: &str, memory: u64, leak: &[u64], marks: bool, round: Option<u32>) {
    let leaking = long(&bundled(name), 430, leak);
    let (said, out) = observed(&leaking, memory, marks);
    let out = out.expect("the leak fills the device");
    let what = format!("{name} on {} MiB, marks {marks}", memory / MIB);
    let round = round.map_or(0.0, |round| {
        f64::from(round) * leaking.operations as f64 / f64::from(steps(&leaking))
    });
    // Operations off, and those allowed.
    let off = |said: &Said| {
        let rest = out - said.at;
        (said.forecast.seconds().unwrap_or(f64::INFINITY) - rest, rest * 0.2 + round)
    };
    for percent in [50, 60, 70, 80, 90, 95] {
        let at = out * f64::from(percent) / 100.0;
        let said =
            said.iter().min_by(|a, b| (a.at - at).abs().total_cmp(&(b.at - at).abs())).unwrap();
        let Forecast::Growing(growth) = said.forecast else {
            panic!("{what}: at {percent}%, {:?}", said.forecast);
        };
        let (wrong, allowed) = off(said);
        assert!(
            wrong.abs() <= allowed,
            "{what}: at {percent}% of the way, wrong by {:+.1}%",
            wrong / (out - said.at) * 100.0
        );
        assert_eq!(growth.steps.is_some(), marks, "{what}");
    }
    // Nearly all of them: the checks above were not lucky.
    let half_way = said.iter().filter(|said| (0.5 * out..0.95 * out).contains(&said.at));
    let (right, all) = half_way.fold((0, 0), |(right, all), said| {
        let (wrong, allowed) = off(said);
        (right + usize::from(wrong.abs() <= allowed), all + 1)
    });
    assert!(right * 100 >= all * 95, "{what}: {right} of {all} are right");
}

#[test]
fn a_planted_leak_is_forecast_within_a_fifth_from_half_way_on() {
    // 80 MiB a step, in steps of different lengths that take 10 GiB and more and give them back.
    // Memory runs out in one of the three longest of 30, which are up to twelve apart.
    let leak = [70 * MIB, 10 * MIB, 700_000];
    for memory in [58 * GIB, 59 * GIB, 60 * GIB, 61 * GIB, 62 * GIB] {
        is_right("llama7b_lora", memory, &leak, true, Some(12));
    }
    is_right("llama7b_lora", 60 * GIB, &leak, false, Some(12));
    // Every eighth step takes 800 MiB more than the others. The device's size determines where in
    // the round memory runs out.
    for memory in [40 * GIB - 364 * MIB, 40 * GIB - 182 * MIB, 40 * GIB, 40 * GIB + 182 * MIB] {
        is_right("fsdp", memory, &[80 * MIB, 8 * MIB, 3 * MIB], true, Some(8));
    }
}

#[test]
fn neither_a_warm_up_nor_a_steady_state_is_forecast_to_run_out() {
    for (name, steps) in
        [("llama7b_lora", 40), ("llama7b_full", 25), ("moe", 40), ("offload", 30), ("generate", 4)]
    {
        for marks in [true, false] {
            let steady = long(&bundled(name), steps, &[]);
            let (said, out) = observed(&steady, 100 * GIB, marks);
            assert_eq!(out, None, "{name}");
            let wild: Vec<(f64, f64)> =
                said.iter().filter_map(|said| Some((said.at, said.forecast.seconds()?))).collect();
            assert!(wild.is_empty(), "{name}, marks {marks}, of {}: {wild:?}", steady.operations);
            assert!(said.len() > 100, "{name}");
            if marks && steps >= 30 {
                assert_eq!(said.last().unwrap().forecast, Forecast::NoGrowth, "{name}");
            }
        }
    }
}
