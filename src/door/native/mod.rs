//! The native door: a table of functions for the package's shim, a C++ subclass of torch's own
//! `CUDAAllocator` (`python_loader/gruyere/_native/cpp/shim.cpp`).
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
mod shared;
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
pub use shared::GruyereShared;
pub use states::{GruyerePoolState, GruyereRestored};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;
pub use told::GruyereNativeHistory;
pub use trackers::{GruyereSegmentEvent, GruyereTracker};

/// The version of [`GruyereNativeTable`] that this header describes.
pub const GRUYERE_NATIVE_VERSION: u32 = 1;

/// The calling thread's latest failure.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereNativeFailure {
    /// The error message, valid until the thread's next failure.
    pub text: *const c_char,
    /// For an out-of-memory: bytes requested.
    pub asked: u64,
    /// For an out-of-memory: the ceiling on held bytes.
    pub limit: u64,
    /// For an out-of-memory: free bytes of the device, as the driver reported them; 0 if it could
    /// not.
    pub free: u64,
}

/// The functions of the native door. Codes are 0 or one of the negative ones above; after a
/// negative code of a pool function, `failure` returns the reason.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereNativeTable {
    /// Size of this struct in bytes.
    pub size: u32,
    /// Version of this struct.
    pub version: u32,
    /// Allocates `size` bytes on `device`, for use in the order of `stream`. Returns NULL for size
    /// 0 and on failure. Never throws.
    pub malloc: extern "C" fn(size: u64, device: c_int, stream: CudaStream) -> *mut c_void,
    /// Returns 1 if the calling thread's latest failure is an out-of-memory, else 0. It is reported
    /// only when `failure` is called.
    pub is_out_of_memory: extern "C" fn() -> c_int,
    /// Takes the latest failure into `*failure`, and returns its code. An out-of-memory becomes the
    /// program's with this call: it is counted, dumped and recorded, and alerts are raised.
    pub failure: unsafe extern "C" fn(failure: *mut GruyereNativeFailure) -> c_int,
    /// See `gruyere_free`.
    pub free: extern "C" fn(pointer: *mut c_void, size: isize, device: c_int, stream: CudaStream),
    /// Returns the length of the live block that starts at `pointer`, rounded up to 512 bytes, and
    /// writes its device to `*device`. Returns 0 if there is none.
    pub block: unsafe extern "C" fn(pointer: *mut c_void, device: *mut c_int) -> u64,
    /// See `gruyere_base_alloc`.
    pub base: unsafe extern "C" fn(pointer: *mut c_void, size: *mut usize) -> *mut c_void,
    /// See `gruyere_record_stream`.
    pub record_stream: extern "C" fn(pointer: *mut c_void, stream: CudaStream),
    /// See `gruyere_stream_lasts`.
    pub stream_lasts: extern "C" fn(device: c_int, stream: CudaStream) -> c_int,
    /// Releases unused memory to the devices: all of it or, for an id other than 0 and 0, that of
    /// the pool.
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
    /// As `gruyere_snapshot`; segments of MemPools have their pool's id.
    pub snapshot: extern "C" fn(device: c_int) -> *mut GruyereSnapshot,
    /// See `gruyere_snapshot_free`.
    pub snapshot_free: unsafe extern "C" fn(snapshot: *mut GruyereSnapshot),
    /// Adds a reference to a pool, and creates the pool if needed.
    pub pool_create: extern "C" fn(device: c_int, pool: MempoolId) -> c_int,
    /// Routes requests to a pool until `pool_end`: those for which `ask` returns 1; without a
    /// filter, those of a capture that begins now. Adds a reference to the pool.
    pub pool_begin: extern "C" fn(
        device: c_int,
        pool: MempoolId,
        filter: GruyereBoxed,
        ask: GruyereFilter,
    ) -> c_int,
    /// Ends the pool's latest `pool_begin`. Returns 1 if there is none.
    pub pool_end: extern "C" fn(device: c_int, pool: MempoolId) -> c_int,
    /// Drops a reference to the pool. Returns 1 if there is none.
    pub pool_release: extern "C" fn(device: c_int, pool: MempoolId) -> c_int,
    /// Returns the number of references to the pool.
    pub pool_uses: extern "C" fn(device: c_int, pool: MempoolId) -> u32,
    /// Sets whether the pool serves other requests before they are out of memory. Returns 1 if
    /// there is no such pool.
    pub pool_on_oom: extern "C" fn(device: c_int, pool: MempoolId, wanted: c_int) -> c_int,
    /// As `gruyere_history_start`; `clear` also drops the boxes.
    pub history_start: extern "C" fn(entries: u64, clear: c_int) -> c_int,
    /// As `gruyere_history_stop`; also drops all boxes.
    pub history_stop: extern "C" fn(),
    /// Makes `context` the origin of the calling thread's requests and frees. The library keeps it
    /// as long as the history refers to it. Returns the value for `context_leave`.
    pub context_enter: extern "C" fn(context: GruyereBoxed) -> u64,
    /// Restores the origin from before that `context_enter`.
    pub context_leave: extern "C" fn(before: u64),
    /// Returns a copy of the history so far, or NULL if there is none. Free it with `history_free`.
    pub history: extern "C" fn() -> *mut GruyereNativeHistory,
    /// Frees a history from `history`.
    pub history_free: unsafe extern "C" fn(history: *mut GruyereNativeHistory),
    /// As `pool_create`, for a new pool whose segments come from `allocator`: `give` allocates a
    /// segment and `take` returns it, each once, on any thread. The library drops `allocator` after
    /// the last segment.
    pub pool_create_over: extern "C" fn(
        device: c_int,
        pool: MempoolId,
        allocator: GruyereBoxed,
        give: GruyereGive,
        take: GruyereTake,
    ) -> c_int,
    /// Gives each block of a pool a segment of its own. The pool must hold no memory yet. Returns 1
    /// if there is no such pool.
    pub pool_no_split: extern "C" fn(device: c_int, pool: MempoolId) -> c_int,
    /// Reports the segments of pools to `tracker` from now on. Only the first call counts.
    pub track: extern "C" fn(tracker: GruyereTracker),
    /// Returns the number of pool segments before the one at `address`; -1 if there is none at
    /// `address`.
    pub segment_number: extern "C" fn(device: c_int, address: u64) -> c_int,
    /// Returns the state of a pool of graphs: which of its blocks are live. `pool_restore` may use
    /// it any number of times; free it with `pool_state_free`. Returns NULL on failure.
    pub pool_state: extern "C" fn(device: c_int, pool: MempoolId) -> *mut GruyerePoolState,
    /// Frees a state from `pool_state`, and touches no block.
    pub pool_state_free: unsafe extern "C" fn(state: *mut GruyerePoolState),
    /// Restores a pool to a state: its live blocks become those of the state, each at its old
    /// address. Returns the changes, to be freed with `restored_free`. Returns NULL on failure,
    /// with nothing changed.
    pub pool_restore: unsafe extern "C" fn(state: *const GruyerePoolState) -> *mut GruyereRestored,
    /// Frees the changes from `pool_restore`.
    pub restored_free: unsafe extern "C" fn(restored: *mut GruyereRestored),
    /// Sets the function that returns a request's place in autograd; the library calls it on the
    /// thread of the request. Only the first call counts.
    pub origins: extern "C" fn(ask: GruyereAskAutograd),
    /// As `malloc`, at `address` and nowhere else. Returns NULL on failure, also if the stream and
    /// its pool have no free memory there.
    pub malloc_at:
        extern "C" fn(size: u64, device: c_int, stream: CudaStream, address: u64) -> *mut c_void,
    /// Names the memory of the live block that starts at `pointer` for other processes. The block
    /// must stay live while one of them has the memory open.
    pub share: unsafe extern "C" fn(pointer: *mut c_void, shared: *mut GruyereShared) -> c_int,
    /// Opens memory that another process has named, by the `size` bytes at `name`, for `device`.
    /// Opening the same memory again for the device returns the same address. Returns NULL on
    /// failure.
    pub shared_open:
        unsafe extern "C" fn(name: *const u8, size: usize, device: c_int) -> *mut c_void,
    /// Closes the memory at `address` once; it must be closed as often as it was opened. The last
    /// time waits for the device, and unmaps it; after a capture, if a stream captures.
    pub shared_close: extern "C" fn(address: *mut c_void),
}

