//! Every position of failure: a fixed program, run once for each of the allocator's driver calls in
//! it, with exactly that call failing.

use crate::common::{DEFAULT, KEEPING, MIB, Random};
use crate::flaky::{self, Plan};
use crate::world::World;
use gruyere::driver::{DriverError, ErrorKind, StreamHandle};
use gruyere::heap::{Error, MAX_STREAMS, Phase};
use gruyere_phantom::{CallKind, Injection, StreamKind, as_program};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

struct Program {
    world: World,
    streams: [StreamHandle; 3],
    blocks: Vec<u64>,
    random: Random,
}

impl Program {
    fn new(conf: &str) -> Self {
        // Small enough that the ladder is tried.
        let world = World::new(160 * MIB, conf);
        let streams = [DEFAULT, world.rig.passing_stream(), world.rig.passing_stream()];
        Self { world, streams, blocks: Vec::new(), random: Random(7) }
    }

    fn malloc(&mut self, size: u64, stream: StreamHandle) {
        self.blocks.extend(self.world.malloc_if_possible(size, stream));
    }

    fn free(&mut self, at: usize) {
        self.world.free(self.blocks.swap_remove(at));
    }

    /// Some hundred operations; the invariants are checked after each.
    fn program(&mut self, validated: bool) {
        for _ in 0..160 {
            let stream = self.streams[self.random.below(3) as usize];
            match self.random.below(16) {
                0..6 => {
                    let size = match self.random.below(6) {
                        0..3 => 1 + self.random.below(MIB),
                        3..5 => MIB + self.random.below(20 * MIB),
                        _ => 30 * MIB + self.random.below(40 * MIB),
                    };
                    self.malloc(size, stream);
                }
                6..11 if !self.blocks.is_empty() => {
                    let at = self.random.below(self.blocks.len() as u64) as usize;
                    self.free(at);
                }
                11 if !self.blocks.is_empty() => {
                    let at = self.random.below(self.blocks.len() as u64) as usize;
                    self.world.rig.gpu.block_record_stream(self.blocks[at], 0, stream.0);
                    assert!(self.world.rig.heap.record_stream(self.blocks[at], stream));
                }
                12 => as_program(|| self.world.rig.gpu.launch(0, stream.0, 1, 20_000)).unwrap(),
                13 => self.world.rig.gpu.host_spend(30_000),
                14 => self.world.rig.heap.mark_step(),
                15 if self.random.below(4) == 0 => {
                    self.world.rig.heap.trim();
                }
                15 => self.world.rig.heap.mark_phase(Phase::Validation),
                _ => {}
            }
            if validated {
                self.world.rig.heap.validate().unwrap();
            }
        }
    }

    fn finish(&mut self, transient: bool) {
        while !self.blocks.is_empty() {
            self.free(0);
        }
        self.world.rig.heap.trim();
        self.world.rig.heap.trim();
        self.world.rig.heap.validate().unwrap();
        // A device whose first query failed was never set up.
        assert_eq!(self.world.rig.heap.stats(0).map_or(0, |stats| stats.live), 0);
        assert_eq!(self.world.rig.gpu.faults(), []);
        assert_eq!(self.world.rig.gpu.misuses(), []);
        if transient {
            assert_eq!(self.world.rig.gpu.books(0).physical, 0, "memory is lost");
        }
    }
}

fn fail_every_call(conf: &str, kinds: &[ErrorKind]) {
    let run = |program: &mut Program, nth| {
        // Validated throughout in the run without failure, and in every fourth run.
        program.program(nth % 4 == 0);
        if nth == 0 {
            assert!(
                program.world.rig.heap.stats(0).unwrap().retries > 0,
                "the ladder is a part of the program"
            );
        }
    };
    flaky::fail_every_call(
        conf,
        kinds,
        || Program::new(conf),
        |program| &program.world.driver,
        run,
        Program::finish,
    );
}

const TRANSIENT: [ErrorKind; 2] = [ErrorKind::OutOfMemory, ErrorKind::InvalidValue];

#[test]
fn nothing_is_lost_whichever_call_to_a_pool_fails() {
    fail_every_call("backing:pool,headroom:0", &TRANSIENT);
}

#[test]
fn nothing_is_lost_whichever_step_of_a_move_fails() {
    fail_every_call("backing:stitch,headroom:0", &TRANSIENT);
    fail_every_call("backing:stitch,headroom:0,slack:0B,waits:budget", &TRANSIENT);
}

#[test]
fn nothing_is_lost_whichever_step_of_a_move_fails_where_streams_share_nothing() {
    fail_every_call("backing:stitch,share:off,headroom:0", &TRANSIENT);
}

#[test]
fn nothing_is_lost_whichever_plain_allocation_fails() {
    fail_every_call("backing:fixed,headroom:0", &TRANSIENT);
}

#[test]
fn nothing_is_lost_whichever_call_fails_where_streams_share_nothing() {
    fail_every_call("backing:pool,share:off,headroom:0", &TRANSIENT);
}

