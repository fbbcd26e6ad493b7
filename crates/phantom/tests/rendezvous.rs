//! Collectives and messages: their waits, the work behind them, and deadlocks.

use gruyere_phantom::Half::{Receive, Send};
use gruyere_phantom::error::code;
use gruyere_phantom::{Config, Costs, Gpu, StreamKind};

/// Two ranks with a device each; calls cost nothing.
fn gpu() -> Gpu {
    Gpu::new(Config { costs: Costs::zero(), ..Config::devices(2, 64 << 20) })
}

fn stream(gpu: &Gpu, device: u32) -> usize {
    gpu.stream_create(device, StreamKind::NonBlocking).unwrap()
}

/// An event behind the stream's work.
fn mark(gpu: &Gpu, device: u32, stream: usize) -> usize {
    let event = gpu.event_create(device).unwrap();
    gpu.event_record(device, event, stream).unwrap();
    event
}

#[test]
fn a_collective_runs_once_all_ranks_have_reached_it() {
    let gpu = gpu();
    let (a, b) = (stream(&gpu, 0), stream(&gpu, 1));
    gpu.launch(0, a, 1, 100).unwrap();
    gpu.launch_collective(0, a, 7, 2, 50).unwrap();
    let behind = mark(&gpu, 0, a);
    gpu.host_spend(10_000);
    assert!(!gpu.event_query(0, behind).unwrap(), "it ran without its counterpart");
    assert_eq!(gpu.open_streams().len(), 1);
    gpu.launch(1, b, 1, 3_000).unwrap();
    gpu.launch_collective(1, b, 7, 2, 50).unwrap();
    assert_eq!((gpu.open_streams().len(), gpu.deadlock()), (0, None));
    // Both have the end of the later one.
    for (device, stream) in [(0, a), (1, b)] {
        gpu.stream_synchronize(device, stream).unwrap();
        assert_eq!(gpu.host_time().now, 13_050);
    }
    assert!(gpu.event_query(0, behind).unwrap());
}

#[test]
fn work_behind_a_collective_waits_with_it_on_every_stream_that_it_reaches() {
    let gpu = gpu();
    let (a, side, b) = (stream(&gpu, 0), stream(&gpu, 0), stream(&gpu, 1));
    gpu.launch_collective(0, a, 7, 2, 50).unwrap();
    gpu.launch(0, a, 2, 10).unwrap();
    let first = mark(&gpu, 0, a);
    gpu.stream_wait_event(0, side, first).unwrap();
    gpu.launch(0, side, 1, 5).unwrap();
    let second = mark(&gpu, 0, side);
    gpu.host_spend(1_000);
    assert!(!gpu.event_query(0, second).unwrap() && !gpu.stream_query(0, side).unwrap());
    gpu.launch_collective(1, b, 7, 2, 50).unwrap();
    gpu.event_synchronize(0, second).unwrap();
    assert_eq!(gpu.host_time().now, 1_000 + 50 + 20 + 5);
}

#[test]
fn the_default_stream_waits_for_blocking_streams_behind_collectives() {
    let gpu = gpu();
    let blocking = gpu.stream_create(0, StreamKind::Blocking).unwrap();
    gpu.launch_collective(0, blocking, 7, 2, 50).unwrap();
    gpu.launch(0, 0, 1, 5).unwrap();
    assert!(!gpu.stream_query(0, 0).unwrap());
    gpu.launch_collective(1, 0, 7, 2, 50).unwrap();
    gpu.device_synchronize(0).unwrap();
    assert_eq!(gpu.host_time().now, 55);
}

#[test]
fn collectives_of_a_communicator_meet_in_the_order_of_their_launches() {
    let gpu = gpu();
    let (a, b) = (stream(&gpu, 0), stream(&gpu, 1));
    for _ in 0..3 {
        gpu.launch_collective(0, a, 7, 2, 50).unwrap();
    }
    gpu.launch_collective(1, b, 7, 2, 50).unwrap();
    assert_eq!(gpu.open_streams().len(), 1, "two more are to come");
    gpu.launch_collective(1, b, 7, 2, 50).unwrap();
    gpu.launch_collective(1, b, 7, 2, 50).unwrap();
    gpu.device_synchronize(0).unwrap();
    assert_eq!(gpu.host_time().now, 150);
}

#[test]
fn a_host_wait_that_would_not_end_times_out() {
    let gpu = gpu();
    let a = stream(&gpu, 0);
    gpu.launch_collective(0, a, 7, 2, 50).unwrap();
    let event = mark(&gpu, 0, a);
    let waits =
        [gpu.event_synchronize(0, event), gpu.stream_synchronize(0, a), gpu.device_synchronize(0)];
    assert_eq!(waits.map(|wait| wait.unwrap_err().code), [code::LAUNCH_TIMEOUT; 3]);
    // The other rank's device is unaffected.
    gpu.device_synchronize(1).unwrap();
}

