//! Promises of every [`Driver`], one function each. `driver_phantom.rs` instantiates them for the
//! in-process face of the simulator, `driver_cuda_on_phantom.rs` for CUDA's driver over the ABI
//! face. They expect at least two devices with every feature, and leave the devices as empty as
//! before.

use gruyere::driver::{
    CaptureStatus, DeviceId, Driver, DriverError, ErrorKind, PhysicalHandle, PoolAttribute, Result,
    StreamHandle,
};

const MIB: u64 = 1 << 20;
const LEGACY: StreamHandle = StreamHandle(0);
const PER_THREAD: StreamHandle = StreamHandle(2);

/// Makes one `#[test]` of each promise: `$on(name, promise)` runs it on a driver.
#[macro_export]
macro_rules! driver_conformance {
    ($on:path) => {
        $crate::driver_conformance!(
            $on:
            devices_tell_what_they_can,
            a_device_that_does_not_exist_is_an_error,
            plain_memory_comes_and_goes,
            plain_memory_is_freed_once,
            what_does_not_fit_is_out_of_memory,
            pools_hold_memory_until_trimmed,
            pool_attributes_read_back,
            a_pool_stays_within_its_maximum,
            pool_memory_is_freed_once,
            pages_are_mapped_moved_and_released,
            one_page_may_stand_at_two_addresses,
            vmm_misuse_is_refused,
            memory_is_opened_to_peers,
            events_follow_their_stream,
            an_event_behind_a_context_is_behind_all_its_streams,
            streams_are_told_apart,
            default_streams_work,
            nothing_captures_unasked,
            every_thread_may_call,
        );
    };
    ($on:path: $($promise:ident),* $(,)?) => {
        $(
            #[test]
            fn $promise() {
                $on(stringify!($promise), driver_conformance::$promise);
            }
        )*
    };
}

/// Free memory of `device`.
fn free(driver: &dyn Driver, device: DeviceId) -> u64 {
    driver.memory_info(device).unwrap().free
}

/// The kind of a call's expected error.
fn refusal<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.expect_err("a misuse was accepted").kind
}

pub fn devices_tell_what_they_can(driver: &dyn Driver) {
    let count = driver.device_count().unwrap();
    assert!(count >= 2);
    for device in 0..count {
        let capabilities = driver.capabilities(device).unwrap();
        assert!(capabilities.vmm && capabilities.pools && capabilities.stream_ids);
        assert_eq!(capabilities.granularity, 2 * MIB);
        assert!(!capabilities.name.is_empty() && capabilities.uuid != [0; 16]);
        let info = driver.memory_info(device).unwrap();
        assert_eq!(info.total, capabilities.total_memory);
        assert!(info.free <= info.total);
        assert_eq!(driver.capabilities(device), Ok(capabilities));
    }
    let uuid = |device| driver.capabilities(device).unwrap().uuid;
    assert_ne!(uuid(0), uuid(1));
}

pub fn a_device_that_does_not_exist_is_an_error(driver: &dyn Driver) {
    let device = driver.device_count().unwrap();
    assert_eq!(refusal(driver.capabilities(device)), ErrorKind::InvalidValue);
    assert_eq!(refusal(driver.memory_info(device)), ErrorKind::InvalidValue);
    assert_eq!(refusal(driver.alloc(device, MIB)), ErrorKind::InvalidValue);
    assert_eq!(refusal(driver.event_create(device)), ErrorKind::InvalidValue);
    assert_ne!(driver.can_access_peer(0, device), Ok(true));
    assert_eq!(refusal(driver.device_synchronize(DeviceId::MAX)), ErrorKind::InvalidValue);
}

pub fn plain_memory_comes_and_goes(driver: &dyn Driver) {
    for device in [0, 1] {
        let before = free(driver, device);
        let address = driver.alloc(device, 4 * MIB).unwrap();
        assert_ne!(address, 0);
        assert_eq!(address % 512, 0);
        assert_eq!(free(driver, device), before - 4 * MIB);
        driver.memset(device, address, 0xCD, 4 * MIB, LEGACY).unwrap();
        driver.device_synchronize(device).unwrap();
        driver.free(device, address).unwrap();
        assert_eq!(free(driver, device), before);
    }
}

