//! Small blocks: size classes, slabs of equal slots, and the shards in which streams find them.

pub(crate) mod shard;
pub(crate) mod size_class;
pub(crate) mod slab;
