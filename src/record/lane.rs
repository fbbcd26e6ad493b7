//! The hot path: a block comes, a block goes. No locked instruction, and no word that another lane writes.
//!
//! Instructions by callgrind (`benches/record_cost.rs`, x86-64, inlined into a function that gets the block by reference):
//! 96 for `block_insert` + the clock + `event`, 82 for `block_remove` + the clock + `event`. Of these, 15 are that
//! function's own saving and restoring of registers, 3 the clock, 20 the event, 8 the size histogram, 13 the gauges under
//! their seqlock, 5 live bytes and peak; the rest is the block map and reading the block. A new peak costs 180 more with
//! one lane in use.

use super::block_map::BlockCell;
use super::gauges::{Lane, SMALL_LIMIT};
use super::slots::{BATCH, LANE_SLOTS};
use super::trail::TrailCell;
use super::writer::Record;
use super::{BlockEntry, BlockSlot, EventKind, LANES, peaks};

/// How many blocks go unrecorded before a lane asks again for slots that could not be had.
const PATIENCE: u32 = 4096;

/// One lane: block map entries, gauges. Not Sync: its user holds the lane's heap lock.
///
/// Lanes share nothing on the hot path, so distinct lanes run in parallel. Blocks may be removed through another lane than
/// they were inserted through; sums over lanes stay right then.
pub struct LaneWriter {
    detail: bool,
    /// The record is kept, and the lane holds small blocks only: nothing but the straight path.
    plain: bool,
    device: u8,
    number: u8,
    lane: *const Lane,
    blocks: *const BlockCell,
    /// A stack of free slots: `bottom <= top <= limit`, the next free one just below `top`.
    bottom: *mut u32,
    top: *mut u32,
    limit: *mut u32,
    /// The cells of the lane's trail; null before the first event, and where there is no room for them.
    trail: *const TrailCell,
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
        LaneWriter {
            detail,
            plain: detail && usize::from(number) != LANES - 1,
            device,
            number,
            lane,
            blocks,
            bottom,
            top: bottom,
            limit,
            trail: std::ptr::null(),
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
    /// peak, size histogram.
    #[inline(always)]
    pub fn block_insert(&mut self, entry: &BlockEntry) -> BlockSlot {
        if !self.plain {
            return self.insert_other(entry);
        }
        let lane = self.lane();
        if lane.totals.add(entry.size, entry.requested) {
            self.settle();
        }
        lane.malloc(entry.size, entry.requested, entry.lifetime);
        self.map(entry)
    }

    /// As [`LaneWriter::block_insert`], where the record is off, or the lane is that of the large blocks.
    #[inline(never)]
    fn insert_other(&mut self, entry: &BlockEntry) -> BlockSlot {
        let lane = self.lane();
        let stranger = self.is_stranger(entry.size);
        if stranger {
            self.record.stranger(self.device, peaks::amounts(entry.size, entry.requested), 1);
        }
        let over = lane.totals.add(entry.size, entry.requested);
        if stranger {
            self.settle_all();
        } else if over {
            self.settle();
        }
        lane.malloc(entry.size, entry.requested, entry.lifetime);
        if self.detail { self.map(entry) } else { BlockSlot::NONE }
    }

    /// Whether a block of `size` is a small one among the large.
    fn is_stranger(&self, size: u64) -> bool {
        usize::from(self.number) == LANES - 1 && size <= SMALL_LIMIT
    }

    #[inline(always)]
    fn map(&mut self, entry: &BlockEntry) -> BlockSlot {
        self.lane().sizes[0].count(entry.size);
        if self.top == self.bottom && !self.refill() {
            return BlockSlot::NONE;
        }
        // SAFETY: above `bottom`, so a word of the stack; the slots on it are below the map's reach, so allocated.
        unsafe {
            self.top = self.top.sub(1);
            let slot = *self.top;
            (*self.blocks.add(slot as usize)).insert(entry);
            BlockSlot(slot)
        }
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
        lane.free(size, requested, lifetime);
        lane.pending(size, lifetime);
        if !self.detail {
            return;
        }
        lane.sizes[1].count(size);
        if slot != BlockSlot::NONE {
            // SAFETY: `block_insert` gave it, so it is inside the map.
            unsafe { &*self.blocks.add(slot.0 as usize) }.pending();
        }
    }

    /// The program freed it (`was_pending` false), or its wait is over (true): the entry is free.
    #[inline(always)]
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
            lane.free(size, requested, lifetime);
        }
        if !self.plain && !was_pending && self.is_stranger(size) {
            self.remove_stranger(size, requested);
        }
        if !self.detail {
            return;
        }
        if !was_pending {
            lane.sizes[1].count(size);
        }
        if slot != BlockSlot::NONE {
            // SAFETY: `block_insert` gave it, so it is inside the map.
            unsafe { &*self.blocks.add(slot.0 as usize) }.remove(was_pending);
            if self.top == self.limit {
                self.spill();
            }
            // SAFETY: below `limit`, so a word of the stack.
            unsafe {
                *self.top = slot.0;
                self.top = self.top.add(1);
            }
        }
    }

    /// One event in this lane's own ring: what [`Record::event`] does, at less than half the cost, and without a word that
    /// other lanes write. For the hot kinds. `time` is [`super::clock::now`]'s.
    #[inline(always)]
    pub fn event(&mut self, kind: EventKind, lifetime: u8, stream: u32, address: u64, size: u64, time: u64) {
        if self.trail.is_null() && !self.open_trail() {
            return self.trailless_event(kind, lifetime, stream, address, size, time);
        }
        // SAFETY: `open_trail` put `trail_mask + 1` cells there, allocated, for ever; this is the lane's only writer.
        unsafe {
            let head = &self.lane().trail;
            head.push(self.trail, self.trail_mask, kind, self.device, lifetime, stream, address, size, time);
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
                (self.trail, self.trail_mask) = (cells, mask);
                self.lane().trail.open();
                true
            }
            None => {
                self.trailless = true;
                false
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn remove_stranger(&self, size: u64, requested: u64) {
        self.record.stranger(self.device, peaks::amounts(size, requested), -1);
        self.settle_all();
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
