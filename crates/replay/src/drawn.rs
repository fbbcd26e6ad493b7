//! Random programs: a number of live blocks on a number of streams, with sizes spread evenly over
//! the doublings; each block is replaced several times, in random order.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::many_streams::Random;
use crate::trace::{Trace, TraceError};
use std::fmt::Write as _;

/// The smallest request, bytes.
const LEAST: u64 = 512;

/// A program to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Blocks live at once.
    pub blocks: u64,
    /// Streams, including the default one; each block has a random one.
    pub streams: u64,
    /// Every request is below this many bytes.
    pub most: u64,
    /// Number of distinct sizes, drawn first; 0: each block has its own.
    pub sizes: u64,
    /// Mean number of replacements per block.
    pub turns: u64,
    /// Seed of the draw.
    pub seed: u64,
}

impl Program {
    /// Sixty sizes up to 1 MiB, as in a model.
    pub fn of_sixty_sizes(blocks: u64, streams: u64, seed: u64) -> Self {
        Self { blocks, streams, most: 1 << 20, sizes: 60, turns: 3, seed }
    }

    /// Any size up to 256 KiB, on one stream.
    pub fn of_any_size(blocks: u64, seed: u64) -> Self {
        Self { blocks, streams: 1, most: 256 << 10, sizes: 0, turns: 1, seed }
    }

    /// The program's name.
    pub fn name(&self) -> String {
        let Self { blocks, streams, seed, .. } = self;
        match (self.sizes, streams) {
            (0, _) => format!("{blocks} of any size, #{seed}"),
            (_, 1) => format!("{blocks} blocks, 1 stream, #{seed}"),
            _ => format!("{blocks} blocks, {streams} streams, #{seed}"),
        }
    }

    /// The program as a trace.
    ///
    /// # Errors
    /// If there are more streams or blocks than a trace can have.
    pub fn trace(&self) -> Result<Trace, TraceError> {
        Trace::read(&self.name(), self.text().as_bytes())
    }

    /// The lines of the trace.
    pub fn text(&self) -> String {
        let (mut random, mut text) = (Random::new(self.seed), String::new());
        let sizes: Vec<u64> = (0..self.sizes).map(|_| self.size(&mut random)).collect();
        let (mut live, mut last) = (Vec::new(), 0_u64);
        let mut malloc = |random: &mut Random, text: &mut String| {
            let size = match sizes.len() {
                0 => self.size(random),
                count => sizes[random.below(count as u64) as usize],
            };
            last += 1;
            // Writing to a String cannot fail.
            let _ = writeln!(text, "a {last} {size} 0 {}", random.below(self.streams));
            last
        };
        live.extend((0..self.blocks).map(|_| malloc(&mut random, &mut text)));
        for _ in 0..self.blocks * self.turns {
            let at = random.below(self.blocks) as usize;
            let _ = writeln!(text, "f {}", live[at]);
            live[at] = malloc(&mut random, &mut text);
        }
        text
    }

    /// Every doubling is equally likely.
    fn size(&self, random: &mut Random) -> u64 {
        let doublings = (self.most / LEAST).ilog2();
        let low = LEAST << random.below(doublings.into());
        low + random.below(low)
    }
}

/// The programs of the bar of hold, of at most `most` blocks; the largest are drawn once, not for
/// each of `seeds`.
pub fn bar(most: u64, seeds: std::ops::RangeInclusive<u64>) -> Vec<Program> {
    let mut programs = Vec::new();
    for seed in seeds.clone() {
        for streams in [1, 4, 16] {
            let counts = [200, 2000, 20_000].into_iter();
            programs.extend(counts.map(|blocks| Program::of_sixty_sizes(blocks, streams, seed)));
        }
        for blocks in [1000, 10_000, 100_000, 400_000] {
            if blocks < 100_000 || seed == *seeds.start() {
                programs.push(Program::of_any_size(blocks, seed));
            }
        }
    }
    programs.retain(|program| program.blocks <= most);
    programs
}

/// Minimal programs: one block of 512 B on each of several streams.
///
/// # Errors
/// If a trace is invalid.
pub fn bottom() -> Result<Vec<Trace>, TraceError> {
    let block = |stream: u64| format!("a {} 512 0 {stream}\n", stream + 1);
    let program = |streams: u64| {
        let text: String = (0..streams).map(block).collect();
        let many = if streams == 1 { "" } else { "s each" };
        Trace::read(&format!("512 B on {streams} stream{many}"), text.as_bytes())
    };
    [1, 2, 4, 16, 64].into_iter().map(program).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Op;
    use std::collections::BTreeSet;

    #[test]
    fn a_program_has_the_blocks_streams_and_sizes_that_it_names() {
        let program = Program::of_sixty_sizes(2000, 16, 1);
        let trace = program.trace().expect("it reads its own text");
        let (mut sizes, mut live, mut most) = (BTreeSet::new(), 0_u64, 0);
        for op in &trace.ops {
            match *op {
                Op::Alloc { size, .. } => {
                    sizes.insert(size);
                    live += 1;
                    most = most.max(live);
                }
                Op::Free { .. } => live -= 1,
                _ => {}
            }
        }
        assert_eq!((most, live, trace.streams.len()), (2000, 2000, 16));
        assert!(sizes.len() > 50 && sizes.len() <= 60, "{}", sizes.len());
        assert!(*sizes.first().unwrap_or(&0) >= LEAST && sizes.last() < Some(&program.most));
        assert_eq!(trace.blocks() as u64, 2000 * 4);
        assert_ne!(program.text(), Program { seed: 2, ..program }.text());
    }
}
