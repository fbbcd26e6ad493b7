//! The paths of a request and of a free, and the ladder that a request climbs where nothing fits.

pub(crate) mod block_at;
pub(crate) mod free;
pub(crate) mod ladder;
pub(crate) mod malloc;
pub(crate) mod malloc_at;
pub(crate) mod oom;
pub(crate) mod order_rule;
pub(crate) mod slabs;
pub(crate) mod synchronize;
