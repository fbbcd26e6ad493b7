//! Random programs with graphs, with failing driver calls too.

use crate::common::{BACKINGS, DEFAULT, MIB, wait_and_tell};
use crate::world::World;
use gruyere::driver::StreamHandle;
use gruyere::heap::{Error, PoolState, Restored, StateError};
use gruyere_phantom::{
    CallKind, CaptureMode, CaptureStatus, CapturingIds, Config as GpuConfig, Injection, as_program,
    vouching,
};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

/// One action of a program with graphs. Numbers are reduced to existing objects.
#[derive(Clone, Debug)]
enum Action {
    Malloc {
        size: u64,
        stream: usize,
    },
    Free {
        block: usize,
    },
    RecordStream {
        block: usize,
        stream: usize,
    },
    Launch {
        stream: usize,
        kernels: u64,
    },
    HostSpend {
        microseconds: u64,
    },
    /// The host waits for a stream; if the stream captures, that breaks the capture.
    HostWait {
        stream: usize,
    },
    /// A stream waits for another; if that one captures, the stream joins.
    Join {
        waiting: usize,
        other: usize,
    },
    OpenScope {
        pool: u64,
    },
    /// On the latest pool scope without a capture, if any.
    BeginCapture {
        stream: usize,
        relaxed: bool,
    },
    /// An unannounced capture, without a pool, on a stream that the heap has seen.
    DestroyStream {
        stream: usize,
        announce: bool,
    },
    BeginUnannounced {
        stream: usize,
    },
    EndUnannounced {
        capture: usize,
    },
    /// Ends a pool scope, and its capture if any.
    Close {
        scope: usize,
    },
    Replay {
        graph: usize,
        stream: usize,
    },
    /// The graph is destroyed, and its pool released.
    Reset {
        graph: usize,
        destroy_first: bool,
    },
    /// As in the warm-up and the input copies of graph trees.
    MallocBeside {
        size: u64,
        stream: usize,
        pool: u64,
    },
    /// Notes the live blocks of a pool.
    TakeState {
        pool: u64,
    },
    Restore {
        state: usize,
    },
    Trim,
    Step,
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 1..8192u64, 3 => 8192..MIB, 4 => MIB..24 * MIB, 1 => 24 * MIB..100 * MIB]
}

fn action() -> impl Strategy<Value = Action> {
    let n = 0..64usize;
    prop_oneof![
        14 => (size(), n.clone()).prop_map(|(size, stream)| Action::Malloc { size, stream }),
        11 => (0..4096usize).prop_map(|block| Action::Free { block }),
        2 => (0..4096usize, n.clone()).prop_map(
            |(block, stream)| Action::RecordStream { block, stream }
        ),
        5 => (n.clone(), 1..6u64).prop_map(|(stream, kernels)| Action::Launch { stream, kernels }),
        1 => (1..200u64).prop_map(|microseconds| Action::HostSpend { microseconds }),
        1 => n.clone().prop_map(|stream| Action::HostWait { stream }),
        2 => (n.clone(), n.clone()).prop_map(|(waiting, other)| Action::Join { waiting, other }),
        3 => (1..5u64).prop_map(|pool| Action::OpenScope { pool }),
        4 => (n.clone(), any::<bool>()).prop_map(
            |(stream, relaxed)| Action::BeginCapture { stream, relaxed }
        ),
        1 => n.clone().prop_map(|stream| Action::BeginUnannounced { stream }),
        2 => (n.clone(), any::<bool>()).prop_map(
            |(stream, announce)| Action::DestroyStream { stream, announce }
        ),
        1 => n.clone().prop_map(|capture| Action::EndUnannounced { capture }),
        3 => n.clone().prop_map(|scope| Action::Close { scope }),
        3 => (n.clone(), n.clone()).prop_map(|(graph, stream)| Action::Replay { graph, stream }),
        2 => (n.clone(), any::<bool>()).prop_map(
            |(graph, destroy_first)| Action::Reset { graph, destroy_first }
        ),
        2 => (1..5u64).prop_map(|pool| Action::TakeState { pool }),
        3 => n.prop_map(|state| Action::Restore { state }),
        1 => Just(Action::Trim),
        1 => Just(Action::Step),
    ]
}

