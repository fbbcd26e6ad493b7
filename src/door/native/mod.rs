//! The native door: a table of functions for the package's shim, a C++ subclass of torch's own
//! `CUDAAllocator` (`python_loader/gruyere/native/shim.cpp`).
//!
//! The shim holds no state of the heap, and this side knows no C++. Objects of torch's arrive as a
//! pointer and a function that drops it ([`boxed`]); a failure is NULL or a code. The shim then
//! asks for the failure on the same thread and throws it: nothing unwinds in either direction. The
//! shim is built on the user's machine and may be older or newer than the library, so the table has
//! a version, and new functions are only appended.

mod boxed;
mod contexts;
mod pools;
mod segments;
mod states;
mod told;
mod trackers;

use super::begin::{ONLY_WATCHED, heap};
use super::control::GruyereStats;
use super::pool::GRUYERE_MEMORY;
use super::process::{self, GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE, current, guarded};
use super::python::autograd::{self, GruyereAskAutograd};
use super::torch::{CudaStream, MempoolId, gruyere_free, gruyere_record_stream, handle};
use super::torch_stats::{GruyereSnapshot, GruyereTorchStats};
use super::{fork, oom};
use crate::heap::{Error, Heap, PoolError, Report, SMALL_MAX, StateError};
use boxed::{Boxed, Filter};
pub use boxed::{GruyereBoxed, GruyereFilter};
use pools::Route;
use segments::Source;
pub use segments::{GruyereGive, GruyereTake};
pub use states::{GruyerePoolState, GruyereRestored};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
pub use told::GruyereNativeHistory;
pub use trackers::{GruyereSegmentEvent, GruyereTracker};

/// The version of [`GruyereNativeTable`] that this header describes.
pub const GRUYERE_NATIVE_VERSION: u32 = 1;

/// Why the calling thread's latest call failed.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereNativeFailure {
    /// What to say; valid until the thread's next failure.
    pub text: *const c_char,
    /// Of an out-of-memory: bytes asked for.
    pub asked: u64,
    /// Of an out-of-memory: the ceiling on what may be held, in bytes.
    pub limit: u64,
    /// Of an out-of-memory: bytes of the device that the driver said were free; 0 where it could
    /// not say.
    pub free: u64,
}

