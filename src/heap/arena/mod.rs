//! Runs: contiguous address space, free or live, cut and merged inside regions.
//!
//! A region is one piece of memory from the driver. Its runs tile it in address order. A space is a set of regions whose
//! free runs are searched together: one for each lifetime, one for each capture pool. Slabs are runs too, at multiples of
//! the page: best fit puts them into the gaps that large blocks leave. A free run belongs either to the
//! stream that used it last, which may reuse it at once, or to everybody ([`EVERYBODY`]), once an event has shown that the stream is past
//! the free. Neighbours of one owner are always merged; neighbours of different owners are joined when somebody who may use both
//! needs them ([`Arenas::join`]).
//!
//! Pure book-keeping: what is safe to reuse is told by the caller through epochs (`streams`).
#![deny(unsafe_code)]

mod size_index;
mod validate;
mod void;
mod walk;

use super::page_table::{BLOCK_LIMIT, BlockId};
use crate::record::{BlockSlot, SegmentSlot};
use size_index::SizeIndex;
pub use void::{LoosePages, Plan};

/// A run's number; a live run's is its block's.
pub type RunId = BlockId;
/// No run: the end of a list.
pub(super) const NO_RUN: RunId = u32::MAX;
/// The owner of free runs that any stream may use.
pub const EVERYBODY: u32 = u32::MAX;
/// A region's number.
pub type RegionId = u32;
/// A space's number.
pub type SpaceId = u32;

/// What a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// The record is on the list of unused records.
    Unused,
    /// Reusable by its owner.
    Free,
    /// The caller's.
    Live,
    /// Freed by the caller, waiting for other streams than its own.
    Pending,
    /// Address space of a stitched region in which nothing is mapped.
    Void,
}

/// One run.
#[derive(Clone, Debug)]
pub struct Run {
    /// First byte.
    pub address: u64,
    /// Length, a multiple of 512.
    pub bytes: u64,
    /// Bytes that the caller asked for.
    pub requested: u64,
    /// Free: no work on `stream` later than this epoch's touches it.
    pub epoch: u64,
    /// What it is.
    pub state: RunState,
    /// Live or pending: the stream of its allocation. Free: its owner, or [`EVERYBODY`].
    pub stream: u32,
    /// The region that it is a part of.
    pub region: RegionId,
    /// Its place in the block map while live or pending.
    pub slot: BlockSlot,
    /// The tag of its block, as the record counts it.
    pub lifetime: u8,
    /// Other streams use the block (`Central::users`).
    pub shared: bool,
    /// The slab in it (its lane's number), where it is one.
    pub is_slab: bool,
    previous: RunId,
    next: RunId,
    bin_previous: RunId,
    bin_next: RunId,
}

impl Run {
    /// Bytes before the first multiple of `align` in it.
    #[inline]
    fn askew(&self, align: u64) -> u64 {
        self.address.wrapping_neg() & (align - 1)
    }
}

/// One piece of memory from the driver.
#[derive(Clone, Debug)]
pub struct Region {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// What the driver gave, for giving it back: its address and bytes (a region may be the aligned inside of it).
    pub span: (u64, u64),
    /// The space that it belongs to.
    pub space: SpaceId,
    /// Its place in the record's table.
    pub slot: SegmentSlot,
    first: RunId,
    in_use: bool,
    stitched: bool,
}

/// A set of regions whose free runs are searched together.
#[derive(Default)]
struct Space {
    /// By stream + 1; the first is everybody's.
    owners: Vec<Option<Box<SizeIndex>>>,
    regions: Vec<RegionId>,
    /// Where nothing is mapped.
    voids: SizeIndex,
    /// Runs stay with their stream whatever is done (captures).
    private: bool,
}

impl Space {
    #[inline]
    fn owner(&self, stream: u32) -> Option<&SizeIndex> {
        self.owners.get(stream.wrapping_add(1) as usize)?.as_deref()
    }

    #[inline]
    fn owner_mut(&mut self, stream: u32) -> &mut SizeIndex {
        let at = stream.wrapping_add(1) as usize;
        if at >= self.owners.len() {
            self.owners.resize_with(at + 1, || None);
        }
        self.owners[at].get_or_insert_default()
    }
}

/// All runs of a device.
#[derive(Default)]
pub struct Arenas {
    runs: Vec<Run>,
    unused_runs: Vec<RunId>,
    regions: Vec<Region>,
    unused_regions: Vec<RegionId>,
    spaces: Vec<Space>,
    unused_spaces: Vec<SpaceId>,
    scratch: Vec<RunId>,
    changes: u64,
}

