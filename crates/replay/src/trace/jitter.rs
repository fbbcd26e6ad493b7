//! Traces with other sizes: the requests of a program of the same shape with longer or shorter
//! batches.
//!
//! A held-out set: shows whether an allocator tuned on the bundled traces generalises.

use super::{Op, Trace, rounded};
use std::collections::HashSet;

/// Blocks that live across this many step marks are persistent: weights and optimiser state, not
/// gradients, which the next step drops.
const PERSISTENT_STEPS: u32 = 2;
/// Sizes up to this many bytes are scalars and the like, independent of the batch.
const SCALAR: u64 = 512;
/// A step is between half and one and a half times as long as the traced one, and seldom the
/// longest.
const SHORTEST: f64 = 0.5;
const LONGEST: f64 = 1.5;
/// A kind of block (one size in the trace) is up to this fraction wider or narrower in all steps.
const WIDTH: f64 = 0.1;
/// Sizes keep their largest power-of-two divisor, up to this, bytes: a tensor of half the tokens
/// still has whole rows.
const ROW: u64 = 1024;

impl Trace {
    /// The trace with other sizes, drawn from `seed`: same operations, order and streams.
    ///
    /// Persistent blocks keep their sizes, and so do gradients and copies of weights, recognised by
    /// the size of a persistent block. Every other size is scaled by a factor of its step, drawn
    /// with a long tail as lengths are, and by a factor of its kind; so blocks of equal size within
    /// a step stay equal.
    #[must_use]
    pub fn jittered(&self, seed: u64) -> Self {
        let steps = self.steps();
        let fixed = self.persistent_sizes(&steps);
        let mut step = 0;
        let mut ops = self.ops.clone();
        for op in &mut ops {
            match op {
                Op::Alloc { size, .. } if *size > SCALAR && !fixed.contains(size) => {
                    *size = scaled(*size, step_factor(seed, step) * kind_factor(seed, *size));
                }
                Op::Step => step += 1,
                _ => {}
            }
        }
        let mut trace = Self { name: format!("{}~{seed}", self.name), ops, ..self.clone() };
        trace.peak_live = trace.highest_live();
        trace
    }

    /// The steps of each block's allocation and free; `u32::MAX`: never freed.
    fn steps(&self) -> Vec<(u32, u32)> {
        let mut steps = vec![(0, u32::MAX); self.blocks()];
        let mut step = 0;
        for op in &self.ops {
            match *op {
                Op::Alloc { block, .. } => steps[block as usize].0 = step,
                Op::Free { block } => steps[block as usize].1 = step,
                Op::Step => step += 1,
                _ => {}
            }
        }
        steps
    }

    fn persistent_sizes(&self, steps: &[(u32, u32)]) -> HashSet<u64> {
        let persistent = |block: u32| {
            let (from, to) = steps[block as usize];
            to - from >= PERSISTENT_STEPS
        };
        let sizes = self.ops.iter().filter_map(|op| match *op {
            Op::Alloc { size, block, .. } if persistent(block) => Some(size),
            _ => None,
        });
        sizes.collect()
    }

    /// The highest sum of live blocks, each rounded up to [`super::ALIGNMENT`].
    pub(super) fn highest_live(&self) -> u64 {
        let mut sizes = vec![0; self.blocks()];
        let (mut live, mut peak) = (0, 0);
        for op in &self.ops {
            match *op {
                Op::Alloc { size, block, .. } => {
                    sizes[block as usize] = rounded(size);
                    live += rounded(size);
                    peak = peak.max(live);
                }
                Op::Free { block } => live -= sizes[block as usize],
                _ => {}
            }
        }
        peak
    }
}

fn scaled(size: u64, factor: f64) -> u64 {
    let row = (1 << size.trailing_zeros()).min(ROW);
    let rows = (size as f64 * factor / row as f64).round() as u64;
    rows.max(1) * row
}

/// Log-uniform, bent towards the short end.
fn step_factor(seed: u64, step: u64) -> f64 {
    let u = uniform(seed, 0, step);
    SHORTEST * (LONGEST / SHORTEST).powf(u * u)
}

fn kind_factor(seed: u64, size: u64) -> f64 {
    1.0 + WIDTH * (2.0 * uniform(seed, 1, size) - 1.0)
}

/// A number in [0, 1) that depends on all three arguments.
fn uniform(seed: u64, what: u64, which: u64) -> f64 {
    let bits = mixed(mixed(mixed(seed) ^ what) ^ which);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
/// 2014): one step from `state`. A short hash whose results no new library version changes, so that
/// a seed names the same trace for good.
pub(super) fn mixed(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A weight of 1 MiB that stays, its gradient, and activations of 3 MiB, two a step, in three
    /// steps.
    const PROGRAM: &str = "a 1 1048576 0 0\na 2 4 0 0\na 3 3145728 0 0\na 4 3145728 0 7\nk 0 3\nf \
                           3\nf 4\nm step\n\
                           a 5 1048576 0 0\na 6 3145728 0 0\na 7 3145728 0 0\nr 7 7\nf 6\nf 7\nf \
                           5\nm step\na 8 3145728 0 0\nf 8\nm step\n";

    fn program() -> Trace {
        Trace::read("program", PROGRAM.as_bytes()).expect("a trace")
    }

    fn size(trace: &Trace, id: u64) -> u64 {
        let size = trace.ops.iter().find_map(|op| match *op {
            Op::Alloc { size, block, .. } if trace.ids[block as usize] == id => Some(size),
            _ => None,
        });
        size.expect("allocated")
    }

    /// Everything except the sizes.
    fn shape(trace: &Trace) -> Vec<Op> {
        let bare = |op: &Op| match *op {
            Op::Alloc { block, stream, device, .. } => Op::Alloc { size: 0, block, stream, device },
            other => other,
        };
        trace.ops.iter().map(bare).collect()
    }

    #[test]
    fn a_seed_names_one_trace() {
        let trace = program();
        assert_eq!(trace.jittered(5), trace.jittered(5));
        assert_ne!(trace.jittered(5).ops, trace.jittered(6).ops);
        // For good: the same on every machine and in every version.
        assert_eq!(mixed(0), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn only_sizes_differ_and_those_of_weights_gradients_and_scalars_do_not() {
        let trace = program();
        for seed in 0..50 {
            let other = trace.jittered(seed);
            assert_eq!(shape(&other), shape(&trace));
            assert_eq!([1, 2, 5].map(|id| size(&other, id)), [1 << 20, 4, 1 << 20]);
            assert_eq!((other.ids, other.operations), (trace.ids.clone(), trace.operations));
        }
    }

    #[test]
    fn what_had_one_size_within_a_step_still_has_one_and_steps_differ() {
        let trace = program();
        for seed in 0..50 {
            let other = trace.jittered(seed);
            let [a, b, c, d, e] = [3, 4, 6, 7, 8].map(|id| size(&other, id));
            assert_eq!((a, c), (b, d));
            assert!(a != c && c != e, "{a} {c} {e}");
            for bytes in [a, c, e] {
                let factor = bytes as f64 / 3_145_728.0;
                assert!((0.44..1.66).contains(&factor) && bytes.is_multiple_of(ROW), "{bytes}");
            }
        }
    }

    #[test]
    fn the_peak_of_live_is_that_of_the_new_sizes() {
        let trace = program();
        assert_eq!(trace.highest_live(), trace.peak_live);
        let other = trace.jittered(1);
        let (first, second) = (2 * size(&other, 3), (1 << 20) + 2 * size(&other, 6));
        assert_eq!(other.peak_live, (1 << 20) + 512 + first.max(second));
    }
}
