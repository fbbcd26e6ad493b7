//! Expandable segments: address space beyond the device's memory, with memory mapped granule by
//! granule.

use super::blocks::{Block, BlockId, PoolKind};
use super::caching::{DeviceAllocator, LARGE_SEGMENT, SMALL_SEGMENT};
use gruyere::driver::{DeviceId, Driver, PhysicalHandle, Result, StreamHandle};

/// One reservation of address space and the memory mapped into it.
pub(super) struct Segment {
    base: u64,
    granule: u64,
    stream: StreamHandle,
    handles: Vec<Option<PhysicalHandle>>,
}

impl Segment {
    fn bytes(&self) -> u64 {
        self.granule * self.handles.len() as u64
    }

    /// Maps the granules needed for `size` bytes from `address` on; returns the mapped bytes, which
    /// may be more.
    ///
    /// Either all of them or, out of memory, none.
    fn map(
        &mut self,
        driver: &dyn Driver,
        device: DeviceId,
        address: u64,
        size: u64,
    ) -> Result<u64> {
        let first = ((address - self.base) / self.granule) as usize;
        let end = (address - self.base + size).div_ceil(self.granule) as usize;
        for index in first..end {
            match driver.physical_create(device, self.granule) {
                Ok(handle) => self.handles[index] = Some(handle),
                Err(error) => {
                    for handle in self.handles[first..index].iter_mut().filter_map(Option::take) {
                        driver.physical_release(device, handle)?;
                    }
                    return Err(error);
                }
            }
        }
        for (index, handle) in self.handles.iter().enumerate().take(end).skip(first) {
            if let Some(handle) = *handle {
                driver.map(
                    device,
                    self.base + index as u64 * self.granule,
                    self.granule,
                    handle,
                )?;
            }
        }
        let bytes = (end - first) as u64 * self.granule;
        driver.set_access(device, address, bytes, &[])?;
        Ok(bytes)
    }

    /// Unmaps the whole granules of a range; returns the start of the unmapped part and its bytes
    /// (0: no whole granule).
    fn unmap(
        &mut self,
        driver: &dyn Driver,
        device: DeviceId,
        address: u64,
        size: u64,
    ) -> Result<(u64, u64)> {
        let first = (address - self.base).div_ceil(self.granule) as usize;
        let end = ((address - self.base + size) / self.granule) as usize;
        if first >= end {
            return Ok((address, 0));
        }
        // Unmapping is not stream-ordered: the stream must be done with the memory.
        driver.stream_synchronize(device, self.stream)?;
        for index in first..end {
            driver.unmap(device, self.base + index as u64 * self.granule, self.granule)?;
            if let Some(handle) = self.handles[index].take() {
                driver.physical_release(device, handle)?;
            }
        }
        Ok((self.base + first as u64 * self.granule, (end - first) as u64 * self.granule))
    }
}

impl DeviceAllocator {
    /// A free block of at least `size` bytes at the lowest address space that has room, with memory
    /// mapped as needed.
    pub(super) fn grow_segment(
        &mut self,
        pool: PoolKind,
        stream: StreamHandle,
        size: u64,
    ) -> Result<BlockId> {
        let mut block = match self.find_room(pool, stream, size) {
            Some(block) => block,
            None => self.reserve_segment(pool, stream)?,
        };
        if !self.blocks[block].mapped {
            self.map_block(block, size.min(self.blocks[block].size))?;
        }
        // Unmapped space and free blocks follow in turn, until there is room.
        while self.blocks[block].size < size {
            let missing = size - self.blocks[block].size;
            let Some(next) = self.blocks[block].next else { break };
            self.map_block(next, missing.min(self.blocks[next].size))?;
            block = next;
        }
        self.pool_remove(block);
        Ok(block)
    }

    /// The lowest run of unmapped and free blocks with `size` bytes; a free block right before
    /// unmapped space counts.
    fn find_room(&self, pool: PoolKind, stream: StreamHandle, size: u64) -> Option<BlockId> {
        self.pools[pool as usize].unmapped_of(stream).find_map(|unmapped| {
            let before = self.blocks[unmapped].prev.filter(|&prev| self.blocks[prev].is_idle());
            let start = before.unwrap_or(unmapped);
            let (mut room, mut at) = (0, Some(start));
            while let Some(block) =
                at.map(|id| &self.blocks[id]).filter(|block| room < size && block.is_idle())
            {
                room += block.size;
                at = block.next;
            }
            (room >= size).then_some(start)
        })
    }