pub fn plain_memory_is_freed_once(driver: &dyn Driver) {
    let address = driver.alloc(0, MIB).unwrap();
    driver.free(0, address).unwrap();
    assert_eq!(refusal(driver.free(0, address)), ErrorKind::InvalidValue);
    assert_eq!(refusal(driver.free(0, 0x1234)), ErrorKind::InvalidValue);
}

pub fn what_does_not_fit_is_out_of_memory(driver: &dyn Driver) {
    let total = driver.capabilities(0).unwrap().total_memory;
    let before = free(driver, 0);
    let kinds = |error: DriverError| (error.kind, error.is_out_of_memory());
    let pool = driver.pool_create(0, 0).unwrap();
    for error in [
        driver.alloc(0, total + 2 * MIB).map(drop),
        driver.physical_create(0, total + 2 * MIB).map(drop),
        driver.pool_alloc(0, pool, total + 2 * MIB, LEGACY).map(drop),
    ] {
        assert_eq!(kinds(error.unwrap_err()), (ErrorKind::OutOfMemory, true));
    }
    driver.pool_destroy(0, pool).unwrap();
    assert_eq!(free(driver, 0), before, "a failed call kept memory");
}

pub fn pools_hold_memory_until_trimmed(driver: &dyn Driver) {
    let before = free(driver, 1);
    let pool = driver.pool_create(1, 0).unwrap();
    driver.pool_set_attribute(1, pool, PoolAttribute::ReleaseThreshold, u64::MAX).unwrap();
    let stream = driver.stream_create(1).unwrap();
    let value = |attribute| driver.pool_attribute(1, pool, attribute).unwrap();

    let first = driver.pool_alloc(1, pool, 20 * MIB, stream).unwrap();
    let second = driver.pool_alloc(1, pool, 20 * MIB, stream).unwrap();
    assert!(first.abs_diff(second) >= 20 * MIB, "two live allocations overlap");
    assert_eq!(value(PoolAttribute::UsedCurrent), 40 * MIB);
    let reserved = value(PoolAttribute::ReservedCurrent);
    assert!(reserved >= 40 * MIB);
    assert_eq!(free(driver, 1), before - reserved);

    driver.memset(1, second, 1, 20 * MIB, stream).unwrap();
    driver.pool_free(1, first, stream).unwrap();
    driver.pool_free(1, second, stream).unwrap();
    driver.stream_synchronize(1, stream).unwrap();
    assert_eq!(value(PoolAttribute::UsedCurrent), 0);
    assert_eq!(value(PoolAttribute::ReservedCurrent), reserved, "the threshold keeps everything");
    assert_eq!(value(PoolAttribute::UsedHigh), 40 * MIB);

    driver.pool_trim(1, pool, 0).unwrap();
    assert_eq!(value(PoolAttribute::ReservedCurrent), 0);
    assert_eq!(free(driver, 1), before);
    driver.pool_set_attribute(1, pool, PoolAttribute::UsedHigh, 0).unwrap();
    assert_eq!(value(PoolAttribute::UsedHigh), 0);

    driver.stream_destroy(1, stream).unwrap();
    driver.pool_destroy(1, pool).unwrap();
}

