//! The hot path: a block comes, a block goes. No locked instruction, and no word that another lane writes.
//!
//! In the heap's hot paths (callgrind on `moe`, x86-64) a malloc spends about 65 instructions here and a free 45: the block map 15 and 12, the event
//! 11, the gauges under their seqlock 7, the size histogram 9 (one for small blocks, whose bucket comes with their size class), live counts and
//! their ceilings 19 and 8; the clock's read is 4 more. A lane that settles takes about 700 more.

use super::block_map::BlockCell;
use super::gauges::{Lane, SMALL_LIMIT, pool_of};
use super::histogram::bucket_of;
use super::slots::{BATCH, LANE_SLOTS};
use super::trail::TrailCell;
use super::writer::Record;
use super::{BlockEntry, BlockSlot, BlockTag, EventKind, LANES, peaks};

/// How many blocks go unrecorded before a lane asks again for slots that could not be had.
const PATIENCE: u32 = 4096;

/// A block, as the hot path has it at hand.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Whose it is.
    pub tag: BlockTag,
    /// Where it begins on the device.
    pub address: u64,
    /// Bytes taken, rounded.
    pub size: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// The histograms' bucket of `size` ([`bucket_of`]).
    pub bucket: usize,
}

/// One lane: block map entries, gauges. Not Sync: its user holds the lane's heap lock.
///
/// Lanes share nothing on the hot path, so distinct lanes run in parallel. Blocks may be removed through another lane than
/// they were inserted through; sums over lanes stay right then.
pub struct LaneWriter {
    detail: bool,
    device: u8,
    number: u8,
    lane: *const Lane,
    blocks: *const BlockCell,
    /// A stack of free slots: `bottom <= top <= limit`, the next free one just below `top`.
    bottom: *mut u32,
    top: *mut u32,
    limit: *mut u32,
    /// The cells of the lane's trail, for events of small and of large blocks; null before the first event, and where there is no room for
    /// them. That of small blocks stays null in the lane of the large ones, so that small ones there (those of captures and of named pools) leave
    /// the straight path, which would count them for the wrong pool.
    trails: [*const TrailCell; 2],
    trail_mask: u64,
    /// Blocks to leave unrecorded before slots that could not be had are asked for again.
    patience: u32,
    /// The trail could not be had: events go to the shared ring.
    trailless: bool,
    /// The lane is among those that a settling looks at, though it may never have settled itself.
    joined: bool,
    record: &'static Record,
}

// SAFETY: the pointers lead into a mapping and a stack that live as long as the process; the mapping is atomics, the stack
// this writer's own.
unsafe impl Send for LaneWriter {}

/// Lane `number`'s trails for small and for large blocks, in `cells`.
fn trails_of(number: u8, cells: *const TrailCell) -> [*const TrailCell; 2] {
    let small = if usize::from(number) == LANES - 1 { std::ptr::null() } else { cells };
    [small, cells]
}

impl LaneWriter {
    /// A writer over its parts of the mapping.
    ///
    /// # Safety
    /// The pointers are valid for ever: to one lane's area, and to as many block cells as `record` hands out slots for. No
    /// other writer has this lane.
    pub(super) unsafe fn new(
        record: &'static Record,
        detail: bool,
        device: u8,
        number: u8,
        lane: *const Lane,
        blocks: *const BlockCell,
    ) -> LaneWriter {
        let stack: &'static mut [u32] = if detail { vec![0; LANE_SLOTS].leak() } else { &mut [] };
        let stack = stack.as_mut_ptr_range();
        let (bottom, limit) = (stack.start, stack.end);
        // With the record off, events go to a cell that nobody reads: the straight path is the same one, and off is never slower than on.
        let unread: *const TrailCell =
            if detail { std::ptr::null() } else { Box::leak(Box::<TrailCell>::default()) };
        LaneWriter {
            detail,
            device,
            number,
            lane,
            blocks,
            bottom,
            top: bottom,
            limit,
            trails: trails_of(number, unread),
            trail_mask: 0,
            patience: 0,
            trailless: false,
            joined: false,
            record,
        }
    }