    /// Address space of nine eighths of the device's memory.
    fn reserve_segment(&mut self, pool: PoolKind, stream: StreamHandle) -> Result<BlockId> {
        let granule = if pool == PoolKind::Small { SMALL_SEGMENT } else { LARGE_SEGMENT };
        let granules = (self.device_memory + self.device_memory / 8).div_ceil(granule);
        let bytes = granules * granule;
        let base = self.driver.address_reserve(self.device, bytes, 0)?;
        let segment = Segment { base, granule, stream, handles: vec![None; granules as usize] };
        let index = self.segments.iter().position(Option::is_none).unwrap_or(self.segments.len());
        if index == self.segments.len() {
            self.segments.push(None);
        }
        self.segments[index] = Some(segment);
        let mut block = Block::new(base, bytes, stream, pool);
        block.mapped = false;
        block.segment = Some(index as u32);
        let block = self.blocks.insert(block);
        self.pool_insert(block);
        Ok(block)
    }

    fn segment_of(&mut self, id: BlockId) -> Option<&mut Segment> {
        let index = self.blocks[id].segment?;
        self.segments.get_mut(index as usize)?.as_mut()
    }

    /// Maps at least `size` bytes of the unmapped block `id`, which joins its free neighbours and
    /// enters the free set.
    fn map_block(&mut self, id: BlockId, size: u64) -> Result<()> {
        let (driver, device, address) = (self.driver.clone(), self.device, self.blocks[id].address);
        let Some(segment) = self.segment_of(id) else { return Ok(()) };
        let mapped = segment.map(&*driver, device, address, size)?;
        self.pool_remove(id);
        self.blocks[id].mapped = true;
        if mapped < self.blocks[id].size {
            let block = &mut self.blocks[id];
            let mut rest =
                Block::new(block.address + mapped, block.size - mapped, block.stream, block.pool);
            rest.mapped = false;
            rest.segment = block.segment;
            block.size = mapped;
            let after = block.next;
            let rest = self.blocks.insert(rest);
            self.blocks.splice(rest, Some(id), after);
            self.pool_insert(rest);
        }
        self.merge_with_neighbours(id);
        self.pool_insert(id);
        self.reserved += mapped;
        Ok(())
    }

    /// Unmaps the whole granules of the free block `id`; its ends stay as free blocks of their own.
    pub(super) fn unmap_block(&mut self, id: BlockId) -> Result<()> {
        let (driver, device) = (self.driver.clone(), self.device);
        let (address, size) = (self.blocks[id].address, self.blocks[id].size);
        let Some(segment) = self.segment_of(id) else { return Ok(()) };
        let (start, bytes) = segment.unmap(&*driver, device, address, size)?;
        let whole = segment.bytes();
        if bytes == 0 {
            return Ok(());
        }
        self.pool_remove(id);
        if start > address {
            let before = self.blocks[id].prev;
            let head = self.free_piece(id, address, start - address);
            self.blocks.splice(head, before, Some(id));
        }
        let end = start + bytes;
        if end < address + size {
            let after = self.blocks[id].next;
            let tail = self.free_piece(id, end, address + size - end);
            self.blocks.splice(tail, Some(id), after);
        }
        let block = &mut self.blocks[id];
        (block.address, block.size, block.mapped) = (start, bytes, false);
        self.merge_with_neighbours(id);
        self.pool_insert(id);
        self.reserved -= bytes;
        if self.blocks[id].size == whole {
            self.release_segment(id)?;
        }
        Ok(())
    }

    /// A free block cut from `of`, in the free set but not linked yet.
    fn free_piece(&mut self, of: BlockId, address: u64, size: u64) -> BlockId {
        let mut piece = Block::new(address, size, self.blocks[of].stream, self.blocks[of].pool);
        piece.segment = self.blocks[of].segment;
        let piece = self.blocks.insert(piece);
        self.pool_insert(piece);
        piece
    }

    /// Releases the address space of a segment that is one unmapped block.
    fn release_segment(&mut self, id: BlockId) -> Result<()> {
        let Some(index) = self.blocks[id].segment else { return Ok(()) };
        if let Some(segment) = self.segments[index as usize].take() {
            self.driver.address_free(self.device, segment.base, segment.bytes())?;
        }
        self.pool_remove(id);
        self.blocks.remove(id);
        Ok(())
    }
}
