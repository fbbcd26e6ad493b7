//! Named pools for C and Python: memory that goes back whole.
//!
//! Any thread may call every function. In a forked child each returns [`GRUYERE_UNAVAILABLE`].
//! [`gruyere_last_error`] returns the failure's text on the calling thread.

use super::begin::heap;
use super::fork;
use super::process::guarded;
use super::process::{GRUYERE_BROKEN, GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE};
use crate::heap::{Heap, PoolError, PoolKey};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};

/// Blocks are live in the pool, or a thread is allocating from it.
pub const GRUYERE_BUSY: c_int = -5;
/// The memory could not be had, or the driver did not take it back.
pub const GRUYERE_MEMORY: c_int = -6;
/// Not now: a CUDA graph is being captured, or the device could not be synchronised.
pub const GRUYERE_LATER: c_int = -7;

thread_local! {
    /// The failure of the latest call of the functions below.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

fn fail(code: c_int, text: String) -> c_int {
    // A thread that is ending asks no more.
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

/// Runs `body` with the heap, made if need be.
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

/// Copies what was wrong with this thread's latest failed call about pools to `message`, as a
/// NUL-terminated text cut to `room` bytes. The bytes that the whole text has.
///
/// # Safety
/// `message` is NULL, or `room` bytes there may be written.
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

/// Makes the pool called `name` (UTF-8, 1 to 128 bytes) on `device`, or finds the one that there
/// is, and writes its key to `*pool`. `reserve` bytes are mapped for it at once and stay; of a pool
/// that there is, the reserve is raised to that. `limit` is a ceiling on the bytes that may be live
/// in it, 0 for none of its own (or no change).
///
/// 0; -1: the library cannot work here; -2: an argument is wrong; -6: the memory cannot be had.
/// `gruyere_last_error` says why.
///
/// # Safety
/// `name` is NULL or a NUL-terminated string; `pool` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_create(
    name: *const c_char,
    device: c_int,
    reserve: u64,
    limit: u64,
    pool: *mut u64,
) -> c_int {
    if name.is_null() || pool.is_null() {
        return fail(
            GRUYERE_INVALID,
            "no name, or nowhere to write the pool's key to (NULL)".to_owned(),
        );
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

/// Sends the calling thread's next requests on the pool's device to the pool. Pools nest, up to 16
/// on a thread; the innermost of a device counts. What a captured CUDA graph allocates goes to the
/// graph's own memory all the same.
///
/// 0; -1; -2: no such pool, or too many.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_pool_enter(pool: u64) -> c_int {
    with_heap(|heap| heap.pool_enter(PoolKey(pool)))
}

/// Ends the calling thread's latest `gruyere_pool_enter`, which must have been of this pool; it may
/// be destroyed since.
///
/// 0; -1; -2: the thread has entered another last, or none.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_pool_leave(pool: u64) -> c_int {
    with_heap(|heap| heap.pool_leave(PoolKey(pool)))
}

/// Gives all memory of the pool back to the device at once, and writes the bytes to `*given` (where
/// it is not NULL). The device is synchronised first, so that no work uses it. The pool can be used
/// again; its reserve is gone.
///
/// 0; -1; -2: no such pool; -5: blocks are live in it (`gruyere_pool_blocks` tells which), and
/// nothing has been done; -6: the driver did not take everything back, and gets it at the next
/// trim; -7: not during a capture.
///
/// # Safety
/// `given` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_release(pool: u64, given: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    with_heap(|heap| heap.pool_release(PoolKey(pool)).map(|bytes| unsafe { write(given, bytes) }))
}

/// As `gruyere_pool_release`, and forgets the pool: its key is good for nothing but
/// `gruyere_pool_leave` from then on.
///
/// # Safety
/// `given` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_destroy(pool: u64, given: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    with_heap(|heap| heap.pool_destroy(PoolKey(pool)).map(|bytes| unsafe { write(given, bytes) }))
}

/// # Safety
/// `place` is NULL or may be written.
unsafe fn write<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller's promise.
        unsafe { place.write(value) };
    }
}

/// Numbers of one pool, in bytes where not said otherwise. Later versions add fields at the end
/// only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyerePoolStats {
    /// In: the bytes that the caller has room for. Out: the bytes that were written.
    pub size: u32,
    /// Out: 1.
    pub version: u32,
    /// What it keeps whatever lies idle.
    pub reserve: u64,
    /// Ceiling on its live bytes; 0: none of its own.
    pub limit: u64,
    /// Memory that it holds.
    pub held: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// How many.
    pub live_blocks: u64,
    /// Freed by the program, waiting for streams.
    pub pending: u64,
}

/// Writes the numbers of a pool to `*stats`, whose `size` the caller has set; as much as fits.
///
/// 0; -1; -2: no such pool, or `size` is less than 8.
///
/// # Safety
/// `stats` is NULL, or `stats->size` bytes there may be written.
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
    /// Where it starts.
    pub address: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// The step in which it was allocated; -1: not known (`record:off`).
    pub step: i64,
}

/// Writes the largest live blocks of a pool to `blocks`, at most `room` of them, and their number
/// to `*count`.
///
/// 0; -1; -2: no such pool, or a NULL.
///
/// # Safety
/// `blocks` is NULL, or has room for `room` of them; `count` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_pool_blocks(
    pool: u64,
    blocks: *mut GruyerePoolBlock,
    room: u32,
    count: *mut u32,
) -> c_int {
    if blocks.is_null() || count.is_null() {
        return fail(GRUYERE_INVALID, "nowhere to write the blocks to (NULL)".to_owned());
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
