//! What the streams of a device share, behind one lock: arenas, spans, capture pools, and the blocks above 1 MiB.
#![deny(unsafe_code)]

mod addresses;
mod ladder;
pub(in crate::heap) mod moves;
mod phase;
mod pools;
mod small_runs;
mod stats;
mod watcher;

use crate::config::Size;
use crate::driver::{DeviceId, Driver, DriverError, ErrorKind, Result};
use crate::heap::Shared;
use crate::heap::arena::{Arenas, EVERYBODY, Label, Region, RegionId, Run, RunId, RunState, SpaceId};
use crate::heap::backing::{Backing, Kind, SPAN};
use crate::heap::entry::Action;
use crate::heap::growth::Pace;
use crate::heap::ladder::Ladder;
use crate::heap::lifetime::Lifetime;
use crate::heap::page_table::{Page, PageTable};
use crate::heap::pending::Pending;
use crate::heap::phase::Watch;
use crate::heap::pool::Pools;
use crate::heap::pool::capture::Captures;
use crate::heap::request::{Growth, Request, Want};
use crate::heap::size_class::{PAGE, SMALL_MAX, round, round_up};
use crate::heap::slab::Slab;
use crate::heap::small_runs::SmallRuns;
use crate::heap::spaces::Spaces;
use crate::heap::streams::{EVERY, Streams};
use crate::heap::tally::Tally;
use crate::heap::waits::Order;
use crate::heap::watcher::Watched;
use crate::nvtx;
use crate::record::{
    Block, BlockEntry, BlockSlot, BlockTag, DeviceGauge, DeviceWriter, EventKind, LaneWriter, Record,
    SegmentEntry, SegmentKind, bucket_of, clock, gauges::pool_of,
};
use std::collections::{HashMap, HashSet};

/// The record's pools of small and of large blocks.
const SMALL: usize = 0;
const LARGE: usize = 1;
/// A span is at most one part in this of what is left of the device, unless a request is longer.
const LEFT_SPANS: u64 = 256;
/// What only a graph or a named pool can use grows by at most this part of what it holds more than it needs: idle, it is lost to all others.
const OWN_SHARE: u64 = 8;
/// While little is held, a span is at most this long (bytes), unless a request is longer.
const YOUNG_SPAN: u64 = 256 << 20;

/// Events are recorded once blocks of one part in this of what is held have begun to wait for them.
const BATCH_SHARE: u64 = 32;

/// A large block that its program has freed, and the streams that may still use it.
struct PendingRun {
    run: RunId,
    epoch: u64,
    waits: Pending,
}

/// A block of `backing:passthrough`.
struct Direct {
    size: u64,
    requested: u64,
    lifetime: u8,
    slot: BlockSlot,
}

/// Everything behind a device's central lock.
pub struct Central {
    pub(in crate::heap) device: DeviceId,
    /// Runs of all spaces.
    pub arenas: Arenas,
    /// Spans.
    pub backing: Backing,
    /// Who uses the spaces of the arenas, and how.
    pub pools: Pools,
    /// Which pool a CUDA graph has.
    pub captures: Captures,
    /// The record's lane of large, captured and direct blocks.
    pub writer: LaneWriter,
    /// The record's gauges of the device.
    pub gauges: DeviceWriter,
    /// The ordinary spaces.
    pub spaces: Spaces,
    users: HashMap<RunId, Vec<u32>>,
    /// The small blocks of the arena.
    pub(in crate::heap) small_runs: SmallRuns,
    pending: Vec<PendingRun>,
    /// Bytes that have begun to wait for streams since [`Central::take_batch`] was true.
    unsealed: u64,
    direct: HashMap<u64, Direct>,
    /// Physical memory of the device.
    pub(in crate::heap) total_memory: u64,
    /// The most that was ever reserved.
    pub peak_reserved: u64,
    /// Ceiling on reserved bytes.
    pub limit: u64,
    /// The headroom has been touched, because nothing else helped: it may be used until memory is given back.
    pub headroom_is_open: bool,
    /// Why the driver failed in the latest growth, where it was not out of memory.
    pub failure: Option<DriverError>,
    /// The latest growth failed because the driver had no more addresses, whatever memory there was.
    pub addresses_ran_out: bool,
    /// What may be held beyond the peak of live bytes before idle pages are moved.
    pub slack: Option<Size>,
    /// What streams have been made to wait for.
    pub order: Order,
    /// Bytes of large blocks freed so far.
    pub freed: u64,
    /// How it has grown of late.
    pub pace: Pace,
    /// Times that a malloc had to climb the reclaim ladder.
    pub retries: u64,
    /// Out-of-memory answers.
    pub out_of_memories: u64,
    /// What was held, over time.
    pub tally: Tally,
    /// Low-memory phases.
    pub watch: Watch,
    /// What the rungs of the reclaim ladder did.
    pub ladder: Ladder,
    /// The blocks of another allocator, where this heap only keeps books.
    pub(in crate::heap) watched: Watched,
}

