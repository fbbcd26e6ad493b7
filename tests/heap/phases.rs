//! Low-memory phases: programs whose memory goes back to the device, and programs left alone.

use crate::common::{DEFAULT, MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::heap::Phase;
use gruyere::record::{DeviceGauge, Reader};
use gruyere_phantom::{CallCounts, CallKind, Caller, as_program};

const BACKINGS: [&str; 2] = ["backing:stitch", "backing:pool"];
const KERNEL: u64 = 20_000;

/// A training program: lasting weights, and steps with `layers` activations of 16 MiB.
struct Program {
    rig: Rig,
    weights: Vec<u64>,
    stream: StreamHandle,
    marks: bool,
}

impl Program {
    fn new(conf: &str, stream: bool, marks: bool) -> Self {
        let rig = Rig::new(&format!("{conf},record:on"));
        let stream = if stream { rig.stream() } else { DEFAULT };
        let weights = (0..16).map(|_| rig.malloc(8 * MIB, stream)).collect();
        Self { rig, weights, stream, marks }
    }

    /// Forward and backward: activations grow and shrink, each with a kernel; some workspaces in
    /// between.
    fn step(&self, layers: u64) {
        let work = |address: u64| {
            as_program(|| self.rig.gpu.launch(0, self.stream.0, 1, KERNEL)).unwrap();
            address
        };
        let mut held = Vec::new();
        for layer in 0..layers {
            held.push(work(self.rig.malloc(16 * MIB + 4096 * (layer % 3), self.stream)));
            let workspace = work(self.rig.malloc(3 * MIB, self.stream));
            assert!(self.rig.heap.free(workspace));
        }
        while let Some(address) = held.pop() {
            let gradient = work(self.rig.malloc(5 * MIB, self.stream));
            assert!(self.rig.heap.free(address) && self.rig.heap.free(gradient));
        }
        // The program reads its loss.
        as_program(|| self.rig.gpu.stream_synchronize(0, self.stream.0)).unwrap();
        if self.marks {
            self.rig.heap.mark_step();
        }
    }

    fn train(&self, steps: u32) {
        (0..steps).for_each(|_| self.step(64));
    }

    fn held(&self) -> u64 {
        self.rig.gpu.books(0).physical
    }

    fn calls(&self) -> CallCounts {
        self.rig.gpu.counts(Caller::Allocator)
    }

    /// The number of trims by phases.
    fn trims(&self) -> u64 {
        let reader = Reader::own(self.rig.heap.record()).unwrap();
        reader.device_snapshots()[0].gauge(DeviceGauge::LowPhaseTrims)
    }

    fn check(&self) {
        assert_eq!(self.rig.gpu.host_time().blocked_by_allocator, 0, "the host waited");
        self.rig.check();
    }
}

#[test]
fn a_training_loop_makes_no_driver_call_for_it() {
    for conf in BACKINGS {
        for marks in [false, true] {
            let program = Program::new(conf, false, marks);
            program.train(20);
            let before = program.calls();
            program.train(400);
            assert_eq!(program.calls(), before, "{conf}, marks {marks}");
            assert_eq!(program.trims(), 0);
            program.check();
        }
    }
}

#[test]
fn a_program_that_ends_training_and_evaluates_gets_memory_back() {
    for conf in BACKINGS {
        for marks in [false, true] {
            let program = Program::new(conf, false, marks);
            program.train(40);
            let trained = program.held();
            // A lull of more than 32,768 frees counts; a step of the evaluation has 18.
            for _ in 0..40_000 / 18 {
                program.step(6);
            }
            let need = 128 * MIB + 6 * 17 * MIB + 8 * MIB;
            assert!(
                program.held() < trained / 2,
                "{conf}: {} of {trained} B are held",
                program.held()
            );
            if conf == "backing:stitch" {
                // Each of its eight blocks may keep a part of a chunk of 16 MiB beside it.
                assert!(program.held() <= need + 10 * 16 * MIB, "{} B are held", program.held());
            }
            // And it goes on without a call.
            let before = program.calls();
            (0..200).for_each(|_| program.step(6));
            assert_eq!(program.calls(), before, "{conf}, marks {marks}");
            program.check();
            program.train(2);
            program.check();
        }
    }
}

#[test]
fn a_sawtooth_does_not_thrash() {
    for marks in [false, true] {
        let program = Program::new("", false, marks);
        program.train(10);
        let phases = |turns: u32, steps: u32| {
            let turn = || {
                program.train(2);
                let before = program.trims();
                (0..steps).for_each(|_| program.step(5));
                program.trims() > before
            };
            (0..turns).filter(|_| turn()).count()
        };
        assert_eq!(phases(40, 300), 0, "marks {marks}");
        // Long enough for a phase to be found, the first time: 15 frees a step.
        assert_eq!(phases(5, 2600), 1, "marks {marks}");
        program.check();
    }
}

#[test]
fn validation_that_is_announced_gives_back_at_once_and_keeps_what_it_needs() {
    for conf in BACKINGS {
        let program = Program::new(conf, false, true);
        for turn in 0..5 {
            program.train(20);
            let trained = program.held();
            program.rig.heap.mark_phase(Phase::Validation);
            assert!(program.held() < trained / 2, "{conf}, turn {turn}");
            let kept = program.held();
            (0..40).for_each(|_| program.step(6));
            if turn > 0 && conf == "backing:stitch" {
                // The memory of validation stays, except idle parts of partly used chunks; from
                // then on nothing is released and taken again.
                assert!(
                    program.held() <= kept + kept / 3,
                    "turn {turn}: {} B after {kept}",
                    program.held()
                );
                let before = program.calls();
                (0..20).for_each(|_| program.step(6));
                for kind in [CallKind::Create, CallKind::Release] {
                    assert_eq!(program.calls().of(kind), before.of(kind), "turn {turn}");
                }
            }
            program.rig.heap.mark_phase(Phase::Training);
            program.check();
        }
    }
}

#[test]
fn a_phase_leaves_what_is_reserved() {
    for conf in BACKINGS {
        // Unused so far: all of it is idle.
        let reserve = 512 * MIB;
        let program = Program::new(&format!("{conf},reserve:persistent={reserve}"), false, true);
        program.train(20);
        let trained = program.held();
        program.rig.heap.mark_phase(Phase::Validation);
        let held = program.held();
        assert!(
            held < trained && held >= reserve + 128 * MIB,
            "{conf}: {held} of {trained} B are held"
        );
        program.check();
    }
}

#[test]
fn memory_that_kernels_still_use_is_neither_waited_for_nor_given_back() {
    let program = Program::new("", false, true);
    program.train(5);
    let address = program.rig.malloc(512 * MIB, DEFAULT);
    as_program(|| program.rig.gpu.launch(0, 0, 1, 1_000_000_000)).unwrap();
    assert!(program.rig.heap.free(address));
    let held = program.held();
    program.rig.heap.mark_phase(Phase::Checkpoint);
    assert_eq!(program.held(), held);
    program.check();
    as_program(|| program.rig.gpu.device_synchronize(0)).unwrap();
    // A little work later it is seen to be done.
    for _ in 0..600 {
        assert!(program.rig.heap.free(program.rig.malloc(2 * MIB, DEFAULT)));
    }
    assert!(program.held() < held / 2, "{} of {held} B are held", program.held());
    program.check();
}

#[test]
fn a_capture_is_left_alone() {
    let program = Program::new("", true, true);
    program.train(5);
    let held = program.held();
    program.rig.heap.begin_allocate_to_pool(0, (1, 0)).unwrap();
    let before = program.calls();
    program.rig.heap.mark_phase(Phase::Validation);
    assert_eq!((program.held(), program.calls()), (held, before));
    program.rig.heap.end_allocate_to_pool(0, (1, 0)).unwrap();
    program.rig.check();
}

#[test]
fn without_the_hooks_or_with_it_off_nothing_goes_back() {
    for conf in ["auto_trim:off", "share:off"] {
        let program = Program::new(conf, false, true);
        program.train(5);
        let held = program.held();
        program.rig.heap.mark_phase(Phase::Validation);
        (0..500).for_each(|_| program.step(6));
        assert_eq!((program.held(), program.trims()), (held, 0), "{conf}");
    }
}

#[test]
fn weights_outlive_every_phase() {
    let program = Program::new("", false, false);
    for turn in 0..3 {
        program.train(10);
        program.rig.heap.mark_phase(Phase::Validation);
        for &address in &program.weights {
            assert!(program.rig.gpu.is_backed(address, 8 * MIB), "turn {turn}");
        }
        program.rig.heap.mark_phase(Phase::Training);
    }
    for &address in &program.weights {
        assert!(program.rig.heap.free(address));
    }
    program.check();
}
