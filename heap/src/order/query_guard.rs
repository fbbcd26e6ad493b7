//! The guard that is held while events of a device are queried, recorded or waited for: no pool
//! scope opens meanwhile.

use std::sync::atomic::{AtomicU32, Ordering};

/// Keeps pool scopes of a device from opening, until it is dropped.
pub(crate) struct QueryGuard<'a>(&'a AtomicU32);

impl<'a> QueryGuard<'a> {
    /// A query that is counted in `queries` from now on.
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
