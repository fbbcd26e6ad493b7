//! Snapshots: every segment of a device and the blocks that tile it, from the heap's own books.
//!
//! A segment is a contiguous range of memory held: a span, a row of mapped pages, a block of
//! `backing:passthrough`. The walk takes one lock after the other, so beside threads that allocate
//! meanwhile, a slab may appear as it was some microseconds before the rest.

use crate::central::{Central, SMALL};
use crate::device::Device;
use crate::error::Error;
use crate::heap::Heap;
use crate::order::streams::Streams;
use crate::pools::capture::PoolId;
use crate::pools::{Pool, PoolNumber, Purpose, capture_of};
pub use crate::report::segment_stats::{Block, BlockState, Holder, Segment};
use crate::report::segment_stats::{Place, SegmentStats};
use crate::report::stats::CapturePoolHeld;
use crate::report::walk::{Visitor, WalkedShard};
use crate::runs::arena::{Region, RegionId, Run, RunId, RunState, SpaceId};
use crate::runs::rows::{joined, partial_page_bytes};
use crate::small::size_class::{PAGE, round};
use crate::small::slab::{Slab, SlotState};
use gruyere_record::ShardWriter;
use gruyere_record::gauges::SMALL_LIMIT;
use std::collections::HashMap;
use std::convert::Infallible;

fn handle(streams: &Streams, stream: u32) -> u64 {
    streams.handle(stream).map_or(0, |handle| handle.0 as u64)
}

fn free(address: u64, bytes: u64, stream: u64) -> Block {
    Block {
        address,
        bytes,
        requested: 0,
        stream,
        state: BlockState::Inactive,
        lifetime: 0,
        step: None,
    }
}

/// The state of a walk for a snapshot.
struct Picture<'a> {
    streams: &'a Streams,
    /// The used slots of slabs, by the first byte of the slab.
    slabs: HashMap<u64, Vec<Block>>,
    segment_stats: SegmentStats,
    /// Small blocks that may still be listed one by one.
    room: usize,
    merged: u64,
    segments: Vec<Segment>,
    /// torch's ids of capture pools, by their spaces.
    ids: HashMap<SpaceId, PoolId>,
    /// Whether the region's space is for small blocks alone, which are runs there.
    has_small_runs: bool,
}

impl Visitor for Picture<'_> {
    type Error = Infallible;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), Infallible> {
        for (_, slab) in walked.shard.slabs() {
            self.add_slab(slab, walked.writer);
        }
        Ok(())
    }

    fn pool(
        &mut self,
        number: PoolNumber,
        pool: &Pool,
        central: &Central,
    ) -> Result<(), Infallible> {
        if let Some(id) = capture_of(number).and_then(|number| central.captures.id(number)) {
            self.ids.insert(pool.space(), id);
        }
        Ok(())
    }

    fn region(
        &mut self,
        id: RegionId,
        region: &Region,
        central: &Central,
    ) -> Result<(), Infallible> {
        let holder = holder(central, region.space);
        // An empty slab is free memory like a free run: together they may be whole pages.
        let is_free = |run: &&Run| {
            run.state == RunState::Free || run.is_slab && self.is_empty_slab(run.address)
        };
        let free = central.arenas.runs_of(id).map(|(_, run)| run).filter(is_free);
        for (address, bytes) in joined(free.map(|run| (run.address, run.bytes)), |_| false) {
            let partial = partial_page_bytes(address, bytes);
            self.segment_stats.free(Place::of(&holder, Place::Idle), bytes - partial);
            self.segment_stats.free(Place::of(&holder, Place::Between), partial);
        }
        self.has_small_runs = central
            .pools
            .of_space(region.space)
            .is_some_and(|pool| pool.is_outside() && pool.space_of_size(1) == region.space);
        let pool = self.ids.get(&region.space).copied().unwrap_or_default();
        self.segments.push(Segment::new(
            region.address,
            pool,
            central.arenas.is_stitched(id),
            holder,
        ));
        Ok(())
    }

    fn run(&mut self, _: RunId, run: &Run, central: &Central) -> Result<(), Infallible> {
        // In a stale alias no page of this region is mapped: its pages belong elsewhere.
        if matches!(run.state, RunState::Unmapped | RunState::StaleAlias) {
            self.begin_segment(run.address + run.bytes);
        } else {
            self.add_run(run, &central.writers[SMALL]);
        }
        Ok(())
    }
}

