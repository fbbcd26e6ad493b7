//! Moves: `backing:stitch` makes a request fit, and returns memory.
//!
//! The arena plans the row of fewest pages. While little is held the pages are new; past that, idle
//! pages move from elsewhere, if they leave little behind ([`STRANDED`]). The row is mapped, and
//! becomes free memory. Pages move in stream order: those of the requesting stream's own free runs,
//! unowned ones, and those that other streams are known to be past. A move that fails half-way
//! leaves every page in place (`chunks`).

use crate::central::Central;
use crate::driver::{Driver, DriverError, ErrorKind, Result};
use crate::profiler::{self, What};
use crate::request::{Eviction, Growth, Want};
use crate::runs::arena::{Arenas, Movable, MovablePages, Plan, RunId, SpaceId, UNOWNED};
use crate::small::size_class::PAGE;
use crate::supply::pages::chunks::{Part, Piece};
use crate::supply::pages::gather::{Gathered, Source, apart_from_others, parts_of};
use crate::supply::pages::growth::{OWN_SHARE, STEP, usual_slack};
use crate::supply::pages::{ChunkId, LONGEST_CHUNK};
use gruyere_record::{DeviceGauge, EventKind, Record, clock};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Near the peak of live bytes, in a program of one stream or with little memory left, pages move
/// only if the free bytes that they strand, in pages at the ends of their run, are at most one part
/// in this of them.
const STRANDED: u64 = 8;
/// Little memory is left if it is less than one part in this of what is held.
const LITTLE_LEFT: u64 = 2;
/// Live bytes are near their peak if they lack less than one part in this of it.
const NEAR_PEAK: u64 = 8;
/// A heap holds much if it holds more beyond the peak of live bytes than one part in the first of
/// it, and than the second (bytes).
const MUCH: (u64, u64) = (24, 8 * PAGE);
/// A program has loaded once it has freed more than one part in this of what is held.
const LOADED: u64 = 2;
/// Requests have lacked much once the rows beyond the slack add up to more than one part in this of
/// what is held.
const LACKED: u64 = 4;

impl Central {
    /// Maps pages to make `want` fit: fresh ones up to the slack above the peak of live bytes; past
    /// that, idle whole pages from elsewhere first, if they leave little behind. Where not even
    /// fresh memory suffices, any idle pages.
    pub(crate) fn stitch(&mut self, ctx: &Growth<'_>, want: Want) -> Result<()> {
        self.pace.begin(self.freed);
        self.addresses_ran_out = false;
        let (live, peak) = ctx.record.live(self.device);
        // What the program has needed at most, with this request.
        let wanted = peak.max(live + want.bytes);
        self.spaces.note_peak(peak);
        let soft = self.soft_ceiling(wanted).min(self.limit);
        let mut plan = self.plan_row(ctx, want)?;
        let mut failure = DriverError::new("limit", ErrorKind::OutOfMemory, 0);
        let spare = self.backing.pages.spare();
        let room = soft.saturating_sub(self.backing.pages.held()).min(ctx.fresh);
        let longest_step = self.longest_step(want.space);
        if plan.bytes <= room + spare {
            // For fewer calls, a growing heap takes more than it needs, within the slack.
            let idle = (room + spare - plan.bytes).min(ctx.fresh / 2);
            let step = STEP.saturating_sub(plan.bytes).min(idle / PAGE * PAGE).min(longest_step);
            match self.grow_by(ctx, want, plan, step, Gathered::default()) {
                Ok(()) => return Ok(()),
                Err(error) if error.is_out_of_memory() => {}
                Err(error) => failure = error,
            }
            // Views that could not be unmapped again are in the way now.
            plan = self.plan_row(ctx, want)?;
        }
        self.note_lack(plan.bytes);
        let mut gathered = Gathered::default();
        let moves = ctx.moves && self.spaces.is_ordinary(want.space);
        let one_stream = self.arenas.is_of_one_stream(want.space);
        // With several streams it costs memory on devices that lag.
        let may_watch = moves && (one_stream || ctx.little_left);
        if may_watch && self.holds_much(wanted) && self.spaces.watch() {
            log::debug!("device {}: from now on blocks that are kept lie apart", self.device);
        }
        if moves && self.may_take_time(ctx) {
            let row = self.plan_alone(ctx, want).unwrap_or(plan);
            // With several streams, what a move strands may be free soon: it counts only where
            // little memory is left.
            let careful =
                (one_stream || ctx.little_left) && live + want.bytes > peak - peak / NEAR_PEAK;
            let may_move = |pages: &MovablePages| !careful || strands_little(pages);
            let (row, found) = self.gather(ctx, want, row, !ctx.little_left, may_move);
            let missing = row.bytes - found.pages * PAGE;
            if missing == 0 {
                return self.grow_by(ctx, want, row, 0, found);
            }
            if missing < plan.bytes {
                (plan, gathered) = (row, found);
            }
        }
        if !ctx.past_slack {
            return Err(failure);
        }
        // Those idle pages do not suffice: the heap grows.
        let missing = plan.bytes - gathered.pages * PAGE;
        let room = self.room(ctx.fresh);
        if missing <= room {
            let held = self.backing.pages.held();
            let step = self.pace.step(held, room - missing, gathered.pages > 0);
            match self.grow_by(ctx, want, plan, step.min(longest_step), gathered) {
                Err(error) if error.is_out_of_memory() => failure = error,
                done => return done,
            }
        }
        // Memory is short: any idle pages move.
        if !moves {
            return Err(failure);
        }
        let row = match self.plan_alone(ctx, want) {
            Some(row) => row,
            None => self.plan_row(ctx, want)?,
        };
        let (row, found) = self.gather(ctx, want, row, false, |_| true);
        if row.bytes - found.pages * PAGE > self.room(ctx.fresh) {
            return Err(failure);
        }
        self.grow_by(ctx, want, row, 0, found)
    }

