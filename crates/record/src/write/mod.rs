//! The writer of a record: the process whose memory it describes.

pub mod peaks;
pub(crate) mod shard;
pub(crate) mod slots;
pub(crate) mod writer;
