//! Readers of records, in any process: they take no lock and never make the writer wait.

pub mod claim;
pub(crate) mod guard;
pub(crate) mod header;
pub mod memfds;
pub mod open;
pub mod picture;
pub mod reader;
pub mod source;
pub mod sweep;
