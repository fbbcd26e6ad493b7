//! Foundations of `cargo xtask proof` on the bundled traces: the floor is a lower bound, and
//! traces of other sizes and long runs are valid programs.

use gruyere_replay::bench::{Contender, ample};
use gruyere_replay::observe::{Observed, observe};
use gruyere_replay::stage::{Charge, Setup};
use gruyere_replay::trace::{Op, Trace};
use gruyere_replay::{Prices, floor};
use std::path::Path;

fn bundled(name: &str) -> Trace {
    Trace::open(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../traces/{name}.trace.zst")),
    )
    .unwrap()
}

fn all() -> [Contender; 5] {
    let ours = |conf: &str| Contender::Gruyere(conf.to_owned());
    [Contender::Torch, Contender::Expandable, ours(""), ours("backing:pool"), ours("backing:fixed")]
}

fn sound(trace: &Trace, contender: &Contender) -> Observed {
    let run =
        observe(trace, contender, Setup { oracle: true, ..Setup::instant(ample(trace)) }).unwrap();
    assert!(run.completed(), "{} {}", trace.name, contender.name());
    assert_eq!(run.faults, Vec::<String>::new(), "{} {}", trace.name, contender.name());
    run
}

#[test]
fn nobody_is_done_before_the_floor() {
    for (name, prices) in
        [("fsdp", "by-call"), ("offload", "by-call"), ("fsdp", "by-mapping-and-page")]
    {
        let (trace, prices) = (bundled(name), Prices::open(prices).unwrap().costs);
        let ends = floor::ends(&trace, &prices).unwrap();
        assert!(
            ends.perfect_ns <= ends.program_ns && ends.program_ns < ends.floor_ns,
            "{name}: {ends:?}"
        );
        assert!(ends.floor_ns <= ends.at_once_ns, "{name}: {ends:?}");
        assert!(ends.at_once_ns <= ends.program_ns + ends.taking_ns, "{name}: {ends:?}");
        for contender in all() {
            let setup = Setup { prices, ..Setup::timeline(ample(&trace), Charge::DriverCalls) };
            let run = observe(&trace, &contender, setup).unwrap();
            let name = format!("{name} {}", contender.name());
            assert!(
                run.completed() && run.device_end_ns >= ends.floor_ns,
                "{name}: {}",
                run.device_end_ns
            );
        }
    }
}

#[test]
fn traces_of_other_sizes_are_sound_programs_of_the_same_shape() {
    for name in ["fsdp", "moe", "offload"] {
        let trace = bundled(name);
        let other = trace.jittered(7);
        assert_eq!(
            (other.operations, other.blocks(), other.ops.len()),
            (trace.operations, trace.blocks(), trace.ops.len())
        );
        let sizes = |trace: &Trace| {
            let size = |op: &Op| match *op {
                Op::Alloc { size, .. } => Some(size),
                _ => None,
            };
            trace.ops.iter().filter_map(size).collect::<Vec<_>>()
        };
        let changed = sizes(&trace).iter().zip(sizes(&other)).filter(|(a, b)| **a != *b).count();
        assert!(
            changed * 5 > trace.blocks(),
            "{name}: only {changed} of {} sizes changed",
            trace.blocks()
        );
        for contender in [Contender::Expandable, Contender::Gruyere(String::new())] {
            assert!(sound(&other, &contender).hold_ratio >= 1.0);
        }
    }
}

#[test]
fn a_long_run_is_sound_and_holds_at_least_what_its_pieces_need() {
    let (one, two) = (bundled("fsdp"), bundled("offload"));
    let long = Trace::joined("long", &[&one, &two, &one]).unwrap();
    assert_eq!(long.peak_live, one.peak_live.max(two.peak_live));
    // Everything is freed: each block costs two operations.
    assert_eq!(long.operations, 2 * long.blocks() as u64);
    for contender in [Contender::Torch, Contender::Gruyere(String::new())] {
        let run = sound(&long, &contender);
        assert!(run.peak_reserved >= sound(&one, &contender).peak_reserved.min(long.peak_live));
        assert!(run.peak_address >= run.peak_reserved && run.driver_calls() > 0);
    }
}

/// Running out on a small device is a result (the operation), not a fault.
#[test]
fn running_out_of_memory_is_observed() {
    let trace = bundled("moe");
    let capacity = trace.peak_live / 2;
    for contender in all() {
        let run =
            observe(&trace, &contender, Setup::timeline(capacity, Charge::DriverCalls)).unwrap();
        assert!(!run.completed() && run.peak_reserved <= capacity, "{}", contender.name());
        assert_eq!(run.faults, Vec::<String>::new(), "{}", contender.name());
    }
}
