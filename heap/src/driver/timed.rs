//! The driver, its calls timed: on the record those that change memory or wait, elsewhere
//! (`gruyere bench --device cuda`) all of them.
//!
//! On the record a call costs two reads of the clock and one locked instruction more. Questions
//! (captures, ids, events asked for or recorded) go through untouched there; those of the hot path
//! do not even come this way (`Shared::questions`).

use std::sync::{Arc, OnceLock};

use crate::driver::{
    Capabilities, CaptureStatus, DeviceId, DevicePtr, Driver, EventHandle, MemoryInfo,
    PhysicalHandle, PoolAttribute, PoolHandle, Result, StreamHandle,
};
use gruyere_record::calls::{CallTimes, CallWriter, DriverCall, RECORDED_CALLS};
use gruyere_record::{Record, clock};

/// Who is told how long calls take.
pub trait Stopwatch: Send + Sync {
    /// Makes a call about `bytes` (0: the call has none) and notes how long it takes, where that is
    /// wanted. One that fails is a call too.
    fn time<T>(&self, call: DriverCall, bytes: u64, make: impl FnOnce() -> T) -> T;
}

/// A driver whose calls are timed.
pub struct Timed<S> {
    inner: Arc<dyn Driver>,
    watch: S,
}

impl<S: Stopwatch> Timed<S> {
    /// `inner`, timed by `watch`.
    pub fn new(inner: Arc<dyn Driver>, watch: S) -> Self {
        Self { inner, watch }
    }

    /// Who is told.
    pub fn watch(&self) -> &S {
        &self.watch
    }

    #[inline(always)]
    fn time<T>(
        &self,
        call: DriverCall,
        bytes: u64,
        make: impl FnOnce(&dyn Driver) -> Result<T>,
    ) -> Result<T> {
        self.watch.time(call, bytes, || make(&*self.inner))
    }
}

