//! Stream order: how far streams are, what waits for them, and when they may be asked.

pub(crate) mod pending;
pub(crate) mod query_guard;
pub(crate) mod streams;
pub(crate) mod waits;
