//! Compaction between two steps (`supply/pages/compact.rs`): when it comes, what it leaves behind,
//! whose memory it touches, and what a failing call loses.

use crate::common::{DEFAULT, GIB, MIB};
use crate::flaky::Plan;
use crate::world::World;
use gruyere::driver::{ErrorKind, StreamHandle};
use gruyere::heap::PAGE;
use gruyere_phantom::CallKind;
use proptest::prelude::*;

/// A training: each step allocates blocks of drawn sizes up to [`Training::high`], frees some on
/// the way, and all but a few at its end.
struct Training {
    world: World,
    streams: Vec<StreamHandle>,
    high: u64,
    kept: Vec<(u64, u64)>,
    random: u64,
}

impl Training {
    fn new(conf: &str, streams: usize, random: u64) -> Self {
        let world = World::new(16 * GIB, conf);
        let side = (1..streams).map(|_| world.rig.stream()).collect::<Vec<_>>();
        let streams = [DEFAULT].into_iter().chain(side).collect();
        Self { world, streams, high: GIB, kept: Vec::new(), random }
    }

    fn pick(&mut self, below: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    /// The step, but for its end.
    fn work(&mut self) {
        let mut blocks = std::mem::take(&mut self.kept);
        let mut live: u64 = blocks.iter().map(|&(_, size)| size).sum();
        while live < self.high {
            let size = match self.pick(3) {
                0 => 512 + self.pick(MIB),
                1 => MIB + self.pick(10 * MIB),
                _ => 10 * MIB + self.pick(60 * MIB),
            };
            // Most work is on the first stream.
            let number = self.pick(4 * self.streams.len() as u64) as usize;
            let stream = self.streams.get(number).copied().unwrap_or(DEFAULT);
            let address = self.world.malloc(size, stream);
            self.world.launch(stream, 1);
            blocks.push((address, size));
            live += size;
            if self.pick(3) == 0 {
                let at = self.pick(blocks.len() as u64) as usize;
                let (address, size) = blocks.swap_remove(at);
                self.world.free(address);
                live -= size;
            }
        }
        let keep = 8.min(blocks.len());
        while blocks.len() > keep {
            let at = self.pick(blocks.len() as u64) as usize;
            self.world.free(blocks.swap_remove(at).0);
        }
        self.kept = blocks;
    }

    /// Works until a step's end maps pages: up to the end of that step's work, which comes again
    /// with the same draws. `None`: no compaction in 40 steps.
    fn steps_until_compaction(conf: &str, streams: usize) -> Option<u64> {
        let mut training = Self::new(conf, streams, 1);
        (1..40).find(|_| {
            training.work();
            training.ends_with_maps()
        })
    }

    fn ends_with_maps(&self) -> bool {
        let before = self.world.count(CallKind::Map);
        self.world.rig.heap.mark_step();
        self.world.count(CallKind::Map) > before
    }

    fn finish(mut self) {
        for (address, _) in std::mem::take(&mut self.kept) {
            self.world.free(address);
        }
        self.world.check_all_comes_back();
    }
}

/// Right before the compaction.
fn crept(conf: &str, streams: usize) -> Training {
    let steps = Training::steps_until_compaction(conf, streams).expect("the program creeps");
    let mut training = Training::new(conf, streams, 1);
    for step in 1..=steps {
        training.work();
        if step < steps {
            training.world.rig.heap.mark_step();
        }
    }
    training
}

#[test]
fn where_held_memory_has_crept_up_a_steps_end_puts_idle_chunks_into_one_row() {
    let training = crept("", 1);
    let largest = || training.world.rig.heap.stats(0).unwrap().largest_free;
    let (before, held) = (largest(), training.world.physical());
    assert!(training.ends_with_maps());
    assert!(largest() > 2 * before, "{} MiB, {} before", largest() / MIB, before / MIB);
    assert_eq!(training.world.physical(), held, "nothing fresh is mapped");
    training.world.check();
    // The row serves a request of its length without a driver call.
    let calls = training.world.driver.calls();
    let row = training.world.malloc(largest() / PAGE * PAGE, DEFAULT);
    assert_eq!(training.world.driver.calls(), calls);
    training.world.free(row);
    training.finish();
}

#[test]
fn a_second_compaction_comes_only_after_as_many_moves() {
    let training = crept("", 1);
    assert!(training.ends_with_maps());
    assert!(!training.ends_with_maps());
    training.finish();
}

#[test]
fn while_little_more_is_held_than_was_live_a_steps_end_maps_nothing() {
    // With that much slack nothing creeps past it.
    assert_eq!(Training::steps_until_compaction("slack:50%", 1), None);
}

#[test]
fn where_streams_share_nothing_or_no_page_moves_a_steps_end_maps_nothing() {
    for conf in ["share:off", "backing:pool", "backing:fixed"] {
        assert_eq!(Training::steps_until_compaction(conf, 1), None, "{conf}");
    }
}

#[test]
fn nothing_is_lost_whichever_call_of_a_compaction_fails() {
    let calls = {
        let training = crept("", 2);
        let before = training.world.driver.calls();
        assert!(training.ends_with_maps());
        let calls = training.world.driver.calls() - before;
        training.finish();
        calls
    };
    let mut failed = 0;
    for nth in 1..=calls {
        for kind in [ErrorKind::OutOfMemory, ErrorKind::InvalidValue] {
            let mut training = crept("", 2);
            let held = training.world.physical();
            let before = training.world.driver.calls();
            training.world.driver.set(Plan::Nth(before + nth, kind));
            training.world.rig.heap.mark_step();
            training.world.driver.set(Plan::Sound);
            failed += 1;
            assert_eq!(training.world.physical(), held, "call {nth} of {calls}");
            training.world.check();
            // And the program goes on.
            training.work();
            training.world.check();
            training.finish();
        }
    }
    assert!(failed > 40, "{failed} calls of a compaction");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// The device lags behind the host, and the oracle watches each block.
    #[test]
    fn no_step_gets_memory_whose_work_goes_on_whoever_compacts(
        seed in any::<u64>(),
        streams in 1..5usize,
        conf in prop_oneof![
            Just(""), Just("slack:0B"), Just("slack:0B,waits:budget"), Just("waits:off"),
        ],
    ) {
        let mut training = Training::new(conf, streams, seed);
        training.high = 256 * MIB;
        for _ in 0..12 {
            training.work();
            training.world.rig.heap.mark_step();
            training.world.check();
        }
        training.finish();
    }
}
