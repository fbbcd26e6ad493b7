//! The growth of a stitched heap: its length each time, and the length of its chunks.
//!
//! Every mapping of a chunk costs the same driver time whatever its length, some 60 us from its
//! creation to its end on an H200, so few and long chunks are fast. But memory taken too early may
//! never be needed, and a long chunk in partial use is *split*: its idle pages serve only at the
//! ends of a row. While a program loads, or grows without a free in between, it keeps what it
//! takes, and its chunks are longest. docs/decisions/moving-pages.md has the figures behind the
//! constants.

use crate::small::size_class::PAGE;
use crate::supply::pages::LONGEST_CHUNK;

/// `backing:stitch` takes fresh pages up to the peak of live bytes and one part in this more.
const SLACK: u64 = 128;
/// In a small heap: up to one part in the first, but at most the second (bytes).
const SMALL_SLACK: (u64, u64) = (32, 64 << 20);
/// Within the slack, a heap grows by at least this much (bytes).
pub(crate) const STEP: u64 = 48 << 20;
/// Memory that only a graph or a named pool can use exceeds the need by at most one part in this of
/// what its space holds: idle, it is lost to all others.
pub(crate) const OWN_SHARE: u64 = 8;
/// A run of growth ends once more than one part in this of it has been freed since it began.
const FREED_SHARE: u64 = 8;
/// A growth exceeds the need by at most one part in this of the memory held.
const STEPS: u64 = 256;
/// A growth exceeds the need by at most this much (bytes).
const LONGEST_STEP: u64 = 32 << 20;
/// A program loads memory to keep while less than one part in this of the memory held has been
/// freed since the start.
const LOADING_SHARE: u64 = 2;
/// A chunk is at most one part in this of the memory that may still be taken, and a step one part
/// in [`LEFT_STEPS`]: with memory short, none may be split.
const LEFT_CHUNKS: u64 = 512;
const LEFT_STEPS: u64 = 16;

/// The part of the pace that depends on whether `slack:` asks for little memory.
struct Shape {
    /// In a run of growth, a chunk is at least one part in the first of the run's length, but at
    /// most one part in the second of the memory held.
    run_chunks: (u64, u64),
    /// A step is at most one part in this of the memory held.
    steps: u64,
    /// While the program loads, a chunk is one part in this of the memory held, between these
    /// bounds (bytes).
    loading: (u64, (u64, u64)),
    /// Otherwise a chunk is at most one part in this of the memory held, between these bounds
    /// (bytes).
    chunks: (u64, (u64, u64)),
}

const USUAL: Shape = Shape {
    run_chunks: (16, 1),
    loading: (1, (8 << 20, LONGEST_CHUNK)),
    steps: STEPS,
    // Whatever is held: a mapping costs the same for any length.
    chunks: (1, (16 << 20, 16 << 20)),
};
const TIGHT: Shape = Shape {
    run_chunks: (32, 4096),
    loading: (1024, (PAGE, 8 << 20)),
    steps: 4 * STEPS,
    chunks: (8192, (PAGE, 8 << 20)),
};

/// How far (bytes) the memory held may exceed `wanted`, the peak of live bytes, before idle pages
/// move.
pub(crate) fn usual_slack(wanted: u64) -> u64 {
    let (share, most) = SMALL_SLACK;
    (wanted / SLACK).max((wanted / share).min(most))
}

/// The recent growth of a heap.
pub(crate) struct Pace {
    shape: &'static Shape,
    /// Bytes taken in this run of growth.
    run: u64,
    /// Bytes freed from the start until it began.
    freed_before: u64,
}

impl Pace {
    /// The pace of a heap that has not grown. `tight`: it is to hold little.
    pub(crate) fn new(tight: bool) -> Self {
        Self { shape: if tight { &TIGHT } else { &USUAL }, run: 0, freed_before: 0 }
    }

    /// Called when a request does not fit; `freed` bytes have been freed since the start.
    pub(crate) fn begin(&mut self, freed: u64) {
        if freed - self.freed_before > self.run / FREED_SHARE {
            (self.run, self.freed_before) = (0, freed);
        }
    }

    /// Counts a growth of `bytes`.
    pub(crate) fn grew(&mut self, bytes: u64) {
        self.run += bytes;
    }

