//! `observe`: makes the real call with the caller's very arguments, leaves its result untouched,
//! and records its effect.
//!
//! Of CUDA it calls nothing else but cudaGetDevice, which makes no context.

use super::current;
use super::failure::OUT_OF_MEMORY;
use super::mode;
use super::runtime::{CudaError, Runtime, Stream, effective};
use crate::door::begin::heap;
use crate::door::oom;
use crate::door::process::{current as heap_in_use, guarded};
use crate::driver::StreamHandle;
use crate::heap::Heap;
use std::ffi::c_void;

/// Records the `bytes` at `*out` where the real call returned 0, and a refusal for want of memory.
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
    } else if error == OUT_OF_MEMORY {
        guarded((), || note_refusal(runtime, bytes, stream));
    }
    error
}

#[inline(always)]
fn note(runtime: Runtime, address: u64, bytes: usize, stream: StreamHandle) {
    let Some(device) = current::device(runtime) else { return };
    if let Some(heap) = watching() {
        heap.saw_malloc(device, address, bytes as u64, stream);
    }
}

#[cold]
#[inline(never)]
fn note_refusal(runtime: Runtime, bytes: usize, stream: StreamHandle) {
    if let Some(device) = current::device(runtime)
        && let Some(heap) = watching()
    {
        oom::saw(heap, device, bytes as u64, stream);
    }
}

/// The heap that records.
#[inline(always)]
pub(super) fn watching() -> Option<&'static Heap> {
    heap_in_use().or_else(begin)
}

/// The same, made at the first call.
#[cold]
#[inline(never)]
fn begin() -> Option<&'static Heap> {
    // Without one, the log has the reason.
    heap().inspect_err(|_| mode::fall_back()).ok()
}

/// Records the coming free of the block at `pointer`: before the call, as another thread may get
/// the address at once.
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

/// The record's handle of a caller's stream.
#[inline]
pub fn on(stream: Stream, per_thread: bool) -> StreamHandle {
    StreamHandle(effective(per_thread, stream))
}

/// Records the coming reset of the device: all blocks on it are gone.
pub fn resetting(runtime: Runtime) {
    guarded((), || {
        if let Some(heap) = heap_in_use()
            && let Some(device) = current::device(runtime)
        {
            heap.reset_device(device);
        }
    });
}
