//! The right to ask the streams of a device.

use std::sync::atomic::{AtomicU32, Ordering};

/// The right to ask the streams of a device, until it is dropped.
pub struct Asking<'a>(&'a AtomicU32);

impl<'a> Asking<'a> {
    /// One more of those that `askers` counts.
    pub(crate) fn raise(askers: &'a AtomicU32) -> Self {
        askers.fetch_add(1, Ordering::SeqCst);
        Self(askers)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
