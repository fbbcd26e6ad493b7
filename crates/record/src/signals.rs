//! Threads that take none of the program's signals.

/// Runs `body`, which starts a thread, with all signals blocked, so that the program's handlers run
/// on the program's threads.
pub fn without_signals<T>(body: impl FnOnce() -> T) -> T {
    // SAFETY: valid places for both sets; this thread's mask, restored below.
    unsafe {
        let (mut all, mut before) =
            (std::mem::zeroed::<libc::sigset_t>(), std::mem::zeroed::<libc::sigset_t>());
        libc::sigfillset(&mut all);
        let changed = libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before) == 0;
        let result = body();
        if changed {
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        }
        result
    }
}
