//! Runs: contiguous address space, free or live, cut and merged inside regions.
//!
//! A region is one piece of memory from the driver; its runs tile it in address order. A space is a
//! set of regions whose free runs are searched together: one a lifetime, one a capture pool. Slabs
//! are runs too, at multiples of 64 KiB, in the gaps that large blocks leave. A free run belongs
//! to the stream that used it last, which may reuse it at once. It belongs to no stream
//! ([`UNOWNED`]) once an event has shown that the stream is past the free. Neighbours of one owner
//! are always merged; those of different owners are joined when a stream that may use both needs
//! them ([`Arenas::join`]). The caller says through epochs what is safe to reuse.

mod at;
pub(crate) mod audit;
mod run;
mod size_index;
mod space;
mod unmapped;

use crate::number_set::NumberSet;
use crate::order::streams::{ALL_STREAMS, NUMBERS, Streams};
use crate::runs::page_table::BLOCK_LIMIT;
use crate::small::size_class::{ALIGNMENT, PAGE};
use gruyere_record::SegmentSlot;
pub(crate) use run::{
    Label, Region, RegionId, Run, RunId, RunState, SHARED, SpaceId, UNOWNED, WATCHED,
};
use run::{NO_RUN, RunPlace};
use size_index::SizeIndex;
use space::{Space, owner_at, owner_in};
use std::collections::BTreeMap;
pub(crate) use unmapped::{Movable, MovablePages, Plan};

/// All runs of a device.
#[derive(Default)]
pub(crate) struct Arenas {
    runs: Vec<Run>,
    unused_runs: Vec<RunId>,
    regions: Vec<Region>,
    unused_regions: Vec<RegionId>,
    spaces: Vec<Space>,
    unused_spaces: Vec<SpaceId>,
    /// Runs wanted at multiples of a page come only whole (`Heap::dedicate_allocations`).
    pub(crate) whole_runs: bool,
    /// In spaces of one stream, long requests without a near fit take the lowest of several: what
    /// stays gathers at low addresses, and free memory stays in one piece.
    pub(crate) lowest_fit: bool,
    scratch: Vec<RunId>,
    /// The places of owners that may have free runs which their streams are past by now
    /// ([`Arenas::note_further`]).
    ripe: NumberSet,
    stale_aliases: BTreeMap<u64, RunId>,
    changes: u64,
    /// Bytes of live and pending runs, and their highest since [`Arenas::take_busy_peak`].
    busy: u64,
    busy_peak: u64,
    /// The highest that samples have taken since [`Arenas::take_busy_peak`].
    sampled_peak: u64,
}

impl Arenas {
    /// A new, empty space. The runs of a `private` one stay with their streams.
    pub(crate) fn add_space(&mut self, private: bool) -> SpaceId {
        let space = Space { private, ..Space::default() };
        match self.unused_spaces.pop() {
            Some(id) => {
                self.spaces[id as usize] = space;
                id
            }
            None => {
                self.spaces.push(space);
                self.spaces.len() as SpaceId - 1
            }
        }
    }

    /// Frees the number of a space without regions.
    pub(crate) fn remove_space(&mut self, id: SpaceId) {
        debug_assert!(self.spaces[id as usize].regions.is_empty());
        self.unused_spaces.push(id);
    }

    /// Adds a region as one free run, owned by `stream` or unowned.
    pub(crate) fn add_region(
        &mut self,
        space: SpaceId,
        address: u64,
        bytes: u64,
        span: (u64, u64),
        stream: u32,
    ) -> RegionId {
        let region = Region {
            address,
            bytes,
            span,
            space,
            slot: SegmentSlot::NONE,
            first: NO_RUN,
            in_use: true,
            stitched: false,
        };
        let id = self.new_region(region);
        let run = self.new_run(address, bytes, id);
        self.regions[id as usize].first = run;
        self.set_free(run, stream, 0);
        id
    }

    fn new_region(&mut self, region: Region) -> RegionId {
        let space = region.space;
        let id = match self.unused_regions.pop() {
            Some(id) => {
                self.regions[id as usize] = region;
                id
            }
            None => {
                self.regions.push(region);
                self.regions.len() as RegionId - 1
            }
        };
        self.spaces[space as usize].regions.push(id);
        id
    }

