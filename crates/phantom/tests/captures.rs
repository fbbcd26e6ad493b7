//! Captures: forbidden calls, the oracle's reports, and the ownership of a graph's memory.

use gruyere_phantom::error::code;
use gruyere_phantom::oracle::{Fault, Taker};
use gruyere_phantom::{
    CaptureMode, CaptureStatus, CapturingIds, Config, Costs, Gpu, SimError, StreamKind, as_program,
    relaxed,
};

const MIB: u64 = 1 << 20;

fn gpu() -> Gpu {
    Gpu::new(Config { costs: Costs::zero(), ..Config::new(256 * MIB) })
}

fn stream(gpu: &Gpu) -> usize {
    gpu.stream_create(0, StreamKind::NonBlocking).unwrap()
}

fn capturing(gpu: &Gpu) -> (usize, u64) {
    let stream = stream(gpu);
    let capture = gpu.begin_capture(0, stream, CaptureMode::Relaxed, None).unwrap();
    (stream, capture)
}

#[track_caller]
fn assert_reported(gpu: &Gpu, name: &str, stream: usize, capture: u64) {
    let id = gpu.stream_id(0, stream).unwrap();
    let faults = gpu.take_faults();
    let is = |fault: &Fault| {
        matches!(
            fault,
            Fault::Capturing { call, stream, capture: c } if *call == name && stream.id == id
                && *c == capture
        )
    };
    assert!(faults.len() == 1 && is(&faults[0]), "{faults:#?}");
}

#[test]
fn the_id_of_a_capturing_stream_is_told_refused_or_ends_the_capture_as_the_driver_is_set_up() {
    let cases = [
        (CapturingIds::Told, None, true),
        (CapturingIds::Refused, Some(code::CAPTURE_UNSUPPORTED), true),
        (CapturingIds::Invalidate, Some(code::CAPTURE_UNSUPPORTED), false),
    ];
    for (capturing_ids, refusal, lives) in cases {
        let gpu =
            Gpu::new(Config { costs: Costs::zero(), capturing_ids, ..Config::new(256 * MIB) });
        let beside = stream(&gpu);
        let (on, capture) = capturing(&gpu);
        // In relaxed mode too: the driver is wrapped in it.
        assert_eq!(relaxed(|| gpu.stream_id(0, on)).err().map(|error| error.code), refusal);
        let status =
            if lives { CaptureStatus::Active(capture) } else { CaptureStatus::Invalidated };
        assert_eq!(gpu.capture_status(0, on), Ok(status));
        assert!(gpu.stream_id(0, beside).is_ok(), "only the capturing stream's");
        assert_eq!(
            gpu.take_faults().is_empty(),
            refusal.is_none(),
            "{capturing_ids:?}: the oracle tells of it"
        );
        let _ = gpu.end_capture(0, on);
        assert!(gpu.stream_id(0, on).is_ok());
    }
}

#[test]
fn an_event_behind_all_work_of_the_context_ends_every_capture_in_it() {
    let gpu = gpu();
    let [(one, _), (other, _)] = [capturing(&gpu), capturing(&gpu)];
    let event = gpu.event_create(0).unwrap();
    assert_eq!(gpu.context_event_record(0, event).unwrap_err().code, code::CAPTURE_UNSUPPORTED);
    for stream in [one, other] {
        assert_eq!(gpu.capture_status(0, stream), Ok(CaptureStatus::Invalidated));
    }
}

