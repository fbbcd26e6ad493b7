//! Random programs of two to four ranks, whose collectives and messages really meet: none that
//! completes with `waits:off` hangs with `waits:auto`.
//!
//! Each rank has its own heap, device and host. The heap gets the reports of the Python package
//! (`python_loader/gruyere/_torch/waits.py`): that waits are allowed, if no launcher reports more
//! ranks, and that they are forbidden, before the first group, host function or wait for a value.
//! With `waits:budget`, which ignores these reports, programs of each unsafe kind do hang, so the
//! test is effective; two kinds never do, which is the argument of
//! `crates/heap/src/order/waits.rs`: ranks that are alone, and ranks that all use everything they
//! share in one order.
//!
//! `PROPTEST_CASES=1500 cargo test --test heap ranks` runs 1,500 programs of each kind, three
//! times.

use crate::common::{GIB, MIB, Rig, malloc_again, wait_and_tell};
use gruyere::driver::StreamHandle;
use gruyere::heap::Heap;
use gruyere_phantom::{
    CallKind, Caller, Comparison, Config as GpuConfig, Gpu, Half, HostFunction, Injection,
    as_program,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

const KERNEL: u64 = 40_000;

/// The streams of a rank: one for computation, one per communicator, one per direction of messages,
/// and a spare one.
const COMPUTE: usize = 0;
const SEND: usize = 4;
const RECEIVE: usize = 5;
const SPARE: usize = 6;
const STREAMS: usize = 7;

/// The communicator of messages.
const PAIRS: u64 = 100;

/// One action of a rank's host.
#[derive(Clone, Debug)]
enum Action {
    Malloc {
        block: u64,
        bytes: u64,
        stream: usize,
    },
    Free {
        block: u64,
    },
    RecordStream {
        block: u64,
        stream: usize,
    },
    Launch {
        stream: usize,
        kernels: u64,
    },
    Join {
        waiting: usize,
        other: usize,
    },
    HostWait {
        stream: usize,
    },
    Collective {
        communicator: usize,
    },
    Messages {
        stream: usize,
        halves: Vec<Half>,
    },
    /// A host function that returns once the flag is raised.
    HostFunction {
        stream: usize,
        flag: u64,
    },
    Raise {
        flag: u64,
    },
    /// The stream waits until the word is 1.
    WaitValue {
        stream: usize,
        word: u64,
    },
    WriteValue {
        stream: usize,
        word: u64,
    },
    HostWrite {
        word: u64,
    },
    /// A message to another host, by a socket or a store.
    Tell {
        message: u64,
    },
    Hear {
        message: u64,
    },
    /// The n-th driver call of this kind fails, in the next malloc with as many.
    Fault {
        kind: CallKind,
        nth: u64,
    },
}

/// The actions of each rank's host, in order.
#[derive(Clone, Debug)]
struct Program {
    /// By communicator, its ranks.
    communicators: Vec<Vec<usize>>,
    /// By rank: whether its launcher reports the number of ranks.
    launched: Vec<bool>,
    actions: Vec<Vec<Action>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    Off,
    Auto,
    Budget,
}

/// The end of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End {
    hangs: bool,
    /// Waits that the heaps added.
    waits: u64,
    /// Driver calls that failed.
    faults: u64,
}

/// One process of the job.
struct Rank {
    heap: Heap,
    device: u32,
    streams: Vec<StreamHandle>,
    next: usize,
    blocks: HashMap<u64, (u64, StreamHandle)>,
    fault: Option<Injection>,
    /// Whether the loader has made its report to the heap.
    is_told: bool,
}

impl Rank {
    fn new(gpu: &Arc<Gpu>, device: u32, waits: Waits, launched: bool) -> Self {
        let waits = format!("{waits:?}").to_lowercase();
        let rig = Rig::on(gpu, &format!("slack:0B,waits:{waits}"));
        rig.heap.announce_hooks(3);
        if !launched {
            rig.heap.allow_waits();
        }
        let streams: Vec<_> = (0..STREAMS).map(|_| rig.stream_of(device)).collect();
        streams.iter().for_each(|&stream| malloc_again(&rig.heap, device, stream));
        let (heap, blocks, fault) = (rig.heap, HashMap::new(), None);
        Self { heap, device, streams, next: 0, blocks, fault, is_told: launched }
    }

