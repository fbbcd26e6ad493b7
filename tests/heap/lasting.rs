//! Lasting and passing streams: when the heap may use a stream's handle, and the fate of memory
//! freed on a stream that it may not use.
//!
//! In all tests the simulator knows the streams that the program vouches for, and notes a call on
//! any other as a misuse.

use crate::common::{GIB, MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::heap::MAX_STREAMS;
use gruyere_phantom::{
    CallKind, Caller, CaptureMode, CaptureStatus, Config as GpuConfig, as_program, vouching,
};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

const ALL_STREAMS: StreamHandle = StreamHandle::ALL_STREAMS;

fn over(config: GpuConfig, conf: &str) -> Rig {
    let rig = Rig::over(GpuConfig { vouched_streams: true, ..config }, conf);
    rig.heap.announce_hooks(3);
    rig
}

/// A rig with a driver without events behind a whole context.
fn old(memory: u64, conf: &str) -> Rig {
    over(GpuConfig { context_events: false, ..GpuConfig::new(memory) }, conf)
}

fn new(memory: u64, conf: &str) -> Rig {
    over(GpuConfig::new(memory), conf)
}

fn count(rig: &Rig, kind: CallKind) -> u64 {
    rig.gpu.counts(Caller::Allocator).of(kind)
}

/// A block on `stream`, work of `nanoseconds` on it, and its free.
fn use_and_free(rig: &Rig, bytes: u64, stream: StreamHandle, nanoseconds: u64) -> u64 {
    let address = rig.malloc(bytes, stream);
    as_program(|| rig.gpu.launch(0, stream.0, 1, nanoseconds)).unwrap();
    assert!(rig.heap.free(address));
    address
}

#[test]
fn what_a_passing_stream_has_freed_goes_to_others_once_its_next_call_has_recorded_an_event() {
    let rig = old(16 * GIB, "");
    let (passing, other) = (rig.passing_stream(), rig.stream());
    let freed = use_and_free(&rig, 100 * MIB, passing, 1000);
    rig.gpu.host_spend(1_000_000);
    assert_ne!(use_and_free(&rig, 100 * MIB, other, 1000), freed, "nobody could have known");
    let recorded = count(&rig, CallKind::EventRecord);
    // Any call that names it: here one for another size.
    rig.malloc(600, passing);
    assert_eq!(count(&rig, CallKind::EventRecord), recorded + 1);
    rig.gpu.host_spend(1_000_000);
    let both = [100, 90].map(|size| rig.malloc(size * MIB, other));
    assert!((freed..freed + 100 * MIB).contains(&both[1]), "{freed:#x} is not among {both:#x?}");
    rig.check();
}

#[test]
fn calls_that_name_a_passing_stream_record_one_event_for_each_need_of_memory_and_batch_of_frees() {
    let rig = old(16 * GIB, "");
    let (passing, other) = (rig.passing_stream(), rig.stream());
    // A batch of frees is a 64th of it: 64 MiB.
    let held = rig.malloc(4 * GIB, other);
    let (mut needed, batches) = (0, 1000 * 3 / 64);
    for round in 0..1000u64 {
        use_and_free(&rig, 3 * MIB, passing, 1000);
        if round % 100 == 50 {
            // Larger each time, so that it fits nowhere.
            rig.malloc((40 + round) * MIB / 4, other);
            needed += 1;
        }
    }
    let recorded = count(&rig, CallKind::EventRecord);
    assert!(
        (1..=2 * (needed + batches)).contains(&recorded),
        "{recorded} events for {needed} that needed memory and {batches} batches"
    );
    assert!(rig.heap.free(held));
    rig.check();
}

#[test]
fn memory_of_a_stream_that_was_destroyed_without_a_word_comes_back_after_a_synchronisation() {
    for conf in ["backing:stitch", "backing:pool", "backing:fixed"] {
        let rig = old(16 * GIB, conf);
        let (passing, other) = (rig.passing_stream(), rig.stream());
        let freed = use_and_free(&rig, 100 * MIB, passing, 1_000_000);
        rig.destroy(passing);
        // Its handle now names another stream, unknown to the heap.
        assert_eq!(rig.passing_stream(), passing);
        assert_ne!(rig.malloc(100 * MIB, other), freed, "{conf}");
        let held = rig.gpu.books(0).physical;
        rig.heap.trim();
        assert!(rig.gpu.books(0).physical + 100 * MIB <= held, "{conf}");
        rig.check_order();
    }
}

#[test]
fn memory_of_a_stream_that_was_destroyed_without_a_word_comes_back_before_memory_runs_out() {
    for conf in ["backing:stitch", "backing:pool", "backing:fixed"] {
        let rig = old(256 * MIB, &format!("{conf},headroom:0"));
        let other = rig.stream();
        for _ in 0..10 {
            let passing = rig.passing_stream();
            use_and_free(&rig, 200 * MIB, passing, 1_000_000);
            rig.destroy(passing);
            use_and_free(&rig, 200 * MIB, other, 1000);
        }
        rig.check_order();
    }
}

#[test]
fn memory_of_streams_that_were_destroyed_without_a_word_comes_back_with_an_event_behind_all_work() {
    let rig = new(16 * GIB, "");
    let other = rig.stream();
    for _ in 0..100 {
        let passing = rig.passing_stream();
        let address = rig.malloc(30 * MIB, passing);
        rig.gpu.block_malloc(address, address, 30 * MIB, 0, passing.0);
        as_program(|| rig.gpu.launch(0, passing.0, 1, 1000)).unwrap();
        rig.gpu.block_free(address);
        assert!(rig.heap.free(address));
        rig.destroy(passing);
        use_and_free(&rig, 30 * MIB, other, 1000);
        rig.gpu.host_spend(1_000_000);
    }
    assert_eq!(count(&rig, CallKind::DeviceSynchronize), 0);
    let peak = rig.gpu.books(0).physical_peak;
    assert!(peak <= 200 * MIB, "{} MiB for two blocks of 30 at a time", peak / MIB);
    rig.check_order();
}

#[test]
fn a_stream_that_is_told_to_end_leaves_an_event_behind_its_frees() {
    for announced in [true, false] {
        let rig = old(16 * GIB, "");
        let other = rig.stream();
        let stream = if announced { rig.stream() } else { rig.passing_stream() };
        use_and_free(&rig, 512, stream, 1000);
        let freed = use_and_free(&rig, 100 * MIB, stream, 1000);
        use_and_free(&rig, 512, stream, 1000);
        rig.end(stream);
        rig.gpu.host_spend(1_000_000);
        assert_eq!(rig.malloc(100 * MIB, other), freed, "announced: {announced}");
        // Another stream has its handle now.
        assert_eq!(rig.passing_stream(), stream);
        rig.malloc(100 * MIB, stream);
        rig.malloc(100 * MIB, other);
        rig.check_order();
    }
}

#[test]
fn an_announced_stream_is_asked_whether_it_captures_and_nothing_else() {
    let rig = new(16 * GIB, "");
    let (lasting, passing) = (rig.stream(), rig.passing_stream());
    for (stream, ids) in [(lasting, 0), (passing, 100)] {
        use_and_free(&rig, 1000, stream, 1);
        let (asked, total) =
            (count(&rig, CallKind::StreamId), rig.gpu.counts(Caller::Allocator).total());
        for _ in 0..100 {
            use_and_free(&rig, 1000, stream, 1);
        }
        assert_eq!(count(&rig, CallKind::StreamId) - asked, ids);
        assert_eq!(rig.gpu.counts(Caller::Allocator).total() - total, 100 + ids);
    }
    rig.check();
}

#[test]
fn a_stream_that_is_announced_late_keeps_what_it_had() {
    let rig = new(16 * GIB, "");
    let stream = rig.passing_stream();
    let freed = use_and_free(&rig, 100 * MIB, stream, 1_000_000);
    rig.announce(stream);
    rig.announce(stream);
    assert_eq!(rig.malloc(100 * MIB, stream), freed);
    rig.check();
}

#[test]
fn a_stream_that_is_announced_by_a_handle_of_one_that_is_gone_gets_none_of_its_memory() {
    for capturing in [false, true] {
        let rig = new(16 * GIB, "");
        let old = rig.passing_stream();
        let freed = rig.malloc(100 * MIB, old);
        rig.gpu.block_malloc(1, freed, 100 * MIB, 0, old.0);
        as_program(|| rig.gpu.launch(0, old.0, 1, 1_000_000_000)).unwrap();
        rig.gpu.block_free(freed);
        assert!(rig.heap.free(freed));
        rig.destroy(old);
        let stream = rig.passing_stream();
        assert_eq!(stream, old);
        if capturing {
            // Its id is unavailable then.
            as_program(|| rig.gpu.begin_capture(0, stream.0, CaptureMode::Relaxed, None)).unwrap();
        }
        rig.announce(stream);
        if capturing {
            as_program(|| rig.gpu.end_capture(0, stream.0)).unwrap();
        }
        let address = rig.malloc(100 * MIB, stream);
        rig.gpu.block_malloc(2, address, 100 * MIB, 0, stream.0);
        as_program(|| rig.gpu.launch(0, stream.0, 1, 1000)).unwrap();
        assert_ne!(address, freed, "capturing: {capturing}");
        rig.check_order();
    }
}

#[test]
fn a_passing_stream_that_was_seen_in_a_capture_of_nobodys_is_taken_to_capture_until_it_is_seen_to_be_quiet()
 {
    let rig = new(GIB, "headroom:0");
    let (passing, other) = (rig.passing_stream(), rig.stream());
    as_program(|| rig.gpu.begin_capture(0, passing.0, CaptureMode::Relaxed, None)).unwrap();
    rig.malloc(3 * MIB, passing);
    let parked = rig.malloc(900 * MIB, other);
    assert!(rig.record_stream(parked, ALL_STREAMS));
    assert!(rig.heap.free(parked));
    assert!(
        rig.heap.malloc(900 * MIB, 0, other).is_err(),
        "a synchronisation would break the capture"
    );
    rig.heap.trim();
    assert_eq!(
        count(&rig, CallKind::DeviceSynchronize) + count(&rig, CallKind::ContextEventRecord),
        0
    );
    let status = as_program(|| rig.gpu.capture_status(0, passing.0)).unwrap();
    assert!(matches!(status, CaptureStatus::Active(_)), "{status:?}");
    as_program(|| rig.gpu.end_capture(0, passing.0)).unwrap();
    rig.malloc(600, passing);
    rig.malloc(900 * MIB, other);
    rig.check();
}

#[test]
fn a_synchronisation_of_the_programs_shows_that_nothing_captures_any_more() {
    let rig = new(GIB, "headroom:0");
    let (passing, other) = (rig.passing_stream(), rig.stream());
    as_program(|| rig.gpu.begin_capture(0, passing.0, CaptureMode::Relaxed, None)).unwrap();
    rig.malloc(3 * MIB, passing);
    as_program(|| rig.gpu.end_capture(0, passing.0)).unwrap();
    rig.destroy(passing);
    let point = rig.heap.before_synchronize(0);
    as_program(|| rig.gpu.device_synchronize(0)).unwrap();
    rig.heap.synchronized(0, point);
    let parked = rig.malloc(900 * MIB, other);
    assert!(rig.record_stream(parked, ALL_STREAMS));
    assert!(rig.heap.free(parked));
    rig.malloc(900 * MIB, other);
    rig.check();
}

#[test]
fn poison_is_for_streams_that_last() {
    let rig = new(GIB, "debug:poison");
    for (stream, fills) in [(rig.stream(), 2), (rig.passing_stream(), 1)] {
        let before = count(&rig, CallKind::Memset);
        let address = rig.malloc(1000, stream);
        assert!(rig.heap.free(address));
        assert_eq!(count(&rig, CallKind::Memset) - before, fills);
    }
    rig.check();
}

#[test]
fn streams_whose_numbers_were_taken_while_they_were_idle_are_served_with_others() {
    let rig = over(GpuConfig { oracle: false, ..GpuConfig::new(16 * GIB) }, "backing:pool");
    let streams: Vec<StreamHandle> = (0..MAX_STREAMS + 500).map(|_| rig.passing_stream()).collect();
    let kept = rig.malloc(1000, streams[0]);
    for round in 0..3 {
        for &stream in &streams {
            let address = rig.malloc(1000, stream);
            assert!(rig.heap.free(address), "round {round}");
        }
    }
    assert!(rig.heap.free(kept));
    rig.check();
}

#[test]
fn threads_on_streams_of_their_own_keep_stream_order_while_numbers_are_taken_away_from_others() {
    let rig = new(16 * GIB, "backing:pool");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let stream = rig.passing_stream();
                let mut blocks = VecDeque::new();
                let mut at = 0;
                while !done.load(Ordering::Relaxed) {
                    // At times it has no block, so that its number may be taken.
                    at += 1;
                    if at % 7 > 0 {
                        let size = 1000 + at % 5 * 300_000;
                        let address = rig.malloc(size, stream);
                        rig.gpu.block_malloc(at, address, size, 0, stream.0);
                        as_program(|| rig.gpu.launch(0, stream.0, 1, 10_000)).unwrap();
                        blocks.push_back(address);
                    } else {
                        for address in blocks.drain(..) {
                            rig.gpu.block_free(address);
                            assert!(rig.heap.free(address));
                        }
                        rig.heap.trim();
                    }
                }
                for address in blocks.drain(..) {
                    rig.gpu.block_free(address);
                    assert!(rig.heap.free(address));
                }
            });
        }
        for _ in 0..6000 {
            let stream = rig.passing_stream();
            let address = rig.malloc(700, stream);
            assert!(rig.heap.free(address));
            rig.destroy(stream);
        }
        done.store(true, Ordering::Relaxed);
    });
    rig.finish();
}

