//! The lock of the heap's parts.

pub(crate) use parking_lot::{Mutex, MutexGuard};

/// Locks. These locks know no poisoning: a panic of another holder is no reason to stop serving.
#[inline(always)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
