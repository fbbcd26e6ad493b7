//! The caching allocator of one device: pools, best fit, splitting, merging, and the order of the
//! search for memory.

use super::blocks::{Block, BlockId, Blocks, Pool, PoolKind};
use super::events::Events;
use super::expandable::Segment;
use gruyere::driver::{DeviceId, Driver, Result, StreamHandle};
use std::sync::Arc;

/// Smallest block, and the unit of sizes. Bytes.
pub(super) const MIN_BLOCK: u64 = 512;
/// Largest request of the small pool. Bytes.
pub(super) const SMALL_SIZE: u64 = 1 << 20;
/// Segment of the small pool. Bytes.
pub(super) const SMALL_SEGMENT: u64 = 2 << 20;
/// Segment for large requests below [`LARGE_ALLOC`]. Bytes.
pub(super) const LARGE_SEGMENT: u64 = 20 << 20;
/// Requests from this size on get a segment of their own size. Bytes.
const LARGE_ALLOC: u64 = 10 << 20;
/// Own segments are multiples of this. Bytes.
const ROUND_LARGE: u64 = 2 << 20;

/// The source of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    /// Memory comes from cudaMalloc.
    Native,
    /// Virtual memory that grows in place.
    Expandable,
}

pub(super) struct DeviceAllocator {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) device: DeviceId,
    pub(super) rules: Rules,
    pub(super) blocks: Blocks,
    pub(super) pools: [Pool; 2],
    pub(super) segments: Vec<Option<Segment>>,
    pub(super) device_memory: u64,
    pub(super) reserved: u64,
    events: Events,
    done: Vec<BlockId>,
}

fn segment_size(size: u64) -> u64 {
    if size <= SMALL_SIZE {
        SMALL_SEGMENT
    } else if size < LARGE_ALLOC {
        LARGE_SEGMENT
    } else {
        size.div_ceil(ROUND_LARGE) * ROUND_LARGE
    }
}

impl DeviceAllocator {
    pub fn new(driver: Arc<dyn Driver>, device: DeviceId, rules: Rules) -> Result<Self> {
        let device_memory = driver.memory_info(device)?.total;
        Ok(Self {
            driver,
            device,
            rules,
            blocks: Blocks::default(),
            pools: [Pool::default(), Pool::default()],
            segments: Vec::new(),
            device_memory,
            reserved: 0,
            events: Events::default(),
            done: Vec::new(),
        })
    }

    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Tries completed events, a cached block, fresh memory, and fresh memory after the release of
    /// the cache.
    ///
    /// Passes on the driver's out-of-memory error if all of them fail.
    pub fn malloc(&mut self, requested: u64, stream: StreamHandle) -> Result<(BlockId, u64)> {
        self.return_finished_blocks()?;
        let size = requested.div_ceil(MIN_BLOCK) * MIN_BLOCK;
        let pool = if size <= SMALL_SIZE { PoolKind::Small } else { PoolKind::Large };
        let block = match self.take_cached(pool, stream, size) {
            Some(block) => block,
            None => match self.grow(pool, stream, size) {
                Err(error) if error.is_out_of_memory() => {
                    self.release_cached()?;
                    self.grow(pool, stream, size)?
                }
                other => other?,
            },
        };
        if self.is_worth_splitting(block, size) {
            self.split(block, size);
        }
        self.blocks[block].allocated = true;
        Ok((block, self.blocks[block].address))
    }

    pub fn free(&mut self, id: BlockId) -> Result<()> {
        self.blocks[id].allocated = false;
        let uses = std::mem::take(&mut self.blocks[id].uses);
        if uses.is_empty() {
            self.make_free(id);
        }
        for stream in uses {
            self.events.record(&*self.driver, self.device, stream, id)?;
            self.blocks[id].events += 1;
        }
        Ok(())
    }

    pub fn record_stream(&mut self, id: BlockId, stream: StreamHandle) {
        let block = &mut self.blocks[id];
        if stream != block.stream && !block.uses.contains(&stream) {
            block.uses.push(stream);
        }
    }

    fn return_finished_blocks(&mut self) -> Result<()> {
        self.with_finished(|events, driver, device, done| events.poll(driver, device, done))
    }

    fn with_finished(
        &mut self,
        find: impl FnOnce(&mut Events, &dyn Driver, DeviceId, &mut Vec<BlockId>) -> Result<()>,
    ) -> Result<()> {
        let mut done = std::mem::take(&mut self.done);
        let result = find(&mut self.events, &*self.driver, self.device, &mut done);
        for id in done.drain(..) {
            self.blocks[id].events -= 1;
            if self.blocks[id].events == 0 {
                self.make_free(id);
            }
        }
        self.done = done;
        result
    }

    fn take_cached(&mut self, pool: PoolKind, stream: StreamHandle, size: u64) -> Option<BlockId> {
        let best = self.best_fit(pool, stream, size)?;
        self.pool_remove(best);
        Some(best)
    }

    /// Best fit among the stream's free blocks. With expandable segments, a block counts with the
    /// address space after it, so that the end of a segment is the last resort.
    fn best_fit(&self, pool: PoolKind, stream: StreamHandle, size: u64) -> Option<BlockId> {
        let mut fitting = self.pools[pool as usize].fitting(stream, size);
        let mut best = fitting.next()?;
        if self.rules == Rules::Expandable {
            for next in fitting {
                if self.size_with_room(next) >= self.size_with_room(best) {
                    break;
                }
                best = next;
            }
        }
        Some(best)
    }

