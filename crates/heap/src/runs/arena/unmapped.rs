//! Address space without memory: where a stitched region may grow, and what it may give.
//!
//! A stitched region is a reservation of address space. Its runs are blocks, free runs, unmapped
//! ranges and stale aliases. An unmapped range covers whole pages and nothing is mapped there; in a
//! stale alias something is, but no page belongs there. For a request that fits nowhere, the arena
//! plans a row of pages ([`Arenas::plan`]) next to the free run that lacks the fewest; its caller
//! finds memory for it elsewhere, and the row becomes free memory ([`Arenas::commit`]). Pages of
//! free runs may go there ([`Arenas::movable_runs`], [`Arenas::evict`]).

use super::Arenas;
use super::run::{NO_RUN, Region, RegionId, Run, RunId, RunState, SpaceId, UNOWNED};
use crate::small::size_class::{ALIGNMENT, PAGE};
use gruyere_record::SegmentSlot;
use std::ops::Range;

/// A row of pages that, once mapped, makes a request fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The unmapped range for the row.
    pub(crate) unmapped: RunId,
    /// First byte of the row.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The free runs beside it that the request needs too: no page may leave them.
    pub(crate) needs: [Option<RunId>; 2],
}

/// Whole pages of free memory that may move to where they are needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MovablePages {
    /// The free run around them; the first of a row of runs.
    pub(crate) run: RunId,
    pub(crate) pages: Range<u64>,
    /// Free bytes before and behind them, in pages that blocks lie in too: they stay behind.
    pub(crate) stranded: u64,
    /// The stream and epoch of the last work on them, if that work may still run.
    pub(crate) used: Option<(u32, u64)>,
}

impl MovablePages {
    /// Those of free memory `range` from run `run` on; `None`: it has no whole page.
    fn of(run: RunId, range: Range<u64>, used: Option<(u32, u64)>) -> Option<Self> {
        let pages = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
        let bytes = pages.end.checked_sub(pages.start).filter(|&bytes| bytes > 0)?;
        Some(Self { run, pages, stranded: range.end - range.start - bytes, used })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.pages.end - self.pages.start
    }
}

impl Arenas {
    /// Adds a reservation of address space: a region that is one unmapped range.
    pub(crate) fn add_reservation(&mut self, space: SpaceId, address: u64, bytes: u64) -> RegionId {
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
        self.set_unmapped(run);
        id
    }

    /// The reservations of a space in which nothing is mapped.
    pub(crate) fn idle_reservations(&self, space: SpaceId) -> Vec<RegionId> {
        let is_idle = |id: &RegionId| {
            let region = &self.regions[*id as usize];
            let run = &self.runs[region.first as usize];
            region.stitched && run.state == RunState::Unmapped && run.bytes == region.bytes
        };
        self.spaces[space as usize].regions.iter().copied().filter(is_idle).collect()
    }

    /// Address space reserved for a space, bytes.
    pub(crate) fn reserved_bytes(&self, space: SpaceId) -> u64 {
        let regions =
            self.spaces[space as usize].regions.iter().map(|&id| &self.regions[id as usize]);
        regions.filter(|region| region.stitched).map(|region| region.bytes).sum()
    }

    /// [`Arenas::reserved_bytes`] of all spaces.
    pub(crate) fn all_reserved_bytes(&self) -> u64 {
        self.regions().filter(|(_, region)| region.stitched).map(|(_, region)| region.bytes).sum()
    }

    /// The region of a space with the lowest address.
    pub(crate) fn lowest_region(&self, space: SpaceId) -> Option<RegionId> {
        let regions = self.spaces[space as usize].regions.iter().copied();
        regions.min_by_key(|&id| self.regions[id as usize].address)
    }

