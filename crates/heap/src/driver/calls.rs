//! The calls of [`crate::driver::Driver`] as a list, for the drivers that stand around another or
//! in place of one.

/// Expands `$each!` once with every method of [`crate::driver::Driver`]: its name, arguments and
/// result, the [`gruyere_record::calls::DriverCall`] as which it is timed, and the bytes that it is
/// about (0: none).
#[macro_export]
macro_rules! each_driver_call {
    ($each:ident) => {
        $each! {
            device_count() -> u32, DeviceQuery, 0;
            capabilities(
                device: $crate::driver::DeviceId
            ) -> $crate::driver::Capabilities, DeviceQuery, 0;
            memory_info(
                device: $crate::driver::DeviceId
            ) -> $crate::driver::MemoryInfo, MemoryInfo, 0;
            can_access_peer(
                device: $crate::driver::DeviceId, peer: $crate::driver::DeviceId
            ) -> bool, DeviceQuery, 0;
            pool_create(
                device: $crate::driver::DeviceId, max_size: u64
            ) -> $crate::driver::PoolHandle, PoolCreate, 0;
            pool_destroy(
                device: $crate::driver::DeviceId, pool: $crate::driver::PoolHandle
            ) -> (), PoolDestroy, 0;
            pool_attribute(
                device: $crate::driver::DeviceId,
                pool: $crate::driver::PoolHandle,
                attribute: $crate::driver::PoolAttribute
            ) -> u64, PoolGetAttribute, 0;
            pool_set_attribute(
                device: $crate::driver::DeviceId,
                pool: $crate::driver::PoolHandle,
                attribute: $crate::driver::PoolAttribute,
                value: u64
            ) -> (), PoolSetAttribute, 0;
            pool_trim(
                device: $crate::driver::DeviceId, pool: $crate::driver::PoolHandle, keep: u64
            ) -> (), PoolTrim, 0;
            pool_allow_peer(
                device: $crate::driver::DeviceId,
                pool: $crate::driver::PoolHandle,
                peer: $crate::driver::DeviceId
            ) -> (), PoolSetAccess, 0;
            pool_alloc(
                device: $crate::driver::DeviceId,
                pool: $crate::driver::PoolHandle,
                bytes: u64,
                stream: $crate::driver::StreamHandle
            ) -> $crate::driver::DevicePtr, PoolAlloc, bytes;
            pool_free(
                device: $crate::driver::DeviceId,
                address: $crate::driver::DevicePtr,
                stream: $crate::driver::StreamHandle
            ) -> (), PoolFree, 0;
            address_reserve(
                device: $crate::driver::DeviceId, bytes: u64, align: u64
            ) -> $crate::driver::DevicePtr, AddressReserve, bytes;
            address_free(
                device: $crate::driver::DeviceId, address: $crate::driver::DevicePtr, bytes: u64
            ) -> (), AddressFree, bytes;
            physical_create(
                device: $crate::driver::DeviceId, bytes: u64
            ) -> $crate::driver::PhysicalHandle, Create, bytes;
            physical_release(
                device: $crate::driver::DeviceId, handle: $crate::driver::PhysicalHandle
            ) -> (), Release, 0;
            map(
                device: $crate::driver::DeviceId,
                address: $crate::driver::DevicePtr,
                bytes: u64,
                handle: $crate::driver::PhysicalHandle
            ) -> (), Map, bytes;
            set_access(
                device: $crate::driver::DeviceId,
                address: $crate::driver::DevicePtr,
                bytes: u64,
                peers: &[$crate::driver::DeviceId]
            ) -> (), SetAccess, bytes;
            unmap(
                device: $crate::driver::DeviceId, address: $crate::driver::DevicePtr, bytes: u64
            ) -> (), Unmap, bytes;
            alloc(
                device: $crate::driver::DeviceId, bytes: u64
            ) -> $crate::driver::DevicePtr, Alloc, bytes;
            free(
                device: $crate::driver::DeviceId, address: $crate::driver::DevicePtr
            ) -> (), Free, 0;
            physical_export(
                device: $crate::driver::DeviceId, handle: $crate::driver::PhysicalHandle
            ) -> std::os::fd::OwnedFd, Export, 0;
            physical_import(
                device: $crate::driver::DeviceId, file: std::os::fd::OwnedFd
            ) -> $crate::driver::PhysicalHandle, Import, 0;
            ipc_handle(
                device: $crate::driver::DeviceId, address: $crate::driver::DevicePtr
            ) -> $crate::driver::IpcHandle, IpcHandle, 0;
            ipc_open(
                device: $crate::driver::DeviceId, handle: $crate::driver::IpcHandle
            ) -> $crate::driver::DevicePtr, IpcOpen, 0;
            ipc_close(
                device: $crate::driver::DeviceId, address: $crate::driver::DevicePtr
            ) -> (), IpcClose, 0;
            memset(
                device: $crate::driver::DeviceId,
                address: $crate::driver::DevicePtr,
                value: u8,
                bytes: u64,
                stream: $crate::driver::StreamHandle
            ) -> (), Memset, bytes;
            event_create(
                device: $crate::driver::DeviceId
            ) -> $crate::driver::EventHandle, EventCreate, 0;
            event_destroy(
                device: $crate::driver::DeviceId, event: $crate::driver::EventHandle
            ) -> (), EventDestroy, 0;
            event_record(
                device: $crate::driver::DeviceId,
                event: $crate::driver::EventHandle,
                stream: $crate::driver::StreamHandle
            ) -> (), EventRecord, 0;
            context_event_record(
                device: $crate::driver::DeviceId, event: $crate::driver::EventHandle
            ) -> (), ContextEventRecord, 0;
            event_query(
                device: $crate::driver::DeviceId, event: $crate::driver::EventHandle
            ) -> bool, EventQuery, 0;
            event_synchronize(
                device: $crate::driver::DeviceId, event: $crate::driver::EventHandle
            ) -> (), EventSynchronize, 0;
            stream_wait_event(
                device: $crate::driver::DeviceId,
                stream: $crate::driver::StreamHandle,
                event: $crate::driver::EventHandle
            ) -> (), StreamWaitEvent, 0;
            stream_create(
                device: $crate::driver::DeviceId
            ) -> $crate::driver::StreamHandle, StreamCreate, 0;
            stream_destroy(
                device: $crate::driver::DeviceId, stream: $crate::driver::StreamHandle
            ) -> (), StreamDestroy, 0;
            stream_synchronize(
                device: $crate::driver::DeviceId, stream: $crate::driver::StreamHandle
            ) -> (), StreamSynchronize, 0;
            stream_id(
                device: $crate::driver::DeviceId, stream: $crate::driver::StreamHandle
            ) -> u64, StreamId, 0;
            capture_status(
                device: $crate::driver::DeviceId, stream: $crate::driver::StreamHandle
            ) -> $crate::driver::CaptureStatus, CaptureStatus, 0;
            device_synchronize(device: $crate::driver::DeviceId) -> (), DeviceSynchronize, 0;
        }
    };
}