impl Picture<'_> {
    /// Whether the slab at `address` is empty. A slab made after the walk passed its shard counts
    /// as empty.
    fn is_empty_slab(&self, address: u64) -> bool {
        self.slabs.get(&address).is_none_or(Vec::is_empty)
    }

    /// Notes the used slots of a slab, by address.
    fn add_slab(&mut self, slab: &Slab, writer: &ShardWriter) {
        let stream = handle(self.streams, slab.stream);
        let block = |slot| {
            let state = match slab.state(slot) {
                SlotState::Free => return None,
                SlotState::Live { .. } => BlockState::Allocated,
                SlotState::Pending => BlockState::PendingFree,
            };
            let facts = slab.facts(slot);
            Some(Block {
                address: slab.address(slot),
                bytes: round(facts.requested),
                requested: facts.requested,
                stream,
                state,
                lifetime: slab.lifetime,
                step: writer.step_of(facts.block),
            })
        };
        let used = (0..slab.count()).filter_map(block);
        let blocks: Vec<Block> =
            used.inspect(|block| self.segment_stats.block(block, slab.stream)).collect();
        let blocks = match self.room.checked_sub(blocks.len()) {
            Some(room) => {
                self.room = room;
                blocks
            }
            None => {
                self.merged += blocks.len() as u64;
                merge(slab.base, &blocks)
            }
        };
        self.slabs.insert(slab.base, blocks);
    }

    /// Splits a row of pages into parts, so that small and large parts add up to the small and the
    /// large pool of [`crate::report::usage`].
    fn begin_part(&mut self, address: u64, is_small: bool) {
        let Some(last) = self.segments.last() else { return };
        if last.stitched && (last.is_small() != is_small || last.is_idle()) {
            self.begin_segment(address);
        }
    }

    /// Begins another segment of the same region. One that stays without a piece is left out.
    fn begin_segment(&mut self, address: u64) {
        let Some(last) = self.segments.last() else { return };
        let next = Segment::new(address, last.pool, last.stitched, last.holder.clone());
        self.segments.push(next);
    }

    /// Adds free memory. In a row of pages, whole free pages are a segment of their own, like an
    /// unused segment of torch's: so changes beside the blocks of a graph change none of the
    /// graph's segments.
    fn add_free(&mut self, address: u64, bytes: u64, stream: u64) {
        let end = address + bytes;
        let (first, last) = (address.next_multiple_of(PAGE), end / PAGE * PAGE);
        let is_stitched = self.segments.last().is_some_and(|segment| segment.stitched);
        let (first, last) = if is_stitched && first < last { (first, last) } else { (end, end) };
        self.push_free(address, first, stream);
        for (from, to) in [(first, last), (last, end)].into_iter().filter(|(from, to)| from < to) {
            self.begin_segment(from);
            self.push_free(from, to, stream);
        }
    }

    fn push_free(&mut self, from: u64, to: u64, stream: u64) {
        if let Some(segment) = self.segments.last_mut().filter(|_| from < to) {
            segment.push(free(from, to - from, stream));
        }
    }

    fn add_run(&mut self, run: &Run, writer: &ShardWriter) {
        let stream = handle(self.streams, run.stream);
        let is_used = self.has_small_runs || run.state != RunState::Free;
        let is_small = self.has_small_runs || is_used && (run.is_slab || run.bytes <= SMALL_LIMIT);
        self.begin_part(run.address, is_small);
        let Some(segment) = self.segments.last_mut() else { return };
        if is_used {
            segment.note_served(is_small);
        }
        if !run.is_slab || run.state == RunState::Free {
            let state = match run.state {
                RunState::Live => BlockState::Allocated,
                RunState::Pending => BlockState::PendingFree,
                _ => return self.add_free(run.address, run.bytes, stream),
            };
            let block = Block {
                address: run.address,
                bytes: run.bytes,
                requested: run.requested(),
                stream,
                state,
                lifetime: run.lifetime,
                step: writer.step_of(run.slot),
            };
            self.segment_stats.block(&block, run.stream);
            segment.push(block);
            return;
        }
        let mut at = run.address;
        let mut used = 0;
        for block in self.slabs.get(&run.address).map_or(&[][..], Vec::as_slice) {
            if block.address > at {
                segment.push(free(at, block.address - at, stream));
            }
            segment.push(*block);
            used += block.bytes;
            at = block.address + block.bytes;
        }
        let end = run.address + run.bytes;
        if end > at {
            segment.push(free(at, end - at, stream));
        }
        if used > 0 {
            let place = Place::of(&segment.holder, Place::Slab);
            self.segment_stats.free(place, run.bytes.saturating_sub(used));
        }
    }
}

