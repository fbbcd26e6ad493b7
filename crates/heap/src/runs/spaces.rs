//! The space of a block: by its lifetime and, on a small device whose memory comes in spans, by its
//! size.
//!
//! Spans never move, and go back to the driver only whole: one small block left in a span keeps all
//! of it. On a small device, of which a slab for each size and stream is a good part, a program
//! near capacity dies of that. There small blocks and slabs have spans of their own, as in torch's
//! caching allocator, and so have blocks below [`MEDIUM`]. On larger devices sizes share spans:
//! apart they hold more. Pages move, and `backing:stitch` needs only one space a lifetime. The
//! figures are in docs/decisions/near-capacity.md. Where pages move, a heap that holds more than
//! its program needs puts blocks that will be kept into a space of their own ([`kept`]).
//!
//! [`kept`]: crate::runs::kept

use crate::lifetime::{LIFETIMES, Lifetime};
use crate::order::streams::ALL_STREAMS;
use crate::runs::arena::{Arenas, RunId, SpaceId};
use crate::runs::kept::KeptBlocks;
use crate::small::size_class::{PAGE, SMALL_MAX};

/// Where sizes lie apart, blocks below this are apart from larger ones (bytes): torch's
/// `kMinLargeAlloc`, from which on each block may have a segment of its own.
const MEDIUM: u64 = 10 << 20;

/// The first space of blocks below [`MEDIUM`], and of small ones, where sizes lie apart; the spaces
/// of larger blocks come before them.
const FIRST_MEDIUM: SpaceId = LIFETIMES as SpaceId;
const FIRST_SMALL: SpaceId = 2 * FIRST_MEDIUM;
/// The space of blocks that will be kept, where sizes do not lie apart. Its lifetime is
/// [`Lifetime::Auto`]. Those of medium blocks stay empty there.
const KEPT: SpaceId = FIRST_SMALL;

/// The ordinary spaces: those of no capture and no named pool. They come first in their arena: by
/// size, and for each size one a lifetime.
pub(crate) struct Spaces {
    count: SpaceId,
    are_apart: bool,
    /// Sizes of large blocks whose space is not that of their lifetime alone: the least, and how
    /// far they go (bytes).
    unusual: (u64, u64),
    /// Blocks of a page or more, and of no named lifetime, are watched for those that will be kept.
    kept: Option<KeptBlocks>,
}

impl Spaces {
    /// Adds them to `arenas`, which has no space yet. `apart`: sizes lie apart.
    pub(crate) fn new(arenas: &mut Arenas, apart: bool) -> Self {
        let (count, medium) = if apart { (3 * FIRST_MEDIUM, MEDIUM) } else { (KEPT + 1, 0) };
        for space in 0..count {
            let added = arenas.add_space(false);
            debug_assert_eq!(added, space, "the arena had spaces");
        }
        Self { count, are_apart: apart, unusual: (0, medium), kept: None }
    }

    /// The space of the largest blocks, and of all blocks where sizes do not lie apart.
    pub(crate) fn of(&self, lifetime: Lifetime) -> SpaceId {
        lifetime as SpaceId
    }

    /// Whether the space of a large block of `size` bytes is not that of its lifetime alone.
    #[inline(always)]
    fn is_unusual(&self, size: u64) -> bool {
        size.wrapping_sub(self.unusual.0) < self.unusual.1
    }

    /// The space of a large block of `size` bytes; for one that is watched a space without memory,
    /// so that it is not served without [`Spaces::expect`].
    #[inline(always)]
    pub(crate) fn of_large(&self, lifetime: Lifetime, size: u64) -> SpaceId {
        lifetime as SpaceId + if self.is_unusual(size) { FIRST_MEDIUM } else { 0 }
    }

    /// The space of a block of `size` bytes, and of its slab, whatever became of others.
    pub(crate) fn of_size(&self, lifetime: Lifetime, size: u64) -> SpaceId {
        match self.are_apart {
            true if size <= SMALL_MAX => lifetime as SpaceId + FIRST_SMALL,
            true => self.of_large(lifetime, size),
            false => self.of(lifetime),
        }
    }

