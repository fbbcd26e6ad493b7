//! torch's own allocations, which reuse memory without a call of the driver.
//!
//! torch's allocators report each block to torch's profiler, by a function of libc10. This library
//! is preloaded, so libc10_cuda's call finds the function below first, which passes the report on.
//! What a copy has written to memory is unknown from the moment at which torch gives the memory to
//! another tensor: a kernel writes that one. Gruyère reports its blocks to torch only while memory
//! is profiled, and tells this library of each by [`phantom_given`].

use crate::gpu::try_gpu;
use std::ffi::c_void;
use std::sync::OnceLock;

/// `c10::reportMemoryUsageToProfiler`. A `c10::Device` is two bytes: its type and its index.
type Report = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, u16);

/// libc10's function; `None`: this torch has none.
fn of_torch() -> Option<Report> {
    static FOUND: OnceLock<Option<Report>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: the names are NUL-terminated, and the library is only found, not loaded; the
        // mangled name spells out the arguments of the type.
        unsafe {
            let library = libc::dlopen(c"libc10.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            if library.is_null() {
                return None;
            }
            let name = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
            let address = libc::dlsym(library, name.as_ptr());
            (!address.is_null()).then(|| std::mem::transmute::<*mut c_void, Report>(address))
        }
    })
}

/// An allocator has given the memory to somebody new.
fn given(address: u64, bytes: u64) {
    let Some(gpu) = try_gpu() else { return };
    if let Some(values) = &gpu.values
        && (gpu.window.0..gpu.window.1).contains(&address)
    {
        values.lost(address, bytes);
    }
}

/// Gruyère has given a block of `bytes` to its caller.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_given(address: u64, bytes: u64) {
    given(address, bytes);
}

/// Stands before torch's function of this name: `bytes` were allocated at `block`, or freed if
/// negative.
///
/// # Safety
/// As torch's function.
#[unsafe(export_name = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE")]
pub unsafe extern "C-unwind" fn report_memory_usage(
    block: *mut c_void,
    bytes: i64,
    allocated: usize,
    reserved: usize,
    device: u16,
) {
    if let Ok(bytes @ 1..) = u64::try_from(bytes) {
        given(block as u64, bytes);
    }
    if let Some(report) = of_torch() {
        // SAFETY: the caller's arguments, unchanged.
        unsafe { report(block, bytes, allocated, reserved, device) };
    }
}
