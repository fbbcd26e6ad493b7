//! `manage`: the heap serves the driver's calls, by the rules of the runtime's ([`super::super`]): a pointer of ours never reaches the real
//! functions, one of anybody else's never stays here, and what the heap cannot serve, short of an out-of-memory, is theirs.

use super::context;
use super::real::{self, CuResult, DevicePtr, INVALID_VALUE, OUT_OF_MEMORY, Stream};
use crate::config::Backing;
use crate::door::preload::{current, mode};
use crate::door::{current as heap_in_use, guarded, heap, oom, run_file};
use crate::driver::StreamHandle;
use crate::heap::{Error, Heap};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows start at multiples of this (bytes): the largest texture alignment.
const PITCH: usize = 512;

/// What became of a request.
enum Outcome {
    Served(u64),
    /// Answered with this error.
    Refused(CuResult),
    /// For the real function.
    NotOurs,
}

impl Outcome {
    /// Writes what was served; asks the real function where that is for it.
    ///
    /// # Safety
    /// `out` may be written where something was served.
    unsafe fn answer(self, out: *mut DevicePtr, real: impl FnOnce() -> CuResult) -> CuResult {
        match self {
            Self::Served(address) => {
                // SAFETY: the caller's promise.
                unsafe { *out = address };
                0
            }
            Self::Refused(code) => code,
            Self::NotOurs => real(),
        }
    }
}

/// Asks the heap for `bytes` (not 0) on the device that `place` finds.
fn allocate(bytes: usize, stream: StreamHandle, place: impl FnOnce() -> Option<i64>) -> Outcome {
    // First: a request that is not ours makes no heap.
    let Some(device) = place() else { return Outcome::NotOurs };
    let Ok(heap) = heap() else {
        // The log has said why.
        mode::fall_back();
        return Outcome::NotOurs;
    };
    match heap.malloc(bytes as u64, device, stream) {
        Ok(address) => Outcome::Served(address),
        Err(Error::OutOfMemory(report)) => {
            oom::dump(heap, &report);
            run_file::at_an_out_of_memory(heap);
            heap.note_out_of_memory(&report, stream);
            log::warn!("{report}");
            Outcome::Refused(OUT_OF_MEMORY)
        }
        Err(other) => {
            complain(&other.to_string());
            Outcome::NotOurs
        }
    }
}

/// What the heap could not serve; the first few times, then ever more rarely.
#[cold]
fn complain(reason: &str) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    if count <= 10 || count.is_power_of_two() {
        log::warn!("{reason}. The CUDA driver serves this request, {count} so far");
    }
}

