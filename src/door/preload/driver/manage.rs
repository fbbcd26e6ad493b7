//! `manage`: the heap serves the driver's calls, by the rules of the runtime's ([`super::super`]):
//! a pointer of ours never reaches the real functions, a foreign one never stays here, and a
//! request that the heap cannot serve, short of an out-of-memory, goes to the real functions.

use super::context;
use super::real::{self, CuResult, DevicePtr, INVALID_VALUE, OUT_OF_MEMORY, Stream};
use crate::config::Backing;
use crate::door::begin::heap;
use crate::door::preload::failure::tell_of_out_of_memory;
use crate::door::preload::manage::share_default_pool;
use crate::door::preload::runtime::AccessDesc;
use crate::door::preload::whose::{PITCH, Whose, complain, whose};
use crate::door::preload::{current, mode};
use crate::door::process::{current as heap_in_use, guarded};
use crate::driver::StreamHandle;
use crate::heap::{Error, Heap};
use std::ffi::{c_int, c_uint, c_void};

/// The outcome of a request.
enum Outcome {
    Served(u64),
    /// The call returns this error.
    Refused(CuResult),
    /// The real function serves it.
    NotOurs,
}

impl Outcome {
    /// Writes a served address; calls the real function for `NotOurs`.
    ///
    /// # Safety
    /// `out` may be written where something was served.
    unsafe fn answer(self, out: *mut DevicePtr, real: impl Fn() -> CuResult) -> CuResult {
        match self {
            Self::Served(address) => {
                // SAFETY: the caller's promise.
                unsafe { *out = address };
                0
            }
            Self::Refused(code) => code,
            Self::NotOurs => with_room(real),
        }
    }
}

/// Calls `real`, which takes memory that is not ours. The driver does not know that what the heap
/// has idle is free: where it is out of memory, the heap gives that back, and `real` is called once
/// more.
pub fn with_room(real: impl Fn() -> CuResult) -> CuResult {
    match real() {
        OUT_OF_MEMORY if guarded(0, || heap_in_use().map_or(0, Heap::trim)) > 0 => real(),
        code => code,
    }
}

/// Asks the heap for `bytes` (not 0) on the device that `place` finds.
fn allocate(bytes: usize, stream: StreamHandle, place: impl FnOnce() -> Option<i64>) -> Outcome {
    // First: a request that is not ours makes no heap.
    let Some(device) = place() else { return Outcome::NotOurs };
    let Ok(heap) = heap() else {
        // The log has the reason.
        mode::fall_back();
        return Outcome::NotOurs;
    };
    match heap.malloc(bytes as u64, device, stream) {
        Ok(address) => Outcome::Served(address),
        Err(Error::OutOfMemory(mut report)) => {
            tell_of_out_of_memory(heap, &mut report, stream);
            Outcome::Refused(OUT_OF_MEMORY)
        }
        Err(other) => {
            complain(&other.to_string(), "driver");
            Outcome::NotOurs
        }
    }
}

/// `cuMemAlloc`. The real function refuses size 0 and NULL.
///
/// # Safety
/// `out` is NULL or may be written.
pub unsafe fn malloc(out: *mut DevicePtr, bytes: usize, real: impl Fn() -> CuResult) -> CuResult {
    let outcome = if out.is_null() || bytes == 0 {
        Outcome::NotOurs
    } else {
        guarded(Outcome::NotOurs, || {
            allocate(bytes, StreamHandle::ALL_STREAMS, context::served_device)
        })
    };
    // SAFETY: the caller's promise; not NULL where something was served.
    unsafe { outcome.answer(out, real) }
}

/// `cuMemAllocPitch`. The driver takes elements of 4, 8 and 16 bytes.
///
/// # Safety
/// `out` and `pitch` are NULL or may be written.
pub unsafe fn malloc_pitch(
    out: *mut DevicePtr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
    real: impl Fn() -> CuResult,
) -> CuResult {
    let row = width.checked_next_multiple_of(PITCH).filter(|_| matches!(element, 4 | 8 | 16));
    let outcome = match row.and_then(|row| row.checked_mul(height)) {
        Some(bytes) if bytes > 0 && !out.is_null() && !pitch.is_null() => {
            guarded(Outcome::NotOurs, || {
                allocate(bytes, StreamHandle::ALL_STREAMS, context::served_device)
            })
        }
        _ => Outcome::NotOurs,
    };
    if let (Outcome::Served(_), Some(row)) = (&outcome, row) {
        // SAFETY: not NULL, and so writable by the caller's promise.
        unsafe { *pitch = row };
    }
    // SAFETY: the caller's promise; not NULL where something was served.
    unsafe { outcome.answer(out, real) }
}