#[test]
fn the_books_stay_true_whenever_the_device_is_lost() {
    for conf in ["backing:stitch,headroom:0", "backing:pool,headroom:0", "backing:fixed,headroom:0"]
    {
        fail_every_call(conf, &[ErrorKind::DeviceLost]);
    }
}

#[test]
fn a_device_that_is_lost_is_not_called_out_of_memory() {
    for conf in ["backing:stitch", "backing:pool", "backing:fixed"] {
        let program = Program::new(conf);
        assert!(program.world.rig.heap.free(program.world.rig.heap.malloc(1, 0, DEFAULT).unwrap()));
        program.world.driver.set(Plan::From(1, ErrorKind::DeviceLost));
        for _ in 0..2 {
            let result = program.world.rig.heap.malloc(100 * MIB, 0, DEFAULT);
            assert!(
                matches!(&result, Err(Error::Driver(error)) if error.kind == ErrorKind::DeviceLost),
                "{conf}: {result:?}"
            );
        }
    }
}

/// Two threads on the ladder of a device with 144 MiB left: one asks for `own`, and as its ladder
/// synchronises, the other asks for 64 MiB. Calls of `kind` fail until then (`nth` 0), or the `nth`
/// of the second request does. Returns the first answer and the requests that climbed past growth;
/// `None`: the first did not synchronise, or the other was not served.
fn two_climb(conf: &str, own: u64, kind: CallKind, nth: u64) -> Option<(Result<u64, Error>, u64)> {
    let world = Arc::new(World::new(400 * MIB, conf));
    world.malloc(256 * MIB, DEFAULT);
    let (other, served) = (world.clone(), Arc::new(AtomicBool::new(false)));
    let is_served = served.clone();
    let fault = move |nth| Injection { kind: Some(kind), nth, code: 1, from_then_on: false };
    world.driver.intrude("device_synchronize", move || {
        other.rig.gpu.clear_injections();
        if nth > 0 {
            other.rig.gpu.inject(fault(nth));
        }
        let asked = std::thread::scope(|threads| {
            threads.spawn(|| other.malloc_if_possible(64 * MIB, DEFAULT)).join().unwrap()
        });
        other.rig.gpu.clear_injections();
        is_served.store(asked.is_some(), Ordering::Relaxed);
    });
    if nth == 0 {
        world.rig.gpu.inject(Injection { from_then_on: true, ..fault(1) });
    }
    let answer = world.try_malloc(own, 0, DEFAULT);
    world.check();
    let climbed = world.rig.heap.stats(0).unwrap().retries;
    served.load(Ordering::Relaxed).then_some((answer, climbed))
}

#[test]
fn of_two_threads_on_the_ladder_each_gets_its_own_error() {
    let kinds = [CallKind::Create, CallKind::Map, CallKind::PoolAlloc, CallKind::Alloc];
    let (mut kept, mut spared) = ([0; KEEPING.len()], 0);
    for (at, conf) in KEEPING.into_iter().enumerate() {
        for kind in kinds {
            // The driver refuses the first thread memory that is there; the other one gets it.
            if let Some((own, _)) = two_climb(conf, 96 * MIB, kind, 0) {
                let is_own = |error: &DriverError| error.kind == ErrorKind::InvalidValue;
                let is_own = matches!(&own, Err(Error::Driver(error)) if is_own(error));
                assert!(is_own, "{conf}, {kind:?} fails: {own:?}");
                kept[at] += 1;
            }
            // The other one is served, maybe after its first growth has failed; for the first one
            // memory runs out.
            for nth in 1..4 {
                let Some((own, climbed)) = two_climb(conf, 192 * MIB, kind, nth) else { continue };
                let is_own = matches!(own, Err(Error::OutOfMemory(_)));
                assert!(is_own, "{conf}, {kind:?} {nth} of the other fails: {own:?}");
                spared += u32::from(climbed > 1);
            }
        }
    }
    assert!(kept.iter().all(|&kept| kept > 0) && spared > 0, "{kept:?} and {spared} failed");
}

#[test]
fn a_malloc_on_one_stream_too_many_tells_that_the_driver_refused_to_look_which_are_idle() {
    let program = Program::new("backing:pool");
    let stream = || {
        StreamHandle(
            as_program(|| program.world.rig.gpu.stream_create(0, StreamKind::NonBlocking)).unwrap(),
        )
    };
    // All numbers are taken; all but a few of these streams have nothing.
    for _ in 2..MAX_STREAMS {
        assert!(
            program.world.rig.heap.free(program.world.rig.heap.malloc(1, 0, stream()).unwrap())
        );
    }
    let last = stream();
    program.world.driver.set(Plan::From(1, ErrorKind::Other));
    let refused = program.world.rig.heap.malloc(1, 0, last);
    assert!(
        matches!(&refused, Err(Error::Driver(error)) if error.kind == ErrorKind::Other),
        "{refused:?}"
    );
    program.world.driver.set(Plan::Sound);
    assert!(program.world.rig.heap.free(program.world.rig.heap.malloc(1, 0, last).unwrap()));
}
