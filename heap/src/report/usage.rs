//! What is held, over time, as torch counts it: segments and their bytes, by pool, with peaks and
//! resets.
//!
//! A segment is one piece of memory from the driver: a page of `backing:stitch`, a span of the
//! other backings, a block of `backing:passthrough`. Small is what torch calls small, up to 1 MiB:
//! the small pool's memory is that of slabs and the bytes of small blocks that are runs, all else
//! is the large one's, and pages pass from one to the other. How it is divided is looked at when
//! what is held, or slabs, change, and when somebody asks. A span may serve both and counts as
//! large.

use crate::small::size_class::PAGE;
use gruyere_record::gauges::SMALL_LIMIT;
use gruyere_record::peaks::{ALL, LARGE, POOLS, SMALL, Stat};

/// A number by pool, over time.
#[derive(Clone, Copy, Debug, Default)]
struct Gauge([Stat; POOLS]);

impl Gauge {
    fn set(&mut self, small: u64, large: u64) {
        for (pool, now) in [(ALL, small + large), (SMALL, small), (LARGE, large)] {
            let stat = &mut self.0[pool];
            stat.allocated += now.saturating_sub(stat.current);
            stat.freed += stat.current.saturating_sub(now);
            stat.current = now;
            stat.peak = stat.peak.max(now);
        }
    }
}

/// What was at the last reset of what is accumulated.
#[derive(Clone, Copy, Debug, Default)]
struct Base {
    retries: u64,
    out_of_memories: u64,
}

/// What a device holds, over time. Guarded by its central lock.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    stitched: bool,
    slab_bytes: u64,
    /// Small blocks that are runs, live or pending: how many, and their bytes.
    small_runs: (u64, u64),
    pieces: u64,
    reserved: u64,
    segment: Gauge,
    reserved_bytes: Gauge,
    inactive_split: Gauge,
    inactive_split_bytes: Gauge,
    synchronisations: u64,
    base: Base,
}

/// What [`Usage::stats`] tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldStats {
    /// Pieces of memory from the driver.
    pub segment: [Stat; POOLS],
    /// Bytes of those pieces.
    pub reserved_bytes: [Stat; POOLS],
    /// Free pieces that cannot be given back.
    pub inactive_split: [Stat; POOLS],
    /// Bytes of those free pieces.
    pub inactive_split_bytes: [Stat; POOLS],
    /// Times that the reclaim ladder was tried.
    pub retries: u64,
    /// Out-of-memory answers.
    pub out_of_memories: u64,
    /// Times that the whole device was synchronised to get memory back.
    pub synchronisations: u64,
}

impl Usage {
    /// Nothing is held yet. `stitched`: segments are pages.
    pub(crate) fn new(stitched: bool) -> Self {
        Self { stitched, ..Self::default() }
    }

    /// So much is held now, in so many pieces.
    pub(crate) fn hold(&mut self, reserved: u64, pieces: u64) {
        (self.reserved, self.pieces) = (reserved, pieces);
        self.update();
    }

    pub(crate) fn slab_taken(&mut self, bytes: u64) {
        self.slab_bytes += bytes;
        self.update();
    }

    /// A slab's memory goes back.
    pub(crate) fn slab_given(&mut self, bytes: u64) {
        self.slab_bytes = self.slab_bytes.saturating_sub(bytes);
        self.update();
    }

    /// A run of `bytes` becomes a block.
    #[inline(always)]
    pub(crate) fn block_taken(&mut self, bytes: u64) {
        if bytes <= SMALL_LIMIT {
            self.small_runs = (self.small_runs.0 + 1, self.small_runs.1 + bytes);
        }
    }

    /// A run of `bytes` is no block any more, nor pending.
    #[inline(always)]
    pub(crate) fn block_given(&mut self, bytes: u64) {
        if bytes <= SMALL_LIMIT {
            let (count, all) = self.small_runs;
            self.small_runs = (count.wrapping_sub(1), all.wrapping_sub(bytes));
        }
    }