impl Central {
    /// Empty.
    pub fn new(
        device: DeviceId,
        backing: Backing,
        writer: LaneWriter,
        gauges: DeviceWriter,
        (total_memory, limit): (u64, u64),
    ) -> Self {
        let mut arenas = Arenas::default();
        // On so small a device not even an empty one has room for spans of a whole step.
        let is_small = limit.min(total_memory) / LEFT_SPANS < SPAN;
        let apart = is_small && matches!(backing.kind, Kind::Pool | Kind::Fixed);
        let spaces = Spaces::new(&mut arenas, apart);
        let tally = Tally::new(backing.kind == Kind::Stitch);
        Self {
            device,
            arenas,
            backing,
            pools: Pools::new(&spaces),
            captures: Captures::default(),
            writer,
            gauges,
            spaces,
            users: HashMap::new(),
            small_runs: SmallRuns::default(),
            pending: Vec::new(),
            unsealed: 0,
            direct: HashMap::new(),
            total_memory,
            peak_reserved: 0,
            limit,
            headroom_is_open: false,
            failure: None,
            addresses_ran_out: false,
            slack: None,
            order: Order::default(),
            freed: 0,
            pace: Pace::new(false),
            retries: 0,
            out_of_memories: 0,
            tally,
            watch: Watch::new(false),
            ladder: Ladder::default(),
            watched: Watched::default(),
        }
    }

    /// The hot path of a large malloc: the best fit among the free runs, described in the page table and the record. Its address, or 0 where
    /// nothing fits. `time`: the clock's.
    #[inline(always)]
    pub fn serve(
        &mut self,
        shared: &Shared,
        requested: u64,
        stream: u32,
        lifetime: Lifetime,
        time: u64,
    ) -> u64 {
        let size = round(requested);
        let space = self.spaces.of_large(lifetime, size);
        let slot = self.writer.place();
        let label = Label { slack: (size - requested) as u32, lifetime: lifetime as u8, slot };
        let Some((id, address)) = self.arenas.allocate_block(space, size, stream, label) else {
            self.writer.put_back(slot);
            return 0;
        };
        let tag = BlockTag::new(self.device as u8, lifetime as u8, 0, stream);
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        self.name(&shared.table, id, address);
        self.writer.malloc(LARGE, slot, block, || shared.step(), time);
        address
    }

    /// Describes a run that has just been taken as the block of `request`, in the page table and the record; its address. `capture` as the record
    /// counts it.
    pub fn publish(
        &mut self,
        table: &PageTable,
        id: RunId,
        request: &Request,
        step: u32,
        capture: u8,
    ) -> u64 {
        let Request { size: requested, lifetime, start, .. } = *request;
        let Some(run) = self.arenas.run_mut(id) else { return 0 };
        let (address, size) = (run.address, run.bytes);
        let tag = BlockTag::new(self.device as u8, lifetime as u8, capture, run.stream);
        let slot = self.writer.place();
        run.label(Label { slack: (size - requested) as u32, lifetime: lifetime as u8, slot });
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        let stream = run.stream;
        self.has_come(size, stream);
        self.name(table, id, address);
        self.writer.malloc(pool_of(size), slot, block, || step, start);
        address
    }

    /// Notes in the page table that block `id` starts at `address`.
    #[inline(always)]
    fn name(&mut self, table: &PageTable, id: RunId, address: u64) {
        if let Some(page) = table.page(address)
            && !page.add_block(self.device, id)
        {
            self.join_crowd(page, address, id);
        }
    }

    /// How much more than it needs `space` may grow by at most (bytes, whole pages).
    pub(in crate::heap) fn longest_step(&self, space: SpaceId) -> u64 {
        if self.spaces.is_ordinary(space) {
            return u64::MAX;
        }
        self.arenas.held_bytes(space) / OWN_SHARE / PAGE * PAGE
    }