#[test]
fn opposite_orders_on_two_streams_are_fine_until_waits_join_the_streams() {
    // Rank 0 launches on communicator 1 then 2, rank 1 the other way round.
    let run = |waits: [bool; 2]| {
        let gpu = gpu();
        for (rank, order) in [[1, 2], [2, 1]].into_iter().enumerate() {
            let device = rank as u32;
            let streams = order.map(|_| stream(&gpu, device));
            gpu.launch_collective(device, streams[0], order[0], 2, 50).unwrap();
            if waits[rank] {
                let event = mark(&gpu, device, streams[0]);
                gpu.stream_wait_event(device, streams[1], event).unwrap();
            }
            gpu.launch_collective(device, streams[1], order[1], 2, 50).unwrap();
        }
        gpu
    };
    for harmless in [[false, false], [true, false], [false, true]] {
        let gpu = run(harmless);
        assert_eq!((gpu.deadlock(), gpu.open_streams().len()), (None, 0), "{harmless:?}");
    }
    let gpu = run([true, true]);
    let deadlock = gpu.deadlock().expect("a circle");
    assert!(deadlock.to_string().starts_with("no stream can make progress: stream "), "{deadlock}");
    let mut devices: Vec<u32> = deadlock.streams.iter().map(|stream| stream.device).collect();
    devices.sort_unstable();
    devices.dedup();
    assert_eq!(devices, [0, 1], "it goes through both ranks");
    assert_eq!(gpu.device_synchronize(0).unwrap_err().code, code::LAUNCH_TIMEOUT);
}

#[test]
fn a_collective_is_not_captured_and_keeps_its_number_of_ranks() {
    let gpu = gpu();
    let (a, b) = (stream(&gpu, 0), stream(&gpu, 1));
    gpu.launch_collective(0, a, 7, 2, 50).unwrap();
    assert_eq!(gpu.launch_collective(1, b, 7, 3, 50).unwrap_err().code, code::INVALID_VALUE);
    assert_eq!(gpu.misuses().len(), 1);
    let capturing = stream(&gpu, 1);
    gpu.begin_capture(1, capturing, gruyere_phantom::CaptureMode::Relaxed, None).unwrap();
    assert_eq!(
        gpu.launch_collective(1, capturing, 8, 2, 50).unwrap_err().code,
        code::NOT_SUPPORTED
    );
}

#[test]
fn a_message_meets_its_other_half_and_no_other() {
    let gpu = gpu();
    let (a, b) = (stream(&gpu, 0), stream(&gpu, 1));
    gpu.launch_messages(0, a, 7, &[Send(1)], 50).unwrap();
    gpu.launch_messages(0, a, 7, &[Receive(1)], 50).unwrap();
    // On another communicator, and in the other direction: neither is the first one's counterpart.
    let (other, back) = (stream(&gpu, 1), stream(&gpu, 1));
    gpu.launch_messages(1, other, 8, &[Receive(0)], 50).unwrap();
    gpu.launch_messages(1, back, 7, &[Send(0)], 50).unwrap();
    assert_eq!(gpu.open_streams().len(), 3);
    gpu.host_spend(1_000);
    gpu.launch_messages(1, b, 7, &[Receive(0)], 50).unwrap();
    assert_eq!((gpu.open_streams().len(), gpu.deadlock()), (1, None), "{:?}", gpu.open_streams());
    gpu.device_synchronize(0).unwrap();
    assert_eq!(gpu.host_time().now, 1_100);
}

#[test]
fn the_messages_of_a_group_pass_at_once_and_those_of_two_groups_do_not() {
    // Each rank sends to the other and receives from it.
    let both = |halves: [&[&[gruyere_phantom::Half]]; 2]| {
        let gpu = gpu();
        for (device, groups) in (0..).zip(halves) {
            let stream = stream(&gpu, device);
            groups.iter().for_each(|group| {
                gpu.launch_messages(device, stream, 7, group, 50).unwrap();
            });
        }
        (gpu.open_streams().len(), gpu.deadlock().is_some())
    };
    assert_eq!(both([&[&[Send(1), Receive(1)]], &[&[Receive(0)], &[Send(0)]]]), (0, false));
    assert_eq!(both([&[&[Receive(1)], &[Send(1)]], &[&[Send(0)], &[Receive(0)]]]), (0, false));
    assert_eq!(both([&[&[Receive(1)], &[Send(1)]], &[&[Receive(0)], &[Send(0)]]]), (2, true));
}
