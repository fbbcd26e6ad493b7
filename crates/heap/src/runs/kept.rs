//! Which blocks a program will keep, by what became of earlier blocks of their kind.
//!
//! A program that keeps a tensor of each round (the outputs of an evaluation, the states of a
//! recurrent net) cuts the memory of its temporaries into short runs, one for each tensor. So once
//! a heap holds more than its program needs, blocks that will be kept lie in a space of their own.
//!
//! Blocks are of one kind if they have one size and stream, and followed the same [`CONTEXT`]
//! requests: a loop makes them in each of its rounds. A kind is kept once [`LEAST`] of its blocks
//! are live, and none has been freed while the program freed as much as its peak of live bytes; it
//! is kept no more once a block of it is freed sooner than that. docs/decisions/lifetimes.md has
//! the figures.

use crate::runs::arena::RunId;

/// Large requests of its stream before a block that tell its kind.
const CONTEXT: usize = 16;
/// Live blocks from which on a kind may be kept.
const LEAST: u32 = 4;
/// Kinds that are told apart at a time.
const KINDS: usize = 4096;

/// A kind of blocks. Its clock is the bytes that the program has freed.
#[derive(Clone, Copy, Default)]
struct Kind {
    key: u64,
    live: u32,
    is_kept: bool,
    /// When the last of its blocks was freed, or the first of those that are live came.
    quiet_since: u64,
}

type KindId = u16;

/// When a block came, and what of.
#[derive(Clone, Copy, Debug)]
struct Birth {
    kind: KindId,
    at: u64,
}

/// The last sizes that a stream asked for, and a hash of them: a polynomial in [`BASE`], with the
/// last size as its lowest term.
#[derive(Clone, Copy, Default)]
struct Recent {
    sizes: [u64; CONTEXT],
    next: usize,
    hash: u64,
}

/// Odd, with bits everywhere: the multiplier of FxHash (rustc's).
const BASE: u64 = 0x517c_c1b7_2722_0a95;
/// The factor of the oldest size.
const OLDEST: u64 = BASE.wrapping_pow(CONTEXT as u32 - 1);

impl Recent {
    fn push(&mut self, size: u64) {
        let oldest = std::mem::replace(&mut self.sizes[self.next], size);
        self.next = (self.next + 1) % CONTEXT;
        let others = self.hash.wrapping_sub(oldest.wrapping_mul(OLDEST));
        self.hash = others.wrapping_mul(BASE).wrapping_add(size);
    }

    /// The key of the kind of a block of `size` bytes for `stream`. Its upper bits are its best.
    fn key(&self, size: u64, stream: u32) -> u64 {
        let request = size.wrapping_add(u64::from(stream));
        ((self.hash.rotate_left(5) ^ request).wrapping_mul(BASE)).rotate_left(5).wrapping_mul(BASE)
    }
}

/// The kinds of the blocks of a device.
pub(crate) struct KeptBlocks {
    /// By stream.
    recent: Vec<Recent>,
    kinds: Box<[Kind]>,
    /// By run.
    births: Vec<Option<Birth>>,
    /// The peak of live bytes: how long a kept block lives at least.
    pub(crate) peak: u64,
}

impl Default for KeptBlocks {
    fn default() -> Self {
        let kinds = vec![Kind::default(); KINDS].into();
        Self { recent: Vec::new(), kinds, births: Vec::new(), peak: 0 }
    }
}

impl KeptBlocks {
    /// Whether a new block of `size` bytes for `stream` will probably be kept. `now`: bytes freed
    /// so far. The caller notes it once it has memory ([`KeptBlocks::born`]).
    pub(crate) fn expect(&self, size: u64, stream: u32, now: u64) -> bool {
        let Some(recent) = self.recent.get(stream as usize) else { return false };
        let key = recent.key(size, stream);
        let kind = &self.kinds[place_of(key)];
        // With the new block.
        let (live, peak) = (kind.live + 1, self.peak);
        let is_old = live >= LEAST && now - kind.quiet_since > peak;
        kind.key == key && (kind.is_kept || is_old)
    }

