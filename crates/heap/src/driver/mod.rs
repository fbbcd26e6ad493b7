//! The source of device memory: one small trait over the CUDA driver.
//!
//! The heap asks for memory, order (events, streams) and facts through [`Driver`] and knows nothing
//! else of CUDA. The library implements it through cudarc's bindings (`gruyere::driver::cuda`); the
//! stand-in GPU implements it in process for the tests and the bench (`gruyere-phantom-driver`).
//!
//! Every method may be called from any thread, with any or no CUDA context current, and leaves the
//! caller's current context as it was. Every method may fail at any time. No method panics.

pub mod absent;
mod calls;
pub mod timed;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// An address in a device's address space, as kernels see it; never 0.
pub type DevicePtr = u64;

/// A device's ordinal in this process, as torch and the CUDA runtime count them.
pub type DeviceId = u32;

/// A raw `CUstream`: 0 and 1 name the legacy default stream, 2 the calling thread's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamHandle(pub usize);

impl StreamHandle {
    /// All streams of a device at once, unknown ones included, not a stream of CUDA's. Any of them
    /// may use what `cudaMalloc` gives, and `cudaFree` promises that all are done with it. Never
    /// handed to the driver.
    pub const ALL_STREAMS: Self = Self(usize::MAX);

    /// Whether it names the legacy default stream.
    #[inline(always)]
    pub const fn is_default(self) -> bool {
        self.0 <= 1
    }
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

/// A `CUipcMemHandle`: a plain allocation of a process, as other processes open it.
pub type IpcHandle = [u8; 64];

/// A device's features, probed once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Virtual memory management: `cuMemCreate`, `cuMemMap` and the rest.
    pub vmm: bool,
    /// Stream-ordered memory pools.
    pub pools: bool,
    /// Stream ids (`cuStreamGetId`), which distinguish a recycled handle's stream from the one
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
    /// What the host could give when probed, bytes, if the device shares the host's memory (an
    /// integrated one). `None`: it has memory of its own.
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
    /// Free for any process.
    pub free: u64,
    /// On the device.
    pub total: u64,
}

/// Attributes of a driver pool (`CUmemPool_attribute`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolAttribute {
    /// 1: freed memory may be reused on another stream once an event dependency orders it. Default
    /// 1.
    ReuseFollowEventDependencies,
    /// 1: freed memory may be reused once it happens to be complete. Default 1.
    ReuseAllowOpportunistic,
    /// 1: the driver may insert waits to reuse memory. Default 1.
    ReuseAllowInternalDependencies,
    /// Bytes kept at a synchronisation. Default 0.
    ReleaseThreshold,
    /// Physical bytes of the pool. Read only.
    ReservedCurrent,
    /// The highest [`PoolAttribute::ReservedCurrent`] since the last reset. Set 0 to reset.
    ReservedHigh,
    /// Bytes handed out. Read only.
    UsedCurrent,
    /// The highest [`PoolAttribute::UsedCurrent`] since the last reset. Set 0 to reset.
    UsedHigh,
}

/// A stream's part in graph capture (`cuStreamGetCaptureInfo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Work runs as it is enqueued.
    None,
    /// Work is being captured; the id is unique in the process.
    Active(u64),
    /// The capture has failed, and its end is to come.
    Invalidated,
}

/// The time since this was first asked.
pub fn system_time() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}

/// The driver's side: device memory, order and facts.
///
/// Bytes of physical handles, mappings and address ranges are multiples of
/// [`Capabilities::granularity`].
pub trait Driver: Send + Sync {
    /// The number of devices; the first call initialises the driver.
    fn device_count(&self) -> Result<u32>;
    /// What `device` can do; the first call may retain its primary context.
    fn capabilities(&self, device: DeviceId) -> Result<Capabilities>;
    /// Free and total physical memory of `device`.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;
    /// The host's time since some moment in the past. A simulated device has a clock of its own.
    fn host_time(&self) -> Duration {
        system_time()
    }
    /// Whether `device` can map memory of `peer`. To the driver, no device is its own peer.
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool>;

    // Stream-ordered pools.

    /// Creates a pool on `device`; `max_size` bounds its physical memory and so the address space
    /// it takes (0: the driver's own bound).
    fn pool_create(&self, device: DeviceId, max_size: u64) -> Result<PoolHandle>;
    /// Destroys a pool without allocations.
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
    /// Gives physical memory back until the pool holds `keep` bytes, or no more is free.
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

    /// Reserves `bytes` of address space at a multiple of `align` (a power of two; 0: the driver's
    /// default, which may differ from the granularity).
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

    // Memory that processes share.

    /// Opens a file through which other processes import the memory of `handle`.
    fn physical_export(&self, device: DeviceId, handle: PhysicalHandle) -> Result<OwnedFd>;
    /// Imports the memory behind a file of another process's [`Driver::physical_export`].
    fn physical_import(&self, device: DeviceId, file: OwnedFd) -> Result<PhysicalHandle>;
    /// A handle by which other processes open the plain allocation that starts at `address`.
    fn ipc_handle(&self, device: DeviceId, address: DevicePtr) -> Result<IpcHandle>;
    /// Opens the plain allocation of another process; one that is open already may not be opened
    /// again.
    fn ipc_open(&self, device: DeviceId, handle: IpcHandle) -> Result<DevicePtr>;
    /// Closes what [`Driver::ipc_open`] opened at `address`. The device must be done with it.
    fn ipc_close(&self, device: DeviceId, address: DevicePtr) -> Result<()>;

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
    /// Records all work enqueued in the context of `device` so far, also on unknown streams
    /// (`cuCtxRecordEvent`); `NotSupported` before CUDA 12.5. Never call it while a stream of the
    /// context captures: the driver refuses, and makes the capture fail.
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
    /// Destroys a stream that [`Driver::stream_create`] made.
    fn stream_destroy(&self, device: DeviceId, stream: StreamHandle) -> Result<()>;
    /// Waits on the host until all work on `stream` is done.
    fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> Result<()>;
    /// The stream's id, unique in the process and never reused; `NotSupported` on drivers before
    /// 12.0.
    fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> Result<u64>;
    /// Whether `stream` is capturing.
    fn capture_status(&self, device: DeviceId, stream: StreamHandle) -> Result<CaptureStatus>;
    /// Waits on the host for all work of the device's context.
    fn device_synchronize(&self, device: DeviceId) -> Result<()>;
}

