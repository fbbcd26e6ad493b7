//! Free runs by size: a two-level segregated list with exact best fit.
//!
//! The index is the one of TLSF (Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004): a bin for each of
//! sixteen steps of every doubling, found through two bitmaps. TLSF answers with a good fit; here the bin of the request is
//! searched to the end, so the answer is the best fit, lowest address first. Bins are short: a step is 6% of the size.
#![deny(unsafe_code)]

use super::{NO_RUN, Run, RunId};
use crate::heap::size_class::ALIGNMENT;

const STEPS: usize = 16;
const FIRST: u32 = ALIGNMENT.trailing_zeros();
const DOUBLINGS: usize = 48 - FIRST as usize;
/// Bins, rounded up so that a masked number is one of them: no bounds to check on the hot path.
const BINS: usize = (DOUBLINGS * STEPS).next_power_of_two();

/// The free runs of one owner, linked through [`Run::bin_next`] and [`Run::bin_previous`].
pub(super) struct SizeIndex {
    doublings: u64,
    steps: [u16; BINS / STEPS],
    heads: [RunId; BINS],
    /// Runs in the index.
    pub(super) count: u32,
    /// Their bytes.
    pub(super) bytes: u64,
    /// No run in the index was freed before this epoch.
    pub(super) oldest: u64,
}

impl Default for SizeIndex {
    fn default() -> Self {
        Self {
            doublings: 0,
            steps: [0; BINS / STEPS],
            heads: [NO_RUN; BINS],
            count: 0,
            bytes: 0,
            oldest: u64::MAX,
        }
    }
}

/// The bin of `bytes`, at least [`ALIGNMENT`]: doublings above that times [`STEPS`], and steps.
#[inline(always)]
fn bin_of(bytes: u64) -> usize {
    let shift = bytes.ilog2() - STEPS.ilog2();
    // The shifted size is its step and STEPS more.
    (((shift + STEPS.ilog2() - FIRST) as usize * STEPS) + (bytes >> shift) as usize - STEPS) & (BINS - 1)
}

impl SizeIndex {
    #[inline(always)]
    pub(super) fn insert(&mut self, runs: &mut [Run], id: RunId) {
        let run = &mut runs[id as usize];
        self.count += 1;
        self.bytes += run.bytes;
        self.oldest = self.oldest.min(run.epoch);
        self.link(runs, id);
    }

    #[inline(always)]
    pub(super) fn remove(&mut self, runs: &mut [Run], id: RunId) {
        self.unlink(runs, id);
        self.count -= 1;
        self.bytes -= runs[id as usize].bytes;
        if self.count == 0 {
            self.oldest = u64::MAX;
        }
    }

    /// Free run `id` is `bytes` long from now on. Mostly it stays in its bin.
    #[inline(always)]
    pub(super) fn resize(&mut self, runs: &mut [Run], id: RunId, bytes: u64) {
        let before = runs[id as usize].bytes;
        self.bytes = self.bytes + bytes - before;
        let stays = bin_of(before) == bin_of(bytes);
        if !stays {
            self.unlink(runs, id);
        }
        runs[id as usize].bytes = bytes;
        if !stays {
            self.link(runs, id);
        }
    }

    #[inline(always)]
    fn link(&mut self, runs: &mut [Run], id: RunId) {
        let run = &mut runs[id as usize];
        let bin = bin_of(run.bytes);
        let next = std::mem::replace(&mut self.heads[bin], id);
        run.bin_next = next;
        run.bin_previous = NO_RUN;
        if next != NO_RUN {
            runs[next as usize].bin_previous = id;
            return;
        }
        self.steps[bin / STEPS] |= 1 << (bin % STEPS);
        self.doublings |= 1 << (bin / STEPS);
    }

    #[inline(always)]
    fn unlink(&mut self, runs: &mut [Run], id: RunId) {
        let Run { bin_next, bin_previous, bytes, .. } = runs[id as usize];
        if bin_next != NO_RUN {
            runs[bin_next as usize].bin_previous = bin_previous;
        }
        if bin_previous != NO_RUN {
            runs[bin_previous as usize].bin_next = bin_next;
            return;
        }
        let bin = bin_of(bytes);
        self.heads[bin] = bin_next;
        if bin_next == NO_RUN {
            let steps = &mut self.steps[bin / STEPS];
            *steps &= !(1 << (bin % STEPS));
            if *steps == 0 {
                self.doublings &= !(1 << (bin / STEPS));
            }
        }
    }