    /// Forbids waits to the heap, as the package does, before such work is enqueued.
    fn forbid(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_told, true) {
            self.heap.forbid_waits(why);
        }
    }
}

/// All ranks, on one clock.
struct Job<'a> {
    program: &'a Program,
    gpu: Arc<Gpu>,
    ranks: Vec<Rank>,
    functions: HashMap<HostFunction, u64>,
    raised: HashSet<u64>,
    told: HashSet<u64>,
    faults: u64,
}

impl<'a> Job<'a> {
    /// With the setting of each rank.
    fn new(program: &'a Program, waits: impl Fn(usize) -> Waits) -> Self {
        let count = program.actions.len();
        // So large that it is never exhausted.
        let gpu = Arc::new(Gpu::new(GpuConfig::devices(count as u32, 256 * GIB)));
        let rank = |rank| Rank::new(&gpu, rank as u32, waits(rank), program.launched[rank]);
        let ranks = (0..count).map(rank).collect();
        let (functions, raised, told) = Default::default();
        Self { program, gpu, ranks, functions, raised, told, faults: 0 }
    }

    fn is_open(&self, rank: usize, stream: usize) -> bool {
        let stream = self.ranks[rank].streams[stream].0;
        self.gpu.open_streams().iter().any(|open| open.handle == stream)
    }

    /// Whether the host of a rank goes on with its next action.
    fn may_go_on(&self, rank: usize) -> bool {
        match self.program.actions[rank].get(self.ranks[rank].next) {
            None => false,
            Some(Action::HostWait { stream }) => !self.is_open(rank, *stream),
            Some(Action::Hear { message }) => self.told.contains(message),
            Some(_) => true,
        }
    }

    fn go_on(&mut self, number: usize) {
        let gpu = self.gpu.clone();
        let rank = &mut self.ranks[number];
        let (device, action) = (rank.device, &self.program.actions[number][rank.next]);
        rank.next += 1;
        let stream = |number: usize| rank.streams[number].0;
        match *action {
            Action::Malloc { block, bytes, stream: on } => {
                let on = rank.streams[on];
                let calls = |kind| gpu.counts(Caller::Allocator).of(kind);
                let armed = rank.fault.clone().map(|fault| {
                    let (kind, nth) = (fault.kind.unwrap(), fault.nth);
                    gpu.inject(fault);
                    (kind, calls(kind) + nth)
                });
                let address = rank.heap.malloc(bytes, device.into(), on).unwrap();
                gpu.clear_injections();
                if armed.is_some_and(|(kind, last)| calls(kind) >= last) {
                    rank.fault = None;
                    self.faults += 1;
                }
                gpu.block_malloc(block, address, bytes, device, on.0);
                rank.blocks.insert(block, (address, on));
            }
            Action::Free { block } => {
                let (address, on) = rank.blocks.remove(&block).unwrap();
                gpu.block_free(address);
                assert!(rank.heap.free(address));
                malloc_again(&rank.heap, device, on);
            }
            Action::RecordStream { block, stream: on } => {
                let (address, _) = rank.blocks[&block];
                gpu.block_record_stream(address, device, stream(on));
                assert!(rank.heap.record_stream(address, rank.streams[on]));
            }
            Action::Launch { stream: on, kernels } => {
                as_program(|| gpu.launch(device, stream(on), kernels, KERNEL)).unwrap();
            }
            Action::Join { waiting, other } => {
                let streams = [waiting, other].map(|on| rank.streams[on]);
                assert!(wait_and_tell(&gpu, &rank.heap, device, streams));
            }
            Action::HostWait { stream: on } => {
                as_program(|| gpu.stream_synchronize(device, stream(on))).unwrap();
            }
            Action::Collective { communicator } => {
                let on = stream(1 + communicator);
                rank.forbid("a group");
                let ranks = self.program.communicators[communicator].len() as u32;
                let communicator = communicator as u64;
                as_program(|| gpu.launch_collective(device, on, communicator, ranks, KERNEL))
                    .unwrap();
            }
            Action::Messages { stream: on, ref halves } => {
                let on = stream(on);
                rank.forbid("a group");
                as_program(|| gpu.launch_messages(device, on, PAIRS, halves, KERNEL)).unwrap();
            }
            Action::HostFunction { stream: on, flag } => {
                let on = stream(on);
                rank.forbid("a host function");
                let function = as_program(|| gpu.launch_host_function(device, on)).unwrap();
                self.functions.insert(function, flag);
            }
            Action::WaitValue { stream: on, word } => {
                let on = stream(on);
                rank.forbid("a wait for a value");
                as_program(|| gpu.stream_wait_value(device, on, word, 1, Comparison::Equal))
                    .unwrap();
            }
            Action::WriteValue { stream: on, word } => {
                as_program(|| gpu.stream_write_value(device, stream(on), word, 1)).unwrap();
            }
            Action::HostWrite { word } => gpu.host_write_value(word, 1),
            Action::Raise { flag } => {
                self.raised.insert(flag);
            }
            Action::Tell { message } => {
                self.told.insert(message);
            }
            Action::Hear { .. } => {}
            Action::Fault { kind, nth } => {
                let (kind, from_then_on) = (Some(kind), false);
                rank.fault = Some(Injection { kind, nth, code: 999, from_then_on });
            }
        }
        // Host functions run beside all that.
        loop {
            let running = gpu.host_functions();
            let done = |function| self.raised.contains(&self.functions[function]);
            let Some(function) = running.iter().find(|&function| done(function)) else { break };
            gpu.host_function_returns(*function).unwrap();
        }
    }

