//! Pools whose memory comes from outside, under the central lock.
//!
//! Who made such a pool brings segments and takes them back; here they are regions of the pool's
//! spaces, which no supply ever looks at. Their blocks are runs, the small ones too: a segment may
//! begin at any multiple of 512, where no slab could.

use super::Central;
use crate::pools::lifetime::Lifetime;
use crate::pools::{Pool, PoolNumber, Source};
use crate::request::{Request, Want};
use crate::runs::page_table::PageTable;
use crate::shared::Shared;
use crate::small::size_class::{ALIGNMENT, PAGE, round, round_up};
use crate::supply::backing::Span;
use gruyere_record::gauges::SMALL_LIMIT;

/// A block of at least this size has a segment of its own, at first (bytes); smaller ones share
/// segments of [`LARGE_SEGMENT`]: torch's `kMinLargeAlloc` and `kLargeBuffer`.
const MIN_LARGE: u64 = 10 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;

/// The length of a segment for a block of `size` bytes, as torch asks its allocators for them;
/// `None`: beyond all bounds.
pub(crate) fn segment_for(size: u64) -> Option<u64> {
    let size = round_up(size, ALIGNMENT)?;
    if size <= SMALL_LIMIT {
        Some(PAGE)
    } else if size < MIN_LARGE {
        Some(LARGE_SEGMENT)
    } else {
        round_up(size, PAGE)
    }
}

impl Central {
    /// The memory of a pool that has none comes from outside from now on. False: it has some, or
    /// keeps some, or there is no such pool.
    pub(crate) fn open_to_outside(&mut self, number: PoolNumber, split: bool) -> bool {
        let Some(pool) = self.pools.get(number) else { return false };
        let is_empty = pool.spaces().iter().all(|&space| self.arenas.is_empty(space));
        if !is_empty || pool.rules.reserve > 0 || pool.busy > 0 {
            return false;
        }
        let small = self.arenas.add_space(false);
        if !self.pools.open_to_outside(number, small, split) {
            self.arenas.remove_space(small);
        }
        true
    }

    /// The block that `request` asks for, from what a pool has free. `join`: neighbours of
    /// different streams that the request's may both use, too.
    pub(crate) fn block_outside(
        &mut self,
        shared: &Shared,
        number: PoolNumber,
        request: &Request,
        join: bool,
    ) -> Option<u64> {
        let pool = self.pools.get(number)?;
        let (space, bytes) = (pool.space_of_size(request.size), round(request.size));
        let want = Want { space, bytes, align: ALIGNMENT, stream: request.stream };
        let run = match pool.rules.source {
            Source::Outside { split: false } => {
                self.arenas.allocate_whole(space, bytes, request.stream)
            }
            _ if join => want.fit_or_join(&mut self.arenas),
            _ => want.fit(&mut self.arenas),
        }?;
        self.publish_in_pool(shared, number, run, request)
    }

    /// Whether the ceiling has room for a segment of `bytes`.
    pub(crate) fn has_room_outside(&self, bytes: u64) -> bool {
        self.backing.held.checked_add(bytes).is_some_and(|held| held <= self.limit)
    }

    /// Takes in a segment that was brought for a block of `size` bytes. False: it cannot be
    /// managed, or there is no such pool; nothing has changed.
    pub(crate) fn add_outside(
        &mut self,
        shared: &Shared,
        number: PoolNumber,
        size: u64,
        (address, bytes): (u64, u64),
    ) -> bool {
        let Some(pool) = self.pools.get(number).filter(|pool| pool.is_outside()) else {
            return false;
        };
        let space = pool.space_of_size(size);
        if !address.is_multiple_of(ALIGNMENT)
            || !PageTable::reaches(address, bytes)
            || !shared.table.cover(address, bytes)
        {
            return false;
        }
        self.backing.hold_outside(address, bytes);
        let span = Span { address, bytes, origin: address, taken: bytes };
        self.add_span(shared.record, space, span, Lifetime::Auto, 0);
        true
    }

    /// Takes out the segments of a pool in which nothing is in use, as far as `completed` tells of
    /// the streams: addresses and bytes.
    pub(crate) fn take_outside(
        &mut self,
        shared: &Shared,
        number: PoolNumber,
        completed: &dyn Fn(u32) -> u64,
    ) -> Vec<(u64, u64)> {
        let spaces = self.pools.get(number).filter(|pool| pool.is_outside()).map(Pool::spaces);
        let spaces = spaces.map_or_else(Vec::new, <[_]>::to_vec);
        let mut taken = Vec::new();
        for space in spaces {
            for id in self.arenas.empty_regions(space, completed) {
                let (address, bytes) = self.arenas.region(id).span;
                self.backing.unhold_outside(address, bytes);
                self.remove_span(shared.record, id);
                taken.push((address, bytes));
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_as_long_as_torchs() {
        const MIB: u64 = 1 << 20;
        let lengths = [1, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB - 511, 10 * MIB + 1, 30 * MIB];
        assert_eq!(
            lengths.map(segment_for),
            [2, 2, 20, 20, 10, 12, 30].map(|length| Some(length * MIB))
        );
        assert_eq!(segment_for(u64::MAX), None);
    }
}
