//! The control API for loaders, training scripts and tools, beyond torch's hooks.
//!
//! Any thread may call every function. In a forked child, or without usable CUDA, each returns its
//! failure value.

use super::begin::heap;
pub use super::process::{
    GRUYERE_BROKEN, GRUYERE_INVALID, GRUYERE_IO, GRUYERE_OK, GRUYERE_UNAVAILABLE,
};
use super::process::{allow_waits, announce, config, current, forbid_waits, guarded};
use super::torch::{CudaStream, handle};
use super::{fork, run_file};
use crate::file;
use crate::heap::{Error, Lifetime, Phase, lifetime};
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

/// Announces which hooks the loader has wired: 1 is record_stream, 2 are the capture hooks (begin,
/// end, release), 3 both. Until then memory never passes from stream to stream, and every request
/// asks whether its stream captures.
///
/// CUDA is not touched by this: announced early, it is remembered until the first request, and
/// children may still be forked.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_announce_hooks(bits: u32) {
    if !fork::is_forked_child() {
        guarded((), || announce(bits));
    }
}

/// Says that no wait of one stream for another can close a cycle in this process: it is alone (no
/// collectives or point-to-point communication with other processes), and nothing that it enqueues
/// waits for what its host does later (host functions, waits on values in memory). From now on
/// `waits:auto` is `waits:budget`. CUDA is not touched by this: said early, it is remembered until
/// the first request.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_allow_waits() {
    if !fork::is_forked_child() {
        guarded((), allow_waits);
    }
}

/// Takes [`gruyere_allow_waits`] back, for good: from now on `waits:auto` is `waits:oom`. Call it
/// before work is enqueued that may wait for what comes later. `why`, a string that ends in 0, is
/// for the log; null is allowed.
///
/// # Safety
/// `why` is null, or points to a string that ends in 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_forbid_waits(why: *const c_char) {
    if fork::is_forked_child() {
        return;
    }
    // SAFETY: the caller's promise; the text is read before this returns only.
    let why = (!why.is_null()).then(|| unsafe { CStr::from_ptr(why) }.to_string_lossy());
    guarded((), || forbid_waits(why.as_deref().unwrap_or("the loader says so")));
}

/// Promises that `stream` of `device` is not destroyed before [`gruyere_stream_ends`] is told of
/// it. The library may then ask about it and record events on it at any time; of any other created
/// stream it does so only inside a call that names it, since a call on a destroyed stream is
/// undefined. What a stream that was not announced has freed comes to other streams later: with an
/// event that its next call records, with one behind all work of the device, or with a
/// synchronisation. It also saves a driver call at each request. Default streams last anyway, and
/// need not be announced.
///
/// 0; -1: the library cannot work here; -2: there is no such device.
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

/// `stream` of `device` is about to be destroyed: what it has freed gets its event now, and its
/// handle is not used again. Call it before the stream is destroyed, while nothing is allocated or
/// recorded on it; for streams that were announced ([`gruyere_stream_lasts`]) it must be called,
/// for any other it may be.
///
/// 0, also of a stream that is not known; -1: the library cannot work here; -2: there is no such
/// device.
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

/// Tags the calling thread's next requests: 0 auto, 1 transient, 2 step, 3 persistent. Tags nest,
/// up to 31.
///
/// 0, or -2: no such lifetime, or too many tags are open.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_lifetime_push(lifetime: u8) -> c_int {
    match Lifetime::from_u8(lifetime) {
        Some(lifetime) if lifetime::push(lifetime) => GRUYERE_OK,
        _ => GRUYERE_INVALID,
    }
}

/// Takes the calling thread's innermost tag away. 0, or -2: none is open.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_lifetime_pop() -> c_int {
    if lifetime::pop() { GRUYERE_OK } else { GRUYERE_INVALID }
}

/// The program ends now by an out-of-memory that nobody has caught: leaves its record for `gruyere
/// post`, as it was when the request was refused.
///
/// 0; -1: there is no record, or none is to be left (`records_kept:0`); -3: it could not be written
/// (the log says why).
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_keep_record() -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        let is_wanted = config().is_some_and(|config| config.heap.records_kept > 0);
        let Some(heap) = current().filter(|_| is_wanted) else { return GRUYERE_UNAVAILABLE };
        match heap.record().leave_copy() {
            Ok(Some(_)) => GRUYERE_OK,
            Ok(None) => GRUYERE_UNAVAILABLE,
            Err(error) => {
                log::warn!("the record is not kept for `gruyere post`: {error}");
                GRUYERE_IO
            }
        }
    })
}