/// As [`action`], with few streams and pools, mostly inside captures, and with frequent restores.
fn action_with_states() -> impl Strategy<Value = Action> {
    let (n, near) = (0..64usize, 1..3usize);
    prop_oneof![
        24 => (size(), near.clone()).prop_map(|(size, stream)| Action::Malloc { size, stream }),
        10 => (0..4096usize).prop_map(|block| Action::Free { block }),
        2 => (0..4096usize, n.clone()).prop_map(
            |(block, stream)| Action::RecordStream { block, stream }
        ),
        4 => (n.clone(), 1..6u64).prop_map(|(stream, kernels)| Action::Launch { stream, kernels }),
        1 => n.clone().prop_map(|stream| Action::HostWait { stream }),
        1 => (near.clone(), near.clone()).prop_map(
            |(waiting, other)| Action::Join { waiting, other }
        ),
        3 => (1..3u64).prop_map(|pool| Action::OpenScope { pool }),
        6 => (near, any::<bool>()).prop_map(
            |(stream, relaxed)| Action::BeginCapture { stream, relaxed }
        ),
        2 => n.clone().prop_map(|scope| Action::Close { scope }),
        2 => (n.clone(), n.clone()).prop_map(|(graph, stream)| Action::Replay { graph, stream }),
        1 => (n.clone(), any::<bool>()).prop_map(
            |(graph, destroy_first)| Action::Reset { graph, destroy_first }
        ),
        4 => (size(), n.clone(), 1..3u64).prop_map(
            |(size, stream, pool)| Action::MallocBeside { size, stream, pool }
        ),
        6 => (1..3u64).prop_map(|pool| Action::TakeState { pool }),
        10 => n.prop_map(|state| Action::Restore { state }),
        1 => Just(Action::Trim),
    ]
}

impl World {
    /// A block beside the graphs of a pool.
    fn try_malloc_beside(&self, size: u64, stream: StreamHandle, pool: u64) -> Result<u64, Error> {
        let ask = || self.rig.heap.malloc_for_graphs(size, 0, stream, (0, pool));
        let address = vouching(stream.0, ask)?;
        let (id, place) = (self.next_id(), (address, size));
        let state = self.rig.heap.pool_state(0, (0, pool));
        let is_theirs = state.is_ok_and(|state| state.blocks().any(|block| block.0 == address));
        if is_theirs && !self.rig.gpu.is_capturing(0, stream.0) {
            self.rig.gpu.block_of_group(id, place, 0, stream.0, pool);
        } else {
            self.rig.gpu.block_malloc(id, address, size, 0, stream.0);
        }
        Ok(address)
    }

    /// Restores a state; `facts` has size and stream of the blocks that it may allocate.
    fn restore_noted(
        &self,
        state: &PoolState,
        pool: u64,
        facts: &HashMap<u64, (u64, StreamHandle)>,
    ) -> Result<Restored, StateError> {
        let restored = self.rig.heap.restore_pool(state)?;
        restored.freed.iter().for_each(|&address| self.rig.gpu.block_free(address));
        for address in &restored.allocated {
            let (size, stream) = facts[address];
            let (id, place) = (self.next_id(), (*address, size));
            self.rig.gpu.block_of_group(id, place, 0, stream.0, pool);
        }
        Ok(restored)
    }
}

/// A pool's state, and the program's knowledge of its blocks.
struct Taken {
    state: PoolState,
    pool: u64,
    facts: HashMap<u64, (u64, StreamHandle)>,
}

/// A random program in a world.
struct Program {
    world: World,
    streams: Vec<StreamHandle>,
    live: Vec<u64>,
    /// Size and stream of each live block with an existing stream.
    facts: HashMap<u64, (u64, StreamHandle)>,
    states: Vec<Taken>,
    /// Pools of the open pool scopes, and the stream of each one's capture.
    scopes: Vec<(u64, Option<StreamHandle>)>,
    /// Pools to release, with the graph if the capture succeeded.
    graphs: Vec<(u64, Option<u64>)>,
    /// Streams of unannounced captures, and their graphs, which are never destroyed.
    unannounced: Vec<StreamHandle>,
    nobodys_graphs: Vec<u64>,
    announces_all: bool,
    /// Streams announced as lasting.
    announced: [bool; 5],
}

impl Program {
    fn new(memory: u64, conf: &str) -> Self {
        Self::over(GpuConfig::new(memory), conf)
    }

    fn over(config: GpuConfig, conf: &str) -> Self {
        let world = World::over(GpuConfig { vouched_streams: true, ..config }, conf);
        world.rig.heap.announce_hooks(3);
        let mut streams = vec![DEFAULT];
        streams.extend((0..4).map(|_| world.rig.stream()));
        Self {
            announced: [true; 5],
            world,
            streams,
            live: Vec::new(),
            facts: HashMap::new(),
            states: Vec::new(),
            scopes: Vec::new(),
            graphs: Vec::new(),
            unannounced: Vec::new(),
            nobodys_graphs: Vec::new(),
            announces_all: true,
        }
    }