    /// The length of a new span of `space` for `pages` bytes.
    ///
    /// Blocks cannot cross spans, so few and long spans leave the fewest gaps at their ends; but what a long one holds too much
    /// is held for nothing. A sixteenth of what is held, up to 256 MiB, then about a hundredth, came out best on the traces. Where little of the device is left, long
    /// spans are what a program dies of, and where sizes lie apart, a span is as long as it must be (docs/decisions/near-capacity.md).
    fn span_for(&self, space: SpaceId, pages: u64) -> u64 {
        if self.spaces.are_apart() {
            return pages;
        }
        let held = self.backing.held;
        let left = self.limit.min(self.total_memory).saturating_sub(held);
        let most = (left / LEFT_SPANS).min(self.longest_step(space).max(SPAN));
        let share = (held / 16).min(YOUNG_SPAN).max(held / 88).min(most);
        let step = if most < SPAN { PAGE } else { SPAN };
        pages.max(share).checked_next_multiple_of(step).unwrap_or(pages)
    }

    /// Makes `want` fit: by a new span, or by pages mapped where a run of them is needed.
    ///
    /// # Errors
    /// The driver's; out of memory also where the ceiling would be passed. Nothing is lost then.
    pub fn extend(&mut self, ctx: &Growth<'_>, want: Want, whole_span: bool) -> Result<()> {
        let _range = nvtx::range(nvtx::What::Growth, want.bytes);
        match self.backing.kind {
            Kind::Stitch => {
                let done = self.stitch(ctx, want);
                self.backing.refresh_pages();
                self.publish_reserved();
                done
            }
            _ => self.grow(ctx, want.space, want.bytes, whole_span).map(|_| ()),
        }
    }

    /// Takes a span of at least `bytes` into `space`.
    ///
    /// # Errors
    /// The driver's; out of memory also where the ceiling would be passed. Nothing has changed then.
    fn grow(&mut self, ctx: &Growth<'_>, space: SpaceId, bytes: u64, whole_span: bool) -> Result<RegionId> {
        let too_large = DriverError::new("limit", ErrorKind::OutOfMemory, 0);
        let pages = round_up(bytes, PAGE).ok_or(too_large)?;
        let span = if whole_span && !self.arenas.whole_runs { self.span_for(space, pages) } else { pages };
        // Of what only a graph or a named pool can use nothing waits for the device when it goes: it is the driver's pools', whole steps.
        let is_steps = self.backing.kind == Kind::Pool && !self.spaces.is_ordinary(space);
        let span = if is_steps { span.checked_next_multiple_of(SPAN).ok_or(too_large)? } else { span };
        if self.backing.held.checked_add(span).is_none_or(|held| held > self.limit) {
            return Err(too_large);
        }
        let span = self.backing.take(ctx.driver, ctx.lifetime, span)?;
        if !ctx.table.cover(span.address, span.bytes) {
            self.backing.return_unseen(ctx.driver, span.origin, span.taken);
            log::error!(
                "the driver gave address {:#x}, beyond 48 bits: this device cannot be managed",
                span.address
            );
            return Err(DriverError::new("address range", ErrorKind::Other, 0));
        }
        let region =
            self.arenas.add_region(space, span.address, span.bytes, (span.origin, span.taken), EVERYBODY);
        let slot = ctx.record.segment_insert(&SegmentEntry {
            kind: SegmentKind::Span,
            address: span.address,
            bytes: span.bytes,
            slot: 0,
            stream: EVERYBODY,
            device: self.device as u8,
            lifetime: ctx.lifetime as u8,
            capture: ctx.capture,
            ..SegmentEntry::default()
        });
        self.arenas.set_region_slot(region, slot);
        self.gauges.add(DeviceGauge::Grows, 1);
        self.publish_reserved();
        let (kind, lifetime) = (EventKind::Grow, ctx.lifetime as u8);
        ctx.record.event(
            kind,
            self.device as u8,
            lifetime,
            EVERYBODY,
            span.address,
            span.bytes,
            clock::now(),
        );
        Ok(region)
    }

