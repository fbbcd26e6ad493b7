//! Live blocks summed up: by lifetime, size, step, age and stream, and the largest of them.

use super::state::{Class, Largest, Live, Sum, lifetime_name};
use crate::LIFETIMES;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

/// Steps counted one by one; blocks of further steps are summed up.
const MOST_STEPS: usize = 1 << 16;
/// Steps listed apart, in [`Live::steps`].
const LISTED_STEPS: usize = 64;
/// Number of largest blocks listed.
const LARGEST: usize = 32;

/// A live block; ordered by the bytes that the program asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LiveBlock {
    /// Bytes that the program asked for.
    pub requested: u64,
    /// Its address.
    pub address: u64,
    /// Its bytes, rounded up to 512.
    pub bytes: u64,
    /// Its lifetime's number.
    pub lifetime: u8,
    /// The number of its stream.
    pub stream: u32,
    /// The step of its allocation, if known.
    pub step: Option<u32>,
}

/// The sums of the live blocks added so far.
#[derive(Clone, Debug, Default)]
pub struct LiveSums {
    /// All of them.
    pub all: Sum,
    lifetimes: [Sum; LIFETIMES],
    /// By the exponent of the least power of two that is not below their bytes.
    sizes: BTreeMap<u32, Sum>,
    steps: HashMap<u32, Sum>,
    /// Blocks without a known step (the record is off or full), or of too many steps.
    stepless: Sum,
    streams: BTreeMap<u32, Sum>,
    largest: BinaryHeap<Reverse<LiveBlock>>,
}

/// The exponent of the least power of two that is not less than `bytes`.
fn size_exponent(bytes: u64) -> u32 {
    bytes.max(1).checked_next_power_of_two().map_or(u64::BITS, u64::trailing_zeros)
}

/// The highest age (steps) of a class: the exponent is that of the power of two above the age.
fn oldest(exponent: u32) -> u64 {
    (1u64 << exponent.min(63)) - 1
}

impl LiveSums {
    /// Adds a block.
    pub fn add(&mut self, block: LiveBlock) {
        let LiveBlock { requested, bytes, lifetime, stream, step, .. } = block;
        let sum = Sum { blocks: 1, bytes, requested_bytes: requested };
        self.all.add(sum);
        self.lifetimes[lifetime as usize % LIFETIMES].add(sum);
        self.sizes.entry(size_exponent(bytes)).or_default().add(sum);
        self.streams.entry(stream).or_default().add(sum);
        match step {
            Some(step) if self.steps.len() < MOST_STEPS || self.steps.contains_key(&step) => {
                self.steps.entry(step).or_default().add(sum);
            }
            _ => self.stepless.add(sum),
        }
        if self.largest.len() < LARGEST {
            self.largest.push(Reverse(block));
        } else if self.largest.peek().is_some_and(|least| block > least.0) {
            self.largest.pop();
            self.largest.push(Reverse(block));
        }
    }

    /// The sums as dumps list them; `now` is the present step, from which ages count.
    pub fn live(&self, now: u32) -> Live {
        let class = |class: u64, sum: Sum| Class { class, sum };
        let mut steps: Vec<Class> =
            self.steps.iter().map(|(&step, &sum)| class(step.into(), sum)).collect();
        steps.sort_unstable_by_key(|entry| (Reverse(entry.sum.bytes), entry.class));
        let mut other_steps = self.stepless;
        for entry in steps.drain(LISTED_STEPS.min(steps.len())..) {
            other_steps.add(entry.sum);
        }
        let lifetimes = self.lifetimes.iter().zip(0..).filter(|(sum, _)| sum.blocks > 0);
        let sizes = self.sizes.iter();
        let mut largest: Vec<LiveBlock> = self.largest.iter().map(|entry| entry.0).collect();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        Live {
            all: self.all,
            lifetimes: lifetimes.map(|(&sum, number)| (lifetime_name(number), sum)).collect(),
            sizes: sizes
                .map(|(&power, &sum)| class(1u64.checked_shl(power).unwrap_or(u64::MAX), sum))
                .collect(),
            steps,
            other_steps,
            ages: self
                .ages(now)
                .into_iter()
                .map(|(power, sum)| class(oldest(power), sum))
                .collect(),
            streams: self.streams.iter().map(|(&stream, &sum)| class(stream.into(), sum)).collect(),
            largest: largest
                .into_iter()
                .map(|block| Largest {
                    address: block.address,
                    requested_bytes: block.requested,
                    lifetime: lifetime_name(block.lifetime),
                    stream: block.stream,
                    step: block.step,
                })
                .collect(),
        }
    }

    /// By age in steps: 0, 1, 2 to 3, 4 to 7 and so on, by the exponent of the power of two above
    /// the age.
    fn ages(&self, now: u32) -> BTreeMap<u32, Sum> {
        let mut ages: BTreeMap<u32, Sum> = BTreeMap::new();
        for (&step, &sum) in &self.steps {
            let age = now.saturating_sub(step);
            ages.entry(u32::BITS - age.leading_zeros()).or_default().add(sum);
        }
        ages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_live_block_is_in_one_class_of_each_kind() {
        let mut sums = LiveSums::default();
        for n in 1..=100u64 {
            let requested = n * 1000;
            sums.add(LiveBlock {
                requested,
                address: n << 30,
                bytes: requested.next_multiple_of(512),
                lifetime: 2,
                stream: n as u32 % 3,
                step: Some(n as u32 / 10),
            });
        }
        let live = sums.live(10);
        let all = |sums: &mut dyn Iterator<Item = &Sum>| {
            let mut whole = Sum::default();
            sums.for_each(|sum| whole.add(*sum));
            whole
        };
        let classes = |classes: &[Class]| all(&mut classes.iter().map(|class| &class.sum));
        assert_eq!(live.all.blocks, 100);
        assert_eq!(all(&mut live.lifetimes.values()), live.all);
        assert_eq!(classes(&live.sizes), live.all);
        assert_eq!(classes(&live.steps), live.all);
        assert_eq!(classes(&live.streams), live.all);
        assert_eq!(classes(&live.ages), live.all);
        let age = |age: usize| (live.ages[age].class, live.ages[age].sum.blocks);
        assert_eq!(age(0), (0, 1), "step 10 is this one");
        assert_eq!(age(1), (1, 10), "step 9 is the last one");
        let largest = |place: usize| live.largest[place].requested_bytes;
        assert_eq!((live.largest.len(), largest(0), largest(31)), (32, 100_000, 69_000));
    }

    #[test]
    fn a_size_is_in_the_class_of_the_power_above_it() {
        assert_eq!([0, 1, 512, 513, 1024].map(size_exponent), [0, 0, 9, 10, 10]);
        assert_eq!(size_exponent(u64::MAX), 64);
    }
}