impl Arenas {
    /// A new, empty space. The runs of a `private` one stay with their streams.
    pub fn add_space(&mut self, private: bool) -> SpaceId {
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

    /// Forgets a space without regions.
    pub fn remove_space(&mut self, id: SpaceId) {
        debug_assert!(self.spaces[id as usize].regions.is_empty());
        self.unused_spaces.push(id);
    }

    /// Adds a region as one free run of `stream`'s (or everybody's).
    pub fn add_region(
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

    /// Takes a wholly free (or wholly void) region away, and says what it was.
    pub fn remove_region(&mut self, id: RegionId) -> Region {
        let region = self.regions[id as usize].clone();
        let mut run = region.first;
        while run != NO_RUN {
            debug_assert!(matches!(self.runs[run as usize].state, RunState::Free | RunState::Void));
            let next = self.runs[run as usize].next;
            self.unlist(run);
            self.retire(run);
            run = next;
        }
        self.regions[id as usize].in_use = false;
        self.unused_regions.push(id);
        self.spaces[region.space as usize].regions.retain(|&other| other != id);
        region
    }

    /// A region of the space.
    pub fn region(&self, id: RegionId) -> &Region {
        &self.regions[id as usize]
    }

    /// Notes a region's place in the record.
    pub fn set_region_slot(&mut self, id: RegionId, slot: SegmentSlot) {
        self.regions[id as usize].slot = slot;
    }

    /// All regions.
    pub fn regions(&self) -> impl Iterator<Item = (RegionId, &Region)> {
        self.regions
            .iter()
            .enumerate()
            .filter(|(_, region)| region.in_use)
            .map(|(id, region)| (id as RegionId, region))
    }

    /// The regions of a space whose runs are all free, and everybody's or of streams that are past them (`completed`).
    pub fn empty_regions(&self, space: SpaceId, completed: &dyn Fn(u32) -> u64) -> Vec<RegionId> {
        let is_empty = |id: &RegionId| {
            if self.regions[*id as usize].stitched {
                return false;
            }
            let mut run_id = self.regions[*id as usize].first;
            while run_id != NO_RUN {
                let run = &self.runs[run_id as usize];
                let passed = run.stream == EVERYBODY || run.epoch <= completed(run.stream);
                if run.state != RunState::Free || !passed {
                    return false;
                }
                run_id = run.next;
            }
            true
        };
        self.spaces[space as usize].regions.iter().copied().filter(is_empty).collect()
    }

    /// A run.
    #[inline]
    pub fn run(&self, id: RunId) -> Option<&Run> {
        self.runs.get(id as usize)
    }

    /// A run, to note what its block is.
    #[inline]
    pub fn run_mut(&mut self, id: RunId) -> Option<&mut Run> {
        self.runs.get_mut(id as usize)
    }

    /// All live and pending runs.
    pub fn blocks(&self) -> impl Iterator<Item = (RunId, &Run)> {
        self.runs
            .iter()
            .enumerate()
            .filter(|(_, run)| matches!(run.state, RunState::Live | RunState::Pending))
            .map(|(id, run)| (id as RunId, run))
    }

    /// The streams that runs belong to; some more than once.
    pub fn streams(&self) -> impl Iterator<Item = u32> {
        self.runs.iter().filter(|run| run.state != RunState::Unused).map(|run| run.stream)
    }

    /// A live run of `bytes` at a multiple of `align` for `stream`: the best fit among the stream's own free runs and everybody's.
    #[inline]
    pub fn allocate(&mut self, space: SpaceId, bytes: u64, align: u64, stream: u32) -> Option<RunId> {
        let space = &self.spaces[space as usize];
        let own = space.owner(stream).and_then(|index| index.best_fit(&self.runs, bytes, align));
        let shared = space.owner(EVERYBODY).and_then(|index| index.best_fit(&self.runs, bytes, align));
        let id = match (own, shared) {
            // Of two equal fits the stream takes its own, and leaves the other to those who have no choice.
            (Some(own), Some(shared)) if self.runs[shared as usize].bytes < self.runs[own as usize].bytes => {
                shared
            }
            (own, shared) => own.or(shared)?,
        };
        self.take(id, bytes, align, stream)
    }

    /// As [`Arenas::allocate`], from neighbours of different owners that `stream` may all use, joined; the shortest such row.
    pub fn join(&mut self, space: SpaceId, bytes: u64, align: u64, stream: u32) -> Option<RunId> {
        let mut best: Option<(u64, RunId)> = None;
        for &region in &self.spaces[space as usize].regions {
            let (mut first, mut row) = (NO_RUN, 0);
            let mut id = self.regions[region as usize].first;
            while id != NO_RUN {
                let run = &self.runs[id as usize];
                let usable = run.state == RunState::Free && (run.stream == stream || run.stream == EVERYBODY);
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
        let run = &mut self.runs[id as usize];
        run.state = RunState::Live;
        run.stream = stream;
        run.shared = false;
        run.is_slab = false;
        Some(id)
    }

    /// Cuts an unlisted free run after `bytes`; the new run behind it, unlisted too.
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

    /// Frees a live or pending run to `stream` as of `epoch` (or to everybody), and merges it with neighbours of the same owner.
    #[inline]
    pub fn release(&mut self, id: RunId, stream: u32, epoch: u64) {
        self.set_free(id, stream, epoch);
    }

    fn set_free(&mut self, mut id: RunId, owner: u32, mut epoch: u64) {
        let Run { previous, next, .. } = self.runs[id as usize];
        let mergeable = |run: &Run| run.state == RunState::Free && run.stream == owner;
        if next != NO_RUN && mergeable(&self.runs[next as usize]) {
            epoch = epoch.max(self.runs[next as usize].epoch);
            self.unlist(next);
            self.absorb_next(id);
        }
        if previous != NO_RUN && mergeable(&self.runs[previous as usize]) {
            epoch = epoch.max(self.runs[previous as usize].epoch);
            self.unlist(previous);
            self.absorb_next(previous);
            id = previous;
        }
        self.runs[id as usize].epoch = epoch;
        self.changes += 1;
        self.list(id, owner);
    }

    /// Gives to everybody the free runs whose streams are past them; `completed` tells the last epoch that a stream is past.
    pub fn promote(&mut self, space: SpaceId, completed: &dyn Fn(u32) -> u64) {
        if self.spaces[space as usize].private {
            return;
        }
        self.give_to_everybody(space, completed);
    }

    /// As [`Arenas::promote`], private spaces too: for spaces whose every use is known to be over.
    pub fn give_to_everybody(&mut self, space: SpaceId, completed: &dyn Fn(u32) -> u64) {
        let mut found = std::mem::take(&mut self.scratch);
        for at in 1..self.spaces[space as usize].owners.len() {
            let Some(index) = self.spaces[space as usize].owners[at].as_deref() else { continue };
            let completed = completed(at as u32 - 1);
            if index.count == 0 || index.oldest > completed {
                continue;
            }
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
                // Neighbours of everybody's take it in; another of `found` is not everybody's yet, so none is lost.
                self.set_free(id, EVERYBODY, 0);
            }
            self.spaces[space as usize].owner_mut(at as u32 - 1).oldest = oldest;
        }
        self.scratch = found;
    }

    /// Free bytes of a space: all, and those of everybody's.
    pub fn free_bytes(&self, space: SpaceId) -> (u64, u64) {
        let space = &self.spaces[space as usize];
        let all = space.owners.iter().flatten().map(|index| index.bytes).sum();
        (all, space.owner(EVERYBODY).map_or(0, |index| index.bytes))
    }

    /// Free bytes of a space that belong to `stream`.
    pub fn own_free_bytes(&self, space: SpaceId, stream: u32) -> u64 {
        self.spaces[space as usize].owner(stream).map_or(0, |index| index.bytes)
    }

    /// Grows whenever memory becomes free, or free for more streams.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether a region is a reservation, mapped page by page.
    pub fn is_stitched(&self, id: RegionId) -> bool {
        self.regions[id as usize].stitched
    }

    /// Whether a space has no region.
    pub fn is_empty(&self, space: SpaceId) -> bool {
        self.spaces[space as usize].regions.is_empty()
    }

    /// The largest free run of a space, whoever owns it.
    pub fn largest_free(&self, space: SpaceId) -> u64 {
        let space = &self.spaces[space as usize];
        space.owners.iter().flatten().map(|index| index.largest(&self.runs)).max().unwrap_or(0)
    }

    fn list(&mut self, id: RunId, owner: u32) {
        let run = &mut self.runs[id as usize];
        run.state = RunState::Free;
        run.stream = owner;
        let space = self.regions[run.region as usize].space;
        self.spaces[space as usize].owner_mut(owner).insert(&mut self.runs, id);
    }

    fn unlist(&mut self, id: RunId) {
        let run = &self.runs[id as usize];
        let space = self.regions[run.region as usize].space;
        match run.state {
            RunState::Void => self.spaces[space as usize].voids.remove(&mut self.runs, id),
            _ => {
                let owner = run.stream;
                self.spaces[space as usize].owner_mut(owner).remove(&mut self.runs, id);
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
        self.retire(next);
    }

    fn retire(&mut self, id: RunId) {
        self.runs[id as usize].state = RunState::Unused;
        self.unused_runs.push(id);
    }

    fn new_run(&mut self, address: u64, bytes: u64, region: RegionId) -> RunId {
        let run = Run {
            address,
            bytes,
            requested: 0,
            epoch: 0,
            state: RunState::Free,
            stream: EVERYBODY,
            region,
            slot: BlockSlot::NONE,
            lifetime: 0,
            shared: false,
            is_slab: false,
            previous: NO_RUN,
            next: NO_RUN,
            bin_previous: NO_RUN,
            bin_next: NO_RUN,
        };
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