    /// Gives a wholly free region, all of whose uses are done, back to the driver. False: the driver refused, and the region stays.
    pub fn shrink(&mut self, driver: &dyn Driver, record: &Record, id: RegionId) -> bool {
        let region = self.arenas.region(id).clone();
        let (origin, taken) = region.span;
        if let Err(error) = self.backing.give(driver, origin, taken) {
            log::warn!("the driver did not take the span {origin:#x} back: {error}; it stays in use");
            return false;
        }
        self.arenas.remove_region(id);
        record.segment_remove(region.slot);
        self.gauges.add(DeviceGauge::Releases, 1);
        self.publish_reserved();
        let device = self.device as u8;
        record.event(EventKind::Release, device, 0, EVERYBODY, region.address, region.bytes, clock::now());
        true
    }

    /// Gives the empty regions of the ordinary spaces back. Their bytes.
    pub fn shrink_all(&mut self, driver: &dyn Driver, record: &Record, streams: &Streams) -> u64 {
        self.shrink_completed(driver, record, streams, &|_| 0)
    }

    /// As [`Central::shrink_all`], while memory is not short: pools' heaps wait for nothing then. Their bytes.
    pub fn shrink_unasked(&mut self, driver: &dyn Driver, record: &Record, streams: &Streams) -> u64 {
        self.shrink_empty(driver, record, streams, &|_| 0, false)
    }

    /// As [`Central::shrink_all`], those too that belong to one stream which is past all that was freed in them (`completed`
    /// tells the last epoch that it is past).
    pub fn shrink_completed(
        &mut self,
        driver: &dyn Driver,
        record: &Record,
        streams: &Streams,
        completed: &dyn Fn(u32) -> u64,
    ) -> u64 {
        self.shrink_empty(driver, record, streams, completed, true)
    }

    fn shrink_empty(
        &mut self,
        driver: &dyn Driver,
        record: &Record,
        streams: &Streams,
        completed: &dyn Fn(u32) -> u64,
        may_wait: bool,
    ) -> u64 {
        if self.backing.kind == Kind::Stitch {
            let spaces = self.open_spaces();
            self.loosen(driver, streams, &spaces, completed, u64::MAX);
            let bytes = self.backing.pages.release(driver, u64::MAX);
            self.backing.refresh_pages();
            self.publish_reserved();
            return bytes;
        }
        let mut bytes = 0;
        for space in self.open_spaces() {
            for id in self.arenas.empty_regions(space, completed) {
                let Region { bytes: size, span: (_, taken), .. } = *self.arenas.region(id);
                let kept = self.spare_of(space) < size || !may_wait && self.backing.waits_to_give(taken);
                bytes += if !kept && self.shrink(driver, record, id) { size } else { 0 };
            }
        }
        bytes
    }

    /// Tells the record what is held.
    pub fn publish_reserved(&mut self) {
        let reserved = self.backing.reserved;
        nvtx::reserved(self.device, reserved);
        self.peak_reserved = self.peak_reserved.max(reserved);
        self.tally.hold(reserved, self.pieces());
        self.gauges.set(&[
            (DeviceGauge::Reserved, reserved),
            (DeviceGauge::ReservedPeak, self.peak_reserved),
            (DeviceGauge::DriverCalls, self.backing.calls),
            (DeviceGauge::DriverErrors, self.backing.errors),
        ]);
        self.gauges.sample(self.arenas.sample_busy_peak());
    }

    /// Frees the large block that starts at `address` in `page`, and tells the record. `None`: no large block starts there.
    #[inline(always)]
    pub fn free_large(&mut self, page: Page<'_>, streams: &Streams, address: u64, time: u64) -> Option<()> {
        let arenas = &self.arenas;
        let (id, run) = match page.remove_block(|id| block_at(arenas, id, address)) {
            Some(found) => found,
            None => {
                let id = self.leave_crowd(page, address)?;
                (id, self.arenas.run(id)?)
            }
        };
        let (size, requested) = (run.bytes, run.requested());
        let Run { stream, lifetime, slot, shared, region, .. } = *run;
        self.freed += size;
        let apart = self.pools.has_apart();
        if shared || apart {
            let frozen = apart && self.note_free_apart(self.arenas.region(region).space, size);
            if shared || frozen {
                self.free_shared(streams, id, streams.note_free(stream), frozen);
                self.writer.block_pending(slot, size, requested, lifetime);
                self.writer.event(EventKind::Free, lifetime, stream, address, size, time);
                return Some(());
            }
        }
        let tag = BlockTag::new(self.device as u8, lifetime, 0, stream);
        // Before the run is merged: what the record needs is at hand, and need not be kept through that.
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        if size <= SMALL_MAX {
            self.is_gone(size, stream);
            self.writer.free(SMALL, slot, block, time);
        } else {
            self.writer.free(LARGE, slot, block, time);
        }
        self.arenas.release_block(id, streams)?;
        Some(())
    }