    /// Bytes by which a growth exceeds the need, for a heap that holds `held` and may take `left`
    /// more, past its slack. `moved`: a part of the need was found idle.
    pub(crate) fn step(&self, held: u64, left: u64, moved: bool) -> u64 {
        let most = (held / self.shape.steps).min(LONGEST_STEP);
        // Among idle memory used in turns, the step would stay idle, and split.
        let step = if moved { most.min(self.run / 2) } else { most };
        step.min(left / LEFT_STEPS) / PAGE * PAGE
    }

    /// The longest chunk of a growth (bytes, whole pages). `held` bytes are held, `left` more may
    /// be taken, and `freed` have been freed since the start.
    pub(crate) fn longest_chunk(&self, held: u64, left: u64, freed: u64) -> u64 {
        let (of_run, of_held) = self.shape.run_chunks;
        let of_run = (self.run / of_run).min(held / of_held).min(LONGEST_CHUNK);
        let loads = freed < held / LOADING_SHARE;
        let (share, (shortest, longest)) =
            if loads { self.shape.loading } else { self.shape.chunks };
        let usual = (held / share).clamp(shortest, longest);
        usual.max(of_run).min((left / LEFT_CHUNKS).max(PAGE)) / PAGE * PAGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD: u64 = 32 << 30;
    const LEFT: u64 = HELD;

    #[test]
    fn a_program_that_loads_gets_the_longest_chunks_and_later_ones_of_16_mib() {
        let mut pace = Pace::new(false);
        pace.begin(0);
        assert_eq!(pace.longest_chunk(HELD, LEFT, 0), LONGEST_CHUNK);
        for held in [HELD, 1 << 30, 0] {
            assert_eq!(pace.longest_chunk(held, LEFT, held), 16 << 20);
        }
    }

    #[test]
    fn the_slack_is_a_128th_and_in_a_small_heap_up_to_a_32nd_or_64_mib() {
        const MIB: u64 = 1 << 20;
        assert_eq!(usual_slack(320 * MIB), 10 * MIB);
        assert_eq!(usual_slack(4096 * MIB), 64 * MIB);
        assert_eq!(usual_slack(HELD), 256 * MIB);
    }

    #[test]
    fn steps_are_a_small_part_of_what_is_held_and_beside_moved_pages_grow_in_a_run_without_frees() {
        let mut pace = Pace::new(false);
        pace.begin(0);
        assert_eq!(pace.step(HELD, LEFT, false), LONGEST_STEP);
        assert_eq!(pace.step(HELD, LEFT, true), 0);
        pace.grew(1 << 30);
        pace.begin(1 << 20);
        assert_eq!(pace.step(HELD, LEFT, true), LONGEST_STEP);
        pace.begin(1 << 30);
        assert_eq!(pace.step(HELD, LEFT, true), 0);
    }

    #[test]
    fn a_heap_that_is_to_hold_little_takes_shorter_steps_and_chunks() {
        let (mut usual, mut tight) = (Pace::new(false), Pace::new(true));
        for pace in [&mut usual, &mut tight] {
            pace.begin(0);
            pace.grew(8 << 30);
        }
        assert!(tight.step(HELD / 16, LEFT, false) < usual.step(HELD / 16, LEFT, false));
        assert!(tight.longest_chunk(HELD, LEFT, HELD) < usual.longest_chunk(HELD, LEFT, HELD));
    }

    #[test]
    fn a_heap_that_may_take_little_more_grows_by_what_it_needs_in_single_pages() {
        let mut pace = Pace::new(false);
        pace.begin(0);
        pace.grew(8 << 30);
        assert_eq!((pace.step(HELD, 16 * PAGE, false), pace.step(HELD, 0, false)), (PAGE, 0));
        assert_eq!(pace.longest_chunk(HELD, 512 * PAGE, 0), PAGE);
    }

    #[test]
    fn every_length_is_whole_pages() {
        for held in [0, PAGE, 3 * PAGE + 512, HELD - 512, HELD * 7] {
            for run in [0, 1 << 29, HELD / 3 + 7] {
                for tight in [false, true] {
                    let mut pace = Pace::new(tight);
                    pace.begin(0);
                    pace.grew(run);
                    assert!(pace.step(held, LEFT, true).is_multiple_of(PAGE));
                    for freed in [0, held] {
                        let longest = pace.longest_chunk(held, LEFT, freed);
                        assert!(longest >= PAGE && longest.is_multiple_of(PAGE));
                    }
                }
            }
        }
    }
}
