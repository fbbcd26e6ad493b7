//! A device's memory over the whole run, in a fixed number of cells: fine in a young run, coarser
//! as it gets longer.
//!
//! A sample goes into the last cell, or into a new cell once the last has lasted for the *width*.
//! The sample at the end of a step goes into the step's last cell: what came before was that
//! step's. A cell that reaches from one step into another counts for the one with its highest
//! memory, or that peak would be the next step's. When all cells are taken, neighbours are joined
//! in pairs and the width doubles. So no cell is longer than the width unless nothing happened,
//! lows and highs are never lost, and a long run fills between half of the cells and all of them.
#![deny(unsafe_code)]

use crate::layout::Shared;
use crate::seqlock::Sequence;
use crate::sync::{AtomicU64, Ordering};

/// Cells per device at most, 64 bytes each.
pub const CELLS: usize = 2048;
/// Cells of a new timeline; doubled each time that all are taken.
pub const FIRST_CELLS: usize = 64;
/// The first width, in ticks: some 5 ms at 3 GHz. A power of two, so that doubling stays exact.
const FIRST_WIDTH: u64 = 1 << 24;
/// Words per cell.
const WORDS: usize = 8;

/// A device's memory between two moments. In bytes, except `ticks` and `step`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Time of its last note ([`crate::clock::now`]).
    pub ticks: u64,
    /// The training step of its highest memory.
    pub step: u64,
    /// Lowest live bytes at any look.
    pub live_low: u64,
    /// Highest live bytes at any look.
    pub live_high: u64,
    /// Highest bytes of blocks above 16 KiB and slabs: exact between looks too.
    pub in_use_high: u64,
    /// Highest bytes held.
    pub reserved_high: u64,
    /// Lowest of the largest satisfiable requests in the gauges.
    pub largest_low: u64,
    /// Highest bytes waiting for streams in the gauges.
    pub pending_high: u64,
}

impl Sample {
    /// The highest memory: live at a look, or of blocks and slabs in use between looks.
    pub fn high(&self) -> u64 {
        // Counters of different shards are read some microseconds apart: a difference may be
        // negative.
        let whole = |bytes: u64| if bytes > i64::MAX as u64 { 0 } else { bytes };
        whole(self.in_use_high).max(whole(self.live_high))
    }

    /// Joins both samples; `later` is the later.
    #[must_use]
    pub fn and(self, later: Sample) -> Sample {
        Sample {
            ticks: later.ticks,
            step: if later.high() < self.high() { self.step } else { later.step },
            live_low: self.live_low.min(later.live_low),
            live_high: self.live_high.max(later.live_high),
            in_use_high: self.in_use_high.max(later.in_use_high),
            reserved_high: self.reserved_high.max(later.reserved_high),
            largest_low: self.largest_low.min(later.largest_low),
            pending_high: self.pending_high.max(later.pending_high),
        }
    }

    /// The fields as words, in their order.
    pub(crate) fn words(&self) -> [u64; WORDS] {
        [
            self.ticks,
            self.step,
            self.live_low,
            self.live_high,
            self.in_use_high,
            self.reserved_high,
            self.largest_low,
            self.pending_high,
        ]
    }

    /// The sample of these words.
    pub(crate) fn from_words(words: [u64; WORDS]) -> Sample {
        let [
            ticks,
            step,
            live_low,
            live_high,
            in_use_high,
            reserved_high,
            largest_low,
            pending_high,
        ] = words;
        Sample {
            ticks,
            step,
            live_low,
            live_high,
            in_use_high,
            reserved_high,
            largest_low,
            pending_high,
        }
    }
}

/// A cell of a timeline; see [`Reader::timeline`](crate::Reader::timeline).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimelineEntry {
    /// End of the cell, in nanoseconds since 1970. (Creation of the record, if ticks cannot be
    /// converted to time.)
    pub realtime_nanoseconds: u64,
    /// The cell's sample.
    pub sample: Sample,
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Cell([AtomicU64; WORDS]);

