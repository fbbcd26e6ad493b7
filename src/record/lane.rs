//! The hot path: a block comes, a block goes. Cost by callgrind in docs; no locked instruction but the device's live bytes.

use super::block_map::BlockCell;
use super::gauges::{DeviceTotals, Lane};
use super::histogram::Buckets;
use super::slots::{BATCH, LANE_SLOTS};
use super::writer::Record;
use super::{BlockEntry, BlockSlot};

/// How many blocks go unrecorded before a lane asks again for slots that could not be had.
const PATIENCE: u32 = 4096;

/// One lane: block map entries, gauges. Not Sync: its user holds the lane's heap lock.
///
/// Lanes share nothing on the hot path but the device's live bytes, so distinct lanes run in parallel. Blocks may be
/// removed through another lane than they were inserted through; sums over lanes stay right then.
pub struct LaneWriter {
    detail: bool,
    /// Whether slots could not be had lately; counts down to the next try.
    patience: u32,
    totals: *const DeviceTotals,
    gauges: *const Lane,
    /// Two: mallocs, frees.
    sizes: *const Buckets,
    blocks: *const BlockCell,
    /// A stack of free slots: `bottom <= top <= limit`, the next free one just below `top`.
    bottom: *mut u32,
    top: *mut u32,
    limit: *mut u32,
    record: &'static Record,
}

// SAFETY: the pointers lead into a mapping and a stack that live as long as the process; the mapping is atomics, the stack
// this writer's own.
unsafe impl Send for LaneWriter {}

impl LaneWriter {
    /// A writer over its parts of the mapping.
    ///
    /// # Safety
    /// The pointers are valid for ever: to totals, to one lane's gauges, to two histograms, and to as many block cells as
    /// `record` hands out slots for. No other writer has this lane.
    pub(super) unsafe fn new(
        record: &'static Record,
        detail: bool,
        totals: *const DeviceTotals,
        gauges: *const Lane,
        sizes: *const Buckets,
        blocks: *const BlockCell,
    ) -> LaneWriter {
        let stack: &'static mut [u32] = if detail { vec![0; LANE_SLOTS].leak() } else { &mut [] };
        let stack = stack.as_mut_ptr_range();
        let (bottom, limit) = (stack.start, stack.end);
        LaneWriter { detail, patience: 0, totals, gauges, sizes, blocks, bottom, top: bottom, limit, record }
    }

    /// A block became live: map entry, lane gauges (live, requested and counts by lifetime; small/large), device live and
    /// peak, size histogram.
    #[inline]
    pub fn block_insert(&mut self, entry: &BlockEntry) -> BlockSlot {
        // SAFETY: valid by `new`'s contract.
        unsafe { &*self.totals }.add(entry.size);
        if !self.detail {
            return BlockSlot::NONE;
        }
        // SAFETY: valid by `new`'s contract.
        let (gauges, mallocs) = unsafe { (&*self.gauges, &*self.sizes) };
        gauges.malloc(entry.size, entry.requested, entry.lifetime);
        mallocs.count(entry.size);
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
        // SAFETY: valid by `new`'s contract.
        unsafe { &*self.totals }.sub(size);
        if !self.detail {
            return;
        }
        // SAFETY: valid by `new`'s contract.
        let (gauges, frees) = unsafe { (&*self.gauges, &*self.sizes.add(1)) };
        gauges.free(size, requested, lifetime);
        gauges.pending(size, lifetime);
        frees.count(size);
        if slot != BlockSlot::NONE {
            // SAFETY: `block_insert` gave it, so it is inside the map.
            unsafe { &*self.blocks.add(slot.0 as usize) }.pending();
        }
    }

    /// The program freed it (`was_pending` false), or its wait is over (true): the entry is free.
    #[inline]
    pub fn block_remove(
        &mut self,
        slot: BlockSlot,
        size: u64,
        requested: u64,
        lifetime: u8,
        was_pending: bool,
    ) {
        if !was_pending {
            // SAFETY: valid by `new`'s contract.
            unsafe { &*self.totals }.sub(size);
        }
        if !self.detail {
            return;
        }
        // SAFETY: valid by `new`'s contract.
        let (gauges, frees) = unsafe { (&*self.gauges, &*self.sizes.add(1)) };
        if was_pending {
            gauges.pending_over(size, lifetime);
        } else {
            gauges.free(size, requested, lifetime);
            frees.count(size);
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
