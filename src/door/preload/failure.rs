//! Our errors, reported as the CUDA runtime reports its own: the call returns the code, and the
//! thread's last error is the same.

use super::super::oom;
use super::runtime::{CudaError, Runtime};
use crate::driver::StreamHandle;
use crate::heap::{Heap, Report};
use crate::log_pace::LogPace;
use std::ffi::c_uint;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// `cudaErrorInvalidValue`.
pub(super) const INVALID_VALUE: CudaError = 1;
/// `cudaErrorMemoryAllocation`.
pub(super) const OUT_OF_MEMORY: CudaError = 2;
/// More than any device has, and a multiple of any rounding of a runtime's.
const IMPOSSIBLE: usize = 1 << 62;
/// `cudaStreamCaptureModeRelaxed`.
const RELAXED: c_uint = 2;

/// Dumps and logs an out-of-memory of ours.
#[cold]
pub fn tell_of_out_of_memory(heap: &Heap, report: &mut Report, stream: StreamHandle) {
    oom::note(heap, report, stream);
    // The program may handle it: torch frees its cache and tries again.
    match PACE.lock().unwrap_or_else(PoisonError::into_inner).tells(Instant::now()) {
        Some(0) => log::warn!("{report}"),
        Some(untold) => log::warn!("{report}\n{untold} more since the last that the log told of."),
        None => log::debug!("{report}"),
    }
}

/// Out-of-memories in the log: the first ones, then one a minute. A program may meet thousands.
static PACE: Mutex<LogPace> = Mutex::new(LogPace::new(8));

/// Returns `cudaErrorMemoryAllocation`.
#[cold]
pub fn out_of_memory(
    runtime: Runtime,
    heap: &Heap,
    report: &mut Report,
    stream: StreamHandle,
) -> CudaError {
    tell_of_out_of_memory(heap, report, stream);
    set_last_error_out_of_memory(runtime);
    OUT_OF_MEMORY
}

/// Sets the runtime's last error to 2: only the runtime can, so it gets a request that it cannot
/// serve.
fn set_last_error_out_of_memory(runtime: Runtime) {
    let mut address = ptr::null_mut();
    let mut mode = RELAXED;
    // SAFETY: `mode` and `address` may be written. In the relaxed mode an allocation disturbs no
    // capture; the mode is put back. An allocation that should be impossible and succeeded is freed
    // again.
    unsafe {
        let relaxed = runtime.cudaThreadExchangeStreamCaptureMode(&mut mode) == 0;
        if runtime.cudaMalloc(&mut address, IMPOSSIBLE) == 0 {
            runtime.cudaFree(address);
        }
        if relaxed {
            runtime.cudaThreadExchangeStreamCaptureMode(&mut mode);
        }
    }
}

/// Returns `cudaErrorInvalidValue`. The log has the reason.
#[cold]
pub fn invalid_value(runtime: Runtime) -> CudaError {
    // SAFETY: the documented answer to NULL is this very error, and nothing is written.
    unsafe { runtime.cudaRuntimeGetVersion(ptr::null_mut()) };
    INVALID_VALUE
}
