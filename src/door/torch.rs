//! torch's hooks: the functions whose addresses go into `torch.cuda.memory.CUDAPluggableAllocator`.
//!
//! The signatures are those of torch's headers (2.4 to 2.15). Only [`gruyere_malloc`] ever throws;
//! where it cannot throw torch's own error it logs and returns NULL. In a forked child every
//! function returns at once.
//!
//! Cost of a call in instructions, by step (`cargo xtask instructions`: callgrind on
//! `traces/moe.trace.zst`, record on; without the driver's own):
//!
//! | step | small malloc | large malloc | small free | large free |
//! |---|---:|---:|---:|---:|
//! | choice of the path; for a free, whose address it is (page table) | 14 | 14 | 34 | 34 |
//! | registers saved and restored, a panic caught | 22 | 22 | 19 | 21 |
//! | device, clock, stream, lifetime tag, one latency in 64 | 25 | 21 | 9 | 38 |
//! | the lock | 11 | 24 | 14 | 8 |
//! | the slot of a slab, or a fit among free runs and its neighbours | 80 | 240 | 72 | 178 |
//! | the record: live bytes, histogram, block map, event | 69 | 82 | 57 | 65 |
//! | **sum** | **221** | **403** | **205** | **344** |
//!
//! The average over the trace is 264 an operation; requests without memory at hand, growth and
//! moved pages add 58, new peaks 14 (`crates/record/src/write/peaks.rs`), slabs that run full or
//! empty, gauges and low-memory watch 7: 343 in all. That was counted while small ended at 1 MiB;
//! it ends at 16 KiB, and the total is 371 (docs/decisions/hot-path.md).
//!
//! The slow path resolves a request without memory at hand (one malloc in 100) anew, in about 150
//! instructions. Three attempts to hand over what the hot path knows failed: each keeps that at
//! hand for every request, which costs each malloc 7 to 10.

use super::begin::{ONLY_WATCHED, heap};
use super::process::{current, guarded};
use super::{fork, oom, profiler, raise};
use crate::driver::StreamHandle;
use crate::dump::limits;
use crate::heap::{Device, Error, Heap, Owned, Page, SMALL_MAX};
use crate::record::SiteId;
use std::ffi::{c_int, c_void};

/// `cudaStream_t`: 0 and 1 are the legacy default stream, 2 is the calling thread's own.
pub type CudaStream = *mut c_void;

/// torch's `c10::MempoolId_t`, a pair passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MempoolId {
    /// Not 0 for pools that graphs create.
    pub first: u64,
    /// Not 0 for pools that the user creates.
    pub second: u64,
}

impl MempoolId {
    pub(super) fn pair(self) -> (u64, u64) {
        (self.first, self.second)
    }
}

pub(super) fn handle(stream: CudaStream) -> StreamHandle {
    StreamHandle(stream as usize)
}

/// torch's own allocator refuses a size (bytes) from here on, before any attempt.
const EXABYTE: u64 = 1 << 60;

/// The reason for not serving a request.
enum Refusal {
    OutOfMemory(String),
    /// A size too large to try.
    Exabyte,
    Other(String),
    /// There is no heap; the log has the reason.
    Unavailable(String),
}

/// Allocates `size` bytes on `device`, for use in the order of `stream`. Returns NULL for size 0.
///
/// Throws `torch.OutOfMemoryError` when out of memory, and `RuntimeError` on any other failure. In
/// a process without torch, logs the failure and returns NULL.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gruyere_malloc(
    size: isize,
    device: c_int,
    stream: CudaStream,
) -> *mut c_void {
    // Only the choice: the chosen path is a jump, with registers of its own to save. A forked child
    // has no heap. Negative sizes count as the largest, and go to the slow path.
    let small = (size as u64).wrapping_sub(1) < SMALL_MAX;
    match current() {
        Some(heap) if heap.is_plain() && small => malloc_hot::<false>(heap, size, device, stream),
        _ if size == 0 => std::ptr::null_mut(),
        Some(heap) if heap.is_plain() => malloc_hot::<true>(heap, size, device, stream),
        _ => malloc_slowly(size, device, stream),
    }
}

#[inline(never)]
fn malloc_hot<const LARGE: bool>(
    heap: &'static Heap,
    size: isize,
    device: c_int,
    stream: CudaStream,
) -> *mut c_void {
    match guarded(0, || heap.serve::<LARGE>(size as u64, device, handle(stream))) {
        0 => malloc_slowly(size, device, stream),
        address => address as *mut c_void,
    }
}