    fn size_with_room(&self, id: BlockId) -> u64 {
        let block = &self.blocks[id];
        let room = block.next.map(|next| &self.blocks[next]).filter(|next| !next.mapped);
        block.size + room.map_or(0, |next| next.size)
    }

    /// A block of at least `size` bytes in fresh memory.
    fn grow(&mut self, pool: PoolKind, stream: StreamHandle, size: u64) -> Result<BlockId> {
        if self.rules == Rules::Expandable {
            return self.grow_segment(pool, stream, size);
        }
        let bytes = segment_size(size);
        let address = self.driver.alloc(self.device, bytes)?;
        self.reserved += bytes;
        Ok(self.blocks.insert(Block::new(address, bytes, stream, pool)))
    }

    fn is_worth_splitting(&self, id: BlockId, size: u64) -> bool {
        let block = &self.blocks[id];
        let remainder = block.size - size;
        if block.pool == PoolKind::Small || self.rules == Rules::Expandable {
            remainder >= MIN_BLOCK
        } else {
            remainder > SMALL_SIZE
        }
    }

    /// Cuts `id` down to `size`; the rest becomes a free block.
    fn split(&mut self, id: BlockId, size: u64) {
        let block = &mut self.blocks[id];
        let mut rest =
            Block::new(block.address + size, block.size - size, block.stream, block.pool);
        rest.segment = block.segment;
        block.size = size;
        let after = block.next;
        let rest = self.blocks.insert(rest);
        self.blocks.splice(rest, Some(id), after);
        self.pool_insert(rest);
    }

    pub(super) fn pool_insert(&mut self, id: BlockId) {
        let block = &self.blocks[id];
        self.pools[block.pool as usize].insert(id, block);
    }

    pub(super) fn pool_remove(&mut self, id: BlockId) {
        let block = &self.blocks[id];
        self.pools[block.pool as usize].remove(id, block);
    }

    fn make_free(&mut self, id: BlockId) {
        self.merge_with_neighbours(id);
        self.pool_insert(id);
    }

    /// Merges `id`, which is in no set, with its idle neighbours of the same kind (mapped or not).
    pub(super) fn merge_with_neighbours(&mut self, id: BlockId) {
        for neighbour in [self.blocks[id].prev, self.blocks[id].next].into_iter().flatten() {
            let (block, other) = (&self.blocks[id], &self.blocks[neighbour]);
            if !other.is_idle() || other.mapped != block.mapped {
                continue;
            }
            let (size, address, prev, next) = (other.size, other.address, other.prev, other.next);
            self.pool_remove(neighbour);
            self.blocks.remove(neighbour);
            let block = &mut self.blocks[id];
            block.size += size;
            let (before, after) = if block.prev == Some(neighbour) {
                block.address = address;
                (prev, block.next)
            } else {
                (block.prev, next)
            };
            self.blocks.splice(id, before, after);
        }
    }

    /// Waits for the blocks used by other streams and releases every idle segment, large ones
    /// first.
    pub fn release_cached(&mut self) -> Result<()> {
        self.with_finished(|events, driver, device, done| {
            events.synchronize(driver, device, done)
        })?;
        for pool in [PoolKind::Large, PoolKind::Small] {
            let cached: Vec<BlockId> =
                self.pools[pool as usize].free.iter().map(|key| key.3).collect();
            let (expandable, plain): (Vec<_>, Vec<_>) =
                cached.into_iter().partition(|&id| self.blocks[id].segment.is_some());
            for id in
                plain.into_iter().filter(|&id| !self.blocks[id].is_split()).collect::<Vec<_>>()
            {
                self.driver.free(self.device, self.blocks[id].address)?;
                self.reserved -= self.blocks[id].size;
                self.pool_remove(id);
                self.blocks.remove(id);
            }
            for id in expandable {
                self.unmap_block(id)?;
            }
        }
        Ok(())
    }

    pub fn validate(&self) -> std::result::Result<(), String> {
        let mut held = 0;
        let mut idle = [0, 0];
        for id in self.blocks.in_use() {
            let block = &self.blocks[id];
            if block.mapped {
                held += block.size;
            }
            if block.is_idle() {
                idle[block.pool as usize] += 1;
            }
            if let Some(next) = block.next {
                let next = &self.blocks[next];
                if next.prev != Some(id) || next.address != block.address + block.size {
                    return Err(format!("the block after {:#x} does not follow it", block.address));
                }
                if block.is_idle() && next.is_idle() && block.mapped == next.mapped {
                    return Err(format!(
                        "{:#x} should have merged with its neighbour",
                        block.address
                    ));
                }
            }
        }
        if held != self.reserved {
            return Err(format!("blocks hold {held} bytes, {} are reserved", self.reserved));
        }
        for (pool, idle) in self.pools.iter().zip(idle) {
            if pool.free.len() + pool.unmapped.len() != idle {
                return Err(format!("{idle} idle blocks, but the sets disagree"));
            }
        }
        Ok(())
    }
}