/// `cuMemAlloc`. Size 0 and NULL are refused by the real function.
///
/// # Safety
/// `out` is NULL or may be written.
pub unsafe fn malloc(out: *mut DevicePtr, bytes: usize, real: impl FnOnce() -> CuResult) -> CuResult {
    let outcome = if out.is_null() || bytes == 0 {
        Outcome::NotOurs
    } else {
        guarded(Outcome::NotOurs, || allocate(bytes, StreamHandle::EVERY, context::served_device))
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
    real: impl FnOnce() -> CuResult,
) -> CuResult {
    let row = width.checked_next_multiple_of(PITCH).filter(|_| matches!(element, 4 | 8 | 16));
    let outcome = match row.and_then(|row| row.checked_mul(height)) {
        Some(bytes) if bytes > 0 && !out.is_null() && !pitch.is_null() => {
            guarded(Outcome::NotOurs, || allocate(bytes, StreamHandle::EVERY, context::served_device))
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

/// `cuMemAllocAsync` (no pool is named) and `cuMemAllocFromPoolAsync`: the device's default pool is ours, any other the program's own. While
/// the stream captures, an allocation becomes a node of its graph, which ours never are.
///
/// # Safety
/// `out` is NULL or may be written.
pub unsafe fn malloc_async(
    out: *mut DevicePtr,
    bytes: usize,
    pool: Option<*mut c_void>,
    stream: Stream,
    real: impl FnOnce() -> CuResult,
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

/// Whose a pointer that is to be freed is.
enum Whose {
    /// A live block of ours, on this device.
    Ours(&'static Heap, u32),
    /// In memory of ours, but no live block starts there. (The real function might take it for the span that it lies in.)
    OursAndWrong,
    NotOurs,
}

fn whose(address: DevicePtr, call: &str) -> Whose {
    let Some(heap) = heap_in_use().filter(|_| address != 0) else { return Whose::NotOurs };
    if let Some(block) = heap.owns(address) {
        return Whose::Ours(heap, block.device);
    }
    if heap.base_of(address).is_none() {
        return Whose::NotOurs;
    }
    log::error!(
        "{call}({address:#x}): no live block starts there (it was freed before, or is the inside of a block); nothing is freed, and \
         CUDA_ERROR_INVALID_VALUE is answered"
    );
    Whose::OursAndWrong
}

/// `cuMemFree`.
pub fn free(address: DevicePtr, real: impl FnOnce() -> CuResult) -> CuResult {
    let done = guarded(None, || match whose(address, "cuMemFree") {
        Whose::Ours(heap, _) => {
            heap.free_everywhere(address);
            Some(0)
        }
        Whose::OursAndWrong => Some(INVALID_VALUE),
        Whose::NotOurs => None,
    });
    done.unwrap_or_else(real)
}

/// `cuMemFreeAsync`. In a capture it would have to become a node of the graph, which takes graph memory only: the driver refuses any other,
/// and so do we.
pub fn free_async(address: DevicePtr, stream: Stream, real: impl FnOnce() -> CuResult) -> CuResult {
    let done = guarded(None, || match whose(address, "cuMemFreeAsync") {
        Whose::Ours(..) if context::may_capture(stream) => {
            log::error!(
                "cuMemFreeAsync({address:#x}) on stream {stream:#x}, which is capturing: the block was not allocated in the capture, so a \
                 graph cannot free it. It stays allocated, and CUDA_ERROR_INVALID_VALUE is answered; free it outside of the capture"
            );
            Some(INVALID_VALUE)
        }
        Whose::Ours(heap, device) => {
            if context::device_of_stream(stream) == Some(i64::from(device)) {
                heap.free_on(address, context::handle(stream));
            } else {
                // A stream of another device, or of another context: the heap has no events there. Rare enough to be waited for.
                // SAFETY: the stream is the caller's, who promises that it is one.
                unsafe { real::cuStreamSynchronize(stream) };
                heap.free_everywhere(address);
            }
            Some(0)
        }
        Whose::OursAndWrong => Some(INVALID_VALUE),
        Whose::NotOurs => None,
    });
    done.unwrap_or_else(real)
}

/// Whether a pointer that is freed after the exit handlers is ours: then nothing is left to be done.
pub fn is_ours_at_exit(address: DevicePtr) -> bool {
    guarded(false, || {
        let heap = heap_in_use().filter(|_| address != 0);
        heap.is_some_and(|heap| heap.owns(address).is_some() || heap.base_of(address).is_some())
    })
}

/// `cuMemGetInfo`: what we would give back counts as free.
///
/// # Safety
/// `free` and `total` are NULL or may be written.
pub unsafe fn mem_get_info(free: *mut usize, total: *mut usize, real: impl FnOnce() -> CuResult) -> CuResult {
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

/// `cuCtxSynchronize`: what was freed before it is free for all after it.
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
            heap.stream_ends(device, context::handle(stream));
        }
    });
    real()
}

/// A capture that `real` begins on `stream`.
pub fn begin_capture(stream: Stream, real: impl FnOnce() -> CuResult) -> CuResult {
    let place = guarded(None, || {
        let device = context::device_of_stream(stream)?;
        // A heap that is made while something captures would ask the driver what it must not be asked then.
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

/// The end of the capture on `stream`, by `real`. A failed capture ends as well; a call that the driver refuses (from another thread) leaves
/// it open.
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

/// `cuIpcGetMemHandle`. A handle names the driver's allocation that a pointer lies in, and opens at its start: so only a block that starts
/// its span can be exported, and only where spans are the driver's plain allocations.
pub fn ipc_get_mem_handle(address: DevicePtr, real: impl FnOnce() -> CuResult) -> CuResult {
    let refused = guarded(true, || {
        let Some(heap) = heap_in_use() else { return false };
        if heap.base_of(address).is_none() {
            return false;
        }
        let plain = matches!(heap.config().backing, Backing::Fixed | Backing::Passthrough);
        let reason = if !plain {
            "memory of this backing cannot be exported by handle"
        } else if current::start_of_allocation(address) != Some(address) {
            "the block shares its span with others, and a handle opens at the span's start"
        } else {
            return false;
        };
        log::error!(
            "cuIpcGetMemHandle({address:#x}): {reason}; CUDA_ERROR_INVALID_VALUE is answered. GRUYERE_CONF=backing:fixed serves blocks of \
             1 MiB and more that can be exported, each by the address that cuMemAlloc gave"
        );
        true
    });
    if refused { INVALID_VALUE } else { real() }
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
