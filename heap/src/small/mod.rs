//! Small blocks: size classes, slabs of equal slots, and the lanes in which streams find them.

pub(crate) mod bins;
pub(crate) mod lane;
pub mod size_class;
pub(crate) mod slab;
pub(crate) mod small_runs;
