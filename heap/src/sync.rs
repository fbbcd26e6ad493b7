//! The lock of the heap's parts.

pub(crate) use parking_lot::{Mutex, MutexGuard};

/// Locks; a panic of another holder is no reason to stop serving, so these locks know none.
#[inline(always)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