#[test]
fn calls_on_a_capturing_stream_are_reported_and_end_the_capture() {
    type Call = fn(&Gpu, usize, usize, usize, u64) -> Result<(), SimError>;
    let calls: [(&str, u32, Call); 6] = [
        ("cuStreamWaitEvent", code::CAPTURE_ISOLATION, |gpu, on, event, _, _| {
            gpu.stream_wait_event(0, on, event)
        }),
        ("cuStreamQuery", code::CAPTURE_UNSUPPORTED, |gpu, on, _, _, _| {
            gpu.stream_query(0, on).map(|_| ())
        }),
        ("cuStreamSynchronize", code::CAPTURE_UNSUPPORTED, |gpu, on, _, _, _| {
            gpu.stream_synchronize(0, on)
        }),
        ("cuMemAllocFromPoolAsync", code::CAPTURE_UNSUPPORTED, |gpu, on, _, pool, _| {
            gpu.pool_alloc(0, pool, MIB, on).map(|_| ())
        }),
        ("cuMemFreeAsync", code::CAPTURE_UNSUPPORTED, |gpu, on, _, _, block| {
            gpu.pool_free(0, block, on)
        }),
        ("cuCtxSynchronize", code::CAPTURE_UNSUPPORTED, |gpu, _, _, _, _| {
            gpu.device_synchronize(0)
        }),
    ];
    for (name, code, call) in calls {
        let gpu = gpu();
        let outside = gpu.event_create(0).unwrap();
        gpu.event_record(0, outside, 0).unwrap();
        let pool = gpu.pool_create(0, 0).unwrap();
        let block = gpu.pool_alloc(0, pool, MIB, 0).unwrap();
        let (on, capture) = capturing(&gpu);
        assert_eq!(gpu.capture_status(0, on), Ok(CaptureStatus::Active(capture)));
        assert_eq!(call(&gpu, on, outside, pool, block).unwrap_err().code, code, "{name}");
        assert_eq!(gpu.capture_status(0, on), Ok(CaptureStatus::Invalidated), "{name}");
        assert_reported(&gpu, name, on, capture);
        assert_eq!(gpu.end_capture(0, on).unwrap_err().code, code::CAPTURE_INVALIDATED);
        assert_eq!(gpu.capture_status(0, on), Ok(CaptureStatus::None));
    }
}

#[test]
fn a_record_on_a_capturing_stream_is_reported_and_so_is_a_query_of_its_event() {
    let gpu = gpu();
    let event = gpu.event_create(0).unwrap();
    let (on, capture) = capturing(&gpu);
    gpu.event_record(0, event, on).unwrap();
    assert_reported(&gpu, "cuEventRecord", on, capture);
    assert_eq!(gpu.event_query(0, event).unwrap_err().code, code::CAPTURED_EVENT);
    assert_reported(&gpu, "cuEventQuery", on, capture);
    assert_eq!(gpu.capture_status(0, on), Ok(CaptureStatus::Invalidated));
}

#[test]
fn a_memset_on_a_capturing_stream_is_reported() {
    let gpu = gpu();
    let memory = gpu.alloc(0, MIB).unwrap();
    let (on, capture) = capturing(&gpu);
    gpu.memset(0, memory, MIB, on).unwrap();
    assert_reported(&gpu, "cuMemsetD8Async", on, capture);
}

#[test]
fn the_programs_own_forks_and_joins_are_fine() {
    let gpu = gpu();
    let (fork, join) = (gpu.event_create(0).unwrap(), gpu.event_create(0).unwrap());
    let (on, capture) = capturing(&gpu);
    let side = stream(&gpu);
    as_program(|| {
        gpu.event_record(0, fork, on).unwrap();
        gpu.stream_wait_event(0, side, fork).unwrap();
        assert_eq!(gpu.capture_status(0, side), Ok(CaptureStatus::Active(capture)));
        gpu.launch(0, side, 2, 100).unwrap();
        gpu.launch(0, on, 1, 50).unwrap();
        gpu.event_record(0, join, side).unwrap();
        gpu.stream_wait_event(0, on, join).unwrap();
    });
    let graph = gpu.end_capture(0, on).unwrap();
    assert_eq!(gpu.capture_status(0, side), Ok(CaptureStatus::None));
    assert_eq!(gpu.graph_work(graph), Some((3, 250)));
    assert_eq!(gpu.faults(), []);
    assert_eq!(gpu.host_time().device_end, 0, "nothing ran yet");
    gpu.replay(0, graph, side).unwrap();
    assert_eq!(gpu.host_time().device_end, 250);
}

