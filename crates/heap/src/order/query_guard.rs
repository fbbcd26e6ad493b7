//! The guard around queries, records and waits of a device's events: no pool scope opens while it
//! is held.

use std::sync::atomic::{AtomicU32, Ordering};

/// Keeps pool scopes of a device from opening until dropped.
pub(crate) struct QueryGuard<'a>(&'a AtomicU32);

impl<'a> QueryGuard<'a> {
    /// Counts a query in `queries` until dropped.
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