/// What the native door calls. Codes are 0, or one of the negative ones above; where one of those
/// is returned by a function about pools, `failure` tells why.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereNativeTable {
    /// Bytes of this struct.
    pub size: u32,
    /// Its version.
    pub version: u32,
    /// `size` bytes on `device`, for use in the order of `stream`. NULL: size 0, or a failure.
    /// Never throws.
    pub malloc: extern "C" fn(size: u64, device: c_int, stream: CudaStream) -> *mut c_void,
    /// Whether the calling thread's latest failure is an out-of-memory: 1, or 0. Nobody has been
    /// told of it before `failure`.
    pub is_out_of_memory: extern "C" fn() -> c_int,
    /// What it was; returns the code. An out-of-memory is the program's from now on: it is
    /// counted, dumped and noted, and alerts are raised.
    pub failure: unsafe extern "C" fn(failure: *mut GruyereNativeFailure) -> c_int,
    /// See `gruyere_free`.
    pub free: extern "C" fn(pointer: *mut c_void, size: isize, device: c_int, stream: CudaStream),
    /// The live block that starts at `pointer`: its bytes, rounded up to 512, and its device. 0:
    /// there is none.
    pub block: unsafe extern "C" fn(pointer: *mut c_void, device: *mut c_int) -> u64,
    /// See `gruyere_base_alloc`.
    pub base: unsafe extern "C" fn(pointer: *mut c_void, size: *mut usize) -> *mut c_void,
    /// See `gruyere_record_stream`.
    pub record_stream: extern "C" fn(pointer: *mut c_void, stream: CudaStream),
    /// See `gruyere_stream_lasts`.
    pub stream_lasts: extern "C" fn(device: c_int, stream: CudaStream) -> c_int,
    /// Gives back to the devices what nobody uses: all of it, or (an id other than 0 and 0) of that
    /// pool.
    pub empty_cache: extern "C" fn(pool: MempoolId),
    /// See `gruyere_memory_fraction`.
    pub set_fraction: extern "C" fn(fraction: f64, device: c_int),
    /// See `gruyere_torch_stats`.
    pub torch_stats: unsafe extern "C" fn(device: c_int, stats: *mut GruyereTorchStats) -> c_int,
    /// See `gruyere_stats`.
    pub stats: unsafe extern "C" fn(device: c_int, stats: *mut GruyereStats) -> c_int,
    /// See `gruyere_reset_peaks`.
    pub reset_peaks: extern "C" fn(device: c_int) -> c_int,
    /// See `gruyere_reset_accumulated`.
    pub reset_accumulated: extern "C" fn(device: c_int) -> c_int,
    /// See `gruyere_snapshot`; segments of MemPools tell their ids.
    pub snapshot: extern "C" fn(device: c_int) -> *mut GruyereSnapshot,
    /// See `gruyere_snapshot_free`.
    pub snapshot_free: unsafe extern "C" fn(snapshot: *mut GruyereSnapshot),
    /// A reference to a pool more, which is made if need be.
    pub pool_create: extern "C" fn(device: c_int, pool: MempoolId) -> c_int,
    /// Requests go to a pool until `pool_end`, those that `filter` says; no filter: those of a
    /// capture that begins now. It is a reference too.
    pub pool_begin: extern "C" fn(
        device: c_int,
        pool: MempoolId,
        filter: GruyereBoxed,
        ask: GruyereFilter,
    ) -> c_int,
    /// The pool's latest `pool_begin` is over; 1: there is none.
    pub pool_end: extern "C" fn(device: c_int, pool: MempoolId) -> c_int,
    /// A reference less; 1: there is none.
    pub pool_release: extern "C" fn(device: c_int, pool: MempoolId) -> c_int,
    /// How many references there are.
    pub pool_uses: extern "C" fn(device: c_int, pool: MempoolId) -> u32,
    /// Whether the pool serves other requests before they are out of memory; 1: there is no such
    /// pool.
    pub pool_on_oom: extern "C" fn(device: c_int, pool: MempoolId, wanted: c_int) -> c_int,
    /// See `gruyere_history_start`. With `clear`, boxes are forgotten too.
    pub history_start: extern "C" fn(entries: u64, clear: c_int) -> c_int,
    /// See `gruyere_history_stop`. Forgets all boxes.
    pub history_stop: extern "C" fn(),
    /// The calling thread's requests and frees come from `context`, which the library keeps as long
    /// as its history names it. What `context_leave` is to be given.
    pub context_enter: extern "C" fn(context: GruyereBoxed) -> u64,
    /// They come from where they came from before that `context_enter`.
    pub context_leave: extern "C" fn(before: u64),
    /// What was noted until now, to be given to `history_free` once. NULL: there is no history.
    pub history: extern "C" fn() -> *mut GruyereNativeHistory,
    /// Frees what `history` gave.
    pub history_free: unsafe extern "C" fn(history: *mut GruyereNativeHistory),
    /// As `pool_create`, of a pool that there is not yet, whose segments `give` gets of `allocator`
    /// and `take` gives back to it, each once and on any thread. It is dropped after the last.
    pub pool_create_over: extern "C" fn(
        device: c_int,
        pool: MempoolId,
        allocator: GruyereBoxed,
        give: GruyereGive,
        take: GruyereTake,
    ) -> c_int,
    /// Blocks of a pool that holds nothing yet have segments of their own; 1: there is no such
    /// pool.
    pub pool_no_split: extern "C" fn(device: c_int, pool: MempoolId) -> c_int,
    /// Tells `tracker` of the segments of pools from now on. Once.
    pub track: extern "C" fn(tracker: GruyereTracker),
    /// How many segments of pools came before the one at `address`; -1: there is none.
    pub segment_number: extern "C" fn(device: c_int, address: u64) -> c_int,
    /// Which blocks of a pool of graphs are live, to be given to `pool_restore` as often as wanted,
    /// and to `pool_state_free` once. NULL: a failure.
    pub pool_state: extern "C" fn(device: c_int, pool: MempoolId) -> *mut GruyerePoolState,
    /// Frees what `pool_state` gave; no block is touched.
    pub pool_state_free: unsafe extern "C" fn(state: *mut GruyerePoolState),
    /// Makes the live blocks of a pool those of the state, each at its old address; what was done,
    /// to be given to `restored_free` once. NULL: a failure, and nothing is changed.
    pub pool_restore: unsafe extern "C" fn(state: *const GruyerePoolState) -> *mut GruyereRestored,
    /// Frees what `pool_restore` gave.
    pub restored_free: unsafe extern "C" fn(restored: *mut GruyereRestored),
    /// Lets the library ask `ask`, on the thread of a request, where in autograd that comes from.
    /// Once.
    pub origins: extern "C" fn(ask: GruyereAskAutograd),
    /// As `malloc`, at `address` and nowhere else. NULL: a failure, of which one is that no free
    /// memory of the stream and its pool is there.
    pub malloc_at:
        extern "C" fn(size: u64, device: c_int, stream: CudaStream, address: u64) -> *mut c_void,
}

