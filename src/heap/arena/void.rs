//! Address space without memory: where a stitched region may grow, and what it may give.
//!
//! A stitched region is a reservation of address space. Its runs are blocks, free runs and voids; a void covers whole pages and
//! nothing is mapped there. To serve a request that fits nowhere, a row of pages is planned ([`Arenas::plan`]) next to a free run that
//! lacks the fewest, memory is found for it elsewhere, and the row becomes free memory ([`Arenas::commit`]). Any whole page of a free
//! run that no work touches any more may be given for that ([`Arenas::loose_pages`], [`Arenas::take_out`]).
#![deny(unsafe_code)]

use super::{Arenas, EVERYBODY, NO_RUN, Region, RegionId, RunId, RunState, SpaceId};
use crate::heap::size_class::{ALIGNMENT, PAGE};
use crate::record::SegmentSlot;

/// A row of pages that, once mapped, makes a request fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The void that holds the row.
    pub void: RunId,
    /// First byte of the row.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// The free runs beside it that the request needs too: no page may be taken from them.
    pub needs: [Option<RunId>; 2],
}

/// Whole pages of a row of free runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoosePages {
    /// The first run of the row.
    pub run: RunId,
    /// First byte.
    pub address: u64,
    /// Their length.
    pub bytes: u64,
}

impl Arenas {
    /// Adds a reservation of address space: a region that is all void.
    pub fn add_reservation(&mut self, space: SpaceId, address: u64, bytes: u64) -> RegionId {
        let region = Region {
            address,
            bytes,
            span: (address, bytes),
            space,
            slot: SegmentSlot::NONE,
            first: NO_RUN,
            in_use: true,
            stitched: true,
        };
        let id = self.new_region(region);
        let run = self.new_run(address, bytes, id);
        self.regions[id as usize].first = run;
        self.set_void(run);
        id
    }

    /// The reservations of a space in which nothing is mapped.
    pub fn idle_reservations(&self, space: SpaceId) -> Vec<RegionId> {
        let is_idle = |id: &RegionId| {
            let region = &self.regions[*id as usize];
            let run = &self.runs[region.first as usize];
            region.stitched && run.state == RunState::Void && run.bytes == region.bytes
        };
        self.spaces[space as usize].regions.iter().copied().filter(is_idle).collect()
    }

    /// The row of fewest pages that lets `stream` have `bytes` at a multiple of `align`: behind a free run that it may use,
    /// before one, between two, or in a void by itself. The lowest address among equals. `None`: the address space is full.
    pub fn plan(&self, space: SpaceId, bytes: u64, align: u64, stream: u32) -> Option<Plan> {
        let usable = |id: RunId| {
            let run = self.runs.get(id as usize)?;
            let mine = run.stream == stream || run.stream == EVERYBODY;
            (run.state == RunState::Free && mine).then_some(id)
        };
        let length = |id: Option<RunId>| id.map_or(0, |id| self.runs[id as usize].bytes);
        let mut voids = Vec::new();
        self.spaces[space as usize].voids.collect(&self.runs, &mut voids);
        let mut best: Option<Plan> = None;
        for void in voids {
            let run = &self.runs[void as usize];
            let (before, behind) = (usable(run.previous), usable(run.next));
            // The bytes of the free run before that count: from its first multiple of `align` on.
            let front = length(before)
                - before.map_or(0, |id| self.runs[id as usize].askew(align).min(length(Some(id))));
            let back = length(behind);
            let pages = |lacking: u64| lacking.next_multiple_of(PAGE);
            let mut consider = |address: u64, length: u64, needs: [Option<RunId>; 2]| {
                let better = |plan: &Plan| (length, address) < (plan.bytes, plan.address);
                if length > 0 && length <= run.bytes && best.as_ref().is_none_or(better) {
                    best = Some(Plan { void, address, bytes: length, needs });
                }
            };
            consider(run.address, pages(bytes), [None, None]);
            if bytes > front {
                consider(run.address, pages(bytes - front), [before, None]);
            }
            if bytes > back {
                let row = pages(bytes - back);
                if row <= run.bytes {
                    consider(run.address + run.bytes - row, row, [None, behind]);
                }
            }
            if front + run.bytes + back >= bytes {
                consider(run.address, run.bytes, [before, behind]);
            }
        }
        best
    }

    /// Bytes of the plan's void behind its row.
    pub fn room_behind(&self, plan: &Plan) -> u64 {
        let void = &self.runs[plan.void as usize];
        void.address + void.bytes - plan.address - plan.bytes
    }

    /// The planned row is mapped: it is free memory of `stream`'s, for whom it joins what lies beside it; nobody has used it, so
    /// it is everybody's at the next [`Arenas::promote`].
    pub fn commit(&mut self, plan: &Plan, stream: u32) {
        let mut row = plan.void;
        self.unlist(row);
        let before = plan.address - self.runs[row as usize].address;
        if before > 0 {
            let front = row;
            row = self.cut(front, before);
            self.list_void(front);
        }
        if self.runs[row as usize].bytes > plan.bytes {
            let rest = self.cut(row, plan.bytes);
            self.list_void(rest);
        }
        self.set_free(row, stream, 0);
    }

