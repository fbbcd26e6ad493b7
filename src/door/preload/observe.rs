//! `observe`: the real call with the caller's very arguments, its answer untouched; what it did is
//! written down.
//!
//! Nothing of our own is called but cudaGetDevice, which makes no context.

use super::current;
use super::mode;
use super::runtime::{CudaError, Runtime, Stream, effective};
use crate::door::{current as heap_in_use, guarded, heap};
use crate::driver::StreamHandle;
use crate::heap::Heap;
use std::ffi::c_void;

/// The real call gave `bytes` at `*out`, if it answered 0.
///
/// # Safety
/// `out` may be read where `error` is 0.
#[inline(always)]
pub unsafe fn allocated(
    runtime: Runtime,
    error: CudaError,
    out: *const *mut c_void,
    bytes: usize,
    stream: StreamHandle,
) -> CudaError {
    if error == 0 {
        // SAFETY: the caller's promise.
        let address = unsafe { *out } as u64;
        if address != 0 {
            guarded((), || note(runtime, address, bytes, stream));
        }
    }
    error
}

#[inline(always)]
fn note(runtime: Runtime, address: u64, bytes: usize, stream: StreamHandle) {
    let Some(device) = current::device(runtime) else { return };
    if let Some(heap) = heap_in_use().or_else(begin) {
        heap.saw_malloc(device, address, bytes as u64, stream);
    }
}

/// The book, at the first call.
#[cold]
#[inline(never)]
fn begin() -> Option<&'static Heap> {
    // Where there is none, the log has said why.
    heap().inspect_err(|_| mode::fall_back()).ok()
}

/// The block at `pointer` is about to be freed: noted before, as another thread may get the address
/// at once.
#[inline(always)]
pub fn freeing(pointer: *const c_void, stream: StreamHandle) {
    if !pointer.is_null() {
        guarded((), || {
            if let Some(heap) = heap_in_use() {
                heap.saw_free(pointer as u64, stream);
            }
        });
    }
}

/// The stream of a caller, as the record counts it.
#[inline]
pub fn on(stream: Stream, per_thread: bool) -> StreamHandle {
    StreamHandle(effective(per_thread, stream))
}

/// The device is about to be reset: what was on it is gone.
pub fn resetting(runtime: Runtime) {
    guarded((), || {
        if let Some(heap) = heap_in_use()
            && let Some(device) = current::device(runtime)
        {
            heap.reset_device(device);
        }
    });
}