    /// As [`Central::free_large`], of a block that is not reused before stream `user` is past this moment. `None`: none that is no other stream's
    /// too, and no capture's and no named pool's, starts there.
    pub fn free_behind(
        &mut self,
        page: Page<'_>,
        streams: &Streams,
        address: u64,
        user: u32,
        time: u64,
    ) -> Option<()> {
        if self.pools.has_apart() {
            return None;
        }
        let arenas = &self.arenas;
        let of_others = |run: &Run| run.shared || run.stream == user && user != EVERY;
        let is_it = |id| block_at(arenas, id, address).filter(|(_, run)| !of_others(run));
        let (id, run) = match page.remove_block(is_it) {
            Some(found) => found,
            None => {
                is_it(self.small_runs.crowded(address)?)?;
                let id = self.leave_crowd(page, address)?;
                (id, self.arenas.run(id)?)
            }
        };
        let (size, requested) = (run.bytes, run.requested());
        let Run { stream, lifetime, slot, .. } = *run;
        self.freed += size;
        self.arenas.run_mut(id)?.state = RunState::Pending;
        let epoch = if stream == EVERY { 0 } else { streams.note_free(stream) };
        self.pending.push(PendingRun {
            run: id,
            epoch,
            waits: Pending::One((user, streams.note_wait(user))),
        });
        self.unsealed += size;
        self.writer.block_pending(slot, size, requested, lifetime);
        self.writer.event(EventKind::Free, lifetime, stream, address, size, time);
        Some(())
    }

    #[cold]
    fn free_shared(&mut self, streams: &Streams, id: RunId, epoch: u64, frozen: bool) {
        if let Some(run) = self.arenas.run_mut(id) {
            run.state = RunState::Pending;
        }
        let users = self.users.remove(&id).unwrap_or_default();
        if !frozen {
            let waits = Pending::behind(users, streams);
            self.pending.push(PendingRun { run: id, epoch, waits });
            self.unsealed += self.arenas.run(id).map_or(0, |run| run.bytes);
        }
    }

    /// Notes that `user` uses the large block at `address` too. `None`: no such block.
    pub fn record_stream(&mut self, address: u64, blocks: [Option<RunId>; 2], user: u32) -> Option<()> {
        let (id, run) = self.find(address, blocks)?;
        if run.stream != user || user == EVERY {
            self.arenas.run_mut(id)?.shared = true;
            let users = self.users.entry(id).or_default();
            if !users.contains(&user) {
                users.push(user);
            }
        }
        Some(())
    }