/// Why a driver call failed, as far as the allocator acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// `CUDA_ERROR_OUT_OF_MEMORY`: no physical memory, or no address space, is left.
    OutOfMemory,
    /// The library, a symbol or a device feature is missing.
    NotSupported,
    /// No device, no libcuda, or a stub libcuda: CUDA cannot be used in this process.
    NoDriver,
    /// The driver is shut down (`CUDA_ERROR_DEINITIALIZED`, or the context is destroyed): the
    /// process is exiting.
    Deinitialized,
    /// The call is not permitted while a stream captures.
    Capturing,
    /// The driver refused an argument: the allocator's mistake, or a destroyed stream.
    InvalidValue,
    /// A sticky error of the context: an illegal access, a lost device. No later call will succeed.
    DeviceLost,
    /// Anything else.
    Other,
}

const INVALID_HANDLE: u32 = 400;

/// A failed driver call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DriverError {
    /// The driver's own name of the call, such as `cuMemCreate`.
    pub call: &'static str,
    /// The allocator's reading of it.
    pub kind: ErrorKind,
    /// The `CUresult`, 0 if the call was never made.
    pub code: u32,
}

/// The result of a driver call.
pub type Result<T> = std::result::Result<T, DriverError>;

impl DriverError {
    /// An error of `kind` from `call`, with the driver's code.
    pub const fn new(call: &'static str, kind: ErrorKind, code: u32) -> Self {
        Self { call, kind, code }
    }

    /// Classifies a non-zero `CUresult` of `call` by cuda.h (13). `DeviceLost` is for errors after
    /// which, says cuda.h, any further work returns the same error, and for hardware faults.
    pub const fn from_code(call: &'static str, code: u32) -> Self {
        let kind = match code {
            2 => ErrorKind::OutOfMemory,
            1 | 101 | INVALID_HANDLE => ErrorKind::InvalidValue,
            3 | 100 | 34 => ErrorKind::NoDriver,
            4 | 709 => ErrorKind::Deinitialized,
            500 | 801 => ErrorKind::NotSupported,
            // STREAM_CAPTURE_UNSUPPORTED to STREAM_CAPTURE_WRONG_THREAD. 909 is TIMEOUT.
            900..=908 => ErrorKind::Capturing,
            // ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED; ILLEGAL_ADDRESS, LAUNCH_TIMEOUT,
            // ASSERT; HARDWARE_STACK_ERROR to LAUNCH_FAILED, TENSOR_MEMORY_LEAK; EXTERNAL_DEVICE.
            // 219, INVALID_GRAPHICS_CONTEXT, is not one.
            214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721 | 911 => ErrorKind::DeviceLost,
            _ => ErrorKind::Other,
        };
        Self { call, kind, code }
    }

    /// Whether the driver says that a handle names nothing (`CUDA_ERROR_INVALID_HANDLE`).
    pub fn is_invalid_handle(&self) -> bool {
        self.code == INVALID_HANDLE
    }

    /// Whether no later call can succeed either.
    pub fn is_final(&self) -> bool {
        matches!(self.kind, ErrorKind::DeviceLost | ErrorKind::Deinitialized | ErrorKind::NoDriver)
    }

    /// Whether more memory would cure the error.
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == ErrorKind::OutOfMemory
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            ErrorKind::OutOfMemory => "out of memory",
            ErrorKind::NotSupported => "not supported here",
            ErrorKind::NoDriver => "no usable CUDA driver",
            ErrorKind::Deinitialized => "the driver has been shut down",
            ErrorKind::Capturing => "not permitted while a stream is capturing",
            ErrorKind::InvalidValue => "invalid argument or handle",
            ErrorKind::DeviceLost => "the context is lost",
            ErrorKind::Other => "failed",
        };
        write!(f, "{}: {what}", self.call)?;
        // 0 is success: the error is not the driver's, but of a bound of ours.
        if self.code == 0 { Ok(()) } else { write!(f, " (CUresult {})", self.code) }
    }
}

impl fmt::Debug for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for DriverError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_classified_as_cuda_h_describes_them() {
        let kind = |code| DriverError::from_code("cuMemCreate", code).kind;
        for code in [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 911] {
            assert_eq!(kind(code), ErrorKind::DeviceLost, "{code}: nothing more will succeed");
        }
        for code in 900..=908 {
            assert_eq!(kind(code), ErrorKind::Capturing, "{code}");
        }
        // No graphics context, no compiler, a wait that lasted too long, a graph that can't be
        // updated: this call failed, and no other.
        for code in [219, 221, 909, 910] {
            assert_eq!(kind(code), ErrorKind::Other, "{code}");
        }
    }
}
