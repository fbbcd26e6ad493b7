//! The heap under the oracle: random programs on several streams with kernels that take time,
//! graphs, destroyed streams and failing driver calls. Two live blocks never overlap; nothing is
//! reused before stream order allows it; nothing is lost when a driver call fails.

use crate::common::{DEFAULT, MIB, Rig, wait, wait_and_tell};
use gruyere::driver::StreamHandle;
use gruyere::heap::{Error, Lifetime, Phase, lifetime};
use gruyere_phantom::{CallKind, Config as GpuConfig, Injection, as_program, vouching};
use proptest::prelude::*;

/// One action of a program. Numbers are reduced to existing streams and blocks.
#[derive(Clone, Debug)]
enum Action {
    Malloc {
        size: u64,
        stream: usize,
        tag: u8,
    },
    Free {
        block: usize,
    },
    RecordStream {
        block: usize,
        stream: usize,
    },
    /// A stream uses a block of a stream other than the default one, and the heap is not told, as
    /// torch's allocator forgives: the block's stream waits for the user before its next malloc.
    Lend {
        block: usize,
        stream: usize,
    },
    Launch {
        stream: usize,
        kernels: u64,
    },
    /// One stream waits for another. `told`: the heap is told.
    Join {
        waiting: usize,
        other: usize,
        told: bool,
    },
    HostWait {
        stream: usize,
    },
    HostSpend {
        microseconds: u64,
    },
    /// The stream ends, and another begins. `told`: the end is announced to the heap, as it must be
    /// for an announced stream; `announced`: the new stream is announced as lasting.
    DestroyStream {
        stream: usize,
        told: bool,
        announced: bool,
    },
    Trim,
    Step,
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 1..8192u64,
        4 => 8192..MIB,
        4 => MIB..24 * MIB,
        1 => 24 * MIB..160 * MIB,
    ]
}

fn action() -> impl Strategy<Value = Action> {
    let n = 0..64usize;
    prop_oneof![
        12 => (size(), n.clone(), 0..4u8).prop_map(
            |(size, stream, tag)| Action::Malloc { size, stream, tag }
        ),
        10 => (0..4096usize).prop_map(|block| Action::Free { block }),
        3 => (0..4096usize, n.clone()).prop_map(
            |(block, stream)| Action::RecordStream { block, stream }
        ),
        2 => (0..4096usize, n.clone()).prop_map(|(block, stream)| Action::Lend { block, stream }),
        8 => (n.clone(), 1..6u64).prop_map(|(stream, kernels)| Action::Launch { stream, kernels }),
        2 => (n.clone(), n.clone(), any::<bool>()).prop_map(
            |(waiting, other, told)| Action::Join { waiting, other, told }
        ),
        1 => n.clone().prop_map(|stream| Action::HostWait { stream }),
        2 => (1..200u64).prop_map(|microseconds| Action::HostSpend { microseconds }),
        2 => (n, any::<[bool; 2]>()).prop_map(
            |(stream, [told, announced])| Action::DestroyStream { stream, told, announced }
        ),
        1 => Just(Action::Trim),
        1 => Just(Action::Step),
    ]
}

/// A block that another stream uses, of which the heap was not told.
struct Lent {
    address: u64,
    owner: u64,
    user: usize,
    is_freed: bool,
}

/// A program on a rig: it reports its actions to the oracle.
struct Program {
    rig: Rig,
    streams: Vec<StreamHandle>,
    /// Streams announced as lasting.
    announced: [bool; 4],
    /// Live blocks: address, and the name of the stream.
    blocks: Vec<(u64, u64)>,
    /// The name of each stream; a new one has a new name.
    names: Vec<u64>,
    lent: Vec<Lent>,
    /// Whether blocks may be lent.
    lends: bool,
    /// Blocks by their streams of allocation or record: those of a destroyed stream may still be
    /// freed.
    next: u64,
    failed: u64,
    steps: u32,
}