impl Cell {
    fn store(&self, sample: &Sample) {
        for (word, value) in self.0.iter().zip(sample.words()) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn load(&self) -> Sample {
        Sample::from_words(std::array::from_fn(|i| self.0[i].load(Ordering::Relaxed)))
    }
}

/// A device's timeline in the mapping.
///
/// One writer at a time writes it, under the device's lock and the timeline's sequence.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Timeline {
    sequence: Sequence,
    /// Cells taken.
    count: AtomicU64,
    /// Ticks per cell; 0: still empty.
    width: AtomicU64,
    /// Start of the last cell.
    began: AtomicU64,
    _room: [AtomicU64; 4],
    cells: [Cell; CELLS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Timeline>() == 64 * (CELLS + 1));

// SAFETY: repr(C), atomics throughout.
#[allow(unsafe_code)]
unsafe impl Shared for Timeline {}

impl Timeline {
    /// Bytes of a timeline of `cells` cells.
    pub const fn bytes(cells: usize) -> u64 {
        ((1 + cells) * size_of::<Cell>()) as u64
    }

    /// Number of cells taken, for the writer.
    pub fn taken(&self) -> usize {
        self.count.load(Ordering::Relaxed) as usize
    }

    /// Notes `sample` in one of the first `cells` cells; these, at least two, may be touched, and
    /// their number never falls. Some dozen instructions; some 10 us to halve the cells, at every
    /// thousandth call and ever more seldom.
    pub fn add(&self, sample: Sample, cells: usize) {
        self.note(sample, cells, |_| false);
    }

    /// As [`Timeline::add`], at the end of the sample's step: the step's last cell lasts until now,
    /// however long ago it began.
    pub fn end_step(&self, sample: Sample, cells: usize) {
        self.note(sample, cells, |last| last.step == sample.step);
    }

    fn note(&self, sample: Sample, cells: usize, goes_on: impl Fn(&Sample) -> bool) {
        self.sequence.write(|| {
            let count = self.count.load(Ordering::Relaxed) as usize;
            let width = self.width.load(Ordering::Relaxed).max(FIRST_WIDTH);
            let last = count.checked_sub(1).and_then(|last| self.cells.get(last));
            let began = self.began.load(Ordering::Relaxed);
            if let Some(cell) = last {
                let so_far = cell.load();
                if sample.ticks.wrapping_sub(began) < width || goes_on(&so_far) {
                    cell.store(&so_far.and(sample));
                    return;
                }
            }
            let (count, width) =
                if count >= cells { (self.halve(count), 2 * width) } else { (count, width) };
            self.cells[count].store(&sample);
            self.count.store(count as u64 + 1, Ordering::Relaxed);
            self.width.store(width, Ordering::Relaxed);
            self.began.store(sample.ticks, Ordering::Relaxed);
        });
    }

    /// Joins the first `count` cells in pairs (`count` is even); returns their new number.
    fn halve(&self, count: usize) -> usize {
        for (to, pair) in self.cells[..count].chunks_exact(2).enumerate() {
            self.cells[to].store(&pair[0].load().and(pair[1].load()));
        }
        count / 2
    }