#[test]
fn other_streams_go_on_during_a_capture() {
    let gpu = gpu();
    let event = gpu.event_create(0).unwrap();
    let pool = gpu.pool_create(0, 0).unwrap();
    let (on, _) = capturing(&gpu);
    let other = stream(&gpu);
    relaxed(|| {
        gpu.event_record(0, event, other).unwrap();
        assert_eq!(gpu.event_query(0, event), Ok(true));
        let block = gpu.pool_alloc(0, pool, MIB, other).unwrap();
        gpu.pool_free(0, block, other).unwrap();
        gpu.stream_synchronize(0, other).unwrap();
    });
    gpu.end_capture(0, on).unwrap();
    assert_eq!(gpu.faults(), []);
}

#[test]
fn a_global_capture_forbids_unsafe_calls_unless_the_thread_is_relaxed() {
    let gpu = gpu();
    let event = gpu.event_create(0).unwrap();
    let on = stream(&gpu);
    gpu.begin_capture(0, on, CaptureMode::Global, None).unwrap();
    relaxed(|| {
        let memory = gpu.alloc(0, MIB).unwrap();
        gpu.event_query(0, event).unwrap();
        gpu.free(0, memory).unwrap();
    });
    assert_eq!(gpu.faults(), []);
    let elsewhere =
        std::thread::scope(|scope| scope.spawn(|| gpu.event_query(0, event)).join().unwrap());
    assert_eq!(elsewhere.unwrap_err().code, code::CAPTURE_UNSUPPORTED);
    assert_eq!(gpu.capture_status(0, on), Ok(CaptureStatus::Invalidated));
    assert_eq!(gpu.fault_count(), 1);
}

#[test]
fn a_thread_local_capture_forbids_its_own_thread_only() {
    let gpu = gpu();
    let on = stream(&gpu);
    gpu.begin_capture(0, on, CaptureMode::ThreadLocal, None).unwrap();
    std::thread::scope(|scope| scope.spawn(|| gpu.alloc(0, MIB).unwrap()).join().unwrap());
    assert_eq!(gpu.alloc(0, MIB).unwrap_err().code, code::CAPTURE_UNSUPPORTED);
}

#[test]
fn the_default_stream_captures_nothing() {
    let gpu = gpu();
    let refused = gpu.begin_capture(0, 0, CaptureMode::Relaxed, None);
    assert_eq!(refused.unwrap_err().code, code::CAPTURE_UNSUPPORTED);
    assert_eq!(gpu.end_capture(0, 0).unwrap_err().code, code::CAPTURE_UNMATCHED);
}

/// A graph whose one block, id 1, lived at `memory`.
fn graph_with_block(gpu: &Gpu, memory: u64, group: Option<u64>) -> (u64, usize) {
    let on = stream(gpu);
    gpu.begin_capture(0, on, CaptureMode::Relaxed, group).unwrap();
    gpu.block_malloc(1, memory, MIB, 0, on);
    gpu.launch(0, on, 4, 100).unwrap();
    gpu.block_free(memory);
    (gpu.end_capture(0, on).unwrap(), on)
}

#[test]
fn memory_of_a_live_graph_is_nobody_elses() {
    let gpu = gpu();
    let memory = gpu.alloc(0, 4 * MIB).unwrap();
    let (_, on) = graph_with_block(&gpu, memory, None);
    gpu.device_synchronize(0).unwrap();
    gpu.block_malloc(2, memory, MIB, 0, on);
    let faults = gpu.take_faults();
    assert!(
        matches!(faults[..], [Fault::GraphMemory { by: Taker::Block(2), .. }]),
        "even on its stream, even when all is done: {faults:?}"
    );
}

#[test]
fn memory_of_a_live_graph_does_not_go_back() {
    let gpu = gpu();
    let memory = gpu.alloc(0, 4 * MIB).unwrap();
    graph_with_block(&gpu, memory, None);
    gpu.free(0, memory).unwrap();
    assert!(matches!(gpu.faults()[..], [Fault::GraphMemory { by: Taker::Call("cuMemFree"), .. }]));
}

#[test]
fn captures_of_one_group_share_memory() {
    let gpu = gpu();
    let memory = gpu.alloc(0, 4 * MIB).unwrap();
    let (first, _) = graph_with_block(&gpu, memory, Some(7));
    gpu.replay(0, first, 0).unwrap();
    graph_with_block(&gpu, memory, Some(7));
    assert_eq!(gpu.faults(), []);
    graph_with_block(&gpu, memory, Some(8));
    assert_eq!(gpu.fault_count(), 1);
}

