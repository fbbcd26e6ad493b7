//! What stream order allows: how far streams are, what waits for them, and who may ask.

pub(crate) mod asking;
pub(crate) mod pending;
pub mod streams;
pub(crate) mod waits;