    /// Notes the run of a new block, expected or not. Whether its free is to be noted: not if too
    /// many other kinds have live blocks.
    pub(crate) fn born(&mut self, run: RunId, size: u64, stream: u32, now: u64) -> bool {
        // A run that comes again without a free went with all of its space.
        self.freed(run, now);
        let is_kept = self.expect(size, stream, now);
        let recent = self.recent_of(stream);
        let key = recent.key(size, stream);
        recent.push(size);
        let place = place_of(key);
        let kind = &mut self.kinds[place];
        if kind.key != key {
            if kind.live > 0 {
                return false;
            }
            *kind = Kind { key, ..Kind::default() };
        }
        if kind.live == 0 {
            kind.quiet_since = now;
        }
        kind.live += 1;
        kind.is_kept = is_kept;
        let at = run as usize;
        if at >= self.births.len() {
            self.births.resize(at + 1, None);
        }
        self.births[at] = Some(Birth { kind: place as KindId, at: now });
        true
    }

    /// Notes the free of a run's block.
    pub(crate) fn freed(&mut self, run: RunId, now: u64) {
        let Some(birth) = self.births.get_mut(run as usize).and_then(Option::take) else { return };
        let kind = &mut self.kinds[usize::from(birth.kind)];
        kind.live -= 1;
        kind.quiet_since = now;
        kind.is_kept &= now - birth.at > self.peak;
    }

    fn recent_of(&mut self, stream: u32) -> &mut Recent {
        let at = stream as usize;
        if at >= self.recent.len() {
            self.recent.resize(at + 1, Recent::default());
        }
        &mut self.recent[at]
    }
}

/// The place of a kind.
fn place_of(key: u64) -> usize {
    (key >> (u64::BITS - KINDS.ilog2())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAK: u64 = 1 << 30;

    /// A program of rounds, each with temporaries of `sizes` and a block of `kept` bytes.
    struct Program {
        blocks: KeptBlocks,
        freed: u64,
        runs: RunId,
    }

    impl Program {
        fn new() -> Self {
            let blocks = KeptBlocks { peak: PEAK, ..KeptBlocks::default() };
            Self { blocks, freed: 0, runs: 0 }
        }

        fn malloc(&mut self, size: u64) -> (bool, RunId) {
            let is_kept = self.blocks.expect(size, 2, self.freed);
            self.runs += 1;
            self.blocks.born(self.runs, size, 2, self.freed);
            (is_kept, self.runs)
        }

        fn free(&mut self, run: RunId, size: u64) {
            self.freed += size;
            self.blocks.freed(run, self.freed);
        }

        /// Whether the temporaries, and the block that stays, are expected to be kept.
        fn round(&mut self, size: u64) -> (bool, bool, RunId) {
            let mut any = false;
            for _ in 0..CONTEXT {
                let (is_kept, run) = self.malloc(2 * size);
                any |= is_kept;
                self.free(run, 2 * size);
            }
            // Of the temporaries' size, that the context has to tell them apart.
            let (is_kept, run) = self.malloc(2 * size);
            let (one_more, temporary) = self.malloc(size);
            self.free(temporary, size);
            (any | one_more, is_kept, run)
        }
    }

    /// Rounds in which a program of 32 MiB a round frees the peak.
    const ROUNDS: u64 = PEAK / (33 << 20) + 1;

    #[test]
    fn a_block_that_stays_in_each_round_is_kept_and_the_temporaries_are_not() {
        let mut program = Program::new();
        for round in 0..3 * ROUNDS {
            let (temporaries, stays, _) = program.round(1 << 20);
            assert!(!temporaries, "round {round}: a temporary");
            assert_eq!(stays, round >= ROUNDS, "round {round}");
        }
    }

    #[test]
    fn blocks_that_are_freed_within_a_peak_are_kept_no_more() {
        let mut program = Program::new();
        let mut runs: Vec<RunId> = (0..3 * ROUNDS).map(|_| program.round(1 << 20).2).collect();
        program.free(runs.pop().unwrap(), 1 << 20);
        assert!(!program.round(1 << 20).1);
    }

    #[test]
    fn blocks_that_are_freed_after_a_long_time_are_kept_again() {
        let mut program = Program::new();
        let runs: Vec<RunId> = (0..3 * ROUNDS).map(|_| program.round(1 << 20).2).collect();
        for run in &runs[..ROUNDS as usize] {
            program.free(*run, 1 << 20);
        }
        assert!(program.round(1 << 20).1);
    }

    #[test]
    fn fewer_than_four_blocks_are_not_kept_for_their_age() {
        let mut program = Program::new();
        let size = PEAK;
        for round in 1..4 {
            assert!(!program.round(size).1, "round {round}");
        }
        assert!(program.round(size).1);
    }
}