    /// Whether large blocks wait for other streams.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Bytes of large blocks that wait for other streams.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.iter().filter_map(|block| self.arenas.run(block.run)).map(|run| run.bytes).sum()
    }

    /// Whether so much has begun to wait for streams that events are due behind it: one part in [`BATCH_SHARE`] of what is held. True once.
    pub fn take_batch(&mut self) -> bool {
        let due = self.unsealed > self.backing.held / BATCH_SHARE;
        if due {
            self.unsealed = 0;
        }
        due
    }

    /// Takes note of the streams that have got further since this was called last. Whether there are any: else no wait is over that was not.
    pub fn note_further(&mut self, streams: &Streams) -> bool {
        let mut any = false;
        for stream in streams.take_further() {
            self.arenas.note_further(stream);
            any = true;
        }
        any
    }

    /// Whether a wait that is over would not be seen: there must be none, but those of streams that have got further since
    /// [`Central::note_further`] was asked.
    pub fn overlooks_waits(&self, streams: &Streams) -> bool {
        let is_over = |block: &&PendingRun| block.waits.is_over(streams);
        let is_seen = |wait: &(u32, u64)| streams.has_got_further(wait.0);
        self.pending.iter().filter(is_over).any(|block| !block.waits.as_slice().iter().any(is_seen))
    }

    /// Frees the large blocks whose waits are over.
    pub fn settle(&mut self, streams: &Streams, shares: bool) {
        let mut at = 0;
        while at < self.pending.len() {
            if !self.pending[at].waits.is_over(streams) {
                at += 1;
                continue;
            }
            let PendingRun { run: id, epoch, .. } = self.pending.swap_remove(at);
            let Some(run) = self.arenas.run(id) else { continue };
            let Run { stream, bytes, lifetime, slot, .. } = *run;
            self.writer.block_remove(slot, bytes, run.requested(), lifetime, true);
            self.is_gone(bytes, stream);
            // All streams together have no work of their own that it could lie behind: what it waited for was all there is.
            let (owner, epoch) = if stream == EVERY && shares { (EVERYBODY, 0) } else { (stream, epoch) };
            self.arenas.release(id, owner, epoch);
        }
    }

    /// Frees the large blocks that wait only for what is ordered before the work to come of the asking stream, to that stream: those in the
    /// ordinary spaces, from which pages can move to where they are wanted, and in the space in which they are.
    pub fn settle_ordered(&mut self, streams: &Streams, want: Want) {
        let waiter = want.stream;
        let mut at = 0;
        while at < self.pending.len() {
            let PendingRun { run: id, epoch, ref waits } = self.pending[at];
            let is_ordered = |stream: u32, epoch: u64| {
                streams.completed(stream) >= epoch || self.order.of(waiter, stream) >= epoch
            };
            let Some(run) = self.arenas.run(id) else { break };
            let Run { stream, bytes, lifetime, slot, .. } = *run;
            let space = self.arenas.region(run.region).space;
            let is_wanted = space == want.space || self.spaces.is_ordinary(space);
            if !is_wanted
                || !is_ordered(stream, epoch)
                || !waits.as_slice().iter().all(|&(user, epoch)| is_ordered(user, epoch))
            {
                at += 1;
                continue;
            }
            self.pending.swap_remove(at);
            self.writer.block_remove(slot, bytes, run.requested(), lifetime, true);
            self.is_gone(bytes, stream);
            self.arenas.release(id, waiter, streams.note_free(waiter));
        }
    }

    /// Whether anything that is free or waits would be ordered by a wait for `epoch` of `stream`.
    pub fn would_gain(&self, stream: u32, epoch: u64) -> bool {
        let is_it = |other: u32, of: u64| other == stream && of <= epoch;
        // A block waits for the streams that were recorded, and lies behind the work of its own.
        let waits = |block: &PendingRun| {
            block.waits.as_slice().iter().any(|wait| is_it(wait.0, wait.1))
                || self.arenas.run(block.run).is_some_and(|run| is_it(run.stream, block.epoch))
        };
        self.pending.iter().any(waits)
            || self.spaces.iter().any(|space| self.arenas.has_freed(space, stream, epoch))
    }

    /// A run for `want` from one free run whose last work is ordered before the work to come of its stream.
    pub fn fit_ordered(&mut self, streams: &Streams, want: Want) -> Option<RunId> {
        let run = want.fit_or_join(&mut self.arenas);
        if run.is_some() {
            return run;
        }
        let order = &self.order;
        let is_ordered = |stream: u32, epoch: u64| order.of(want.stream, stream) >= epoch;
        let id = self.arenas.best_fit_ordered(want.space, want.bytes, want.align, &is_ordered)?;
        self.arenas.hand_over(id, want.stream, streams.note_free(want.stream));
        want.fit(&mut self.arenas)
    }

    /// Gives to everybody what its streams are past, in all pools whose memory every stream may get.
    pub fn promote(&mut self, streams: &Streams) {
        self.arenas.promote_ripe(self.pools.shared_spaces(), &|stream| streams.completed(stream));
    }

    /// As [`Central::promote`], of all that is free; `completed` tells the last epoch that a stream is past.
    pub fn promote_to(&mut self, completed: &dyn Fn(u32) -> u64) {
        for space in self.pools.shared_spaces() {
            self.arenas.promote(space, completed);
        }
    }

    /// Adds every stream that owns a run, uses a block or is waited for.
    pub fn streams_referred(&self, referred: &mut HashSet<u32>) {
        referred.extend(self.arenas.streams());
        referred.extend(self.users.values().flatten());
        referred.extend(self.pending.iter().flat_map(|block| block.waits.as_slice()).map(|wait| wait.0));
        for (_, shard) in self.pools.shards() {
            shard.streams_referred(referred);
        }
    }

    /// Notes a block of `backing:passthrough`.
    pub fn add_direct(&mut self, entry: &BlockEntry) {
        let slot = self.writer.block_insert(entry);
        let BlockEntry { address, size, requested, lifetime, .. } = *entry;
        self.backing.held += size;
        self.backing.reserved = self.backing.held;
        self.backing.log.note(Action::SegmentAlloc, address, size);
        self.direct.insert(address, Direct { size, requested, lifetime, slot });
        self.publish_reserved();
    }

    /// What blocks of `backing:passthrough` were asked for, in sum.
    pub fn direct_requested(&self) -> u64 {
        self.direct.values().map(|block| block.requested).sum()
    }

    /// Live bytes and bytes asked for of the block of `backing:passthrough` at `address`.
    pub fn direct_block(&self, address: u64) -> Option<(u64, u64)> {
        self.direct.get(&address).map(|block| (block.size, block.requested))
    }

    /// Whether `address` is a block of `backing:passthrough`.
    pub fn is_direct(&self, address: u64) -> bool {
        self.direct.contains_key(&address)
    }

    /// Takes a block of `backing:passthrough` off the books, for the driver to free; its live bytes.
    pub fn remove_direct(&mut self, address: u64) -> Option<u64> {
        let Direct { size, requested, lifetime, slot } = self.direct.remove(&address)?;
        self.writer.block_remove(slot, size, requested, lifetime, false);
        Some(size)
    }

    /// What the driver answered to the free of a block of `backing:passthrough`; where it refused, or could not be asked (`None`),
    /// the memory is tried again at the next trim.
    pub fn settle_direct(&mut self, address: u64, size: u64, result: Option<Result<()>>) {
        self.backing.calls += u64::from(result.is_some());
        self.backing.held -= size;
        match result {
            Some(Ok(())) => self.backing.log.note(Action::SegmentFree, address, size),
            Some(Err(error)) if error.kind == ErrorKind::Deinitialized => {}
            Some(Err(error)) => {
                log::warn!("cuMemFree({address:#x}) failed: {error}; it will be tried again");
                self.backing.errors += 1;
                self.backing.keep_orphan(address, size);
            }
            None => self.backing.keep_orphan(address, size),
        }
        self.backing.reserved = self.backing.held;
        self.publish_reserved();
    }

    /// Blocks of `backing:passthrough`: address and bytes.
    pub fn direct_blocks(&self) -> impl Iterator<Item = (u64, u64)> {
        self.direct.iter().map(|(&address, block)| (address, block.size))
    }

    /// Blocks of `backing:passthrough`, as far as they are known, and their places in the block map.
    pub fn direct_facts(&self) -> impl Iterator<Item = (BlockEntry, BlockSlot)> {
        self.direct.iter().map(|(&address, block)| {
            let &Direct { size, requested, lifetime, slot } = block;
            (BlockEntry { address, size, requested, lifetime, ..BlockEntry::default() }, slot)
        })
    }

    /// Pieces of memory that the driver gave and has not got back.
    fn pieces(&self) -> u64 {
        match self.backing.kind {
            Kind::Stitch => self.backing.held / PAGE,
            _ => (self.arenas.regions().count() + self.direct.len() + self.backing.orphans().count()) as u64,
        }
    }

    /// A slab that is in no shard any more goes back to its arena.
    pub fn release_slab(&mut self, slab: &Slab) {
        if let Some(run) = self.arenas.run_mut(slab.run) {
            run.is_slab = false;
            self.tally.slab_given(run.bytes);
        }
        self.arenas.release(slab.run, slab.stream, slab.epoch);
    }

    /// As [`Central::release_slab`]; their bytes.
    pub fn release_slabs(&mut self, slabs: &[Slab]) -> u64 {
        slabs.iter().for_each(|slab| self.release_slab(slab));
        slabs.iter().map(|slab| slab.size_class().slab_bytes()).sum()
    }
}

/// The large block of that number, if it starts at `address`.
#[inline(always)]
pub(in crate::heap) fn block_at(arenas: &Arenas, id: RunId, address: u64) -> Option<(RunId, &Run)> {
    let run = arenas.run(id)?;
    (run.address == address && run.state == RunState::Live && !run.is_slab).then_some((id, run))
}

/// Whether a request is so large that its pages go beyond the page table's addresses.
#[inline]
pub fn is_absurd(size: u64) -> bool {
    size > (1 << 48) - PAGE
}
