//! Small blocks that are runs, as large ones are, and no slots of slabs: all sizes share a page.
//!
//! A slab for each size is right where a program has many blocks of each, and many times what a
//! program needs that has few of any. On a small device whose memory comes in spans (`spaces`) a
//! slab that is little used is what a program dies of. There small blocks are runs until a stream
//! has blocks enough of a size to fill a part of a slab. More than two blocks may start in a page
//! then, which its word in the page table cannot name: it says *overflow*, and they are known here,
//! by address.

use crate::runs::arena::RunId;
use std::collections::{BTreeMap, HashMap};

/// Where sizes lie apart, a slab is made for blocks of a size once a stream has so many of it that
/// are runs as fill one part in this of a slab.
pub(crate) const SLAB_SHARE: u64 = 4;

/// The small blocks of a device's arena. Guarded by its central lock.
#[derive(Default)]
pub struct SmallRuns {
    /// The blocks of pages in which more start than the page table can name, by address.
    pub(crate) overflow: BTreeMap<u64, RunId>,
    /// Small runs that are live or pending: how many, and their bytes.
    pub(crate) small: (u64, u64),
    /// Bytes of those runs by stream and size class.
    pub(crate) by_class: HashMap<(u32, usize), u64>,
}

impl SmallRuns {
    /// The block of an overflow page that starts at `address`.
    pub fn overflow_block(&self, address: u64) -> Option<RunId> {
        self.overflow.get(&address).copied()
    }

    /// Those that are live or pending: how many, and their bytes.
    pub fn small_blocks(&self) -> (u64, u64) {
        self.small
    }
}
