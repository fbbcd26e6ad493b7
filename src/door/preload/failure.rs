//! Our errors, reported as the CUDA runtime reports its own: the call returns the code, and the
//! thread's last error is the same.

use super::super::oom;
use super::runtime::{CudaError, Runtime};
use crate::driver::StreamHandle;
use crate::heap::{Heap, Report};
use std::ffi::c_uint;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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
    match OFTEN.lock().unwrap_or_else(PoisonError::into_inner).tells(Instant::now()) {
        Some(0) => log::warn!("{report}"),
        Some(untold) => log::warn!("{report}\n{untold} more since the last that the log told of."),
        None => log::debug!("{report}"),
    }
}

/// Out-of-memories in the log: the first ones, then one a minute. A program may meet thousands.
static OFTEN: Mutex<Often> = Mutex::new(Often { told: 0, last: None, untold: 0 });

struct Often {
    told: u32,
    last: Option<Instant>,
    /// Since the last that was told.
    untold: u64,
}

impl Often {
    const FIRST: u32 = 8;
    const PAUSE: Duration = Duration::from_secs(60);

    /// Whether the log tells of one, and of how many it did not since the last.
    fn tells(&mut self, now: Instant) -> Option<u64> {
        let is_soon =
            self.last.is_some_and(|last| now.saturating_duration_since(last) < Self::PAUSE);
        if self.told >= Self::FIRST && is_soon {
            self.untold += 1;
            return None;
        }
        self.told = self.told.saturating_add(1);
        self.last = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_of_the_first_out_of_memories_and_then_of_one_a_minute() {
        let (mut often, began) = (Often { told: 0, last: None, untold: 0 }, Instant::now());
        // Ten a second, for 150 s.
        let told = (0..1500).filter_map(|tenth| {
            let now = began + tenth * Duration::from_millis(100);
            often.tells(now).map(|untold| (tenth, untold))
        });
        let told: Vec<_> = told.collect();
        assert_eq!(told[..8], [0, 1, 2, 3, 4, 5, 6, 7].map(|tenth| (tenth, 0)));
        assert_eq!(told[8..], [(607, 599), (1207, 599)]);
    }
}
