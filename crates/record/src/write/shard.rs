//! The hot path of a block's insertion and removal. No locked instruction, and no word shared with
//! other shards' writers.
//!
//! In the heap's hot paths (callgrind on `moe`, x86-64) a malloc spends about 65 instructions here
//! and a free 45: the block map 15 and 12, the event 11, the gauges under their seqlock 7, the size
//! histogram 9 (one for small blocks, whose bucket comes with their size class), live counts and
//! their ceilings 19 and 8; the clock's read is 4 more. A reconciling shard takes about 700 more.

use crate::block_map::BlockCell;
use crate::gauges::{Shard, ShardSizes, pool_of_shard};
use crate::histogram::bucket_of;
use crate::shard_ring::ShardRingCell;
use crate::slots::{BATCH, SHARD_SLOTS};
use crate::writer::Record;
use crate::{BlockEntry, BlockSlot, BlockTag, EventKind, SiteId, peaks};

/// Blocks left unrecorded before a shard without slots asks for some again.
const PATIENCE: u32 = 4096;

/// Cells of the event ring when no reader exists.
const UNREAD: u64 = 64;

/// A block in the hot path.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The block's tag.
    pub tag: BlockTag,
    /// Its first address on the device.
    pub address: u64,
    /// Bytes taken, rounded.
    pub size: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// The histograms' bucket of `size` ([`bucket_of`]).
    pub bucket: usize,
}

/// Writer of one shard: block map entries and gauges. Not Sync: its user holds the shard's heap
/// lock.
///
/// Its blocks are of one pool, given by its number ([`pool_of_shard`]).
///
/// Shards share nothing on the hot path, so distinct shards run in parallel. A block may be removed
/// through another shard of its pool than it was inserted through; sums over shards stay right.
pub struct ShardWriter {
    detail: bool,
    device: u8,
    number: u8,
    shard: *const Shard,
    /// The shard's histograms of sizes; null before its first block comes or goes. Not null if
    /// there is an event ring.
    sizes: *const ShardSizes,
    blocks: *const BlockCell,
    /// A stack of free slots: `bottom <= top <= limit`, the next free one just below `top`.
    bottom: *mut u32,
    top: *mut u32,
    limit: *mut u32,
    /// Whether requests take the straight path. It needs an event ring for their events, so not
    /// before the first event, and not without room for a ring.
    straight: bool,
    /// The cells of the shard's event ring: the first, that of the next event, and the last of a
    /// lap. Null before the first event.
    first: *const ShardRingCell,
    next: *const ShardRingCell,
    last: *const ShardRingCell,
    /// Blocks to leave unrecorded before asking for slots again.
    patience: u32,
    /// There was no room for the event ring: events go to the shared ring.
    ringless: bool,
    /// Reconciliations include this shard, though it may never have reconciled itself.
    joined: bool,
    record: &'static Record,
}

// SAFETY: the pointers lead into a mapping and a stack that live as long as the process; the
// mapping is atomics, the stack this writer's own.
unsafe impl Send for ShardWriter {}

impl ShardWriter {
    /// A writer over its parts of the mapping.
    ///
    /// # Safety
    /// The pointers are valid for ever: to one shard's area, and to as many block cells as `record`
    /// hands out slots for. No other writer has this shard.
    pub(crate) unsafe fn new(
        record: &'static Record,
        detail: bool,
        device: u8,
        number: u8,
        shard: *const Shard,
        blocks: *const BlockCell,
    ) -> ShardWriter {
        let stack: &'static mut [u32] = if detail { vec![0; SHARD_SLOTS].leak() } else { &mut [] };
        let stack = stack.as_mut_ptr_range();
        let (bottom, limit) = (stack.start, stack.end);
        let mut writer = ShardWriter {
            detail,
            device,
            number,
            shard,
            sizes: std::ptr::null(),
            blocks,
            bottom,
            top: bottom,
            limit,
            straight: false,
            first: std::ptr::null(),
            next: std::ptr::null(),
            last: std::ptr::null(),
            patience: 0,
            ringless: false,
            joined: false,
            record,
        };
        if !detail {
            // With the record off, events go to cells that are never read: the straight path is the
            // same, and off is never slower than on.
            let cells: Box<[ShardRingCell]> =
                (0..UNREAD).map(|_| ShardRingCell::default()).collect();
            writer.sizes();
            writer.begin_ring(Box::leak(cells).as_ptr(), UNREAD);
        }
        writer
    }

    /// Directs events to these cells from now on.
    fn begin_ring(&mut self, cells: *const ShardRingCell, count: u64) {
        (self.first, self.next) = (cells, cells);
        self.last = cells.wrapping_add(count as usize - 1);
        self.straight = true;
    }