    /// Whether pages may move by the time that moves have left. With `slack:`, memory counts more.
    fn may_take_time(&mut self, ctx: &Growth<'_>) -> bool {
        let any = ctx.any_time || self.slack.is_some();
        any || self.move_time.is_left(ctx.driver.host_time())
    }

    /// Fresh and spare memory that a growth may take, bytes: `fresh` at most from the driver.
    fn room(&self, fresh: u64) -> u64 {
        let pages = &self.backing.pages;
        self.limit.saturating_sub(pages.held()).min(fresh) + pages.spare()
    }

    /// Whether little memory is left beside what is held, where the driver has `fresh` bytes more.
    pub(crate) fn has_little_left(&self, fresh: u64) -> bool {
        self.room(fresh) < self.backing.pages.held() / LITTLE_LEFT
    }

    /// Chooses idle pages for `row`, among those for which `may_move` is true. `apart`: from other
    /// spaces come whole chunks alone, and make the row longer if need be; a chunk in two spaces
    /// would seldom be idle as a whole.
    fn gather(
        &self,
        ctx: &Growth<'_>,
        want: Want,
        row: Plan,
        apart: bool,
        may_move: impl Fn(&MovablePages) -> bool,
    ) -> (Plan, Gathered) {
        let mut movable = self.movable_pages(ctx, want);
        // Free memory beside the row, needed by the request, stays.
        movable.retain(|pages| !row.needs.contains(&Some(pages.run)) && may_move(pages));
        let parts = parts_of(&self.backing.pages, &movable);
        let choose = |parts: &[_], row: &Plan| {
            Gathered::choose(parts, (row.bytes / PAGE) as u32, self.arenas.room_around(row))
        };
        let is_here = |pages: &MovablePages| self.space_of(pages.run) == Some(want.space);
        if !apart || movable.iter().all(is_here) {
            return (row, choose(&parts, &row));
        }
        let (here, with_whole) = apart_from_others(&parts, is_here);
        let found = choose(&with_whole, &row);
        let rest = |found: &Gathered| {
            found.torn().filter(|(chunk, _)| here.iter().all(|(_, part)| part.chunk != *chunk))
        };
        let Some((_, pages)) = rest(&found) else { return (row, found) };
        let bytes = row.bytes + u64::from(pages) * PAGE;
        if let Some(longer) = self.row_alone(want.space, bytes) {
            let found = choose(&with_whole, &longer);
            if found.pages * PAGE == bytes && rest(&found).is_none() {
                return (longer, found);
            }
        }
        (row, choose(&here, &row))
    }

