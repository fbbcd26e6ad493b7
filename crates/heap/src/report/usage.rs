//! Memory held over time, as torch counts it: segments and their bytes, by pool, with peaks and
//! resets.
//!
//! A segment is one piece of memory from the driver: a page of `backing:stitch`, a span of the
//! other backings, a block of `backing:passthrough`. Small is up to 1 MiB, as in torch: the small
//! pool's memory is that of slabs and of small blocks that are runs, the large pool's is the rest,
//! and pages pass between the two. The split is computed when the memory held, or slabs, change,
//! and when a reader asks. A span may serve both and counts as large.

use crate::small::size_class::PAGE;
use gruyere_record::gauges::SMALL_LIMIT;
use gruyere_record::peaks::{ALL, LARGE, POOLS, SMALL, Stat};

/// A figure by pool, over time.
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

/// The figures at the last reset of accumulated ones.
#[derive(Clone, Copy, Debug, Default)]
struct Base {
    retries: u64,
    out_of_memories: u64,
}

/// A device's memory held, over time. Guarded by its central lock.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    stitched: bool,
    slab_bytes: u64,
    /// Small blocks that are runs, live or pending: number and bytes.
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

/// The result of [`Usage::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldStats {
    /// Pieces of memory from the driver.
    pub segment: [Stat; POOLS],
    /// Bytes of those pieces.
    pub reserved_bytes: [Stat; POOLS],
    /// Free pieces that cannot go back to the driver.
    pub inactive_split: [Stat; POOLS],
    /// Bytes of those free pieces.
    pub inactive_split_bytes: [Stat; POOLS],
    /// Climbs of the reclaim ladder.
    pub retries: u64,
    /// Out-of-memories.
    pub out_of_memories: u64,
    /// Synchronisations of the whole device to get memory back.
    pub synchronisations: u64,
}

impl Usage {
    /// The figures of a heap that holds nothing. `stitched`: segments are pages.
    pub(crate) fn new(stitched: bool) -> Self {
        Self { stitched, ..Self::default() }
    }

    /// Notes `reserved` bytes held now, in that many pieces.
    pub(crate) fn hold(&mut self, reserved: u64, pieces: u64) {
        (self.reserved, self.pieces) = (reserved, pieces);
        self.update();
    }

    pub(crate) fn slab_taken(&mut self, bytes: u64) {
        self.slab_bytes += bytes;
        self.update();
    }

    /// Counts a slab's memory that goes back.
    pub(crate) fn slab_given(&mut self, bytes: u64) {
        self.slab_bytes = self.slab_bytes.saturating_sub(bytes);
        self.update();
    }

    /// Counts a run of `bytes` that becomes a block.
    #[inline(always)]
    pub(crate) fn block_taken(&mut self, bytes: u64) {
        if bytes <= SMALL_LIMIT {
            self.small_runs = (self.small_runs.0 + 1, self.small_runs.1 + bytes);
        }
    }

    /// Counts a run of `bytes` that is no longer a block, nor pending.
    #[inline(always)]
    pub(crate) fn block_given(&mut self, bytes: u64) {
        if bytes <= SMALL_LIMIT {
            let (count, all) = self.small_runs;
            self.small_runs = (count.wrapping_sub(1), all.wrapping_sub(bytes));
        }
    }

    /// Small blocks that are runs, live or pending: number and bytes.
    pub(crate) fn small_runs(&self) -> (u64, u64) {
        self.small_runs
    }

    pub(crate) fn synchronised(&mut self) {
        self.synchronisations += 1;
    }

    /// Notes the free pieces that cannot go back, and their bytes; small and large. Known only when
    /// a reader asks.
    pub(crate) fn look(&mut self, pieces: [u64; 2], bytes: [u64; 2]) {
        self.inactive_split.set(pieces[0], pieces[1]);
        self.inactive_split_bytes.set(bytes[0], bytes[1]);
    }

    fn update(&mut self) {
        // Slab memory not yet reported by the backing does not count twice.
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

    /// Restarts the peaks at the current figures.
    pub(crate) fn reset_peaks(&mut self) {
        for stat in self.gauges().into_iter().flat_map(|gauge| &mut gauge.0) {
            stat.peak = stat.current;
        }
    }

    /// Restarts the accumulated figures at zero, given the retries and out-of-memories so far.
    pub(crate) fn reset_accumulated(&mut self, retries: u64, out_of_memories: u64) {
        for stat in self.gauges().into_iter().flat_map(|gauge| &mut gauge.0) {
            (stat.allocated, stat.freed) = (0, 0);
        }
        self.synchronisations = 0;
        self.base = Base { retries, out_of_memories };
    }

    /// All figures, given the retries and out-of-memories in the life of the device.
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