#[test]
fn memory_of_a_dead_graph_is_free_after_a_device_wide_point() {
    let gpu = gpu();
    let memory = gpu.alloc(0, 4 * MIB).unwrap();
    let (graph, on) = graph_with_block(&gpu, memory, None);
    let elsewhere = stream(&gpu);
    gpu.replay(0, graph, elsewhere).unwrap();
    gpu.graph_destroy(0, graph).unwrap();
    gpu.block_malloc(2, memory, MIB, 0, on);
    let replayed_on = gpu.stream_id(0, elsewhere).unwrap();
    let faults = gpu.take_faults();
    assert!(
        matches!(faults[..], [Fault::OutOfOrder { block: 2, on, .. }] if on.id == replayed_on),
        "{faults:?}"
    );
    gpu.block_free(memory);

    let memory = memory + 2 * MIB;
    let (graph, _) = graph_with_block(&gpu, memory, None);
    gpu.replay(0, graph, elsewhere).unwrap();
    gpu.graph_destroy(0, graph).unwrap();
    gpu.device_synchronize(0).unwrap();
    gpu.block_malloc(3, memory, MIB, 0, on);
    assert_eq!(gpu.faults(), []);
}

#[test]
fn a_capture_starts_from_memory_whose_use_is_over() {
    let gpu = gpu();
    let memory = gpu.alloc(0, 4 * MIB).unwrap();
    let on = stream(&gpu);
    gpu.block_malloc(1, memory, MIB, 0, on);
    gpu.block_free(memory);
    gpu.begin_capture(0, on, CaptureMode::Relaxed, None).unwrap();
    gpu.block_malloc(2, memory, MIB, 0, on);
    gpu.end_capture(0, on).unwrap();
    let faults = gpu.take_faults();
    assert!(
        matches!(faults[..], [Fault::OutOfOrder { block: 2, previous: Some(1), .. }]),
        "{faults:?}"
    );

    let memory = memory + 2 * MIB;
    gpu.block_malloc(3, memory, MIB, 0, on);
    gpu.block_free(memory);
    gpu.device_synchronize(0).unwrap();
    graph_with_block(&gpu, memory, None);
    assert_eq!(gpu.faults(), []);
}

#[test]
fn a_wait_in_a_capture_orders_nothing_outside_of_it() {
    let gpu = gpu();
    let memory = gpu.alloc(0, 4 * MIB).unwrap();
    let (on, side) = (stream(&gpu), stream(&gpu));
    gpu.block_malloc(1, memory, MIB, 0, on);
    gpu.block_free(memory);
    let (fork, join) = (gpu.event_create(0).unwrap(), gpu.event_create(0).unwrap());
    gpu.begin_capture(0, on, CaptureMode::Relaxed, None).unwrap();
    as_program(|| {
        gpu.event_record(0, fork, on).unwrap();
        gpu.stream_wait_event(0, side, fork).unwrap();
        gpu.event_record(0, join, side).unwrap();
        gpu.stream_wait_event(0, on, join).unwrap();
    });
    gpu.end_capture(0, on).unwrap();
    gpu.block_malloc(2, memory, MIB, 0, side);
    assert!(matches!(gpu.faults()[..], [Fault::OutOfOrder { block: 2, previous: Some(1), .. }]));
}

#[test]
fn a_capture_that_failed_leaves_its_memory_to_all() {
    let gpu = gpu();
    let memory = gpu.alloc(0, 4 * MIB).unwrap();
    let (on, _) = capturing(&gpu);
    gpu.block_malloc(1, memory, MIB, 0, on);
    gpu.block_free(memory);
    as_program(|| gpu.stream_synchronize(0, on)).unwrap_err();
    gpu.end_capture(0, on).unwrap_err();
    gpu.device_synchronize(0).unwrap();
    gpu.block_malloc(2, memory, MIB, 0, 0);
    assert_eq!(gpu.faults(), []);
}
