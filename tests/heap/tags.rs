//! Tags of lifetimes are advice: a wrong one costs space, never correctness.

use crate::common::{DEFAULT, MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::heap::{Lifetime, lifetime};
use gruyere_phantom::as_program;

/// A program's tags of weights, activations and workspaces.
type Tags = [Lifetime; 3];

const RIGHT: Tags = [Lifetime::Persistent, Lifetime::Step, Lifetime::Transient];
const WRONG: [Tags; 3] = [
    [Lifetime::Transient, Lifetime::Persistent, Lifetime::Step],
    [Lifetime::Step, Lifetime::Transient, Lifetime::Persistent],
    [Lifetime::Transient, Lifetime::Transient, Lifetime::Transient],
];

/// Trains with `tags` under the oracle; returns the peak of held memory. Weights live to the end,
/// activations to the end of their step, and a side stream uses every eighth of them.
fn train(tags: Tags, conf: &str) -> u64 {
    let rig = Rig::new(conf);
    let side = rig.stream();
    let mut next = 0;
    let mut malloc = |lifetime: Lifetime, size: u64, stream: StreamHandle| {
        assert!(lifetime::push(lifetime));
        let address = rig.malloc(size, stream);
        assert!(lifetime::pop());
        next += 1;
        rig.gpu.block_malloc(next, address, size, 0, stream.0);
        as_program(|| rig.gpu.launch(0, stream.0, 1, 20_000)).unwrap();
        address
    };
    let free = |address: u64| {
        rig.gpu.block_free(address);
        assert!(rig.heap.free(address));
    };
    let weights: Vec<u64> = (1..24).map(|n| malloc(tags[0], n * 300_000, DEFAULT)).collect();
    for _ in 0..6 {
        let mut activations = Vec::new();
        for layer in 1..40u64 {
            let activation =
                malloc(tags[1], layer * 200_000, if layer % 5 == 0 { side } else { DEFAULT });
            if layer % 8 == 0 {
                rig.gpu.block_record_stream(activation, 0, side.0);
                assert!(rig.heap.record_stream(activation, side));
            }
            activations.push(activation);
            free(malloc(tags[2], layer * 70_000, DEFAULT));
        }
        activations.into_iter().rev().for_each(free);
        rig.heap.mark_step();
        rig.heap.validate().unwrap();
    }
    let peak = rig.heap.stats(0).unwrap().reserved_peak;
    weights.into_iter().for_each(free);
    rig.heap.trim();
    rig.heap.trim();
    assert_eq!((rig.heap.stats(0).unwrap().live, rig.gpu.books(0).physical), (0, 0));
    assert_eq!(rig.gpu.faults(), []);
    rig.check();
    peak
}

#[test]
fn wrong_tags_break_nothing_and_lose_nothing() {
    for conf in ["backing:stitch", "backing:pool"] {
        let right = train(RIGHT, conf);
        for tags in WRONG {
            let wrong = train(tags, conf);
            assert!(
                wrong <= right * 2,
                "{conf} {tags:?}: {wrong} B are held at most, {right} with the right tags"
            );
        }
    }
}

#[test]
fn a_block_that_outlives_its_tag_keeps_its_memory() {
    let rig = Rig::new("");
    assert!(lifetime::push(Lifetime::Transient));
    let kept = rig.malloc(5 * MIB, DEFAULT);
    assert!(lifetime::pop());
    for tag in Lifetime::ALL {
        assert!(lifetime::push(tag));
        let others: Vec<u64> = (0..40).map(|_| rig.malloc(5 * MIB, DEFAULT)).collect();
        assert!(others.iter().all(|&other| other.abs_diff(kept) >= 5 * MIB), "{tag:?}");
        others.into_iter().for_each(|other| assert!(rig.heap.free(other)));
        assert!(lifetime::pop());
        rig.heap.mark_step();
        rig.heap.trim();
        assert!(rig.gpu.is_backed(kept, 5 * MIB));
    }
    assert!(rig.heap.free(kept));
    rig.check();
}
