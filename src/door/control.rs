//! The control API for loaders, training scripts and tools, beyond torch's hooks.
//!
//! Any thread may call every function. In a forked child, or without usable CUDA, each returns its
//! failure value.

use super::begin::heap;
pub use super::process::{
    GRUYERE_BROKEN, GRUYERE_INVALID, GRUYERE_IO, GRUYERE_OK, GRUYERE_UNAVAILABLE,
};
use super::process::{
    allow_waits, announce, announce_rank, config, current, forbid_waits, guarded,
};
use super::torch::{CudaStream, handle};
use super::{fork, run_file};
use crate::file;
use crate::heap::{Error, Lifetime, Mark, Phase, lifetime};
use crate::record::sweep::is_copy;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Announces the hooks that the loader has wired: 1 is record_stream, 2 the capture hooks (begin,
/// end, release), 3 both. Until then, memory never passes from stream to stream, and every request
/// asks whether its stream captures.
///
/// A program that calls `gruyere_malloc` itself makes this call with 3 if it keeps the rules behind
/// the hooks: it frees a block once the only work that may still use it is on the stream of its
/// request, or names the other streams by `gruyere_record_stream` first; and requests made while a
/// stream captures lie between `gruyere_begin_allocate_to_pool` and
/// `gruyere_end_allocate_to_pool`. Without the call it works as well, with memory kept apart by
/// stream and a warning in the log.
///
/// Does not touch CUDA: an early announcement is kept until the first request, and the process may
/// still fork children.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_announce_hooks(bits: u32) {
    if !fork::is_forked_child() {
        guarded((), || announce(bits));
    }
}

/// Declares that no wait of one stream for another can close a cycle in this process: the process
/// is alone (no collectives or point-to-point communication with other processes), and nothing that
/// it enqueues waits for later actions of its host (host functions, waits on values in memory).
/// From now on, `waits:auto` means `waits:budget`. Does not touch CUDA: an early call is kept until
/// the first request.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_allow_waits() {
    if !fork::is_forked_child() {
        guarded((), allow_waits);
    }
}

/// Revokes [`gruyere_allow_waits`] for good: from now on, `waits:auto` means `waits:oom`. Call it
/// before enqueuing work that may wait for a later action of the host or of another process. `why`,
/// a NUL-terminated string, is for the log; NULL is allowed.
///
/// # Safety
/// `why` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_forbid_waits(why: *const c_char) {
    if fork::is_forked_child() {
        return;
    }
    // SAFETY: the caller's promise; the text is read before this returns only.
    let why = (!why.is_null()).then(|| unsafe { CStr::from_ptr(why) }.to_string_lossy());
    guarded((), || forbid_waits(why.as_deref().unwrap_or("requested by the loader")));
}

/// Tells the process's rank and the number of ranks, for `gruyere ps`, `top` and `post`, where the
/// environment has no RANK or WORLD_SIZE: call it once the process group exists. A record keeps
/// what it was told first. Does not touch CUDA: an early call is kept until the first request.
///
/// Returns 0; -1 in a child made by fork of a process that uses CUDA; -2 if `rank` is not one of
/// `world_size` ranks.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_announce_rank(rank: i64, world_size: i64) -> c_int {
    let (Ok(rank), Ok(world_size)) = (u64::try_from(rank), u64::try_from(world_size)) else {
        return GRUYERE_INVALID;
    };
    if rank >= world_size {
        return GRUYERE_INVALID;
    }
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        announce_rank(rank, world_size);
        GRUYERE_OK
    })
}

/// Promises that `stream` of `device` is not destroyed before a call of [`gruyere_stream_ends`] for
/// it. The library may then query it and record events on it at any time. It uses any other created
/// stream only inside a call that names the stream, since a call on a destroyed stream is
/// undefined. Memory freed on a stream that was not announced reaches other streams later: after an
/// event that the stream's next call records, an event behind all work of the device, or a
/// synchronisation. An announcement also saves a driver call at each request. Default streams
/// always last, and need no announcement.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_stream_lasts(device: c_int, stream: CudaStream) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        // The log has the reason.
        heap().map_or(GRUYERE_UNAVAILABLE, |heap| {
            stream_answer(heap.stream_lasts(i64::from(device), handle(stream)))
        })
    })
}