    /// The smallest run that holds `bytes` at a multiple of `align` (a power of two), the lowest address among equals.
    #[inline(always)]
    pub(super) fn best_fit(&self, runs: &[Run], bytes: u64, align: u64) -> Option<RunId> {
        let first = bin_of(bytes);
        // The bin of the request may hold runs that are too short, and runs below `bytes + align` may lie askew.
        let mut bin =
            if self.steps[first / STEPS] >> (first % STEPS) & 1 != 0 { first } else { self.next_bin(first)? };
        loop {
            if let Some(id) = self.best_of(runs, bin, bytes, align) {
                return Some(id);
            }
            bin = self.next_bin(bin)?;
        }
    }

    /// The first bin after `bin` that holds a run.
    #[inline(always)]
    fn next_bin(&self, bin: usize) -> Option<usize> {
        let doubling = bin / STEPS;
        // Shifted as u32, and twice: the step may be the last.
        let above = u32::from(self.steps[doubling]) >> (bin % STEPS) >> 1;
        if above != 0 {
            return Some(bin + 1 + above.trailing_zeros() as usize);
        }
        let above = self.doublings >> doubling >> 1;
        let doubling = doubling + 1 + above.trailing_zeros() as usize;
        let steps = self.steps.get(doubling)?;
        Some(doubling * STEPS + steps.trailing_zeros() as usize)
    }

    #[inline(always)]
    fn best_of(&self, runs: &[Run], bin: usize, bytes: u64, align: u64) -> Option<RunId> {
        let (mut best, mut best_bytes, mut best_address) = (NO_RUN, u64::MAX, u64::MAX);
        let mut id = self.heads[bin & (BINS - 1)];
        while id != NO_RUN {
            let run = &runs[id as usize];
            // Every run begins at a multiple of ALIGNMENT.
            let askew = if align > ALIGNMENT { run.askew(align) } else { 0 };
            let better = run.bytes < best_bytes || (run.bytes == best_bytes && run.address < best_address);
            if run.bytes >= bytes + askew && better {
                (best, best_bytes, best_address) = (id, run.bytes, run.address);
            }
            id = run.bin_next;
        }
        (best != NO_RUN).then_some(best)
    }

    /// Bytes of the largest run, 0 where there is none.
    pub(super) fn largest(&self, runs: &[Run]) -> u64 {
        let Some(doubling) = self.doublings.checked_ilog2() else { return 0 };
        let Some(step) = self.steps[doubling as usize].checked_ilog2() else { return 0 };
        let mut largest = 0;
        let mut id = self.heads[doubling as usize * STEPS + step as usize];
        while id != NO_RUN {
            largest = largest.max(runs[id as usize].bytes);
            id = runs[id as usize].bin_next;
        }
        largest
    }

    /// Appends every run to `into`.
    pub(super) fn collect(&self, runs: &[Run], into: &mut Vec<RunId>) {
        self.collect_from(runs, ALIGNMENT, into);
    }

    /// Appends every run of at least `bytes` to `into`, and some of up to a sixteenth less.
    pub(super) fn collect_from(&self, runs: &[Run], bytes: u64, into: &mut Vec<RunId>) {
        let (first, first_step) = (bin_of(bytes) / STEPS, bin_of(bytes) % STEPS);
        let mut doublings = self.doublings >> first << first;
        while doublings != 0 {
            let doubling = doublings.trailing_zeros() as usize;
            doublings &= doublings - 1;
            let mut steps = self.steps[doubling];
            if doubling == first {
                steps = steps >> first_step << first_step;
            }
            while steps != 0 {
                let mut id = self.heads[doubling * STEPS + steps.trailing_zeros() as usize];
                steps &= steps - 1;
                while id != NO_RUN {
                    into.push(id);
                    id = runs[id as usize].bin_next;
                }
            }
        }
    }
}
