//! Distribution of the block map's slots: batches for shards, and slots that shards give back.
//!
//! Each shard keeps a short stack of free slots in private memory, so that the hot path shares
//! nothing. Behind them, under a mutex that a shard takes once in hundreds of calls: a stash of
//! returned slots, then fresh batches of the map. The stash is address space of its own, touched as
//! needed: nothing comes from the host heap.

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::layout::{Health, MAP_STEP};
use crate::mapping::Mapping;
use crate::sync::Ordering;

/// Slots that a shard takes or gives back at a time.
pub const BATCH: usize = MAP_STEP as usize;
/// Slots per shard at most.
pub const SHARD_SLOTS: usize = 2 * BATCH;

struct Stash {
    /// Private memory of `max` words; the first `length` are unused slots.
    words: Option<Mapping>,
    length: usize,
}

/// The map's slots, for all shards.
pub struct Slots {
    stash: Mutex<Stash>,
    max: u64,
    /// The start of the map's section, and the bytes per slot.
    offset: u64,
    slot_bytes: u64,
}

impl Slots {
    /// For a map of `max` slots (a multiple of [`MAP_STEP`]) at `offset` of the mapping.
    pub fn new(max: u64, offset: u64, slot_bytes: u64) -> Slots {
        let words = if max == 0 { None } else { Mapping::private(max * 4).ok() };
        // Without a stash, returned slots would have no place: no map then.
        let max = if words.is_some() { max } else { 0 };
        Slots { stash: Mutex::new(Stash { words, length: 0 }), max, offset, slot_bytes }
    }

    /// Takes up to [`BATCH`] free slots into `into`; returns their number. 0: the map is full, or
    /// there is no memory for it.
    pub fn take(&self, into: &mut [u32; BATCH], mapping: &Mapping, health: &Health) -> usize {
        let mut stash = self.stash.lock().unwrap_or_else(PoisonError::into_inner);
        let count = stash.length.min(BATCH);
        if count > 0 {
            stash.length -= count;
            let from = stash.word(stash.length);
            // SAFETY: `count` words that the stash holds, and as many of `into`.
            unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), count) };
            return count;
        }
        let reach = health.blocks_reach.load(Ordering::Relaxed);
        if reach + MAP_STEP > self.max {
            return 0;
        }
        if mapping
            .ensure(self.offset + reach * self.slot_bytes, MAP_STEP * self.slot_bytes)
            .is_err()
        {
            health.no_room.fetch_add(1, Ordering::Relaxed);
            return 0;
        }
        // The lowest on top: shards then touch the fresh pages in order.
        for (slot, number) in into.iter_mut().zip((reach as u32..(reach + MAP_STEP) as u32).rev()) {
            *slot = number;
        }
        // Release: a reader that sees the reach finds the slots allocated.
        health.blocks_reach.store(reach + MAP_STEP, Ordering::Release);
        BATCH
    }

    /// Takes back a shard's surplus slots.
    pub fn give(&self, slots: &[u32]) {
        let mut stash = self.stash.lock().unwrap_or_else(PoisonError::into_inner);
        // Every slot is in one place at a time, so the stash has room for all.
        debug_assert!(stash.length + slots.len() <= self.max as usize);
        let count = slots.len().min(self.max as usize - stash.length);
        let to = stash.word(stash.length);
        // SAFETY: `count` words that the stash has room for.
        unsafe { std::ptr::copy_nonoverlapping(slots.as_ptr(), to, count) };
        stash.length += count;
    }
}

impl Stash {
    fn word(&self, index: usize) -> *mut u32 {
        let base =
            self.words.as_ref().map_or(NonNull::dangling(), |words| words.base().cast::<u32>());
        base.as_ptr().wrapping_add(index)
    }
}