    /// Whole pages of single free runs of `spaces` but the `needed` ones, the shortest first: less than [`Arenas::loose_pages`] finds in
    /// rows, but without a walk over all runs.
    pub fn loose_runs(
        &self,
        spaces: &[SpaceId],
        needed: &[Option<RunId>],
        completed: &dyn Fn(u32) -> u64,
    ) -> Vec<LoosePages> {
        let mut ids = Vec::new();
        for index in spaces.iter().flat_map(|&space| self.spaces[space as usize].owners.iter()).flatten() {
            index.collect_from(&self.runs, PAGE, &mut ids);
        }
        let pages = |id: RunId| {
            let run = &self.runs[id as usize];
            let passed = run.stream == EVERYBODY || run.epoch <= completed(run.stream);
            let loose = passed && !needed.contains(&Some(id)) && self.regions[run.region as usize].stitched;
            loose.then(|| whole_pages((id, run.address, run.address + run.bytes))).flatten()
        };
        let mut found: Vec<LoosePages> = ids.into_iter().filter_map(pages).collect();
        found.sort_unstable_by_key(|pages| (pages.bytes, std::cmp::Reverse(pages.address)));
        found
    }

    /// All whole pages of free runs of stitched regions of `spaces` that are everybody's, or of streams that are past them
    /// (`completed`), in rows over neighbouring runs.
    pub fn loose_pages(&self, spaces: &[SpaceId], completed: &dyn Fn(u32) -> u64) -> Vec<LoosePages> {
        let mut found = Vec::new();
        let regions = spaces.iter().flat_map(|&space| self.spaces[space as usize].regions.iter());
        for region in regions.map(|&id| &self.regions[id as usize]).filter(|region| region.stitched) {
            // Neighbours count together: a page may lie in several free runs.
            let mut row: Option<(RunId, u64, u64)> = None;
            let mut id = region.first;
            while id != NO_RUN {
                let run = &self.runs[id as usize];
                let loose = run.state == RunState::Free
                    && (run.stream == EVERYBODY || run.epoch <= completed(run.stream));
                if loose {
                    let (first, start) = row.map_or((id, run.address), |(first, start, _)| (first, start));
                    row = Some((first, start, run.address + run.bytes));
                } else {
                    found.extend(row.take().and_then(whole_pages));
                }
                id = run.next;
            }
            found.extend(row.and_then(whole_pages));
        }
        found
    }

    /// Takes the page at `address`, which is void but cannot be used, out of the way; the run to hand to
    /// [`Arenas::clear_quarantine`].
    pub fn quarantine(&mut self, space: SpaceId, address: u64) -> Option<RunId> {
        let mut voids = Vec::new();
        self.spaces[space as usize].voids.collect(&self.runs, &mut voids);
        let holds = |id: &RunId| {
            let run = &self.runs[*id as usize];
            (run.address..run.address + run.bytes).contains(&address)
        };
        let mut page = voids.into_iter().find(holds)?;
        self.unlist(page);
        let before = address - self.runs[page as usize].address;
        if before > 0 {
            let front = page;
            page = self.cut(front, before);
            self.list_void(front);
        }
        if self.runs[page as usize].bytes > PAGE {
            let rest = self.cut(page, PAGE);
            self.list_void(rest);
        }
        self.runs[page as usize].state = RunState::Pending;
        Some(page)
    }

    /// A quarantined page is void again.
    pub fn clear_quarantine(&mut self, page: RunId) {
        self.set_void(page);
    }

    /// Nothing is mapped any more in `bytes` (whole pages) at `address`, in free run `id` or in it and the ones behind it: they
    /// are void.
    pub fn take_out(&mut self, mut id: RunId, address: u64, bytes: u64) {
        let end = address + bytes;
        while id != NO_RUN && self.runs[id as usize].address < end {
            let super::Run { address: start, bytes: length, stream: owner, next, .. } =
                self.runs[id as usize];
            if start + length <= address {
                id = next;
                continue;
            }
            self.unlist(id);
            let mut row = id;
            if start < address {
                row = self.cut(id, address - start);
                self.list(id, owner);
            }
            let inside = self.runs[row as usize].address;
            if inside + self.runs[row as usize].bytes > end {
                let rest = self.cut(row, end - inside);
                self.list(rest, owner);
            }
            self.set_void(row);
            id = next;
        }
    }

    /// Makes an unlisted run void, and merges it with voids beside it.
    pub(super) fn set_void(&mut self, mut id: RunId) {
        let super::Run { previous, next, .. } = self.runs[id as usize];
        let is_void =
            |arenas: &Self, id: RunId| id != NO_RUN && arenas.runs[id as usize].state == RunState::Void;
        if is_void(self, next) {
            self.unlist(next);
            self.absorb_next(id);
        }
        if is_void(self, previous) {
            self.unlist(previous);
            self.absorb_next(previous);
            id = previous;
        }
        self.list_void(id);
    }

    pub(super) fn list_void(&mut self, id: RunId) {
        let run = &mut self.runs[id as usize];
        run.state = RunState::Void;
        run.stream = EVERYBODY;
        run.epoch = 0;
        let space = self.regions[run.region as usize].space;
        self.spaces[space as usize].voids.insert(&mut self.runs, id);
    }

    /// Memory of a space: its regions, less what is void in them.
    pub fn held_bytes(&self, space: SpaceId) -> u64 {
        let space = &self.spaces[space as usize];
        let regions: u64 = space.regions.iter().map(|&id| self.regions[id as usize].bytes).sum();
        regions - space.voids.bytes
    }

    /// Bytes of the stitched regions that are mapped, by the arena's books.
    pub fn mapped_bytes(&self) -> u64 {
        let voids: u64 = self.spaces.iter().map(|space| space.voids.bytes).sum();
        let reserved: u64 =
            self.regions().filter(|(_, region)| region.stitched).map(|(_, region)| region.bytes).sum();
        reserved - voids
    }
}

/// The whole pages of a row of free runs: its first run, its start and its end.
fn whole_pages((run, start, end): (RunId, u64, u64)) -> Option<LoosePages> {
    let address = start.next_multiple_of(PAGE);
    let end = end / PAGE * PAGE;
    (end > address).then(|| LoosePages { run, address, bytes: end - address })
}

const _: () = assert!(PAGE.is_multiple_of(ALIGNMENT));
