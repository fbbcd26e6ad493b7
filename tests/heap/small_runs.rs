//! Small blocks, slots of slabs and runs: all sizes share a page.

use crate::common::{DEFAULT, GIB, MIB, Rig};
use gruyere::heap::{Lifetime, PAGE};
use gruyere_phantom::{CallKind, Config as GpuConfig, Injection, as_program};
use proptest::prelude::*;

/// Calls that fail.
const FAILING: [CallKind; 8] = [
    CallKind::AddressReserve,
    CallKind::Create,
    CallKind::Map,
    CallKind::SetAccess,
    CallKind::Unmap,
    CallKind::Alloc,
    CallKind::PoolAlloc,
    CallKind::Free,
];

const KIB: u64 = 1 << 10;

/// Sizes of many classes that fit into a page together.
const SIZES: [u64; 12] =
    [1, 512, 3000, 7_000, 20_000, 43_000, 63_000, 90_000, 124_000, 219_000, 285_000, 641_000];

fn small_device(conf: &str) -> Rig {
    let rig = Rig::bare(4 * GIB, conf);
    rig.heap.announce_hooks(3);
    rig
}

#[test]
fn small_blocks_up_to_16_kib_have_slabs_and_longer_ones_are_runs() {
    let rig = small_device("");
    let slabs = || rig.heap.stats(0).unwrap().slab_bytes;
    let runs: Vec<u64> = (0..9).map(|_| rig.malloc(16 * KIB + 1, DEFAULT)).collect();
    assert_eq!(slabs(), 0);
    let slots: Vec<u64> = (0..9).map(|_| rig.malloc(16 * KIB, DEFAULT)).collect();
    assert_eq!(slabs(), 2 * 128 * KIB, "eight slots a slab");
    rig.check_order();
    runs.into_iter().chain(slots).for_each(|block| assert!(rig.heap.free(block)));
    rig.finish();
}

#[test]
fn small_blocks_of_all_sizes_share_a_page() {
    let rig = small_device("");
    let blocks: Vec<u64> = SIZES.iter().map(|&size| rig.malloc(size, DEFAULT)).collect();
    assert_eq!(rig.gpu.books(0).physical, PAGE);
    assert!(blocks.iter().all(|block| block / PAGE == blocks[0] / PAGE), "{blocks:x?}");
    rig.check_order();
    // The freed one makes room for others, of any size.
    assert!(rig.heap.free(blocks[11]));
    let others: Vec<u64> = (0..5).map(|n| rig.malloc(100_000 + n, DEFAULT)).collect();
    assert_eq!(rig.gpu.books(0).physical, PAGE);
    rig.check_order();
    for block in others.into_iter().chain(blocks[..11].iter().copied()) {
        assert!(rig.heap.free(block));
    }
    rig.finish();
}

#[test]
fn what_starts_no_block_of_a_shared_page_is_refused() {
    let rig = small_device("");
    let blocks: Vec<u64> = SIZES.iter().map(|&size| rig.malloc(size, DEFAULT)).collect();
    for &block in &blocks {
        assert!(!rig.heap.free(block + 512 * 3000));
        assert!(!rig.heap.free(block + 1));
        assert!(!rig.heap.record_stream(block + 256, DEFAULT));
        assert!(rig.heap.free(block));
        assert!(!rig.heap.free(block), "freed twice");
        rig.check();
    }
    rig.finish();
}

#[test]
fn blocks_of_a_shared_page_wait_for_streams_and_keep_their_tags_as_others_do() {
    let rig = small_device("");
    let other = rig.stream();
    let blocks: Vec<u64> = SIZES.iter().map(|&size| rig.malloc(size, DEFAULT)).collect();
    let used = blocks[6];
    rig.gpu.block_malloc(1, used, SIZES[6], 0, DEFAULT.0);
    rig.gpu.block_record_stream(used, 0, other.0);
    assert!(rig.heap.record_stream(used, other));
    assert!(rig.heap.tag(used, Lifetime::Persistent));
    as_program(|| rig.gpu.launch(0, other.0, 1, 1_000_000_000)).unwrap();
    rig.gpu.block_free(used);
    assert!(rig.heap.free(used));
    let next = rig.malloc(SIZES[6], DEFAULT);
    assert_ne!(next, used, "the other stream still uses it");
    rig.check_order();
    for block in blocks.into_iter().filter(|&block| block != used).chain([next]) {
        assert!(rig.heap.free(block));
    }
    rig.finish();
}

