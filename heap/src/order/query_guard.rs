//! The right to ask the streams of a device.

use std::sync::atomic::{AtomicU32, Ordering};

/// The right to ask the streams of a device, until it is dropped.
pub struct QueryGuard<'a>(&'a AtomicU32);

impl<'a> QueryGuard<'a> {
    /// One more of those that `queries` counts.
    pub(crate) fn new(queries: &'a AtomicU32) -> Self {
        queries.fetch_add(1, Ordering::SeqCst);
        Self(queries)
    }
}

impl Drop for QueryGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