    /// Adds unannounced captures. The heap has seen every stream: it cannot know of others.
    fn unannounced(mut self) -> Self {
        self.announces_all = false;
        for stream in self.streams.clone() {
            let address = self.world.malloc(600, stream);
            self.world.free(address);
        }
        self
    }

    fn stream(&self, number: usize) -> StreamHandle {
        self.streams[number % self.streams.len()]
    }

    /// The driver may refuse an action (a wait in a capture, a launch in a failed one), which then
    /// has no effect.
    fn run(&mut self, action: &Action) {
        let gpu = self.world.rig.gpu.clone();
        match *action {
            Action::Malloc { size, stream } => {
                match self.world.try_malloc(size, 0, self.stream(stream)) {
                    Ok(address) => {
                        self.live.push(address);
                        self.facts.insert(address, (size, self.stream(stream)));
                    }
                    Err(Error::OutOfMemory(_) | Error::Driver(_)) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Action::MallocBeside { size, stream, pool } => {
                let stream = self.stream(stream);
                match self.world.try_malloc_beside(size, stream, pool) {
                    Ok(address) => {
                        self.live.push(address);
                        self.facts.insert(address, (size, stream));
                    }
                    Err(Error::OutOfMemory(_) | Error::Driver(_)) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Action::TakeState { pool } => self.take_state(pool),
            Action::Restore { state } => {
                if !self.states.is_empty() {
                    self.restore(state % self.states.len());
                }
            }
            Action::Free { block } => {
                if !self.live.is_empty() {
                    let address = self.live.swap_remove(block % self.live.len());
                    self.world.free(address);
                }
            }
            Action::RecordStream { block, stream } => {
                if !self.live.is_empty() {
                    self.world
                        .record_stream(self.live[block % self.live.len()], self.stream(stream));
                }
            }
            Action::Launch { stream, kernels } => {
                let _ = as_program(|| gpu.launch(0, self.stream(stream).0, kernels, 20_000));
            }
            Action::HostSpend { microseconds } => gpu.host_spend(microseconds * 1000),
            Action::HostWait { stream } => {
                let _ = as_program(|| gpu.stream_synchronize(0, self.stream(stream).0));
            }
            Action::Join { waiting, other } => {
                // The legacy stream cannot join a capture.
                let waiting = self.streams[1 + waiting % (self.streams.len() - 1)];
                let streams = [waiting, self.stream(other)];
                let _ = wait_and_tell(&gpu, &self.world.rig.heap, 0, streams);
            }
            Action::OpenScope { pool } => {
                // The heap would take an unannounced capture for the one that a pool scope expects.
                if self.scopes.len() < 3 && self.announces_all {
                    self.world.open(pool);
                    self.scopes.push((pool, None));
                }
            }
            Action::BeginCapture { stream, relaxed } => {
                let stream = self.stream(stream);
                if let Some(scope) = self.scopes.iter_mut().rev().find(|scope| scope.1.is_none()) {
                    let mode = if relaxed { CaptureMode::Relaxed } else { CaptureMode::Global };
                    if as_program(|| gpu.begin_capture(0, stream.0, mode, Some(scope.0))).is_ok() {
                        scope.1 = Some(stream);
                    }
                }
            }
            Action::BeginUnannounced { stream } => {
                let stream = self.stream(stream);
                let begin = || gpu.begin_capture(0, stream.0, CaptureMode::Relaxed, None);
                if !self.announces_all && as_program(begin).is_ok() {
                    self.unannounced.push(stream);
                }
            }
            Action::EndUnannounced { capture } => {
                if !self.unannounced.is_empty() {
                    let stream = self.unannounced.swap_remove(capture % self.unannounced.len());
                    self.nobodys_graphs.extend(as_program(|| gpu.end_capture(0, stream.0)).ok());
                }
            }
            Action::Close { scope } => {
                if !self.scopes.is_empty() {
                    let (pool, stream) = self.scopes.remove(scope % self.scopes.len());
                    let graph =
                        stream.and_then(|stream| as_program(|| gpu.end_capture(0, stream.0)).ok());
                    self.world.close(pool);
                    self.graphs.push((pool, graph));
                }
            }
            Action::Replay { graph, stream } => {
                let all: Vec<u64> = self
                    .graphs
                    .iter()
                    .filter_map(|graph| graph.1)
                    .chain(self.nobodys_graphs.clone())
                    .collect();
                if !all.is_empty() {
                    let graph = all[graph % all.len()];
                    let _ = as_program(|| gpu.replay(0, graph, self.stream(stream).0));
                }
            }
            Action::Reset { graph, destroy_first } => {
                if !self.graphs.is_empty() {
                    let (pool, graph) = self.graphs.swap_remove(graph % self.graphs.len());
                    let destroy = |now: bool| {
                        if let Some(graph) = graph.filter(|_| now) {
                            self.world.destroy(graph);
                        }
                    };
                    destroy(destroy_first);
                    self.world.release(pool);
                    destroy(!destroy_first);
                }
            }
            Action::DestroyStream { stream, announce } => {
                let number = stream % self.streams.len();
                // The heap finds an unannounced capture only on lasting streams.
                if number == 0 || !self.announces_all {
                    return;
                }
                let (rig, stream) = (&self.world.rig, self.streams[number]);
                // The driver does not destroy a capturing stream.
                if as_program(|| gpu.capture_status(0, stream.0)) != Ok(CaptureStatus::None) {
                    return;
                }
                if self.announced[number] {
                    rig.end(stream)
                } else {
                    rig.destroy(stream)
                }
                // Another stream may get its handle, so the harness could not report a block of it
                // to the oracle.
                self.states.retain(|taken| taken.facts.values().all(|facts| facts.1 != stream));
                self.facts.retain(|_, facts| facts.1 != stream);
                self.streams[number] = if announce { rig.stream() } else { rig.passing_stream() };
                self.announced[number] = announce;
            }
            Action::Trim => {
                self.world.rig.heap.trim();
            }
            Action::Step => self.world.rig.heap.mark_step(),
        }
    }

    fn take_state(&mut self, pool: u64) {
        let Ok(state) = self.world.rig.heap.pool_state(0, (0, pool)) else { return };
        let facts = state.blocks().map(|(address, bytes)| {
            let facts = *self.facts.get(&address)?;
            assert_eq!(facts.0.next_multiple_of(512), bytes);
            Some((address, facts))
        });
        if let Some(facts) = facts.collect() {
            self.states.push(Taken { state, pool, facts });
        }
    }

    /// The restore's effect equals the difference between the state and the pool before; a refused
    /// restore has none.
    fn restore(&mut self, number: usize) {
        let heap = &self.world.rig.heap;
        let Taken { state, pool, facts } = &self.states[number];
        let live =
            || heap.pool_state(0, (0, *pool)).map(|state| state.blocks().collect::<Vec<_>>());
        let before = live();
        let refused = match self.world.restore_noted(state, *pool, facts) {
            Ok(restored) => {
                let before: HashSet<_> = before.unwrap().into_iter().map(|block| block.0).collect();
                let after = live().unwrap();
                assert_eq!(after, state.blocks().collect::<Vec<_>>());
                let after: HashSet<_> = after.into_iter().map(|block| block.0).collect();
                let Restored { freed, kept, allocated } = restored;
                assert_eq!(kept.iter().chain(&allocated).copied().collect::<HashSet<_>>(), after);
                assert_eq!(kept.iter().chain(&freed).copied().collect::<HashSet<_>>(), before);
                self.live.retain(|address| !freed.contains(address));
                for address in &allocated {
                    assert!(!self.live.contains(address), "{address:#x} is live twice");
                    self.live.push(*address);
                    self.facts.insert(*address, facts[address]);
                }
                return;
            }
            Err(error) => error,
        };
        let reason = refused.to_string();
        assert!(!reason.contains("bug") && !reason.contains("internal"), "{reason}");
        assert_eq!(live().ok(), before.ok(), "{reason}");
    }

    /// Runs the actions, checks everything after each, and ends with an empty device.
    fn run_all(mut self, actions: &[Action]) {
        for action in actions {
            let asks = self.scopes.is_empty();
            let before = self.world.forbidden_calls();
            self.run(action);
            if !asks && !self.scopes.is_empty() {
                assert_eq!(self.world.forbidden_calls(), before, "{action:?} inside a pool scope");
            }
            self.world.check();
        }
        self.world.rig.gpu.clear_injections();
        while !self.unannounced.is_empty() {
            self.run(&Action::EndUnannounced { capture: 0 });
        }
        while !self.scopes.is_empty() {
            self.run(&Action::Close { scope: 0 });
        }
        while !self.live.is_empty() || !self.graphs.is_empty() {
            self.run(&Action::Free { block: self.graphs.len() });
            self.run(&Action::Reset { graph: self.live.len(), destroy_first: true });
        }
        if self.nobodys_graphs.is_empty() && self.announces_all {
            self.world.check_all_comes_back();
        }
        self.world.check();
    }
}

fn capturing_ids() -> impl Strategy<Value = CapturingIds> {
    prop_oneof![
        Just(CapturingIds::Told),
        Just(CapturingIds::Refused),
        Just(CapturingIds::Invalidate)
    ]
}

proptest! {
    #![
        proptest_config(
            ProptestConfig { cases: 600, max_shrink_iters: 4000, ..ProptestConfig::default() }
        )
    ]

    #[test]
    fn no_program_with_graphs_gets_memory_that_other_work_may_still_use(
        actions in prop::collection::vec(action(), 1..300),
        backing in 0..BACKINGS.len(),
        share in any::<bool>(),
        // From plenty down to far too little.
        pages in prop_oneof![Just(8192u64), 40..300u64],
        capturing_ids in capturing_ids(),
    ) {
        let share = if share { "" } else { ",share:off" };
        let config = GpuConfig { capturing_ids, ..GpuConfig::new(pages * 2 * MIB) };
        Program::over(config, &format!("{}{share}", BACKINGS[backing])).run_all(&actions);
    }

    #[test]
    fn a_restored_block_is_at_its_old_address_and_in_the_order_of_its_stream(
        actions in prop::collection::vec(action_with_states(), 1..300),
        backing in 0..BACKINGS.len(),
        share in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 60..400u64],
    ) {
        let share = if share { "" } else { ",share:off" };
        let config = GpuConfig::new(pages * 2 * MIB);
        Program::over(config, &format!("{}{share}", BACKINGS[backing])).run_all(&actions);
    }

    #[test]
    fn no_state_is_lost_when_any_driver_call_fails(
        actions in prop::collection::vec(action_with_states(), 1..200),
        backing in 0..BACKINGS.len(),
        nth in 1..40u64,
        code in prop_oneof![Just(2u32), Just(1), Just(999)],
        from_then_on in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 60..400u64],
    ) {
        run_failing(&actions, backing, (nth, code, from_then_on), pages);
    }

    #[test]
    fn captures_that_nobody_announced_keep_their_memory_and_are_not_ended_by_us(
        actions in prop::collection::vec(action(), 1..300),
        backing in 0..BACKINGS.len(),
        share in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 40..300u64],
        capturing_ids in capturing_ids(),
    ) {
        let share = if share { "" } else { ",share:off" };
        let config = GpuConfig { capturing_ids, ..GpuConfig::new(pages * 2 * MIB) };
        Program::over(config, &format!("{}{share}", BACKINGS[backing]))
            .unannounced()
            .run_all(&actions);
    }

