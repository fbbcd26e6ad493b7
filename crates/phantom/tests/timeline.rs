//! Virtual time, with the arithmetic done by hand.

use gruyere_phantom::{CallKind, Caller, Config, Costs, Gpu, StreamKind, as_program};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;

/// Launches take 8, everything else nothing.
fn gpu(run_ahead: u64) -> Gpu {
    let costs = Costs { launch: 8, ..Costs::zero() };
    Gpu::new(Config { costs, run_ahead, ..Config::new(64 * MIB) })
}

fn stream(gpu: &Gpu) -> usize {
    gpu.stream_create(0, StreamKind::NonBlocking).unwrap()
}

#[test]
fn kernels_queue_behind_each_other_and_streams_run_side_by_side() {
    let gpu = gpu(1_000_000);
    let (a, b) = (stream(&gpu), stream(&gpu));
    // Host at 8 after the first launch, which runs 8..28; the other two run 28..48..68.
    gpu.launch(0, a, 3, 20).unwrap();
    assert_eq!((gpu.host_time().now, gpu.host_time().device_end), (24, 68));
    // Launched at 32, on an idle stream: 32..42.
    gpu.launch(0, b, 1, 10).unwrap();
    assert_eq!((gpu.host_time().now, gpu.host_time().device_end), (32, 68));
}

#[test]
fn an_event_completes_when_its_stream_gets_there() {
    let gpu = gpu(1_000_000);
    let a = stream(&gpu);
    let event = gpu.event_create(0).unwrap();
    assert_eq!(gpu.event_query(0, event), Ok(true), "nothing was recorded");
    gpu.launch(0, a, 1, 100).unwrap();
    gpu.event_record(0, event, a).unwrap();
    gpu.launch(0, a, 1, 100).unwrap();
    // The kernel runs 8..108.
    gpu.host_spend(91);
    assert_eq!((gpu.host_time().now, gpu.event_query(0, event)), (107, Ok(false)));
    gpu.host_spend(1);
    assert_eq!(gpu.event_query(0, event), Ok(true));
}

#[test]
fn a_program_that_only_asks_waits() {
    let gpu = gpu(1_000_000);
    let a = stream(&gpu);
    let event = gpu.event_create(0).unwrap();
    gpu.launch(0, a, 1, 100).unwrap();
    gpu.event_record(0, event, a).unwrap();
    gpu.launch(0, a, 1, 100).unwrap();
    // A program that makes other calls in between is not waiting.
    for _ in 0..50_000 {
        assert_eq!(gpu.event_query(0, event), Ok(false));
        gpu.event_record(0, gpu.event_create(0).unwrap(), a).unwrap();
    }
    let spin = |done: &dyn Fn() -> bool| (0..50_000).any(|_| done());
    assert!(spin(&|| gpu.event_query(0, event).unwrap()));
    // The kernels run 8..108 and 108..208.
    assert_eq!(gpu.host_time().now, 108);
    assert!(spin(&|| gpu.stream_query(0, a).unwrap()));
    assert_eq!(gpu.host_time().now, 208);
}

#[test]
fn host_waits_stand_still_and_are_counted_for_who_asked() {
    let gpu = gpu(1_000_000);
    let (a, b) = (stream(&gpu), stream(&gpu));
    let event = gpu.event_create(0).unwrap();
    gpu.launch(0, a, 1, 100).unwrap();
    gpu.event_record(0, event, a).unwrap();
    gpu.launch(0, a, 1, 50).unwrap();
    gpu.launch(0, b, 1, 400).unwrap();
    // Host at 24; a: 8..108..158; b: 24..424.
    gpu.event_synchronize(0, event).unwrap();
    assert_eq!((gpu.host_time().now, gpu.host_time().blocked_by_allocator), (108, 84));
    as_program(|| gpu.stream_synchronize(0, a)).unwrap();
    assert_eq!((gpu.host_time().now, gpu.host_time().blocked_by_program), (158, 50));
    gpu.device_synchronize(0).unwrap();
    assert_eq!((gpu.host_time().now, gpu.host_time().blocked_by_allocator), (424, 84 + 266));
    assert_eq!(gpu.counts(Caller::Program).of(CallKind::StreamSynchronize), 1);
    assert_eq!(gpu.counts(Caller::Allocator).of(CallKind::StreamSynchronize), 0);
}

#[test]
fn a_wait_on_the_device_holds_the_stream_and_not_the_host() {
    let gpu = gpu(1_000_000);
    let (a, b) = (stream(&gpu), stream(&gpu));
    let event = gpu.event_create(0).unwrap();
    gpu.launch(0, a, 1, 100).unwrap();
    gpu.event_record(0, event, a).unwrap();
    gpu.stream_wait_event(0, b, event).unwrap();
    gpu.launch(0, b, 1, 10).unwrap();
    // b: 108..118.
    assert_eq!((gpu.host_time().now, gpu.host_time().device_end), (16, 118));
    assert_eq!(gpu.stream_query(0, b), Ok(false));
}

#[test]
fn the_host_runs_ahead_only_so_far() {
    let gpu = gpu(50);
    // Runs 8..108: the host may not be more than 50 behind the end.
    gpu.launch(0, 0, 1, 100).unwrap();
    let time = gpu.host_time();
    assert_eq!((time.now, time.throttled, time.blocked_by_allocator), (58, 50, 0));
}

