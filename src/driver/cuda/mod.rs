//! The CUDA driver, through cudarc's bindings.
//!
//! [`CudaDriver::load`] finds the libcuda of this process and initialises it. Nothing here panics:
//! a missing library is a [`LoadError`] with the attempts, a missing symbol a missing capability.

mod context;
mod creation;
mod device;
mod library;
mod symbols;

use std::ffi::c_char;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use cudarc::driver::sys;

use self::context::Entered;
pub use self::creation::HandleType;
use self::device::Device;
use self::library::Library;
pub use self::library::LoadError;
use self::symbols::Symbols;
use super::{
    Capabilities, CaptureStatus, DeviceId, DevicePtr, Driver, DriverError, ErrorKind, EventHandle,
    IpcHandle, MemoryInfo, PhysicalHandle, PoolAttribute, PoolHandle, Result, StreamHandle,
    system_time,
};

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;
/// From this driver on, `CUmemPoolProps` has `maxSize`; before, those bytes are reserved and must
/// be 0.
const POOL_MAX_SIZE_SINCE: i32 = 12020;

/// The ways to export a device's memory to other processes, as the device reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandleTypes {
    /// Physical handles, as POSIX file descriptors.
    pub pages_as_files: bool,
    /// Pools: bits of `CUmemAllocationHandleType` (1: POSIX file descriptors, 8: fabric handles).
    pub pools: u32,
}

/// The CUDA driver of this process. All threads may share it.
pub struct CudaDriver {
    library: Library,
    version: i32,
    devices: Vec<Device>,
    handle_type: HandleType,
}

impl CudaDriver {
    /// Finds and initialises the driver: the libcuda that the process already uses (preloaded,
    /// linked, or loaded by the CUDA runtime), else the system's.
    ///
    /// This calls `cuInit`. Call it when CUDA is first needed, not before: a process that has
    /// initialised CUDA cannot use it in its forked children.
    pub fn load() -> std::result::Result<Self, LoadError> {
        Self::over(Library::find()?)
    }

    /// As [`CudaDriver::load`], with the library at `path` and no other.
    pub fn load_from(path: &Path) -> std::result::Result<Self, LoadError> {
        Self::over(Library::at(path)?)
    }

    fn over(library: Library) -> std::result::Result<Self, LoadError> {
        match Self::probe(&library.symbols) {
            Ok((version, devices)) => {
                Ok(Self { library, version, devices, handle_type: HandleType::Auto })
            }
            Err(error) => Err(LoadError {
                error: DriverError::new(error.call, ErrorKind::NoDriver, error.code),
                tried: vec![format!("{}: {error}", library.path.display())],
            }),
        }
    }

    /// Sets how physical memory can be exported to other processes.
    pub fn with_handle_type(self, handle_type: HandleType) -> Self {
        Self { handle_type, ..self }
    }

    fn probe(symbols: &Symbols) -> Result<(i32, Vec<Device>)> {
        let (mut version, mut count) = (0, 0);
        // SAFETY: each writes one int.
        unsafe {
            symbols.cuDriverGetVersion(&mut version)?;
            symbols.cuDeviceGetCount(&mut count)?;
        }
        let devices =
            (0..count).map(|ordinal| Device::new(symbols, ordinal)).collect::<Result<_>>()?;
        Ok((version, devices))
    }

    /// The file that libcuda was loaded from.
    pub fn library_path(&self) -> &Path {
        &self.library.path
    }

    /// The CUDA version of the driver: 12020 for 12.2.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// The ways to export memory of `device` to other processes.
    ///
    /// # Errors
    /// There is no such device.
    pub fn handle_types(&self, device: DeviceId) -> Result<HandleTypes> {
        Ok(self.device(device)?.handle_types(self.symbols()))
    }

    fn symbols(&self) -> &Symbols {
        &self.library.symbols
    }

    fn device(&self, device: DeviceId) -> Result<&Device> {
        let error = DriverError::new("cuDeviceGet", ErrorKind::InvalidValue, 101);
        self.devices.get(device as usize).ok_or(error)
    }

    /// Enters the device's context for a call that respects stream order, and so cannot disturb a
    /// capture elsewhere.
    fn enter(&self, device: DeviceId) -> Result<Entered<'_>> {
        Entered::new(self.symbols(), self.device(device)?.context(self.symbols())?)
    }

    /// Enters the device's context for a call that a capture of another thread would forbid.
    fn enter_relaxed(&self, device: DeviceId) -> Result<Entered<'_>> {
        Entered::relaxed(self.symbols(), self.device(device)?.context(self.symbols())?)
    }
}