/// The requests that the hot path leaves: the first call, a negative size, growth, captures,
/// failures.
#[cold]
#[inline(never)]
fn malloc_slowly(size: isize, device: c_int, stream: CudaStream) -> *mut c_void {
    if fork::is_forked_child() {
        return std::ptr::null_mut();
    }
    let panicked = Err(Refusal::Other(String::new()));
    match guarded(panicked, || allocate(size, device, stream)) {
        Ok(address) => {
            if let Some(block) = profiler::block(address) {
                profiler::came(address, block);
            }
            address as *mut c_void
        }
        Err(refusal) => {
            if matches!(refusal, Refusal::OutOfMemory(_)) {
                profiler::refused(size as u64, device as u32);
            }
            refuse(refusal);
            std::ptr::null_mut()
        }
    }
}

fn allocate(size: isize, device: c_int, stream: CudaStream) -> Result<u64, Refusal> {
    let heap = heap().map_err(Refusal::Unavailable)?;
    // torch's sizes have no sign: a negative one is an overflowed product.
    let size = size as u64;
    if size >= EXABYTE {
        return Err(Refusal::Exabyte);
    }
    if super::begin::is_only_watched() {
        return Err(Refusal::Other(format!("gruyere_malloc: {ONLY_WATCHED}")));
    }
    heap.meet_hooks();
    heap.malloc(size, i64::from(device), handle(stream))
        .map_err(|error| refusal(heap, error, handle(stream)))
}

#[cold]
fn refusal(heap: &Heap, error: Error, stream: StreamHandle) -> Refusal {
    match error {
        Error::OutOfMemory(mut report) => {
            oom::note(heap, &mut report, stream);
            Refusal::OutOfMemory(report.to_string())
        }
        other => Refusal::Other(other.to_string()),
    }
}

/// Throws; returns only without torch. No lock is held here, and nothing live has a destructor.
#[cold]
fn refuse(refusal: Refusal) {
    let unraisable = match refusal {
        Refusal::OutOfMemory(message) => raise::raise_out_of_memory(message),
        Refusal::Exabyte => {
            let message = "CUDA out of memory. Tried to allocate more than 1EB memory.";
            raise::raise_out_of_memory(message.to_owned())
        }
        Refusal::Other(message) if message.is_empty() => {
            raise::raise_runtime_error("gruyere: internal error; see the log".to_owned())
        }
        Refusal::Other(message) => raise::raise_runtime_error(message),
        Refusal::Unavailable(message) => {
            let _ = raise::raise_runtime_error(message);
            return;
        }
    };
    log::error!("{}", unraisable.message);
}

/// Frees a block from [`gruyere_malloc`]. Ignores `size`, `device` and `stream`. NULL is allowed; a
/// pointer at which no live block starts is counted, logged and otherwise ignored.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_free(
    pointer: *mut c_void,
    _size: isize,
    _device: c_int,
    _stream: CudaStream,
) {
    // As in gruyere_malloc. NULL is in no page.
    let Some(heap) = current() else { return free_of_nothing(pointer) };
    match heap.owner(pointer as u64) {
        Some(Owned::Small(device, shard, slab)) => {
            free_small(heap, device, shard, slab, pointer as u64)
        }
        Some(Owned::Large(device, page)) => free_large(heap, device, page, pointer as u64),
        None if pointer.is_null() => {}
        None => free_slowly(heap, pointer as u64),
    }
}

#[inline(never)]
extern "C" fn free_small(heap: &Heap, device: &Device, shard: u32, slab: u32, address: u64) {
    guarded((), || {
        heap.free_small(device, shard, slab, address);
    });
}

#[inline(never)]
extern "C" fn free_large(heap: &Heap, device: &Device, page: Page<'_>, address: u64) {
    guarded((), || {
        heap.free_large(device, page, address);
    });
}

#[cold]
#[inline(never)]
extern "C" fn free_slowly(heap: &Heap, address: u64) {
    let block = profiler::block(address);
    if guarded(false, || heap.free(address))
        && let Some(block) = block
    {
        profiler::went(address, block);
    }
}

#[cold]
#[inline(never)]
extern "C" fn free_of_nothing(pointer: *mut c_void) {
    if fork::is_forked_child() || pointer.is_null() {
        return;
    }
    guarded((), || {
        log::error!(
            "gruyere_free({pointer:p}): nothing has been allocated in this process; ignored"
        )
    });
}

