//! Free runs by size: a two-level segregated list with exact best fit, and first fit among a few.
//!
//! The index is that of TLSF (Masmano et al., "TLSF: a new dynamic memory allocator for real-time
//! systems", ECRTS 2004): a bin for each of sixteen steps of every doubling, found through two
//! bitmaps. TLSF answers with a good fit; this index searches the bin of the request to the end, so
//! the answer is the best fit, lowest address first. Bins are short: a step is 6% of the size.
//! Where what stays should gather at low addresses, long requests take the first fit of a few
//! ([`SizeIndex::fit`]). docs/decisions/placement.md has the figures.

use super::run::{NO_RUN, Run, RunId};
use crate::small::size_class::ALIGNMENT;

const STEPS: usize = 16;
const FIRST: usize = ALIGNMENT.trailing_zeros() as usize;
const DOUBLINGS: usize = 48 - FIRST;
/// Bins, rounded up so that a masked number is one of them: no bounds to check on the hot path.
const BINS: usize = (DOUBLINGS * STEPS).next_power_of_two();
const WORD: usize = 64;
/// The shortest request (bytes) that takes the lowest of several fits. Shorter ones fill gaps.
const LONG: u64 = 1 << 20;
/// Runs of which the lowest serves, from the shortest on.
const CHOICE: usize = 4;

/// The free runs of one owner, linked through [`Run::bin_next`] and [`Run::bin_previous`].
pub(super) struct SizeIndex {
    /// A bit for each bin that holds a run.
    filled: [u64; BINS / WORD],
    heads: [RunId; BINS],
    pub(super) count: u32,
    /// Their bytes.
    pub(super) bytes: u64,
    /// No run in the index was freed before this epoch.
    pub(super) oldest: u64,
}

