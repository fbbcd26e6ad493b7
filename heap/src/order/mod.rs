//! What stream order allows: how far streams are, what waits for them, and who may ask.

pub(crate) mod pending;
pub(crate) mod query_guard;
pub(crate) mod streams;
pub(crate) mod waits;
