//! What the program makes its streams wait for, and tells the heap, by the settings of a rank of
//! several: the heap adds no waits of its own. (`order.rs`, `captures.rs` and `ranks.rs` tell it in
//! random programs under the oracle.)

use crate::common::{GIB, MIB, Rig, malloc_again, wait, wait_and_tell};
use gruyere::driver::StreamHandle;
use gruyere::heap::Mark;
use gruyere_phantom::{CallKind, Caller, CaptureMode, as_program};

const BLOCK: u64 = 64 * MIB;

/// A rig without permission to add waits, and two streams.
fn rig() -> (Rig, [StreamHandle; 2]) {
    let rig = Rig::new("slack:0");
    let streams = [rig.stream(), rig.stream()];
    streams.iter().for_each(|&stream| malloc_again(&rig.heap, 0, stream));
    (rig, streams)
}

/// Uses a new block on `stream`, for longer than any test takes, and frees it.
fn use_and_free(rig: &Rig, stream: StreamHandle) {
    let address = rig.malloc(BLOCK, stream);
    launch(rig, stream);
    assert!(rig.heap.free(address));
    malloc_again(&rig.heap, 0, stream);
}

fn launch(rig: &Rig, stream: StreamHandle) {
    as_program(|| rig.gpu.launch(0, stream.0, 100, 1_000_000)).unwrap();
}

/// Whether a block on `stream` makes the heap grow. The block stays.
fn grows(rig: &Rig, stream: StreamHandle) -> bool {
    let held = rig.gpu.books(0).physical;
    rig.malloc(BLOCK, stream);
    rig.gpu.books(0).physical > held
}

#[test]
fn what_a_stream_had_freed_serves_a_stream_that_waits_for_it_while_the_work_goes_on() {
    let (rig, [other, waiting]) = rig();
    use_and_free(&rig, other);
    assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [waiting, other]));
    assert!(!grows(&rig, waiting));
    let calls = rig.gpu.counts(Caller::Allocator);
    assert_eq!(calls.of(CallKind::StreamWaitEvent), 0);
    rig.check();
}

#[test]
fn a_wait_that_the_heap_is_not_told_of_gives_nothing() {
    let (rig, [other, waiting]) = rig();
    use_and_free(&rig, other);
    assert!(rig.heap.mark_work(0, other).is_some());
    wait(&rig.gpu, 0, [waiting, other]).unwrap();
    assert!(grows(&rig, waiting));
}

#[test]
fn what_is_freed_after_the_mark_is_not_ordered() {
    let (rig, [other, waiting]) = rig();
    let late = rig.malloc(BLOCK, other);
    launch(&rig, other);
    let mark = rig.heap.mark_work(0, other).unwrap();
    // As by another thread, before the event is recorded.
    assert!(rig.heap.free(late));
    malloc_again(&rig.heap, 0, other);
    rig.heap.stream_waits(0, waiting, mark);
    assert!(grows(&rig, waiting));
    assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [waiting, other]));
    assert!(!grows(&rig, waiting));
}

#[test]
fn a_wait_orders_one_stream_behind_one_other() {
    let (rig, [other, waiting]) = rig();
    let third = rig.stream();
    use_and_free(&rig, other);
    assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [waiting, other]));
    assert!(grows(&rig, third));
}

#[test]
fn a_stream_is_behind_what_the_one_it_waits_for_had_waited_for_and_nothing_later() {
    let (rig, [other, waiting]) = rig();
    let between = rig.stream();
    use_and_free(&rig, other);
    assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [between, other]));
    let mark = rig.heap.mark_work(0, between).unwrap();
    // Another block, for which `between` waits after the mark.
    let blocks = [rig.malloc(BLOCK, other), rig.malloc(BLOCK, other)];
    launch(&rig, other);
    assert!(blocks.iter().all(|&block| rig.heap.free(block)));
    malloc_again(&rig.heap, 0, other);
    assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [between, other]));
    rig.heap.stream_waits(0, waiting, mark);
    assert!(grows(&rig, waiting));
    assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [waiting, between]));
    assert!(!grows(&rig, waiting));
}

