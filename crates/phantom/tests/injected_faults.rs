//! Faults can be injected into any call.

use gruyere_phantom::error::code;
use gruyere_phantom::{CallKind, Caller, Config, Gpu, Injection};

const PAGE: u64 = 2 << 20;

fn gpu() -> Gpu {
    Gpu::new(Config::new(64 << 20))
}

#[test]
fn the_nth_call_of_a_kind_fails_once() {
    let gpu = gpu();
    gpu.physical_create(0, PAGE).unwrap();
    let kind = Some(CallKind::Create);
    gpu.inject(Injection { kind, nth: 2, code: code::OUT_OF_MEMORY, from_then_on: false });
    gpu.alloc(0, PAGE).unwrap();
    let codes = [0; 3].map(|_| gpu.physical_create(0, PAGE).map(drop).map_err(|error| error.code));
    assert_eq!(codes, [Ok(()), Err(code::OUT_OF_MEMORY), Ok(())]);
    assert_eq!(gpu.books(0).in_handles, 3 * PAGE, "the failed call took nothing");
    assert_eq!(gpu.counts(Caller::Allocator).of(CallKind::Create), 4, "a failed call is a call");
}

#[test]
fn the_nth_call_of_any_kind_fails() {
    let gpu = gpu();
    gpu.inject(Injection { kind: None, nth: 3, code: code::INVALID_VALUE, from_then_on: false });
    let base = gpu.address_reserve(0, PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, PAGE).unwrap();
    assert_eq!(gpu.map(0, base, PAGE, 0, handle).unwrap_err().code, code::INVALID_VALUE);
    assert!(!gpu.is_backed(base, PAGE));
    gpu.map(0, base, PAGE, 0, handle).unwrap();
    assert_eq!(gpu.misuses(), [], "an injected fault is nobody's misuse");
}

#[test]
fn from_then_on_every_call_of_the_kind_fails_until_disarmed() {
    let gpu = gpu();
    let kind = Some(CallKind::PoolAlloc);
    gpu.inject(Injection { kind, nth: 2, code: code::OUT_OF_MEMORY, from_then_on: true });
    let pool = gpu.pool_create(0, 0).unwrap();
    let alloc = || gpu.pool_alloc(0, pool, PAGE, 0).is_ok();
    assert_eq!([alloc(), alloc(), alloc(), alloc()], [true, false, false, false]);
    gpu.clear_injections();
    assert!(alloc());
}

#[test]
fn a_lost_device_stays_lost() {
    let gpu = gpu();
    let event = gpu.event_create(0).unwrap();
    let kind = Some(CallKind::EventQuery);
    gpu.inject(Injection { kind, nth: 1, code: code::LAUNCH_FAILED, from_then_on: false });
    gpu.alloc(0, PAGE).unwrap();
    assert_eq!(gpu.event_query(0, event).unwrap_err().code, code::LAUNCH_FAILED);
    gpu.clear_injections();
    assert_eq!(gpu.alloc(0, PAGE).unwrap_err().code, code::LAUNCH_FAILED);
    assert_eq!(gpu.device_synchronize(0).unwrap_err().code, code::LAUNCH_FAILED);
}

/// A fault can be injected into every kind of call, and the error names the call.
#[test]
fn every_kind_of_call_can_fail() {
    for &kind in CallKind::ALL {
        let gpu = gpu();
        gpu.inject(Injection { kind: Some(kind), nth: 1, code: 999, from_then_on: true });
        let pool = gpu.pool_create(0, 0).unwrap_or(0);
        let stream = gpu.stream_create(0, gruyere_phantom::StreamKind::NonBlocking).unwrap_or(0);
        let event = gpu.event_create(0).unwrap_or(0);
        let base = gpu.address_reserve(0, PAGE, 0).unwrap_or(0);
        let handle = gpu.physical_create(0, PAGE).unwrap_or(0);
        let block = gpu.pool_alloc(0, pool, PAGE, 0).unwrap_or(0);
        let memory = gpu.alloc(0, PAGE).unwrap_or(0);
        let threshold = gruyere_phantom::PoolAttribute::ReleaseThreshold;
        let results = [
            gpu.device_config(0).map(drop),
            gpu.memory_info(0).map(drop),
            gpu.pool_create(0, 0).map(drop),
            gpu.pool_attribute(0, pool, threshold).map(drop),
            gpu.pool_set_attribute(0, pool, threshold, 0),
            gpu.pool_trim(0, pool, 0),
            gpu.pool_allow_peer(0, pool, 0),
            gpu.pool_alloc(0, pool, PAGE, 0).map(drop),
            gpu.pool_free(0, block, 0),
            gpu.address_reserve(0, PAGE, 0).map(drop),
            gpu.physical_create(0, PAGE).map(drop),
            gpu.physical_import(0, PAGE).map(drop),
            gpu.map(0, base, PAGE, 0, handle),
            gpu.set_access(0, base, PAGE, &[0]),
            gpu.memset(0, base, PAGE, stream),
            gpu.unmap(0, base, PAGE),
            gpu.physical_release(0, handle),
            gpu.address_free(0, base, PAGE),
            gpu.alloc(0, PAGE).map(drop),
            gpu.free(0, memory),
            gpu.event_create(0).map(drop),
            gpu.event_record(0, event, stream),
            gpu.context_event_record(0, event),
            gpu.event_query(0, event).map(drop),
            gpu.event_synchronize(0, event),
            gpu.stream_wait_event(0, stream, event),
            gpu.event_destroy(0, event),
            gpu.stream_create(0, gruyere_phantom::StreamKind::NonBlocking).map(drop),
            gpu.stream_query(0, stream).map(drop),
            gpu.stream_synchronize(0, stream),
            gpu.stream_id(0, stream).map(drop),
            gpu.capture_status(0, stream).map(drop),
            gpu.device_synchronize(0),
            gpu.launch(0, stream, 1, 1),
            gpu.stream_write_value(0, stream, 8, 1),
            gpu.stream_wait_value(0, stream, 8, 1, gruyere_phantom::Comparison::Equal),
            gpu.launch_host_function(0, stream).map(drop),
            gpu.begin_capture(0, stream, Default::default(), None).map(drop),
            gpu.end_capture(0, stream).map(drop),
            gpu.replay(0, 1, stream),
            gpu.graph_destroy(0, 1),
            gpu.stream_destroy(0, stream),
            gpu.pool_destroy(0, pool),
            gpu.reset_device(0, None),
        ];
        assert_eq!(results.len(), CallKind::ALL.len());
        let struck = results.iter().filter_map(|r| r.err()).find(|error| error.code == 999);
        assert_eq!(struck.map(|error| error.call), Some(kind.name()));
    }
}