    /// The samples, oldest first, and whether they are of one moment: a writer killed half-way
    /// leaves a timeline that is not. `cells` returns the number of cells that may be touched.
    pub fn read(&self, attempts: u32, cells: impl Fn() -> usize) -> (Vec<Sample>, bool) {
        let copy = || {
            let count = self.taken().min(cells()).min(CELLS);
            self.cells[..count].iter().map(Cell::load).collect()
        };
        match self.sequence.read(attempts, copy) {
            Some(samples) => (samples, true),
            None => (copy(), false),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn empty() -> Box<Timeline> {
        let cell = || Cell(std::array::from_fn(|_| AtomicU64::new(0)));
        Box::new(Timeline {
            sequence: Sequence::default(),
            count: AtomicU64::new(0),
            width: AtomicU64::new(0),
            began: AtomicU64::new(0),
            _room: Default::default(),
            cells: std::array::from_fn(|_| cell()),
        })
    }

    fn sample(ticks: u64, live: u64) -> Sample {
        Sample {
            ticks,
            step: ticks >> 30,
            live_low: live,
            live_high: live,
            in_use_high: live,
            reserved_high: 2 * live,
            largest_low: live,
            pending_high: live / 2,
        }
    }

    #[test]
    fn a_long_run_keeps_its_highs_and_lows_and_its_order() {
        let timeline = empty();
        let (mut high, mut low) = (0, u64::MAX);
        let mut ticks = 1 << 40;
        for n in 0..100_000u64 {
            ticks += (n * 7919 % 5 + 1) * (FIRST_WIDTH / 3);
            let live = 1 + n.wrapping_mul(0x9E37_79B9_7F4A_7C15) % 1_000_003;
            (high, low) = (high.max(live), low.min(live));
            timeline.add(sample(ticks, live), CELLS);
            if n % 9973 == 0 {
                let (samples, whole) = timeline.read(1, || CELLS);
                assert!(whole);
                assert_eq!(samples.last().unwrap().ticks, ticks);
                assert_eq!(samples.iter().map(|sample| sample.live_high).max(), Some(high));
                assert_eq!(samples.iter().map(|sample| sample.live_low).min(), Some(low));
                assert!(samples.is_sorted_by_key(|sample| sample.ticks));
            }
        }
        let (samples, _) = timeline.read(1, || CELLS);
        assert!((CELLS / 2..=CELLS).contains(&samples.len()), "{}", samples.len());
        // Even over the whole run: no cell is much longer than the mean.
        let mean = (ticks - (1 << 40)) / samples.len() as u64;
        let longest = samples.windows(2).map(|pair| pair[1].ticks - pair[0].ticks).max().unwrap();
        assert!(longest < 4 * mean, "{longest} {mean}");
    }

    #[test]
    fn looks_within_the_width_share_a_cell() {
        let timeline = empty();
        for n in 0..100 {
            timeline.add(sample(1_000_000 + n * (FIRST_WIDTH / 100), n + 1), CELLS);
        }
        let (samples, _) = timeline.read(1, || CELLS);
        assert_eq!(samples.len(), 1);
        assert_eq!((samples[0].live_low, samples[0].live_high), (1, 100));
    }

    #[test]
    fn a_step_ends_at_its_mark_however_long_before_it_was_looked_at() {
        let timeline = empty();
        let at =
            |ticks, step, in_use_high| Sample { ticks, step, in_use_high, ..Sample::default() };
        let mut ticks = 1 << 40;
        for step in 0..20 {
            // A look at the start of the step, and none before its end, long after.
            timeline.add(at(ticks + 1, step, 10), CELLS);
            ticks += (3 + step * 7 % 5) * FIRST_WIDTH;
            timeline.end_step(at(ticks, step, 1000 + step), CELLS);
        }
        let (samples, _) = timeline.read(1, || CELLS);
        let told: Vec<_> = samples.iter().map(|cell| (cell.step, cell.in_use_high)).collect();
        assert_eq!(told, (0..20).map(|step| (step, 1000 + step)).collect::<Vec<_>>());
        assert_eq!(samples.last().map(|cell| cell.ticks), Some(ticks));
    }

    #[test]
    fn a_look_at_the_start_of_the_next_step_leaves_a_peak_to_its_own_step() {
        let timeline = empty();
        let at = |ticks, step, high| Sample {
            ticks,
            step,
            live_high: high,
            in_use_high: high,
            ..Sample::default()
        };
        let mut ticks = 1 << 40;
        for step in 0..20 {
            // The mark of the step before, a look right after it, and the end of the step.
            timeline.add(at(ticks + 1, step, 10), CELLS);
            ticks += FIRST_WIDTH * (1 + step % 3) / 2;
            timeline.end_step(at(ticks, step, 1000 + step), CELLS);
        }
        let (samples, _) = timeline.read(1, || CELLS);
        assert!(samples.len() >= 10);
        for sample in samples {
            assert_eq!(sample.high(), 1000 + sample.step);
        }
    }

    #[test]
    fn a_writer_that_was_killed_half_way_leaves_what_it_had_written() {
        let timeline = empty();
        timeline.add(sample(1, 5), CELLS);
        // What a writer leaves that dies inside: `write` has no end.
        let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            timeline.sequence.write(|| panic!("killed"));
        }));
        assert!(killed.is_err());
        let (samples, whole) = timeline.read(1, || CELLS);
        assert!(!whole);
        assert_eq!(samples.len(), 1);
    }
}
