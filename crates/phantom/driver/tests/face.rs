//! Promises of the in-process face beyond the simulator's.

use std::sync::Arc;

use gruyere_heap::driver::{CaptureStatus, Driver, ErrorKind, PoolAttribute, StreamHandle};
use gruyere_phantom::{CallKind, CaptureMode, Config, Gpu, Injection, StreamKind};
use gruyere_phantom_driver::PhantomDriver;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;

fn driver() -> PhantomDriver {
    PhantomDriver::new(Arc::new(Gpu::new(Config::devices(2, 256 * MIB))))
}

#[test]
fn it_serves_any_thread() {
    fn serves(_: impl Driver + Clone + 'static) {}
    serves(driver());
}

#[test]
fn errors_keep_their_code_and_get_their_kind() {
    for (code, kind) in [
        (1, ErrorKind::InvalidValue),
        (2, ErrorKind::OutOfMemory),
        (4, ErrorKind::Deinitialized),
        (719, ErrorKind::DeviceLost),
        (801, ErrorKind::NotSupported),
        (900, ErrorKind::Capturing),
    ] {
        let driver = driver();
        driver.gpu().inject(Injection {
            kind: Some(CallKind::Create),
            nth: 1,
            code,
            from_then_on: false,
        });
        let error = driver.physical_create(0, PAGE).unwrap_err();
        assert_eq!((error.code, error.kind, error.call), (code, kind, "cuMemCreate"));
    }
}

#[test]
fn devices_tell_what_they_can() {
    let driver = driver();
    assert_eq!(driver.device_count(), Ok(2));
    let (one, two) = (driver.capabilities(0).unwrap(), driver.capabilities(1).unwrap());
    assert!(one.vmm && one.pools && one.stream_ids);
    assert_eq!((one.granularity, one.total_memory), (PAGE, 256 * MIB));
    assert_ne!(one.uuid, two.uuid);
    assert_eq!(driver.can_access_peer(0, 1), Ok(true));
    let mut config = Config::new(256 * MIB);
    config.devices[0].vmm = false;
    let plain = PhantomDriver::new(Arc::new(Gpu::new(config))).capabilities(0).unwrap();
    assert_eq!((plain.vmm, plain.granularity), (false, 0));
}

#[test]
fn pools_go_through() {
    let driver = driver();
    let pool = driver.pool_create(0, 64 * MIB).unwrap();
    driver.pool_set_attribute(0, pool, PoolAttribute::ReleaseThreshold, u64::MAX).unwrap();
    driver.pool_allow_peer(0, pool, 1).unwrap();
    let stream = driver.stream_create(0).unwrap();
    let span = driver.pool_alloc(0, pool, 20 * MIB, stream).unwrap();
    driver.stream_synchronize(0, stream).unwrap();
    assert_eq!(driver.pool_attribute(0, pool, PoolAttribute::UsedCurrent), Ok(20 * MIB));
    assert_eq!(driver.memory_info(0).unwrap().free, 224 * MIB);
    assert!(driver.pool_alloc(0, pool, 60 * MIB, stream).unwrap_err().is_out_of_memory());
    driver.pool_free(0, span, stream).unwrap();
    driver.pool_trim(0, pool, 0).unwrap();
    assert_eq!(driver.memory_info(0).unwrap().free, 256 * MIB);
    driver.pool_destroy(0, pool).unwrap();
}

#[test]
fn access_is_for_the_device_and_its_peers() {
    let driver = driver();
    let base = driver.address_reserve(1, PAGE, 0).unwrap();
    let handle = driver.physical_create(1, PAGE).unwrap();
    driver.map(1, base, PAGE, handle).unwrap();
    driver.set_access(1, base, PAGE, &[]).unwrap();
    assert_eq!(driver.gpu().backing(base, PAGE)[0].access, 0b10);
    driver.set_access(1, base, PAGE, &[0, 1]).unwrap();
    assert_eq!(driver.gpu().backing(base, PAGE)[0].access, 0b11);
    driver.unmap(1, base, PAGE).unwrap();
    driver.physical_release(1, handle).unwrap();
    driver.address_free(1, base, PAGE).unwrap();
    assert_eq!(driver.gpu().vmm_counts(), (0, 0));
}

#[test]
fn calls_run_under_the_relaxed_capture_mode() {
    let driver = driver();
    let gpu = driver.gpu();
    let stream = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    let capture = gpu.begin_capture(0, stream, CaptureMode::Global, None).unwrap();
    let memory = driver.alloc(0, MIB).unwrap();
    driver.free(0, memory).unwrap();
    assert_eq!(driver.capture_status(0, StreamHandle(stream)), Ok(CaptureStatus::Active(capture)));
    let event = driver.event_create(0).unwrap();
    assert_eq!(driver.event_query(0, event), Ok(true));
    assert_eq!(gpu.faults(), []);
    let refused = driver.stream_synchronize(0, StreamHandle(stream)).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Capturing);
    assert_eq!(driver.capture_status(0, StreamHandle(stream)), Ok(CaptureStatus::Invalidated));
    assert_eq!(gpu.fault_count(), 1);
}

#[test]
fn order_goes_through() {
    let driver = driver();
    let gpu = driver.gpu();
    let (a, b) = (driver.stream_create(0).unwrap(), driver.stream_create(0).unwrap());
    assert_ne!(driver.stream_id(0, a).unwrap(), driver.stream_id(0, b).unwrap());
    let event = driver.event_create(0).unwrap();
    gpu.launch(0, a.0, 1, 1_000_000).unwrap();
    driver.event_record(0, event, a).unwrap();
    driver.stream_wait_event(0, b, event).unwrap();
    assert_eq!(driver.event_query(0, event), Ok(false));
    driver.event_synchronize(0, event).unwrap();
    assert_eq!(driver.event_query(0, event), Ok(true));
    driver.device_synchronize(0).unwrap();
    let memory = driver.alloc(0, MIB).unwrap();
    driver.memset(0, memory, 0xff, MIB, a).unwrap();
    driver.event_destroy(0, event).unwrap();
    driver.stream_destroy(0, a).unwrap();
    assert_eq!(driver.stream_id(0, a).unwrap_err().kind, ErrorKind::InvalidValue);
}
