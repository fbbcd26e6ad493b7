//! What lies where: every segment of a device and the blocks that tile it, from the heap's own
//! books.
//!
//! A segment is a contiguous range of memory held: a span, a row of mapped pages, a block of
//! `backing:passthrough`. Shards and the central part are looked at one after the other, so beside
//! threads that allocate meanwhile, a slab may be told as it was some microseconds before the rest.

pub use crate::report::segment::{Block, BlockState, Holder, Segment};
use crate::report::stats::CapturePoolHeld;

/// All segments of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The segments, by address.
    pub segments: Vec<Segment>,
    /// Bytes held that are mapped nowhere.
    pub unmapped: u64,
    /// What each capture pool of torch's holds.
    pub pools: Vec<CapturePoolHeld>,
    /// Small blocks that are told as one with others of their slab, because there were too many.
    pub merged: u64,
}
