//! A driver that is never called: for a heap that only keeps books of what others allocate.

use super::{
    Capabilities, CaptureStatus, DeviceId, DevicePtr, Driver, DriverError, ErrorKind, EventHandle,
    MemoryInfo, PhysicalHandle, PoolAttribute, PoolHandle, Result, StreamHandle,
};

/// Devices of which nothing is known but that there may be as many; every call answers
/// `NotSupported`.
#[derive(Clone, Copy, Debug)]
pub struct AbsentDriver {
    /// How many there are said to be.
    pub devices: u32,
}

macro_rules! unsupported {
    ($(fn $name:ident($($type:ty),*) -> $result:ty;)*) => {
        impl Driver for AbsentDriver {
            fn device_count(&self) -> Result<u32> {
                Ok(self.devices)
            }

            fn capabilities(&self, _: DeviceId) -> Result<Capabilities> {
                Ok(Capabilities {
                    vmm: false,
                    pools: false,
                    stream_ids: false,
                    context_events: false,
                    gpu_direct_rdma: false,
                    granularity: 0,
                    total_memory: 0,
                    host_memory: None,
                    name: String::new(),
                    uuid: [0; 16],
                    compute_capability: (0, 0),
                })
            }

            $(fn $name(&self, $(_: $type),*) -> Result<$result> {
                Err(DriverError::new(stringify!($name), ErrorKind::NotSupported, 0))
            })*
        }
    };
}

unsupported! {
    fn memory_info(DeviceId) -> MemoryInfo;
    fn can_access_peer(DeviceId, DeviceId) -> bool;
    fn pool_create(DeviceId, u64) -> PoolHandle;
    fn pool_destroy(DeviceId, PoolHandle) -> ();
    fn pool_attribute(DeviceId, PoolHandle, PoolAttribute) -> u64;
    fn pool_set_attribute(DeviceId, PoolHandle, PoolAttribute, u64) -> ();
    fn pool_trim(DeviceId, PoolHandle, u64) -> ();
    fn pool_allow_peer(DeviceId, PoolHandle, DeviceId) -> ();
    fn pool_alloc(DeviceId, PoolHandle, u64, StreamHandle) -> DevicePtr;
    fn pool_free(DeviceId, DevicePtr, StreamHandle) -> ();
    fn address_reserve(DeviceId, u64, u64) -> DevicePtr;
    fn address_free(DeviceId, DevicePtr, u64) -> ();
    fn physical_create(DeviceId, u64) -> PhysicalHandle;
    fn physical_release(DeviceId, PhysicalHandle) -> ();
    fn map(DeviceId, DevicePtr, u64, PhysicalHandle) -> ();
    fn set_access(DeviceId, DevicePtr, u64, &[DeviceId]) -> ();
    fn unmap(DeviceId, DevicePtr, u64) -> ();
    fn alloc(DeviceId, u64) -> DevicePtr;
    fn free(DeviceId, DevicePtr) -> ();
    fn memset(DeviceId, DevicePtr, u8, u64, StreamHandle) -> ();
    fn event_create(DeviceId) -> EventHandle;
    fn event_destroy(DeviceId, EventHandle) -> ();
    fn event_record(DeviceId, EventHandle, StreamHandle) -> ();
    fn context_event_record(DeviceId, EventHandle) -> ();
    fn event_query(DeviceId, EventHandle) -> bool;
    fn event_synchronize(DeviceId, EventHandle) -> ();
    fn stream_wait_event(DeviceId, StreamHandle, EventHandle) -> ();
    fn stream_create(DeviceId) -> StreamHandle;
    fn stream_destroy(DeviceId, StreamHandle) -> ();
    fn stream_synchronize(DeviceId, StreamHandle) -> ();
    fn stream_id(DeviceId, StreamHandle) -> u64;
    fn capture_status(DeviceId, StreamHandle) -> CaptureStatus;
    fn device_synchronize(DeviceId) -> ();
}