/// Notes on the record how long calls take.
pub struct OnRecord {
    record: &'static Record,
    /// By call, from its first on; `None`: the record has no room for it.
    times: [OnceLock<Option<&'static CallTimes>>; RECORDED_CALLS],
    writers: [CallWriter; RECORDED_CALLS],
}

impl OnRecord {
    /// On `record`.
    pub fn new(record: &'static Record) -> Self {
        Self {
            record,
            times: [const { OnceLock::new() }; RECORDED_CALLS],
            writers: Default::default(),
        }
    }
}

impl Stopwatch for OnRecord {
    #[inline(always)]
    fn time<T>(&self, call: DriverCall, bytes: u64, make: impl FnOnce() -> T) -> T {
        // Known where this is compiled, as is the call: questions come out as the bare call.
        if !call.is_recorded() {
            return make();
        }
        let start = clock::now();
        let answer = make();
        // The counters of two processors may be a little apart.
        let ticks = clock::now().saturating_sub(start);
        let times = self.times[call as usize].get_or_init(|| self.record.call_times(call));
        if let Some(times) = times {
            self.writers[call as usize].note(times, bytes, ticks);
        }
        answer
    }
}

impl<S: Stopwatch> Driver for Timed<S> {
    fn device_count(&self) -> Result<u32> {
        self.inner.device_count()
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities> {
        self.time(DriverCall::DeviceQuery, 0, |driver| driver.capabilities(device))
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.time(DriverCall::MemoryInfo, 0, |driver| driver.memory_info(device))
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        self.time(DriverCall::DeviceQuery, 0, |driver| driver.can_access_peer(device, peer))
    }

    fn pool_create(&self, device: DeviceId, max_size: u64) -> Result<PoolHandle> {
        self.time(DriverCall::PoolCreate, 0, |driver| driver.pool_create(device, max_size))
    }

    fn pool_destroy(&self, device: DeviceId, pool: PoolHandle) -> Result<()> {
        self.time(DriverCall::PoolDestroy, 0, |driver| driver.pool_destroy(device, pool))
    }

    fn pool_attribute(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        attribute: PoolAttribute,
    ) -> Result<u64> {
        self.time(DriverCall::PoolGetAttribute, 0, |driver| {
            driver.pool_attribute(device, pool, attribute)
        })
    }

    fn pool_set_attribute(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Result<()> {
        self.time(DriverCall::PoolSetAttribute, 0, |driver| {
            driver.pool_set_attribute(device, pool, attribute, value)
        })
    }

    fn pool_trim(&self, device: DeviceId, pool: PoolHandle, keep: u64) -> Result<()> {
        self.time(DriverCall::PoolTrim, 0, |driver| driver.pool_trim(device, pool, keep))
    }

    fn pool_allow_peer(&self, device: DeviceId, pool: PoolHandle, peer: DeviceId) -> Result<()> {
        self.time(DriverCall::PoolSetAccess, 0, |driver| driver.pool_allow_peer(device, pool, peer))
    }

    fn pool_alloc(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<DevicePtr> {
        self.time(DriverCall::PoolAlloc, bytes, |driver| {
            driver.pool_alloc(device, pool, bytes, stream)
        })
    }

    fn pool_free(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.time(DriverCall::PoolFree, 0, |driver| driver.pool_free(device, address, stream))
    }

    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<DevicePtr> {
        self.time(DriverCall::AddressReserve, bytes, |driver| {
            driver.address_reserve(device, bytes, align)
        })
    }

    fn address_free(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()> {
        self.time(DriverCall::AddressFree, bytes, |driver| {
            driver.address_free(device, address, bytes)
        })
    }

    fn physical_create(&self, device: DeviceId, bytes: u64) -> Result<PhysicalHandle> {
        self.time(DriverCall::Create, bytes, |driver| driver.physical_create(device, bytes))
    }

    fn physical_release(&self, device: DeviceId, handle: PhysicalHandle) -> Result<()> {
        self.time(DriverCall::Release, 0, |driver| driver.physical_release(device, handle))
    }

    fn map(
        &self,
        device: DeviceId,
        address: DevicePtr,
        bytes: u64,
        handle: PhysicalHandle,
    ) -> Result<()> {
        self.time(DriverCall::Map, bytes, |driver| driver.map(device, address, bytes, handle))
    }

    fn set_access(
        &self,
        device: DeviceId,
        address: DevicePtr,
        bytes: u64,
        peers: &[DeviceId],
    ) -> Result<()> {
        self.time(DriverCall::SetAccess, bytes, |driver| {
            driver.set_access(device, address, bytes, peers)
        })
    }

    fn unmap(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()> {
        self.time(DriverCall::Unmap, bytes, |driver| driver.unmap(device, address, bytes))
    }

    fn alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        self.time(DriverCall::Alloc, bytes, |driver| driver.alloc(device, bytes))
    }

    fn free(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        self.time(DriverCall::Free, 0, |driver| driver.free(device, address))
    }

    fn memset(
        &self,
        device: DeviceId,
        address: DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.time(DriverCall::Memset, bytes, |driver| {
            driver.memset(device, address, value, bytes, stream)
        })
    }

    fn event_create(&self, device: DeviceId) -> Result<EventHandle> {
        self.time(DriverCall::EventCreate, 0, |driver| driver.event_create(device))
    }

    fn event_destroy(&self, device: DeviceId, event: EventHandle) -> Result<()> {
        self.time(DriverCall::EventDestroy, 0, |driver| driver.event_destroy(device, event))
    }

    fn event_record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<()> {
        self.time(DriverCall::EventRecord, 0, |driver| driver.event_record(device, event, stream))
    }

    fn context_event_record(&self, device: DeviceId, event: EventHandle) -> Result<()> {
        self.time(DriverCall::ContextEventRecord, 0, |driver| {
            driver.context_event_record(device, event)
        })
    }

    fn event_query(&self, device: DeviceId, event: EventHandle) -> Result<bool> {
        self.time(DriverCall::EventQuery, 0, |driver| driver.event_query(device, event))
    }

    fn event_synchronize(&self, device: DeviceId, event: EventHandle) -> Result<()> {
        self.time(DriverCall::EventSynchronize, 0, |driver| driver.event_synchronize(device, event))
    }

    fn stream_wait_event(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<()> {
        self.time(DriverCall::StreamWaitEvent, 0, |driver| {
            driver.stream_wait_event(device, stream, event)
        })
    }

    fn stream_create(&self, device: DeviceId) -> Result<StreamHandle> {
        self.time(DriverCall::StreamCreate, 0, |driver| driver.stream_create(device))
    }

    fn stream_destroy(&self, device: DeviceId, stream: StreamHandle) -> Result<()> {
        self.time(DriverCall::StreamDestroy, 0, |driver| driver.stream_destroy(device, stream))
    }

    fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> Result<()> {
        self.time(DriverCall::StreamSynchronize, 0, |driver| {
            driver.stream_synchronize(device, stream)
        })
    }

    fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> Result<u64> {
        self.time(DriverCall::StreamId, 0, |driver| driver.stream_id(device, stream))
    }

    fn capture_status(&self, device: DeviceId, stream: StreamHandle) -> Result<CaptureStatus> {
        self.time(DriverCall::CaptureStatus, 0, |driver| driver.capture_status(device, stream))
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        self.time(DriverCall::DeviceSynchronize, 0, |driver| driver.device_synchronize(device))
    }
}
