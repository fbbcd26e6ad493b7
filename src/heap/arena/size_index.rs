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

/// The free runs of one owner, linked through [`Run::bin_next`] and [`Run::bin_previous`].
pub(super) struct SizeIndex {
    doublings: u64,
    steps: [u16; DOUBLINGS],
    heads: [RunId; DOUBLINGS * STEPS],
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
            steps: [0; DOUBLINGS],
            heads: [NO_RUN; DOUBLINGS * STEPS],
            count: 0,
            bytes: 0,
            oldest: u64::MAX,
        }
    }
}

/// The bin of `bytes`, at least [`ALIGNMENT`].
#[inline]
fn bin_of(bytes: u64) -> (usize, usize) {
    let log = bytes.ilog2();
    ((log - FIRST) as usize, (bytes >> (log - 4)) as usize & (STEPS - 1))
}

impl SizeIndex {
    #[inline]
    pub(super) fn insert(&mut self, runs: &mut [Run], id: RunId) {
        let run = &mut runs[id as usize];
        let (doubling, step) = bin_of(run.bytes);
        let head = &mut self.heads[doubling * STEPS + step];
        let next = std::mem::replace(head, id);
        run.bin_next = next;
        run.bin_previous = NO_RUN;
        self.count += 1;
        self.bytes += run.bytes;
        self.oldest = self.oldest.min(run.epoch);
        if next != NO_RUN {
            runs[next as usize].bin_previous = id;
        }
        self.steps[doubling] |= 1 << step;
        self.doublings |= 1 << doubling;
    }

    #[inline]
    pub(super) fn remove(&mut self, runs: &mut [Run], id: RunId) {
        let Run { bin_next, bin_previous, bytes, .. } = runs[id as usize];
        if bin_next != NO_RUN {
            runs[bin_next as usize].bin_previous = bin_previous;
        }
        if bin_previous != NO_RUN {
            runs[bin_previous as usize].bin_next = bin_next;
        } else {
            let (doubling, step) = bin_of(bytes);
            self.heads[doubling * STEPS + step] = bin_next;
            if bin_next == NO_RUN {
                self.steps[doubling] &= !(1 << step);
                if self.steps[doubling] == 0 {
                    self.doublings &= !(1 << doubling);
                }
            }
        }
        self.count -= 1;
        self.bytes -= bytes;
        if self.count == 0 {
            self.oldest = u64::MAX;
        }
    }

    /// The smallest run that holds `bytes` at a multiple of `align` (a power of two), the lowest address among equals.
    #[inline]
    pub(super) fn best_fit(&self, runs: &[Run], bytes: u64, align: u64) -> Option<RunId> {
        if self.count == 0 {
            return None;
        }
        let (mut doubling, mut step) = bin_of(bytes);
        if self.steps[doubling] >> step & 1 == 0 {
            (doubling, step) = self.next_bin(doubling, step)?;
        }
        loop {
            // The first bin may hold runs that are too short, and runs below `bytes + align` may lie askew.
            if let Some(id) = self.best_of(runs, doubling * STEPS + step, bytes, align) {
                return Some(id);
            }
            (doubling, step) = self.next_bin(doubling, step)?;
        }
    }

    /// The first bin after (`doubling`, `step`) that holds a run.
    #[inline]
    fn next_bin(&self, doubling: usize, step: usize) -> Option<(usize, usize)> {
        // Shifted as u32: `step + 1` may be 16.
        let above = u32::from(self.steps[doubling]) >> (step + 1) << (step + 1);
        if above != 0 {
            return Some((doubling, above.trailing_zeros() as usize));
        }
        let above = self.doublings >> (doubling + 1) << (doubling + 1);
        let doubling = above.trailing_zeros() as usize;
        (above != 0).then(|| (doubling, self.steps[doubling].trailing_zeros() as usize))
    }

    #[inline]
    fn best_of(&self, runs: &[Run], bin: usize, bytes: u64, align: u64) -> Option<RunId> {
        let (mut best, mut best_key) = (None, (u64::MAX, u64::MAX));
        let mut id = self.heads[bin];
        while id != NO_RUN {
            let run = &runs[id as usize];
            if run.bytes >= bytes + run.askew(align) && (run.bytes, run.address) < best_key {
                (best, best_key) = (Some(id), (run.bytes, run.address));
            }
            id = run.bin_next;
        }
        best
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
        let (first, first_step) = bin_of(bytes);
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