static TABLE: GruyereNativeTable = GruyereNativeTable {
    size: size_of::<GruyereNativeTable>() as u32,
    version: GRUYERE_NATIVE_VERSION,
    malloc,
    is_out_of_memory,
    failure,
    free: gruyere_free,
    block,
    base: super::torch::gruyere_base_alloc,
    record_stream: gruyere_record_stream,
    stream_lasts: super::control::gruyere_stream_lasts,
    empty_cache,
    set_fraction: super::torch::gruyere_memory_fraction,
    torch_stats: super::torch_stats::gruyere_torch_stats,
    stats: super::control::gruyere_stats,
    reset_peaks: super::torch_stats::gruyere_reset_peaks,
    reset_accumulated: super::torch_stats::gruyere_reset_accumulated,
    snapshot: told::snapshot,
    snapshot_free: super::torch_stats::gruyere_snapshot_free,
    pool_create,
    pool_begin,
    pool_end,
    pool_release,
    pool_uses,
    pool_on_oom,
    history_start: told::history_start,
    history_stop: told::history_stop,
    context_enter: told::context_enter,
    context_leave: told::context_leave,
    history: told::history,
    history_free: told::history_free,
    pool_create_over,
    pool_no_split,
    track: trackers::track,
    segment_number,
    pool_state: states::pool_state,
    pool_state_free: states::pool_state_free,
    pool_restore: states::pool_restore,
    restored_free: states::restored_free,
    origins: autograd::origins,
    malloc_at,
};

/// What the native door calls, for a shim that was built for `version`. NULL: the library has no
/// such version, so that shim is not to be used.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_native_table(version: u32) -> *const GruyereNativeTable {
    if version != GRUYERE_NATIVE_VERSION {
        return std::ptr::null();
    }
    process::take_native();
    &raw const TABLE
}

/// A call's failure.
enum Failure {
    /// The report, and the requesting stream.
    OutOfMemory(Box<Report>, CudaStream),
    Other(c_int, String),
}

thread_local! {
    /// The failure of this thread's latest failed call.
    static FAILURE: RefCell<Option<Failure>> = const { RefCell::new(None) };
    /// The text that [`failure`] returns.
    static TEXT: RefCell<CString> = RefCell::default();
}

impl Failure {
    fn unavailable(reason: String) -> Self {
        Self::Other(GRUYERE_UNAVAILABLE, reason)
    }

    fn invalid(reason: &str) -> Self {
        Self::Other(GRUYERE_INVALID, reason.to_owned())
    }

    fn of(error: Error, stream: CudaStream) -> Self {
        match error {
            Error::OutOfMemory(report) => Self::OutOfMemory(report, stream),
            other => Self::Other(GRUYERE_INVALID, other.to_string()),
        }
    }

    /// Keeps the failure for the question that follows. A thread that is ending asks no more.
    fn keep(self) {
        let _ = FAILURE.try_with(|last| last.replace(Some(self)));
    }
}

impl From<StateError> for Failure {
    fn from(error: StateError) -> Self {
        Self::Other(GRUYERE_INVALID, error.to_string())
    }
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        Self::Other(GRUYERE_INVALID, error.to_string())
    }
}

