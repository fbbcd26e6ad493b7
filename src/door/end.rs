//! The end of the process's record: the process leaves, and leaves none.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::preload;
use super::process::{current, guarded};
use super::{fork, refusal, run_file, summary};
use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    /// glibc's `atexit` with the status of the exit.
    fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Whether the record was closed. States: false -> true, by the first that closes it.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Closes the record at a normal exit.
pub(super) fn close_at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn leave(status: c_int, _: *mut c_void) {
        if fork::is_forked_child() {
            return;
        }
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        preload::mode::leave();
        guarded((), || {
            if let Some(heap) = current().filter(|_| !CLOSED.load(Ordering::Relaxed)) {
                refusal::at_exit(heap, status);
            }
        });
        gruyere_close();
    }
    ONCE.call_once(|| {
        // SAFETY: the handler is a function of this library, which is never unloaded
        // (`-z nodelete`).
        let code = unsafe { on_exit(leave, std::ptr::null_mut()) };
        if code != 0 {
            log::warn!(
                "on_exit failed: the record will be left in /dev/shm at exit, for `gruyere ps \
                 --sweep`"
            );
        }
    });
}

/// Removes the record's file, and writes what the end of a process writes (the summary, the run of
/// `history:`, the trace). `exit` does the same; this is for a process that leaves by `_exit`, and
/// would count as killed. Memory can still be allocated and freed afterwards. Does nothing the
/// second time, in a child made by fork, or if the library has not allocated in this process.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_close() {
    if fork::is_forked_child() {
        return;
    }
    guarded((), || {
        let Some(heap) = current() else { return };
        if !CLOSED.swap(true, Ordering::Relaxed) {
            run_file::at_exit(heap);
            summary::at_exit(heap);
            // Nothing else is torn down: static destructors and Python's last objects may still
            // free blocks.
            heap.record().close();
            heap.flush_trace();
        }
    });
}
