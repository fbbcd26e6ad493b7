//! Named pools for C and Python: memory that goes back whole.
//!
//! Any thread may call every function. In a forked child each returns [`GRUYERE_UNAVAILABLE`].
//! [`gruyere_last_error`] returns the failure's text on the calling thread.

use super::begin::heap;
use super::fork;
use super::process::{GRUYERE_BROKEN, GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE, guarded};
use crate::heap::{Heap, PoolError, PoolKey};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};

/// The pool has live blocks, or a thread is allocating from it.
pub const GRUYERE_BUSY: c_int = -5;
/// The memory could not be allocated, or the driver did not take it back.
pub const GRUYERE_MEMORY: c_int = -6;
/// Not possible now: a CUDA graph is being captured, or the device could not be synchronised.
pub const GRUYERE_LATER: c_int = -7;

thread_local! {
    /// The failure of the latest call of the functions below.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

fn fail(code: c_int, text: String) -> c_int {
    // A thread that is ending makes no more calls.
    let _ = LAST.try_with(|last| last.replace(text));
    code
}

fn refuse(error: &PoolError) -> c_int {
    let code = match error {
        PoolError::Live { .. } | PoolError::Busy => GRUYERE_BUSY,
        PoolError::Reserve { .. } | PoolError::Kept { .. } => GRUYERE_MEMORY,
        PoolError::Unquiet => GRUYERE_LATER,
        _ => GRUYERE_INVALID,
    };
    fail(code, error.to_string())
}

/// Runs `body` with the heap, which it creates if needed.
fn with_heap(body: impl FnOnce(&Heap) -> Result<(), PoolError>) -> c_int {
    if fork::is_forked_child() {
        return fail(
            GRUYERE_UNAVAILABLE,
            "a forked child cannot use CUDA; start it with spawn".to_owned(),
        );
    }
    guarded(GRUYERE_BROKEN, || match heap() {
        Err(reason) => fail(GRUYERE_UNAVAILABLE, reason),
        Ok(heap) => match body(heap) {
            Ok(()) => GRUYERE_OK,
            Err(error) => refuse(&error),
        },
    })
}

/// Copies the error message of the calling thread's latest failed pool function to `message`, as a
/// NUL-terminated string truncated to `room` bytes.
///
/// Returns the length of the whole message in bytes.
///
/// # Safety
/// `message` is NULL or valid for writes of `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_last_error(message: *mut c_char, room: usize) -> usize {
    guarded(0, || {
        let text = LAST.try_with(|last| last.borrow().clone()).unwrap_or_default();
        if !message.is_null() && room > 0 {
            let mut end = text.len().min(room - 1);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            // SAFETY: at most room - 1 bytes and a NUL, by the caller's promise; `text` is our own.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), message.cast::<u8>(), end);
                message.add(end).write(0);
            }
        }
        text.len()
    })
}

/// Creates the pool `name` (UTF-8, 1 to 128 bytes) on `device`, or finds the existing one, and
/// writes its key to `*pool`. The library maps `reserve` bytes for the pool at once, and keeps them
/// mapped; it raises the reserve of an existing pool to `reserve`. `limit` is a ceiling on the
/// pool's live bytes; 0 sets none (and leaves that of an existing pool unchanged).
///
/// Returns 0; -1 if the library cannot work in this process; -2 if an argument is invalid; -6 if
/// the memory cannot be allocated. `gruyere_last_error` returns the reason.
///
/// # Safety
/// `name` is NULL or a NUL-terminated string; `pool` is NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_create(
    name: *const c_char,
    device: c_int,
    reserve: u64,
    limit: u64,
    pool: *mut u64,
) -> c_int {
    if name.is_null() || pool.is_null() {
        return fail(GRUYERE_INVALID, "name or pool is NULL".to_owned());
    }
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    let Ok(name) = name.to_str() else {
        return refuse(&PoolError::Name(name.to_string_lossy().into_owned()));
    };
    with_heap(|heap| {
        let key =
            heap.pool_create(name, i64::from(device), reserve, (limit > 0).then_some(limit))?;
        // SAFETY: not NULL, and the caller's promise.
        unsafe { pool.write(key.0) };
        Ok(())
    })
}

/// Routes the calling thread's requests on the pool's device to the pool from now on. Pools nest,
/// up to 16 on a thread; the innermost pool of a device serves its requests. Allocations in a CUDA
/// graph's capture still come from the graph's own memory.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such pool, or the
/// thread is in 16 pools already.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_pool_enter(pool: u64) -> c_int {
    with_heap(|heap| heap.pool_enter(PoolKey(pool)))
}