/// Whether this process's libcuda is the stand-in GPU, which keeps books of memory and computes
/// nothing. Takes the loader's lock.
pub fn is_stand_in() -> bool {
    library::is_stand_in()
}

fn stream(handle: StreamHandle) -> sys::CUstream {
    handle.0 as sys::CUstream
}

fn event(handle: EventHandle) -> sys::CUevent {
    handle.0 as sys::CUevent
}

fn pool(handle: PoolHandle) -> sys::CUmemoryPool {
    handle.0 as sys::CUmemoryPool
}

/// The driver's number of an attribute, and whether its value is an `int` (else a 64-bit number).
fn pool_attribute(attribute: PoolAttribute) -> (sys::CUmemPool_attribute, bool) {
    use sys::CUmemPool_attribute as Raw;
    match attribute {
        PoolAttribute::ReuseFollowEventDependencies => {
            (Raw::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, true)
        }
        PoolAttribute::ReuseAllowOpportunistic => {
            (Raw::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, true)
        }
        PoolAttribute::ReuseAllowInternalDependencies => {
            (Raw::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, true)
        }
        PoolAttribute::ReleaseThreshold => (Raw::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, false),
        PoolAttribute::ReservedCurrent => (Raw::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, false),
        PoolAttribute::ReservedHigh => (Raw::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, false),
        PoolAttribute::UsedCurrent => (Raw::CU_MEMPOOL_ATTR_USED_MEM_CURRENT, false),
        PoolAttribute::UsedHigh => (Raw::CU_MEMPOOL_ATTR_USED_MEM_HIGH, false),
    }
}

/// `bytes` as a `usize`. Only a 32-bit host could fail, and none has CUDA.
fn length(bytes: u64) -> usize {
    bytes as usize
}

// SAFETY of every block below, unless it says more: pointers are to locals of the type in the
// signature (cudarc's); the device's context is current; the driver itself checks handles and
// addresses, which are values, and the heap keeps their lifetimes (a stale stream or event handle
// is the caller's error in CUDA's own terms).
impl Driver for CudaDriver {
    fn host_time(&self) -> Duration {
        match self.library.host_time {
            Some(nanoseconds) => Duration::from_nanos(nanoseconds()),
            None => system_time(),
        }
    }

    fn device_count(&self) -> Result<u32> {
        Ok(self.devices.len() as u32)
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities> {
        Ok(self.device(device)?.capabilities(self.symbols())?.clone())
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        let _entered = self.enter_relaxed(device)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: above.
        unsafe { self.symbols().cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        let (from, to) = (self.device(device)?.handle, self.device(peer)?.handle);
        let mut can = 0;
        // SAFETY: above.
        unsafe { self.symbols().cuDeviceCanAccessPeer(&mut can, from, to) }?;
        Ok(can != 0)
    }

    fn pool_create(&self, device: DeviceId, max_size: u64) -> Result<PoolHandle> {
        let _entered = self.enter_relaxed(device)?;
        let max_size = if self.version >= POOL_MAX_SIZE_SINCE { length(max_size) } else { 0 };
        let properties = device::pool_properties(self.device(device)?.handle, max_size);
        let mut handle = std::ptr::null_mut();
        // SAFETY: above.
        unsafe { self.symbols().cuMemPoolCreate(&mut handle, &properties) }?;
        Ok(PoolHandle(handle as usize))
    }

    fn pool_destroy(&self, device: DeviceId, handle: PoolHandle) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuMemPoolDestroy(pool(handle)) }
    }

    fn pool_attribute(
        &self,
        device: DeviceId,
        handle: PoolHandle,
        attribute: PoolAttribute,
    ) -> Result<u64> {
        let _entered = self.enter_relaxed(device)?;
        let (attribute, is_int) = pool_attribute(attribute);
        let (mut small, mut large) = (0i32, 0u64);
        let value: *mut std::ffi::c_void =
            if is_int { (&raw mut small).cast() } else { (&raw mut large).cast() };
        // SAFETY: above; `value` points to the type that the attribute has.
        unsafe { self.symbols().cuMemPoolGetAttribute(pool(handle), attribute, value) }?;
        Ok(if is_int { u64::try_from(small).unwrap_or(0) } else { large })
    }