/// A training step, or a request of a server, is over.
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

/// What the program does from now on: 0 training or serving, 1 validation, 2 a checkpoint. At the
/// beginning of 1 and 2, memory that they have not needed before goes back to the device; 0 ends
/// them. Cheap while nothing lies idle, and never waits for the device.
///
/// 0; -1: the library has not allocated anything here; -2: no such phase.
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

/// Gives back to the device what nobody uses (as `empty_cache`); the bytes that it got.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_trim() -> u64 {
    if fork::is_forked_child() {
        return 0;
    }
    guarded(0, || current().map_or(0, |heap| heap.trim()))
}

/// The version of [`GruyereStats`] that this header describes.
pub const GRUYERE_STATS_VERSION: u32 = 3;

/// Numbers of one device, in bytes where not said otherwise. Later versions add fields at the end
/// only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GruyereStats {
    /// In: the bytes that the caller has room for. Out: the bytes that were written.
    pub size: u32,
    /// Out: the version that the library has.
    pub version: u32,
    /// Physical memory of the device.
    pub total_memory: u64,
    /// The ceiling on what may be reserved.
    pub limit: u64,
    /// Physical memory held.
    pub reserved: u64,
    /// Its peak.
    pub reserved_peak: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// Their peak.
    pub live_peak: u64,
    /// Freed by the program, waiting for streams.
    pub pending: u64,
    /// Free runs between blocks, free spans included.
    pub arena_free: u64,
    /// The largest free run.
    pub largest_free: u64,
    /// Memory of slabs.
    pub slab_bytes: u64,
    /// Free slots in them.
    pub slab_free: u64,
    /// Held for CUDA graphs.
    pub captured: u64,
    /// Times the reclaim ladder was climbed.
    pub retries: u64,
    /// Out-of-memory answers.
    pub out_of_memories: u64,
    /// Frees of what was no live block, on all devices.
    pub bad_frees: u64,
    /// Events recorded.
    pub events_recorded: u64,
    /// Events asked about.
    pub events_queried: u64,
    /// Live blocks as they were asked for. Here begins what version 2 has added.
    pub requested: u64,
    /// The largest request that what is held could satisfy, once the work on what was freed is
    /// done. Whole free pages count wherever they lie, where they can move.
    pub largest_request: u64,
    /// The largest request that could be satisfied if the ceiling is reached for it (others on the
    /// device may have taken some of that).
    pub largest_request_growing: u64,
    /// The size that 99 of 100 requests so far do not exceed, within 7%; 0 where the record is off.
    pub request_p99: u64,
    /// Times that a low-memory phase gave memory back.
    pub low_phase_trims: u64,
    /// The memory that went back so.
    pub low_phase_bytes: u64,
    /// lost / reserved: the share of what is held that is free and cannot serve.
    pub fragmentation: f64,
    /// 1 - largest_request / (reserved - live - pending).
    pub external_fragmentation: f64,
    /// 1 - requested / live.
    pub internal_fragmentation: f64,
    /// Free between live blocks, or, with typical_request, what a typical request does not fit
    /// into. Here begins what version 3 has added.
    pub lost: u64,
    /// Whole free pages.
    pub idle: u64,
    /// 0 where pages move (lost is by pages). Else the request by which lost is told: half of all
    /// bytes are asked for in requests of at most this size.
    pub typical_request: u64,
    /// 1 - live / reserved.
    pub unused: f64,
}

/// Writes the numbers of `device` to `*stats`, whose `size` the caller has set; as much as fits.
///
/// 0; -1: the library cannot work here; -2: no such device, or `size` is less than 8.
///
/// # Safety
/// `stats` is NULL, or `stats->size` bytes there may be written.
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

/// Writes a dump for people to the file `path`.
///
/// 0; -1: the library has not allocated anything here; -2: `path` is NULL; -3: the file could not
/// be written (the log says why).
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

/// Walks every page and block and holds the books against the driver's. For tests: no other thread
/// may be allocating.
///
/// 0; -1: the library has not allocated anything here; -4: something is broken (the log says what).
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

/// The library's version, a static string.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"unknown",
        };
    VERSION.as_ptr()
}
