//! Detects that this process is a forked child.
//!
//! A child of `fork` has the parent's memory, but neither its threads (a lock may be held for good)
//! nor its CUDA. So every entry of the library asks [`is_forked_child`] first and returns at once;
//! DataLoader workers free inherited tensors that way.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this process was forked from one that had [`watch`]ed.
///
/// ```text
/// state   meaning                     changed by
/// false   the process that watches    -> true: the atfork handler, in a child, before any code of
///                                     the child runs
/// true    a child of it               never again; its own children inherit it
/// ```
///
/// Relaxed: the handler runs on the only thread that the child has.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Marks children forked from now on. Idempotent.
///
/// Call it before creating the first state that a child must not touch (the driver, the record),
/// not when the library is loaded: a child forked earlier may use the library itself.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler is a function of this library, which is never unloaded (`-z
        // nodelete`). The only error is ENOMEM, for which there is no better answer.
        let code = unsafe { libc::pthread_atfork(None, None, Some(mark_child)) };
        if code != 0 {
            log::warn!(
                "pthread_atfork failed (errno {code}): forked children must not use inherited \
                 tensors"
            );
        }
    });
}

/// True in a child forked after [`watch`]. One relaxed load.
#[inline]
pub fn is_forked_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Async-signal-safe, as code between a fork and an exec must be: stores, and a close.
unsafe extern "C" fn mark_child() {
    FORKED.store(true, Ordering::Relaxed);
    super::process::forget();
    super::sharing::forget();
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    super::preload::mode::fall_back();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of `question` in a forked child.
    fn in_a_child(question: fn() -> bool) -> bool {
        // SAFETY: the child calls async-signal-safe functions only and leaves by _exit.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork failed");
        if child == 0 {
            let code = i32::from(question());
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "the child died: status {status}");
        libc::WEXITSTATUS(status) == 1
    }

    #[test]
    fn a_child_knows_that_it_is_one_and_the_parent_that_it_is_not() {
        assert!(!in_a_child(is_forked_child), "forked before anybody watched");
        watch();
        watch();
        assert!(in_a_child(is_forked_child));
        assert!(in_a_child(|| in_a_child(is_forked_child)), "a grandchild");
        assert!(!is_forked_child());
    }
}