    /// Runs all ranks, in the order of `turns`, as long as one of them can go on.
    fn run(mut self, turns: u64) -> End {
        let mut turns = turns | 1;
        loop {
            let ready: Vec<usize> =
                (0..self.ranks.len()).filter(|&rank| self.may_go_on(rank)).collect();
            if ready.is_empty() {
                break;
            }
            // Marsaglia's xorshift.
            turns ^= turns << 13;
            turns ^= turns >> 7;
            turns ^= turns << 17;
            let rank = ready[turns as usize % ready.len()];
            for _ in 0..1 + turns % 8 {
                if self.may_go_on(rank) {
                    self.go_on(rank);
                }
            }
        }
        let waits = self.gpu.counts(Caller::Allocator).of(CallKind::StreamWaitEvent);
        let all_at_end =
            self.ranks.iter().zip(&self.program.actions).all(|(rank, all)| rank.next == all.len());
        let hangs = !all_at_end || !self.gpu.open_streams().is_empty();
        for rank in &self.ranks {
            rank.heap.validate().unwrap();
        }
        assert_eq!(self.gpu.misuses(), []);
        assert_eq!(self.gpu.faults(), []);
        End { hangs, waits, faults: self.faults }
    }
}

fn end(program: &Program, waits: Waits, turns: u64) -> End {
    Job::new(program, |_| waits).run(turns)
}

/// A joint action of some ranks. Numbers are reduced to existing objects.
#[derive(Clone, Debug)]
enum Phase {
    /// Streams take turns with memory; nothing is shared with other ranks.
    Local { rank: usize, turns: Vec<(usize, u64, u64)> },
    /// As FSDP does: gather on the communicator's stream, compute with the gathered data, and
    /// reduce gradients. The gathers run ahead of the computation.
    Sharded { communicator: usize, layers: u64, mib: u64 },
    /// As tensor parallelism does: the computation waits at once for its collective.
    Split { communicator: usize, mib: u64 },
    /// An exchange without a wait yet, as all_to_all with `async_op`.
    Exchange { communicator: usize, mib: u64 },
    /// One rank sends, another receives.
    Pass { from: usize, to: usize, mib: u64 },
    /// The host waits.
    Sync { rank: usize, stream: usize },
    /// A host sends a message to another after a wait for a stream.
    Message { from: usize, to: usize, stream: usize },
    /// A driver call of a later malloc fails.
    Fault { rank: usize, kind: usize, nth: u64 },
    /// Collectives of two communicators with nothing between them, as two threads launch them: each
    /// rank of `swapped` in the other order.
    Threads { communicators: [usize; 2], swapped: usize, mib: u64 },
    /// Two ranks send to each other, with a stream per direction, and launch the receives first.
    BothWays { ranks: [usize; 2], mib: u64 },
    /// A host function on a stream waits for an action of the host after its wait for another
    /// stream.
    HostFunction { rank: usize, mib: u64 },
    /// A stream waits for a value that the host, or another stream, writes later.
    Value { rank: usize, by_host: bool, mib: u64 },
    /// One rank launches a collective, does something else, and then notifies the others, which
    /// launch theirs only then.
    LaunchThenTell { communicator: usize, mib: u64 },
}

