//! A device without time: exact books of physical memory, everything enqueued is done at once, nothing costs anything.
//!
//! For questions that have no clock in them: peaks with room to spare, and the smallest device that completes a trace.
//! It is no substitute for the stand-in GPU: it has no oracle and forgives misuse that does not concern its books.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use gruyere::driver::{
    Capabilities, CaptureStatus, DeviceId, DevicePtr, Driver, DriverError, ErrorKind, EventHandle, MemoryInfo,
    PhysicalHandle, PoolAttribute, PoolHandle, Result, StreamHandle,
};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

const GRANULARITY: u64 = 2 << 20;

/// One device's memory, and nothing else.
pub struct InstantDevice {
    capacity: u64,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    used: u64,
    peak: u64,
    calls: u64,
    next_address: u64,
    next_handle: u64,
    allocations: HashMap<DevicePtr, u64>,
    handles: HashMap<PhysicalHandle, u64>,
}

impl Books {
    fn take(&mut self, call: &'static str, bytes: u64, capacity: u64) -> Result<()> {
        self.calls += 1;
        if bytes > capacity - self.used {
            return Err(DriverError::new(call, ErrorKind::OutOfMemory, 2));
        }
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(())
    }

    fn address(&mut self, bytes: u64) -> DevicePtr {
        // Addresses are never used twice; gaps keep neighbours apart.
        let address = self.next_address.max(1 << 40);
        self.next_address = address + bytes.next_multiple_of(GRANULARITY) + GRANULARITY;
        address
    }
}

impl InstantDevice {
    /// A device with `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, books: Mutex::default() }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Physical bytes in use.
    pub fn used(&self) -> u64 {
        self.books().used
    }

    /// The most physical bytes ever in use.
    pub fn peak(&self) -> u64 {
        self.books().peak
    }

    /// Calls that asked for, mapped or returned memory.
    pub fn calls(&self) -> u64 {
        self.books().calls
    }
}

fn unsupported<T>(call: &'static str) -> Result<T> {
    Err(DriverError::new(call, ErrorKind::NotSupported, 801))
}

fn refused<T>(call: &'static str) -> Result<T> {
    Err(DriverError::new(call, ErrorKind::InvalidValue, 1))
}

impl Driver for InstantDevice {
    fn device_count(&self) -> Result<u32> {
        Ok(1)
    }
    fn capabilities(&self, _device: DeviceId) -> Result<Capabilities> {
        Ok(Capabilities {
            vmm: true,
            pools: false,
            stream_ids: false,
            gpu_direct_rdma: false,
            granularity: GRANULARITY,
            total_memory: self.capacity,
            name: "instant device".to_owned(),
            uuid: [0; 16],
            compute_capability: (9, 0),
        })
    }
    fn memory_info(&self, _device: DeviceId) -> Result<MemoryInfo> {
        Ok(MemoryInfo { free: self.capacity - self.used(), total: self.capacity })
    }
    fn can_access_peer(&self, _device: DeviceId, _peer: DeviceId) -> Result<bool> {
        Ok(false)
    }

    fn pool_create(&self, _device: DeviceId, _max_size: u64) -> Result<PoolHandle> {
        unsupported("cuMemPoolCreate")
    }
    fn pool_destroy(&self, _device: DeviceId, _pool: PoolHandle) -> Result<()> {
        unsupported("cuMemPoolDestroy")
    }
    fn pool_attribute(&self, _device: DeviceId, _pool: PoolHandle, _attribute: PoolAttribute) -> Result<u64> {
        unsupported("cuMemPoolGetAttribute")
    }
    fn pool_set_attribute(
        &self,
        _device: DeviceId,
        _pool: PoolHandle,
        _attribute: PoolAttribute,
        _value: u64,
    ) -> Result<()> {
        unsupported("cuMemPoolSetAttribute")
    }
    fn pool_trim(&self, _device: DeviceId, _pool: PoolHandle, _keep: u64) -> Result<()> {
        unsupported("cuMemPoolTrimTo")
    }
    fn pool_allow_peer(&self, _device: DeviceId, _pool: PoolHandle, _peer: DeviceId) -> Result<()> {
        unsupported("cuMemPoolSetAccess")
    }
    fn pool_alloc(
        &self,
        _device: DeviceId,
        _pool: PoolHandle,
        _bytes: u64,
        _stream: StreamHandle,
    ) -> Result<DevicePtr> {
        unsupported("cuMemAllocFromPoolAsync")
    }
    fn pool_free(&self, _device: DeviceId, _address: DevicePtr, _stream: StreamHandle) -> Result<()> {
        unsupported("cuMemFreeAsync")
    }

