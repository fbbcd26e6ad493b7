//! How device memory comes and goes: one small trait over the CUDA driver.
//!
//! The heap asks for memory, order (events, streams) and facts through [`Driver`] and knows nothing
//! else of CUDA. The library implements it through cudarc's bindings (`gruyere::driver::cuda`); the
//! stand-in GPU implements it in process for the tests and the bench (`gruyere-phantom-driver`).
//!
//! Every method may be called from any thread, with any or no CUDA context current, and leaves the
//! caller's current context as it was. Every method may fail at any time. No method panics.

pub mod absent;
pub mod error;
pub mod timed;

pub use error::{DriverError, ErrorKind, Result};

/// An address in a device's address space, as kernels see it. 0 is never a valid one.
pub type DevicePtr = u64;

/// A device's ordinal in this process, as torch and the CUDA runtime count them.
pub type DeviceId = u32;

/// A raw `CUstream`: 0 and 1 name the legacy default stream, 2 the calling thread's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamHandle(pub usize);

impl StreamHandle {
    /// Not a stream of CUDA's but all of a device's at once, those included that nobody told us of:
    /// what `cudaMalloc` gives is for any of them, and `cudaFree` promises that all are done with
    /// it. Never handed to the driver.
    pub const ALL_STREAMS: Self = Self(usize::MAX);
}

/// A raw `CUevent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub usize);

/// A raw `CUmemoryPool`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolHandle(pub usize);

/// A raw `CUmemGenericAllocationHandle`: physical memory, the unit of movement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PhysicalHandle(pub u64);

/// What a device can do, probed once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Virtual memory management: `cuMemCreate`, `cuMemMap` and the rest.
    pub vmm: bool,
    /// Stream-ordered memory pools.
    pub pools: bool,
    /// Stream ids (`cuStreamGetId`), which tell a recycled handle from the stream that had it
    /// before.
    pub stream_ids: bool,
    /// An event can be recorded behind all work of a context (`cuCtxRecordEvent`, CUDA 12.5).
    pub context_events: bool,
    /// Physical memory can be registered with a NIC
    /// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`).
    pub gpu_direct_rdma: bool,
    /// The smallest unit of physical memory, bytes (2 MiB on every device so far). 0 without VMM.
    pub granularity: u64,
    /// Physical memory of the device, bytes.
    pub total_memory: u64,
    /// Of a device that shares the host's memory (an integrated one): what the host could give when
    /// this was asked, bytes. `None`: it has memory of its own.
    pub host_memory: Option<u64>,
    /// The device's name, as the driver gives it.
    pub name: String,
    /// The device's UUID.
    pub uuid: [u8; 16],
    /// Multiprocessor count and compute capability: for reports only.
    pub compute_capability: (u32, u32),
}

/// Physical memory of a device at this moment, bytes, as `cuMemGetInfo` counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Held by nobody.
    pub free: u64,
    /// On the device.
    pub total: u64,
}

/// Attributes of a driver pool (`CUmemPool_attribute`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolAttribute {
    /// 1: freed memory may be reused on another stream once an event dependency orders it.
    /// Default 1.
    ReuseFollowEventDependencies,
    /// 1: freed memory may be reused once it happens to be complete. Default 1.
    ReuseAllowOpportunistic,
    /// 1: the driver may insert waits to reuse memory. Default 1.
    ReuseAllowInternalDependencies,
    /// Bytes kept at a synchronisation. Default 0.
    ReleaseThreshold,
    /// Physical bytes the pool holds. Read only.
    ReservedCurrent,
    /// The highest [`PoolAttribute::ReservedCurrent`] since the last reset. Set 0 to reset.
    ReservedHigh,
    /// Bytes handed out. Read only.
    UsedCurrent,
    /// The highest [`PoolAttribute::UsedCurrent`] since the last reset. Set 0 to reset.
    UsedHigh,
}

/// What a stream is doing about graph capture (`cuStreamGetCaptureInfo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Work runs as it is enqueued.
    None,
    /// Work is being captured; the id is unique in the process.
    Active(u64),
    /// The capture has failed and waits to be ended.
    Invalidated,
}

/// The driver's side: device memory, order and facts.
///
/// Bytes of physical handles, mappings and address ranges are multiples of
/// [`Capabilities::granularity`].
pub trait Driver: Send + Sync {
    /// The number of devices; initialises the driver where nobody has yet.
    fn device_count(&self) -> Result<u32>;
    /// What `device` can do; the first call may retain its primary context.
    fn capabilities(&self, device: DeviceId) -> Result<Capabilities>;
    /// Free and total physical memory of `device`.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;
    /// Whether `device` can map memory of `peer`. As the driver has it, no device is its own peer.
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool>;

    // Stream-ordered pools.

