//! The phases of the process for CUDA: before `cuInit`, running, a forked child, at exit.

use crate::gpu;
use crate::owner;
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering::*};

/// The phase of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Before `cuInit`.
    Fresh = 0,
    /// CUDA works.
    Running = 1,
    /// A child forked from a process with CUDA: it has no usable CUDA.
    ForkedChild = 2,
    /// After the exit handlers, with `PHANTOM_EXIT=deinitialize`: calls fail as in an unloaded
    /// driver.
    Gone = 3,
}

/// ```text
/// Fresh --(initialize, once)--> Running --(fork, in the child's only thread)--> ForkedChild
///                               Running --(exit handler, only with PHANTOM_EXIT=deinitialize)-->
///                               Gone
/// ```
static PHASE: AtomicU8 = AtomicU8::new(Phase::Fresh as u8);

/// Calls of forked children, in a page shared by parent and children. Null until initialisation,
/// constant afterwards.
static FORKED_CALLS: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

pub fn phase() -> Phase {
    match PHASE.load(Acquire) {
        0 => Phase::Fresh,
        1 => Phase::Running,
        2 => Phase::ForkedChild,
        _ => Phase::Gone,
    }
}

/// The work of `cuInit`; the runtime does it implicitly.
pub fn initialize() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        owner::admit();
        // SAFETY: plain libc calls with valid arguments; the handlers are functions of this
        // library, which is never unloaded.
        unsafe {
            let page = libc::mmap(
                ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if page != libc::MAP_FAILED {
                FORKED_CALLS.store(page.cast(), Release);
            }
            libc::pthread_atfork(None, None, Some(in_forked_child));
            if std::env::var_os("PHANTOM_EXIT").is_some_and(|v| v == "deinitialize") {
                libc::atexit(at_exit);
            }
        }
        gpu::start();
        PHASE.store(Phase::Running as u8, Release);
    });
}

extern "C" fn in_forked_child() {
    if phase() == Phase::Running {
        PHASE.store(Phase::ForkedChild as u8, Release);
    }
}

extern "C" fn at_exit() {
    if phase() == Phase::Running {
        PHASE.store(Phase::Gone as u8, Release);
    }
}

pub fn count_forked_call() {
    if let Some(counter) = NonNull::new(FORKED_CALLS.load(Acquire)) {
        // SAFETY: the page was mapped zeroed, is aligned, shared with the parent, and never
        // unmapped.
        unsafe { counter.as_ref() }.fetch_add(1, Relaxed);
    }
}

/// Calls of this process's forked children.
pub fn forked_calls() -> u64 {
    // SAFETY: as in `count_forked_call`.
    NonNull::new(FORKED_CALLS.load(Acquire))
        .map_or(0, |counter| unsafe { counter.as_ref() }.load(Relaxed))
}