    fn address_reserve(&self, _device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        let mut books = self.books();
        books.calls += 1;
        Ok(books.address(bytes))
    }
    fn address_free(&self, _device: DeviceId, _address: DevicePtr, _bytes: u64) -> Result<()> {
        self.books().calls += 1;
        Ok(())
    }
    fn physical_create(&self, _device: DeviceId, bytes: u64) -> Result<PhysicalHandle> {
        let mut books = self.books();
        books.take("cuMemCreate", bytes, self.capacity)?;
        books.next_handle += 1;
        let handle = PhysicalHandle(books.next_handle);
        books.handles.insert(handle, bytes);
        Ok(handle)
    }
    fn physical_release(&self, _device: DeviceId, handle: PhysicalHandle) -> Result<()> {
        let mut books = self.books();
        books.calls += 1;
        let Some(bytes) = books.handles.remove(&handle) else { return refused("cuMemRelease") };
        books.used -= bytes;
        Ok(())
    }
    fn map(&self, _device: DeviceId, _address: DevicePtr, bytes: u64, handle: PhysicalHandle) -> Result<()> {
        let mut books = self.books();
        books.calls += 1;
        if books.handles.get(&handle) == Some(&bytes) { Ok(()) } else { refused("cuMemMap") }
    }
    fn set_access(
        &self,
        _device: DeviceId,
        _address: DevicePtr,
        _bytes: u64,
        _peers: &[DeviceId],
    ) -> Result<()> {
        self.books().calls += 1;
        Ok(())
    }
    fn unmap(&self, _device: DeviceId, _address: DevicePtr, _bytes: u64) -> Result<()> {
        self.books().calls += 1;
        Ok(())
    }

    fn alloc(&self, _device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        let mut books = self.books();
        books.take("cuMemAlloc", bytes, self.capacity)?;
        let address = books.address(bytes);
        books.allocations.insert(address, bytes);
        Ok(address)
    }
    fn free(&self, _device: DeviceId, address: DevicePtr) -> Result<()> {
        let mut books = self.books();
        books.calls += 1;
        let Some(bytes) = books.allocations.remove(&address) else { return refused("cuMemFree") };
        books.used -= bytes;
        Ok(())
    }
    fn memset(
        &self,
        _device: DeviceId,
        _address: DevicePtr,
        _value: u8,
        _bytes: u64,
        _stream: StreamHandle,
    ) -> Result<()> {
        Ok(())
    }

    fn event_create(&self, _device: DeviceId) -> Result<EventHandle> {
        let mut books = self.books();
        books.next_handle += 1;
        Ok(EventHandle(books.next_handle as usize))
    }
    fn event_destroy(&self, _device: DeviceId, _event: EventHandle) -> Result<()> {
        Ok(())
    }
    fn event_record(&self, _device: DeviceId, _event: EventHandle, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
    fn event_query(&self, _device: DeviceId, _event: EventHandle) -> Result<bool> {
        Ok(true)
    }
    fn event_synchronize(&self, _device: DeviceId, _event: EventHandle) -> Result<()> {
        Ok(())
    }
    fn stream_wait_event(&self, _device: DeviceId, _stream: StreamHandle, _event: EventHandle) -> Result<()> {
        Ok(())
    }
    fn stream_create(&self, _device: DeviceId) -> Result<StreamHandle> {
        let mut books = self.books();
        books.next_handle += 1;
        Ok(StreamHandle(0x1000 + books.next_handle as usize))
    }
    fn stream_destroy(&self, _device: DeviceId, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
    fn stream_synchronize(&self, _device: DeviceId, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
    fn stream_id(&self, _device: DeviceId, stream: StreamHandle) -> Result<u64> {
        Ok(stream.0 as u64)
    }
    fn capture_status(&self, _device: DeviceId, _stream: StreamHandle) -> Result<CaptureStatus> {
        Ok(CaptureStatus::None)
    }
    fn device_synchronize(&self, _device: DeviceId) -> Result<()> {
        Ok(())
    }
}
