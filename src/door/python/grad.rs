//! Whether gradients are on for the calling thread, by torch: no graph of autograd's keeps memory
//! that is allocated while they are off (`torch.no_grad()`, `torch.inference_mode()`).

use super::super::raise::symbol;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

/// `c10::GradMode::is_enabled()`.
type IsEnabled = extern "C" fn() -> bool;

/// ```text
///   null   -> function   the first call that finds torch loaded
/// ```
static IS_ENABLED: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Whether gradients are off. Where torch has no such function, they count as on.
#[inline]
pub(super) fn is_off() -> bool {
    let mut function = IS_ENABLED.load(Ordering::Relaxed);
    if function.is_null() {
        function = find();
    }
    if function.is_null() {
        return false;
    }
    // SAFETY: the symbol names this very function: no arguments, a bool. It reads a thread-local
    // variable, and torch is never unloaded.
    let is_enabled = unsafe { std::mem::transmute::<*mut c_void, IsEnabled>(function) };
    !is_enabled()
}

#[cold]
fn find() -> *mut c_void {
    let function = symbol(c"_ZN3c108GradMode10is_enabledEv");
    IS_ENABLED.store(function, Ordering::Relaxed);
    function
}