#[test]
fn torch_is_told_of_the_small_blocks_of_a_shared_page_as_small_ones() {
    let rig = small_device("record:on");
    let blocks: Vec<u64> = SIZES.iter().map(|&size| rig.malloc(size, DEFAULT)).collect();
    let stats = rig.heap.torch_stats(0).unwrap();
    let small = gruyere::record::peaks::SMALL;
    assert_eq!(stats.blocks.active[small].current, SIZES.len() as u64);
    let rounded: u64 = SIZES.iter().map(|size| size.next_multiple_of(512)).sum();
    assert_eq!(stats.blocks.active_bytes[small].current, rounded);
    // The first four are in three slabs.
    let slots: u64 = SIZES[..4].iter().map(|size| size.next_multiple_of(512)).sum();
    let held = rounded - slots + 3 * 64 * KIB;
    assert_eq!(stats.held.reserved_bytes[small].current, held);
    assert_eq!(stats.held.reserved_bytes[gruyere::record::peaks::LARGE].current, PAGE - held);
    rig.check_order();
    blocks.into_iter().for_each(|block| assert!(rig.heap.free(block)));
    assert_eq!(rig.heap.torch_stats(0).unwrap().blocks.active[small].current, 0);
    rig.finish();
}

#[test]
fn blocks_of_the_shared_page_that_wait_for_streams_take_no_slot_of_a_slab() {
    let rig = small_device("record:on");
    let side = rig.stream();
    let runs: Vec<u64> = (0..3).map(|_| rig.malloc(100_000, DEFAULT)).collect();
    let slots: Vec<u64> = (0..6).map(|_| rig.malloc(9_000, DEFAULT)).collect();
    assert!(rig.heap.stats(0).unwrap().slab_bytes > 0);
    let inactive = || {
        rig.heap.torch_stats(0).unwrap().held.inactive_split[gruyere::record::peaks::SMALL].current
    };
    let before = inactive();
    assert!(before > 0);
    as_program(|| rig.gpu.launch(0, side.0, 1, 1_000_000_000)).unwrap();
    for block in runs {
        assert!(rig.heap.record_stream(block, side));
        assert!(rig.heap.free(block));
        assert_eq!(inactive(), before);
        rig.check();
    }
    as_program(|| rig.gpu.stream_synchronize(0, side.0)).unwrap();
    for block in slots {
        assert!(rig.heap.free(block));
    }
    rig.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 900, ..ProptestConfig::default() })]

    #[test]
    fn small_programs_never_share_a_byte_and_lose_nothing_when_driver_calls_fail(
        actions in prop::collection::vec(
            (any::<bool>(), 0..4096usize, 1..700_000u64, 0..3usize), 1..200
        ),
        // Small blocks mostly, and a large one.
        large in prop_oneof![3 => Just(0u64), 1 => MIB..8 * MIB],
        nth in prop_oneof![Just(u64::MAX), 1..30u64],
        conf in 0..3usize,
    ) {
        let conf = ["backing:fixed,headroom:0", "backing:pool,headroom:0", "headroom:0"][conf];
        let rig = Rig::over(GpuConfig::new(40 * MIB), conf);
        rig.heap.announce_hooks(3);
        let streams = [DEFAULT, rig.stream(), rig.stream()];
        for kind in FAILING {
            if nth != u64::MAX {
                rig.gpu.inject(Injection { kind: Some(kind), nth, code: 999, from_then_on: false });
            }
        }
        let (mut live, mut next): (Vec<u64>, u64) = (Vec::new(), 1);
        for (turn, &(grows, which, size, stream)) in actions.iter().enumerate() {
            let stream = streams[stream];
            // Most requests are small: many of them in a page.
            let size = if turn == 60
                && large > 0 { large } else if which % 3 == 0 { size } else { size / 90 + 1 };
            if grows || live.is_empty() {
                if let Ok(address) = rig.heap.malloc(size, 0, stream) {
                    rig.gpu.block_malloc(next, address, size, 0, stream.0);
                    as_program(|| rig.gpu.launch(0, stream.0, 1, 20_000)).unwrap();
                    next += 1;
                    live.push(address);
                }
            } else if which % 11 == 0 {
                let address = live[which % live.len()];
                rig.gpu.block_record_stream(address, 0, stream.0);
                assert!(rig.heap.record_stream(address, stream));
            } else {
                let address = live.swap_remove(which % live.len());
                rig.gpu.block_free(address);
                assert!(rig.heap.free(address));
            }
            rig.heap.validate().unwrap();
        }
        rig.check_order();
        rig.gpu.clear_injections();
        for address in live {
            rig.gpu.block_free(address);
            assert!(rig.heap.free(address));
        }
        rig.finish();
    }
}
