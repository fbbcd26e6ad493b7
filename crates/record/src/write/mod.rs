//! The writer of a record: the process whose memory it describes.

mod kept_copy;
pub mod peaks;
pub(crate) mod shard;
pub(crate) mod slots;
pub(crate) mod writer;