    /// A row in an unmapped range by itself, with room beside it for the rest of split chunks.
    fn row_alone(&self, space: SpaceId, bytes: u64) -> Option<Plan> {
        self.arenas.plan_alone(space, bytes, (LONGEST_CHUNK, LONGEST_CHUNK))
    }

    /// The limit below which fresh pages come before idle ones: what is `wanted` at most, and some
    /// slack.
    fn soft_ceiling(&self, wanted: u64) -> u64 {
        wanted + self.slack_above(wanted)
    }

    /// Notes that a row of `bytes` is asked for beyond the slack. If the program has loaded and
    /// such rows have added up, long requests take the lowest of several fits from now on: while a
    /// program loads best fit holds less, and where memory fits well it takes less time.
    fn note_lack(&mut self, bytes: u64) {
        self.lacked += bytes;
        let held = self.backing.pages.held();
        self.arenas.lowest_fit |= self.freed > held / LOADED && self.lacked > held / LACKED;
    }

    /// What the program has needed at most, with `bytes` more now.
    fn wanted(&self, record: &Record, bytes: u64) -> u64 {
        let (live, peak) = record.live(self.device);
        peak.max(live + bytes)
    }

    /// Whether the heap holds so much more than is `wanted` at most that blocks which will be kept
    /// are worth a space of their own.
    fn holds_much(&self, wanted: u64) -> bool {
        self.backing.pages.held() > wanted + (wanted / MUCH.0).max(MUCH.1)
    }

    /// How far (bytes) held memory may exceed `wanted`, the peak of live bytes, before idle pages
    /// move.
    pub(crate) fn slack_above(&self, wanted: u64) -> u64 {
        self.slack.map_or_else(|| usual_slack(wanted), |slack| slack.resolve(wanted))
    }

    /// Whether growth by `bytes` would move pages, if any are idle.
    pub(crate) fn is_beyond_slack(&self, record: &Record, bytes: u64) -> bool {
        self.backing.pages.held() + bytes > self.soft_ceiling(self.wanted(record, bytes))
    }

    /// Whether growth by `bytes` would hold more than live blocks have ever needed, and the slack.
    pub(crate) fn would_grow_for_nothing(&self, record: &Record, bytes: u64) -> bool {
        self.backing.held + bytes > self.soft_ceiling(self.wanted(record, bytes))
    }

    fn plan_row(&mut self, ctx: &Growth<'_>, want: Want) -> Result<Plan> {
        let plan = |arenas: &Arenas| arenas.plan(want.space, want.bytes, want.align, want.stream);
        if let Some(plan) = plan(&self.arenas) {
            return Ok(plan);
        }
        // More addresses cost less than to unmap, which may wait for the device: not during a
        // capture.
        if ctx.moves && !self.may_reserve(want.space) {
            self.unmap_retired(ctx.driver, ctx.completed, 0);
            if let Some(plan) = plan(&self.arenas) {
                return Ok(plan);
            }
        }
        self.reserve_addresses(ctx, want.space, want.bytes)?;
        plan(&self.arenas).ok_or(DriverError::new("cuMemAddressReserve", ErrorKind::OutOfMemory, 0))
    }

    /// Plans a row for `want` in an unmapped range by itself, with room beside it for the rest of
    /// split chunks, so that every idle page can be mapped into it.
    fn plan_alone(&mut self, ctx: &Growth<'_>, want: Want) -> Option<Plan> {
        let (space, bytes) = (want.space, want.bytes.next_multiple_of(PAGE));
        if let Some(plan) = self.row_alone(space, bytes) {
            return Some(plan);
        }
        // Otherwise only a row beside free memory is left, and fewer idle pages fit into that.
        if self.reserve_more(ctx, space, bytes.saturating_add(2 * LONGEST_CHUNK)) {
            self.row_alone(space, bytes)
        } else {
            None
        }
    }

