//! The gauges of fragmentation are correct: a request of the size that they call satisfiable
//! succeeds, a larger one fails.

use crate::common::{DEFAULT, GIB, MIB, Rig};
use gruyere::heap::Error;
use gruyere::record::watch::{Alarm, Facts, Forecast};
use gruyere::record::{DeviceGauge, Reader, missing_share};
use gruyere_phantom::as_program;
use std::time::{Duration, Instant};

const PAGE: u64 = 2 * MIB;

/// A device of 4 GiB with live blocks and holes between them, and all work done; the live blocks.
fn with_holes(conf: &str, seed: u64) -> (Rig, Vec<u64>) {
    let rig = Rig::bare(4 * GIB, &format!("{conf},headroom:0,record:on"));
    rig.heap.announce_hooks(3);
    let streams = [DEFAULT, rig.stream()];
    let mut random = seed;
    let mut pick = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % below
    };
    let mut live = Vec::new();
    for _ in 0..120 {
        let size = MIB + 512 * (1 + pick(40_000));
        live.push(rig.malloc(size, streams[pick(2) as usize]));
        if pick(3) == 0 {
            let at = pick(live.len() as u64) as usize;
            assert!(rig.heap.free(live.swap_remove(at)));
        }
    }
    for _ in 0..40 {
        let at = pick(live.len() as u64) as usize;
        assert!(rig.heap.free(live.swap_remove(at)));
    }
    as_program(|| rig.gpu.device_synchronize(0)).unwrap();
    rig.heap.mark_step();
    (rig, live)
}

fn is_out_of_memory(rig: &Rig, size: u64) -> bool {
    matches!(rig.heap.malloc(size, 0, DEFAULT), Err(Error::OutOfMemory(_)))
}

#[test]
fn the_largest_request_fits_without_growth_and_more_than_is_free_does_not() {
    for seed in 1..=20 {
        let (rig, _live) = with_holes("backing:stitch", seed);
        let stats = rig.heap.stats(0).unwrap();
        assert!(
            stats.largest_request > stats.largest_free,
            "seed {seed}: pages in several holes count"
        );
        // Nothing more may be taken.
        rig.heap.set_memory_fraction(stats.reserved as f64 / stats.total_memory as f64, 0).unwrap();
        let address = rig.malloc(stats.largest_request, DEFAULT);
        // Whole chunks may have gone back and been taken again in one piece.
        assert!(rig.heap.stats(0).unwrap().reserved <= stats.reserved, "seed {seed}");
        assert!(rig.heap.free(address));
        // The gauge is a lower bound; the sum of free memory is an upper bound.
        let free = stats.reserved - stats.live;
        assert!(stats.largest_request <= free, "seed {seed}");
        assert!(is_out_of_memory(&rig, free + 2 * PAGE), "seed {seed}");
        rig.check();
    }
}

#[test]
fn the_largest_request_with_growth_fits_too() {
    for conf in ["backing:stitch", "backing:fixed"] {
        let (rig, _live) = with_holes(conf, 7);
        let stats = rig.heap.stats(0).unwrap();
        assert!(stats.largest_growing > stats.largest_request);
        let address = rig.malloc(stats.largest_growing, DEFAULT);
        assert!(rig.heap.free(address));
        assert!(is_out_of_memory(&rig, stats.total_memory - stats.live + 2 * PAGE));
        rig.check();
    }
}

#[test]
fn where_pages_cannot_move_only_a_hole_in_one_piece_counts() {
    for conf in ["backing:pool", "backing:stitch,share:off"] {
        let (rig, _live) = with_holes(conf, 3);
        let stats = rig.heap.stats(0).unwrap();
        assert_eq!(stats.largest_request, stats.largest_free, "{conf}");
    }
}

#[test]
fn the_three_fragmentations_are_what_they_are_defined_as() {
    let rig = Rig::new("record:on");
    let blocks: Vec<u64> = (0..8).map(|_| rig.malloc(10 * MIB - 300, DEFAULT)).collect();
    blocks.iter().step_by(2).for_each(|&address| assert!(rig.heap.free(address)));
    let stats = rig.heap.stats(0).unwrap();
    assert_eq!((stats.live, stats.requested), (40 * MIB, 40 * MIB - 1200));
    assert_eq!(stats.held().unused(), 1.0 - stats.live as f64 / stats.reserved as f64);
    assert_eq!(stats.held().fragmentation(), stats.lost as f64 / stats.reserved as f64);
    assert_eq!(stats.internal_fragmentation(), 1200.0 / (40 * MIB) as f64);
    let free = stats.reserved - stats.live;
    assert_eq!(stats.external_fragmentation(), missing_share(stats.largest_request, free));
    // The record reports the same to other processes.
    let snapshot = &Reader::own(rig.heap.record()).unwrap().device_snapshots()[0];
    assert_eq!(snapshot.held(), stats.held());
    assert_eq!(snapshot.external_fragmentation(), stats.external_fragmentation());
    assert_eq!(snapshot.internal_fragmentation(), stats.internal_fragmentation());
    assert_eq!(snapshot.gauge(DeviceGauge::LargestRequest), stats.largest_request);
    assert_eq!(snapshot.gauge(DeviceGauge::LargestGrowing), stats.largest_growing);
}

#[test]
fn holes_of_whole_pages_are_no_external_fragmentation_where_pages_move() {
    let external = |conf: &str| {
        let rig = Rig::new(conf);
        // Every other of the blocks of 32 MiB, each whole pages, is a hole.
        let blocks: Vec<u64> = (0..16).map(|_| rig.malloc(32 * MIB, DEFAULT)).collect();
        blocks.iter().step_by(2).for_each(|&address| assert!(rig.heap.free(address)));
        rig.heap.stats(0).unwrap().external_fragmentation()
    };
    assert_eq!(external("backing:stitch"), 0.0);
    assert!(external("backing:fixed") > 0.5);
}