    /// The row of fewest pages that lets `stream` have `bytes` at a multiple of `align`: behind a
    /// free run that it may use, before one, between two, or alone in an unmapped range. Of equal
    /// rows, the one at the lowest address. `None`: the address space is full.
    pub(crate) fn plan(&self, space: SpaceId, bytes: u64, align: u64, stream: u32) -> Option<Plan> {
        let usable = |id: RunId| {
            let run = self.runs.get(id as usize)?;
            let mine = run.stream == stream || run.stream == UNOWNED;
            (run.state == RunState::Free && mine).then_some(id)
        };
        let length = |id: Option<RunId>| id.map_or(0, |id| self.runs[id as usize].bytes);
        let mut best: Option<Plan> = None;
        self.spaces[space as usize].unmapped.each_from(&self.runs, ALIGNMENT, |unmapped| {
            let run = &self.runs[unmapped as usize];
            let (before, behind) = (usable(run.previous), usable(run.next));
            // The bytes of the free run before that count: from its first multiple of `align` on.
            let front = length(before)
                - before.map_or(0, |id| self.runs[id as usize].askew(align).min(length(Some(id))));
            let back = length(behind);
            let pages = |lacking: u64| lacking.next_multiple_of(PAGE);
            let mut consider = |address: u64, length: u64, needs: [Option<RunId>; 2]| {
                let better = |plan: &Plan| (length, address) < (plan.bytes, plan.address);
                if length > 0 && length <= run.bytes && best.as_ref().is_none_or(better) {
                    best = Some(Plan { unmapped, address, bytes: length, needs });
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
        });
        best
    }

    /// A row of `bytes` in the lowest unmapped range with room for it, `before` bytes before it and
    /// `behind` bytes behind it.
    pub(crate) fn plan_alone(
        &self,
        space: SpaceId,
        bytes: u64,
        (before, behind): (u64, u64),
    ) -> Option<Plan> {
        let mut lowest: Option<(u64, RunId)> = None;
        self.spaces[space as usize].unmapped.each_from(&self.runs, before + bytes + behind, |id| {
            let run = &self.runs[id as usize];
            let fits = run.bytes >= before + bytes + behind;
            if fits && lowest.is_none_or(|(address, _)| run.address < address) {
                lowest = Some((run.address, id));
            }
        });
        let (start, unmapped) = lowest?;
        Some(Plan { unmapped, address: start + before, bytes, needs: [None, None] })
    }

    /// Bytes of the plan's unmapped range before its row and behind it.
    pub(crate) fn room_around(&self, plan: &Plan) -> (u64, u64) {
        let unmapped = &self.runs[plan.unmapped as usize];
        (
            plan.address - unmapped.address,
            unmapped.address + unmapped.bytes - plan.address - plan.bytes,
        )
    }

    /// Makes the planned row, now mapped, free memory of `stream`, joined to what lies beside it;
    /// work of `epoch` and before may still touch it. `stale_aliases`: bytes before and behind the
    /// row in which something is mapped too.
    pub(crate) fn commit(
        &mut self,
        plan: &Plan,
        stale_aliases: (u64, u64),
        stream: u32,
        epoch: u64,
    ) {
        let mut row = plan.unmapped;
        self.unlist(row);
        let before = plan.address - stale_aliases.0 - self.runs[row as usize].address;
        if before > 0 {
            let front = row;
            row = self.cut(front, before);
            self.list_unmapped(front);
        }
        if stale_aliases.0 > 0 {
            let stale_alias = row;
            row = self.cut(stale_alias, stale_aliases.0);
            self.list_stale_alias(stale_alias);
        }
        if self.runs[row as usize].bytes > plan.bytes {
            let rest = self.cut(row, plan.bytes);
            if self.runs[rest as usize].bytes > stale_aliases.1 {
                let unmapped =
                    if stale_aliases.1 > 0 { self.cut(rest, stale_aliases.1) } else { rest };
                self.list_unmapped(unmapped);
            }
            if stale_aliases.1 > 0 {
                self.list_stale_alias(rest);
            }
        }
        self.set_free(row, stream, epoch);
    }

    /// Whole pages of single free runs of `spaces`, in no order. `used` says for a run's owner and
    /// epoch whether its pages may move, and whether work may still touch them.
    pub(crate) fn movable_runs(
        &self,
        spaces: &[SpaceId],
        used: &dyn Fn(u32, u64) -> Movable,
    ) -> Vec<MovablePages> {
        // An owner of less than a page has no whole page.
        let indexes = spaces.iter().flat_map(|&space| self.spaces[space as usize].filled());
        let indexes = indexes.filter(|(_, index)| index.bytes >= PAGE);
        let pages = |id: RunId| {
            let run = &self.runs[id as usize];
            if !self.regions[run.region as usize].stitched {
                return None;
            }
            let used = match if run.stream == UNOWNED {
                Movable::Idle
            } else {
                used(run.stream, run.epoch)
            } {
                Movable::No => return None,
                Movable::Idle => None,
                Movable::Used => Some((run.stream, run.epoch)),
            };
            MovablePages::of(id, run.address..run.address + run.bytes, used)
        };
        let mut found = Vec::new();
        for (_, index) in indexes {
            index.each_from(&self.runs, PAGE, |id| found.extend(pages(id)));
        }
        found
    }

    /// All whole pages of free runs of stitched regions of `spaces` that are unowned, or of streams
    /// that are past them (`completed`), in rows over neighbouring runs.
    pub(crate) fn movable_rows(
        &self,
        spaces: &[SpaceId],
        completed: &dyn Fn(u32) -> u64,
    ) -> Vec<MovablePages> {
        let mut found = Vec::new();
        let pages = |(run, start, end)| MovablePages::of(run, start..end, None);
        let regions = spaces.iter().flat_map(|&space| self.spaces[space as usize].regions.iter());
        for region in regions.map(|&id| &self.regions[id as usize]).filter(|region| region.stitched)
        {
            // Neighbours count together: a page may lie in several free runs.
            let mut row: Option<(RunId, u64, u64)> = None;
            let mut id = region.first;
            while id != NO_RUN {
                let run = &self.runs[id as usize];
                let movable = run.state == RunState::Free
                    && (run.stream == UNOWNED || run.epoch <= completed(run.stream));
                if movable {
                    let (first, start) =
                        row.map_or((id, run.address), |(first, start, _)| (first, start));
                    row = Some((first, start, run.address + run.bytes));
                } else {
                    found.extend(row.take().and_then(pages));
                }
                id = run.next;
            }
            found.extend(row.and_then(pages));
        }
        found
    }

    /// Makes stale aliases of `pages` of free run `id` and the runs behind it: the pages belong
    /// elsewhere from now on.
    pub(crate) fn evict(&mut self, mut id: RunId, pages: Range<u64>) {
        while id != NO_RUN && self.runs[id as usize].address < pages.end {
            let Run { address, bytes, stream: owner, next, .. } = self.runs[id as usize];
            if address + bytes <= pages.start {
                id = next;
                continue;
            }
            self.unlist(id);
            let mut row = id;
            if address < pages.start {
                row = self.cut(id, pages.start - address);
                self.list(id, owner);
            }
            let inside = self.runs[row as usize].address;
            if inside + self.runs[row as usize].bytes > pages.end {
                let rest = self.cut(row, pages.end - inside);
                self.list(rest, owner);
            }
            self.list_stale_alias(row);
            id = next;
        }
    }

    /// Makes stale aliases of the unmapped parts of a range: they are mapped, though no page
    /// belongs there.
    pub(crate) fn mark_stale(&mut self, space: SpaceId, range: &Range<u64>) {
        let mut unmapped = Vec::new();
        self.spaces[space as usize].unmapped.collect(&self.runs, &mut unmapped);
        for mut id in unmapped {
            let Run { address, bytes, .. } = self.runs[id as usize];
            let (start, end) = (address.max(range.start), (address + bytes).min(range.end));
            if start >= end {
                continue;
            }
            self.unlist(id);
            if start > address {
                let front = id;
                id = self.cut(front, start - address);
                self.list_unmapped(front);
            }
            if self.runs[id as usize].bytes > end - start {
                let rest = self.cut(id, end - start);
                self.list_unmapped(rest);
            }
            self.list_stale_alias(id);
        }
    }

    /// Makes the stale aliases of a range unmapped: nothing is mapped there any more.
    pub(crate) fn clear(&mut self, range: &Range<u64>) {
        let stale_aliases: Vec<RunId> =
            self.stale_aliases.range(range.clone()).map(|stale_alias| *stale_alias.1).collect();
        for id in stale_aliases {
            let Run { address, bytes, region, .. } = self.runs[id as usize];
            self.stale_aliases.remove(&address);
            let space = self.regions[region as usize].space;
            self.spaces[space as usize].stale_alias_bytes -= bytes;
            self.set_unmapped(id);
        }
    }

    fn list_stale_alias(&mut self, id: RunId) {
        let run = &mut self.runs[id as usize];
        run.state = RunState::StaleAlias;
        run.stream = UNOWNED;
        run.epoch = 0;
        let (address, bytes, region) = (run.address, run.bytes, run.region);
        self.stale_aliases.insert(address, id);
        self.spaces[self.regions[region as usize].space as usize].stale_alias_bytes += bytes;
    }

    /// Makes an unlisted run unmapped, and merges it with unmapped ranges beside it.
    fn set_unmapped(&mut self, mut id: RunId) {
        let Run { previous, next, .. } = self.runs[id as usize];
        let is_unmapped = |arenas: &Self, id: RunId| {
            id != NO_RUN && arenas.runs[id as usize].state == RunState::Unmapped
        };
        if is_unmapped(self, next) {
            self.unlist(next);
            self.absorb_next(id);
        }
        if is_unmapped(self, previous) {
            self.unlist(previous);
            self.absorb_next(previous);
            id = previous;
        }
        self.list_unmapped(id);
    }

    fn list_unmapped(&mut self, id: RunId) {
        let run = &mut self.runs[id as usize];
        run.state = RunState::Unmapped;
        run.stream = UNOWNED;
        run.epoch = 0;
        let space = self.regions[run.region as usize].space;
        self.spaces[space as usize].unmapped.insert(&mut self.runs, id);
    }

    /// Memory of a space: its regions, less their unmapped ranges and stale aliases.
    pub(crate) fn held_bytes(&self, space: SpaceId) -> u64 {
        let space = &self.spaces[space as usize];
        let regions: u64 = space.regions.iter().map(|&id| self.regions[id as usize].bytes).sum();
        regions - space.unmapped.bytes - space.stale_alias_bytes
    }

    /// Bytes of the stitched regions' memory, and of their stale aliases, by the arena's books.
    pub(crate) fn mapped_bytes(&self) -> (u64, u64) {
        let unmapped: u64 = self.spaces.iter().map(|space| space.unmapped.bytes).sum();
        let stale_aliases: u64 = self.spaces.iter().map(|space| space.stale_alias_bytes).sum();
        (self.all_reserved_bytes() - unmapped - stale_aliases, stale_aliases)
    }
}

/// Whether the pages of a free run may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Movable {
    No,
    /// No work touches them any more.
    Idle,
    /// Work ahead of the requesting stream's may still touch them.
    Used,
}

const _: () = assert!(PAGE.is_multiple_of(ALIGNMENT));