impl Default for SizeIndex {
    fn default() -> Self {
        Self {
            filled: [0; BINS / WORD],
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
    const STEP_BITS: usize = STEPS.ilog2() as usize;
    // The bit changes nothing, and shows the compiler that there is one.
    let log = (bytes | ALIGNMENT).ilog2() as usize;
    let shift = log - STEP_BITS;
    // The shifted size is its step and STEPS more.
    (shift * STEPS + (bytes >> shift) as usize).wrapping_sub((FIRST - STEP_BITS + 1) * STEPS)
        & (BINS - 1)
}

/// Whether a run of `length` fits a request so well that its address does not matter: the request
/// is short, or the run is longer by a sixteenth at most.
#[inline(always)]
pub(super) fn is_near(bytes: u64, length: u64) -> bool {
    bytes < LONG || length <= bytes + bytes / 16
}

impl SizeIndex {
    /// Adds a run; whether it is now the only one.
    #[inline(always)]
    pub(super) fn insert(&mut self, runs: &mut [Run], id: RunId) -> bool {
        let run = &runs[id as usize];
        self.count += 1;
        self.bytes += run.bytes;
        self.oldest = self.oldest.min(run.epoch);
        self.link(runs, id, bin_of(run.bytes));
        self.count == 1
    }

    #[inline(always)]
    pub(super) fn remove(&mut self, runs: &mut [Run], id: RunId) -> bool {
        self.count -= 1;
        self.bytes -= runs[id as usize].bytes;
        self.unlink(runs, id);
        let last = self.count == 0;
        if last {
            self.oldest = u64::MAX;
        }
        last
    }

    /// Sets the length of free run `id` to `bytes`.
    #[inline(always)]
    pub(super) fn resize(&mut self, runs: &mut [Run], id: RunId, bytes: u64) {
        let before = std::mem::replace(&mut runs[id as usize].bytes, bytes);
        self.bytes = self.bytes.wrapping_add(bytes.wrapping_sub(before));
        let bin = bin_of(bytes);
        if bin != usize::from(runs[id as usize].bin) {
            self.unlink(runs, id);
            self.link(runs, id, bin);
        }
    }

    #[inline(always)]
    fn link(&mut self, runs: &mut [Run], id: RunId, bin: usize) {
        let bin = bin & (BINS - 1);
        let next = std::mem::replace(&mut self.heads[bin], id);
        self.filled[bin / WORD] |= 1 << (bin % WORD);
        let run = &mut runs[id as usize];
        run.bin = bin as u16;
        run.bin_next = next;
        run.bin_previous = NO_RUN;
        if let Some(next) = runs.get_mut(next as usize) {
            next.bin_previous = id;
        }
    }

    #[inline(always)]
    fn unlink(&mut self, runs: &mut [Run], id: RunId) {
        let Run { bin, bin_next, bin_previous, .. } = runs[id as usize];
        if let Some(next) = runs.get_mut(bin_next as usize) {
            next.bin_previous = bin_previous;
        }
        if let Some(previous) = runs.get_mut(bin_previous as usize) {
            previous.bin_next = bin_next;
            return;
        }
        let bin = bin as usize & (BINS - 1);
        self.heads[bin] = bin_next;
        if bin_next == NO_RUN {
            self.filled[bin / WORD] &= !(1 << (bin % WORD));
        }
    }

    /// The smallest run that holds `bytes` at a multiple of `align` (a power of two), and its
    /// length; of equal ones, the one at the lowest address.
    #[inline(always)]
    fn best_fit(&self, runs: &[Run], bytes: u64, align: u64) -> Option<(RunId, u64)> {
        let mut bin = self.filled_from(bin_of(bytes))?;
        loop {
            // The bin of the request may hold runs that are too short, and runs below
            // `bytes + align` may lie askew.
            let (mut best, mut best_bytes, mut best_address) = (NO_RUN, u64::MAX, u64::MAX);
            let mut id = self.heads[bin & (BINS - 1)];
            while let Some(run) = runs.get(id as usize) {
                if run.fits(bytes, align)
                    && (run.bytes < best_bytes
                        || (run.bytes == best_bytes && run.address < best_address))
                {
                    (best, best_bytes, best_address) = (id, run.bytes, run.address);
                }
                id = run.bin_next;
            }
            if best != NO_RUN {
                return Some((best, best_bytes));
            }
            bin = self.filled_from(bin + 1)?;
        }
    }

    /// The best fit; or if `lowest`, for a request of [`LONG`] bytes or more whose best fit is
    /// longer by more than a sixteenth, the run at the lowest address among [`CHOICE`] that fit.
    #[inline(always)]
    pub(super) fn fit(
        &self,
        runs: &[Run],
        bytes: u64,
        align: u64,
        lowest: bool,
    ) -> Option<(RunId, u64)> {
        let best = self.best_fit(runs, bytes, align)?;
        Some(if lowest { self.lowest_fit(runs, best, bytes, align) } else { best })
    }

    /// The lowest of [`CHOICE`] runs that fit, about the shortest: bins have no order.
    #[inline(never)]
    fn lowest_fit(&self, runs: &[Run], best: (RunId, u64), bytes: u64, align: u64) -> (RunId, u64) {
        if is_near(bytes, best.1) {
            return best;
        }
        let (mut lowest, mut address, mut left) = (best, runs[best.0 as usize].address, CHOICE);
        // The best fit is in the first bin with any.
        let mut next = Some(bin_of(best.1));
        while let Some(bin) = next {
            let mut id = self.heads[bin & (BINS - 1)];
            while let Some(run) = runs.get(id as usize) {
                if run.fits(bytes, align) {
                    if run.address < address {
                        (lowest, address) = ((id, run.bytes), run.address);
                    }
                    left -= 1;
                    if left == 0 {
                        return lowest;
                    }
                }
                id = run.bin_next;
            }
            next = self.filled_from(bin + 1);
        }
        lowest
    }

    /// The first bin from `bin` on that holds a run.
    #[inline(always)]
    fn filled_from(&self, bin: usize) -> Option<usize> {
        let mut word = bin / WORD;
        let mut filled = self.filled.get(word)? & u64::MAX << (bin % WORD);
        while filled == 0 {
            word += 1;
            filled = *self.filled.get(word)?;
        }
        Some(word * WORD + filled.trailing_zeros() as usize)
    }

    /// Bytes of the largest run, 0 if there is none.
    pub(super) fn largest(&self, runs: &[Run]) -> u64 {
        let Some((word, filled)) =
            self.filled.iter().enumerate().rfind(|(_, filled)| **filled != 0)
        else {
            return 0;
        };
        let mut largest = 0;
        let mut id = self.heads[word * WORD + filled.ilog2() as usize];
        while id != NO_RUN {
            largest = largest.max(runs[id as usize].bytes);
            id = runs[id as usize].bin_next;
        }
        largest
    }

    /// Appends every run to `into`.
    pub(super) fn collect(&self, runs: &[Run], into: &mut Vec<RunId>) {
        self.each_from(runs, ALIGNMENT, |id| into.push(id));
    }

    /// Calls `body` with every run of at least `bytes`, and some of up to a sixteenth less.
    #[inline]
    pub(super) fn each_from(&self, runs: &[Run], bytes: u64, mut body: impl FnMut(RunId)) {
        let first = bin_of(bytes);
        for word in first / WORD..BINS / WORD {
            let mut filled = self.filled[word];
            if word == first / WORD {
                filled &= u64::MAX << (first % WORD);
            }
            while filled != 0 {
                let mut id = self.heads[word * WORD + filled.trailing_zeros() as usize];
                filled &= filled - 1;
                while id != NO_RUN {
                    body(id);
                    id = runs[id as usize].bin_next;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fits(run: &Run, bytes: u64, align: u64) -> bool {
        run.bytes >= bytes + run.askew(align)
    }

    #[test]
    fn the_best_fit_is_one_of_the_few() {
        let (mut runs, mut index) = (Vec::new(), SizeIndex::default());
        // The best fit is the lowest and the last of its bin's list.
        for (id, (place, units)) in (0..).zip([(1, 64), (2, 65), (3, 65), (4, 65), (5, 65)]) {
            runs.push(Run::new(place << 32, units * LONG, 0));
            index.insert(&mut runs, id);
        }
        assert_eq!(index.fit(&runs, 33 * LONG, ALIGNMENT, true), Some((0, 64 * LONG)));
    }

    proptest! {
        #[test]
        fn a_long_request_takes_a_near_fit_or_else_the_lowest_of_about_the_shortest(
            lengths in prop::collection::vec((1u64..64, 3u32..7), 1..40),
            order in any::<u64>(),
            (units, log) in (1u64..64, 0u32..4),
            align in prop::sample::select(vec![ALIGNMENT, 16 * ALIGNMENT]),
        ) {
            let (mut runs, mut index) = (Vec::new(), SizeIndex::default());
            for (number, (units, log)) in (0u64..).zip(lengths) {
                // At addresses in another order than that of the lists.
                let place = (number ^ order) & 63;
                let length = LONG + ((units * ALIGNMENT) << log);
                runs.push(Run::new((place << 32) + number * ALIGNMENT, length, 0));
                index.insert(&mut runs, number as RunId);
            }
            let bytes = LONG + ((units * ALIGNMENT) << log);
            let mut fitting: Vec<&Run> =
                runs.iter().filter(|run| fits(run, bytes, align)).collect();
            fitting.sort_by_key(|run| (run.bytes, run.address));

            let best = index.best_fit(&runs, bytes, align);
            let address =
                |found: Option<(RunId, u64)>| found.map(|(id, _)| runs[id as usize].address);
            prop_assert_eq!(address(best), fitting.first().map(|run| run.address));

            let lowest = best.map(|best| index.lowest_fit(&runs, best, bytes, align));
            let short = bytes - LONG;
            let best_of_short = index.best_fit(&runs, short, align).unwrap();
            prop_assert_eq!(index.lowest_fit(&runs, best_of_short, short, align), best_of_short);
            let near = fitting.first().filter(|run| run.bytes <= bytes + bytes / 16);
            let of_few = fitting.iter().min_by_key(|run| run.address);
            if near.is_some() {
                prop_assert_eq!(lowest, best);
            } else if fitting.len() <= CHOICE {
                prop_assert_eq!(address(lowest), of_few.map(|run| run.address));
            } else {
                let (id, length) = lowest.unwrap();
                let run = &runs[id as usize];
                prop_assert!(fits(run, bytes, align) && run.bytes == length);
                prop_assert!(bin_of(length) <= bin_of(fitting[CHOICE - 1].bytes));
                prop_assert!(run.address <= fitting[0].address);
            }
        }
    }
}