    /// Small blocks that are runs, live or pending: how many, and their bytes.
    pub(crate) fn small_runs(&self) -> (u64, u64) {
        self.small_runs
    }

    pub(crate) fn synchronised(&mut self) {
        self.synchronisations += 1;
    }

    /// Free pieces that cannot be given back, and their bytes; small and large. Known only when
    /// somebody looks.
    pub(crate) fn look(&mut self, pieces: [u64; 2], bytes: [u64; 2]) {
        self.inactive_split.set(pieces[0], pieces[1]);
        self.inactive_split_bytes.set(bytes[0], bytes[1]);
    }

    fn update(&mut self) {
        // Memory of a slab that the backing has not told of yet does not count twice.
        let small = (self.slab_bytes + self.small_runs.1).min(self.reserved);
        self.reserved_bytes.set(small, self.reserved - small);
        let small = if self.stitched { (small / PAGE).min(self.pieces) } else { 0 };
        self.segment.set(small, self.pieces - small);
    }

    fn gauges(&mut self) -> [&mut Gauge; 4] {
        [
            &mut self.segment,
            &mut self.reserved_bytes,
            &mut self.inactive_split,
            &mut self.inactive_split_bytes,
        ]
    }

    /// Peaks begin again at what there is.
    pub(crate) fn reset_peaks(&mut self) {
        for stat in self.gauges().into_iter().flat_map(|gauge| &mut gauge.0) {
            stat.peak = stat.current;
        }
    }

    /// What came and went begins again at nothing; so many retries and out-of-memories there were
    /// until now.
    pub(crate) fn reset_accumulated(&mut self, retries: u64, out_of_memories: u64) {
        for stat in self.gauges().into_iter().flat_map(|gauge| &mut gauge.0) {
            (stat.allocated, stat.freed) = (0, 0);
        }
        self.synchronisations = 0;
        self.base = Base { retries, out_of_memories };
    }

    /// All of it. So many retries and out-of-memories there were in the life of the device.
    pub(crate) fn stats(&mut self, retries: u64, out_of_memories: u64) -> HeldStats {
        self.update();
        HeldStats {
            segment: self.segment.0,
            reserved_bytes: self.reserved_bytes.0,
            inactive_split: self.inactive_split.0,
            inactive_split_bytes: self.inactive_split_bytes.0,
            retries: retries.saturating_sub(self.base.retries),
            out_of_memories: out_of_memories.saturating_sub(self.base.out_of_memories),
            synchronisations: self.synchronisations,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_pass_between_the_pools_and_both_sides_are_counted() {
        let mut usage = Usage::new(true);
        usage.hold(8 * PAGE, 8);
        usage.slab_taken(2 * PAGE);
        usage.slab_given(PAGE);
        usage.hold(3 * PAGE, 3);
        let stats = usage.stats(0, 0);
        let stat = |current, peak, allocated, freed| Stat { current, peak, allocated, freed };
        assert_eq!(stats.segment, [stat(3, 8, 8, 5), stat(1, 2, 2, 1), stat(2, 8, 9, 7)]);
        assert_eq!(
            stats.reserved_bytes[SMALL],
            stat(PAGE, 2 * PAGE, 2 * PAGE, PAGE),
            "bytes follow the segments"
        );
    }

    #[test]
    fn resets_leave_what_there_is() {
        let mut usage = Usage::new(false);
        usage.hold(100, 2);
        usage.hold(60, 1);
        usage.synchronised();
        usage.reset_peaks();
        usage.reset_accumulated(5, 1);
        let stats = usage.stats(7, 1);
        let stat = Stat { current: 60, peak: 60, allocated: 0, freed: 0 };
        assert_eq!(stats.reserved_bytes[ALL], stat);
        assert_eq!((stats.retries, stats.out_of_memories, stats.synchronisations), (2, 0, 0));
    }
}
