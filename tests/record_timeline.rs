//! The record's timeline tells how a run went: what was held, what was live, which step it was,
//! whatever the settings.

mod common;

use common::{DEFAULT, GIB, MIB, Rig};
use gruyere::record::reader::Cursor;
use gruyere::record::timeline::Sample;
use gruyere::record::{DeviceGauge, EventKind, Reader};

fn timeline(rig: &Rig) -> Vec<Sample> {
    let reader = Reader::own(rig.heap.record()).expect("the record is on");
    let table = reader.timeline(0);
    assert_eq!(table.torn, 0);
    assert!(table.entries.iter().all(|entry| entry.realtime_nanoseconds > 0));
    table.entries.into_iter().map(|entry| entry.sample).collect()
}

#[test]
fn peaks_between_looks_and_what_was_held_are_on_it() {
    for conf in ["", ",auto_trim:off", ",backing:pool", ",backing:fixed"] {
        let rig = Rig::bare(4 * GIB, &format!("record:on,headroom:0{conf}"));
        rig.heap.announce_hooks(3);
        let weights = rig.malloc(64 * MIB, DEFAULT);
        let mut highest = 0;
        for step in 1..=20 {
            let size = (50 + step * 10) * MIB;
            // Comes and goes between two looks, so only its peak can tell of it.
            let block = rig.malloc(size, DEFAULT);
            assert!(rig.heap.free(block));
            highest = highest.max(64 * MIB + size);
            for _ in 0..100 {
                let block = rig.malloc(2 * MIB, DEFAULT);
                assert!(rig.heap.free(block));
            }
            rig.heap.mark_step();
        }
        let samples = timeline(&rig);
        let stats = rig.heap.stats(0).unwrap();
        let most = |field: fn(&Sample) -> u64| samples.iter().map(field).max().unwrap();
        assert_eq!(most(|sample| sample.in_use_high), highest, "{conf}");
        assert_eq!(most(|sample| sample.reserved_high), stats.reserved_peak, "{conf}");
        let last = samples.last().unwrap();
        // A sample that reaches into the next step is of the step with its peak.
        assert!((19..=20).contains(&last.step), "{conf}: {last:?}");
        assert!((64 * MIB..=highest).contains(&last.live_high), "{conf}: {last:?}");
        assert!(samples.iter().all(|sample| sample.live_low <= sample.live_high), "{conf}");
        assert!(samples.is_sorted_by_key(|sample| sample.ticks), "{conf}");
        assert!(rig.heap.free(weights));
    }
}

#[test]
fn frees_alone_are_noted_without_a_step_mark() {
    let rig = Rig::bare(4 * GIB, "record:on,headroom:0,auto_trim:off");
    rig.heap.announce_hooks(3);
    let big = rig.malloc(1 << 30, DEFAULT);
    assert!(rig.heap.free(big));
    for _ in 0..600 {
        let block = rig.malloc(2 * MIB, DEFAULT);
        assert!(rig.heap.free(block));
    }
    let samples = timeline(&rig);
    assert_eq!(samples.iter().map(|sample| sample.in_use_high).max(), Some(1 << 30));
}

#[test]
fn memory_that_came_and_pages_that_moved_are_told_apart() {
    let rig = Rig::bare(GIB, "record:on,headroom:0,backing:stitch");
    rig.heap.announce_hooks(3);
    let blocks: Vec<u64> = (0..16).map(|_| rig.malloc(48 * MIB, DEFAULT)).collect();
    for block in blocks.iter().step_by(2) {
        assert!(rig.heap.free(*block));
    }
    let reserved = rig.heap.stats(0).unwrap().reserved;
    // More than any hole has, and more than the device has left.
    let row = rig.malloc(300 * MIB, DEFAULT);
    let (reader, stats) = (Reader::own(rig.heap.record()).unwrap(), rig.heap.stats(0).unwrap());
    let device = reader.device(0).unwrap();
    let events = reader.events(&mut Cursor::default()).entries;
    let bytes_of = |kind| {
        events.iter().filter(|event| event.kind == kind).map(|event| event.size).sum::<u64>()
    };
    let moved = bytes_of(EventKind::Move);
    assert!(moved >= 300 * MIB - (GIB - reserved), "{moved}");
    assert_eq!(
        (device.gauge(DeviceGauge::MovedBytes), device.gauge(DeviceGauge::Moves)),
        (moved, 1)
    );
    assert_eq!(bytes_of(EventKind::Grow) - bytes_of(EventKind::Release), stats.reserved);
    assert!(rig.heap.free(row));
}
