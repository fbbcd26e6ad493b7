//! A space: a set of regions whose free runs are searched together, by their owners.

use super::run::RegionId;
use super::size_index::SizeIndex;
use crate::number_set::NumberSet;
use crate::order::streams::{ALL_STREAMS, NUMBERS};

/// A set of regions whose free runs are searched together.
#[derive(Default)]
pub(super) struct Space {
    /// Free runs of each owner, by [`owner_at`].
    pub(super) owners: Vec<Option<Box<SizeIndex>>>,
    /// The places of owners that have free runs: thousands of streams may have had one.
    pub(super) filled: NumberSet,
    pub(super) regions: Vec<RegionId>,
    /// The unmapped ranges.
    pub(super) unmapped: SizeIndex,
    /// Bytes of stale aliases.
    pub(super) stale_alias_bytes: u64,
    /// Runs stay with their stream whatever is done (captures).
    pub(super) private: bool,
}

impl Space {
    #[inline]
    pub(super) fn owner(&self, stream: u32) -> Option<&SizeIndex> {
        self.owners.get(owner_at(stream))?.as_deref()
    }

    pub(super) fn owner_mut(&mut self, stream: u32) -> &mut SizeIndex {
        let at = owner_at(stream);
        if at >= self.owners.len() {
            self.owners.resize_with(at + 1, || None);
        }
        self.filled.reserve(at as u32);
        self.owners[at].get_or_insert_default()
    }

    /// The owners that have free runs, and these.
    pub(super) fn filled(&self) -> impl Iterator<Item = (u32, &SizeIndex)> {
        let index =
            |place| Some((owner_in(place as usize), self.owners.get(place as usize)?.as_deref()?));
        self.filled.iter().filter_map(index)
    }
}

/// The place of a stream's (or the unowned runs') index among the owners of a space: first that of
/// all streams together, then that of unowned runs, then the streams'.
#[inline(always)]
pub(super) const fn owner_at(stream: u32) -> usize {
    (stream.wrapping_add(2) % NUMBERS) as usize
}

/// The owner whose index is in a place.
pub(super) const fn owner_in(place: usize) -> u32 {
    if place == owner_at(ALL_STREAMS) { ALL_STREAMS } else { (place as u32).wrapping_sub(2) }
}
