//! The reclaim ladder accounts for what it does: calls, bytes and host time of each rung, in the
//! heap and on the record.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB, Rig};
use gruyere::heap::rungs::Ladder;
use gruyere::heap::{Error, Stats};
use gruyere::record::Reader;
use gruyere::record::device_gauge::{DeviceGauge, RUNGS, Rung};
use gruyere_phantom::as_program;

/// Runs a device of 1 GiB out of memory: half of it is freed, but a kernel of another stream still
/// uses that half.
fn run_out(rig: &Rig) -> Ladder {
    let side = rig.stream();
    let (kept, busy) = (rig.malloc(400 * MIB, DEFAULT), rig.malloc(400 * MIB, side));
    as_program(|| rig.gpu.launch(0, side.0, 1, 5_000_000)).unwrap();
    assert!(rig.heap.free(busy));
    let waited = rig.malloc(450 * MIB, DEFAULT);
    let Err(Error::OutOfMemory(report)) = rig.heap.malloc(700 * MIB, 0, DEFAULT) else {
        panic!("served twice over")
    };
    assert!(rig.heap.free(kept) && rig.heap.free(waited));
    report.ladder
}

#[test]
fn each_rung_that_was_tried_has_its_calls_and_host_time_on_the_record() {
    let rig = Rig::bare(GIB, "headroom:0,record:on");
    rig.heap.announce_hooks(3);
    let ladder = run_out(&rig);
    // The ladder queries the events, searches the slabs, releases memory, waits for the device, and
    // tries the headroom.
    for number in [0, 1, 2, 4, 5] {
        let rung = ladder.rungs[number];
        assert!(rung.calls > 0 && rung.nanoseconds > 0, "rung {number}: {rung:?}");
    }
    let snapshot = &Reader::own(rig.heap.record()).unwrap().device_snapshots()[0];
    for (number, (rung, gauges)) in ladder.rungs.iter().zip(RUNGS.map(Rung::gauges)).enumerate() {
        let expected = [rung.calls, rung.bytes, rung.nanoseconds / 1000];
        assert_eq!(gauges.map(|gauge| snapshot.gauge(gauge)), expected, "rung {number}");
    }
}

#[test]
fn the_dump_tells_what_was_tried_and_the_message_does_not() {
    let rig = Rig::bare(GIB, "headroom:0");
    rig.heap.announce_hooks(3);
    run_out(&rig);
    let error = rig.heap.malloc(2 * GIB, 0, DEFAULT).unwrap_err().to_string();
    assert!(!error.contains("ask events") && !error.contains("synchronise"), "{error}");
    let dump = rig.heap.dump();
    assert!(dump.contains("reclaim: synchronise"), "{dump}");
}

#[test]
fn a_request_that_fits_tries_no_rung() {
    let rig = Rig::new("record:on");
    let address = rig.malloc(5 * MIB, DEFAULT);
    assert!(rig.heap.free(address));
    let before = Reader::own(rig.heap.record()).unwrap().device_snapshots()[0].clone();
    assert!(rig.heap.free(rig.malloc(5 * MIB, DEFAULT)));
    let after = Reader::own(rig.heap.record()).unwrap().device_snapshots()[0].clone();
    for gauges in RUNGS.map(Rung::gauges) {
        assert_eq!(gauges.map(|gauge| after.gauge(gauge)), gauges.map(|gauge| before.gauge(gauge)));
    }
}

#[test]
fn a_headroom_that_had_to_be_touched_is_open_until_the_next_trim() {
    let rig = Rig::bare(GIB, "headroom:256MiB,slack:0B,record:on");
    rig.heap.announce_hooks(3);
    let ladder = || {
        Reader::own(rig.heap.record()).unwrap().device_snapshots()[0].gauge(DeviceGauge::Rung5Calls)
    };
    let mut blocks = vec![rig.malloc(760 * MIB, DEFAULT)];
    assert_eq!(ladder(), 0);
    // The ladder is tried once, and not for each of the requests that follow.
    blocks.extend((0..10).map(|_| rig.malloc(20 * MIB, DEFAULT)));
    assert_eq!(ladder(), 1);
    assert!(rig.gpu.books(0).physical > 900 * MIB);
    rig.check();
    blocks.into_iter().for_each(|block| assert!(rig.heap.free(block)));
    rig.heap.trim();
    // It is kept free again: what fits beside it does not touch it.
    let block = rig.malloc(700 * MIB, DEFAULT);
    assert_eq!(ladder(), 1);
    let other = rig.malloc(100 * MIB, DEFAULT);
    assert_eq!(ladder(), 2);
    assert!(rig.heap.free(block) && rig.heap.free(other));
    rig.finish();
}

#[test]
fn what_a_refused_request_could_not_use_stays_with_others() {
    for conf in BACKINGS {
        let rig = Rig::bare(8 * GIB, conf);
        let other = Rig::on(&rig.gpu, "backing:passthrough");
        let (theirs, ours) = (other.malloc(5 * GIB, DEFAULT), rig.malloc(GIB, DEFAULT));
        let (before, free) = (rig.heap.stats(0).unwrap(), rig.gpu.books(0).physical);
        for asked in [7 * GIB / 2, 6 * GIB, 2 * GIB + 2 * MIB] {
            assert!(rig.heap.malloc(asked, 0, DEFAULT).is_err(), "{conf}");
            let after = rig.heap.stats(0).unwrap();
            let held = |stats: &Stats| (stats.reserved, stats.reserved_peak);
            assert_eq!(held(&after), held(&before), "{conf}, {asked} B");
            assert_eq!(rig.gpu.books(0).physical, free, "{conf}, {asked} B");
        }
        // All of the rest is there for either.
        let more = other.malloc(2 * GIB - 64 * MIB, DEFAULT);
        assert!(other.heap.free(more));
        let more = rig.malloc(2 * GIB - 64 * MIB, DEFAULT);
        assert!(rig.heap.free(more) && rig.heap.free(ours) && other.heap.free(theirs));
        rig.check();
    }
}
