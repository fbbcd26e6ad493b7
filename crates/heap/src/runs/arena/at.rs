//! Runs at addresses that the caller names.

use crate::runs::arena::run::{Run, RunId, RunState, SpaceId, UNOWNED};
use crate::runs::arena::{Arenas, Region};
use crate::runs::page_table::BLOCK_LIMIT;
use crate::small::size_class::ALIGNMENT;

impl Arenas {
    /// The region in which an address lies. Looks at all regions: for calls that are seldom made.
    pub(crate) fn region_at(&self, address: u64) -> Option<&Region> {
        self.regions().map(|(_, region)| region).find(|region| region.contains(address))
    }

    /// The runs of a space in the `bytes` from `address` on, by address; empty if no region of the
    /// space is there. Walks the region.
    pub(crate) fn runs_over(
        &self,
        space: SpaceId,
        address: u64,
        bytes: u64,
    ) -> impl Iterator<Item = (RunId, &Run)> {
        let holds = |&&id: &&u32| self.region(id).contains(address);
        let region = self.spaces[space as usize].regions.iter().find(holds);
        let runs = region.into_iter().flat_map(|&region| self.runs_of(region));
        runs.skip_while(move |(_, run)| run.address + run.bytes <= address)
            .take_while(move |(_, run)| run.address < address + bytes)
    }

    /// Whether [`Arenas::allocate_at`] will find numbers for so many runs.
    pub(crate) fn has_room_for(&self, runs: usize) -> bool {
        // Cutting takes at most two new records.
        self.runs.len() + 2 * runs <= BLOCK_LIMIT as usize
    }

    /// A live run of `bytes` at `address` for `stream`. `None`, and nothing done: not all of that
    /// is free and owned by the stream or unowned.
    pub(crate) fn allocate_at(
        &mut self,
        space: SpaceId,
        address: u64,
        bytes: u64,
        stream: u32,
    ) -> Option<RunId> {
        let (mut first, mut end) = (None, address);
        for (id, run) in self.runs_over(space, address, bytes) {
            let is_its = run.stream == stream || run.stream == UNOWNED;
            if run.state != RunState::Free || !is_its {
                return None;
            }
            first = first.or(Some(id));
            end = run.address + run.bytes;
        }
        let mut id = first.filter(|_| end >= address + bytes && self.has_room_for(1))?;
        let mut owner = self.runs[id as usize].stream;
        self.unlist(id);
        while self.runs[id as usize].address + self.runs[id as usize].bytes < address + bytes {
            let next = self.runs[id as usize].next;
            self.unlist(next);
            let epoch = self.runs[next as usize].epoch.max(self.runs[id as usize].epoch);
            self.absorb_next(id);
            self.runs[id as usize].epoch = epoch;
            owner = stream;
        }
        let askew = address - self.runs[id as usize].address;
        let front = (askew != 0).then_some(id);
        if askew != 0 {
            id = self.cut(id, askew);
        }
        let rest = (self.runs[id as usize].bytes > bytes).then(|| self.cut(id, bytes));
        self.make_live(id, stream);
        // Neighbours of the same owner take them in.
        for left in front.into_iter().chain(rest) {
            self.set_free(left, owner, self.runs[left as usize].epoch);
        }
        Some(id)
    }
}

impl Arenas {
    /// A live run of at least `bytes` for `stream`: the whole of the best fit.
    pub(crate) fn allocate_whole(
        &mut self,
        space: SpaceId,
        bytes: u64,
        stream: u32,
    ) -> Option<RunId> {
        let (_, (id, _)) =
            self.spaces.get(space as usize)?.fit(&self.runs, (bytes, ALIGNMENT), false, stream)?;
        let whole = self.runs[id as usize].bytes;
        // A block's bytes beyond its request must fit 32 bits.
        if whole - bytes > u64::from(u32::MAX) - ALIGNMENT {
            return None;
        }
        self.take(id, whole, ALIGNMENT, stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::streams::ALL_STREAMS;
    use crate::runs::arena::UNOWNED;
    use crate::small::size_class::PAGE;

    /// A space with free memory of its only stream: a long region below a short one.
    fn of_one_stream(lowest_fit: bool) -> (Arenas, SpaceId) {
        let mut arenas = Arenas { lowest_fit, ..Arenas::default() };
        let space = arenas.add_space(false);
        for (address, bytes) in [(64 * PAGE, 16 * PAGE), (128 * PAGE, 4 * PAGE)] {
            arenas.add_region(space, address, bytes, (address, bytes), 0);
        }
        (arenas, space)
    }

    #[test]
    fn a_long_request_takes_the_lowest_run_but_a_whole_one_the_shortest() {
        let address = |arenas: &Arenas, id: RunId| arenas.run(id).unwrap().address / PAGE;
        for (lowest_fit, expected) in [(false, 128), (true, 64)] {
            let (mut arenas, space) = of_one_stream(lowest_fit);
            let cut = arenas.allocate(space, 3 * PAGE, ALIGNMENT, 0).unwrap();
            assert_eq!(address(&arenas, cut), expected);
            let (mut arenas, space) = of_one_stream(lowest_fit);
            let whole = arenas.allocate_whole(space, 3 * PAGE, 0).unwrap();
            assert_eq!(address(&arenas, whole), 128);
        }
    }

    #[test]
    fn where_a_second_stream_has_owned_free_memory_a_long_request_takes_the_best_fit() {
        for unowned in [false, true] {
            let (mut arenas, space) = of_one_stream(true);
            arenas.add_region(space, 256 * PAGE, PAGE, (256 * PAGE, PAGE), 1);
            if unowned {
                arenas.add_region(space, 384 * PAGE, PAGE, (384 * PAGE, PAGE), UNOWNED);
            }
            let cut = arenas.allocate(space, 3 * PAGE, ALIGNMENT, 0).unwrap();
            assert_eq!(arenas.run(cut).unwrap().address, 128 * PAGE);
        }
    }

    #[test]
    fn of_a_run_of_its_own_and_an_unowned_one_a_long_request_takes_the_lower_unless_one_is_near() {
        // Pages of the stream's own run and of the unowned one, and the expected owner's.
        for (own, other, expected) in [
            ((64, 16), (128, 8), 64),
            ((128, 8), (64, 16), 64),
            ((64, 16), (128, 3), 128),
            ((128, 3), (64, 3), 128),
        ] {
            let mut arenas = Arenas { lowest_fit: true, ..Arenas::default() };
            let space = arenas.add_space(false);
            for ((address, bytes), stream) in [(own, 0), (other, UNOWNED)] {
                let (address, bytes) = (address * PAGE, bytes * PAGE);
                arenas.add_region(space, address, bytes, (address, bytes), stream);
            }
            let cut = arenas.allocate(space, 3 * PAGE, ALIGNMENT, 0).unwrap();
            assert_eq!(arenas.run(cut).unwrap().address, expected * PAGE, "{own:?} {other:?}");
        }
    }

    #[test]
    fn memory_of_no_stream_and_of_all_streams_leaves_a_space_to_one_stream() {
        let (mut arenas, space) = of_one_stream(true);
        for (place, owner) in [(256, UNOWNED), (384, ALL_STREAMS)] {
            arenas.add_region(space, place * PAGE, PAGE, (place * PAGE, PAGE), owner);
        }
        assert!(arenas.is_of_one_stream(space));
        arenas.add_region(space, 512 * PAGE, PAGE, (512 * PAGE, PAGE), 7);
        assert!(!arenas.is_of_one_stream(space));
    }
}
