//! The in-process face of the simulator: [`gruyere_heap::driver::Driver`] over a
//! [`gruyere_phantom::Gpu`].
//!
//! Every call counts as the allocator's (see [`gruyere_phantom::as_program`]) and runs under the
//! relaxed capture mode, as gruyere's CUDA driver does.

#![deny(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use gruyere_heap::driver::{
    Capabilities, CaptureStatus, DeviceId, DevicePtr, Driver, DriverError, EventHandle, IpcHandle,
    MemoryInfo, PhysicalHandle, PoolAttribute, PoolHandle, Result, StreamHandle,
};
use gruyere_phantom::{Gpu, SimError, SimResult, Source, StreamKind, relaxed};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, pwrite};

/// A driver with a simulated device.
#[derive(Clone, Debug)]
pub struct PhantomDriver {
    gpu: Arc<Gpu>,
}

impl PhantomDriver {
    /// A driver over `gpu`, which can be shared: the harness launches and waits on it, and several
    /// drivers may allocate from it.
    pub fn new(gpu: Arc<Gpu>) -> Self {
        Self { gpu }
    }

    /// The simulator.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

fn error(error: SimError) -> DriverError {
    DriverError::from_code(error.call, error.code)
}

/// Makes a call as gruyere does.
fn call<T>(make: impl FnOnce() -> SimResult<T>) -> Result<T> {
    relaxed(make).map_err(error)
}

fn attribute_of(attribute: PoolAttribute) -> gruyere_phantom::PoolAttribute {
    use gruyere_phantom::PoolAttribute as Sim;
    match attribute {
        PoolAttribute::ReuseFollowEventDependencies => Sim::ReuseFollowEventDependencies,
        PoolAttribute::ReuseAllowOpportunistic => Sim::ReuseAllowOpportunistic,
        PoolAttribute::ReuseAllowInternalDependencies => Sim::ReuseAllowInternalDependencies,
        PoolAttribute::ReleaseThreshold => Sim::ReleaseThreshold,
        PoolAttribute::ReservedCurrent => Sim::ReservedCurrent,
        PoolAttribute::ReservedHigh => Sim::ReservedHigh,
        PoolAttribute::UsedCurrent => Sim::UsedCurrent,
        PoolAttribute::UsedHigh => Sim::UsedHigh,
    }
}

impl Driver for PhantomDriver {
    fn host_time(&self) -> Duration {
        Duration::from_nanos(self.gpu.host_time().now)
    }

