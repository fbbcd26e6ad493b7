//! The heap's reports of itself: figures, snapshots, causes of an out-of-memory, the history.

pub(crate) mod books;
pub(crate) mod cause;
pub(crate) mod dump;
pub(crate) mod history;
pub mod rungs;
pub mod segment_stats;
pub mod snapshot;
pub(crate) mod stats;
pub(crate) mod usage;
pub(crate) mod validate;
pub(crate) mod walk;
