//! The space of a block: by its lifetime and, on a small device whose memory comes in spans, by its
//! size.
//!
//! Spans never move, and go back to the driver only whole: one small block left in a span keeps all
//! of it. On a small device, of which a slab for each size and stream is a good part, a program
//! near capacity dies of that. There small blocks and slabs have spans of their own, as in torch's
//! caching allocator, and so have blocks below [`MEDIUM`]. On larger devices sizes share spans:
//! apart they hold more. Pages move, and `backing:stitch` needs only one space a lifetime. The
//! figures are in docs/decisions/near-capacity.md.

use crate::lifetime::{LIFETIMES, Lifetime};
use crate::runs::arena::{Arenas, SpaceId};
use crate::small::size_class::SMALL_MAX;

/// Where sizes lie apart, blocks below this are apart from larger ones (bytes): torch's
/// `kMinLargeAlloc`, from which on each block may have a segment of its own.
const MEDIUM: u64 = 10 << 20;

/// The first space of blocks below [`MEDIUM`], and of small ones, where sizes lie apart; the spaces
/// of larger blocks come before them.
const FIRST_MEDIUM: SpaceId = LIFETIMES as SpaceId;
const FIRST_SMALL: SpaceId = 2 * FIRST_MEDIUM;

/// The ordinary spaces: those of no capture and no named pool. They come first in their arena: by
/// size, and for each size one a lifetime.
pub(crate) struct Spaces {
    count: SpaceId,
    /// Smaller large blocks are of medium size.
    medium_below: u64,
}

impl Spaces {
    /// Adds them to `arenas`, which has no space yet. `apart`: sizes lie apart.
    pub(crate) fn new(arenas: &mut Arenas, apart: bool) -> Self {
        let (count, medium_below) =
            if apart { (3 * FIRST_MEDIUM, MEDIUM) } else { (FIRST_MEDIUM, 0) };
        for space in 0..count {
            let added = arenas.add_space(false);
            debug_assert_eq!(added, space, "the arena had spaces");
        }
        Self { count, medium_below }
    }

    /// The space of the largest blocks, and of all blocks where sizes do not lie apart.
    pub(crate) fn of(&self, lifetime: Lifetime) -> SpaceId {
        lifetime as SpaceId
    }

    /// The space of a large block of `size` bytes.
    #[inline(always)]
    pub(crate) fn of_large(&self, lifetime: Lifetime, size: u64) -> SpaceId {
        lifetime as SpaceId + if size < self.medium_below { FIRST_MEDIUM } else { 0 }
    }

    /// The space of a block of `size` bytes, and of its slab.
    pub(crate) fn of_size(&self, lifetime: Lifetime, size: u64) -> SpaceId {
        if size <= SMALL_MAX && self.are_apart() {
            lifetime as SpaceId + FIRST_SMALL
        } else {
            self.of_large(lifetime, size)
        }
    }

    pub(crate) fn are_apart(&self) -> bool {
        self.medium_below > 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = SpaceId> + use<> {
        0..self.count
    }

    /// The spaces of one lifetime.
    pub(crate) fn of_lifetime(&self, lifetime: Lifetime) -> impl Iterator<Item = SpaceId> + use<> {
        self.iter().skip(lifetime as usize).step_by(LIFETIMES)
    }

    /// The lifetime of an ordinary space.
    pub(crate) fn lifetime_of(space: SpaceId) -> Lifetime {
        Lifetime::ALL[space as usize % LIFETIMES]
    }

    pub(crate) fn is_ordinary(&self, space: SpaceId) -> bool {
        space < self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_small_device_sizes_lie_apart() {
        let spaces = Spaces::new(&mut Arenas::default(), true);
        let auto = Lifetime::Auto;
        assert_eq!(spaces.of_size(auto, MEDIUM), spaces.of(auto));
        assert_ne!(spaces.of_size(auto, MEDIUM - 512), spaces.of(auto));
        assert_eq!(spaces.of_size(auto, SMALL_MAX + 512), spaces.of_size(auto, MEDIUM - 512));
        assert!(
            ![MEDIUM, MEDIUM - 512]
                .map(|size| spaces.of_size(auto, size))
                .contains(&spaces.of_size(auto, 512))
        );
    }

    #[test]
    fn elsewhere_a_lifetime_has_one_space() {
        let spaces = Spaces::new(&mut Arenas::default(), false);
        for lifetime in Lifetime::ALL {
            let all = [512, SMALL_MAX + 512, MEDIUM].map(|size| spaces.of_size(lifetime, size));
            assert_eq!(all, [spaces.of(lifetime); 3]);
            assert_eq!(spaces.of_lifetime(lifetime).collect::<Vec<_>>(), [spaces.of(lifetime)]);
        }
        assert_eq!(spaces.iter().count(), LIFETIMES);
    }
}