    #[inline(always)]
    fn shard(&self) -> &'static Shard {
        // SAFETY: valid for ever by `new`'s contract, and atomics.
        unsafe { &*self.shard }
    }

    /// The shard's histograms; allocates them if needed.
    #[inline]
    fn sizes(&mut self) -> &'static ShardSizes {
        if self.sizes.is_null() {
            self.open_sizes();
        }
        // SAFETY: not null, so valid for ever, and atomics.
        unsafe { &*self.sizes }
    }

    #[cold]
    #[inline(never)]
    fn open_sizes(&mut self) {
        self.sizes = self.record.shard_sizes(self.device, self.number);
    }

    /// A block became live: map entry, shard gauges (live, requested and counts by lifetime;
    /// small/large), device live and peaks, size histogram.
    pub fn block_insert(&mut self, entry: &BlockEntry) -> BlockSlot {
        let BlockEntry { address, size, requested, step, lifetime, .. } = *entry;
        self.count(size, requested, lifetime);
        let slot = self.place();
        if let Some(cell) = self.cell(slot) {
            cell.fill(entry.tag(), address, size, requested, step);
        }
        if entry.site != SiteId::NONE {
            self.set_site(slot, entry.site);
        }
        slot
    }

    /// Counts an inserted block, whatever its shard.
    fn count(&mut self, size: u64, requested: u64, lifetime: u8) {
        let shard = self.shard();
        if shard.totals.add(size, requested) {
            self.reconcile();
        }
        shard.malloc(size, requested, lifetime);
        self.sizes().0[0].count(bucket_of(size));
    }

    /// A place in the block map for a block that [`ShardWriter::malloc`] will describe. `NONE` if
    /// there is no place or no map.
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

    /// Takes back an unused place.
    #[cold]
    pub fn put_back(&mut self, slot: BlockSlot) {
        if slot != BlockSlot::NONE {
            self.push(slot);
        }
    }

    /// Whether its blocks are large.
    fn is_large(&self) -> bool {
        pool_of_shard(self.number.into()) == 1
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
        // SAFETY: `place` returned it, so it is below the map's reach: allocated for ever.
        (slot != BlockSlot::NONE).then(|| unsafe { &*self.blocks.add(slot.0 as usize) })
    }

    /// Sets the site of the live block in `slot`. Unknown for blocks without such a call.
    pub fn set_site(&mut self, slot: BlockSlot, site: SiteId) {
        if let Some(cell) = self.cell(slot) {
            self.record.set_block_site(slot, cell.life(), site);
        }
    }

    /// Notes that the live block in `slot` was sent to other processes.
    pub fn mark_sent(&mut self, slot: BlockSlot) {
        if let Some(cell) = self.cell(slot) {
            cell.mark_sent();
        }
    }

    /// The hot path of a malloc: [`ShardWriter::block_insert`] and its event in one, for a block
    /// whose place was taken before. `time` is in [`crate::clock::now`]'s ticks.
    #[inline(always)]
    pub fn malloc(&mut self, slot: BlockSlot, block: Block, step: impl FnOnce() -> u32, time: u64) {
        let Block { tag, address, size, requested, bucket } = block;
        if !self.straight {
            return self.malloc_slowly(slot, tag, address, size, requested, step(), time);
        }
        let shard = self.shard();
        if shard.totals.add(size, requested) {
            self.reconcile();
        }
        shard.malloc(size, requested, tag.lifetime());
        // SAFETY: there is an event ring, so there are histograms.
        unsafe { &*self.sizes }.0[0].count(bucket);
        if let Some(cell) = self.cell(slot) {
            cell.fill(tag, address, size, requested, step());
        }
        self.push_event(EventKind::Malloc, tag, address, requested, time);
    }

    /// Adds an event to the event ring, which must exist.
    #[inline(always)]
    fn push_event(&mut self, kind: EventKind, tag: BlockTag, address: u64, size: u64, time: u64) {
        let next = self.next;
        // SAFETY: if there is an event ring, this is one of its cells, which last for ever.
        let cell = unsafe { &*next };
        self.shard().ring.push(cell, kind, tag, address, size, time);
        self.next = next.wrapping_add(1);
        if next == self.last {
            self.end_lap();
        }
    }

    /// All cells of the event ring were written. After the first lap the ring may double; else the
    /// next event goes to the first cell.
    #[cold]
    #[inline(never)]
    fn end_lap(&mut self) {
        let written = self.shard().ring.next();
        // SAFETY: both are cells of the event ring.
        let cells = unsafe { self.last.offset_from(self.first) } as u64 + 1;
        if written == cells
            && self.detail
            && self.record.grow_shard_ring(self.device, self.number, cells)
        {
            self.last = self.last.wrapping_add(cells as usize);
            self.shard().ring.open(2 * cells);
        } else {
            self.next = self.first;
        }
    }

    /// Without an event ring: the first event, the record off, or a small block in the shard of
    /// large blocks.
    #[cold]
    #[inline(never)]
    // In words, which go through registers and cost the hot path nothing.
    #[allow(clippy::too_many_arguments)]
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

    /// The hot path of a free: [`ShardWriter::block_remove`] and its event in one; as
    /// [`ShardWriter::malloc`].
    #[inline(always)]
    pub fn free(&mut self, slot: BlockSlot, block: Block, time: u64) {
        let Block { tag, address, size, requested, bucket } = block;
        if !self.straight {
            return self.free_slowly(slot, tag, address, size, requested, time);
        }
        let shard = self.shard();
        if shard.totals.sub(size, requested) {
            self.overdrawn();
        }
        shard.free(size, requested, tag.lifetime());
        // SAFETY: as in `malloc`.
        unsafe { &*self.sizes }.0[1].count(bucket);
        self.empty_slot(slot, false);
        self.push_event(EventKind::Free, tag, address, size, time);
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

    /// The program freed the block, and it waits for streams: no longer live, not yet reusable.
    #[inline]
    pub fn block_pending(&mut self, slot: BlockSlot, size: u64, requested: u64, lifetime: u8) {
        let shard = self.shard();
        let amounts = peaks::amounts(size, requested);
        if shard.totals.sub(size, requested) {
            self.overdrawn();
        }
        self.record.begin_wait(self.device, self.number, self.is_large(), amounts);
        shard.free(size, requested, lifetime);
        self.sizes().0[1].count(bucket_of(size));
        shard.pending(size, lifetime);
        if let Some(cell) = self.cell(slot) {
            cell.pending();
        }
    }

    /// Frees the entry: the program freed the block (`was_pending` false), or its wait is over
    /// (true).
    pub fn block_remove(
        &mut self,
        slot: BlockSlot,
        size: u64,
        requested: u64,
        lifetime: u8,
        was_pending: bool,
    ) {
        let shard = self.shard();
        if was_pending {
            shard.pending_over(size, lifetime);
            self.record.end_wait(self.device, self.is_large(), peaks::amounts(size, requested));
        } else {
            if shard.totals.sub(size, requested) {
                self.overdrawn();
            }
            shard.free(size, requested, lifetime);
            self.sizes().0[1].count(bucket_of(size));
        }
        self.empty_slot(slot, was_pending);
    }

    #[inline(always)]
    fn empty_slot(&mut self, slot: BlockSlot, was_pending: bool) {
        let Some(cell) = self.cell(slot) else { return };
        cell.remove(was_pending);
        self.push(slot);
    }

    /// The step of a live block's insertion; `None`: not in the map.
    pub fn step_of(&self, slot: BlockSlot) -> Option<u32> {
        if !self.detail || slot == BlockSlot::NONE {
            return None;
        }
        // SAFETY: `block_insert` returned it, so it is inside the map.
        Some(unsafe { &*self.blocks.add(slot.0 as usize) }.step())
    }

    /// The program changed a live block's lifetime from `from` to `to`: moves its counts, as if it
    /// had always been `to`.
    #[cold]
    pub fn block_retag(&mut self, slot: BlockSlot, size: u64, requested: u64, from: u8, to: u8) {
        self.shard().retag(size, requested, from, to);
        if slot != BlockSlot::NONE {
            // SAFETY: as above.
            unsafe { &*self.blocks.add(slot.0 as usize) }.retag(to);
        }
    }

    /// One event in this shard's own ring: as [`Record::event`], at less than half the cost, and
    /// without a word shared with other shards. For the hot kinds. `time` is in
    /// [`crate::clock::now`]'s ticks.
    #[inline]
    pub fn event(
        &mut self,
        kind: EventKind,
        lifetime: u8,
        stream: u32,
        address: u64,
        size: u64,
        time: u64,
    ) {
        if !self.straight && !self.open_ring() {
            return self.shared_ring_event(kind, lifetime, stream, address, size, time);
        }
        self.push_event(kind, BlockTag::new(self.device, lifetime, 0, stream), address, size, time);
    }

    #[cold]
    #[inline(never)]
    fn shared_ring_event(
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

    /// Ensures an event ring; false without room.
    #[cold]
    #[inline(never)]
    fn open_ring(&mut self) -> bool {
        if !self.detail || self.ringless {
            return false;
        }
        // With an event ring, the straight path counts sizes too.
        self.sizes();
        match self.record.shard_ring_cells(self.device, self.number) {
            Some((cells, count)) => {
                self.begin_ring(cells, count);
                self.shard().ring.open(count);
                true
            }
            None => {
                self.ringless = true;
                false
            }
        }
    }

    /// Joins the reconciled shards: blocks of other shards are removed through this one.
    #[cold]
    #[inline(never)]
    fn overdrawn(&mut self) {
        // A shard that inserts joins when it first reconciles; one that only removes must join too.
        if !self.joined {
            self.record.join(self.device, self.number);
            self.joined = true;
        }
    }

    #[cold]
    #[inline(never)]
    fn reconcile(&self) {
        self.record.reconcile(self.device, self.number);
    }

    /// Ensures a free slot; false if there is none.
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

    /// Returns the older half of the stack: the newer half's cells are still in the cache.
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
