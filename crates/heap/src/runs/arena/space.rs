//! Spaces: sets of regions whose free runs are searched together, by owner.

use crate::number_set::NumberSet;
use crate::order::streams::{ALL_STREAMS, NUMBERS};
use crate::runs::arena::Arenas;
use crate::runs::arena::run::{RegionId, Run, RunId, SpaceId, UNOWNED};
use crate::runs::arena::size_index::{SizeIndex, is_near};

/// A set of regions whose free runs are searched together.
#[derive(Default)]
pub(crate) struct Space {
    /// Free runs of each owner, by [`owner_at`].
    pub(crate) owners: Vec<Option<Box<SizeIndex>>>,
    /// The places of owners with free runs: thousands of streams may have had some.
    pub(crate) filled: NumberSet,
    pub(crate) regions: Vec<RegionId>,
    pub(crate) unmapped: SizeIndex,
    /// Bytes of stale aliases.
    pub(crate) stale_alias_bytes: u64,
    /// Runs stay with their stream whatever happens (captures).
    pub(crate) private: bool,
    /// More than one stream has owned free memory here.
    pub(crate) several_streams: bool,
}

impl Space {
    #[inline]
    pub(crate) fn owner(&self, stream: u32) -> Option<&SizeIndex> {
        self.owners.get(owner_at(stream))?.as_deref()
    }

    pub(crate) fn owner_mut(&mut self, stream: u32) -> &mut SizeIndex {
        let at = owner_at(stream);
        if at >= self.owners.len() {
            self.owners.resize_with(at + 1, || None);
        }
        self.filled.reserve(at as u32);
        if self.owners[at].is_none() && at >= owner_at(0) {
            self.several_streams = self.owners.iter().skip(owner_at(0)).flatten().count() > 0;
        }
        self.owners[at].get_or_insert_default()
    }

    /// Whether some free runs are unowned, so that a stream may have a choice.
    #[inline(always)]
    pub(crate) fn has_unowned(&self) -> bool {
        matches!(self.owners.get(owner_at(UNOWNED)), Some(Some(unowned)) if unowned.count != 0)
    }

    /// Whether long requests take the lowest of several fits here, if `wanted`: with several
    /// streams that holds more where the device lags.
    #[inline(always)]
    pub(crate) fn takes_lowest(&self, wanted: bool) -> bool {
        wanted && !self.several_streams
    }

    /// The fit for `bytes` at a multiple of `align` among the stream's own free runs and unowned
    /// ones: its owner's place, its number and its length. The best, or if `lowest`, the lower of
    /// [the lowest of several](SizeIndex::fit) of each. Of two equal ones the stream takes its own,
    /// and leaves the other to streams without a choice.
    #[inline(never)]
    pub(crate) fn fit(
        &self,
        runs: &[Run],
        (bytes, align): (u64, u64),
        lowest: bool,
        stream: u32,
    ) -> Option<(usize, (RunId, u64))> {
        let fit = |stream: u32| {
            let index = self.owner(stream).filter(|index| index.count != 0)?;
            Some((owner_at(stream), index.fit(runs, bytes, align, lowest)?))
        };
        let rank = |&(_, (id, length)): &(usize, (RunId, u64))| {
            let by_address = lowest && !is_near(bytes, length);
            (by_address, if by_address { runs[id as usize].address } else { length })
        };
        match (fit(stream), fit(UNOWNED)) {
            (Some(own), Some(other)) => Some(if rank(&other) < rank(&own) { other } else { own }),
            (own, other) => own.or(other),
        }
    }

    /// The owners with free runs, and these.
    pub(crate) fn filled(&self) -> impl Iterator<Item = (u32, &SizeIndex)> {
        let index =
            |place| Some((owner_in(place as usize), self.owners.get(place as usize)?.as_deref()?));
        self.filled.iter().filter_map(index)
    }
}

/// The place of a stream's (or the unowned runs') index among the owners of a space: first all
/// streams together, then unowned runs, then the streams.
#[inline(always)]
pub(crate) const fn owner_at(stream: u32) -> usize {
    (stream.wrapping_add(2) % NUMBERS) as usize
}

/// The owner at a place.
pub(crate) const fn owner_in(place: usize) -> u32 {
    if place == owner_at(ALL_STREAMS) { ALL_STREAMS } else { (place as u32).wrapping_sub(2) }
}

impl Arenas {
    /// Whether one stream at most has ever owned free memory in a space.
    pub(crate) fn is_of_one_stream(&self, space: SpaceId) -> bool {
        !self.spaces[space as usize].several_streams
    }

    /// Notes that the stream is past more than before: [`Arenas::promote_ripe`] looks at what it
    /// freed.
    pub(crate) fn note_further(&mut self, stream: u32) {
        self.ripe.insert(owner_at(stream) as u32);
    }

    /// A stream that is past some of its free runs which [`Arenas::promote_ripe`] would not look
    /// at; a bug, unless the stream is `known` to have got further since the last promotion.
    pub(crate) fn overlooked(
        &self,
        completed: &dyn Fn(u32) -> u64,
        known: &dyn Fn(u32) -> bool,
    ) -> Option<u32> {
        let shared = self.spaces.iter().filter(|space| !space.private);
        let mut owners = shared.flat_map(Space::filled).filter(|(owner, _)| *owner != UNOWNED);
        let is_it = |(owner, index): &(u32, &SizeIndex)| {
            index.oldest <= completed(*owner)
                && !self.ripe.contains(owner_at(*owner) as u32)
                && !known(*owner)
        };
        owners.find(is_it).map(|(owner, _)| owner)
    }