#[test]
fn nothing_is_asked_of_a_stream_once_its_end_has_been_told() {
    // Another thread is looking for memory all the while.
    let rig = old(16 * GIB, "");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let stream = rig.stream();
            for round in 0u64.. {
                let address = rig.malloc((20 + round % 64) * MIB, stream);
                rig.heap.mark_step();
                assert!(rig.heap.free(address));
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..2000 {
            let stream = rig.stream();
            use_and_free(&rig, 5 * MIB, stream, 1000);
            rig.end(stream);
        }
        done.store(true, Ordering::Relaxed);
    });
    rig.heap.trim();
    rig.check();
}

#[test]
fn a_free_names_no_stream() {
    // torch frees a block with the stream that it was allocated on, which may be gone by then.
    let rig = new(16 * GIB, "");
    let stream = rig.passing_stream();
    let blocks: Vec<u64> = (0..200).map(|at| rig.malloc(1 + at * 40_000, stream)).collect();
    blocks.iter().step_by(3).for_each(|&block| assert!(rig.record_stream(block, stream)));
    rig.destroy(stream);
    let before = rig.gpu.counts(Caller::Allocator).total();
    blocks.iter().for_each(|&block| assert!(rig.heap.free(block)));
    assert_eq!(rig.gpu.counts(Caller::Allocator).total(), before);
    rig.finish();
}

#[test]
fn cuda_free_async_names_its_stream() {
    let rig = Rig::over(
        GpuConfig { context_events: false, vouched_streams: true, ..GpuConfig::new(16 * GIB) },
        "",
    );
    rig.heap.announce_ordered_callers();
    let (passing, other) = (rig.passing_stream(), rig.stream());
    let freed = rig.malloc(100 * MIB, passing);
    assert!(vouching(passing.0, || rig.heap.free_on(freed, passing)));
    // That call recorded an event.
    assert_eq!(rig.malloc(100 * MIB, other), freed);
    assert!(vouching(passing.0, || rig.heap.free_on(freed, passing)));
    // Too little for a batch, and the next request needs it: the second such call finds that.
    let [small, second] = [MIB, 600].map(|bytes| rig.malloc(bytes, passing));
    assert!(vouching(passing.0, || rig.heap.free_on(small, passing)));
    let large = rig.malloc(200 * MIB, other);
    let recorded = count(&rig, CallKind::EventRecord);
    assert!(vouching(passing.0, || rig.heap.free_on(second, passing)));
    assert_eq!(count(&rig, CallKind::EventRecord), recorded + 1);
    assert!(rig.heap.free_on(large, other));
    rig.check();
}
