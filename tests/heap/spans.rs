//! Memory in spans (`backing:pool`, `backing:fixed`): their lengths, contents and release.

use crate::common::{DEFAULT, GIB, MIB, Rig};
use gruyere_phantom::{CallKind, Caller};

const SPANS: [&str; 2] = ["backing:pool,headroom:0", "backing:fixed,headroom:0"];

fn reserved(rig: &Rig) -> u64 {
    rig.heap.stats(0).unwrap().reserved
}

#[test]
fn on_a_small_device_a_span_is_as_long_as_it_must_be() {
    for conf in SPANS {
        let rig = Rig::bare(4 * GIB, conf);
        let block = rig.malloc(12 * MIB, DEFAULT);
        assert_eq!(reserved(&rig), 12 * MIB, "{conf}");
        rig.heap.free(block);
        rig.finish();
    }
}

#[test]
fn near_the_end_of_a_large_device_spans_are_a_small_part_of_what_is_left() {
    for conf in SPANS {
        let rig = Rig::bare(64 * GIB, conf);
        // While all is free, a span has whole steps.
        let mut blocks = vec![rig.malloc(12 * MIB, DEFAULT)];
        assert_eq!(reserved(&rig), 32 * MIB, "{conf}");
        blocks.push(rig.malloc(62 * GIB, DEFAULT));
        let before = reserved(&rig);
        blocks.push(rig.malloc(24 * MIB, DEFAULT));
        assert!(
            reserved(&rig) - before <= 24 * MIB,
            "{conf}: {} MiB",
            (reserved(&rig) - before) / MIB
        );
        blocks.into_iter().for_each(|block| assert!(rig.heap.free(block)));
        rig.finish();
    }
}

/// cuMemFree waits for the device: a heap of pools calls it only if the program would otherwise run
/// out of memory.
#[test]
fn what_a_heap_of_pools_took_beside_them_goes_back_once_memory_is_exhausted() {
    let rig = Rig::bare(GIB, SPANS[0]);
    let frees = || rig.gpu.counts(Caller::Allocator).of(CallKind::Free);
    let block = rig.malloc(100 * MIB, DEFAULT);
    rig.heap.free(block);
    // A new peak, and room for it beside what lies idle.
    let other = rig.malloc(200 * MIB, DEFAULT);
    assert_eq!((frees(), reserved(&rig)), (0, 300 * MIB));
    let rest = rig.malloc(800 * MIB, DEFAULT);
    assert_eq!((frees(), reserved(&rig)), (1, 1000 * MIB));
    assert!(rig.heap.free(other) && rig.heap.free(rest));
    rig.finish();
}

/// Sizes lie apart there, and a reserve's span with a large block cannot be released.
#[test]
fn what_is_free_among_large_blocks_serves_small_ones_before_a_small_device_is_out_of_memory() {
    for conf in SPANS {
        let rig = Rig::bare(256 * MIB, &format!("{conf},reserve:auto=256MiB"));
        let large = rig.malloc(100 * MIB, DEFAULT);
        let others = [512, 100_000, 5 * MIB].map(|size| rig.malloc(size, DEFAULT));
        rig.check();
        assert!(others.into_iter().chain([large]).all(|block| rig.heap.free(block)));
        rig.finish();
    }
}