    /// Makes unowned the free runs of `spaces` whose streams are past them; `completed` is the last
    /// epoch that a stream is past. Looks only at what has become free, or whose stream was noted
    /// to be further, since the last call: always call it with the same spaces.
    pub(crate) fn promote_ripe(
        &mut self,
        spaces: impl Iterator<Item = SpaceId>,
        completed: &dyn Fn(u32) -> u64,
    ) {
        // Asked at every miss; in most cases no stream has got further.
        if self.ripe.is_empty() {
            return;
        }
        let mut ripe = std::mem::take(&mut self.ripe);
        for space in spaces {
            if !self.spaces[space as usize].private {
                ripe.iter()
                    .for_each(|place| self.make_owner_unowned(space, place as usize, completed));
            }
        }
        ripe.clear();
        self.ripe = ripe;
    }

    /// Makes unowned the free runs whose streams are past them; `completed` is the last epoch that
    /// a stream is past.
    pub(crate) fn promote(&mut self, space: SpaceId, completed: &dyn Fn(u32) -> u64) {
        if !self.spaces[space as usize].private {
            self.make_unowned(space, completed);
        }
    }

    /// [`Arenas::promote`] for private spaces too, once every use of the space is known to be over.
    pub(crate) fn make_unowned(&mut self, space: SpaceId, completed: &dyn Fn(u32) -> u64) {
        let places: Vec<u32> = self.spaces[space as usize].filled.iter().collect();
        for place in places {
            self.make_owner_unowned(space, place as usize, completed);
        }
    }

    fn make_owner_unowned(&mut self, space: SpaceId, place: usize, completed: &dyn Fn(u32) -> u64) {
        let owner = owner_in(place);
        let index = self.spaces[space as usize].owners.get(place).and_then(Option::as_deref);
        let Some(index) = index.filter(|index| index.count > 0 && owner != UNOWNED) else { return };
        let completed = completed(owner);
        if index.oldest > completed {
            return;
        }
        let mut found = std::mem::take(&mut self.scratch);
        found.clear();
        index.collect(&self.runs, &mut found);
        let mut oldest = u64::MAX;
        for &id in &found {
            let epoch = self.runs[id as usize].epoch;
            if epoch > completed {
                oldest = oldest.min(epoch);
                continue;
            }
            self.unlist(id);
            // Unowned neighbours take it in; another of `found` is not unowned yet, so none is
            // lost.
            self.set_free(id, UNOWNED, 0);
        }
        self.spaces[space as usize].owner_mut(owner).oldest = oldest;
        self.scratch = found;
    }

    /// Whether `stream` owns free memory of the space that it freed in `epoch` or before.
    pub(crate) fn has_freed(&self, space: SpaceId, stream: u32, epoch: u64) -> bool {
        self.spaces[space as usize]
            .owner(stream)
            .is_some_and(|index| index.count > 0 && index.oldest <= epoch)
    }

    /// The shortest free run of any owner that has `bytes` at a multiple of `align` and is usable
    /// (by owner and epoch). Walks all free runs that are long enough.
    pub(crate) fn best_fit_ordered(
        &self,
        space: SpaceId,
        bytes: u64,
        align: u64,
        is_usable: &dyn Fn(u32, u64) -> bool,
    ) -> Option<RunId> {
        let is_usable = |id: &RunId| {
            let run = &self.runs[*id as usize];
            is_usable(run.stream, run.epoch)
        };
        self.fitting(space, bytes, align)
            .filter(is_usable)
            .min_by_key(|&id| (self.runs[id as usize].bytes, self.runs[id as usize].address))
    }

    /// The free runs of a space, of any owner, that have `bytes` at a multiple of `align`.
    pub(crate) fn fitting(
        &self,
        space: SpaceId,
        bytes: u64,
        align: u64,
    ) -> impl Iterator<Item = RunId> {
        let mut ids = Vec::new();
        for (_, index) in
            self.spaces[space as usize].filled().filter(|(_, index)| index.bytes >= bytes)
        {
            index.each_from(&self.runs, bytes, |id| ids.push(id));
        }
        ids.into_iter().filter(move |&id| self.runs[id as usize].fits(bytes, align))
    }

    /// Gives free run `id` to the stream, as of `epoch`.
    pub(crate) fn hand_over(&mut self, id: RunId, stream: u32, epoch: u64) {
        self.unlist(id);
        self.set_free(id, stream, epoch);
    }

    /// Free bytes of a space.
    pub(crate) fn free_bytes(&self, space: SpaceId) -> u64 {
        self.spaces[space as usize].filled().map(|(_, index)| index.bytes).sum()
    }

    /// Whether a stream other than `stream` owns free memory of a space.
    pub(crate) fn others_own(&self, space: SpaceId, stream: u32) -> bool {
        self.spaces[space as usize].filled().any(|(owner, _)| owner != stream && owner != UNOWNED)
    }

    /// Free bytes of a space that belong to `stream`, or to [`UNOWNED`].
    pub(crate) fn own_free_bytes(&self, space: SpaceId, stream: u32) -> u64 {
        self.spaces[space as usize].owner(stream).map_or(0, |index| index.bytes)
    }
}