impl Program {
    fn new(memory: u64, conf: &str) -> Self {
        let rig = Rig::over(GpuConfig { vouched_streams: true, ..GpuConfig::new(memory) }, conf);
        rig.heap.announce_hooks(3);
        let mut streams = vec![DEFAULT];
        streams.extend([rig.stream(), rig.passing_stream(), rig.passing_stream()]);
        Self {
            rig,
            streams,
            announced: [true, true, false, false],
            blocks: Vec::new(),
            names: (0..4).collect(),
            lent: Vec::new(),
            // The driver would free in the order of the block's stream.
            lends: !conf.contains("passthrough"),
            next: 1,
            failed: 0,
            steps: 0,
        }
    }

    fn stream(&self, number: usize) -> StreamHandle {
        self.streams[number % self.streams.len()]
    }

    /// Makes a stream wait for those that were lent its blocks.
    fn wait_for_users(&mut self, number: usize) {
        let (owner, stream) = (self.names[number], self.streams[number]);
        for lent in self.lent.iter().filter(|lent| lent.owner == owner && lent.user != number) {
            wait(&self.rig.gpu, 0, [stream, self.streams[lent.user]]).unwrap();
        }
        self.lent.retain(|lent| lent.owner != owner || !lent.is_freed);
    }

    fn run(&mut self, action: &Action) {
        let gpu = self.rig.gpu.clone();
        match *action {
            Action::Malloc { size, stream, tag } => {
                let number = stream % self.streams.len();
                self.wait_for_users(number);
                let stream = self.stream(stream);
                let tag = Lifetime::from_u8(tag).unwrap();
                assert!(lifetime::push(tag));
                let result = vouching(stream.0, || self.rig.heap.malloc(size, 0, stream));
                assert!(lifetime::pop());
                match result {
                    Ok(address) => {
                        gpu.block_malloc(self.next, address, size, 0, stream.0);
                        self.next += 1;
                        self.blocks.push((address, self.names[number]));
                    }
                    Err(Error::OutOfMemory(_) | Error::Driver(_)) => self.failed += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            Action::Free { block } => {
                if !self.blocks.is_empty() {
                    let (address, _) = self.blocks.swap_remove(block % self.blocks.len());
                    let lent = self.lent.iter_mut().filter(|lent| lent.address == address);
                    lent.for_each(|lent| lent.is_freed = true);
                    gpu.block_free(address);
                    assert!(self.rig.heap.free(address));
                }
            }
            Action::RecordStream { block, stream } => {
                if !self.blocks.is_empty() {
                    let ((address, _), stream) =
                        (self.blocks[block % self.blocks.len()], self.stream(stream));
                    gpu.block_record_stream(address, 0, stream.0);
                    assert!(vouching(stream.0, || self.rig.heap.record_stream(address, stream)));
                }
            }
            Action::Lend { block, stream } => {
                let user = stream % self.streams.len();
                if self.lends && !self.blocks.is_empty() {
                    let (address, owner) = self.blocks[block % self.blocks.len()];
                    if owner != self.names[0] && self.names.contains(&owner) {
                        gpu.block_record_stream(address, 0, self.streams[user].0);
                        self.lent.push(Lent { address, owner, user, is_freed: false });
                    }
                }
            }
            Action::Launch { stream, kernels } => {
                as_program(|| gpu.launch(0, self.stream(stream).0, kernels, 20_000)).unwrap();
            }
            Action::Join { waiting, other, told } => {
                let streams = [waiting, other].map(|number| self.stream(number));
                if told {
                    assert!(wait_and_tell(&gpu, &self.rig.heap, 0, streams));
                } else {
                    wait(&gpu, 0, streams).unwrap();
                }
            }
            Action::HostWait { stream } => {
                as_program(|| gpu.stream_synchronize(0, self.stream(stream).0)).unwrap();
            }
            Action::HostSpend { microseconds } => gpu.host_spend(microseconds * 1000),
            Action::DestroyStream { stream, told, announced } => {
                let number = stream % self.streams.len();
                if number != 0 {
                    (0..self.streams.len()).for_each(|number| self.wait_for_users(number));
                    self.lent.retain(|lent| lent.user != number);
                    self.names[number] = 1000 + self.next;
                    self.next += 1;
                    let stream = self.streams[number];
                    if told || self.announced[number] {
                        self.rig.end(stream);
                    } else {
                        self.rig.destroy(stream);
                    }
                    // The next stream gets the same handle.
                    self.streams[number] =
                        if announced { self.rig.stream() } else { self.rig.passing_stream() };
                    self.announced[number] = announced;
                }
            }
            Action::Trim => {
                self.rig.heap.trim();
            }
            Action::Step => {
                self.rig.heap.mark_step();
                self.steps += 1;
                let training = self.steps.is_multiple_of(2);
                self.rig.heap.mark_phase(if training {
                    Phase::Training
                } else {
                    Phase::Validation
                });
            }
        }
    }

    /// Frees everything, and checks that the device is as empty as before.
    fn finish(mut self) {
        while !self.blocks.is_empty() {
            self.run(&Action::Free { block: 0 });
        }
        self.rig.finish();
    }
}

const CONFS: [&str; 7] = [
    "backing:stitch,headroom:0",
    "backing:stitch,headroom:0,slack:0B,waits:budget",
    "backing:stitch,share:off,headroom:0",
    "backing:pool,headroom:0",
    "backing:pool,share:off,headroom:0",
    "backing:fixed,headroom:0",
    "backing:passthrough",
];

proptest! {
    #![
        proptest_config(
            ProptestConfig { cases: 1500, max_shrink_iters: 2000, ..ProptestConfig::default() }
        )
    ]

    #[test]
    fn no_program_gets_memory_that_other_work_may_still_use(
        actions in prop::collection::vec(action(), 1..400),
        conf in 0..CONFS.len(),
        // From plenty down to far too little.
        pages in prop_oneof![Just(8192u64), 40..400u64],
    ) {
        let mut program = Program::new(pages * 2 * MIB, CONFS[conf]);
        for action in &actions {
            program.run(action);
        }
        program.rig.check_order();
        program.finish();
    }

    #[test]
    fn nothing_is_lost_when_any_driver_call_fails(
        actions in prop::collection::vec(action(), 1..200),
        conf in 0..CONFS.len(),
        nth in 1..120u64,
        code in prop_oneof![Just(2u32), Just(1), Just(999)],
        from_then_on in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 40..400u64],
    ) {
        let mut program = Program::new(pages * 2 * MIB, CONFS[conf]);
        // Without waits of its own that fail.
        program.lends = false;
        // Only calls of the allocator fail: with failures of its own calls the program would be
        // another.
        for kind in ALLOCATOR_CALLS {
            program.rig.gpu
                .inject(Injection { kind: Some(kind), nth: nth.div_ceil(3), code, from_then_on });
        }
        for action in &actions {
            if uses_faulty_calls(action) {
                continue;
            }
            program.run(action);
            program.rig.heap.validate().unwrap();
        }
        program.rig.gpu.clear_injections();
        program.finish();
    }
}

/// Kinds that only the allocator calls in [`Program`] without actions that synchronise or record.
const ALLOCATOR_CALLS: [CallKind; 18] = [
    CallKind::AddressReserve,
    CallKind::Create,
    CallKind::Release,
    CallKind::Map,
    CallKind::SetAccess,
    CallKind::Unmap,
    CallKind::PoolCreate,
    CallKind::PoolSetAttribute,
    CallKind::PoolGetAttribute,
    CallKind::PoolTrim,
    CallKind::PoolAlloc,
    CallKind::PoolFree,
    CallKind::Alloc,
    CallKind::Free,
    CallKind::EventCreate,
    CallKind::EventRecord,
    CallKind::EventQuery,
    CallKind::StreamSynchronize,
];

fn uses_faulty_calls(action: &Action) -> bool {
    matches!(action, Action::Join { .. } | Action::HostWait { .. })
}
