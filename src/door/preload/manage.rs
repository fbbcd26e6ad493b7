//! `manage`: the heap serves the calls.
//!
//! A pointer of ours never reaches the real functions, which would not know it or, worse, would
//! take it for the span around it; and a foreign pointer never stays here. A request that the heap
//! cannot serve, short of an out-of-memory, goes to the real functions: both kinds of memory may
//! live side by side.

use super::current;
use super::failure::{invalid_value, out_of_memory};
use super::mode;
use super::runtime::{
    AccessDesc, CudaError, Extent, IpcMemHandle, PitchedPtr, Runtime, Stream, effective,
};
use super::whose::{PITCH, Whose, complain, whose};
use crate::config::Backing;
use crate::door::begin::heap;
use crate::door::process::{current as heap_in_use, guarded};
use crate::driver::StreamHandle;
use crate::heap::{Error, Heap};
use std::ffi::{c_int, c_uint, c_void};

/// The outcome of a request.
enum Outcome {
    Served(u64),
    /// The call returns this error.
    Refused(CudaError),
    /// The real function serves it.
    NotOurs,
}

/// Asks the heap for `bytes` (not 0) in the order of `stream`, on the device that `place` finds.
fn allocate(
    runtime: Runtime,
    bytes: usize,
    stream: StreamHandle,
    place: impl FnOnce(&Heap) -> Option<i64>,
) -> Outcome {
    let Ok(heap) = heap() else {
        // The log has the reason.
        mode::fall_back();
        return Outcome::NotOurs;
    };
    let Some(device) = place(heap) else { return Outcome::NotOurs };
    match heap.malloc(bytes as u64, device, stream) {
        Ok(address) => Outcome::Served(address),
        Err(Error::OutOfMemory(mut report)) => {
            Outcome::Refused(out_of_memory(runtime, heap, &mut report, stream))
        }
        Err(other) => {
            complain(&other.to_string(), "runtime");
            Outcome::NotOurs
        }
    }
}

/// `cudaMalloc`. Size 0 and NULL go to the real function, as runtimes differ.
///
/// # Safety
/// `out` is NULL or may be written.
pub unsafe fn malloc(runtime: Runtime, out: *mut *mut c_void, bytes: usize) -> CudaError {
    let outcome = if out.is_null() || bytes == 0 {
        Outcome::NotOurs
    } else {
        guarded(Outcome::NotOurs, || {
            allocate(runtime, bytes, StreamHandle::ALL_STREAMS, |_| current::served_device(runtime))
        })
    };
    // SAFETY: the caller's promise.
    unsafe { answer(outcome, out, || runtime.cudaMalloc(out, bytes)) }
}

/// Writes a served address; calls the real function for `NotOurs`.
///
/// # Safety
/// `out` may be written where something was served.
unsafe fn answer(
    outcome: Outcome,
    out: *mut *mut c_void,
    real: impl FnOnce() -> CudaError,
) -> CudaError {
    match outcome {
        Outcome::Served(address) => {
            // SAFETY: the caller's promise.
            unsafe { *out = address as *mut c_void };
            0
        }
        Outcome::Refused(error) => error,
        Outcome::NotOurs => real(),
    }
}

/// `cudaMallocPitch`.
///
/// # Safety
/// `out` and `pitch` are NULL or may be written.
pub unsafe fn malloc_pitch(
    runtime: Runtime,
    out: *mut *mut c_void,
    pitch: *mut usize,
    width: usize,
    height: usize,
) -> CudaError {
    let row = width.checked_next_multiple_of(PITCH);
    let outcome = match row.and_then(|row| row.checked_mul(height)) {
        Some(bytes) if bytes > 0 && !out.is_null() && !pitch.is_null() => {
            guarded(Outcome::NotOurs, || {
                allocate(runtime, bytes, StreamHandle::ALL_STREAMS, |_| {
                    current::served_device(runtime)
                })
            })
        }
        _ => Outcome::NotOurs,
    };
    if let (Outcome::Served(_), Some(row)) = (&outcome, row) {
        // SAFETY: not NULL, and so writable by the caller's promise.
        unsafe { *pitch = row };
    }
    // SAFETY: the caller's promise.
    unsafe { answer(outcome, out, || runtime.cudaMallocPitch(out, pitch, width, height)) }
}