pub fn pool_attributes_read_back(driver: &dyn Driver) {
    let pool = driver.pool_create(0, 64 * MIB).unwrap();
    for attribute in [
        PoolAttribute::ReuseFollowEventDependencies,
        PoolAttribute::ReuseAllowOpportunistic,
        PoolAttribute::ReuseAllowInternalDependencies,
    ] {
        assert_eq!(
            driver.pool_attribute(0, pool, attribute),
            Ok(1),
            "{attribute:?} is on by default"
        );
        driver.pool_set_attribute(0, pool, attribute, 0).unwrap();
        assert_eq!(driver.pool_attribute(0, pool, attribute), Ok(0), "{attribute:?}");
    }
    assert_eq!(driver.pool_attribute(0, pool, PoolAttribute::ReleaseThreshold), Ok(0));
    for threshold in [5 * MIB, 1 << 40, u64::MAX] {
        driver.pool_set_attribute(0, pool, PoolAttribute::ReleaseThreshold, threshold).unwrap();
        assert_eq!(driver.pool_attribute(0, pool, PoolAttribute::ReleaseThreshold), Ok(threshold));
    }
    driver.pool_destroy(0, pool).unwrap();
}

pub fn a_pool_stays_within_its_maximum(driver: &dyn Driver) {
    let pool = driver.pool_create(0, 64 * MIB).unwrap();
    let first = driver.pool_alloc(0, pool, 40 * MIB, LEGACY).unwrap();
    assert_eq!(refusal(driver.pool_alloc(0, pool, 40 * MIB, LEGACY)), ErrorKind::OutOfMemory);
    driver.pool_free(0, first, LEGACY).unwrap();
    driver.device_synchronize(0).unwrap();
    driver.pool_destroy(0, pool).unwrap();
}

pub fn pool_memory_is_freed_once(driver: &dyn Driver) {
    let pool = driver.pool_create(0, 0).unwrap();
    let address = driver.pool_alloc(0, pool, MIB, LEGACY).unwrap();
    driver.pool_free(0, address, LEGACY).unwrap();
    assert_eq!(refusal(driver.pool_free(0, address, LEGACY)), ErrorKind::InvalidValue);
    driver.device_synchronize(0).unwrap();
    driver.pool_destroy(0, pool).unwrap();
}

pub fn pages_are_mapped_moved_and_released(driver: &dyn Driver) {
    let page = driver.capabilities(0).unwrap().granularity;
    let before = free(driver, 0);
    let range = driver.address_reserve(0, 4 * page, page).unwrap();
    assert_eq!(range % page, 0);
    assert_eq!(free(driver, 0), before, "address space is not memory");

    let pages: Vec<PhysicalHandle> =
        (0..2).map(|_| driver.physical_create(0, page).unwrap()).collect();
    driver.map(0, range, page, pages[0]).unwrap();
    driver.map(0, range + page, page, pages[1]).unwrap();
    driver.set_access(0, range, 2 * page, &[]).unwrap();
    driver.memset(0, range, 0, 2 * page, LEGACY).unwrap();
    driver.device_synchronize(0).unwrap();
    assert_eq!(free(driver, 0), before - 2 * page);

    // Moved: from the first place to the last.
    driver.unmap(0, range, page).unwrap();
    driver.map(0, range + 3 * page, page, pages[0]).unwrap();
    driver.set_access(0, range + 3 * page, page, &[]).unwrap();
    assert_eq!(free(driver, 0), before - 2 * page);

    for handle in pages {
        driver.physical_release(0, handle).unwrap();
    }
    assert_eq!(free(driver, 0), before - 2 * page, "memory lives while it is mapped");
    driver.unmap(0, range + page, page).unwrap();
    driver.unmap(0, range + 3 * page, page).unwrap();
    assert_eq!(free(driver, 0), before);
    driver.address_free(0, range, 4 * page).unwrap();
}

pub fn one_page_may_stand_at_two_addresses(driver: &dyn Driver) {
    let page = driver.capabilities(0).unwrap().granularity;
    let before = free(driver, 0);
    let range = driver.address_reserve(0, 2 * page, page).unwrap();
    let handle = driver.physical_create(0, page).unwrap();
    driver.map(0, range, page, handle).unwrap();
    driver.map(0, range + page, page, handle).unwrap();
    driver.set_access(0, range, 2 * page, &[]).unwrap();
    assert_eq!(free(driver, 0), before - page, "an alias is not memory");
    // One unmap may cover several whole mappings.
    driver.unmap(0, range, 2 * page).unwrap();
    assert_eq!(free(driver, 0), before - page, "the handle holds it");
    driver.physical_release(0, handle).unwrap();
    assert_eq!(free(driver, 0), before);
    driver.address_free(0, range, 2 * page).unwrap();
}