/// Announces that `stream` of `device` is about to be destroyed: the library records an event
/// behind the stream's frees now, and does not use the handle again. Call it before destroying the
/// stream, while no thread allocates or records on it. The call is required for streams announced
/// with [`gruyere_stream_lasts`], and optional for all others.
///
/// Returns 0, also for an unknown stream; -1 if the library cannot work in this process; -2 if
/// there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_stream_ends(device: c_int, stream: CudaStream) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || match current() {
        Some(heap) => stream_answer(heap.stream_ends(i64::from(device), handle(stream))),
        // Nothing has been allocated or announced.
        None => GRUYERE_OK,
    })
}

/// Returns a mark of the work that `stream` of `device` has so far, for [`gruyere_stream_waits`].
/// Call it just before the program records an event on the stream. Equal marks stand for the same
/// stream at the same moment.
///
/// Returns 0 where the event tells the library nothing: the stream captures, or is neither a
/// default stream nor announced as lasting ([`gruyere_stream_lasts`]); nothing was allocated on the
/// device yet; or memory does not pass between streams.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_mark_work(device: c_int, stream: CudaStream) -> u64 {
    if fork::is_forked_child() {
        return 0;
    }
    guarded(0, || {
        let mark = current().and_then(|heap| heap.mark_work(i64::from(device), handle(stream)));
        mark.and_then(Mark::to_bits).unwrap_or(0)
    })
}

/// Reports that the program has made `stream` of `device` wait for an event. `mark` is what
/// [`gruyere_mark_work`] returned just before the event was recorded, for the stream on which it
/// was; 0 is ignored. Call it after the wait was added, and only if the event was not recorded
/// again in between. What the marked stream had freed by then may serve `stream` at once; where
/// the library itself makes streams wait to hold less (`waits:budget`, and `waits:auto` in a
/// process that is alone), it learns how far behind `stream` is.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_stream_waits(device: c_int, stream: CudaStream, mark: u64) {
    if fork::is_forked_child() {
        return;
    }
    guarded((), || {
        if let (Some(heap), Some(mark)) = (current(), Mark::from_bits(mark)) {
            heap.stream_waits(i64::from(device), handle(stream), mark);
        }
    });
}

fn stream_answer(result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => GRUYERE_OK,
        Err(Error::NoSuchDevice(_)) => GRUYERE_INVALID,
        Err(error) => {
            log::error!("{error}");
            GRUYERE_UNAVAILABLE
        }
    }
}

/// Tags the calling thread's requests from now on: 0 auto, 1 transient, 2 step, 3 persistent. Tags
/// nest, up to 31.
///
/// Returns 0, or -2 if there is no such lifetime, or too many tags are open.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_lifetime_push(lifetime: u8) -> c_int {
    match Lifetime::from_u8(lifetime) {
        Some(lifetime) if lifetime::push(lifetime) => GRUYERE_OK,
        _ => GRUYERE_INVALID,
    }
}

/// Removes the calling thread's innermost tag. Returns 0, or -2 if none is open.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_lifetime_pop() -> c_int {
    if lifetime::pop() { GRUYERE_OK } else { GRUYERE_INVALID }
}

/// Keeps the record for `gruyere post`. Call it when an uncaught out-of-memory ends the program;
/// the record is kept as it was when the request was refused.
///
/// Returns 0; 1 if there is no room for a copy, so that the record is kept as it will be at the end
/// of the program (the log says so); -1 if there is no record, or none is to be kept
/// (`records_kept:0`).
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_keep_record() -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || match keep_record() {
        Some(path) if is_copy(&path) => GRUYERE_OK,
        Some(_) => 1,
        None => GRUYERE_UNAVAILABLE,
    })
}

/// As [`gruyere_keep_record`]: the path of what is kept.
pub(super) fn keep_record() -> Option<PathBuf> {
    let is_wanted = config().is_some_and(|config| config.heap.records_kept > 0);
    current().filter(|_| is_wanted)?.record().leave_copy()
}