/// `cuMemAllocAsync` (without a named pool) and `cuMemAllocFromPoolAsync`: the device's default
/// pool is ours, any other the program's own. While the stream captures, an allocation becomes a
/// node of its graph, and ours cannot.
///
/// # Safety
/// `out` is NULL or may be written.
pub unsafe fn malloc_async(
    out: *mut DevicePtr,
    bytes: usize,
    pool: Option<*mut c_void>,
    stream: Stream,
    real: impl Fn() -> CuResult,
) -> CuResult {
    let place = || {
        let device = context::device_of_stream(stream)?;
        let is_default = match pool {
            Some(pool) => context::is_default_pool(pool, device),
            None => context::default_pool_is_current(device),
        };
        (is_default && !context::may_capture(stream)).then_some(device)
    };
    let outcome = if out.is_null() || bytes == 0 {
        Outcome::NotOurs
    } else {
        guarded(Outcome::NotOurs, || allocate(bytes, context::handle(stream), place))
    };
    // SAFETY: the caller's promise; not NULL where something was served.
    unsafe { outcome.answer(out, real) }
}

/// `cuMemFree`.
pub fn free(address: DevicePtr, real: impl FnOnce() -> CuResult) -> CuResult {
    let done = guarded(None, || match whose(address, "cuMemFree", "CUDA_ERROR_INVALID_VALUE") {
        Whose::Ours(heap, _) => {
            heap.free_device_wide(address);
            Some(0)
        }
        Whose::OursAndWrong => Some(INVALID_VALUE),
        Whose::NotOurs => None,
    });
    done.unwrap_or_else(real)
}

/// `cuMemFreeAsync`. In a capture it would become a node of the graph, which takes graph memory
/// only: the driver refuses any other memory, and so do we.
pub fn free_async(address: DevicePtr, stream: Stream, real: impl FnOnce() -> CuResult) -> CuResult {
    let done = guarded(None, || {
        match whose(address, "cuMemFreeAsync", "CUDA_ERROR_INVALID_VALUE") {
            Whose::Ours(..) if context::may_capture(stream) => {
                log::error!(
                    "cuMemFreeAsync({address:#x}) on stream {stream:#x}, which is capturing: the \
                     block was not allocated in the capture, so a graph cannot free it. It stays \
                     allocated, and the call returns CUDA_ERROR_INVALID_VALUE; free it outside the \
                     capture"
                );
                Some(INVALID_VALUE)
            }
            Whose::Ours(heap, device) => {
                if context::device_of_stream(stream) == Some(i64::from(device)) {
                    heap.free_on(address, context::handle(stream));
                } else {
                    // A stream of another device or context, where the heap has no events. Rare
                    // enough to wait for.
                    // SAFETY: the stream is the caller's, who promises that it is one.
                    unsafe { real::cuStreamSynchronize(stream) };
                    heap.free_device_wide(address);
                }
                Some(0)
            }
            Whose::OursAndWrong => Some(INVALID_VALUE),
            Whose::NotOurs => None,
        }
    });
    done.unwrap_or_else(real)
}

/// `cuMemGetInfo`: memory that we would give back counts as free.
///
/// # Safety
/// `free` and `total` are NULL or may be written.
pub unsafe fn mem_get_info(
    free: *mut usize,
    total: *mut usize,
    real: impl FnOnce() -> CuResult,
) -> CuResult {
    let code = real();
    if code == 0 && !free.is_null() {
        let more = guarded(0, || {
            let device = context::device();
            device.zip(heap_in_use()).map_or(0, |(device, heap)| heap.could_give_back(device))
        });
        // SAFETY: not NULL, and so written by the real function; the total, where wanted, as well.
        unsafe {
            let sum = (*free).saturating_add(more as usize);
            *free = if total.is_null() { sum } else { sum.min(*total) };
        }
    }
    code
}