/// Ends the calling thread's latest `gruyere_pool_enter`, which must have named this pool. The pool
/// may have been destroyed meanwhile.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if the thread entered another pool
/// last, or is in no pool.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_pool_leave(pool: u64) -> c_int {
    with_heap(|heap| heap.pool_leave(PoolKey(pool)))
}

/// Returns all memory of the pool to the device at once, and writes the number of bytes to
/// `*given`, if `given` is not NULL. Synchronises the device first, so that no work uses the
/// memory. The pool can be used again; its reserve is gone.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such pool; -5 if
/// blocks are live in it (`gruyere_pool_blocks` lists them) or a thread is allocating from it, and
/// nothing is done; -6 if the driver did not take everything back: the next trim tries again; -7
/// during a capture, or if the device could not be synchronised.
///
/// # Safety
/// `given` is NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_release(pool: u64, given: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    with_heap(|heap| heap.pool_release(PoolKey(pool)).map(|bytes| unsafe { write(given, bytes) }))
}

/// As `gruyere_pool_release`, and destroys the pool: from then on, its key is valid for
/// `gruyere_pool_leave` only.
///
/// # Safety
/// `given` is NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_destroy(pool: u64, given: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    with_heap(|heap| heap.pool_destroy(PoolKey(pool)).map(|bytes| unsafe { write(given, bytes) }))
}

/// # Safety
/// `place` is NULL or valid for writes.
unsafe fn write<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller's promise.
        unsafe { place.write(value) };
    }
}

/// Statistics of a pool, in bytes unless noted. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyerePoolStats {
    /// In: size of the caller's struct in bytes. Out: number of bytes written.
    pub size: u32,
    /// Out: version of this struct, 1.
    pub version: u32,
    /// Memory that stays mapped for the pool, even if idle.
    pub reserve: u64,
    /// Ceiling on live bytes; 0 if the pool has none.
    pub limit: u64,
    /// Memory held.
    pub held: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// Number of live blocks.
    pub live_blocks: u64,
    /// Freed by the program, waiting for streams.
    pub pending: u64,
}

/// Writes the statistics of a pool to `*stats`, at most `stats->size` bytes of them. Set `size`
/// before the call.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such pool, `stats`
/// is NULL, or `size` is less than 8.
///
/// # Safety
/// `stats` is NULL or valid for writes of `stats->size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_stats(pool: u64, stats: *mut GruyerePoolStats) -> c_int {
    // SAFETY: the caller's promise; read as a plain word, since an older caller's struct may be
    // shorter than ours.
    let room = if stats.is_null() { 0 } else { (unsafe { stats.cast::<u32>().read() }) as usize };
    if room < 8 {
        return fail(GRUYERE_INVALID, "stats is NULL, or its size is less than 8".to_owned());
    }
    with_heap(|heap| {
        let numbers = heap.pool_stats(PoolKey(pool))?;
        let written = room.min(size_of::<GruyerePoolStats>());
        let answer = GruyerePoolStats {
            size: written as u32,
            version: 1,
            reserve: numbers.reserve,
            limit: numbers.limit.unwrap_or(0),
            held: numbers.held,
            live: numbers.live,
            live_blocks: numbers.live_blocks,
            pending: numbers.pending,
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
        Ok(())
    })
}

/// A live block of a pool.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyerePoolBlock {
    /// Start address.
    pub address: u64,
    /// Bytes requested.
    pub requested: u64,
    /// Step of the allocation; -1 if unknown (`record:off`).
    pub step: i64,
}

/// Writes the largest live blocks of a pool to `blocks`, at most `room` of them, and their number
/// to `*count`.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such pool, or
/// `blocks` or `count` is NULL.
///
/// # Safety
/// `blocks` is NULL or valid for writes of `room` blocks; `count` is NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_blocks(
    pool: u64,
    blocks: *mut GruyerePoolBlock,
    room: u32,
    count: *mut u32,
) -> c_int {
    if blocks.is_null() || count.is_null() {
        return fail(GRUYERE_INVALID, "blocks or count is NULL".to_owned());
    }
    with_heap(|heap| {
        let found = heap.pool_blocks(PoolKey(pool), room as usize)?;
        for (at, block) in found.iter().enumerate() {
            let step = block.step.map_or(-1, i64::from);
            let block =
                GruyerePoolBlock { address: block.address, requested: block.requested, step };
            // SAFETY: `found` has no more than `room` blocks, for which the caller promises space.
            unsafe { blocks.add(at).write(block) };
        }
        // SAFETY: not NULL, and the caller's promise.
        unsafe { count.write(found.len() as u32) };
        Ok(())
    })
}