    fn device_count(&self) -> Result<u32> {
        Ok(self.gpu.device_count())
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities> {
        let config = call(|| self.gpu.device_config(device))?;
        let mut uuid = *b"phantom gpu \0\0\0\0";
        uuid[12..].copy_from_slice(&device.to_be_bytes());
        Ok(Capabilities {
            vmm: config.vmm,
            pools: config.pools,
            stream_ids: self.gpu.has_stream_ids(),
            context_events: self.gpu.has_context_events(),
            gpu_direct_rdma: false,
            granularity: if config.vmm { config.granularity } else { 0 },
            total_memory: config.capacity,
            host_memory: config.host_memory,
            name: "Phantom GPU".to_owned(),
            uuid,
            compute_capability: (9, 0),
        })
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        let (free, total) = call(|| self.gpu.memory_info(device))?;
        Ok(MemoryInfo { free, total })
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        call(|| self.gpu.can_access_peer(device, peer))
    }

    fn pool_create(&self, device: DeviceId, max_size: u64) -> Result<PoolHandle> {
        call(|| self.gpu.pool_create(device, max_size)).map(PoolHandle)
    }

    fn pool_destroy(&self, device: DeviceId, pool: PoolHandle) -> Result<()> {
        call(|| self.gpu.pool_destroy(device, pool.0))
    }

    fn pool_attribute(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        attribute: PoolAttribute,
    ) -> Result<u64> {
        call(|| self.gpu.pool_attribute(device, pool.0, attribute_of(attribute)))
    }

    fn pool_set_attribute(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Result<()> {
        call(|| self.gpu.pool_set_attribute(device, pool.0, attribute_of(attribute), value))
    }

    fn pool_trim(&self, device: DeviceId, pool: PoolHandle, keep: u64) -> Result<()> {
        call(|| self.gpu.pool_trim(device, pool.0, keep))
    }

    fn pool_allow_peer(&self, device: DeviceId, pool: PoolHandle, peer: DeviceId) -> Result<()> {
        call(|| self.gpu.pool_allow_peer(device, pool.0, peer))
    }

    fn pool_alloc(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<DevicePtr> {
        call(|| self.gpu.pool_alloc(device, pool.0, bytes, stream.0))
    }

    fn pool_free(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> Result<()> {
        call(|| self.gpu.pool_free(device, address, stream.0))
    }

    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<DevicePtr> {
        call(|| self.gpu.address_reserve(device, bytes, align))
    }

    fn address_free(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()> {
        call(|| self.gpu.address_free(device, address, bytes))
    }

    fn physical_create(&self, device: DeviceId, bytes: u64) -> Result<PhysicalHandle> {
        call(|| self.gpu.physical_create(device, bytes)).map(PhysicalHandle)
    }

    fn physical_release(&self, device: DeviceId, handle: PhysicalHandle) -> Result<()> {
        call(|| self.gpu.physical_release(device, handle.0))
    }

    fn map(
        &self,
        device: DeviceId,
        address: DevicePtr,
        bytes: u64,
        handle: PhysicalHandle,
    ) -> Result<()> {
        call(|| self.gpu.map(device, address, bytes, 0, handle.0))
    }

    fn set_access(
        &self,
        device: DeviceId,
        address: DevicePtr,
        bytes: u64,
        peers: &[DeviceId],
    ) -> Result<()> {
        let mut devices = Vec::with_capacity(peers.len() + 1);
        devices.push(device);
        devices.extend(peers.iter().copied().filter(|&peer| peer != device));
        call(|| self.gpu.set_access(device, address, bytes, &devices))
    }

    fn unmap(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()> {
        call(|| self.gpu.unmap(device, address, bytes))
    }

    fn alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        call(|| self.gpu.alloc(device, bytes))
    }

    fn free(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        call(|| self.gpu.free(device, address))
    }

    /// A file with the handle's number.
    fn physical_export(&self, _device: DeviceId, handle: PhysicalHandle) -> Result<OwnedFd> {
        const CALL: &str = "cuMemExportToShareableHandle";
        if self.gpu.physical_bytes(handle.0).is_none() {
            return Err(DriverError::from_code(CALL, 1));
        }
        memfd_create("phantom handle", MemfdFlags::CLOEXEC)
            .and_then(|file| pwrite(&file, &handle.0.to_le_bytes(), 0).map(|_| file))
            .map_err(|_| DriverError::from_code(CALL, 999))
    }

    /// The handle itself: the exporter has the same simulator.
    fn physical_import(&self, device: DeviceId, file: OwnedFd) -> Result<PhysicalHandle> {
        let mut number = [0; 8];
        let handle = pread(&file, &mut number, 0).map_or(0, |_| u64::from_le_bytes(number));
        call(|| self.gpu.physical_retain(device, handle))?;
        Ok(PhysicalHandle(handle))
    }

    /// The bytes and the address.
    fn ipc_handle(&self, _device: DeviceId, address: DevicePtr) -> Result<IpcHandle> {
        let whole = self.gpu.allocation(address).filter(|whole| whole.source == Source::Plain);
        let whole = whole.ok_or(DriverError::from_code("cuIpcGetMemHandle", 1))?;
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&whole.bytes.to_le_bytes());
        handle[8..16].copy_from_slice(&address.to_le_bytes());
        Ok(handle)
    }

    /// Fresh memory of the same length.
    fn ipc_open(&self, device: DeviceId, handle: IpcHandle) -> Result<DevicePtr> {
        let [a, b, c, d, e, f, g, h, ..] = handle;
        call(|| self.gpu.alloc(device, u64::from_le_bytes([a, b, c, d, e, f, g, h])))
    }

    fn ipc_close(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        call(|| self.gpu.free(device, address))
    }

    /// Fills nothing, since no memory exists; the range must be backed.
    fn memset(
        &self,
        device: DeviceId,
        address: DevicePtr,
        _value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        call(|| self.gpu.memset(device, address, bytes, stream.0))
    }

    fn event_create(&self, device: DeviceId) -> Result<EventHandle> {
        call(|| self.gpu.event_create(device)).map(EventHandle)
    }

    fn event_destroy(&self, device: DeviceId, event: EventHandle) -> Result<()> {
        call(|| self.gpu.event_destroy(device, event.0))
    }

    fn event_record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<()> {
        call(|| self.gpu.event_record(device, event.0, stream.0))
    }

    fn context_event_record(&self, device: DeviceId, event: EventHandle) -> Result<()> {
        call(|| self.gpu.context_event_record(device, event.0))
    }

    fn event_query(&self, device: DeviceId, event: EventHandle) -> Result<bool> {
        call(|| self.gpu.event_query(device, event.0))
    }

    fn event_synchronize(&self, device: DeviceId, event: EventHandle) -> Result<()> {
        call(|| self.gpu.event_synchronize(device, event.0))
    }

    fn stream_wait_event(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<()> {
        call(|| self.gpu.stream_wait_event(device, stream.0, event.0))
    }

    fn stream_create(&self, device: DeviceId) -> Result<StreamHandle> {
        call(|| self.gpu.stream_create(device, StreamKind::NonBlocking)).map(StreamHandle)
    }

    fn stream_destroy(&self, device: DeviceId, stream: StreamHandle) -> Result<()> {
        call(|| self.gpu.stream_destroy(device, stream.0))
    }

    fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> Result<()> {
        call(|| self.gpu.stream_synchronize(device, stream.0))
    }

    fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> Result<u64> {
        call(|| self.gpu.stream_id(device, stream.0))
    }

    fn capture_status(&self, device: DeviceId, stream: StreamHandle) -> Result<CaptureStatus> {
        use gruyere_phantom::CaptureStatus as Sim;
        call(|| self.gpu.capture_status(device, stream.0)).map(|status| match status {
            Sim::None => CaptureStatus::None,
            Sim::Active(id) => CaptureStatus::Active(id),
            Sim::Invalidated => CaptureStatus::Invalidated,
        })
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        call(|| self.gpu.device_synchronize(device))
    }
}
