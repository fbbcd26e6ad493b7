//! Compaction (`supply/pages/compact.rs`): when it comes (between two steps, or at a look where the
//! program marks none), what it leaves behind, whose memory it touches, and what a failing call
//! loses.

use crate::common::{DEFAULT, GIB, MIB, Random};
use crate::flaky::Plan;
use crate::world::World;
use gruyere::driver::{ErrorKind, StreamHandle};
use gruyere::heap::PAGE;
use gruyere_phantom::CallKind;

/// A training: each step allocates blocks of drawn sizes up to [`Training::high`] live bytes, frees
/// some on the way, and all but a few at its end.
struct Training {
    world: World,
    streams: Vec<StreamHandle>,
    high: u64,
    kept: Vec<(u64, u64)>,
    random: Random,
}

impl Training {
    fn new(conf: &str, streams: usize, seed: u64) -> Self {
        let world = World::new(16 * GIB, conf);
        let side = (1..streams).map(|_| world.rig.stream()).collect::<Vec<_>>();
        let streams = [DEFAULT].into_iter().chain(side).collect();
        Self { world, streams, high: GIB, kept: Vec::new(), random: Random(seed) }
    }

    /// A stream; mostly the default one.
    fn stream(&mut self) -> StreamHandle {
        let number = self.random.below(4 * self.streams.len() as u64) as usize;
        self.streams.get(number).copied().unwrap_or(DEFAULT)
    }

    /// A step, but for its end.
    fn work(&mut self) {
        let mut blocks = std::mem::take(&mut self.kept);
        let mut live: u64 = blocks.iter().map(|&(_, size)| size).sum();
        while live < self.high {
            let size = match self.random.below(3) {
                0 => 512 + self.random.below(MIB),
                1 => MIB + self.random.below(10 * MIB),
                _ => 10 * MIB + self.random.below(60 * MIB),
            };
            let (stream, other) = (self.stream(), self.stream());
            let address = self.world.malloc(size, stream);
            self.world.launch(stream, 1);
            if other.0 != stream.0 && self.random.below(4) == 0 {
                self.world.record_stream(address, other);
                self.world.launch(other, 1);
            }
            blocks.push((address, size));
            live += size;
            if self.random.below(3) == 0 {
                let at = self.random.below(blocks.len() as u64) as usize;
                let (address, size) = blocks.swap_remove(at);
                self.world.free(address);
                live -= size;
            }
        }
        let keep = 8.min(blocks.len());
        while blocks.len() > keep {
            let at = self.random.below(blocks.len() as u64) as usize;
            self.world.free(blocks.swap_remove(at).0);
        }
        self.kept = blocks;
    }

    /// Ends the step; the chunks that this mapped.
    fn end(&self) -> u64 {
        let before = self.world.count(CallKind::Map);
        self.world.rig.heap.mark_step();
        self.world.count(CallKind::Map) - before
    }

    /// The first of 40 steps whose end maps chunks. The same draws bring it again.
    fn step_with_compaction(conf: &str, streams: usize) -> Option<u64> {
        let mut training = Self::new(conf, streams, 1);
        (1..40).find(|_| {
            training.work();
            training.end() > 0
        })
    }

    /// Frees as many runs as a look takes; the chunks that this mapped.
    fn look(&self) -> u64 {
        let (before, held) = (self.world.count(CallKind::Map), self.world.physical());
        for _ in 0..256 {
            let block = self.world.malloc(MIB, DEFAULT);
            self.world.free(block);
        }
        assert_eq!(self.world.physical(), held);
        self.world.count(CallKind::Map) - before
    }

    /// The first of 40 steps, none of which is marked, behind which a look maps chunks.
    fn step_before_compaction(&mut self) -> Option<u64> {
        (1..40).find(|_| {
            self.work();
            let before = self.largest_free();
            let mapped = self.look();
            assert!(mapped == 0 || self.largest_free() > before);
            mapped > 0
        })
    }

    fn largest_free(&self) -> u64 {
        self.world.rig.heap.stats(0).unwrap().largest_free
    }

    fn finish(mut self) {
        for (address, _) in std::mem::take(&mut self.kept) {
            self.world.free(address);
        }
        self.world.check_all_comes_back();
    }
}

/// At the end of the first step with a compaction, right before it.
fn crept(conf: &str, streams: usize) -> Training {
    let last = Training::step_with_compaction(conf, streams).expect("the program creeps");
    let mut training = Training::new(conf, streams, 1);
    for _ in 1..last {
        training.work();
        training.world.rig.heap.mark_step();
    }
    training.work();
    training
}