#[test]
fn kernels_of_no_length_are_complete_at_once() {
    let gpu = gpu(0);
    let a = stream(&gpu);
    let event = gpu.event_create(0).unwrap();
    for _ in 0..100 {
        gpu.launch(0, a, 7, 0).unwrap();
        gpu.event_record(0, event, a).unwrap();
        assert_eq!(gpu.event_query(0, event), Ok(true));
    }
    assert_eq!(gpu.counts(Caller::Allocator).of(CallKind::Launch), 700);
}

#[test]
fn blocking_streams_and_the_default_stream_wait_for_each_other() {
    let gpu = gpu(1_000_000);
    let blocking = gpu.stream_create(0, StreamKind::Blocking).unwrap();
    let free = stream(&gpu);
    gpu.launch(0, blocking, 1, 100).unwrap(); // 8..108
    gpu.launch(0, 0, 1, 10).unwrap(); // 108..118
    gpu.launch(0, blocking, 1, 1).unwrap(); // 118..119
    gpu.launch(0, free, 1, 5).unwrap(); // 32..37
    let event = gpu.event_create(0).unwrap();
    gpu.event_record(0, event, free).unwrap();
    gpu.event_synchronize(0, event).unwrap();
    assert_eq!((gpu.host_time().now, gpu.host_time().device_end), (37, 119));
}

#[test]
fn a_plain_free_waits_for_the_device() {
    let gpu = gpu(1_000_000);
    let memory = gpu.alloc(0, MIB).unwrap();
    gpu.launch(0, stream(&gpu), 1, 100).unwrap();
    gpu.free(0, memory).unwrap();
    assert_eq!((gpu.host_time().now, gpu.host_time().blocked_by_allocator), (108, 100));
}

#[test]
fn calls_cost_what_was_published() {
    let gpu = Gpu::new(Config::new(256 * MIB));
    let spent = |call: &dyn Fn()| {
        let before = gpu.host_time().now;
        call();
        gpu.host_time().now - before
    };
    let base = gpu.address_reserve(0, PAGE, 0).unwrap();
    let handle = std::cell::Cell::new(0);
    assert_eq!(spent(&|| handle.set(gpu.physical_create(0, PAGE).unwrap())), 29_000);
    assert_eq!(spent(&|| gpu.map(0, base, PAGE, 0, handle.get()).unwrap()), 2_000);
    assert_eq!(spent(&|| gpu.set_access(0, base, PAGE, &[0]).unwrap()), 38_000);
    assert_eq!(spent(&|| gpu.unmap(0, base, PAGE).unwrap()), 34_000);
    assert_eq!(spent(&|| gpu.physical_release(0, handle.get()).unwrap()), 23_000);
    assert_eq!(gpu.host_time().charged_to_allocator, gpu.host_time().now);
    assert_eq!(spent(&|| as_program(|| gpu.event_create(0).map(drop)).unwrap()), 1_000);
    assert_eq!(gpu.host_time().charged_to_program, 1_000);
    let pool = gpu.pool_create(0, 0).unwrap();
    let first = gpu.pool_alloc(0, pool, MIB, 0).unwrap();
    assert_eq!(spent(&|| gpu.pool_free(0, first, 0).unwrap()), 1_000);
    assert_eq!(spent(&|| _ = gpu.pool_alloc(0, pool, MIB, 0)), 1_000);
    let growth = Costs::default().pool_growth_of(32 * MIB, 32 * MIB, 1);
    assert_eq!(spent(&|| _ = gpu.pool_alloc(0, pool, 32 * MIB, 0)), 1_000 + growth);
}

#[test]
fn the_area_is_physical_bytes_over_time() {
    let gpu = gpu(1_000_000);
    let memory = gpu.alloc(0, PAGE).unwrap();
    gpu.host_spend(100);
    let more = gpu.alloc(0, PAGE).unwrap();
    gpu.host_spend(10);
    gpu.free(0, memory).unwrap();
    gpu.free(0, more).unwrap();
    gpu.host_spend(1000);
    assert_eq!(gpu.books(0).physical_area, u128::from(PAGE * 100 + 2 * PAGE * 10));
}

#[test]
fn every_run_is_the_same() {
    let run = || {
        let gpu = Gpu::new(Config::new(256 * MIB));
        let pool = gpu.pool_create(0, 0).unwrap();
        let (a, b) = (stream(&gpu), stream(&gpu));
        let mut addresses = Vec::new();
        for i in 0..200u64 {
            let on = if i % 3 == 0 { a } else { b };
            addresses.push(gpu.pool_alloc(0, pool, (i * 7919) % (4 * MIB) + 1, on).unwrap());
            gpu.launch(0, on, i % 5, 20_000).unwrap();
            if i % 2 == 0 {
                gpu.pool_free(0, addresses[i as usize / 2], on).unwrap();
            }
        }
        (addresses, gpu.host_time(), gpu.books(0))
    };
    assert_eq!(run(), run());
}

#[test]
fn between_two_events_lies_the_work_between_them() {
    let gpu = gpu(1_000_000);
    let s = stream(&gpu);
    let [before, after, never] = [(); 3].map(|()| gpu.event_create(0).unwrap());
    gpu.launch(0, s, 1, 3_000).unwrap();
    gpu.event_record(0, before, s).unwrap();
    gpu.launch(0, s, 2, 250_000).unwrap();
    gpu.event_record(0, after, s).unwrap();
    assert_eq!(gpu.event_elapsed(0, before, after), Ok(None));
    gpu.event_synchronize(0, after).unwrap();
    assert_eq!(gpu.event_elapsed(0, before, after), Ok(Some(500_000)));
    assert_eq!(gpu.event_elapsed(0, after, before), Ok(Some(-500_000)));
    assert!(gpu.event_elapsed(0, before, never).is_err());
}