/// Makes a program of phases.
struct Writer {
    program: Program,
    next: u64,
}

impl Writer {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn ranks(&self) -> usize {
        self.program.actions.len()
    }

    fn write(&mut self, rank: usize, actions: impl IntoIterator<Item = Action>) {
        self.program.actions[rank].extend(actions);
    }

    /// Allocates on a stream, launches kernels, does `work`, and frees.
    fn with_block(
        &mut self,
        rank: usize,
        stream: usize,
        mib: u64,
        work: impl IntoIterator<Item = Action>,
    ) {
        let block = self.number();
        let bytes = mib * MIB;
        self.write(rank, [Action::Malloc { block, bytes, stream }]);
        self.write(rank, [Action::Launch { stream, kernels: 2 }]);
        self.write(rank, work);
        self.write(rank, [Action::Free { block }]);
    }

    fn communicator(&self, number: usize) -> (usize, Vec<usize>) {
        let number = number % self.program.communicators.len();
        (number, self.program.communicators[number].clone())
    }

    fn add(&mut self, phase: &Phase) {
        let ranks = self.ranks();
        match *phase {
            Phase::Local { rank, ref turns } => {
                for &(stream, mib, kernels) in turns {
                    let stream = stream % STREAMS;
                    self.with_block(
                        rank % ranks,
                        stream,
                        mib,
                        [Action::Launch { stream, kernels }],
                    );
                }
            }
            Phase::Sharded { communicator, layers, mib } => {
                let (communicator, members) = self.communicator(communicator);
                let on = 1 + communicator;
                for _ in 0..layers {
                    for &rank in &members {
                        let block = self.number();
                        let bytes = mib * MIB;
                        self.write(
                            rank,
                            [
                                Action::Malloc { block, bytes, stream: on },
                                Action::Collective { communicator },
                                Action::Join { waiting: COMPUTE, other: on },
                                Action::RecordStream { block, stream: COMPUTE },
                                Action::Launch { stream: COMPUTE, kernels: 3 },
                                Action::Free { block },
                            ],
                        );
                        let reduce = [
                            Action::Join { waiting: on, other: COMPUTE },
                            Action::Collective { communicator },
                        ];
                        self.with_block(rank, COMPUTE, mib / 2 + 1, reduce);
                    }
                }
            }
            Phase::Split { communicator, mib } => {
                let (communicator, members) = self.communicator(communicator);
                let on = 1 + communicator;
                for rank in members {
                    let work = [
                        Action::Join { waiting: on, other: COMPUTE },
                        Action::Collective { communicator },
                        Action::Join { waiting: COMPUTE, other: on },
                        Action::Launch { stream: COMPUTE, kernels: 1 },
                    ];
                    self.with_block(rank, COMPUTE, mib, work);
                }
            }
            Phase::Exchange { communicator, mib } => {
                let (communicator, members) = self.communicator(communicator);
                for rank in members {
                    self.with_block(
                        rank,
                        1 + communicator,
                        mib,
                        [Action::Collective { communicator }],
                    );
                }
            }
            Phase::Pass { from, to, mib } => {
                let (from, to) = (from % ranks, to % ranks);
                if from != to {
                    self.half(from, SEND, Half::Send(to as u32), mib);
                    self.half(to, RECEIVE, Half::Receive(from as u32), mib);
                }
            }
            Phase::Sync { rank, stream } => {
                self.write(rank % ranks, [Action::HostWait { stream: stream % STREAMS }]);
            }
            Phase::Message { from, to, stream } => {
                let message = self.number();
                let stream = stream % STREAMS;
                self.write(from % ranks, [Action::HostWait { stream }, Action::Tell { message }]);
                self.write(to % ranks, [Action::Hear { message }]);
            }
            Phase::Fault { rank, kind, nth } => {
                let kinds = [
                    CallKind::EventCreate,
                    CallKind::EventRecord,
                    CallKind::EventQuery,
                    CallKind::StreamWaitEvent,
                ];
                let kind = kinds[kind % kinds.len()];
                self.write(rank % ranks, [Action::Fault { kind, nth }]);
            }
            Phase::Threads { communicators, swapped, mib } => {
                let [(one, ones), (other, others)] =
                    communicators.map(|communicator| self.communicator(communicator));
                if one == other {
                    return;
                }
                for rank in 0..ranks {
                    let mut order = [(one, &ones), (other, &others)];
                    if swapped & 1 << rank != 0 {
                        order.reverse();
                    }
                    for (communicator, _) in
                        order.into_iter().filter(|(_, members)| members.contains(&rank))
                    {
                        let work = [Action::Collective { communicator }];
                        self.with_block(rank, 1 + communicator, mib, work);
                    }
                }
            }
            Phase::BothWays { ranks: [one, other], mib } => {
                let (one, other) = (one % ranks, other % ranks);
                if one != other {
                    for (rank, peer) in [(one, other as u32), (other, one as u32)] {
                        self.half(rank, RECEIVE, Half::Receive(peer), mib);
                        self.half(rank, SEND, Half::Send(peer), mib);
                    }
                }
            }
            Phase::HostFunction { rank, mib } => {
                let (rank, flag) = (rank % ranks, self.number());
                self.with_block(rank, SPARE, mib, [Action::HostFunction { stream: SPARE, flag }]);
                self.with_block(rank, COMPUTE, mib, []);
                self.write(rank, [Action::HostWait { stream: COMPUTE }, Action::Raise { flag }]);
            }
            Phase::Value { rank, by_host, mib } => {
                let (rank, word) = (rank % ranks, 8 * self.number());
                self.with_block(rank, SPARE, mib, [Action::WaitValue { stream: SPARE, word }]);
                let write = Action::WriteValue { stream: COMPUTE, word };
                self.with_block(rank, COMPUTE, mib, (!by_host).then_some(write));
                self.write(rank, [Action::HostWait { stream: COMPUTE }]);
                self.write(rank, by_host.then_some(Action::HostWrite { word }));
            }
            Phase::LaunchThenTell { communicator, mib } => {
                let (communicator, members) = self.communicator(communicator);
                let work = || [Action::Collective { communicator }];
                let (first, rest) = (members[0], &members[1..]);
                self.with_block(first, 1 + communicator, mib, work());
                self.with_block(first, COMPUTE, mib, []);
                self.write(first, [Action::HostWait { stream: COMPUTE }]);
                for &rank in rest {
                    let message = self.number();
                    self.write(first, [Action::Tell { message }]);
                    self.write(rank, [Action::Hear { message }]);
                    self.with_block(rank, 1 + communicator, mib, work());
                }
            }
        }
    }