    /// The space of a large block of `size` bytes for `stream`, by what became of others. `freed`:
    /// bytes of large blocks freed so far.
    pub(crate) fn expect(
        &self,
        (lifetime, size, stream): (Lifetime, u64, u32),
        freed: u64,
    ) -> SpaceId {
        let is_watched = self.is_watched(lifetime, size, stream);
        match &self.kept {
            Some(blocks) if is_watched && blocks.expect(size, stream, freed) => KEPT,
            _ => self.of_size(lifetime, size),
        }
    }

    /// Notes the run of a new large block. Whether it is watched: its free is to be noted.
    pub(crate) fn note_born(
        &mut self,
        run: RunId,
        (lifetime, size, stream): (Lifetime, u64, u32),
        freed: u64,
    ) -> bool {
        let is_watched = self.is_watched(lifetime, size, stream);
        let blocks = self.kept.as_mut().filter(|_| is_watched);
        blocks.is_some_and(|blocks| blocks.born(run, size, stream, freed))
    }

    /// The program's own word on a lifetime counts more. What all streams may use has no order.
    fn is_watched(&self, lifetime: Lifetime, size: u64, stream: u32) -> bool {
        lifetime == Lifetime::Auto && stream != ALL_STREAMS && self.is_unusual(size)
    }

    /// Notes the free of a block that is watched.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_freed(&mut self, run: RunId, freed: u64) {
        if let Some(blocks) = &mut self.kept {
            blocks.freed(run, freed);
        }
    }

    /// From now on blocks are watched, and those that will be kept lie apart; not where sizes do.
    /// Whether that is new.
    pub(crate) fn watch(&mut self) -> bool {
        let is_new = self.kept.is_none() && !self.are_apart;
        if is_new {
            self.kept = Some(KeptBlocks::default());
            self.unusual = (PAGE, u64::MAX - PAGE);
        }
        is_new
    }

    /// Notes the peak of live bytes.
    pub(crate) fn note_peak(&mut self, peak: u64) {
        if let Some(blocks) = &mut self.kept {
            blocks.peak = peak;
        }
    }

    pub(crate) fn are_apart(&self) -> bool {
        self.are_apart
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
            let empty = spaces.of(lifetime) + FIRST_MEDIUM;
            let kept = (lifetime == Lifetime::Auto).then_some(KEPT);
            let expected: Vec<_> = [spaces.of(lifetime), empty].into_iter().chain(kept).collect();
            assert_eq!(spaces.of_lifetime(lifetime).collect::<Vec<_>>(), expected);
        }
        assert_eq!(spaces.iter().count(), 2 * LIFETIMES + 1);
    }

    #[test]
    fn the_hot_path_finds_no_memory_for_a_block_that_is_watched() {
        let mut spaces = Spaces::new(&mut Arenas::default(), false);
        let ([auto, tagged], stream) = ([Lifetime::Auto, Lifetime::Step], 2);
        assert_eq!(spaces.of_large(auto, PAGE), spaces.of(auto));
        assert!(spaces.watch() && !spaces.watch());
        for lifetime in [auto, tagged] {
            assert_eq!(spaces.of_large(lifetime, PAGE - 512), spaces.of(lifetime));
            assert_eq!(spaces.of_large(lifetime, PAGE), spaces.of(lifetime) + FIRST_MEDIUM);
            assert_eq!(spaces.expect((lifetime, PAGE, stream), 0), spaces.of(lifetime));
        }
        assert!(spaces.note_born(1, (auto, PAGE, stream), 0));
        assert!(!spaces.note_born(2, (tagged, PAGE, stream), 0));
        assert!(!spaces.note_born(3, (auto, PAGE, ALL_STREAMS), 0));
        assert!(!spaces.note_born(4, (auto, PAGE - 512, stream), 0));
    }

    #[test]
    fn where_sizes_lie_apart_nothing_is_watched() {
        let mut spaces = Spaces::new(&mut Arenas::default(), true);
        assert!(!spaces.watch());
        assert_eq!(spaces.of_large(Lifetime::Auto, MEDIUM), spaces.of(Lifetime::Auto));
    }
}
