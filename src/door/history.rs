//! The history of blocks, for a loader that implements torch's `_record_memory_history`.
//!
//! While on, every malloc and free adds an entry under one lock (some hundred nanoseconds); off, it
//! costs nothing. It never calls back and takes no lock of Python's. A block's origin is the number
//! that the calling thread set with [`gruyere_history_context`]; the loader turns it into a stack.

use super::begin::heap;
use super::fork;
use super::process::{current, guarded};
use crate::heap::history::{self, Collected};
use std::ffi::c_int;

use super::process::{GRUYERE_OK, GRUYERE_UNAVAILABLE};

/// Begins to note mallocs and frees: the latest `entries` of them, and where each live block came
/// from (0 entries: only that). `clear` other than 0 forgets what was noted before.
///
/// 0; -1: the library cannot work here.
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

/// Ends it, and forgets all of it.
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

/// The calling thread's requests are noted with this number from now on; 0: with none. The number
/// that it was before.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_history_context(context: u64) -> u64 {
    history::set_context(context)
}

/// The version of [`GruyereHistory`] that this header describes.
pub const GRUYERE_HISTORY_VERSION: u32 = 1;

/// Something that happened.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereHistoryEntry {
    /// 0: alloc; 1: free requested; 2: free completed; 3: a span from the driver; 4: it goes back;
    /// 5: out of memory; 6: pages are mapped here now; 7: they belong here no more.
    pub action: u32,
    /// The device.
    pub device: u32,
    /// Where; of an out-of-memory, the bytes that the driver said are free.
    pub address: u64,
    /// How much: of a block, what was asked for; of an out-of-memory, that rounded up to 512.
    pub bytes: u64,
    /// The stream's handle.
    pub stream: u64,
    /// Microseconds since 1970.
    pub time: u64,
    /// See [`gruyere_history_context`].
    pub context: u64,
    /// Of a free: that of its block's allocation, where it was noted; else 0.
    pub origin: u64,
}

/// Where a live block came from.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereOrigin {
    /// Its first byte.
    pub address: u64,
    /// See [`gruyere_history_context`].
    pub context: u64,
    /// The device.
    pub device: u32,
    /// Always 0.
    pub room: u32,
}

/// What was noted. Later versions add fields at the end of each struct only: step through the
/// arrays by the sizes given here.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereHistory {
    /// Bytes of this struct.
    pub size: u32,
    /// Its version.
    pub version: u32,
    /// Bytes of an entry.
    pub entry_size: u32,
    /// Bytes of an origin.
    pub origin_size: u32,
    /// By time.
    pub entries: *const GruyereHistoryEntry,
    /// How many.
    pub entry_count: u64,
    /// Of the blocks that are live and were allocated since the start, in no order.
    pub origins: *const GruyereOrigin,
    /// How many.
    pub origin_count: u64,
    /// Entries that made room for later ones.
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

/// What was noted until now, to be given to [`gruyere_history_free`] once; the history goes on.
///
/// NULL: there is no history.
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

/// Frees what [`gruyere_history`] gave. NULL is fine.
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
    /// How many there were on it, this one included.
    pub count: u32,
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes held then.
    pub reserved: u64,
    /// The ceiling on that, in bytes.
    pub limit: u64,
    /// Bytes of the device that the driver said were free; all bits set: it could not say.
    pub free: u64,
}

/// Writes the latest out-of-memory to `*out`, of which `size` bytes may be written; as much as
/// fits.
///
/// The bytes written; 0: there was none.
///
/// # Safety
/// `out` may be written, `size` bytes.
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