/// Merges the blocks of a slab into two at its beginning: one live, one waiting for streams.
fn merge(base: u64, blocks: &[Block]) -> Vec<Block> {
    let mut merged: Vec<Block> = Vec::new();
    let mut at = base;
    for state in [BlockState::Allocated, BlockState::PendingFree] {
        let mut alike = blocks.iter().filter(|block| block.state == state);
        let Some(&first) = alike.next() else { continue };
        let sum = alike.fold(Block { address: at, step: None, ..first }, |sum, block| Block {
            bytes: sum.bytes + block.bytes,
            requested: sum.requested + block.requested,
            ..sum
        });
        at += sum.bytes;
        merged.push(sum);
    }
    merged
}

fn holder(central: &Central, space: SpaceId) -> Holder {
    match central.pools.of_space(space).map(|pool| &pool.purpose) {
        Some(Purpose::Ordinary(lifetime)) => Holder::Ordinary(*lifetime as u8),
        Some(Purpose::Named(name)) => Holder::Pool(name.clone()),
        Some(Purpose::Capture) | None => Holder::Capture,
    }
}

impl Device {
    /// A snapshot and its sums; takes one lock after the other. Lists at most `most` small blocks
    /// one by one.
    pub(crate) fn snapshot(&self, most: usize) -> (Snapshot, SegmentStats) {
        let mut picture = Picture {
            streams: &self.streams,
            slabs: HashMap::new(),
            segment_stats: SegmentStats::default(),
            room: most,
            merged: 0,
            segments: Vec::new(),
            ids: HashMap::new(),
            has_small_runs: false,
        };
        let Ok(central) = self.walk(&mut picture);
        let Picture { mut segment_stats, merged, mut segments, .. } = picture;
        segments.retain(|segment| segment.bytes > 0);
        let whole = |address, holder, block| {
            let mut segment = Segment::new(address, (0, 0), false, holder);
            segment.push(block);
            segment
        };
        segments.extend(central.backing.orphans().map(|(address, bytes)| {
            segment_stats.free(Place::Orphan, bytes);
            whole(address, Holder::Orphan, free(address, bytes, 0))
        }));
        segments.extend(central.direct_facts().map(|(entry, slot)| {
            let block = Block {
                address: entry.address,
                bytes: entry.size,
                requested: entry.requested,
                stream: 0,
                state: BlockState::Allocated,
                lifetime: entry.lifetime,
                step: central.writers[SMALL].step_of(slot),
            };
            segment_stats.block(&block, entry.stream);
            let mut segment = whole(entry.address, Holder::Direct, block);
            segment.note_served(entry.size <= SMALL_LIMIT);
            segment
        }));
        segments.sort_by_key(|segment| segment.address);
        let unmapped = central.backing.pages.spare();
        segment_stats.free(Place::Unmapped, unmapped);
        segment_stats.close(central.backing.reserved);
        drop(central);
        (Snapshot { segments, unmapped, pools: self.capture_pools(), merged }, segment_stats)
    }
}

/// All segments of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The segments, by address.
    pub segments: Vec<Segment>,
    /// Bytes held that are mapped nowhere.
    pub unmapped: u64,
    /// The memory of each capture pool of torch's.
    pub pools: Vec<CapturePoolHeld>,
    /// Small blocks merged with others of their slab, because there were too many.
    pub merged: u64,
}

impl Heap {
    /// Every segment of a device, and the blocks that tile it. Empty if the device is unused.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn snapshot(&self, device: i64) -> Result<Snapshot, Error> {
        Ok(self
            .device_in_use(device)?
            .map_or_else(Snapshot::default, |device| device.snapshot(usize::MAX).0))
    }

    /// As [`Heap::snapshot`], with sums; lists at most `most` small blocks one by one. `None` if
    /// the device is unused.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn segment_stats(
        &self,
        device: i64,
        most: usize,
    ) -> Result<Option<(Snapshot, SegmentStats)>, Error> {
        Ok(self.device_in_use(device)?.map(|device| device.snapshot(most)))
    }
}
