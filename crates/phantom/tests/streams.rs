//! Stream handles, ids and contexts.

use gruyere_phantom::error::code;
use gruyere_phantom::{Config, DestroyedStreams, Gpu, StreamKind, as_program, vouching};

fn gpu() -> Gpu {
    Gpu::new(Config::devices(2, 64 << 20))
}

#[test]
fn a_recycled_handle_is_a_new_stream() {
    let gpu = gpu();
    let other = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    let old = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    let old_id = gpu.stream_id(0, old).unwrap();
    gpu.stream_destroy(0, other).unwrap();
    gpu.stream_destroy(0, old).unwrap();
    let new = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    assert_eq!(new, old, "the last handle that was freed comes back first");
    assert_ne!(gpu.stream_id(0, new).unwrap(), old_id);
}

#[test]
fn a_destroyed_stream_is_refused() {
    let gpu = gpu();
    let stream = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    let event = gpu.event_create(0).unwrap();
    gpu.stream_destroy(0, stream).unwrap();
    let codes = [
        gpu.event_record(0, event, stream),
        gpu.stream_wait_event(0, stream, event),
        gpu.stream_synchronize(0, stream),
        gpu.stream_destroy(0, stream),
        gpu.stream_id(0, stream).map(drop),
        gpu.capture_status(0, stream).map(drop),
        gpu.launch(0, stream, 1, 1),
    ]
    .map(|result| result.unwrap_err().code);
    assert_eq!(codes, [code::INVALID_HANDLE; 7]);
}

#[test]
fn a_destroyed_streams_work_goes_on() {
    let gpu = gpu();
    let stream = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    gpu.launch(0, stream, 1, 1_000_000).unwrap();
    gpu.stream_destroy(0, stream).unwrap();
    gpu.device_synchronize(0).unwrap();
    assert!(gpu.host_time().now >= 1_000_000);
}

#[test]
fn default_streams_are_one_a_device_and_one_a_thread() {
    let gpu = gpu();
    let id = |device, handle| gpu.stream_id(device, handle).unwrap();
    assert_eq!(id(0, 0), id(0, 1));
    assert_ne!(id(0, 0), id(1, 0));
    assert_ne!(id(0, 0), id(0, 2));
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| id(0, 2)).join().unwrap());
    assert_ne!(elsewhere, id(0, 2));
    assert_eq!(gpu.stream_destroy(0, 0).unwrap_err().code, code::INVALID_HANDLE);
}

#[test]
fn an_event_belongs_to_a_context() {
    let gpu = gpu();
    let event = gpu.event_create(0).unwrap();
    assert_eq!(gpu.event_record(1, event, 0).unwrap_err().code, code::INVALID_HANDLE);
    gpu.event_record(0, event, 0).unwrap();
    let other = gpu.stream_create(1, StreamKind::NonBlocking).unwrap();
    gpu.stream_wait_event(1, other, event).unwrap();
    gpu.event_destroy(0, event).unwrap();
    assert_eq!(gpu.event_query(0, event).unwrap_err().code, code::INVALID_HANDLE);
}

#[test]
fn drivers_without_stream_ids_say_so() {
    let gpu = Gpu::new(Config { stream_ids: false, ..Config::new(64 << 20) });
    assert_eq!(gpu.stream_id(0, 0).unwrap_err().code, code::NOT_SUPPORTED);
    assert!(!gpu.has_stream_ids());
}

#[test]
fn it_is_safe_from_any_thread() {
    let gpu = gpu();
    let pool = gpu.pool_create(0, 0).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let gpu = &gpu;
            scope.spawn(move || {
                let event = gpu.event_create(0).unwrap();
                for i in 0..500 {
                    let span = gpu.pool_alloc(0, pool, 4096, 2).unwrap();
                    gpu.block_malloc(thread << 32 | i, span, 4096, 0, 2);
                    gpu.launch(0, 2, 1, 100).unwrap();
                    gpu.event_record(0, event, 2).unwrap();
                    gpu.block_free(span);
                    gpu.pool_free(0, span, 2).unwrap();
                }
            });
        }
    });
    assert_eq!(gpu.faults(), []);
    assert_eq!(gpu.pool_books(pool).unwrap().used, 0);
}

/// A stream of the program.
fn stream(gpu: &Gpu) -> usize {
    as_program(|| gpu.stream_create(0, StreamKind::NonBlocking)).unwrap()
}

#[test]
fn a_call_of_the_allocator_on_a_destroyed_stream_is_a_misuse_and_one_of_the_programs_is_its_own_affair()
 {
    for (destroyed_streams, noted) in
        [(DestroyedStreams::Misuse, 1), (DestroyedStreams::Refused, 0)]
    {
        let gpu = Gpu::new(Config { destroyed_streams, ..Config::new(64 << 20) });
        let (gone, never) = (stream(&gpu), 0x1234_5600);
        as_program(|| gpu.stream_destroy(0, gone)).unwrap();
        for handle in [gone, never] {
            assert_eq!(
                as_program(|| gpu.stream_id(0, handle)).unwrap_err().code,
                code::INVALID_HANDLE
            );
        }
        assert_eq!(gpu.misuses(), []);
        assert_eq!(gpu.capture_status(0, gone).unwrap_err().code, code::INVALID_HANDLE);
        assert_eq!(gpu.misuses().len(), noted);
    }
}

#[test]
fn where_the_program_vouches_for_its_streams_a_call_on_any_other_is_a_misuse() {
    let gpu = Gpu::new(Config { vouched_streams: true, ..Config::new(64 << 20) });
    let event = gpu.event_create(0).unwrap();
    let (passing, lasting) = (stream(&gpu), stream(&gpu));
    gpu.stream_lasts(0, lasting);
    let own = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    for handle in [0, 1, 2, lasting, own] {
        gpu.event_record(0, event, handle).unwrap();
    }
    vouching(passing, || gpu.event_record(0, event, passing)).unwrap();
    as_program(|| gpu.event_record(0, event, passing)).unwrap();
    assert_eq!(gpu.misuses(), []);
    gpu.event_record(0, event, passing).unwrap();
    assert_eq!(gpu.misuses().len(), 1);
    // The handle names a stream again, but not the announced one.
    as_program(|| gpu.stream_destroy(0, lasting)).unwrap();
    assert_eq!(stream(&gpu), lasting);
    gpu.event_record(0, event, lasting).unwrap();
    assert_eq!(gpu.misuses().len(), 2);
}