/// `cudaMalloc3D`.
///
/// # Safety
/// `out` is NULL or may be written.
pub unsafe fn malloc_3d(runtime: Runtime, out: *mut PitchedPtr, extent: Extent) -> CudaError {
    let Extent { width, height, depth } = extent;
    let row = width.checked_next_multiple_of(PITCH);
    let bytes = row.and_then(|row| row.checked_mul(height)?.checked_mul(depth));
    let outcome = match bytes {
        Some(bytes) if bytes > 0 && !out.is_null() => guarded(Outcome::NotOurs, || {
            allocate(runtime, bytes, StreamHandle::ALL_STREAMS, |_| current::served_device(runtime))
        }),
        _ => Outcome::NotOurs,
    };
    match (outcome, row) {
        (Outcome::Served(address), Some(pitch)) => {
            // SAFETY: not NULL, and so writable by the caller's promise.
            unsafe {
                *out =
                    PitchedPtr { ptr: address as *mut c_void, pitch, xsize: width, ysize: height };
            }
            0
        }
        (Outcome::Refused(error), _) => error,
        // SAFETY: the caller's promise.
        _ => unsafe { runtime.cudaMalloc3D(out, extent) },
    }
}

/// The device on which the heap may serve a request on `stream`. `None` while the stream captures:
/// an allocation in a capture becomes a node of its graph, and ours cannot.
fn place_on_stream(runtime: Runtime, heap: &Heap, stream: Stream) -> Option<i64> {
    let device = current::device_of_stream(runtime, stream, heap.device_count())?;
    (capturing(runtime, stream) == Ok(false)).then_some(device)
}

/// Whether `stream` captures.
///
/// # Errors
/// The runtime's, where the stream cannot be used: there is no such stream, or (the legacy default
/// stream) another stream captures.
fn capturing(runtime: Runtime, stream: Stream) -> Result<bool, CudaError> {
    let mut status: c_uint = 0;
    // SAFETY: the stream is the caller's; `status` may be written.
    match unsafe { runtime.cudaStreamIsCapturing(stream, &mut status) } {
        0 => Ok(status != 0),
        error => Err(error),
    }
}

/// `cudaMallocAsync`. If the program has made its own pool current, it wants that pool's
/// properties: the real function serves it.
///
/// # Safety
/// `out` is NULL or may be written.
pub unsafe fn malloc_async(
    runtime: Runtime,
    out: *mut *mut c_void,
    bytes: usize,
    stream: Stream,
    per_thread: bool,
) -> CudaError {
    let on = effective(per_thread, stream);
    let outcome = if out.is_null() || bytes == 0 {
        Outcome::NotOurs
    } else {
        guarded(Outcome::NotOurs, || {
            allocate(runtime, bytes, StreamHandle(on), |heap| {
                place_on_stream(runtime, heap, on)
                    .filter(|&device| current::default_pool_is_current(runtime, device))
            })
        })
    };
    // SAFETY: the caller's promise.
    unsafe { answer(outcome, out, || runtime.malloc_async(per_thread, stream, out, bytes)) }
}

/// `cudaMallocFromPoolAsync`: serves the default pool of a device; any other is the program's own.
///
/// # Safety
/// `out` is NULL or may be written.
pub unsafe fn malloc_from_pool_async(
    runtime: Runtime,
    out: *mut *mut c_void,
    bytes: usize,
    pool: *mut c_void,
    stream: Stream,
    per_thread: bool,
) -> CudaError {
    let on = effective(per_thread, stream);
    let outcome = if out.is_null() || bytes == 0 {
        Outcome::NotOurs
    } else {
        guarded(Outcome::NotOurs, || {
            allocate(runtime, bytes, StreamHandle(on), |heap| {
                place_on_stream(runtime, heap, on)
                    .filter(|&device| current::is_default_pool(runtime, pool, device))
            })
        })
    };
    // SAFETY: the caller's promise.
    unsafe {
        answer(outcome, out, || {
            runtime.malloc_from_pool_async(per_thread, stream, out, bytes, pool)
        })
    }
}

/// `cudaFree`.
///
/// # Safety
/// As cudaFree.
pub unsafe fn free(runtime: Runtime, pointer: *mut c_void) -> CudaError {
    let done = guarded(None, || match whose(pointer as u64, "cudaFree", "cudaErrorInvalidValue") {
        Whose::Ours(heap, _) => {
            heap.free_device_wide(pointer as u64);
            Some(0)
        }
        Whose::OursAndWrong => Some(invalid_value(runtime)),
        Whose::NotOurs => None,
    });
    // SAFETY: the caller's promise, and the pointer is not ours.
    done.unwrap_or_else(|| unsafe { runtime.cudaFree(pointer) })
}

/// Whether `stream` is one of `device`.
fn is_of(runtime: Runtime, heap: &Heap, device: u32, stream: Stream) -> bool {
    let devices = heap.device_count();
    devices <= 1 || current::device_of_stream(runtime, stream, devices) == Some(i64::from(device))
}

