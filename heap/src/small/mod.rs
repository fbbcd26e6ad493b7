//! Small blocks: size classes, slabs of equal slots, and the lanes in which streams find them.

pub(crate) mod bins;
pub mod lane;
pub mod size_class;
pub mod slab;
pub(crate) mod small_runs;