    /// Creates a pool on `device`; `max_size` bounds its physical memory and so the address space
    /// it takes (0: the driver's own bound).
    fn pool_create(&self, device: DeviceId, max_size: u64) -> Result<PoolHandle>;
    /// Destroys a pool from which nothing is allocated.
    fn pool_destroy(&self, device: DeviceId, pool: PoolHandle) -> Result<()>;
    /// Reads an attribute.
    fn pool_attribute(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        attribute: PoolAttribute,
    ) -> Result<u64>;
    /// Sets an attribute.
    fn pool_set_attribute(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Result<()>;
    /// Gives physical memory back until `keep` bytes are held, or nothing more is free.
    fn pool_trim(&self, device: DeviceId, pool: PoolHandle, keep: u64) -> Result<()>;
    /// Lets `peer` read and write the pool's memory.
    fn pool_allow_peer(&self, device: DeviceId, pool: PoolHandle, peer: DeviceId) -> Result<()>;
    /// Allocates `bytes` from `pool`, usable in the order of `stream`.
    fn pool_alloc(
        &self,
        device: DeviceId,
        pool: PoolHandle,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<DevicePtr>;
    /// Frees an address that [`Driver::pool_alloc`] gave, in the order of `stream`.
    fn pool_free(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> Result<()>;

    // Virtual memory management. None of these is stream-ordered.

    /// Reserves `bytes` of address space that begins at a multiple of `align` (a power of two; 0:
    /// whatever the driver's default is, which need not be the granularity).
    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<DevicePtr>;
    /// Gives a whole reservation back; nothing may be mapped in it.
    fn address_free(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()>;
    /// Creates physical memory.
    fn physical_create(&self, device: DeviceId, bytes: u64) -> Result<PhysicalHandle>;
    /// Gives up a handle; its memory lives on while it is mapped.
    fn physical_release(&self, device: DeviceId, handle: PhysicalHandle) -> Result<()>;
    /// Maps the whole of `handle` (its `bytes`) at `address`; the range must be reserved and
    /// unmapped.
    fn map(
        &self,
        device: DeviceId,
        address: DevicePtr,
        bytes: u64,
        handle: PhysicalHandle,
    ) -> Result<()>;
    /// Grants `device` and `peers` access to a mapped range, which may cover several mappings.
    fn set_access(
        &self,
        device: DeviceId,
        address: DevicePtr,
        bytes: u64,
        peers: &[DeviceId],
    ) -> Result<()>;
    /// Unmaps whole mappings. The device must be done with them.
    fn unmap(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()>;

    // Plain memory.

    /// `cuMemAlloc`: synchronous, IPC-capable.
    fn alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr>;
    /// `cuMemFree`: waits for the device.
    fn free(&self, device: DeviceId, address: DevicePtr) -> Result<()>;
    /// Fills `bytes` at `address` with `value` in the order of `stream` (for `debug:poison`).
    fn memset(
        &self,
        device: DeviceId,
        address: DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    // Order.

    /// Creates an event without timing in the context of `device`.
    fn event_create(&self, device: DeviceId) -> Result<EventHandle>;
    /// Destroys an event.
    fn event_destroy(&self, device: DeviceId, event: EventHandle) -> Result<()>;
    /// Records the work enqueued on `stream` so far.
    fn event_record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<()>;
    /// Records all work enqueued in the context of `device` so far, on streams that nobody told us
    /// of too (`cuCtxRecordEvent`); `NotSupported` before CUDA 12.5. While any stream of the
    /// context captures, the driver refuses and makes the capture fail: never then.
    fn context_event_record(&self, device: DeviceId, event: EventHandle) -> Result<()>;
    /// True once the recorded work is done (or nothing was recorded).
    fn event_query(&self, device: DeviceId, event: EventHandle) -> Result<bool>;
    /// Waits on the host until the recorded work is done.
    fn event_synchronize(&self, device: DeviceId, event: EventHandle) -> Result<()>;
    /// Makes later work of `stream` wait for `event`.
    fn stream_wait_event(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<()>;
    /// Creates a stream that does not synchronise with the legacy default stream.
    fn stream_create(&self, device: DeviceId) -> Result<StreamHandle>;
    /// Destroys a stream of ours.
    fn stream_destroy(&self, device: DeviceId, stream: StreamHandle) -> Result<()>;
    /// Waits on the host until everything on `stream` is done.
    fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> Result<()>;
    /// The stream's id, unique in the process and never reused; `NotSupported` on drivers before
    /// 12.0.
    fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> Result<u64>;
    /// Whether `stream` is capturing.
    fn capture_status(&self, device: DeviceId, stream: StreamHandle) -> Result<CaptureStatus>;
    /// Waits on the host for all work of the device's context.
    fn device_synchronize(&self, device: DeviceId) -> Result<()>;
}
