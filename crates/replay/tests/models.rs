//! The models under random traffic: their books balance, the oracle is silent, and an out of memory
//! is genuine.

use gruyere_replay::allocator::Allocator;
use gruyere_replay::bench::audit;
use gruyere_replay::engine::{Blind, Blocks, End, replay_into};
use gruyere_replay::peers::Torch;
use gruyere_replay::stage::{Charge, PhantomStage, Setup, Stage};
use gruyere_replay::trace::Trace;
use proptest::prelude::*;
use std::fmt::Write as _;

const MIB: u64 = 1 << 20;

/// Sizes on both sides of every boundary of the rules.
fn size() -> impl Strategy<Value = u64> {
    let edges = [
        0,
        1,
        511,
        512,
        513,
        MIB,
        MIB + 1,
        2 * MIB,
        9 * MIB,
        10 * MIB - 1,
        10 * MIB,
        12 * MIB + 5,
        21 * MIB,
    ];
    prop_oneof![prop::sample::select(edges.to_vec()), 0..64 * 1024u64, 0..30 * MIB]
}

/// A valid trace: each step is one of the possible operations.
fn trace() -> impl Strategy<Value = Trace> {
    prop::collection::vec((0..10u8, size(), any::<u16>(), 0..3u8), 1..250).prop_map(|steps| {
        let (mut text, mut live, mut next, mut events) = (String::new(), Vec::new(), 0, 0u32);
        for (what, size, pick, stream) in steps {
            let chosen = |n: usize| usize::from(pick) % n;
            let _ = match what {
                0..=3 => {
                    next += 1;
                    live.push(next);
                    writeln!(text, "a {next} {size} 0 {stream}")
                }
                4 | 5 if !live.is_empty() => {
                    writeln!(text, "f {}", live.swap_remove(chosen(live.len())))
                }
                6 if !live.is_empty() => writeln!(text, "r {} {stream}", live[chosen(live.len())]),
                7 => {
                    events += 1;
                    writeln!(text, "e {events} {stream}")
                }
                8 if events > 0 => writeln!(text, "w {stream} {}", 1 + u32::from(pick) % events),
                9 => writeln!(text, "h s {stream}"),
                _ => writeln!(text, "k {stream} {}", 1 + pick % 40),
            };
        }
        Trace::read("arbitrary", text.as_bytes()).unwrap()
    })
}

fn models(stage: &PhantomStage, expandable: bool) -> Torch {
    let driver = stage.driver();
    if expandable { Torch::expandable(&driver) } else { Torch::native(&driver) }.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn books_balance_and_order_is_kept(
        trace in trace(), expandable: bool, capacity in 30..400u64, timed: bool,
    ) {
        let capacity = capacity * MIB;
        let setup = if timed { Setup::timeline(capacity, Charge::DriverCalls) } else {
            Setup::instant(capacity)
        };
        let mut stage = PhantomStage::new(&trace, Setup { oracle: true, ..setup });
        let mut torch = models(&stage, expandable);
        let mut blocks = Blocks::new(&trace);
        let end = replay_into(&trace, &mut stage, &mut torch, &mut Blind, &mut blocks).unwrap();
        prop_assert_eq!(stage.held(), torch.reserved(0));
        prop_assert!(stage.held_peak() <= capacity);
        if end != End::Completed && !expandable {
            // Genuine: the model had released all it could. (Expandable segments may have mapped
            // part of the last request.)
            let held = stage.held();
            torch.release().unwrap();
            prop_assert_eq!(stage.held(), held);
        }
        prop_assert_eq!(
            audit(&trace, &mut stage, &mut torch, blocks).unwrap(), Vec::<String>::new()
        );
    }

    #[test]
    fn more_room_than_ever_needed_always_completes(trace in trace(), expandable: bool) {
        let mut stage = PhantomStage::new(&trace, Setup::instant(64 << 30));
        let mut torch = models(&stage, expandable);
        let mut blocks = Blocks::new(&trace);
        let end = replay_into(&trace, &mut stage, &mut torch, &mut Blind, &mut blocks);
        prop_assert_eq!(end, Ok(End::Completed));
        prop_assert!(stage.held_peak() >= trace.peak_live);
    }
}