#[test]
fn a_block_that_a_third_stream_used_waits_for_it_too() {
    let (rig, [other, waiting]) = rig();
    let user = rig.stream();
    let address = rig.malloc(BLOCK, other);
    launch(&rig, user);
    assert!(rig.record_stream(address, user));
    assert!(rig.heap.free(address));
    malloc_again(&rig.heap, 0, other);
    assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [waiting, other]));
    assert!(grows(&rig, waiting));
    assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [waiting, user]));
    assert!(!grows(&rig, waiting));
}

#[test]
fn a_capture_tells_nothing_of_the_order_of_streams() {
    let (rig, [other, waiting]) = rig();
    use_and_free(&rig, other);
    let begin = |stream: StreamHandle| {
        as_program(|| rig.gpu.begin_capture(0, stream.0, CaptureMode::Relaxed, None)).unwrap();
    };
    let end = |stream: StreamHandle| {
        as_program(|| rig.gpu.end_capture(0, stream.0)).unwrap();
    };
    begin(other);
    assert_eq!(rig.heap.mark_work(0, other), None);
    end(other);
    let mark = rig.heap.mark_work(0, other).unwrap();
    begin(waiting);
    rig.heap.stream_waits(0, waiting, mark);
    end(waiting);
    assert!(grows(&rig, waiting));
}

#[test]
fn there_is_no_mark_of_streams_that_may_end() {
    let (rig, [other, _]) = rig();
    let passing = rig.passing_stream();
    assert_eq!(rig.heap.mark_work(0, passing), None);
    assert_eq!(rig.heap.mark_work(7, other), None);
    assert!(rig.heap.mark_work(0, StreamHandle(0)).is_some());
    let mark = rig.heap.mark_work(0, other).unwrap();
    assert_eq!(mark.to_bits().and_then(Mark::from_bits), Some(mark));
    assert!(rig.heap.mark_work(0, other).is_some_and(|next| next != mark));
    let off = Rig::new("waits:off");
    let stream = off.stream();
    assert!(off.heap.mark_work(0, stream).is_some());
}

/// There a mark is a clock, which is ahead of all epochs, and orders nothing.
#[test]
fn a_mark_of_where_the_heap_adds_waits_itself_orders_nothing_once_they_are_forbidden() {
    let (rig, [waiting, other]) = rig();
    rig.heap.allow_waits();
    for _ in 0..100 {
        let address = rig.heap.malloc(MIB, 0, other).unwrap();
        assert!(rig.heap.free(address));
    }
    use_and_free(&rig, other);
    let mark = rig.heap.mark_work(0, other).unwrap();
    assert_eq!(mark.to_bits().and_then(Mark::from_bits), Some(mark));
    rig.heap.forbid_waits("a test");
    rig.heap.stream_waits(0, waiting, mark);
    assert!(grows(&rig, waiting));
}

#[test]
fn a_wait_for_a_stream_of_another_device_orders_nothing() {
    let gpu = std::sync::Arc::new(gruyere_phantom::Gpu::new(gruyere_phantom::Config::devices(
        2,
        4 * GIB,
    )));
    let rig = Rig::on(&gpu, "slack:0");
    rig.heap.announce_hooks(3);
    let (waiting, other) = (rig.stream(), rig.stream());
    let far = rig.stream_of(1);
    // So that the streams of both devices have the same numbers.
    rig.heap.free(rig.heap.malloc(BLOCK, 1, far).unwrap());
    use_and_free(&rig, other);
    let mark = rig.heap.mark_work(1, far).unwrap();
    rig.heap.stream_waits(0, waiting, mark);
    assert!(grows(&rig, waiting));
}