    /// Half of a message, with its memory.
    fn half(&mut self, rank: usize, stream: usize, half: Half, mib: u64) {
        self.with_block(rank, stream, mib, [Action::Messages { stream, halves: vec![half] }]);
    }
}

/// A program of ranks that share `communicators`.
fn writer(ranks: usize, communicators: &[&[usize]]) -> Writer {
    let communicators = communicators.iter().map(|members| members.to_vec()).collect();
    let (launched, actions) = (vec![true; ranks], vec![Vec::new(); ranks]);
    Writer { program: Program { communicators, launched, actions }, next: 0 }
}

/// The program completes without a wait of rank 0's streams, and hangs with one.
#[track_caller]
fn a_wait_of_one_rank_hangs(program: &Program) {
    for turns in 0..50 {
        let with = |waits| {
            let job = Job::new(program, |rank| if rank == 0 { waits } else { Waits::Off });
            job.run(turns)
        };
        assert_eq!(with(Waits::Off), End { hangs: false, waits: 0, faults: 0 });
        assert_eq!(with(Waits::Auto), End { hangs: false, waits: 0, faults: 0 });
        assert_eq!(with(Waits::Budget), End { hangs: true, waits: 1, faults: 0 });
    }
}

#[test]
fn one_wait_closes_a_ring_of_three_ranks_though_every_two_keep_one_order() {
    // Each rank has only two collectives, each with another rank; each pair of ranks shares one.
    // The others have their own wait between the two; rank 0 has none.
    let mut job = writer(3, &[&[0, 1], &[1, 2], &[2, 0]]);
    let (with_one, between, with_two) = (0, 1, 2);
    for (rank, first, second) in
        [(0, with_one, with_two), (1, between, with_one), (2, with_two, between)]
    {
        let collective = |communicator| [Action::Collective { communicator }];
        job.with_block(rank, 1 + first, 32, collective(first));
        if rank != 0 {
            job.write(rank, [Action::Join { waiting: 1 + second, other: 1 + first }]);
        }
        job.with_block(rank, 1 + second, 32, collective(second));
    }
    a_wait_of_one_rank_hangs(&job.program);
}