    #[test]
    fn nothing_of_a_graph_is_lost_when_any_driver_call_fails(
        actions in prop::collection::vec(action(), 1..200),
        backing in 0..BACKINGS.len(),
        nth in 1..40u64,
        code in prop_oneof![Just(2u32), Just(1), Just(999)],
        from_then_on in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 40..300u64],
    ) {
        run_failing(&actions, backing, (nth, code, from_then_on), pages);
    }
}

/// Runs a program in which the `nth` call fails, of each kind that only the allocator calls.
fn run_failing(
    actions: &[Action],
    backing: usize,
    (nth, code, from_then_on): (u64, u32, bool),
    pages: u64,
) {
    let program = Program::new(pages * 2 * MIB, BACKINGS[backing]);
    // Only calls of the allocator fail: with failures of its own calls the program would be
    // another.
    for kind in ALLOCATOR_CALLS {
        program.world.rig.gpu.inject(Injection { kind: Some(kind), nth, code, from_then_on });
    }
    let own_calls =
        |action: &&Action| !matches!(action, Action::Join { .. } | Action::HostWait { .. });
    let actions: Vec<Action> = actions.iter().filter(own_calls).cloned().collect();
    program.run_all(&actions);
}

/// Kinds that only the allocator calls in [`Program`] without actions that record and wait.
const ALLOCATOR_CALLS: [CallKind; 15] = [
    CallKind::MemoryInfo,
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
    CallKind::DeviceSynchronize,
    CallKind::CaptureStatus,
];