const TABLE: GruyereNativeTable = GruyereNativeTable {
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
    share: shared::share,
    shared_open: shared::open,
    shared_close: shared::close,
};

static PLAIN: GruyereNativeTable = TABLE;
static ON_STAND_IN: GruyereNativeTable = GruyereNativeTable { malloc: malloc_on_stand_in, ..TABLE };

/// The stand-in GPU's function that hears of each block.
type Given = unsafe extern "C" fn(u64, u64);

/// `None`: this is a real GPU.
fn given() -> Option<Given> {
    static FOUND: OnceLock<Option<Given>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let address = super::raise::symbol(c"phantom_given");
        // SAFETY: only the stand-in has a function of this name, with this type.
        (!address.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Given>(address) })
    })
}

/// Returns the functions of the native door for a shim that was built for `version`; NULL if the
/// library does not have that version: the shim must not be used then.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_native_table(version: u32) -> *const GruyereNativeTable {
    if version != GRUYERE_NATIVE_VERSION {
        return std::ptr::null();
    }
    process::take_native();
    if given().is_some() { &raw const ON_STAND_IN } else { &raw const PLAIN }
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

    /// Keeps the failure for the call of `failure` that follows. A thread that is ending makes no
    /// more calls.
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

/// Runs `body` with the heap, which it creates if needed; keeps a failure and returns its code.
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

/// As [`malloc`], and the stand-in hears of the block, as it hears of torch's allocator's: what the
/// host reads there is not what the memory had before. [`malloc`] itself has no time to ask.
extern "C" fn malloc_on_stand_in(size: u64, device: c_int, stream: CudaStream) -> *mut c_void {
    let block = malloc(size, device, stream);
    if let (false, Some(given)) = (block.is_null(), given()) {
        // SAFETY: the block is the caller's, of this size.
        unsafe { given(block as u64, size) };
    }
    block
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
        if let Ok(Ok(address)) = segments::inside(heap, key, ask) {
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
            Some(Route::Segments(_, memory)) => segments::inside(heap, memory.key, || ask(None))?,
            Some(Route::Graphs(id)) => ask(Some(id)),
            None => ask(None),
        };
        block = served.map_err(|error| Failure::of(error, stream))?.ok_or_else(|| {
            Failure::invalid(&format!(
                "could not allocate {size} bytes at exactly {address:#x}: the current stream and \
                 memory pool have no free memory there (allocate a tensor of a CUDA graph on the \
                 stream of its capture, inside the graph's pool)"
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
/// `failure` is valid for writes.
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
            None => {
                (GRUYERE_UNAVAILABLE, "gruyere: unknown failure; see the log".to_owned(), [0; 3])
            }
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
/// `device` is valid for writes.
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
        let none = || Failure::invalid("the allocator of a memory pool is NULL");
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
