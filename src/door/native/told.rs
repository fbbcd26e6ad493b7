//! The memory layout and its history, as the native door reports them to torch.

use super::super::fork;
use super::super::history::{
    GruyereHistory, give, gruyere_history_free, gruyere_history_start, gruyere_history_stop,
};
use super::super::process::{GRUYERE_OK, current, guarded};
use super::super::torch_stats::{self, GruyereSnapshot};
use super::boxed::{Boxed, GruyereBoxed};
use super::{contexts, pools};
use crate::heap::snapshot::Holder;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// [`GruyereHistory`], with the objects behind its context numbers.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereNativeHistory {
    /// The history.
    pub noted: *mut GruyereHistory,
    /// Object of each entry's context; NULL if it has none.
    pub entry_contexts: *const *mut c_void,
    /// Object of each origin's context; NULL if it has none.
    pub origin_contexts: *const *mut c_void,
    /// For each entry that is a free: object of the context of the block's allocation; NULL if it
    /// has none, and for other entries.
    pub entry_origins: *const *mut c_void,
}

/// Owns the memory behind [`GruyereNativeHistory`], its first field.
#[repr(C)]
struct Held {
    face: GruyereNativeHistory,
    objects: [Vec<*mut c_void>; 3],
    /// The objects' owners.
    boxes: [Vec<Option<Arc<Boxed>>>; 3],
}

pub(super) extern "C" fn snapshot(device: c_int) -> *mut GruyereSnapshot {
    torch_stats::snapshot(device, |segment| match &segment.holder {
        Holder::Pool(name) => pools::id_of(name).unwrap_or(segment.pool),
        _ => segment.pool,
    })
}

pub(super) extern "C" fn history_start(entries: u64, clear: c_int) -> c_int {
    let code = gruyere_history_start(entries, clear);
    if code == GRUYERE_OK && clear != 0 {
        guarded((), contexts::forget);
    }
    code
}

pub(super) extern "C" fn history_stop() {
    gruyere_history_stop();
    if !fork::is_forked_child() {
        guarded((), contexts::forget);
    }
}

pub(super) extern "C" fn context_enter(context: GruyereBoxed) -> u64 {
    // Owned first: dropped once, whatever happens.
    let Some(boxed) = Boxed::new(context) else { return 0 };
    if fork::is_forked_child() {
        return 0;
    }
    guarded(0, || current().map_or(0, |heap| contexts::enter(heap, boxed)))
}

pub(super) extern "C" fn context_leave(before: u64) {
    if !fork::is_forked_child() {
        guarded((), || contexts::leave(before));
    }
}

pub(super) extern "C" fn history() -> *mut GruyereNativeHistory {
    if fork::is_forked_child() {
        return std::ptr::null_mut();
    }
    guarded(std::ptr::null_mut(), || {
        let Some(heap) = current().filter(|heap| heap.has_history()) else {
            return std::ptr::null_mut();
        };
        let found = heap.history();
        let boxes = [
            contexts::of(found.entries.iter().map(|entry| entry.context)),
            contexts::of(found.origins.iter().map(|origin| origin.context)),
            contexts::of(found.entries.iter().map(|entry| entry.origin)),
        ];
        let object = |boxed: &Option<Arc<Boxed>>| {
            boxed.as_ref().map_or(std::ptr::null_mut(), |boxed| boxed.object())
        };
        let objects = [0, 1, 2].map(|kind| boxes[kind].iter().map(object).collect::<Vec<_>>());
        let face = GruyereNativeHistory {
            noted: give(&found),
            entry_contexts: objects[0].as_ptr(),
            origin_contexts: objects[1].as_ptr(),
            entry_origins: objects[2].as_ptr(),
        };
        // Moving a vector leaves its buffer in place.
        Box::into_raw(Box::new(Held { face, objects, boxes })).cast()
    })
}

/// # Safety
/// `history` is NULL, or from [`history`] and not freed yet.
pub(super) unsafe extern "C" fn history_free(history: *mut GruyereNativeHistory) {
    if history.is_null() {
        return;
    }
    // SAFETY: the caller's promise; `history` made it from a box of `Held`, whose first field the
    // struct is.
    let held = unsafe { Box::from_raw(history.cast::<Held>()) };
    // SAFETY: `give` made it, and nothing else owns it.
    unsafe { gruyere_history_free(held.face.noted) };
    guarded((), || drop(held));
}