/// Runs `body` with the heap, made if need be; keeps a failure and returns its code.
fn answered(body: impl FnOnce(&'static Heap) -> Result<c_int, Failure>) -> c_int {
    let panicked = || {
        Err(Failure::unavailable(
            "gruyere: internal error; see the log, and please report it".into(),
        ))
    };
    let answer = if fork::is_forked_child() {
        Err(Failure::unavailable("a forked child cannot use CUDA; start it with spawn".into()))
    } else {
        guarded(None, || Some(heap().map_err(Failure::unavailable).and_then(body)))
            .unwrap_or_else(panicked)
    };
    match answer {
        Ok(code) => code,
        Err(failure) => {
            let code = match &failure {
                Failure::OutOfMemory(..) => GRUYERE_MEMORY,
                Failure::Other(code, _) => *code,
            };
            failure.keep();
            code
        }
    }
}

extern "C" fn malloc(size: u64, device: c_int, stream: CudaStream) -> *mut c_void {
    // As in gruyere_malloc: the choice, and a jump.
    let plain = current().filter(|heap| heap.is_plain() && !pools::has_filters());
    match plain {
        _ if size == 0 => std::ptr::null_mut(),
        Some(heap) if size <= SMALL_MAX => malloc_hot::<false>(heap, size, device, stream),
        Some(heap) => malloc_hot::<true>(heap, size, device, stream),
        None => malloc_slowly(size, device, stream),
    }
}

#[inline(never)]
fn malloc_hot<const LARGE: bool>(
    heap: &'static Heap,
    size: u64,
    device: c_int,
    stream: CudaStream,
) -> *mut c_void {
    match guarded(0, || heap.serve::<LARGE>(size, device, handle(stream))) {
        0 => malloc_slowly(size, device, stream),
        address => address as *mut c_void,
    }
}

#[cold]
#[inline(never)]
fn malloc_slowly(size: u64, device: c_int, stream: CudaStream) -> *mut c_void {
    let mut address = 0;
    answered(|heap| {
        address = allocate(heap, size, device, stream)?;
        Ok(GRUYERE_OK)
    });
    address as *mut c_void
}

fn allocate(heap: &Heap, size: u64, device: c_int, stream: CudaStream) -> Result<u64, Failure> {
    if super::begin::is_only_watched() {
        return Err(Failure::unavailable(ONLY_WATCHED.to_owned()));
    }
    heap.meet_hooks();
    let ask = || heap.malloc(size, i64::from(device), handle(stream));
    match routed(device, stream)? {
        Some(Route::Segments(id, memory)) => {
            let make_room = || {
                pools::give_back_unused(heap, device);
                heap.trim();
            };
            let held = memory.held(heap, device, id);
            return held.serve(size, (stream, handle(stream)), ask, make_room);
        }
        Some(Route::Graphs(id)) => {
            let (device, stream_handle) = (i64::from(device), handle(stream));
            let served = heap.malloc_for_graphs(size, device, stream_handle, id);
            return served.map_err(|error| Failure::of(error, stream));
        }
        None => {}
    }
    let mut answer = ask();
    if matches!(answer, Err(Error::OutOfMemory(_))) && pools::give_back_unused(heap, device) {
        answer = ask();
    }
    let refused = match answer {
        Err(Error::OutOfMemory(report)) => report,
        other => return other.map_err(|error| Failure::of(error, stream)),
    };
    for key in pools::last_resorts(device) {
        // A pool that is gone by now, or empty, cannot help.
        if let Ok(Ok(address)) = pools::inside(heap, key, ask) {
            return Ok(address);
        }
    }
    Err(Failure::OutOfMemory(refused, stream))
}

/// The pool of a request.
fn routed(device: c_int, stream: CudaStream) -> Result<Option<Route>, Failure> {
    if !pools::has_filters() {
        return Ok(None);
    }
    pools::route(device, stream).map_err(|_| Failure::invalid("the filter of a memory pool failed"))
}

extern "C" fn malloc_at(size: u64, device: c_int, stream: CudaStream, address: u64) -> *mut c_void {
    let mut block = 0;
    answered(|heap| {
        if super::begin::is_only_watched() {
            return Err(Failure::unavailable(ONLY_WATCHED.to_owned()));
        }
        heap.meet_hooks();
        let ask = |id| heap.malloc_at(size, i64::from(device), handle(stream), address, id);
        let served = match routed(device, stream)? {
            Some(Route::Segments(_, memory)) => pools::inside(heap, memory.key, || ask(None))?,
            Some(Route::Graphs(id)) => ask(Some(id)),
            None => ask(None),
        };
        block = served.map_err(|error| Failure::of(error, stream))?.ok_or_else(|| {
            Failure::invalid(&format!(
                "could not allocate {size} bytes at exactly {address:#x}: no such free memory of \
                 the current stream and memory pool is there (a tensor of a CUDA graph comes back \
                 on the stream of its capture, inside of the graph's pool)"
            ))
        })?;
        Ok(GRUYERE_OK)
    });
    block as *mut c_void
}

extern "C" fn is_out_of_memory() -> c_int {
    let is_it =
        |last: &RefCell<Option<Failure>>| matches!(*last.borrow(), Some(Failure::OutOfMemory(..)));
    guarded(0, || FAILURE.try_with(is_it).unwrap_or(false).into())
}

/// # Safety
/// `failure` may be written.
unsafe extern "C" fn failure(failure: *mut GruyereNativeFailure) -> c_int {
    guarded(GRUYERE_UNAVAILABLE, || {
        let last = FAILURE.try_with(RefCell::take).ok().flatten();
        let (code, text, [asked, limit, free]) = match last {
            Some(Failure::OutOfMemory(mut report, stream)) => {
                if let Some(heap) = current() {
                    oom::note(heap, &mut report, handle(stream));
                }
                (
                    GRUYERE_MEMORY,
                    report.to_string(),
                    [report.asked, report.limit, report.free.unwrap_or(0)],
                )
            }
            Some(Failure::Other(code, text)) => (code, text, [0; 3]),
            None => (
                GRUYERE_UNAVAILABLE,
                "gruyere: nobody knows what failed; see the log".to_owned(),
                [0; 3],
            ),
        };
        let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
        // Moving the string leaves its buffer in place.
        let face = text.as_ptr();
        let face =
            if TEXT.try_with(|place| place.replace(text)).is_ok() { face } else { c"".as_ptr() };
        // SAFETY: the caller's promise.
        unsafe { failure.write(GruyereNativeFailure { text: face, asked, limit, free }) };
        code
    })
}

/// # Safety
/// `device` may be written.
unsafe extern "C" fn block(pointer: *mut c_void, device: *mut c_int) -> u64 {
    let found = if fork::is_forked_child() {
        None
    } else {
        guarded(None, || current().and_then(|heap| heap.owns(pointer as u64)))
    };
    let Some(block) = found else { return 0 };
    // SAFETY: the caller's promise.
    unsafe { device.write(block.device as c_int) };
    block.bytes
}

extern "C" fn empty_cache(pool: MempoolId) {
    if !fork::is_forked_child() {
        guarded((), || {
            if let Some(heap) = current() {
                pools::empty(heap, Some(pool.pair()).filter(|id| *id != (0, 0)));
            }
        });
    }
}

/// The code for a pool that may not exist.
fn found(is_there: bool) -> c_int {
    if is_there { GRUYERE_OK } else { 1 }
}

extern "C" fn pool_create(device: c_int, pool: MempoolId) -> c_int {
    answered(|heap| Ok(pools::create(heap, device, pool.pair(), None).map(|()| GRUYERE_OK)?))
}

extern "C" fn pool_begin(
    device: c_int,
    pool: MempoolId,
    filter: GruyereBoxed,
    ask: GruyereFilter,
) -> c_int {
    // Owned first: later steps may fail.
    let filter = Boxed::new(filter).map(|boxed| Filter::new(boxed, ask));
    answered(|heap| Ok(pools::begin(heap, device, pool.pair(), filter).map(|()| GRUYERE_OK)?))
}

extern "C" fn pool_end(device: c_int, pool: MempoolId) -> c_int {
    answered(|heap| Ok(pools::end(heap, device, pool.pair()).map(found)?))
}

extern "C" fn pool_release(device: c_int, pool: MempoolId) -> c_int {
    answered(|heap| Ok(pools::release(heap, device, pool.pair()).map(found)?))
}

extern "C" fn pool_uses(device: c_int, pool: MempoolId) -> u32 {
    if fork::is_forked_child() { 0 } else { guarded(0, || pools::uses(device, pool.pair())) }
}

extern "C" fn pool_on_oom(device: c_int, pool: MempoolId, wanted: c_int) -> c_int {
    answered(|_| Ok(found(pools::set_on_oom(device, pool.pair(), wanted != 0))))
}

extern "C" fn pool_create_over(
    device: c_int,
    pool: MempoolId,
    allocator: GruyereBoxed,
    give: GruyereGive,
    take: GruyereTake,
) -> c_int {
    // Owned first: later steps may fail.
    let allocator = Boxed::new(allocator);
    answered(|heap| {
        let none = || Failure::invalid("a memory pool has no allocator to be over");
        let source = Source::Foreign { allocator: allocator.ok_or_else(none)?, give, take };
        Ok(pools::create(heap, device, pool.pair(), Some(source)).map(|()| GRUYERE_OK)?)
    })
}

extern "C" fn pool_no_split(device: c_int, pool: MempoolId) -> c_int {
    answered(|heap| Ok(found(pools::set_no_split(heap, device, pool.pair())?)))
}

extern "C" fn segment_number(device: c_int, address: u64) -> c_int {
    if fork::is_forked_child() { -1 } else { guarded(-1, || segments::number_of(device, address)) }
}