#[test]
fn where_held_memory_has_crept_up_a_steps_end_puts_idle_chunks_into_one_row() {
    let training = crept("", 1);
    let (before, held) = (training.largest_free(), training.world.physical());
    assert!(training.end() > 0);
    let row = training.largest_free();
    assert!(row > 2 * before, "{} MiB, {} before", row / MIB, before / MIB);
    assert_eq!(training.world.physical(), held, "nothing fresh is mapped");
    training.world.check();
    // The row serves a request of its length without a driver call.
    let calls = training.world.driver.calls();
    let block = training.world.malloc(row / PAGE * PAGE, DEFAULT);
    assert_eq!(training.world.driver.calls(), calls);
    training.world.free(block);
    training.finish();
}

#[test]
fn a_compaction_maps_at_most_as_many_chunks_as_growth_since_the_last_one() {
    let mut training = Training::new("", 1, 1);
    let (mut grown, mut compactions) = (0, 0);
    for _ in 0..60 {
        let before = training.world.count(CallKind::Map);
        training.work();
        grown += training.world.count(CallKind::Map) - before;
        let mapped = training.end();
        assert!(mapped <= grown, "{mapped} chunks, {grown} by growth");
        if mapped > 0 {
            assert_eq!(training.end(), 0, "nothing has moved since");
            (grown, compactions) = (0, compactions + 1);
        }
    }
    assert!(compactions > 1, "{compactions} in 60 steps");
    training.finish();
}

#[test]
fn in_a_program_that_marks_no_steps_a_look_compacts_and_in_another_none_does() {
    let mut unmarked = Training::new("", 1, 1);
    assert!(unmarked.step_before_compaction().is_some());
    unmarked.finish();
    let mut marked = Training::new("", 1, 1);
    marked.world.rig.heap.mark_step();
    assert_eq!(marked.step_before_compaction(), None);
    marked.finish();
}

#[test]
fn while_little_more_is_held_than_was_live_a_steps_end_maps_nothing() {
    // With that much slack nothing creeps past it.
    assert_eq!(Training::step_with_compaction("slack:50%", 1), None);
}

#[test]
fn where_no_page_moves_a_steps_end_maps_nothing() {
    for conf in ["share:off", "backing:pool", "backing:fixed"] {
        assert_eq!(Training::step_with_compaction(conf, 1), None, "{conf}");
    }
}

#[test]
fn nothing_is_lost_whichever_call_of_a_compaction_fails() {
    let calls = {
        let training = crept("", 2);
        let before = training.world.driver.calls();
        assert!(training.end() > 0);
        let calls = training.world.driver.calls() - before;
        training.finish();
        calls
    };
    let plans = |nth| {
        [
            Plan::Nth(nth, ErrorKind::OutOfMemory),
            Plan::Nth(nth, ErrorKind::InvalidValue),
            // What has been mapped cannot be unmapped either.
            Plan::From(nth, ErrorKind::InvalidValue),
        ]
    };
    let mut failed = 0;
    for nth in 1..=calls {
        for plan in plans(nth) {
            let mut training = crept("", 2);
            let (held, before) = (training.world.physical(), training.largest_free());
            training.world.driver.set(plan);
            training.world.rig.heap.mark_step();
            training.world.driver.set(Plan::Sound);
            failed += u64::from(training.largest_free() <= before);
            assert_eq!(training.world.physical(), held, "call {nth} of {calls}");
            training.world.check();
            // And the program goes on.
            training.work();
            training.world.check();
            training.finish();
        }
    }
    assert!(failed > 2 * calls, "{failed} compactions of {} failed", 3 * calls);
}

/// The device lags behind the host, and the oracle watches each block.
#[test]
fn no_step_gets_memory_whose_work_goes_on_whoever_compacts() {
    let mut compactions = [[0; 2]; 5];
    for conf in ["", "slack:0B", "slack:0B,waits:budget", "waits:off"] {
        for seed in 0..16 {
            let streams = 1 + seed as usize % 4;
            for marks in [true, false] {
                let mut training = Training::new(conf, streams, seed);
                training.high = 256 * MIB;
                for _ in 0..if marks { 16 } else { 48 } {
                    training.work();
                    let mapped = if marks { training.end() } else { training.look() };
                    compactions[streams][usize::from(marks)] += u32::from(mapped > 0);
                    training.world.check();
                }
                training.finish();
            }
        }
    }
    let some = compactions[1..].iter().all(|&[at_looks, between]| at_looks > 1 && between > 3);
    assert!(some, "by streams, at looks and between steps: {compactions:?}");
}
