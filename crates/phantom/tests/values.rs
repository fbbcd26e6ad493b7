//! Waits on values in memory, and host functions: their ends, and the work behind them.

use gruyere_phantom::error::code;
use gruyere_phantom::{CaptureMode, Comparison, Config, Costs, Gpu, StreamKind};

const FLAG: u64 = 0x1000;

/// A device with free calls.
fn gpu() -> Gpu {
    Gpu::new(Config { costs: Costs::zero(), ..Config::new(64 << 20) })
}

fn stream(gpu: &Gpu) -> usize {
    gpu.stream_create(0, StreamKind::NonBlocking).unwrap()
}

/// Whether the stream has no open work.
fn is_closed(gpu: &Gpu, stream: usize) -> bool {
    gpu.open_streams().iter().all(|open| open.handle != stream)
}

#[test]
fn a_stream_goes_on_once_another_stream_has_written_the_value() {
    let gpu = gpu();
    let (waits, writes) = (stream(&gpu), stream(&gpu));
    gpu.stream_wait_value(0, waits, FLAG, 2, Comparison::AtLeast).unwrap();
    gpu.launch(0, waits, 1, 10).unwrap();
    assert_eq!(gpu.stream_synchronize(0, waits).unwrap_err().code, code::LAUNCH_TIMEOUT);
    gpu.launch(0, writes, 1, 500).unwrap();
    gpu.stream_write_value(0, writes, FLAG, 1).unwrap();
    assert!(!is_closed(&gpu, waits), "1 is not 2");
    gpu.stream_write_value(0, writes, FLAG, 2).unwrap();
    assert!(is_closed(&gpu, waits));
    gpu.stream_synchronize(0, waits).unwrap();
    // The write comes after its stream's earlier work.
    assert_eq!(gpu.host_time().now, 510);
    // A condition that already holds causes no wait.
    gpu.stream_wait_value(0, writes, FLAG, 2, Comparison::Equal).unwrap();
    assert!(is_closed(&gpu, writes));
}

#[test]
fn the_host_writes_a_value_too() {
    let gpu = gpu();
    let waits = stream(&gpu);
    gpu.stream_wait_value(0, waits, FLAG, 1, Comparison::Equal).unwrap();
    gpu.host_spend(70);
    gpu.host_write_value(FLAG, 1);
    gpu.stream_synchronize(0, waits).unwrap();
    assert_eq!(gpu.host_time().now, 70);
}

#[test]
fn a_write_behind_open_work_comes_when_that_is_done() {
    let gpu = gpu();
    let (first, second) = (stream(&gpu), stream(&gpu));
    gpu.stream_wait_value(0, first, FLAG, 1, Comparison::Equal).unwrap();
    gpu.stream_write_value(0, first, FLAG + 8, 1).unwrap();
    gpu.stream_wait_value(0, second, FLAG + 8, 1, Comparison::Equal).unwrap();
    assert_eq!((gpu.open_streams().len(), gpu.deadlock()), (2, None), "the host may yet write");
    gpu.host_write_value(FLAG, 1);
    assert_eq!(gpu.open_streams(), []);
}

#[test]
fn a_host_function_holds_its_stream_until_it_returns() {
    let gpu = gpu();
    let (a, b) = (stream(&gpu), stream(&gpu));
    gpu.launch(0, a, 1, 100).unwrap();
    let first = gpu.launch_host_function(0, a).unwrap();
    let second = gpu.launch_host_function(0, a).unwrap();
    let event = gpu.event_create(0).unwrap();
    gpu.event_record(0, event, a).unwrap();
    gpu.stream_wait_event(0, b, event).unwrap();
    gpu.launch(0, b, 1, 5).unwrap();
    assert_eq!(gpu.host_functions(), [first], "the second is behind it");
    assert_eq!(gpu.host_function_returns(second).unwrap_err().code, code::INVALID_VALUE);
    gpu.host_function_returns(first).unwrap();
    assert_eq!(gpu.host_functions(), [second]);
    assert_eq!(gpu.open_streams().len(), 2);
    gpu.host_spend(1_000);
    gpu.host_function_returns(second).unwrap();
    gpu.stream_synchronize(0, b).unwrap();
    assert_eq!((gpu.host_time().now, gpu.open_streams()), (1_005, vec![]));
}

#[test]
fn none_of_them_is_captured() {
    let gpu = gpu();
    let capturing = stream(&gpu);
    gpu.begin_capture(0, capturing, CaptureMode::Relaxed, None).unwrap();
    let refused = [
        gpu.stream_wait_value(0, capturing, FLAG, 1, Comparison::Equal),
        gpu.stream_write_value(0, capturing, FLAG, 1),
        gpu.launch_host_function(0, capturing).map(drop),
    ];
    assert_eq!(refused.map(|result| result.unwrap_err().code), [code::NOT_SUPPORTED; 3]);
}
