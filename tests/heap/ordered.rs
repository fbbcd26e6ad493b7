//! Memory used by other streams: immediate reuse, waits, and records of events.

use crate::common::{GIB, MIB, Rig, malloc_again, wait};
use gruyere::driver::StreamHandle;
use gruyere_phantom::{CallKind, Caller, as_program};

const KERNEL: u64 = 20_000;

/// A program on a rig, reported to the oracle.
struct Program {
    rig: Rig,
    next: u64,
}

impl Program {
    fn new(conf: &str) -> Self {
        Self { rig: Rig::new(conf), next: 0 }
    }

    fn malloc(&mut self, bytes: u64, stream: StreamHandle) -> u64 {
        let address = self.rig.malloc(bytes, stream);
        self.next += 1;
        self.rig.gpu.block_malloc(self.next, address, bytes, 0, stream.0);
        address
    }

    fn launch(&self, stream: StreamHandle, kernels: u64) {
        as_program(|| self.rig.gpu.launch(0, stream.0, kernels, KERNEL)).unwrap();
    }

    /// `user` uses the block after the work of `owner`.
    fn lend(&self, address: u64, owner: StreamHandle, user: StreamHandle) {
        let gpu = &self.rig.gpu;
        wait(gpu, 0, [user, owner]).unwrap();
        gpu.block_record_stream(address, 0, user.0);
        assert!(self.rig.heap.record_stream(address, user));
    }

    fn free(&self, address: u64) {
        self.rig.gpu.block_free(address);
        assert!(self.rig.heap.free(address));
    }

    fn calls(&self, kind: CallKind) -> u64 {
        self.rig.gpu.counts(Caller::Allocator).of(kind)
    }

    fn check(&self) {
        self.rig.check();
        assert_eq!(self.rig.gpu.faults(), []);
    }
}

#[test]
fn a_block_that_waits_only_for_the_requesting_stream_is_had_at_once_and_without_a_wait() {
    for conf in ["", "waits:off", "backing:pool", "backing:fixed"] {
        let mut program = Program::new(conf);
        let (compute, copy) = (program.rig.stream(), program.rig.stream());
        let block = program.malloc(64 * MIB, copy);
        program.launch(copy, 1);
        program.lend(block, copy, compute);
        program.launch(compute, 400);
        program.free(block);
        let held = program.rig.gpu.books(0).physical;
        let other = program.malloc(64 * MIB, copy);
        assert_ne!(other, block, "{conf}: the device is not done with it");
        let again = program.malloc(64 * MIB, compute);
        assert_eq!(again, block, "{conf}");
        program.launch(compute, 1);
        assert!(program.rig.gpu.books(0).physical > held, "{conf}");
        for wait in
            [CallKind::StreamWaitEvent, CallKind::EventSynchronize, CallKind::DeviceSynchronize]
        {
            assert_eq!(program.calls(wait), 0, "{conf}");
        }
        assert_eq!(program.rig.gpu.host_time().blocked_by_allocator, 0, "{conf}");
        program.free(again);
        program.free(other);
        program.check();
    }
}

#[test]
fn beyond_the_slack_a_stream_waits_for_memory_that_fits_before_pages_move() {
    let mut program = Program::new("backing:stitch,slack:0.5%,waits:budget");
    let (requester, other) = (program.rig.stream(), program.rig.stream());
    malloc_again(&program.rig.heap, 0, other);
    let split: Vec<u64> = (0..4).map(|_| program.malloc(64 * MIB, requester)).collect();
    let whole = program.malloc(128 * MIB, other);
    // Idle pages in two places, which could move, and a free run that is long enough, behind work
    // of the other stream.
    program.free(split[0]);
    program.free(split[2]);
    program.launch(other, 200);
    program.free(whole);
    malloc_again(&program.rig.heap, 0, other);
    let (maps, creates) = (program.calls(CallKind::Map), program.calls(CallKind::Create));
    assert_eq!(program.malloc(128 * MIB, requester), whole);
    program.launch(requester, 1);
    assert_eq!(program.calls(CallKind::StreamWaitEvent), 1);
    assert_eq!((program.calls(CallKind::Map), program.calls(CallKind::Create)), (maps, creates));
    // Nothing that fits: the stream waits for what there is, and the pages move.
    let long = program.malloc(128 * MIB, requester);
    program.launch(requester, 1);
    assert!(program.calls(CallKind::Map) > maps);
    assert_eq!(program.calls(CallKind::Create), creates);
    for block in [split[1], split[3], whole, long] {
        program.free(block);
    }
    program.check();
}

#[test]
fn freed_blocks_have_events_behind_them_a_batch_at_a_time_before_anybody_needs_memory() {
    let mut program = Program::new("");
    let (compute, copy) = (program.rig.stream(), program.rig.stream());
    let room = program.malloc(GIB, compute);
    program.free(room);
    let rounds = 400;
    for _ in 0..rounds {
        let block = program.malloc(2 * MIB, compute);
        program.launch(compute, 1);
        program.lend(block, compute, copy);
        program.launch(copy, 1);
        program.free(block);
    }
    assert_eq!(program.rig.gpu.books(0).physical, GIB, "there was room all the time");
    // Every 16 MiB of 800 MiB, one for each of the two streams.
    let recorded = program.calls(CallKind::EventRecord);
    assert!((80..=110).contains(&recorded), "{recorded}");
    program.check();
}

#[test]
fn a_program_that_misses_no_more_keeps_few_events() {
    let mut program = Program::new("");
    let (compute, copy) = (program.rig.stream(), program.rig.stream());
    let room = program.malloc(GIB, compute);
    program.free(room);
    let other = program.malloc(2 * MIB, copy);
    program.free(other);
    let created = program.calls(CallKind::EventCreate);
    for _ in 0..2000 {
        let block = program.malloc(2 * MIB, compute);
        program.launch(compute, 1);
        program.free(block);
        program.rig.gpu.host_spend(1_000_000);
    }
    assert!(program.calls(CallKind::EventRecord) > 100);
    // Each is asked by the next one of its stream, and used again.
    let more = program.calls(CallKind::EventCreate) - created;
    assert!(more <= 4, "{more}");
    program.check();
}