#[test]
fn the_99th_percentile_request_is_told_beside_what_fits() {
    let rig = Rig::new("record:on");
    assert_eq!(rig.heap.stats(0).unwrap().request_p99, 0);
    let ask = |size: u64, times: u32| {
        (0..times).for_each(|_| assert!(rig.heap.free(rig.malloc(size, DEFAULT))));
        rig.heap.stats(0).unwrap().request_p99
    };
    let is_near = |value: u64, size: u64| value.abs_diff(size) * 100 <= size * 7;
    assert!(is_near(ask(4096, 995), 4096));
    assert!(is_near(ask(8 * MIB, 4), 4096), "4 in 999 are the largest in a hundred of nobody");
    assert!(is_near(ask(8 * MIB, 20), 8 * MIB));
    let snapshot = &Reader::own(rig.heap.record()).unwrap().device_snapshots()[0];
    let fits = snapshot.p99_fits().unwrap();
    let expected =
        rig.heap.stats(0).unwrap().largest_growing as f64 / snapshot.request_p99() as f64;
    assert!((fits - expected).abs() < 1e-9 && fits > 1000.0, "{fits}");
}

#[test]
fn what_a_program_that_loads_its_weights_and_rests_could_still_have_is_on_the_record() {
    let size_of = [3 * MIB + 512, 4096, 700 * 1024];
    for conf in ["backing:stitch", "backing:fixed", "backing:pool"] {
        let rig = Rig::new(&format!("{conf},record:on"));
        let _weights: Vec<u64> = (0..90).map(|i| rig.malloc(size_of[i % 3], DEFAULT)).collect();
        let snapshot = &Reader::own(rig.heap.record()).unwrap().device_snapshots()[0];
        let growing = snapshot.gauge(DeviceGauge::LargestGrowing);
        let stats = rig.heap.stats(0).unwrap();
        let error = growing.abs_diff(stats.largest_growing);
        assert!(error <= stats.reserved / 8, "{conf}: {growing} for {}", stats.largest_growing);
    }
}

#[test]
fn the_gauges_are_written_without_any_mark() {
    let rig = Rig::new("record:on");
    let largest = || {
        Reader::own(rig.heap.record()).unwrap().device_snapshots()[0]
            .gauge(DeviceGauge::LargestRequest)
    };
    (0..600).for_each(|_| assert!(rig.heap.free(rig.malloc(5 * MIB, DEFAULT))));
    assert!(largest() > 0);
}

#[test]
fn a_healthy_program_is_not_fragmented_between_its_steps() {
    let rig = Rig::bare(8 * GIB, "record:on,headroom:0,alert:fragmentation>30%=log");
    rig.heap.announce_hooks(3);
    let _weights: Vec<u64> = (0..64).map(|_| rig.malloc(16 * MIB, DEFAULT)).collect();
    for _ in 0..4 {
        // A step's memory lies idle until the next step.
        let step: Vec<u64> = (0..64).map(|_| rig.malloc(16 * MIB, DEFAULT)).collect();
        step.iter().for_each(|&block| assert!(rig.heap.free(block)));
        rig.heap.mark_step();
        let device = &Reader::own(rig.heap.record()).unwrap().device_snapshots()[0];
        let held = device.held();
        assert!(held.unused() > 0.45, "torn in two by the field's ratio: {held:?}");
        assert!(held.fragmentation() < 0.001, "{held:?}");
        assert!(held.idle() >= GIB, "{held:?}");
        // Within a step, the gauges are those of its beginning.
        let more = rig.malloc(512 * MIB, DEFAULT);
        let within = &Reader::own(rig.heap.record()).unwrap().device_snapshots()[0];
        assert_eq!(within.external_fragmentation(), device.external_fragmentation());
        assert!(rig.heap.free(more));
        let facts = Facts { device, rate: None, forecast: Forecast::Unknown };
        let mut alarm = Alarm::new("fragmentation>30%".parse().unwrap(), 0.0);
        assert!(alarm.look(0.0, &facts).is_none(), "the first documented alert");
    }
}

#[test]
fn the_hosts_lead_is_how_long_an_event_was_seen_unfinished_until_a_step_without_one_is_over() {
    const LEAST: Duration = Duration::from_millis(20);
    let rig = Rig::bare(4 * GIB, "record:on");
    rig.heap.announce_hooks(3);
    let other = rig.stream();
    let lead = || {
        let device = &Reader::own(rig.heap.record()).unwrap().device_snapshots()[0];
        Duration::from_nanos(device.gauge(DeviceGauge::HostAhead))
    };
    let begin = Instant::now();
    let address = rig.malloc(MIB, other);
    as_program(|| rig.gpu.launch(0, other.0, 1, 1_000_000_000)).unwrap();
    assert!(rig.heap.free(address));
    // The free records an event behind itself; each end of a step sees it unfinished.
    assert_eq!(lead(), Duration::ZERO);
    rig.heap.mark_step();
    assert!(lead() <= begin.elapsed(), "{:?}", lead());
    std::thread::sleep(LEAST);
    rig.heap.mark_step();
    assert!((LEAST..=begin.elapsed()).contains(&lead()), "{:?}", lead());

    as_program(|| rig.gpu.device_synchronize(0)).unwrap();
    assert!(lead() >= LEAST, "the step that is under way has the lead of the one before");
    rig.heap.mark_step();
    assert_eq!(lead(), Duration::ZERO);
}