/// `cudaFreeAsync`. In a capture it would become a node of the graph, which takes graph memory
/// only: CUDA refuses any other memory, and so do we.
///
/// # Safety
/// As cudaFreeAsync.
pub unsafe fn free_async(
    runtime: Runtime,
    pointer: *mut c_void,
    stream: Stream,
    per_thread: bool,
) -> CudaError {
    let on = effective(per_thread, stream);
    let done = guarded(None, || {
        match whose(pointer as u64, "cudaFreeAsync", "cudaErrorInvalidValue") {
            Whose::Ours(heap, device) => Some(match capturing(runtime, on) {
                Ok(false) => {
                    if is_of(runtime, heap, device, on) {
                        heap.free_on(pointer as u64, StreamHandle(on));
                    } else {
                        // The heap has no events on another device's streams. Rare enough to wait
                        // for.
                        // SAFETY: the stream is the caller's, who promises that it is one.
                        unsafe { runtime.cudaStreamSynchronize(on) };
                        heap.free_device_wide(pointer as u64);
                    }
                    0
                }
                Ok(true) => {
                    log::error!(
                        "cudaFreeAsync({pointer:p}) on stream {on:#x}, which is capturing: the \
                         block was not allocated in the capture, so a graph cannot free it. It \
                         stays allocated, and the call returns cudaErrorInvalidValue; free it \
                         outside the capture"
                    );
                    invalid_value(runtime)
                }
                // As the real function; the runtime's last error is this one already.
                Err(error) => {
                    log::error!(
                        "cudaFreeAsync({pointer:p}): stream {on:#x} cannot be used now (error \
                         {error}); the block stays allocated"
                    );
                    error
                }
            }),
            Whose::OursAndWrong => Some(invalid_value(runtime)),
            Whose::NotOurs => None,
        }
    });
    // SAFETY: the caller's promise, and the pointer is not ours.
    done.unwrap_or_else(|| unsafe { runtime.free_async(per_thread, stream, pointer) })
}

/// `cudaMemGetInfo`: memory that we would give back counts as free.
///
/// # Safety
/// `free` and `total` are NULL or may be written.
pub unsafe fn mem_get_info(runtime: Runtime, free: *mut usize, total: *mut usize) -> CudaError {
    // SAFETY: the caller's promise.
    let error = unsafe { runtime.cudaMemGetInfo(free, total) };
    if error == 0 && !free.is_null() {
        let more = guarded(0, || {
            let device = current::served_device(runtime);
            device.zip(heap_in_use()).map_or(0, |(device, heap)| heap.could_give_back(device))
        });
        // SAFETY: not NULL, and so written by the real function; the total, where wanted, as well.
        unsafe {
            let sum = (*free).saturating_add(more as usize);
            *free = if total.is_null() { sum } else { sum.min(*total) };
        }
    }
    error
}

/// `cudaStreamDestroy`.
///
/// # Safety
/// As cudaStreamDestroy.
pub unsafe fn stream_destroy(runtime: Runtime, stream: Stream) -> CudaError {
    guarded((), || {
        if stream > 2
            && let Some(heap) = heap_in_use()
            && let Some(device) = current::device_of_stream(runtime, stream, heap.device_count())
        {
            let _ = heap.stream_ends(device, StreamHandle(stream));
        }
    });
    // SAFETY: the caller's promise.
    unsafe { runtime.cudaStreamDestroy(stream) }
}

/// Synchronises the device by `real`: blocks freed before it are free for all streams after it.
pub fn device_synchronize(runtime: Runtime, real: impl FnOnce() -> CudaError) -> CudaError {
    let before = guarded(None, || {
        let heap = heap_in_use()?;
        let device = current::served_device(runtime)?;
        Some((heap, device, heap.before_synchronize(device)))
    });
    let error = real();
    if let Some((heap, device, point)) = before
        && error == 0
    {
        guarded((), || heap.synchronized(device, point));
    }
    error
}

/// Resets the device by `real`: all blocks on it are gone.
pub fn device_reset(runtime: Runtime, real: impl FnOnce() -> CudaError) -> CudaError {
    guarded((), || {
        if let Some(heap) = heap_in_use()
            && let Some(device) = current::device(runtime)
        {
            heap.reset_device(device);
            current::forget_context(device);
            super::driver::forget_context(device);
        }
    });
    real()
}

