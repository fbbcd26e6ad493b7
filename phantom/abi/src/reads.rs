//! What the host reads of device memory: counted, and told to whoever wants to know when.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

type Listener = extern "C" fn();

// Copies from devices to the host, and their bytes. Only ever grow.
static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static LISTENER: Mutex<Option<Listener>> = Mutex::new(None);

/// From now on `listener` is called after each copy from a device to the host, on the thread that
/// copies, with no lock of ours held; NULL: nobody is.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_on_host_read(listener: Option<Listener>) {
    *LISTENER.lock().unwrap_or_else(PoisonError::into_inner) = listener;
}

/// The host has read `bytes`.
pub fn note(bytes: u64) {
    COUNT.fetch_add(1, Relaxed);
    BYTES.fetch_add(bytes, Relaxed);
    // The lock is let go before the call, which may wait for others of the program's threads.
    let listener = *LISTENER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(listener) = listener {
        listener();
    }
}

/// Copies so far, and their bytes.
pub fn all() -> (u64, u64) {
    (COUNT.load(Relaxed), BYTES.load(Relaxed))
}
