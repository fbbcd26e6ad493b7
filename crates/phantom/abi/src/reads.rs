//! The host's reads of device memory: counted, and reported to a listener.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

type Listener = extern "C" fn();

// Copies from devices to the host, and their bytes. Monotonic.
static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static LISTENER: Mutex<Option<Listener>> = Mutex::new(None);

/// Registers a `listener`, called after each copy from a device to the host, on the copying thread,
/// with no lock of ours held; NULL: none.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_on_host_read(listener: Option<Listener>) {
    *LISTENER.lock().unwrap_or_else(PoisonError::into_inner) = listener;
}

/// The host has read `bytes`.
pub fn note(bytes: u64) {
    COUNT.fetch_add(1, Relaxed);
    BYTES.fetch_add(bytes, Relaxed);
    // The lock is released before the call, which may wait for other threads of the program.
    let listener = *LISTENER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(listener) = listener {
        listener();
    }
}

/// Copies so far, and their bytes.
pub fn all() -> (u64, u64) {
    (COUNT.load(Relaxed), BYTES.load(Relaxed))
}
