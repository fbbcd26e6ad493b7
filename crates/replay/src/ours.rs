//! Gruyère under replay, through its C ABI as in torch.

use crate::allocator::{AllocError, Allocator};
use gruyere::door::{control, torch};
use gruyere::driver::{DeviceId, DevicePtr, Driver, StreamHandle};
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Malloc = extern "C-unwind" fn(isize, c_int, *mut c_void) -> *mut c_void;
type Free = extern "C" fn(*mut c_void, isize, c_int, *mut c_void);
type RecordStream = extern "C" fn(*mut c_void, *mut c_void);

/// The process has one heap: one replay at a time uses it.
static HEAP: Mutex<()> = Mutex::new(());

/// The hooks of a loader: record_stream and captures.
const ALL_HOOKS: u32 = 3;

/// Gruyère's heap for the life of this value.
pub struct Gruyere {
    malloc: Malloc,
    free: Free,
    record_stream: RecordStream,
    mark_step: extern "C" fn(),
    /// Whether it is told which streams the program makes wait.
    told: bool,
    log_level: log::LevelFilter,
    _heap: MutexGuard<'static, ()>,
}

impl Gruyere {
    /// A fresh heap over `driver`, with `conf` in place of `GRUYERE_CONF`. Waits until the heap is
    /// free.
    ///
    /// # Errors
    /// If `conf` is invalid or the driver is unusable; the error says why.
    pub fn install(driver: Arc<dyn Driver>, conf: &str) -> Result<Self, AllocError> {
        let heap = HEAP.lock().unwrap_or_else(PoisonError::into_inner);
        gruyere::door::install(driver, conf).map_err(AllocError::Setup)?;
        Ok(Self::begin(heap))
    }

    /// The process's own heap over the real driver, configured by `GRUYERE_CONF`.
    ///
    /// # Errors
    /// If the heap could not be set up; the error says why.
    pub fn of_this_process() -> Result<Self, AllocError> {
        let heap = HEAP.lock().unwrap_or_else(PoisonError::into_inner);
        gruyere::door::heap().map_err(AllocError::Setup)?;
        Ok(Self::begin(heap))
    }

    fn begin(heap: MutexGuard<'static, ()>) -> Self {
        control::gruyere_announce_hooks(ALL_HOOKS);
        // Calls go through pointers opaque to the compiler, to measure the ABI.
        Self {
            malloc: black_box(torch::gruyere_malloc as Malloc),
            free: black_box(torch::gruyere_free as Free),
            record_stream: black_box(torch::gruyere_record_stream as RecordStream),
            mark_step: black_box(control::gruyere_mark_step as extern "C" fn()),
            told: true,
            log_level: log::max_level(),
            _heap: heap,
        }
    }

    /// Does not tell the library which streams the program makes wait.
    #[must_use]
    pub fn untold(mut self) -> Self {
        self.told = false;
        self
    }

    /// Suppresses messages for runs that exhaust memory on purpose.
    #[must_use]
    pub fn quietly(self) -> Self {
        log::set_max_level(log::LevelFilter::Off);
        self
    }
}

impl Drop for Gruyere {
    fn drop(&mut self) {
        log::set_max_level(self.log_level);
    }
}

fn pointer(handle: StreamHandle) -> *mut c_void {
    handle.0 as *mut c_void
}

impl Allocator for Gruyere {
    fn name(&self) -> &str {
        "gruyere"
    }

    fn malloc(
        &mut self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<DevicePtr, AllocError> {
        let address = (self.malloc)(size as isize, device as c_int, pointer(stream));
        // Outside torch, out of memory and size 0 both return NULL.
        if address.is_null() && size != 0 {
            Err(AllocError::OutOfMemory)
        } else {
            Ok(address as DevicePtr)
        }
    }

    fn free(
        &mut self,
        address: DevicePtr,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<(), AllocError> {
        (self.free)(address as *mut c_void, size as isize, device as c_int, pointer(stream));
        Ok(())
    }

    fn record_stream(
        &mut self,
        address: DevicePtr,
        stream: StreamHandle,
    ) -> Result<(), AllocError> {
        (self.record_stream)(address as *mut c_void, pointer(stream));
        Ok(())
    }

    fn stream_lasts(&mut self, device: DeviceId, stream: StreamHandle) {
        // The next malloc reports an unusable device.
        let _ = control::gruyere_stream_lasts(device as c_int, pointer(stream));
    }

    fn is_alone(&mut self) {
        control::gruyere_allow_waits();
    }

    fn mark_work(&mut self, device: DeviceId, stream: StreamHandle) -> Option<u64> {
        self.told.then(|| control::gruyere_mark_work(device as c_int, pointer(stream)))
    }

    fn stream_waits(&mut self, device: DeviceId, stream: StreamHandle, mark: u64) {
        control::gruyere_stream_waits(device as c_int, pointer(stream), mark);
    }

    fn step(&mut self) {
        (self.mark_step)();
    }

    fn release(&mut self) -> Result<(), AllocError> {
        torch::gruyere_reset();
        Ok(())
    }

    fn validate(&self) -> Result<(), String> {
        gruyere::door::heap().and_then(|heap| heap.validate().map_err(|broken| broken.to_string()))
    }
}