    /// The pages that may move for `want`, without the reserves of other lifetimes. A space that is
    /// not ordinary takes fresh memory only, so that all of its memory can go back at once.
    fn movable_pages(&self, ctx: &Growth<'_>, want: Want) -> Vec<MovablePages> {
        let spaces = self.movable_spaces();
        let may_move = |stream, epoch| {
            if epoch <= (ctx.completed)(stream) {
                Movable::Idle
            } else if self.order.reusable(want.stream, stream) >= epoch {
                Movable::Used
            } else {
                Movable::No
            }
        };
        let mut movable = self.arenas.movable_runs(&spaces, &may_move);
        let reserves = |&space: &SpaceId| space != want.space && self.reserve_of(space) > 0;
        if !spaces.iter().any(reserves) {
            return movable;
        }
        // A reserve keeps its longest runs.
        movable.sort_unstable_by_key(|movable| (movable.bytes(), Reverse(movable.pages.start)));
        for space in spaces.into_iter().filter(reserves) {
            let mut spare = self.spare_of(space) / PAGE * PAGE;
            for movable in
                movable.iter_mut().filter(|movable| self.space_of(movable.run) == Some(space))
            {
                let take = movable.bytes().min(spare);
                movable.pages.start = movable.pages.end - take;
                spare -= take;
            }
        }
        movable.retain(|movable| movable.bytes() > 0);
        movable
    }

    fn space_of(&self, run: RunId) -> Option<SpaceId> {
        self.arenas.run(run).map(|run| self.arenas.region(run.region).space)
    }

    /// Maps the planned row: the gathered pages, fresh ones for the rest, and `step` bytes more.
    pub(crate) fn grow_by(
        &mut self,
        ctx: &Growth<'_>,
        want: Want,
        plan: Plan,
        step: u64,
        found: Gathered,
    ) -> Result<()> {
        // With `slack:` they take any time, so none is counted.
        if found.pages == 0 || self.slack.is_some() {
            return self.map_planned(ctx, want, plan, step, found);
        }
        let start = ctx.driver.host_time();
        let mark = ctx.streams.mark(ctx.driver, want.stream);
        let done = self.map_planned(ctx, want, plan, step, found);
        // While the stream had work, the time cost the program nothing.
        if mark.is_none_or(|mark| ctx.streams.is_past(ctx.driver, mark)) {
            let end = ctx.driver.host_time();
            if let Some(pause) = self.move_time.take(end.saturating_sub(start), end) {
                log::info!(
                    "device {}: moving pages takes more than a tenth of the time, so for \
                     {pause:?} the heap grows instead, as long as memory is left",
                    self.device
                );
            }
        }
        done
    }

    fn map_planned(
        &mut self,
        ctx: &Growth<'_>,
        want: Want,
        mut plan: Plan,
        step: u64,
        mut found: Gathered,
    ) -> Result<()> {
        let stale_aliases = found.stale_aliases();
        let (before, behind) = self.arenas.room_around(&plan);
        if plan.needs == [None, None] {
            // As low as possible.
            plan.address -= before - stale_aliases.0;
        }
        let missing = plan.bytes - found.pages * PAGE;
        let mut pieces = std::mem::take(&mut found.pieces);
        if missing > 0 {
            // A split chunk ends the row.
            let room = if stale_aliases.1 > 0 || plan.needs[1].is_some() { 0 } else { behind };
            let (fresh, bytes) = self.fresh_row(ctx, want.space, missing, step, room)?;
            plan.bytes += bytes - missing;
            let at = pieces.len() - usize::from(stale_aliases.1 > 0);
            pieces.splice(at..at, fresh);
        }
        self.map_row(ctx, want, &plan, &pieces, found)
    }

