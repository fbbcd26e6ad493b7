//! One random program over any number of streams, to measure the cost of streams per malloc or
//! free.
//!
//! Sizes, lifetimes, uses by other streams, events and waits are drawn from a seed independently of
//! the number of streams; a stream is drawn as a fraction of that number. So the program is the
//! same at ten streams and at a thousand, except for the streams themselves.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::trace::{Trace, TraceError, rounded};
use std::fmt::Write as _;

/// Bound of live memory, bytes.
const BUDGET: u64 = 192 << 20;
/// The largest request, bytes.
const LARGEST: u64 = 16 << 20;
/// Percentage of blocks used by other streams.
const SHARED: u64 = 20;
/// Program steps between two marks.
const STEP: u32 = 1000;
/// Sizes at which allocators change behaviour, also used with one byte more; bytes.
const EDGES: [u64; 9] = [1, 512, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 10 << 20, LARGEST];

/// A program to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Streams, including the default one: 1 to 65,535.
    pub streams: u32,
    /// Mallocs.
    pub mallocs: u32,
    /// Seed of the program.
    pub seed: u64,
}

impl Default for Program {
    /// The program of the benches: ten streams, 30,000 mallocs.
    fn default() -> Self {
        Self { streams: 10, mallocs: 30_000, seed: 1 }
    }
}

impl Program {
    /// The program as a trace.
    ///
    /// # Errors
    /// If there are more streams than a trace can have.
    pub fn trace(self) -> Result<Trace, TraceError> {
        Trace::read(&format!("streams_{}", self.streams), self.text().as_bytes())
    }

    /// The program in the format of `traces/FORMAT.md`.
    #[must_use]
    pub fn text(self) -> String {
        let mut writer = Writer {
            random: Random::new(self.seed),
            streams: self.streams,
            text: String::new(),
            live: Vec::new(),
            bytes: 0,
            events: 0,
        };
        for block in 1..=self.mallocs {
            writer.malloc(block);
            if block % STEP == 0 {
                writer.say(format_args!("m step"));
            }
        }
        writer.text
    }
}

/// splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
/// 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// A random number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }
}

struct Writer {
    random: Random,
    streams: u32,
    text: String,
    /// Number and bytes of each live block.
    live: Vec<(u32, u64)>,
    bytes: u64,
    events: u32,
}

impl Writer {
    fn say(&mut self, line: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.text, "{line}");
    }

    fn stream(&mut self) -> u64 {
        self.random.below(self.streams.into())
    }

    /// A third of the sizes are at the edges, the others are spread evenly over the doublings.
    fn size(&mut self) -> u64 {
        if self.random.below(3) == 0 {
            let edge = EDGES[self.random.below(EDGES.len() as u64) as usize];
            return edge + self.random.below(2);
        }
        let low = 1 << self.random.below(24);
        low + self.random.below(low)
    }

    fn malloc(&mut self, block: u32) {
        let (size, stream) = (self.size().min(LARGEST), self.stream());
        while self.bytes + rounded(size) > BUDGET {
            self.free();
        }
        self.say(format_args!("a {block} {size} 0 {stream}"));
        self.say(format_args!("k {stream} 2"));
        self.live.push((block, size));
        self.bytes += rounded(size);
        if self.random.below(100) < SHARED {
            self.share(block, stream);
        }
        if self.random.below(3) == 0 {
            self.free();
        }
    }

    /// Another stream uses the block, half the time after a wait.
    fn share(&mut self, block: u32, stream: u64) {
        let user = self.stream();
        if self.random.below(2) == 0 {
            self.events += 1;
            let event = self.events;
            self.say(format_args!("e {event} {stream}"));
            self.say(format_args!("w {user} {event}"));
        }
        self.say(format_args!("r {block} {user}"));
        self.say(format_args!("k {user} 1"));
    }

    /// Frees one of the latest blocks, or any.
    fn free(&mut self) {
        let count = self.live.len() as u64;
        let at = match self.random.below(2) {
            _ if count == 0 => return,
            0 => count - 1 - self.random.below(count.min(4)),
            _ => self.random.below(count),
        };
        let (block, size) = self.live.swap_remove(at as usize);
        self.bytes -= rounded(size);
        self.say(format_args!("f {block}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Op;

    #[test]
    fn the_program_is_the_same_at_any_number_of_streams_but_for_who_asks() {
        let at = |streams| {
            Program { streams, mallocs: 2000, seed: 1 }.trace().expect("it reads its own text")
        };
        let nobodys = |trace: &Trace| {
            let op = |op: &Op| match *op {
                Op::Alloc { size, block, device, .. } => {
                    Op::Alloc { size, block, device, stream: 0 }
                }
                Op::RecordStream { block, .. } => Op::RecordStream { block, stream: 0 },
                Op::Kernels { count, .. } => Op::Kernels { count, stream: 0 },
                Op::EventRecord { event, .. } => Op::EventRecord { event, stream: 0 },
                Op::StreamWait { event, .. } => Op::StreamWait { event, stream: 0 },
                other => other,
            };
            trace.ops.iter().map(op).collect::<Vec<_>>()
        };
        let (few, many) = (at(10), at(1000));
        assert_eq!(nobodys(&few), nobodys(&many));
        assert_eq!((few.streams.len(), few.peak_live), (10, many.peak_live));
        assert!(many.streams.len() > 800 && few.peak_live <= BUDGET);
        assert_ne!(
            Program { streams: 10, mallocs: 2000, seed: 2 }.text(),
            Program { streams: 10, mallocs: 2000, seed: 1 }.text()
        );
    }
}