    /// Removes a wholly free (or wholly unmapped) region and returns it.
    pub(crate) fn remove_region(&mut self, id: RegionId) -> Region {
        let region = self.regions[id as usize].clone();
        let mut run = region.first;
        while run != NO_RUN {
            debug_assert!(matches!(
                self.runs[run as usize].state,
                RunState::Free | RunState::Unmapped
            ));
            let next = self.runs[run as usize].next;
            self.unlist(run);
            self.put_unused(run);
            run = next;
        }
        self.regions[id as usize].in_use = false;
        self.unused_regions.push(id);
        self.spaces[region.space as usize].regions.retain(|&other| other != id);
        region
    }

    pub(crate) fn region(&self, id: RegionId) -> &Region {
        &self.regions[id as usize]
    }

    pub(crate) fn set_region_slot(&mut self, id: RegionId, slot: SegmentSlot) {
        self.regions[id as usize].slot = slot;
    }

    pub(crate) fn regions(&self) -> impl Iterator<Item = (RegionId, &Region)> {
        self.regions
            .iter()
            .enumerate()
            .filter(|(_, region)| region.in_use)
            .map(|(id, region)| (id as RegionId, region))
    }

    /// The regions of a space whose runs are all free, and unowned or of streams that are past them
    /// (`completed`).
    pub(crate) fn empty_regions(
        &self,
        space: SpaceId,
        completed: &dyn Fn(u32) -> u64,
    ) -> Vec<RegionId> {
        let is_empty = |id: &RegionId| {
            if self.regions[*id as usize].stitched {
                return false;
            }
            let mut run_id = self.regions[*id as usize].first;
            while run_id != NO_RUN {
                let run = &self.runs[run_id as usize];
                let passed = run.stream == UNOWNED || run.epoch <= completed(run.stream);
                if run.state != RunState::Free || !passed {
                    return false;
                }
                run_id = run.next;
            }
            true
        };
        self.spaces[space as usize].regions.iter().copied().filter(is_empty).collect()
    }

    #[inline]
    pub(crate) fn run(&self, id: RunId) -> Option<&Run> {
        self.runs.get(id as usize)
    }

    /// A run, for notes about its block.
    #[inline]
    pub(crate) fn run_mut(&mut self, id: RunId) -> Option<&mut Run> {
        self.runs.get_mut(id as usize)
    }