#[test]
fn one_wait_and_one_message_between_hosts_hang_the_only_collective_of_two_ranks() {
    let mut job = writer(2, &[&[0, 1]]);
    job.add(&Phase::LaunchThenTell { communicator: 0, mib: 32 });
    a_wait_of_one_rank_hangs(&job.program);
}

/// The kinds of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Alone,
    InOneOrder,
    Threads,
    BothWays,
    HostFunctions,
    Values,
    LaunchThenTell,
}

fn mib() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 2..64u64, 1 => Just(32u64)]
}

/// Phases of any program. Ranks do shared work in one common order.
fn common_phase(alone: bool) -> BoxedStrategy<Phase> {
    let n = 0..16usize;
    let turns = prop::collection::vec((n.clone(), mib(), 1..8u64), 2..6);
    let own = prop_oneof![
        6 => (n.clone(), turns).prop_map(|(rank, turns)| Phase::Local { rank, turns }),
        1 => (n.clone(), n.clone()).prop_map(|(rank, stream)| Phase::Sync { rank, stream }),
        2 => (n.clone(), n.clone(), 1..3u64).prop_map(
            |(rank, kind, nth)| Phase::Fault { rank, kind, nth }
        ),
    ];
    if alone {
        let message = (n.clone(), n.clone(), n).prop_map(|(from, to, stream)| Phase::Message {
            from,
            to,
            stream,
        });
        return prop_oneof![9 => own, 1 => message].boxed();
    }
    prop_oneof![
        4 => own,
        2 => (n.clone(), 1..4u64, mib()).prop_map(
            |(communicator, layers, mib)| Phase::Sharded { communicator, layers, mib }
        ),
        1 => (n.clone(), mib()).prop_map(|(communicator, mib)| Phase::Split { communicator, mib }),
        2 => (n.clone(), mib()).prop_map(
            |(communicator, mib)| Phase::Exchange { communicator, mib }
        ),
        1 => (n.clone(), n.clone(), mib()).prop_map(
            |(from, to, mib)| Phase::Pass { from, to, mib }
        ),
        1 => (n.clone(), n.clone(), n).prop_map(
            |(from, to, stream)| Phase::Message { from, to, stream }
        ),
    ]
    .boxed()
}

/// Phases of this kind of program only.
fn own_phase(kind: Kind) -> BoxedStrategy<Phase> {
    let n = 0..16usize;
    match kind {
        Kind::Alone => common_phase(true),
        Kind::InOneOrder => common_phase(false),
        Kind::Threads => (n.clone(), n.clone(), n, mib())
            .prop_map(|(one, other, swapped, mib)| Phase::Threads {
                communicators: [one, other],
                swapped,
                mib,
            })
            .boxed(),
        Kind::BothWays => (n.clone(), n, mib())
            .prop_map(|(one, other, mib)| Phase::BothWays { ranks: [one, other], mib })
            .boxed(),
        Kind::HostFunctions => {
            (n, mib()).prop_map(|(rank, mib)| Phase::HostFunction { rank, mib }).boxed()
        }
        Kind::Values => (n, any::<bool>(), mib())
            .prop_map(|(rank, by_host, mib)| Phase::Value { rank, by_host, mib })
            .boxed(),
        Kind::LaunchThenTell => (n, mib())
            .prop_map(|(communicator, mib)| Phase::LaunchThenTell { communicator, mib })
            .boxed(),
    }
}

