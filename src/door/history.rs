//! The history of blocks, for a loader that implements torch's `_record_memory_history`.
//!
//! While it is on, every malloc and free adds an entry under one lock (a few hundred nanoseconds);
//! off, it costs nothing. It never calls back, and takes none of Python's locks. A block's origin
//! is the number that the calling thread set with [`gruyere_history_context`]; the loader turns it
//! into a stack.

use super::begin::heap;
use super::fork;
use super::process::{GRUYERE_OK, GRUYERE_UNAVAILABLE, current, guarded};
use crate::heap::history::{self, Collected};
use std::ffi::c_int;

/// Starts the history of mallocs and frees. It keeps the latest `entries` entries, and the origin
/// of each live block; with 0 entries, only the origins. If `clear` is not 0, drops what was
/// recorded before.
///
/// Returns 0, or -1 if the library cannot work in this process.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_history_start(entries: u64, clear: c_int) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        let Ok(heap) = heap() else { return GRUYERE_UNAVAILABLE };
        heap.start_history(usize::try_from(entries).unwrap_or(usize::MAX), clear != 0);
        GRUYERE_OK
    })
}

/// Stops the history and drops its contents.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_history_stop() {
    if !fork::is_forked_child() {
        guarded((), || {
            if let Some(heap) = current() {
                heap.stop_history();
            }
        });
    }
}

/// Sets the number that the history records with the calling thread's requests from now on; 0:
/// none. Returns the previous number.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_history_context(context: u64) -> u64 {
    history::set_context(context)
}

/// The version of [`GruyereHistory`] that this header describes.
pub const GRUYERE_HISTORY_VERSION: u32 = 1;

/// An event in the history.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereHistoryEntry {
    /// 0: alloc; 1: free requested; 2: free completed; 3: span allocated from the driver; 4: span
    /// returned to the driver; 5: out of memory; 6: pages mapped at this address; 7: pages no
    /// longer mapped at this address.
    pub action: u32,
    /// The device.
    pub device: u32,
    /// Start address; for an out-of-memory, the free bytes that the driver reported.
    pub address: u64,
    /// Length in bytes: for a block, the requested size; for an out-of-memory, the requested size
    /// rounded up to 512.
    pub bytes: u64,
    /// The stream's handle.
    pub stream: u64,
    /// Microseconds since 1970.
    pub time: u64,
    /// See [`gruyere_history_context`].
    pub context: u64,
    /// For a free: the context of the block's allocation, if recorded; else 0.
    pub origin: u64,
}

/// The origin of a live block.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereOrigin {
    /// Start address.
    pub address: u64,
    /// See [`gruyere_history_context`].
    pub context: u64,
    /// The device.
    pub device: u32,
    /// Padding; always 0.
    pub room: u32,
}

/// The recorded history. Later versions append fields to each struct: step through the arrays by
/// the sizes given here.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereHistory {
    /// Size of this struct in bytes.
    pub size: u32,
    /// Version of this struct.
    pub version: u32,
    /// Size of an entry in bytes.
    pub entry_size: u32,
    /// Size of an origin in bytes.
    pub origin_size: u32,
    /// Entries, ordered by time.
    pub entries: *const GruyereHistoryEntry,
    /// Number of entries.
    pub entry_count: u64,
    /// Origins of the live blocks that were allocated since the start, unordered.
    pub origins: *const GruyereOrigin,
    /// Number of origins.
    pub origin_count: u64,
    /// Number of entries that later ones replaced.
    pub lost: u64,
}

/// Owns the memory behind [`GruyereHistory`], its first field.
#[repr(C)]
struct Held {
    face: GruyereHistory,
    entries: Vec<GruyereHistoryEntry>,
    origins: Vec<GruyereOrigin>,
}

fn hold(found: &Collected) -> Box<Held> {
    let entry = |entry: &history::Entry| GruyereHistoryEntry {
        action: entry.action as u32,
        device: entry.device,
        address: entry.address,
        bytes: entry.bytes,
        stream: entry.stream,
        time: entry.time / 1000,
        context: entry.context,
        origin: entry.origin,
    };
    let origin = |origin: &history::Origin| {
        let history::Origin { address, device, context } = *origin;
        GruyereOrigin { address, context, device, room: 0 }
    };
    let entries: Vec<_> = found.entries.iter().map(entry).collect();
    let origins: Vec<_> = found.origins.iter().map(origin).collect();
    let face = GruyereHistory {
        size: size_of::<GruyereHistory>() as u32,
        version: GRUYERE_HISTORY_VERSION,
        entry_size: size_of::<GruyereHistoryEntry>() as u32,
        origin_size: size_of::<GruyereOrigin>() as u32,
        entries: entries.as_ptr(),
        entry_count: entries.len() as u64,
        origins: origins.as_ptr(),
        origin_count: origins.len() as u64,
        lost: found.lost,
    };
    // Moving a vector leaves its buffer in place.
    Box::new(Held { face, entries, origins })
}

/// Boxes `found`; [`gruyere_history_free`] takes it back.
pub(super) fn give(found: &Collected) -> *mut GruyereHistory {
    Box::into_raw(hold(found)).cast()
}

/// Returns a copy of the history so far, or NULL if there is none. Recording goes on. Free the copy
/// with [`gruyere_history_free`].
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_history() -> *mut GruyereHistory {
    if fork::is_forked_child() {
        return std::ptr::null_mut();
    }
    guarded(std::ptr::null_mut(), || match current() {
        Some(heap) if heap.has_history() => give(&heap.history()),
        _ => std::ptr::null_mut(),
    })
}

/// Frees a history from [`gruyere_history`]. NULL is allowed.
///
/// # Safety
/// `history` is NULL, or from [`gruyere_history`] and not freed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_history_free(history: *mut GruyereHistory) {
    if !history.is_null() {
        // SAFETY: the caller's promise; `gruyere_history` made it from a box of `Held`, whose first
        // field the struct is.
        let held = unsafe { Box::from_raw(history.cast::<Held>()) };
        guarded((), || drop(held));
    }
}

/// The latest out-of-memory of the process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereOutOfMemory {
    /// The device.
    pub device: u32,
    /// Out-of-memories on the device so far, this one included.
    pub count: u32,
    /// Bytes requested.
    pub asked: u64,
    /// Bytes held at that time.
    pub reserved: u64,
    /// The ceiling on held bytes.
    pub limit: u64,
    /// Free bytes of the device, as the driver reported them; all bits set if it could not.
    pub free: u64,
}

/// Writes the latest out-of-memory of the process to `*out`, at most `size` bytes of it.
///
/// Returns the number of bytes written; 0 if there was no out-of-memory.
///
/// # Safety
/// `out` is NULL or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_latest_out_of_memory(
    out: *mut GruyereOutOfMemory,
    size: usize,
) -> usize {
    if out.is_null() || fork::is_forked_child() {
        return 0;
    }
    guarded(0, || {
        let Some(report) = current().and_then(|heap| heap.latest_out_of_memory()) else { return 0 };
        let answer = GruyereOutOfMemory {
            device: report.device,
            count: u32::try_from(report.count).unwrap_or(u32::MAX),
            asked: report.asked,
            reserved: report.reserved,
            limit: report.limit,
            free: report.free.unwrap_or(u64::MAX),
        };
        let written = size.min(size_of::<GruyereOutOfMemory>());
        // SAFETY: `written` bytes are inside what the caller has room for, and inside `answer`; the
        // two do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const answer).cast::<u8>(),
                out.cast::<u8>(),
                written,
            )
        };
        written
    })
}
