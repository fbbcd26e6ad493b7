//! Free runs that serve whole: a segment that must not be split has one block.

use super::{Arenas, RunId, SpaceId};
use crate::small::size_class::ALIGNMENT;

impl Arenas {
    /// A live run of at least `bytes` for `stream`: the whole of the best fit.
    pub fn allocate_whole(&mut self, space: SpaceId, bytes: u64, stream: u32) -> Option<RunId> {
        let id = self.best_fit(space, bytes, ALIGNMENT, stream)?;
        let whole = self.runs[id as usize].bytes;
        // What a block has beyond its request must be told in 32 bits.
        if whole - bytes > u64::from(u32::MAX) - ALIGNMENT {
            return None;
        }
        self.take(id, whole, ALIGNMENT, stream)
    }
}
