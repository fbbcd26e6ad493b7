//! Signals that this process inherited as ignored: the program must inherit them as ignored too
//! (`nohup`, a shell's `&`).

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether SIGPIPE was ignored. Rust's start-up ignores it before `main`, so we check earlier.
///
/// ```text
///   false -> true    the initialiser below, before there is a second thread
/// ```
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = note;

extern "C" fn note() {
    PIPE_IGNORED.store(is_ignored_now(libc::SIGPIPE), Ordering::Relaxed);
}

/// Whether `signal` was ignored when this process started.
pub fn was_ignored(signal: libc::c_int) -> bool {
    if signal == libc::SIGPIPE {
        PIPE_IGNORED.load(Ordering::Relaxed)
    } else {
        is_ignored_now(signal)
    }
}

fn is_ignored_now(signal: libc::c_int) -> bool {
    // SAFETY: all-zero is a valid value; the call only writes it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}
