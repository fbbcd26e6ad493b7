//! All segments of a device, by address.
#![deny(unsafe_code)]

use crate::heap::arena::{Run, RunState, SpaceId};
use crate::heap::census::{Census, Place};
use crate::heap::central::Central;
use crate::heap::device::Device;
use crate::heap::segment::{Block, BlockState, Holder, Segment};
use crate::heap::size_class::round;
use crate::heap::slab::{Slab, SlotState};
use crate::heap::snapshot::Snapshot;
use crate::heap::stats::{free_rows, torn};
use crate::heap::streams::Streams;
use crate::heap::sync::lock;
use crate::record::LaneWriter;
use std::collections::HashMap;

fn handle(streams: &Streams, stream: u32) -> u64 {
    streams.handle(stream).map_or(0, |handle| handle.0 as u64)
}

fn free(address: u64, bytes: u64, stream: u64) -> Block {
    Block { address, bytes, requested: 0, stream, state: BlockState::Inactive, lifetime: 0, step: None }
}

type Slabs = HashMap<u64, Vec<Block>>;

/// What is gathered on the way.
struct Walk {
    slabs: Slabs,
    census: Census,
    /// Small blocks that may still be told one by one.
    room: usize,
    merged: u64,
}

impl Walk {
    /// Notes the slots of a slab that are used, by address.
    fn add(&mut self, slab: &Slab, streams: &Streams, writer: &LaneWriter) {
        let stream = handle(streams, slab.stream);
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
        let used = (0..slab.size_class().slots).filter_map(block);
        let blocks: Vec<Block> = used.inspect(|block| self.census.block(block, slab.stream)).collect();
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
}

/// The blocks of a slab as two at its beginning: what is live, and what waits for streams.
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
    if let Some(lifetime) = central.spaces.lifetime_of(space) {
        return Holder::Ordinary(lifetime as u8);
    }
    match central.named.iter().find(|(_, pool)| pool.space == space) {
        Some((_, pool)) => Holder::Pool(pool.name.clone()),
        None => Holder::Capture,
    }
}

impl Device {
    /// Looks at everything; takes one lock after the other. At most `most` small blocks are told one by one.
    pub fn snapshot(&self, most: usize) -> (Snapshot, Census) {
        let mut walk = Walk { slabs: Slabs::new(), census: Census::default(), room: most, merged: 0 };
        for lane in self.lanes.iter() {
            let cell = lock(lane);
            for (_, slab) in cell.lane.slabs() {
                walk.add(slab, &self.streams, &cell.writer);
            }
        }
        let central = lock(&self.central);
        let captured = central.captures.pools.iter().flatten().map(|pool| &pool.lane);
        for lane in captured.chain(central.named.iter().map(|(_, pool)| &pool.lane)) {
            for (_, slab) in lane.slabs() {
                walk.add(slab, &self.streams, &central.writer);
            }
        }
        let mut segments = self.segments_of_regions(&central, &mut walk);
        let Walk { mut census, merged, .. } = walk;
        let whole = |address, bytes, holder, block| Segment {
            bytes,
            small: false,
            blocks: vec![block],
            ..Segment::new(address, (0, 0), false, holder)
        };
        segments.extend(central.backing.orphans().map(|(address, bytes)| {
            census.free(Place::Orphan, bytes);
            whole(address, bytes, Holder::Orphan, free(address, bytes, 0))
        }));
        segments.extend(central.direct_facts().map(|(entry, slot)| {
            let block = Block {
                address: entry.address,
                bytes: entry.size,
                requested: entry.requested,
                stream: 0,
                state: BlockState::Allocated,
                lifetime: entry.lifetime,
                step: central.writer.step_of(slot),
            };
            census.block(&block, entry.stream);
            whole(entry.address, entry.size, Holder::Direct, block)
        }));
        segments.sort_by_key(|segment| segment.address);
        let unmapped = central.backing.pages.spare();
        census.free(Place::Unmapped, unmapped);
        census.close(central.backing.reserved);
        drop(central);
        (Snapshot { segments, unmapped, pools: self.capture_pools(), merged }, census)
    }

    fn segments_of_regions(&self, central: &Central, walk: &mut Walk) -> Vec<Segment> {
        let mut segments = Vec::new();
        for (id, region) in central.arenas.regions() {
            let mut pools = central.captures.pools.iter().flatten();
            let pool = pools.find(|pool| pool.space == region.space).and_then(|pool| pool.id);
            let stitched = central.arenas.is_stitched(id);
            let holder = holder(central, region.space);
            let fresh = |address| Segment::new(address, pool.unwrap_or_default(), stitched, holder.clone());
            for (address, bytes) in free_rows(central.arenas.runs_of(id).map(|(_, run)| run)) {
                let torn = torn(address, bytes);
                walk.census.free(Place::of(&holder, Place::Idle), bytes - torn);
                walk.census.free(Place::of(&holder, Place::Between), torn);
            }
            let mut segment = fresh(region.address);
            for (_, run) in central.arenas.runs_of(id) {
                // In a shadow nothing of this region's is mapped: its pages belong elsewhere.
                if matches!(run.state, RunState::Void | RunState::Shadow) {
                    let next = fresh(run.address + run.bytes);
                    segments.push(std::mem::replace(&mut segment, next));
                    continue;
                }
                self.add_run(&mut segment, run, walk, &central.writer);
            }
            segments.push(segment);
        }
        segments.retain(|segment| segment.bytes > 0);
        segments
    }

    fn add_run(&self, segment: &mut Segment, run: &Run, walk: &mut Walk, writer: &LaneWriter) {
        let stream = handle(&self.streams, run.stream);
        if !run.is_slab || run.state == RunState::Free {
            segment.small = false;
            let state = match run.state {
                RunState::Live => BlockState::Allocated,
                RunState::Pending => BlockState::PendingFree,
                _ => return segment.push(free(run.address, run.bytes, stream)),
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
            walk.census.block(&block, run.stream);
            segment.push(block);
            return;
        }
        // A slab that came after its lane was looked at is told as empty.
        let mut at = run.address;
        let mut used = 0;
        for block in walk.slabs.get(&run.address).map_or(&[][..], Vec::as_slice) {
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
        let place = if used == 0 { Place::Idle } else { Place::Slab };
        walk.census.free(Place::of(&segment.holder, place), run.bytes.saturating_sub(used));
    }
}