    /// As [`Central::fresh_pieces`], for `space`. A space of a graph or named pool takes no spare
    /// chunk much longer than it needs, such as those of a large peak, unless there is nothing
    /// else.
    fn fresh_row(
        &mut self,
        ctx: &Growth<'_>,
        space: SpaceId,
        missing: u64,
        step: u64,
        room: u64,
    ) -> Result<(Vec<Piece>, u64)> {
        let (step, own) = (step.min(room), self.longest_step(space));
        if own < room {
            match self.fresh_pieces(ctx, missing, step, own) {
                Err(error) if error.is_out_of_memory() => {}
                done => return done,
            }
        }
        self.fresh_pieces(ctx, missing, step, room)
    }

    /// Chunks without owners for `missing` bytes and `step` more: spare ones, up to `room` longer,
    /// then new ones. Returns the pieces and their bytes.
    fn fresh_pieces(
        &mut self,
        ctx: &Growth<'_>,
        missing: u64,
        step: u64,
        room: u64,
    ) -> Result<(Vec<Piece>, u64)> {
        let mut spare: Vec<Piece> = self.backing.pages.spare_pieces().collect();
        spare.sort_unstable_by_key(|piece| Reverse(piece.count));
        let (mut pieces, mut bytes) = (Vec::new(), 0);
        for piece in spare {
            let length = u64::from(piece.count) * PAGE;
            if bytes < missing && bytes + length <= missing + room {
                bytes += length;
                pieces.push(piece);
            }
        }
        let rest = missing.saturating_sub(bytes);
        if rest > 0 {
            let held = self.backing.pages.held();
            let left = self.limit.saturating_sub(held).min(ctx.fresh);
            // Spare chunks that are too long for the row make no room under the limit.
            if rest > left {
                return Err(DriverError::new("limit", ErrorKind::OutOfMemory, 0));
            }
            let step = step.min(left - rest);
            let longest = self.pace.longest_chunk(held, left, self.freed);
            let pages = &mut self.backing.pages;
            pages.create(ctx.driver, rest, longest, &mut pieces).inspect_err(|_| {
                // What the device has no room for leaves the rest of it to others.
                pages.release(ctx.driver, u64::MAX);
            })?;
            // In chunks of its own: an unused step can move whole.
            pages.create(ctx.driver, step, longest, &mut pieces)?;
            bytes += rest + step;
            self.pace.grew(rest + step);
        }
        Ok((pieces, bytes))
    }

    /// Maps a row and makes it free memory of the stream.
    fn map_row(
        &mut self,
        ctx: &Growth<'_>,
        want: Want,
        plan: &Plan,
        pieces: &[Piece],
        mut gathered: Gathered,
    ) -> Result<()> {
        let moved = gathered.pages * PAGE;
        let _range = if moved > 0 { profiler::range(What::Stitch, moved) } else { None };
        let stale_aliases = gathered.stale_aliases();
        let row = plan.address - stale_aliases.0..plan.address + plan.bytes + stale_aliases.1;
        ctx.table.cover(row.start, row.end - row.start);
        let sources = gathered.sources.iter().map(|source| (&source.part, source.movable.used));
        if let Err(error) = self.backing.pages.map(ctx.driver, plan.address, pieces, sources) {
            for view in self.backing.pages.retired_in(&row) {
                self.arenas.mark_stale(want.space, &view);
            }
            return Err(error);
        }
        self.creep.note_row(pieces.len());
        let mut epoch = 0;
        // From the end of each run: the part of the run before it stays as it is.
        gathered.sources.sort_unstable_by_key(|source| Reverse(source.part.pages.start));
        for Source { movable, part } in gathered.sources {
            self.arenas.evict(movable.run, part.pages);
            // Behind another stream's work too, once this stream is past its next work.
            let used = |(stream, epoch)| {
                if stream == want.stream { epoch } else { ctx.streams.note_free(want.stream) }
            };
            epoch = epoch.max(movable.used.map_or(0, used));
        }
        self.arenas.commit(plan, stale_aliases, want.stream, epoch);
        self.note_row(ctx, plan.address, moved, plan.bytes - moved);
        Ok(())
    }