/// torch's initialisation hook, with the number of devices; 0 when the allocator object is created.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_init(_device_count: c_int) {
    if !fork::is_forked_child() {
        // Too early to touch CUDA: children may still be forked. Errors of the configuration are
        // logged now.
        guarded((), || {
            crate::config::logging::init();
            if let Err(error) = crate::config::Config::from_env() {
                log::error!("{error}");
            }
        });
    }
}

/// `torch.cuda.empty_cache()`: releases unused memory to the device.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_reset() {
    if !fork::is_forked_child() {
        guarded((), || {
            if let Some(heap) = current() {
                heap.trim();
            }
        });
    }
}

/// `torch.cuda.set_per_process_memory_fraction()`: caps the memory held on `device` at `fraction`
/// of its total memory. A `fraction` outside of 0 to 1, or NaN, changes nothing (the log says so).
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_memory_fraction(fraction: f64, device: c_int) {
    if fork::is_forked_child() {
        return;
    }
    guarded((), || {
        // The log has the reason.
        let Ok(heap) = heap() else { return };
        if let Err(error) = heap.set_memory_fraction(fraction, i64::from(device)) {
            log::error!("gruyere_memory_fraction({fraction}, {device}): {error}");
            return;
        }
        note_who_capped(heap, fraction, device);
    });
}

/// Notes the place in the program that has just set the ceiling, for a later out-of-memory under
/// it.
fn note_who_capped(heap: &Heap, fraction: f64, device: c_int) {
    let Ok(number) = u32::try_from(device) else { return };
    let Ok(stats) = heap.stats(device.into()) else { return };
    // It may be at the whole device again, or above `limit:`.
    let asked = (stats.total_memory as f64 * fraction) as u64;
    let is_its_own = stats.limit < stats.total_memory && stats.limit == asked;
    limits::set_at(number, if is_its_own { heap.site_here() } else { SiteId::NONE });
}

/// Returns the start of the region (torch's segment) that contains `pointer`, and writes its length
/// to `*size`, if `size` is not NULL. For a pointer that is not the library's, returns the pointer
/// itself and a length of 0.
///
/// # Safety
/// `size` is NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_base_alloc(pointer: *mut c_void, size: *mut usize) -> *mut c_void {
    let found = if fork::is_forked_child() {
        None
    } else {
        guarded(None, || current().and_then(|heap| heap.base_of(pointer as u64)))
    };
    let (base, bytes) = found.unwrap_or((pointer as u64, 0));
    if !size.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *size = bytes as usize };
    }
    base as *mut c_void
}

/// `Tensor.record_stream`: notes that `stream` uses the block too. After its free, the block is not
/// reused before that stream is past the free.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_record_stream(pointer: *mut c_void, stream: CudaStream) {
    if fork::is_forked_child() || pointer.is_null() {
        return;
    }
    guarded((), || {
        if let Some(heap) = current() {
            heap.record_stream(pointer as u64, handle(stream));
        }
    });
}

/// Announces a capture into pool `id` on a stream of `device`. Ignores `filter`, a `std::function`
/// of torch's that identifies the stream: the library asks the driver instead.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_begin_allocate_to_pool(
    device: c_int,
    id: MempoolId,
    _filter: *mut c_void,
) {
    pool_hook("gruyere_begin_allocate_to_pool", device, |heap| {
        heap.begin_allocate_to_pool(i64::from(device), id.pair())
    });
}

/// Ends the pool scope that [`gruyere_begin_allocate_to_pool`] opened.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_end_allocate_to_pool(device: c_int, id: MempoolId) {
    pool_hook("gruyere_end_allocate_to_pool", device, |heap| {
        heap.end_allocate_to_pool(i64::from(device), id.pair())
    });
}

/// Notes that the graph that used pool `id` is gone. Its blocks may be freed later.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_release_pool(device: c_int, id: MempoolId) {
    pool_hook("gruyere_release_pool", device, |heap| {
        heap.release_pool(i64::from(device), id.pair())
    });
}

fn pool_hook(name: &str, device: c_int, hook: impl FnOnce(&Heap) -> Result<(), Error>) {
    if fork::is_forked_child() {
        return;
    }
    guarded((), || {
        // The log has the reason.
        let Ok(heap) = heap() else { return };
        if let Err(error) = hook(heap) {
            log::error!("{name}(device {device}): {error}");
        }
    });
}