/// Marks the end of a training step, or of a request to a server.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_mark_step() {
    if !fork::is_forked_child() {
        guarded((), || {
            if let Some(heap) = current() {
                heap.mark_step();
                run_file::at_a_step(heap);
            }
        });
    }
}

/// Sets the program's phase: 0 training or serving, 1 validation, 2 checkpoint. At the beginning of
/// phase 1 or 2, memory that the phase has not needed before goes back to the device; 0 ends the
/// phase. Cheap while no memory is idle, and never waits for the device.
///
/// Returns 0; -1 if the library has not allocated in this process; -2 if there is no such phase.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_mark_phase(phase: u8) -> c_int {
    let Some(phase) = Phase::from_u8(phase) else { return GRUYERE_INVALID };
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || match current() {
        Some(heap) => {
            heap.mark_phase(phase);
            GRUYERE_OK
        }
        None => GRUYERE_UNAVAILABLE,
    })
}

/// Releases unused memory to the device, as `empty_cache` does. Returns the number of bytes
/// released.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_trim() -> u64 {
    if fork::is_forked_child() {
        return 0;
    }
    guarded(0, || current().map_or(0, |heap| heap.trim()))
}

/// The version of [`GruyereStats`] that this header describes.
pub const GRUYERE_STATS_VERSION: u32 = 3;

/// Statistics of a device, in bytes unless noted. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GruyereStats {
    /// In: size of the caller's struct in bytes. Out: number of bytes written.
    pub size: u32,
    /// Out: version of the struct in the library.
    pub version: u32,
    /// Physical memory of the device.
    pub total_memory: u64,
    /// Ceiling on held memory.
    pub limit: u64,
    /// Physical memory held.
    pub reserved: u64,
    /// Peak of held memory.
    pub reserved_peak: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// Peak of live blocks.
    pub live_peak: u64,
    /// Freed by the program, waiting for streams.
    pub pending: u64,
    /// Free runs between blocks, free spans included.
    pub arena_free: u64,
    /// The largest free run.
    pub largest_free: u64,
    /// Memory of slabs.
    pub slab_bytes: u64,
    /// Free slots of slabs.
    pub slab_free: u64,
    /// Held for CUDA graphs.
    pub captured: u64,
    /// Times that requests climbed the reclaim ladder.
    pub retries: u64,
    /// Requests that failed with out of memory.
    pub out_of_memories: u64,
    /// Frees of addresses at which no live block starts, on all devices.
    pub bad_frees: u64,
    /// Events recorded.
    pub events_recorded: u64,
    /// Event queries.
    pub events_queried: u64,
    /// Live blocks by their requested sizes. First field of version 2.
    pub requested: u64,
    /// The largest request that held memory could satisfy once the work on freed memory is done.
    /// Where pages can move, whole free pages count wherever they are.
    pub largest_request: u64,
    /// The largest request that could be satisfied by growing to the ceiling (other users of the
    /// device may have taken some of that memory).
    pub largest_request_growing: u64,
    /// 99th percentile of all request sizes so far, within 7%; 0 if the record is off.
    pub request_p99: u64,
    /// Times that a low-memory phase returned memory to the device.
    pub low_phase_trims: u64,
    /// Bytes returned in low-memory phases.
    pub low_phase_bytes: u64,
    /// lost / reserved: the share of held memory that is free and cannot serve.
    pub fragmentation: f64,
    /// 1 - largest_request / (reserved - live - pending).
    pub external_fragmentation: f64,
    /// 1 - requested / live.
    pub internal_fragmentation: f64,
    /// Free memory between live blocks; if typical_request is not 0, free memory that a typical
    /// request does not fit into. First field of version 3.
    pub lost: u64,
    /// Whole free pages.
    pub idle: u64,
    /// 0 if pages can move: lost is then counted by pages. Else the request size by which lost is
    /// measured: requests of at most this size make up half of all requested bytes.
    pub typical_request: u64,
    /// 1 - live / reserved.
    pub unused: f64,
}