pub fn vmm_misuse_is_refused(driver: &dyn Driver) {
    let page = driver.capabilities(0).unwrap().granularity;
    let before = free(driver, 0);
    let range = driver.address_reserve(0, 4 * page, page).unwrap();
    let (small, large) =
        (driver.physical_create(0, page).unwrap(), driver.physical_create(0, 2 * page).unwrap());
    driver.map(0, range, 2 * page, large).unwrap();

    let refused = [
        ("mapping over a mapping", driver.map(0, range, page, small)),
        ("mapping across a mapping", driver.map(0, range + page, 2 * page, large)),
        ("mapping outside of a reservation", driver.map(0, range + 4 * page, page, small)),
        ("mapping more than the handle has", driver.map(0, range + 2 * page, 2 * page, small)),
        ("mapping a part of the handle", driver.map(0, range + 2 * page, page, large)),
        ("mapping at a crooked address", driver.map(0, range + 2 * page + 512, page, small)),
        ("unmapping a part of a mapping", driver.unmap(0, range, page)),
        ("unmapping what is not mapped", driver.unmap(0, range + 2 * page, page)),
        ("access to what is not mapped", driver.set_access(0, range + 2 * page, page, &[])),
        ("freeing a mapped range", driver.address_free(0, range, 4 * page)),
        ("freeing a part of a reservation", driver.address_free(0, range + 2 * page, 2 * page)),
        ("physical memory of half a page", driver.physical_create(0, page / 2).map(drop)),
    ];
    for (what, result) in refused {
        assert_eq!(result.map_err(|error| error.kind), Err(ErrorKind::InvalidValue), "{what}");
    }

    driver.unmap(0, range, 2 * page).unwrap();
    driver.physical_release(0, small).unwrap();
    driver.physical_release(0, large).unwrap();
    assert_eq!(refusal(driver.physical_release(0, small)), ErrorKind::InvalidValue);
    assert_eq!(refusal(driver.map(0, range, page, small)), ErrorKind::InvalidValue);
    driver.address_free(0, range, 4 * page).unwrap();
    assert_eq!(refusal(driver.address_free(0, range, 4 * page)), ErrorKind::InvalidValue);
    assert_eq!(free(driver, 0), before);
}

pub fn memory_is_opened_to_peers(driver: &dyn Driver) {
    let page = driver.capabilities(0).unwrap().granularity;
    assert_eq!(driver.can_access_peer(0, 0), Ok(false), "a device is no peer of itself");
    assert_eq!(driver.can_access_peer(0, 1), Ok(true));
    let range = driver.address_reserve(0, page, page).unwrap();
    let handle = driver.physical_create(0, page).unwrap();
    driver.map(0, range, page, handle).unwrap();
    driver.set_access(0, range, page, &[1]).unwrap();
    // The owner among the peers is no error.
    driver.set_access(0, range, page, &[0, 1]).unwrap();
    let nobody = driver.device_count().unwrap();
    assert_eq!(refusal(driver.set_access(0, range, page, &[nobody])), ErrorKind::InvalidValue);
    driver.unmap(0, range, page).unwrap();
    driver.physical_release(0, handle).unwrap();
    driver.address_free(0, range, page).unwrap();

    let pool = driver.pool_create(0, 0).unwrap();
    driver.pool_allow_peer(0, pool, 1).unwrap();
    assert_eq!(refusal(driver.pool_allow_peer(0, pool, nobody)), ErrorKind::InvalidValue);
    driver.pool_destroy(0, pool).unwrap();
}