/// Lets the current device reach the memory of `peer`, by `real`. Mapped memory does not follow by
/// itself: the heap grants access once both devices are in use.
pub fn enable_peer_access(
    runtime: Runtime,
    peer: c_int,
    real: impl FnOnce() -> CudaError,
) -> CudaError {
    let error = real();
    // The error may be that access was enabled before: all the same to us.
    guarded((), || {
        if let Ok(heap) = heap()
            && let Some(device) = current::served_device(runtime)
        {
            heap.use_devices(&[device, i64::from(peer)]);
        }
    });
    error
}

/// `cudaMemPoolSetAccess`: what is granted on a device's default pool holds for the heap's memory
/// of that device, which stands in for the pool. Access is not taken back: a device that has lost
/// it would fault, and none relies on a fault.
///
/// # Safety
/// As cudaMemPoolSetAccess.
pub unsafe fn pool_set_access(
    runtime: Runtime,
    pool: *mut c_void,
    list: *const AccessDesc,
    count: usize,
) -> CudaError {
    // SAFETY: the caller's promise.
    let error = unsafe { runtime.cudaMemPoolSetAccess(pool, list, count) };
    if error == 0 {
        let is_default = |device| current::is_default_pool(runtime, pool, device);
        // SAFETY: the real function has read as many.
        unsafe { share_default_pool(list, count, is_default) };
    }
    error
}

/// Lets the devices that `list` names reach the heap's memory of the device whose default pool
/// `is_default` knows.
///
/// # Safety
/// `list` is null, or `count` descriptions can be read there.
pub unsafe fn share_default_pool(
    list: *const AccessDesc,
    count: usize,
    is_default: impl Fn(i64) -> bool,
) {
    if list.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    guarded((), || {
        let peers: Vec<_> = list.iter().filter_map(AccessDesc::grants).collect();
        if !peers.is_empty()
            && let Ok(heap) = heap()
            && let Some(owner) = (0..i64::from(heap.device_count())).find(|&one| is_default(one))
            && peers.iter().any(|&peer| peer != owner)
        {
            heap.use_devices(&[owner]);
            heap.use_devices(&peers);
        }
    });
}

/// Begins a capture on `stream` by `real`.
pub fn begin_capture(
    runtime: Runtime,
    stream: Stream,
    real: impl FnOnce() -> CudaError,
) -> CudaError {
    let place = guarded(None, || {
        // A heap made during a capture would make driver calls that the capture forbids.
        let heap = heap().ok()?;
        let device = current::device_of_stream(runtime, stream, heap.device_count())?;
        heap.capture_begins(device, StreamHandle(stream));
        Some((heap, device))
    });
    let error = real();
    if let Some((heap, device)) = place
        && error != 0
    {
        guarded((), || heap.capture_ends(device, StreamHandle(stream)));
    }
    error
}

/// Ends the capture on `stream` by `real`. A failed capture ends as well; a call that the runtime
/// refuses (from another thread) leaves it open.
pub fn end_capture(
    runtime: Runtime,
    stream: Stream,
    real: impl FnOnce() -> CudaError,
) -> CudaError {
    let error = real();
    guarded((), || {
        if let Some(heap) = heap_in_use()
            && (error == 0 || capturing(runtime, stream) == Ok(false))
            && let Some(device) = current::device_of_stream(runtime, stream, heap.device_count())
        {
            heap.capture_ends(device, StreamHandle(stream));
        }
    });
    error
}

/// `cudaIpcGetMemHandle`. A handle names the driver's allocation around a pointer, and opens at its
/// start: so only a block that starts its span can be exported, and only where spans are the
/// driver's plain allocations.
///
/// # Safety
/// As cudaIpcGetMemHandle.
pub unsafe fn ipc_get_mem_handle(
    runtime: Runtime,
    handle: *mut IpcMemHandle,
    pointer: *mut c_void,
) -> CudaError {
    let refused = guarded(true, || {
        let Some(heap) = heap_in_use() else { return false };
        if heap.base_of(pointer as u64).is_none() {
            return false;
        }
        let plain = matches!(heap.settings().backing, Backing::Fixed | Backing::Passthrough);
        let reason = if !plain {
            "memory of this backing cannot be exported by handle"
        } else if current::start_of_allocation(pointer as u64) != Some(pointer as u64) {
            "the block shares its span with others, and a handle opens at the span's start"
        } else {
            return false;
        };
        log::error!(
            "cudaIpcGetMemHandle({pointer:p}): {reason}; the call returns cudaErrorInvalidValue. \
             With GRUYERE_CONF=backing:fixed, blocks of 1 MiB and more can be exported, each by \
             the address that cudaMalloc returned"
        );
        true
    });
    if refused {
        return invalid_value(runtime);
    }
    // SAFETY: the caller's promise.
    unsafe { runtime.cudaIpcGetMemHandle(handle, pointer) }
}