    /// Records a row at `address`, of `moved` bytes idle elsewhere before and `fresh` bytes unowned
    /// before.
    fn note_row(&mut self, ctx: &Growth<'_>, address: u64, moved: u64, fresh: u64) {
        let event = |kind, bytes| {
            let (device, lifetime) = (self.device as u8, ctx.lifetime as u8);
            ctx.record.event(kind, device, lifetime, UNOWNED, address, bytes, clock::now());
        };
        if moved > 0 {
            event(EventKind::Move, moved);
            self.gauges.add(DeviceGauge::Moves, 1);
            self.gauges.add(DeviceGauge::MovedBytes, moved);
        }
        if fresh > 0 {
            event(EventKind::Grow, fresh);
            self.gauges.add(DeviceGauge::Grows, 1);
        }
    }

    /// Unmaps the retired views with finished work, but for the last `keep` that retired.
    pub(crate) fn unmap_retired(
        &mut self,
        driver: &dyn Driver,
        completed: &dyn Fn(u32) -> u64,
        keep: usize,
    ) {
        for range in self.backing.pages.unmap_retired(driver, completed, keep) {
            self.arenas.clear(&range);
        }
    }

    /// Takes up to `most` bytes of wholly idle chunks in `spaces` out of the arena, so that they
    /// can go back.
    pub(crate) fn evict_chunks(&mut self, ctx: &Eviction<'_>, spaces: &[SpaceId], most: u64) {
        let mut movable = Vec::new();
        // By chunk: its idle pages, and those of each space.
        let mut idle: BTreeMap<ChunkId, (u32, Vec<(SpaceId, u64)>)> = BTreeMap::new();
        for &space in spaces {
            for row in self.arenas.movable_rows(&[space], ctx.completed) {
                for part in self.backing.pages.parts(&row.pages) {
                    let (count, shares) = idle.entry(part.chunk).or_default();
                    *count += part.count();
                    shares.push((space, u64::from(part.count()) * PAGE));
                }
                movable.push(row);
            }
        }
        let mut left = most;
        let mut spare: BTreeMap<SpaceId, u64> =
            spaces.iter().map(|&space| (space, self.spare_of(space))).collect();
        idle.retain(|&chunk, (pages, shares)| {
            let bytes = self.backing.pages.bytes_of(chunk);
            // Reserves stay.
            let is_spare = |(space, bytes): &(SpaceId, u64)| spare[space] >= *bytes;
            if u64::from(*pages) * PAGE != bytes || bytes > left || !shares.iter().all(is_spare) {
                return false;
            }
            left -= bytes;
            for (space, bytes) in shares {
                spare.entry(*space).and_modify(|spare| *spare = spare.saturating_sub(*bytes));
            }
            true
        });
        for MovablePages { run, pages, .. } in movable {
            let parts: Vec<Part> = self.backing.pages.parts(&pages).collect();
            // From the end: the part of the run before it stays as it is.
            for part in parts.into_iter().rev().filter(|part| idle.contains_key(&part.chunk)) {
                self.backing.pages.abandon(&part);
                self.arenas.evict(run, part.pages);
            }
        }
        self.unmap_retired(ctx.driver, &|stream| ctx.streams.reusable(stream), 0);
    }
}

/// Whether `pages` leave little behind. Blocks that stay between temporaries cut their memory into
/// short runs; if whole pages moved out of each, the fractions of pages at their ends would serve
/// no later block, and the heap would hold ever more of them.
fn strands_little(pages: &MovablePages) -> bool {
    pages.stranded * STRANDED <= pages.bytes()
}

impl Central {
    /// The most by which a growth of `space` may exceed the need (bytes, whole pages).
    pub(crate) fn longest_step(&self, space: SpaceId) -> u64 {
        if self.spaces.is_ordinary(space) {
            return u64::MAX;
        }
        self.arenas.held_bytes(space) / OWN_SHARE / PAGE * PAGE
    }
}