fn program(kind: Kind) -> impl Strategy<Value = Program> {
    let phase = prop_oneof![2 => common_phase(kind == Kind::Alone), 1 => own_phase(kind)];
    let rank = any::<bool>().prop_map(move |launched| launched && kind != Kind::Alone);
    (
        prop::collection::vec(rank, 2..=4),
        prop::collection::vec(1..16usize, 1..=3),
        prop::collection::vec(phase, 1..12),
    )
        .prop_map(|(launched, communicators, phases)| {
            let ranks = launched.len();
            let communicators = communicators.into_iter().map(|members| {
                let chosen: Vec<usize> =
                    (0..ranks).filter(|rank| members & 1 << rank != 0).collect();
                if chosen.len() < 2 { (0..ranks).collect() } else { chosen }
            });
            let program = Program {
                communicators: communicators.collect(),
                launched,
                actions: vec![Vec::new(); ranks],
            };
            let mut writer = Writer { program, next: 0 };
            phases.iter().for_each(|phase| writer.add(phase));
            writer.program
        })
}

/// Counts over the programs of a kind that complete with `waits:off`: programs, hangs with
/// `waits:budget`, waits added by that and by `waits:auto`, and failed driver calls.
#[derive(Debug, Default)]
struct Tally {
    sound: Cell<u64>,
    hung: Cell<u64>,
    budget: Cell<u64>,
    auto: Cell<u64>,
    faults: Cell<u64>,
}

fn tally(kind: Kind) -> Tally {
    let tally = Tally::default();
    let add = |cell: &Cell<u64>, more: u64| cell.set(cell.get() + more);
    let config = ProptestConfig {
        max_shrink_iters: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    TestRunner::new(config)
        .run(&(program(kind), any::<u64>()), |(program, turns)| {
            let off = end(&program, Waits::Off, turns);
            prop_assert_eq!(off.waits, 0);
            if off.hangs {
                return Ok(());
            }
            let auto = end(&program, Waits::Auto, turns);
            prop_assert!(!auto.hangs, "waits:auto made it hang");
            let budget = end(&program, Waits::Budget, turns);
            add(&tally.sound, 1);
            add(&tally.hung, u64::from(budget.hangs));
            add(&tally.budget, budget.waits);
            add(&tally.auto, auto.waits);
            add(&tally.faults, auto.faults + budget.faults);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
    println!("{kind:?}: {tally:?}");
    let cases = u64::from(ProptestConfig::default().cases);
    assert!(tally.sound.get() > cases / 2, "{tally:?}: most programs hang by themselves");
    tally
}

#[test]
fn ranks_that_are_alone_never_hang_though_their_streams_wait() {
    let tally = tally(Kind::Alone);
    assert_eq!(tally.hung.get(), 0);
    assert!(tally.auto.get() > tally.sound.get(), "{tally:?}: hardly a stream waited");
    assert!(tally.faults.get() > 0, "{tally:?}: no call failed");
}

#[test]
fn ranks_that_keep_to_one_order_of_all_that_they_share_would_not_hang_whoever_waits() {
    let tally = tally(Kind::InOneOrder);
    assert_eq!(tally.hung.get(), 0);
    assert!(tally.budget.get() > tally.sound.get(), "{tally:?}: hardly a stream waited");
}

#[test]
fn ranks_whose_threads_launch_collectives_in_their_own_order_hang_but_for_auto() {
    assert!(tally(Kind::Threads).hung.get() > 0);
}

#[test]
fn ranks_that_send_to_each_other_on_streams_of_their_own_hang_but_for_auto() {
    assert!(tally(Kind::BothWays).hung.get() > 0);
}

#[test]
fn host_functions_that_wait_for_another_stream_hang_but_for_auto() {
    assert!(tally(Kind::HostFunctions).hung.get() > 0);
}

#[test]
fn waits_for_values_that_are_written_later_hang_but_for_auto() {
    assert!(tally(Kind::Values).hung.get() > 0);
}

#[test]
fn collectives_that_another_host_launches_only_when_told_hang_but_for_auto() {
    assert!(tally(Kind::LaunchThenTell).hung.get() > 0);
}