    fn pool_set_attribute(
        &self,
        device: DeviceId,
        handle: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        let (attribute, is_int) = pool_attribute(attribute);
        let (mut small, mut large) = (i32::try_from(value).unwrap_or(i32::MAX), value);
        let value: *mut std::ffi::c_void =
            if is_int { (&raw mut small).cast() } else { (&raw mut large).cast() };
        // SAFETY: above; `value` points to the type that the attribute has.
        unsafe { self.symbols().cuMemPoolSetAttribute(pool(handle), attribute, value) }
    }

    fn pool_trim(&self, device: DeviceId, handle: PoolHandle, keep: u64) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuMemPoolTrimTo(pool(handle), length(keep)) }
    }

    fn pool_allow_peer(&self, device: DeviceId, handle: PoolHandle, peer: DeviceId) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        let access = device::access(self.device(peer)?.handle);
        // SAFETY: above; one descriptor is read.
        unsafe { self.symbols().cuMemPoolSetAccess(pool(handle), &access, 1) }
    }

    fn pool_alloc(
        &self,
        device: DeviceId,
        handle: PoolHandle,
        bytes: u64,
        on: StreamHandle,
    ) -> Result<DevicePtr> {
        let _entered = self.enter_relaxed(device)?;
        let mut address = 0;
        // SAFETY: above.
        unsafe {
            self.symbols().cuMemAllocFromPoolAsync(
                &mut address,
                length(bytes),
                pool(handle),
                stream(on),
            )
        }?;
        Ok(address)
    }

    fn pool_free(&self, device: DeviceId, address: DevicePtr, on: StreamHandle) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuMemFreeAsync(address, stream(on)) }
    }

    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<DevicePtr> {
        let _entered = self.enter_relaxed(device)?;
        let mut address = 0;
        // SAFETY: above. No wish for a place.
        unsafe {
            self.symbols().cuMemAddressReserve(&mut address, length(bytes), length(align), 0, 0)
        }?;
        Ok(address)
    }

    fn address_free(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuMemAddressFree(address, length(bytes)) }
    }

    fn physical_create(&self, device: DeviceId, bytes: u64) -> Result<PhysicalHandle> {
        let _entered = self.enter_relaxed(device)?;
        let target = self.device(device)?;
        let creation = target.creation(self.symbols(), self.handle_type)?;
        let properties = device::physical_properties(target.handle, creation);
        let mut handle = 0;
        // SAFETY: above.
        unsafe { self.symbols().cuMemCreate(&mut handle, length(bytes), &properties, 0) }?;
        Ok(PhysicalHandle(handle))
    }

    fn physical_release(&self, device: DeviceId, handle: PhysicalHandle) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuMemRelease(handle.0) }
    }

    fn map(
        &self,
        device: DeviceId,
        address: DevicePtr,
        bytes: u64,
        handle: PhysicalHandle,
    ) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above. The offset must be 0.
        unsafe { self.symbols().cuMemMap(address, length(bytes), 0, handle.0, 0) }
    }

    fn set_access(
        &self,
        device: DeviceId,
        address: DevicePtr,
        bytes: u64,
        peers: &[DeviceId],
    ) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        let own = device::access(self.device(device)?.handle);
        if peers.is_empty() {
            return creation::set_access(self.symbols(), address, length(bytes), &[own]);
        }
        let mut access = vec![own];
        for peer in peers.iter().filter(|peer| **peer != device) {
            access.push(device::access(self.device(*peer)?.handle));
        }
        creation::set_access(self.symbols(), address, length(bytes), &access)
    }

    fn unmap(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuMemUnmap(address, length(bytes)) }
    }

    fn alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        let _entered = self.enter_relaxed(device)?;
        let mut address = 0;
        // SAFETY: above.
        unsafe { self.symbols().cuMemAlloc_v2(&mut address, length(bytes)) }?;
        Ok(address)
    }

    fn free(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuMemFree_v2(address) }
    }

    fn physical_export(&self, device: DeviceId, handle: PhysicalHandle) -> Result<OwnedFd> {
        let _entered = self.enter_relaxed(device)?;
        creation::export_file(self.symbols(), handle.0)
    }

    fn physical_import(&self, device: DeviceId, file: OwnedFd) -> Result<PhysicalHandle> {
        let _entered = self.enter_relaxed(device)?;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // The driver takes the number itself where a handle has a pointer.
        let number = file.as_raw_fd() as usize as *mut std::ffi::c_void;
        let mut handle = 0;
        // SAFETY: above; the file stays open during the call, and the driver keeps none of it.
        unsafe { self.symbols().cuMemImportFromShareableHandle(&mut handle, number, kind) }?;
        Ok(PhysicalHandle(handle))
    }

    fn ipc_handle(&self, device: DeviceId, address: DevicePtr) -> Result<IpcHandle> {
        let _entered = self.enter_relaxed(device)?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: above.
        unsafe { self.symbols().cuIpcGetMemHandle(&mut handle, address) }?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn ipc_open(&self, device: DeviceId, handle: IpcHandle) -> Result<DevicePtr> {
        let _entered = self.enter_relaxed(device)?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: above.
        unsafe { self.symbols().cuIpcOpenMemHandle_v2(&mut address, handle, flags) }?;
        Ok(address)
    }

    fn ipc_close(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuIpcCloseMemHandle(address) }
    }

    fn memset(
        &self,
        device: DeviceId,
        address: DevicePtr,
        value: u8,
        bytes: u64,
        on: StreamHandle,
    ) -> Result<()> {
        let _entered = self.enter(device)?;
        // SAFETY: above. The device writes its own memory; the range is the caller's to vouch for.
        unsafe { self.symbols().cuMemsetD8Async(address, value, length(bytes), stream(on)) }
    }

    fn event_create(&self, device: DeviceId) -> Result<EventHandle> {
        let _entered = self.enter_relaxed(device)?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let mut handle = std::ptr::null_mut();
        // SAFETY: above.
        unsafe { self.symbols().cuEventCreate(&mut handle, flags) }?;
        Ok(EventHandle(handle as usize))
    }

    fn event_destroy(&self, device: DeviceId, handle: EventHandle) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuEventDestroy_v2(event(handle)) }
    }

    fn event_record(&self, device: DeviceId, handle: EventHandle, on: StreamHandle) -> Result<()> {
        let _entered = self.enter(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuEventRecord(event(handle), stream(on)) }
    }

    fn context_event_record(&self, device: DeviceId, handle: EventHandle) -> Result<()> {
        let context = self.device(device)?.context(self.symbols())?;
        let _entered = self.enter(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuCtxRecordEvent(context, event(handle)) }
    }

    fn event_query(&self, device: DeviceId, handle: EventHandle) -> Result<bool> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        match unsafe { self.symbols().cuEventQuery(event(handle)) } {
            Ok(()) => Ok(true),
            Err(error) if error.code == NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn event_synchronize(&self, device: DeviceId, handle: EventHandle) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuEventSynchronize(event(handle)) }
    }

    fn stream_wait_event(
        &self,
        device: DeviceId,
        on: StreamHandle,
        handle: EventHandle,
    ) -> Result<()> {
        let _entered = self.enter(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuStreamWaitEvent(stream(on), event(handle), 0) }
    }

    fn stream_create(&self, device: DeviceId) -> Result<StreamHandle> {
        let _entered = self.enter_relaxed(device)?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut handle = std::ptr::null_mut();
        // SAFETY: above.
        unsafe { self.symbols().cuStreamCreate(&mut handle, flags) }?;
        Ok(StreamHandle(handle as usize))
    }

    fn stream_destroy(&self, device: DeviceId, handle: StreamHandle) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuStreamDestroy_v2(stream(handle)) }
    }

    fn stream_synchronize(&self, device: DeviceId, handle: StreamHandle) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuStreamSynchronize(stream(handle)) }
    }

    fn stream_id(&self, device: DeviceId, handle: StreamHandle) -> Result<u64> {
        let _entered = self.enter(device)?;
        let mut id = 0;
        // SAFETY: above.
        unsafe { self.symbols().cuStreamGetId(stream(handle), &mut id) }?;
        Ok(id)
    }

    fn capture_status(&self, device: DeviceId, handle: StreamHandle) -> Result<CaptureStatus> {
        let _entered = self.enter(device)?;
        let (mut status, mut id) = (0u32, 0u64);
        let nowhere = std::ptr::null_mut;
        // SAFETY: above. The status is written as the driver's 32-bit enum, which a u32 holds
        // whatever it is; the last three outputs are optional.
        unsafe {
            self.symbols().cuStreamGetCaptureInfo_v2(
                stream(handle),
                (&raw mut status).cast(),
                &mut id,
                nowhere(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        }?;
        Ok(match status {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active(id),
            _ => CaptureStatus::Invalidated,
        })
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        let _entered = self.enter_relaxed(device)?;
        // SAFETY: above.
        unsafe { self.symbols().cuCtxSynchronize() }
    }
}
