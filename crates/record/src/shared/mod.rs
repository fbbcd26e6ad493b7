//! The shared mapping: its layout, and the protocol of each structure in it, for both sides.

pub mod block_map;
pub mod calls;
pub mod clock;
pub mod device_gauge;
pub mod facts;
pub mod gauges;
pub mod histogram;
mod launcher;
pub mod layout;
pub mod mapping;
pub mod ring;
pub mod segments;
pub mod seqlock;
pub mod shard_ring;
pub mod sites;
pub mod sync;
pub mod timeline;
pub mod totals;