/// `cuCtxSynchronize`: blocks freed before it are free for all streams after it.
pub fn ctx_synchronize(real: impl FnOnce() -> CuResult) -> CuResult {
    let before = guarded(None, || {
        let heap = heap_in_use()?;
        let device = context::served_device()?;
        Some((heap, device, heap.before_synchronize(device)))
    });
    let code = real();
    if let Some((heap, device, point)) = before
        && code == 0
    {
        guarded((), || heap.synchronized(device, point));
    }
    code
}

/// `cuStreamDestroy`.
pub fn stream_destroy(stream: Stream, real: impl FnOnce() -> CuResult) -> CuResult {
    guarded((), || {
        if !context::is_default_stream(stream)
            && let Some(heap) = heap_in_use()
            && let Some(device) = context::device_of_stream(stream)
        {
            let _ = heap.stream_ends(device, context::handle(stream));
        }
    });
    real()
}

/// Begins a capture on `stream` by `real`.
pub fn begin_capture(stream: Stream, real: impl FnOnce() -> CuResult) -> CuResult {
    let place = guarded(None, || {
        let device = context::device_of_stream(stream)?;
        // A heap made during a capture would make driver calls that the capture forbids.
        let heap = heap().ok()?;
        heap.capture_begins(device, context::handle(stream));
        Some((heap, device))
    });
    let code = real();
    if let Some((heap, device)) = place
        && code != 0
    {
        guarded((), || heap.capture_ends(device, context::handle(stream)));
    }
    code
}

/// Ends the capture on `stream` by `real`. A failed capture ends as well; a call that the driver
/// refuses (from another thread) leaves it open.
pub fn end_capture(stream: Stream, real: impl FnOnce() -> CuResult) -> CuResult {
    let code = real();
    guarded((), || {
        if let Some(heap) = heap_in_use()
            && (code == 0 || !context::may_capture(stream))
            && let Some(device) = context::device_of_stream(stream)
        {
            heap.capture_ends(device, context::handle(stream));
        }
    });
    code
}

/// `cuIpcGetMemHandle`. A handle names the driver's allocation around a pointer, and opens at its
/// start: so only a block that starts its span can be exported, and only where spans are the
/// driver's plain allocations.
pub fn ipc_get_mem_handle(address: DevicePtr, real: impl FnOnce() -> CuResult) -> CuResult {
    let refused = guarded(true, || {
        let Some(heap) = heap_in_use() else { return false };
        if heap.base_of(address).is_none() {
            return false;
        }
        let plain = matches!(heap.settings().backing, Backing::Fixed | Backing::Passthrough);
        let reason = if !plain {
            "memory of this backing cannot be exported by handle"
        } else if current::start_of_allocation(address) != Some(address) {
            "the block shares its span with others, and a handle opens at the span's start"
        } else {
            return false;
        };
        log::error!(
            "cuIpcGetMemHandle({address:#x}): {reason}; the call returns CUDA_ERROR_INVALID_VALUE. \
             With GRUYERE_CONF=backing:fixed, blocks of 1 MiB and more can be exported, each by \
             the address that cuMemAlloc returned"
        );
        true
    });
    if refused { INVALID_VALUE } else { real() }
}

/// `cuMemPoolSetAccess`, as the runtime's.
///
/// # Safety
/// As cuMemPoolSetAccess, which `real` calls.
pub unsafe fn pool_set_access(
    pool: *mut c_void,
    list: *const AccessDesc,
    count: usize,
    real: impl FnOnce() -> CuResult,
) -> CuResult {
    let code = real();
    if code == 0 {
        let is_default = |device| context::is_default_pool(pool, device);
        // SAFETY: the real function has read as many.
        unsafe { share_default_pool(list, count, is_default) };
    }
    code
}

/// `cuDevicePrimaryCtxReset`: all blocks on the device are gone.
pub fn primary_ctx_reset(device: c_int, real: impl FnOnce() -> CuResult) -> CuResult {
    guarded((), || {
        if let Some(heap) = heap_in_use() {
            heap.reset_device(i64::from(device));
            context::forget(i64::from(device));
            crate::door::preload::current::forget_context(i64::from(device));
        }
    });
    real()
}
