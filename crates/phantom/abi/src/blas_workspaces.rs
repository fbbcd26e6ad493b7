//! The workspaces that the program gives to cuBLAS, reported to a listener.

use std::sync::{Mutex, PoisonError};

type Listener = extern "C" fn(address: usize);

static LISTENER: Mutex<Option<Listener>> = Mutex::new(None);

/// Registers a `listener`, called with the address of each workspace that the program gives to
/// cuBLAS, on the calling thread, with no lock of ours held; NULL: none.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_on_workspace(listener: Option<Listener>) {
    *LISTENER.lock().unwrap_or_else(PoisonError::into_inner) = listener;
}

/// The program has given the memory at `address` to cuBLAS; 0: none.
pub fn note(address: usize) {
    // The lock is released before the call, which may wait for other threads of the program.
    let listener = *LISTENER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(listener) = listener.filter(|_| address != 0) {
        listener(address);
    }
}