    /// All live and pending runs.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (RunId, &Run)> {
        self.runs
            .iter()
            .enumerate()
            .filter(|(_, run)| matches!(run.state, RunState::Live | RunState::Pending))
            .map(|(id, run)| (id as RunId, run))
    }

    /// The streams of all runs; some more than once.
    pub(crate) fn streams(&self) -> impl Iterator<Item = u32> {
        self.runs.iter().filter(|run| run.state != RunState::Unused).map(|run| run.stream)
    }

    /// A live run of `bytes` at a multiple of `align` for `stream`, from a free run of its own or
    /// an unowned one.
    pub(crate) fn allocate(
        &mut self,
        space: SpaceId,
        bytes: u64,
        align: u64,
        stream: u32,
    ) -> Option<RunId> {
        if align <= ALIGNMENT {
            return self.allocate_block(space, bytes, stream, Label::default()).map(|(id, _)| id);
        }
        let id = self.fit(space, bytes, align, stream)?;
        self.take(id, bytes, align, stream)
    }

    /// [`Arenas::allocate`] at any multiple of [`ALIGNMENT`], for the block that `label` describes;
    /// returns its address too. The front of the free run becomes live: a longer run keeps its
    /// number and its place and only shrinks, and the block gets a new number, so at most one list
    /// is touched.
    #[inline(always)]
    pub(crate) fn allocate_block(
        &mut self,
        space: SpaceId,
        bytes: u64,
        stream: u32,
        label: Label,
    ) -> Option<(RunId, u64)> {
        let space = self.spaces.get_mut(space as usize)?;
        let lowest = space.takes_lowest(self.lowest_fit);
        let (owner, found) = if space.has_unowned() {
            let (owner, found) = space.fit(&self.runs, (bytes, ALIGNMENT), lowest, stream)?;
            (owner, Some(found))
        } else {
            (owner_at(stream), None)
        };
        let Space { owners, filled, .. } = space;
        let index = owners.get_mut(owner)?.as_deref_mut()?;
        let (id, whole) = match found {
            Some(found) => found,
            None => index.fit(&self.runs, bytes, ALIGNMENT, lowest)?,
        };
        let left = whole.wrapping_sub(bytes);
        if left == 0 {
            let runs = &mut self.runs[..];
            let run = runs.get_mut(id as usize)?;
            run.become_block(stream, label);
            let address = run.address;
            if index.remove(runs, id) {
                filled.remove(owner as u32);
            }
            self.busy += bytes;
            self.busy_peak = self.busy_peak.max(self.busy);
            return Some((id, address));
        }
        let new = match self.unused_runs.pop() {
            Some(new) => new,
            None => one_more(&mut self.runs)?,
        };
        self.busy += bytes;
        self.busy_peak = self.busy_peak.max(self.busy);
        let runs = &mut self.runs[..];
        let run = runs.get_mut(id as usize)?;
        let Run { address, epoch, region, previous, .. } = *run;
        (run.address, run.previous) = (address + bytes, new);
        index.resize(runs, id, left);
        let front = runs.get_mut(new as usize)?;
        (front.address, front.bytes, front.epoch, front.region) = (address, bytes, epoch, region);
        (front.previous, front.next) = (previous, id);
        front.become_block(stream, label);
        match runs.get_mut(previous as usize) {
            Some(previous) => previous.next = new,
            None => self.regions[region as usize].first = new,
        }
        Some((new, address))
    }

    fn fit(&self, space: SpaceId, bytes: u64, align: u64, stream: u32) -> Option<RunId> {
        let space = self.spaces.get(space as usize)?;
        let lowest = space.takes_lowest(self.lowest_fit);
        space.fit(&self.runs, (bytes, align), lowest, stream).map(|(_, (id, _))| id)
    }

    /// [`Arenas::allocate`] from joined neighbours of different owners, all of which `stream` may
    /// use; takes the shortest such row.
    pub(crate) fn join(
        &mut self,
        space: SpaceId,
        bytes: u64,
        align: u64,
        stream: u32,
    ) -> Option<RunId> {
        let mut best: Option<(u64, RunId)> = None;
        for &region in &self.spaces[space as usize].regions {
            let (mut first, mut row) = (NO_RUN, 0);
            let mut id = self.regions[region as usize].first;
            while id != NO_RUN {
                let run = &self.runs[id as usize];
                let usable =
                    run.state == RunState::Free && (run.stream == stream || run.stream == UNOWNED);
                if usable {
                    first = if row == 0 { id } else { first };
                    row += run.bytes;
                }
                if (!usable || run.next == NO_RUN) && row != 0 {
                    let needed = bytes + self.runs[first as usize].askew(align);
                    if row >= needed && best.is_none_or(|(least, _)| row < least) {
                        best = Some((row, first));
                    }
                    row = 0;
                }
                id = run.next;
            }
        }
        let (row, first) = best?;
        self.unlist(first);
        while self.runs[first as usize].bytes < row {
            let next = self.runs[first as usize].next;
            self.unlist(next);
            let epoch = self.runs[next as usize].epoch.max(self.runs[first as usize].epoch);
            self.absorb_next(first);
            self.runs[first as usize].epoch = epoch;
        }
        self.list(first, stream);
        self.take(first, bytes, align, stream)
    }

    /// Makes `bytes` of free run `id`, from its first multiple of `align` on, live.
    #[inline]
    fn take(&mut self, mut id: RunId, bytes: u64, align: u64, stream: u32) -> Option<RunId> {
        // Cutting takes at most two new records.
        if self.unused_runs.len() < 2 && self.runs.len() + 2 > BLOCK_LIMIT as usize {
            return None;
        }
        if self.whole_runs && align >= PAGE && self.runs[id as usize].bytes != bytes {
            return None;
        }
        let owner = self.runs[id as usize].stream;
        self.unlist(id);
        let askew = self.runs[id as usize].askew(align);
        if askew != 0 {
            let front = id;
            id = self.cut(front, askew);
            self.list(front, owner);
        }
        if self.runs[id as usize].bytes > bytes {
            let rest = self.cut(id, bytes);
            self.list(rest, owner);
        }
        self.make_live(id, stream);
        Some(id)
    }

    /// Makes an unlisted free run live.
    #[inline]
    fn make_live(&mut self, id: RunId, stream: u32) {
        let run = &mut self.runs[id as usize];
        run.state = RunState::Live;
        run.stream = stream;
        run.traits = 0;
        run.is_slab = false;
        self.busy += run.bytes;
        self.busy_peak = self.busy_peak.max(self.busy);
    }

    /// Cuts an unlisted free run after `bytes`; returns the new run behind it, unlisted too.
    #[inline]
    fn cut(&mut self, id: RunId, bytes: u64) -> RunId {
        let Run { address, bytes: whole, epoch, region, next, .. } = self.runs[id as usize];
        let rest = self.new_run(address + bytes, whole - bytes, region);
        let run = &mut self.runs[rest as usize];
        run.previous = id;
        run.next = next;
        run.epoch = epoch;
        if next != NO_RUN {
            self.runs[next as usize].previous = rest;
        }
        let run = &mut self.runs[id as usize];
        run.next = rest;
        run.bytes = bytes;
        rest
    }

    /// Frees a live or pending run to `stream` as of `epoch` (or to no stream), and merges it with
    /// neighbours of the same owner.
    pub(crate) fn release(&mut self, id: RunId, stream: u32, epoch: u64) {
        self.ripe.insert(owner_at(stream) as u32);
        let place = self.runs[id as usize].place();
        self.busy -= place.bytes;
        self.set_free_from(id, place, stream, epoch);
    }

    /// Frees live run `id` to its stream, as of now. `None`: there is no such run.
    #[inline(always)]
    pub(crate) fn release_block(&mut self, id: RunId, streams: &Streams) -> Option<()> {
        let run = self.runs.get(id as usize)?;
        let (place, stream) = (run.place(), run.stream);
        self.busy -= place.bytes;
        self.set_free_from(id, place, stream, streams.note_free(stream));
        Some(())
    }

    /// Makes an unlisted run free. A neighbour of the same owner takes it in and keeps its number
    /// and its place: mostly no list is touched.
    fn set_free(&mut self, id: RunId, owner: u32, epoch: u64) {
        self.ripe.insert(owner_at(owner) as u32);
        let place = self.runs[id as usize].place();
        self.set_free_from(id, place, owner, epoch);
    }

    /// `set_free` for the first free run of an owner in its space.
    #[cold]
    #[inline(never)]
    fn set_free_first(&mut self, space: SpaceId, id: RunId, owner: u32, epoch: u64) {
        self.spaces[space as usize].owner_mut(owner);
        self.set_free(id, owner, epoch);
    }

    #[inline(always)]
    fn set_free_from(&mut self, id: RunId, place: RunPlace, owner: u32, epoch: u64) {
        let RunPlace { address, bytes, region, previous, next } = place;
        let Region { space, ref mut first, .. } = self.regions[region as usize];
        let Space { owners, filled, .. } = &mut self.spaces[space as usize];
        let Some(index) = owners.get_mut(owner_at(owner)).and_then(Option::as_deref_mut) else {
            return self.set_free_first(space, id, owner, epoch);
        };
        self.changes += 1;
        let runs = &mut self.runs[..];
        let mergeable = |run: &&mut Run| run.state == RunState::Free && run.stream == owner;
        if let Some(before) = runs.get_mut(previous as usize).filter(mergeable) {
            before.epoch = before.epoch.max(epoch);
            before.next = next;
            let mut bytes = before.bytes + bytes;
            let mut after = next;
            if let Some(behind) = runs.get_mut(next as usize).filter(mergeable) {
                let (more, other) = (behind.bytes, behind.epoch);
                after = behind.next;
                bytes += more;
                index.remove(runs, next);
                put_unused(runs, &mut self.unused_runs, next);
                let before = &mut runs[previous as usize];
                before.epoch = before.epoch.max(other);
                before.next = after;
            }
            index.resize(runs, previous, bytes);
            if let Some(after) = runs.get_mut(after as usize) {
                after.previous = previous;
            }
            put_unused(runs, &mut self.unused_runs, id);
        } else if let Some(after) = runs.get_mut(next as usize).filter(mergeable) {
            after.epoch = after.epoch.max(epoch);
            (after.address, after.previous) = (address, previous);
            let bytes = after.bytes + bytes;
            index.resize(runs, next, bytes);
            match runs.get_mut(previous as usize) {
                Some(before) => before.next = next,
                None => *first = next,
            }
            put_unused(runs, &mut self.unused_runs, id);
        } else {
            let run = &mut runs[id as usize];
            (run.state, run.stream, run.epoch) = (RunState::Free, owner, epoch);
            if index.insert(runs, id) {
                filled.insert_reserved(owner_at(owner) as u32);
            }
        }
    }

    pub(crate) fn is_stitched(&self, id: RegionId) -> bool {
        self.regions[id as usize].stitched
    }

    pub(crate) fn is_empty(&self, space: SpaceId) -> bool {
        self.spaces[space as usize].regions.is_empty()
    }

    /// The largest free run of a space, of any owner.
    pub(crate) fn largest_free(&self, space: SpaceId) -> u64 {
        let space = &self.spaces[space as usize];
        // An owner's bytes are no less than its largest run.
        let longer = |most: u64, (_, index): (u32, &SizeIndex)| {
            if index.bytes > most { most.max(index.largest(&self.runs)) } else { most }
        };
        space.filled().fold(0, longer)
    }

    fn list(&mut self, id: RunId, owner: u32) {
        let run = &mut self.runs[id as usize];
        run.state = RunState::Free;
        run.stream = owner;
        let space = self.regions[run.region as usize].space;
        self.ripe.insert(owner_at(owner) as u32);
        let space = &mut self.spaces[space as usize];
        if space.owner_mut(owner).insert(&mut self.runs, id) {
            space.filled.insert_reserved(owner_at(owner) as u32);
        }
    }

    fn unlist(&mut self, id: RunId) {
        let run = &self.runs[id as usize];
        let space = self.regions[run.region as usize].space;
        match run.state {
            RunState::Unmapped => {
                self.spaces[space as usize].unmapped.remove(&mut self.runs, id);
            }
            _ => {
                let owner = run.stream;
                let space = &mut self.spaces[space as usize];
                if space.owner_mut(owner).remove(&mut self.runs, id) {
                    space.filled.remove(owner_at(owner) as u32);
                }
            }
        }
    }

    /// Joins the run after `id`, off its list already, to it.
    fn absorb_next(&mut self, id: RunId) {
        let next = self.runs[id as usize].next;
        let Run { bytes, next: after, .. } = self.runs[next as usize];
        self.runs[id as usize].bytes += bytes;
        self.runs[id as usize].next = after;
        if after != NO_RUN {
            self.runs[after as usize].previous = id;
        }
        self.put_unused(next);
    }

    fn put_unused(&mut self, id: RunId) {
        put_unused(&mut self.runs, &mut self.unused_runs, id);
    }

    fn new_run(&mut self, address: u64, bytes: u64, region: RegionId) -> RunId {
        let run = Run::new(address, bytes, region);
        match self.unused_runs.pop() {
            Some(id) => {
                self.runs[id as usize] = run;
                id
            }
            None => {
                self.runs.push(run);
                self.runs.len() as RunId - 1
            }
        }
    }
}

const _: () = assert!(owner_at(ALL_STREAMS) == 0 && owner_at(UNOWNED) == 1 && owner_at(0) == 2);
const _: () = assert!(owner_in(1) == UNOWNED && owner_at(ALL_STREAMS - 1) == NUMBERS as usize - 1);

/// The number of a new, unused record; `None` at the limit.
#[cold]
#[inline(never)]
fn one_more(runs: &mut Vec<Run>) -> Option<RunId> {
    let id = runs.len();
    (id < BLOCK_LIMIT as usize).then(|| {
        if id == runs.capacity() {
            // Copied seldom: 64 KiB at first, then twice as much each time.
            runs.reserve(id.max(1024));
        }
        runs.push(Run { state: RunState::Unused, ..Run::new(0, 0, 0) });
        id as RunId
    })
}

#[inline(always)]
fn put_unused(runs: &mut [Run], unused: &mut Vec<RunId>, id: RunId) {
    runs[id as usize].state = RunState::Unused;
    unused.push(id);
}
