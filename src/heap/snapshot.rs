//! What lies where: every segment of a device and the blocks that tile it, from the heap's own books.
//!
//! A segment is a contiguous range of memory held: a span, a row of mapped pages, a block of `backing:passthrough`. Lanes and the
//! central part are looked at one after the other, so beside threads that allocate meanwhile, a slab may be told as it was some
//! microseconds before the rest.
#![deny(unsafe_code)]

use super::arena::{Run, RunState};
use super::capture::PoolId;
use super::central::Central;
use super::device::Device;
use super::lane::round;
use super::slab::{Slab, SlotState};
use super::stats::CapturePoolHeld;
use super::streams::Streams;
use super::{Error, Heap, lock};
use std::collections::HashMap;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum BlockState {
    /// Nobody's.
    Inactive = 0,
    /// The program's.
    Allocated = 1,
    /// Freed by the program, waiting for streams.
    PendingFree = 2,
}

/// A piece of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First byte.
    pub address: u64,
    /// Length, a multiple of 512.
    pub bytes: u64,
    /// Bytes that the program asked for; 0 where it is nobody's.
    pub requested: u64,
    /// The stream's handle; of free memory, that of whose it is, or 0.
    pub stream: u64,
    /// What it is.
    pub state: BlockState,
}

/// A contiguous range of memory held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// torch's id of the capture pool that it belongs to; (0, 0): none.
    pub pool: PoolId,
    /// It is cut into small blocks only.
    pub small: bool,
    /// It may grow and shrink page by page.
    pub stitched: bool,
    /// They tile it, by address.
    pub blocks: Vec<Block>,
}

impl Segment {
    fn new(address: u64, pool: PoolId, stitched: bool) -> Self {
        Self { address, bytes: 0, pool, small: true, stitched, blocks: Vec::new() }
    }

    /// Adds a piece at its end. Free pieces of one stream are one.
    fn push(&mut self, block: Block) {
        self.bytes += block.bytes;
        match self.blocks.last_mut() {
            Some(last)
                if (last.state, last.stream) == (BlockState::Inactive, block.stream)
                    && block.state == BlockState::Inactive =>
            {
                last.bytes += block.bytes;
            }
            _ => self.blocks.push(block),
        }
    }
}

/// All segments of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// By address.
    pub segments: Vec<Segment>,
    /// Bytes held that are mapped nowhere.
    pub unmapped: u64,
    /// What each capture pool of torch's holds.
    pub pools: Vec<CapturePoolHeld>,
}

fn handle(streams: &Streams, stream: u32) -> u64 {
    streams.handle(stream).map_or(0, |handle| handle.0 as u64)
}

fn free(address: u64, bytes: u64, stream: u64) -> Block {
    Block { address, bytes, requested: 0, stream, state: BlockState::Inactive }
}

/// The slots of a slab that are used, by address.
fn used_slots(slab: &Slab, streams: &Streams) -> Vec<Block> {
    let stream = handle(streams, slab.stream);
    let block = |slot| {
        let state = match slab.state(slot) {
            SlotState::Free => return None,
            SlotState::Live { .. } => BlockState::Allocated,
            SlotState::Pending => BlockState::PendingFree,
        };
        let requested = slab.facts(slot).requested;
        Some(Block { address: slab.address(slot), bytes: round(requested), requested, stream, state })
    };
    (0..slab.size_class().slots).filter_map(block).collect()
}

type Slabs = HashMap<u64, Vec<Block>>;

impl Device {
    /// Looks at everything; takes one lock after the other.
    pub fn snapshot(&self) -> Snapshot {
        let mut slabs = Slabs::new();
        for lane in self.lanes.iter() {
            let cell = lock(lane);
            slabs.extend(cell.lane.slabs().map(|(_, slab)| (slab.base, used_slots(slab, &self.streams))));
        }
        let central = lock(&self.central);
        for pool in central.captures.pools.iter().flatten() {
            slabs.extend(pool.lane.slabs().map(|(_, slab)| (slab.base, used_slots(slab, &self.streams))));
        }
        for (_, pool) in central.named.iter() {
            slabs.extend(pool.lane.slabs().map(|(_, slab)| (slab.base, used_slots(slab, &self.streams))));
        }
        let mut segments = self.segments_of_regions(&central, &slabs);
        let whole = |address, bytes, block| Segment {
            bytes,
            small: false,
            blocks: vec![block],
            ..Segment::new(address, (0, 0), false)
        };
        segments.extend(
            central.backing.orphans().map(|(address, bytes)| whole(address, bytes, free(address, bytes, 0))),
        );
        segments.extend(central.direct_facts().map(|(address, bytes, requested)| {
            let state = BlockState::Allocated;
            whole(address, bytes, Block { address, bytes, requested, stream: 0, state })
        }));
        segments.sort_by_key(|segment| segment.address);
        let unmapped = central.backing.pages.spare();
        drop(central);
        Snapshot { segments, unmapped, pools: self.capture_pools() }
    }

    fn segments_of_regions(&self, central: &Central, slabs: &Slabs) -> Vec<Segment> {
        let mut segments = Vec::new();
        for (id, region) in central.arenas.regions() {
            let mut pools = central.captures.pools.iter().flatten();
            let pool = pools.find(|pool| pool.space == region.space).and_then(|pool| pool.id);
            let stitched = central.arenas.is_stitched(id);
            let fresh = |address| Segment::new(address, pool.unwrap_or_default(), stitched);
            let mut segment = fresh(region.address);
            for (_, run) in central.arenas.runs_of(id) {
                // In a shadow nothing of this region's is mapped: its pages belong elsewhere.
                if matches!(run.state, RunState::Void | RunState::Shadow) {
                    let next = fresh(run.address + run.bytes);
                    segments.push(std::mem::replace(&mut segment, next));
                    continue;
                }
                self.add_run(&mut segment, run, slabs);
            }
            segments.push(segment);
        }
        segments.retain(|segment| segment.bytes > 0);
        segments
    }

    fn add_run(&self, segment: &mut Segment, run: &Run, slabs: &Slabs) {
        let stream = handle(&self.streams, run.stream);
        if !run.is_slab || run.state == RunState::Free {
            let (state, requested) = match run.state {
                RunState::Live => (BlockState::Allocated, run.requested()),
                RunState::Pending => (BlockState::PendingFree, run.requested()),
                _ => (BlockState::Inactive, 0),
            };
            segment.small = false;
            segment.push(Block { address: run.address, bytes: run.bytes, requested, stream, state });
            return;
        }
        // A slab that came after its lane was looked at is told as empty.
        let mut at = run.address;
        for block in slabs.get(&run.address).map_or(&[][..], Vec::as_slice) {
            if block.address > at {
                segment.push(free(at, block.address - at, stream));
            }
            segment.push(*block);
            at = block.address + block.bytes;
        }
        let end = run.address + run.bytes;
        if end > at {
            segment.push(free(at, end - at, stream));
        }
    }
}

impl Heap {
    /// Every segment of a device, and the blocks that tile it. Nothing where the device has not been used.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn snapshot(&self, device: i64) -> Result<Snapshot, Error> {
        Ok(self.device_in_use(device)?.map_or_else(Snapshot::default, Device::snapshot))
    }
}
