//! Live amounts of a shard: bytes, blocks, and requested bytes, each with a ceiling. No word is
//! written by every malloc of a device.
//!
//! Each shard counts for itself. The ceilings of a device's shards are chosen so that no peak of
//! the device is passed while every shard stays at or below its own ([`crate::peaks`]). A shard
//! that passes a ceiling reconciles, under the device's mutex. A shard that frees keeps its
//! ceilings, so a program that returns to its old peak every step does not reconcile at all.

use crate::sync::{AtomicU64, Ordering};

/// Number of quantities of live blocks, which [`ShardTotals`] and its sums index.
pub const QUANTITIES: usize = 3;
/// Bytes, rounded.
pub const BYTES: usize = 0;
/// Blocks.
pub const BLOCKS: usize = 1;
/// Requested bytes.
pub const REQUESTED: usize = 2;

/// One shard's part, on a line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct ShardTotals {
    /// Inserted less removed through this shard, wrapping: negative (as i64) if blocks were
    /// inserted through another. Only the shard's writer writes it.
    live: [AtomicU64; QUANTITIES],
    /// Highest `live` without a check of the peaks (as i64). Written only under the device's mutex.
    ceilings: [AtomicU64; QUANTITIES],
    _room: [AtomicU64; 2],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<ShardTotals>() == 64);

impl ShardTotals {
    /// Counts a new live block; returns whether the shard must reconcile.
    #[inline(always)]
    #[must_use]
    pub fn add(&self, bytes: u64, requested: u64) -> bool {
        let bytes = self.change(BYTES, bytes);
        let blocks = self.change(BLOCKS, 1);
        let requested = self.change(REQUESTED, requested);
        bytes > self.ceiling(BYTES)
            || blocks > self.ceiling(BLOCKS)
            || requested > self.ceiling(REQUESTED)
    }

    /// Counts the end of a live block; returns whether more bytes were removed through this shard
    /// than inserted.
    #[inline(always)]
    #[must_use]
    pub fn sub(&self, bytes: u64, requested: u64) -> bool {
        self.change(BLOCKS, 1u64.wrapping_neg());
        self.change(REQUESTED, requested.wrapping_neg());
        self.change(BYTES, bytes.wrapping_neg()) < 0
    }

    #[inline(always)]
    fn change(&self, quantity: usize, by: u64) -> i64 {
        let live = self.live[quantity].load(Ordering::Relaxed).wrapping_add(by);
        self.live[quantity].store(live, Ordering::Relaxed);
        live as i64
    }

    /// The live amount of a quantity.
    #[inline(always)]
    pub fn live(&self, quantity: usize) -> i64 {
        self.live[quantity].load(Ordering::Relaxed) as i64
    }

    /// The ceiling of a quantity.
    #[inline(always)]
    pub fn ceiling(&self, quantity: usize) -> i64 {
        self.ceilings[quantity].load(Ordering::Relaxed) as i64
    }

    /// Whether every quantity is within its ceiling.
    pub fn is_within(&self) -> bool {
        (0..QUANTITIES).all(|quantity| self.live(quantity) <= self.ceiling(quantity))
    }

    /// Sets the ceiling of a quantity, under the device's mutex.
    pub fn set_ceiling(&self, quantity: usize, ceiling: i64) {
        if self.ceiling(quantity) != ceiling {
            self.ceilings[quantity].store(ceiling as u64, Ordering::Relaxed);
        }
    }
}

/// The live amount of a quantity over all of a device's shards.
pub fn live<'a>(quantity: usize, shards: impl Iterator<Item = &'a ShardTotals>) -> u64 {
    shards.fold(0, |sum: i64, shard| sum.wrapping_add(shard.live(quantity))).max(0) as u64
}