/// Writes the statistics of `device` to `*stats`, at most `stats->size` bytes of them. Set `size`
/// before the call.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device, `stats`
/// is NULL, or `size` is less than 8.
///
/// # Safety
/// `stats` is NULL or valid for writes of `stats->size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_stats(device: c_int, stats: *mut GruyereStats) -> c_int {
    if stats.is_null() {
        return GRUYERE_INVALID;
    }
    // SAFETY: the caller's promise; read as a plain word, since an older caller's struct may be
    // shorter than ours.
    let room = unsafe { stats.cast::<u32>().read() } as usize;
    if room < 8 {
        return GRUYERE_INVALID;
    }
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        let Ok(heap) = heap() else { return GRUYERE_UNAVAILABLE };
        let Ok(numbers) = heap.stats(i64::from(device)) else { return GRUYERE_INVALID };
        let written = room.min(size_of::<GruyereStats>());
        let answer = GruyereStats {
            size: written as u32,
            version: GRUYERE_STATS_VERSION,
            total_memory: numbers.total_memory,
            limit: numbers.limit,
            reserved: numbers.reserved,
            reserved_peak: numbers.reserved_peak,
            live: numbers.live,
            live_peak: numbers.live_peak,
            pending: numbers.pending,
            arena_free: numbers.arena_free,
            largest_free: numbers.largest_free,
            slab_bytes: numbers.slab_bytes,
            slab_free: numbers.slab_free,
            captured: numbers.captured,
            retries: numbers.retries,
            out_of_memories: numbers.out_of_memories,
            bad_frees: numbers.bad_frees,
            events_recorded: numbers.events_recorded,
            events_queried: numbers.events_queried,
            requested: numbers.requested,
            largest_request: numbers.largest_request,
            largest_request_growing: numbers.largest_growing,
            request_p99: numbers.request_p99,
            low_phase_trims: numbers.low_phase_trims,
            low_phase_bytes: numbers.low_phase_bytes,
            fragmentation: numbers.held().fragmentation(),
            external_fragmentation: numbers.external_fragmentation(),
            internal_fragmentation: numbers.internal_fragmentation(),
            lost: numbers.held().lost(),
            idle: numbers.held().idle(),
            typical_request: numbers.typical_request,
            unused: numbers.held().unused(),
        };
        // SAFETY: `written` bytes are inside what the caller has room for, and inside `answer`; the
        // two do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const answer).cast::<u8>(),
                stats.cast::<u8>(),
                written,
            )
        };
        GRUYERE_OK
    })
}

/// Writes a human-readable dump to the file `path`.
///
/// Returns 0; -1 if the library has not allocated in this process; -2 if `path` is NULL; -3 if the
/// file could not be written (the log says why).
///
/// # Safety
/// `path` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_dump(path: *const c_char) -> c_int {
    if path.is_null() {
        return GRUYERE_INVALID;
    }
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) };
    guarded(GRUYERE_UNAVAILABLE, || {
        let Some(heap) = current() else { return GRUYERE_UNAVAILABLE };
        let path = std::path::Path::new(OsStr::from_bytes(path.to_bytes()));
        let text = heap.dump();
        match file::replace(path, u64::MAX, file::PRIVATE, |out| out.write_all(text.as_bytes())) {
            Ok(()) => GRUYERE_OK,
            Err(error) => {
                log::error!("gruyere_dump: {} could not be written: {error}", path.display());
                GRUYERE_IO
            }
        }
    })
}

/// Walks every page and block, and compares the heap's counts with the driver's. For tests: no
/// other thread may be allocating.
///
/// Returns 0; -1 if the library has not allocated in this process; -4 if an invariant is broken
/// (the log names it).
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_validate() -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_BROKEN, || match current().map(|heap| heap.validate()) {
        None => GRUYERE_UNAVAILABLE,
        Some(Ok(())) => GRUYERE_OK,
        Some(Err(what)) => {
            log::error!("gruyere_validate: {what}");
            GRUYERE_BROKEN
        }
    })
}

/// Returns the library's version, a static string.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"unknown",
        };
    VERSION.as_ptr()
}