    #[inline(always)]
    fn lane(&self) -> &'static Lane {
        // SAFETY: valid for ever by `new`'s contract, and atomics.
        unsafe { &*self.lane }
    }

    /// A block became live: map entry, lane gauges (live, requested and counts by lifetime; small/large), device live and
    /// peaks, size histogram.
    pub fn block_insert(&mut self, entry: &BlockEntry) -> BlockSlot {
        let BlockEntry { address, size, requested, step, lifetime, .. } = *entry;
        self.count(size, requested, lifetime);
        let slot = self.place();
        if let Some(cell) = self.cell(slot) {
            cell.fill(entry.tag(), address, size, requested, step);
        }
        slot
    }

    /// Counts a block that came, whatever its lane.
    fn count(&mut self, size: u64, requested: u64, lifetime: u8) {
        let lane = self.lane();
        let stranger = self.is_stranger(size);
        if stranger {
            self.record.stranger(self.device, peaks::amounts(size, requested), 1);
        }
        let over = lane.totals.add(size, requested);
        if stranger {
            self.settle_all();
        } else if over {
            self.settle();
        }
        lane.malloc(pool_of(size), bucket_of(size), size, requested, lifetime);
    }

    /// Whether a block of `size` is a small one among the large.
    fn is_stranger(&self, size: u64) -> bool {
        usize::from(self.number) == LANES - 1 && size <= SMALL_LIMIT
    }

    /// A place in the block map for a block that [`LaneWriter::malloc`] will describe. `NONE` where there is none, or no map.
    #[inline(always)]
    pub fn place(&mut self) -> BlockSlot {
        if self.top == self.bottom && !self.refill() {
            return BlockSlot::NONE;
        }
        // SAFETY: above `bottom`, so a word of the stack.
        unsafe {
            self.top = self.top.sub(1);
            BlockSlot(*self.top)
        }
    }

    /// A place that was not needed.
    #[cold]
    pub fn put_back(&mut self, slot: BlockSlot) {
        if slot != BlockSlot::NONE {
            self.push(slot);
        }
    }

    #[inline(always)]
    fn push(&mut self, slot: BlockSlot) {
        if self.top == self.limit {
            self.spill();
        }
        // SAFETY: below `limit`, so a word of the stack.
        unsafe {
            *self.top = slot.0;
            self.top = self.top.add(1);
        }
    }

    #[inline(always)]
    fn cell(&self, slot: BlockSlot) -> Option<&'static BlockCell> {
        // SAFETY: `place` gave it, so it is below the map's reach: allocated, for ever.
        (slot != BlockSlot::NONE).then(|| unsafe { &*self.blocks.add(slot.0 as usize) })
    }

    /// The hot path of a malloc: [`LaneWriter::block_insert`] and its event in one, for a block whose place was taken before. `pool` is that
    /// of `size` ([`pool_of`]), which the caller knows beforehand; `time` is [`super::clock::now`]'s.
    #[inline(always)]
    pub fn malloc(
        &mut self,
        pool: usize,
        slot: BlockSlot,
        block: Block,
        step: impl FnOnce() -> u32,
        time: u64,
    ) {
        let Block { tag, address, size, requested, bucket } = block;
        let trail = self.trails[pool];
        if trail.is_null() {
            return self.malloc_slowly(slot, tag, address, size, requested, step(), time);
        }
        let lane = self.lane();
        if lane.totals.add(size, requested) {
            self.settle();
        }
        lane.malloc(pool, bucket, size, requested, tag.lifetime());
        if let Some(cell) = self.cell(slot) {
            cell.fill(tag, address, size, requested, step());
        }
        // SAFETY: not null, so `open_trail` (or, with the record off, `new`) put `trail_mask + 1` cells there, for ever; this is the lane's only
        // writer.
        unsafe { lane.trail.push(trail, self.trail_mask, EventKind::Malloc, tag, address, requested, time) };
    }

    /// No trail: the first event, the record off, or a small block in the lane of the large ones.
    #[cold]
    #[inline(never)]
    #[allow(clippy::too_many_arguments)] // In words, which go through registers and cost the hot path nothing.
    fn malloc_slowly(
        &mut self,
        slot: BlockSlot,
        tag: BlockTag,
        address: u64,
        size: u64,
        requested: u64,
        step: u32,
        time: u64,
    ) {
        self.count(size, requested, tag.lifetime());
        if let Some(cell) = self.cell(slot) {
            cell.fill(tag, address, size, requested, step);
        }
        self.event(EventKind::Malloc, tag.lifetime(), tag.stream(), address, requested, time);
    }

    /// The hot path of a free: [`LaneWriter::block_remove`] and its event in one; as [`LaneWriter::malloc`].
    #[inline(always)]
    pub fn free(&mut self, pool: usize, slot: BlockSlot, block: Block, time: u64) {
        let Block { tag, address, size, requested, bucket } = block;
        let trail = self.trails[pool];
        if trail.is_null() {
            return self.free_slowly(slot, tag, address, size, requested, time);
        }
        let lane = self.lane();
        if lane.totals.sub(size, requested) {
            self.overdrawn();
        }
        lane.free(pool, bucket, size, requested, tag.lifetime());
        self.empty_slot(slot, false);
        // SAFETY: as in `malloc`.
        unsafe { lane.trail.push(trail, self.trail_mask, EventKind::Free, tag, address, size, time) };
    }

    #[cold]
    #[inline(never)]
    fn free_slowly(
        &mut self,
        slot: BlockSlot,
        tag: BlockTag,
        address: u64,
        size: u64,
        requested: u64,
        time: u64,
    ) {
        self.block_remove(slot, size, requested, tag.lifetime(), false);
        self.event(EventKind::Free, tag.lifetime(), tag.stream(), address, size, time);
    }

    /// The program freed it and it waits for streams: not live any more, but not reusable.
    #[inline]
    pub fn block_pending(&mut self, slot: BlockSlot, size: u64, requested: u64, lifetime: u8) {
        let lane = self.lane();
        let amounts = peaks::amounts(size, requested);
        if lane.totals.sub(size, requested) {
            self.overdrawn();
        }
        if self.is_stranger(size) {
            self.record.stranger(self.device, amounts, -1);
        }
        self.record.begin_wait(self.device, self.number, size > SMALL_LIMIT, amounts);
        lane.free(pool_of(size), bucket_of(size), size, requested, lifetime);
        lane.pending(size, lifetime);
        if let Some(cell) = self.cell(slot) {
            cell.pending();
        }
    }

    /// The program freed it (`was_pending` false), or its wait is over (true): the entry is free.
    pub fn block_remove(
        &mut self,
        slot: BlockSlot,
        size: u64,
        requested: u64,
        lifetime: u8,
        was_pending: bool,
    ) {
        let lane = self.lane();
        if was_pending {
            lane.pending_over(size, lifetime);
            self.record.end_wait(self.device, size > SMALL_LIMIT, peaks::amounts(size, requested));
        } else {
            if lane.totals.sub(size, requested) {
                self.overdrawn();
            }
            if self.is_stranger(size) {
                self.record.stranger(self.device, peaks::amounts(size, requested), -1);
                self.settle_all();
            }
            lane.free(pool_of(size), bucket_of(size), size, requested, lifetime);
        }
        self.empty_slot(slot, was_pending);
    }

    #[inline(always)]
    fn empty_slot(&mut self, slot: BlockSlot, was_pending: bool) {
        let Some(cell) = self.cell(slot) else { return };
        cell.remove(was_pending);
        self.push(slot);
    }

    /// The step in which a live block was inserted; `None`: it is not in the map.
    pub fn step_of(&self, slot: BlockSlot) -> Option<u32> {
        if !self.detail || slot == BlockSlot::NONE {
            return None;
        }
        // SAFETY: `block_insert` gave it, so it is inside the map.
        Some(unsafe { &*self.blocks.add(slot.0 as usize) }.step())
    }

    /// The program has said that a live block's lifetime is `to`, not `from`: what is counted under the one is counted under the
    /// other from now on, as if it had always been so.
    #[cold]
    pub fn block_retag(&mut self, slot: BlockSlot, size: u64, requested: u64, from: u8, to: u8) {
        self.lane().retag(size, requested, from, to);
        if slot != BlockSlot::NONE {
            // SAFETY: as above.
            unsafe { &*self.blocks.add(slot.0 as usize) }.retag(to);
        }
    }

    /// One event in this lane's own ring: what [`Record::event`] does, at less than half the cost, and without a word that
    /// other lanes write. For the hot kinds. `time` is [`super::clock::now`]'s.
    #[inline]
    pub fn event(&mut self, kind: EventKind, lifetime: u8, stream: u32, address: u64, size: u64, time: u64) {
        if self.trails[1].is_null() && !self.open_trail() {
            return self.trailless_event(kind, lifetime, stream, address, size, time);
        }
        // SAFETY: as in `malloc`.
        unsafe {
            let tag = BlockTag::new(self.device, lifetime, 0, stream);
            self.lane().trail.push(self.trails[1], self.trail_mask, kind, tag, address, size, time);
        }
    }

    #[cold]
    #[inline(never)]
    fn trailless_event(
        &self,
        kind: EventKind,
        lifetime: u8,
        stream: u32,
        address: u64,
        size: u64,
        time: u64,
    ) {
        self.record.event(kind, self.device, lifetime, stream, address, size, time);
    }

    /// Whether there is a trail now.
    #[cold]
    #[inline(never)]
    fn open_trail(&mut self) -> bool {
        if !self.detail || self.trailless {
            return false;
        }
        match self.record.trail_cells(self.device, self.number) {
            Some((cells, mask)) => {
                (self.trails, self.trail_mask) = (trails_of(self.number, cells), mask);
                self.lane().trail.open();
                true
            }
            None => {
                self.trailless = true;
                false
            }
        }
    }

    /// Blocks of other lanes are removed through this one.
    #[cold]
    #[inline(never)]
    fn overdrawn(&mut self) {
        // A lane that inserts joins when it first settles; one that only removes must join too.
        if !self.joined {
            self.record.join(self.device, self.number);
            self.joined = true;
        }
    }

    #[cold]
    #[inline(never)]
    fn settle(&self) {
        self.record.settle(self.device, self.number);
    }

    #[cold]
    #[inline(never)]
    fn settle_all(&self) {
        self.record.settle_all(self.device, self.number);
    }

    /// Whether there is a slot now.
    #[cold]
    #[inline(never)]
    fn refill(&mut self) -> bool {
        if !self.detail {
            return false;
        }
        if self.patience > 0 {
            self.patience -= 1;
            self.record.unrecorded();
            return false;
        }
        let mut batch = [0; BATCH];
        let count = self.record.take_slots(&mut batch);
        if count == 0 {
            self.patience = PATIENCE;
            self.record.unrecorded();
            return false;
        }
        // SAFETY: the stack is empty and has room for twice a batch.
        unsafe {
            std::ptr::copy_nonoverlapping(batch.as_ptr(), self.bottom, count);
            self.top = self.bottom.add(count);
        }
        true
    }

    /// Hands the older half of the stack back: the newer half's cells are still in the cache.
    #[cold]
    #[inline(never)]
    fn spill(&mut self) {
        // SAFETY: the stack is full, so both halves are slots.
        unsafe {
            self.record.give_slots(std::slice::from_raw_parts(self.bottom, BATCH));
            std::ptr::copy_nonoverlapping(self.bottom.add(BATCH), self.bottom, BATCH);
            self.top = self.bottom.add(BATCH);
        }
    }
}