pub fn events_follow_their_stream(driver: &dyn Driver) {
    for device in [0, 1] {
        let (stream, other) =
            (driver.stream_create(device).unwrap(), driver.stream_create(device).unwrap());
        let event = driver.event_create(device).unwrap();
        assert_eq!(driver.event_query(device, event), Ok(true), "nothing was recorded");
        let address = driver.alloc(device, MIB).unwrap();
        driver.memset(device, address, 7, MIB, stream).unwrap();
        driver.event_record(device, event, stream).unwrap();
        driver.stream_wait_event(device, other, event).unwrap();
        driver.event_synchronize(device, event).unwrap();
        assert_eq!(driver.event_query(device, event), Ok(true));
        driver.event_record(device, event, other).unwrap();
        driver.stream_synchronize(device, other).unwrap();
        assert_eq!(driver.event_query(device, event), Ok(true), "an event may be recorded again");
        driver.free(device, address).unwrap();
        driver.event_destroy(device, event).unwrap();
        driver.stream_destroy(device, stream).unwrap();
        driver.stream_destroy(device, other).unwrap();
    }
}

pub fn an_event_behind_a_context_is_behind_all_its_streams(driver: &dyn Driver) {
    let stream = driver.stream_create(0).unwrap();
    let event = driver.event_create(0).unwrap();
    let address = driver.alloc(0, MIB).unwrap();
    driver.memset(0, address, 7, MIB, stream).unwrap();
    driver.context_event_record(0, event).unwrap();
    driver.event_synchronize(0, event).unwrap();
    assert_eq!(driver.event_query(0, event), Ok(true));
    let elsewhere = driver.event_create(1).unwrap();
    assert!(driver.context_event_record(0, elsewhere).is_err(), "an event of another context");
    driver.event_destroy(1, elsewhere).unwrap();
    driver.event_destroy(0, event).unwrap();
    driver.free(0, address).unwrap();
    driver.stream_destroy(0, stream).unwrap();
}

pub fn streams_are_told_apart(driver: &dyn Driver) {
    let mut ids = Vec::new();
    for _ in 0..3 {
        let stream = driver.stream_create(0).unwrap();
        let id = driver.stream_id(0, stream).unwrap();
        assert_eq!(driver.stream_id(0, stream), Ok(id), "an id stays");
        ids.push(id);
        // The next stream may get its handle, but not its id.
        driver.stream_destroy(0, stream).unwrap();
    }
    ids.push(driver.stream_id(0, LEGACY).unwrap());
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 4);
}

pub fn default_streams_work(driver: &dyn Driver) {
    let address = driver.alloc(1, MIB).unwrap();
    let event = driver.event_create(1).unwrap();
    for stream in [LEGACY, StreamHandle(1), PER_THREAD] {
        driver.memset(1, address, 0, MIB, stream).unwrap();
        driver.event_record(1, event, stream).unwrap();
        driver.stream_wait_event(1, stream, event).unwrap();
        driver.stream_synchronize(1, stream).unwrap();
        assert_eq!(driver.event_query(1, event), Ok(true));
    }
    driver.event_destroy(1, event).unwrap();
    driver.free(1, address).unwrap();
}

pub fn nothing_captures_unasked(driver: &dyn Driver) {
    let stream = driver.stream_create(0).unwrap();
    for stream in [LEGACY, PER_THREAD, stream] {
        assert_eq!(driver.capture_status(0, stream), Ok(CaptureStatus::None));
    }
    driver.stream_destroy(0, stream).unwrap();
}

pub fn every_thread_may_call(driver: &dyn Driver) {
    let before = [free(driver, 0), free(driver, 1)];
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                for turn in 0..50 {
                    let device = (thread + turn) % 2;
                    let address = driver.alloc(device, 2 * MIB).unwrap();
                    let event = driver.event_create(device).unwrap();
                    driver.event_record(device, event, LEGACY).unwrap();
                    driver.event_synchronize(device, event).unwrap();
                    driver.event_destroy(device, event).unwrap();
                    driver.free(device, address).unwrap();
                    assert!(driver.free(device, 0x1234).is_err());
                }
            });
        }
    });
    assert_eq!([free(driver, 0), free(driver, 1)], before);
}
