//! Callers that keep CUDA's own rules, under the oracle: memory of `cudaMalloc` is usable on any
//! stream at once; `cudaFree` frees it once the whole device is past it, `cudaFreeAsync` once one
//! stream is; whatever the program's streams, captures and synchronisations do meanwhile.

use crate::common::{DEFAULT, GIB, MIB, Rig, wait};
use gruyere::driver::StreamHandle;
use gruyere::heap::Error;
use gruyere_phantom::{
    CallKind, CaptureMode, Config as GpuConfig, Injection, as_program, vouching,
};
use proptest::prelude::*;

const ALL_STREAMS: StreamHandle = StreamHandle::ALL_STREAMS;

#[derive(Clone, Debug)]
enum Action {
    /// `cudaMalloc`, and work on it on some streams.
    Malloc {
        size: u64,
        used_on: [usize; 2],
    },
    /// `cudaMallocAsync`.
    MallocAsync {
        size: u64,
        stream: usize,
    },
    /// `cudaMalloc` of a block for `cudaFreeAsync`: used on one stream.
    MallocForAsyncFree {
        size: u64,
        stream: usize,
    },
    /// Frees as the block's malloc requires, or more strictly.
    Free {
        block: usize,
        strictly: bool,
    },
    /// `cudaFreeAsync` on another stream, which waits for the block's.
    FreeElsewhere {
        block: usize,
        stream: usize,
    },
    Use {
        block: usize,
        stream: usize,
    },
    Launch {
        stream: usize,
        kernels: u64,
    },
    Synchronize,
    HostSpend {
        microseconds: u64,
    },
    DestroyStream {
        stream: usize,
        told: bool,
        announced: bool,
    },
    /// A short capture, with a malloc and a free outside of it meanwhile.
    Capture {
        stream: usize,
        size: u64,
        block: usize,
    },
    Trim,
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 1..8192u64, 4 => 8192..MIB, 4 => MIB..24 * MIB, 1 => 24 * MIB..160 * MIB]
}

fn action() -> impl Strategy<Value = Action> {
    let n = 0..64usize;
    let block = 0..4096usize;
    prop_oneof![
        10 => (size(), [n.clone(), n.clone()]).prop_map(
            |(size, used_on)| Action::Malloc { size, used_on }
        ),
        5 => (size(), n.clone()).prop_map(|(size, stream)| Action::MallocAsync { size, stream }),
        3 => (size(), n.clone()).prop_map(
            |(size, stream)| Action::MallocForAsyncFree { size, stream }
        ),
        10 => (block.clone(), any::<bool>()).prop_map(
            |(block, strictly)| Action::Free { block, strictly }
        ),
        3 => (block.clone(), n.clone()).prop_map(
            |(block, stream)| Action::FreeElsewhere { block, stream }
        ),
        5 => (block.clone(), n.clone()).prop_map(|(block, stream)| Action::Use { block, stream }),
        8 => (n.clone(), 1..6u64).prop_map(|(stream, kernels)| Action::Launch { stream, kernels }),
        1 => Just(Action::Synchronize),
        2 => (1..200u64).prop_map(|microseconds| Action::HostSpend { microseconds }),
        1 => (n.clone(), any::<[bool; 2]>()).prop_map(
            |(stream, [told, announced])| Action::DestroyStream { stream, told, announced }
        ),
        1 => (n, size(), block).prop_map(
            |(stream, size, block)| Action::Capture { stream, size, block }
        ),
        1 => Just(Action::Trim),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Freed {
    /// By `cudaFree`.
    DeviceWide,
    /// By `cudaFreeAsync` on the stream of this number.
    On(usize),
}

struct Block {
    address: u64,
    freed: Freed,
    /// Whether it belongs to one stream, not to all.
    is_streams: bool,
}

struct Program {
    rig: Rig,
    streams: Vec<StreamHandle>,
    /// Streams announced as lasting.
    announced: [bool; 4],
    /// A stream named only to the oracle: without waits or events of its own, so work ordered
    /// behind it is ordered behind the whole device.
    nobody: StreamHandle,
    blocks: Vec<Block>,
    next: u64,
}

impl Program {
    fn new(memory: u64, conf: &str, context_events: bool) -> Self {
        let config = GpuConfig { context_events, vouched_streams: true, ..GpuConfig::new(memory) };
        let rig = Rig::over(config, conf);
        rig.heap.announce_ordered_callers();
        let mut streams = vec![DEFAULT];
        streams.extend([rig.stream(), rig.passing_stream(), rig.passing_stream()]);
        let nobody = rig.passing_stream();
        Self {
            rig,
            streams,
            announced: [true, true, false, false],
            nobody,
            blocks: Vec::new(),
            next: 1,
        }
    }

    fn malloc(
        &mut self,
        size: u64,
        asked: StreamHandle,
        told: StreamHandle,
        freed: Freed,
    ) -> Option<u64> {
        match vouching(asked.0, || self.rig.heap.malloc(size, 0, asked)) {
            Ok(address) => {
                self.rig.gpu.block_malloc(self.next, address, size, 0, told.0);
                self.next += 1;
                self.blocks.push(Block { address, freed, is_streams: asked != ALL_STREAMS });
                Some(address)
            }
            Err(Error::OutOfMemory(_) | Error::Driver(_)) => None,
            Err(other) => panic!("{other}"),
        }
    }

    fn used(&self, address: u64, stream: usize) {
        let stream = self.streams[stream % self.streams.len()];
        self.rig.gpu.block_record_stream(address, 0, stream.0);
        as_program(|| self.rig.gpu.launch(0, stream.0, 1, 20_000)).unwrap();
    }

    fn free(&mut self, block: usize, strictly: bool) {
        if self.blocks.is_empty() {
            return;
        }
        let Block { address, freed, .. } = self.blocks.swap_remove(block % self.blocks.len());
        self.rig.gpu.block_free(address);
        let done = match freed {
            Freed::On(stream) if !strictly => {
                let on = self.streams[stream];
                vouching(on.0, || self.rig.heap.free_on(address, on))
            }
            _ => self.rig.heap.free_device_wide(address),
        };
        assert!(done);
    }

    fn run(&mut self, action: &Action) {
        let gpu = self.rig.gpu.clone();
        let count = self.streams.len();
        match *action {
            Action::Malloc { size, used_on } => {
                if let Some(address) =
                    self.malloc(size, ALL_STREAMS, self.nobody, Freed::DeviceWide)
                {
                    used_on.into_iter().for_each(|stream| self.used(address, stream));
                }
            }
            Action::MallocAsync { size, stream } => {
                let on = self.streams[stream % count];
                self.malloc(size, on, on, Freed::On(stream % count));
            }
            Action::MallocForAsyncFree { size, stream } => {
                let on = self.streams[stream % count];
                self.malloc(size, ALL_STREAMS, on, Freed::On(stream % count));
            }
            Action::Free { block, strictly } => self.free(block, strictly),
            Action::FreeElsewhere { block, stream } => {
                if self.blocks.is_empty() {
                    return;
                }
                let at = block % self.blocks.len();
                // The oracle takes the free for a use on the block's own stream, so that of a block
                // of all streams would look like one of the stream named at its malloc, past what
                // the other was made to wait for.
                if let Freed::On(of) = self.blocks[at].freed
                    && self.blocks[at].is_streams
                {
                    let (to, address) = (stream % count, self.blocks[at].address);
                    wait(&gpu, 0, [self.streams[to], self.streams[of]]).unwrap();
                    gpu.block_record_stream(address, 0, self.streams[to].0);
                    self.blocks[at].freed = Freed::On(to);
                    self.free(at, false);
                }
            }
            Action::Use { block, stream } => {
                // A block freed on one stream is used on that stream only.
                if let Some(&Block { address, freed: Freed::DeviceWide, .. }) =
                    self.blocks.get(block % self.blocks.len().max(1))
                {
                    self.used(address, stream);
                }
            }
            Action::Launch { stream, kernels } => {
                as_program(|| gpu.launch(0, self.streams[stream % count].0, kernels, 20_000))
                    .unwrap();
            }
            Action::Synchronize => {
                let point = self.rig.heap.before_synchronize(0);
                if as_program(|| gpu.device_synchronize(0)).is_ok() {
                    self.rig.heap.synchronized(0, point);
                }
            }
            Action::HostSpend { microseconds } => gpu.host_spend(microseconds * 1000),
            Action::DestroyStream { stream, told, announced } => {
                let number = stream % count;
                if number != 0 {
                    // The next stream gets the same handle. The program frees the old stream's
                    // blocks strictly.
                    for block in
                        self.blocks.iter_mut().filter(|block| block.freed == Freed::On(number))
                    {
                        block.freed = Freed::DeviceWide;
                    }
                    // The door announces the end if it saw it; for a stream with an announced
                    // beginning it must.
                    if told || self.announced[number] {
                        self.rig.end(self.streams[number]);
                    } else {
                        self.rig.destroy(self.streams[number]);
                    }
                    self.streams[number] =
                        if announced { self.rig.stream() } else { self.rig.passing_stream() };
                    self.announced[number] = announced;
                }
            }
            Action::Capture { stream, size, block } => {
                let on = self.streams[stream % count];
                if on == DEFAULT {
                    return;
                }
                vouching(on.0, || self.rig.heap.capture_begins(0, on));
                as_program(|| gpu.begin_capture(0, on.0, CaptureMode::Global, None)).unwrap();
                self.malloc(size, ALL_STREAMS, self.nobody, Freed::DeviceWide);
                if let Some(&Block { freed: Freed::DeviceWide, .. }) =
                    self.blocks.get(block % self.blocks.len().max(1))
                {
                    self.free(block, true);
                }
                let graph = as_program(|| gpu.end_capture(0, on.0));
                self.rig.heap.capture_ends(0, on);
                let graph = graph.expect("a capture of the program's failed");
                as_program(|| gpu.graph_destroy(0, graph)).unwrap();
            }
            Action::Trim => {
                self.rig.heap.trim();
            }
        }
    }

    /// Frees everything, and checks that the device is as empty as before.
    fn finish(mut self) {
        while !self.blocks.is_empty() {
            self.free(0, false);
        }
        self.rig.finish();
    }
}

const CONFS: [&str; 6] = [
    "backing:stitch,headroom:0",
    "backing:stitch,headroom:0,slack:0B,waits:budget",
    "backing:stitch,share:off,headroom:0",
    "backing:pool,headroom:0",
    "backing:fixed,headroom:0",
    "backing:passthrough",
];

proptest! {
    #![
        proptest_config(
            ProptestConfig { cases: 400, max_shrink_iters: 2000, ..ProptestConfig::default() }
        )
    ]

    #[test]
    fn no_cuda_program_gets_memory_that_other_work_may_still_use(
        actions in prop::collection::vec(action(), 1..400),
        conf in 0..CONFS.len(),
        context_events in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 40..400u64],
    ) {
        let mut program = Program::new(pages * 2 * MIB, CONFS[conf], context_events);
        for action in &actions {
            program.run(action);
        }
        program.rig.check_order();
        program.finish();
    }

    #[test]
    fn nothing_of_a_cuda_program_is_lost_when_a_driver_call_fails(
        actions in prop::collection::vec(action(), 1..200),
        conf in 0..CONFS.len(),
        nth in 1..60u64,
        code in prop_oneof![Just(2u32), Just(1), Just(999)],
        from_then_on in any::<bool>(),
        pages in prop_oneof![Just(8192u64), 40..400u64],
    ) {
        let mut program = Program::new(pages * 2 * MIB, CONFS[conf], true);
        for kind in ALLOCATOR_CALLS {
            program.rig.gpu.inject(Injection { kind: Some(kind), nth, code, from_then_on });
        }
        // Without the calls that the program itself needs.
        let of_the_program = |action: &&Action| !matches!(
            action, Action::FreeElsewhere { .. } | Action::Synchronize
        );
        for action in actions.iter().filter(of_the_program) {
            program.run(action);
            program.rig.heap.validate().unwrap();
        }
        program.rig.gpu.clear_injections();
        program.finish();
    }
}

const ALLOCATOR_CALLS: [CallKind; 9] = [
    CallKind::Create,
    CallKind::Map,
    CallKind::SetAccess,
    CallKind::Unmap,
    CallKind::PoolAlloc,
    CallKind::Alloc,
    CallKind::EventCreate,
    CallKind::ContextEventRecord,
    CallKind::EventQuery,
];

fn rig(conf: &str) -> Rig {
    let rig = Rig::bare(16 * GIB, conf);
    rig.heap.announce_ordered_callers();
    rig
}

fn busy(rig: &Rig, stream: StreamHandle, nanoseconds: u64) {
    as_program(|| rig.gpu.launch(0, stream.0, 1, nanoseconds)).unwrap();
}

fn synchronisations(rig: &Rig) -> u64 {
    rig.gpu.counts(gruyere_phantom::Caller::Allocator).of(CallKind::DeviceSynchronize)
}

#[test]
fn a_free_never_waits_and_its_memory_comes_back_when_the_whole_device_is_past_it() {
    let rig = rig("");
    let unseen = rig.stream();
    for turn in 0..200 {
        let address = rig.malloc(30 * MIB, ALL_STREAMS);
        // A stream unknown to the heap works on it.
        busy(&rig, unseen, 1_000_000);
        let before = rig.gpu.host_time().now;
        assert!(rig.heap.free_device_wide(address));
        assert!(
            rig.gpu.host_time().now - before < 100_000,
            "turn {turn}: the free waited for the kernel"
        );
        let other = rig.malloc(30 * MIB, ALL_STREAMS);
        assert_ne!(other, address, "the kernel may still be at it");
        assert!(rig.heap.free_device_wide(other));
        rig.gpu.host_spend(2_000_000);
    }
    assert_eq!(synchronisations(&rig), 0);
    let peak = rig.gpu.books(0).physical_peak;
    assert!(peak <= 200 * MIB, "{} MiB for two blocks of 30 at a time", peak / MIB);
    rig.check();
}

#[test]
fn one_event_serves_any_number_of_frees() {
    let rig = rig("");
    for _ in 0..4 {
        let blocks: Vec<u64> = (0..2000).map(|at| rig.malloc(1 + at * 7, ALL_STREAMS)).collect();
        blocks.iter().for_each(|&block| assert!(rig.heap.free_device_wide(block)));
    }
    let events =
        rig.gpu.counts(gruyere_phantom::Caller::Allocator).of(CallKind::ContextEventRecord);
    assert!((1..200).contains(&events), "{events} events for 8000 frees");
    rig.check();
}

#[test]
fn before_cuda_12_5_a_synchronisation_of_the_programs_own_releases_what_is_parked() {
    let rig =
        Rig::over(GpuConfig { context_events: false, ..GpuConfig::new(16 * GIB) }, "record:on");
    rig.heap.announce_ordered_callers();
    // Enough memory that there is slack for parked blocks: without slack the heap would synchronise
    // itself.
    let kept: Vec<u64> = (0..160).map(|_| rig.malloc(50 * MIB, ALL_STREAMS)).collect();
    for _ in 0..200 {
        let address = rig.malloc(15 * MIB, ALL_STREAMS);
        assert!(rig.heap.free_device_wide(address));
        let later = rig.malloc(15 * MIB, ALL_STREAMS);
        assert_ne!(later, address, "nothing has shown that the device is past it");
        let point = rig.heap.before_synchronize(0);
        assert!(rig.heap.free_device_wide(later));
        as_program(|| rig.gpu.device_synchronize(0)).unwrap();
        rig.heap.synchronized(0, point);
        let last = rig.malloc(15 * MIB, ALL_STREAMS);
        assert_ne!(last, later, "it was freed while the synchronisation was under way");
        assert!(rig.heap.free_device_wide(last));
    }
    assert_eq!(synchronisations(&rig), 0);
    let peak = rig.gpu.books(0).physical_peak;
    assert!(peak <= 8100 * MIB, "{} MiB", peak / MIB);
    kept.iter().for_each(|&block| assert!(rig.heap.free_device_wide(block)));
    rig.check();
}

#[test]
fn before_cuda_12_5_the_heap_synchronises_rather_than_hold_much_more_than_was_ever_live() {
    for conf in ["backing:stitch", "backing:pool", "backing:fixed"] {
        let rig = Rig::over(
            GpuConfig { context_events: false, ..GpuConfig::new(16 * GIB) },
            &format!("{conf},record:on"),
        );
        rig.heap.announce_ordered_callers();
        let kept: Vec<u64> = (0..20).map(|_| rig.malloc(50 * MIB, ALL_STREAMS)).collect();
        for turn in 0..500 {
            let blocks: Vec<u64> = (0..10)
                .map(|at| rig.malloc(1 + (turn * 7 + at * 13) % 40 * MIB, ALL_STREAMS))
                .collect();
            blocks.iter().for_each(|&block| assert!(rig.heap.free_device_wide(block)));
        }
        let peak = rig.gpu.books(0).physical_peak;
        assert!(peak < 2 * GIB, "{conf}: {} MiB held for 1.4 GiB", peak / MIB);
        let waits = synchronisations(&rig);
        assert!(waits < 1000, "{conf}: {waits} synchronisations for 5000 frees");
        kept.iter().for_each(|&block| assert!(rig.heap.free_device_wide(block)));
        rig.check();
    }
}

#[test]
fn under_pressure_one_synchronisation_serves_all() {
    let rig =
        Rig::over(GpuConfig { context_events: false, ..GpuConfig::new(64 * MIB) }, "headroom:0");
    rig.heap.announce_ordered_callers();
    let blocks: Vec<u64> = (0..12).map(|_| rig.malloc(5 * MIB, ALL_STREAMS)).collect();
    blocks.iter().for_each(|&block| assert!(rig.heap.free_device_wide(block)));
    let again: Vec<u64> = (0..12).map(|_| rig.malloc(5 * MIB, ALL_STREAMS)).collect();
    assert_eq!(again.len(), 12);
    assert_eq!(synchronisations(&rig), 1);
    rig.check();
}

#[test]
fn a_thread_that_has_ended_leaves_its_memory_to_others() {
    let rig =
        Rig::over(GpuConfig { context_events: true, ..GpuConfig::new(16 * GIB) }, "record:on");
    rig.heap.announce_ordered_callers();
    for _ in 0..100 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let own = StreamHandle(2);
                let address = rig.heap.malloc(30 * MIB, 0, own).unwrap();
                assert!(rig.heap.free_on(address, own));
            });
        });
    }
    let peak = rig.gpu.books(0).physical_peak;
    assert!(peak < 200 * MIB, "{} MiB for one block at a time", peak / MIB);
    assert_eq!(synchronisations(&rig), 0);
    rig.check();
}

#[test]
fn a_capture_that_nobody_told_of_is_left_alone() {
    let rig = rig("");
    let stream = rig.stream();
    let known = rig.malloc(2 * MIB, stream);
    as_program(|| rig.gpu.begin_capture(0, stream.0, CaptureMode::Global, None)).unwrap();
    for _ in 0..20 {
        let address = rig.malloc(30 * MIB, ALL_STREAMS);
        assert!(rig.heap.free_device_wide(address));
    }
    as_program(|| rig.gpu.end_capture(0, stream.0)).expect("the program's capture failed");
    assert!(rig.heap.free_device_wide(known));
    rig.check();
}

#[test]
fn what_the_heap_owns_is_told_by_the_start_of_a_block_only() {
    for conf in ["backing:stitch", "backing:pool", "backing:fixed", "backing:passthrough"] {
        let rig = rig(conf);
        for size in [1, 512, 100_000, MIB, MIB + 1, 30 * MIB] {
            let address = rig.malloc(size, ALL_STREAMS);
            let owned = rig.heap.owns(address).unwrap_or_else(|| panic!("{conf}: {size}"));
            assert_eq!(
                (owned.device, owned.requested, owned.bytes),
                (0, size, size.next_multiple_of(512))
            );
            assert_eq!(rig.heap.owns(address + 512), None, "{conf}: inside");
            assert!(rig.heap.is_ours(address));
            assert!(rig.heap.free_device_wide(address));
            assert_eq!(rig.heap.owns(address), None, "{conf}: freed");
            assert!(!rig.heap.free_device_wide(address), "{conf}: twice");
        }
        assert_eq!(rig.heap.owns(0), None);
        assert!(!rig.heap.is_ours(0x1234_5678));
        rig.check();
    }
}

#[test]
fn a_reset_device_is_as_new() {
    for conf in ["backing:stitch", "backing:pool", "backing:fixed", "backing:passthrough"] {
        let rig = rig(conf);
        let stream = rig.stream();
        for turn in 0..3 {
            for size in [1, 100_000, 3 * MIB, 40 * MIB] {
                rig.malloc(size, ALL_STREAMS);
                rig.malloc(size, stream);
                let parked = rig.malloc(size, ALL_STREAMS);
                assert!(rig.heap.free_device_wide(parked));
            }
            busy(&rig, stream, 50_000);
            rig.heap.reset_device(0);
            assert_eq!(rig.gpu.books(0).physical, 0, "{conf}, turn {turn}");
            assert_eq!(rig.heap.stats(0).unwrap().live, 0);
            rig.check();
        }
    }
}

#[test]
fn what_could_be_given_back_counts_as_free() {
    for conf in ["backing:stitch", "backing:pool", "backing:fixed"] {
        let rig = rig(&format!("{conf},auto_trim:off"));
        let blocks: Vec<u64> = (0..20).map(|_| rig.malloc(30 * MIB, ALL_STREAMS)).collect();
        let keep = rig.malloc(1000, ALL_STREAMS);
        let before = rig.heap.could_give_back(0);
        blocks.iter().for_each(|&block| assert!(rig.heap.free_device_wide(block)));
        let told = rig.heap.could_give_back(0);
        assert!(
            told - before >= 600 * MIB - 30 * MIB,
            "{conf}: {told} B told for 600 MiB freed, {before} B before"
        );
        let held = rig.gpu.books(0).physical;
        rig.heap.trim();
        assert!(told <= held - rig.gpu.books(0).physical, "{conf}: more told than was given back");
        assert!(rig.heap.free_device_wide(keep));
        rig.check();
    }
}

#[test]
fn hooks_of_torch_that_nobody_announced_end_the_sharing_between_streams() {
    let rig = rig("");
    let (one, other) = (rig.stream(), rig.stream());
    let address = rig.malloc(3 * MIB, one);
    assert!(rig.heap.free_on(address, one));
    assert_eq!(rig.malloc(3 * MIB, other), address, "a CUDA program orders its frees itself");
    assert!(rig.heap.free_on(address, other));
    rig.heap.meet_hooks();
    assert_ne!(rig.malloc(3 * MIB, one), address, "torch's do not");
    rig.check();
}

#[test]
fn a_watched_program_is_on_the_record_and_the_driver_is_never_asked() {
    let config = gruyere::config::Config::parse("").unwrap();
    let heap = gruyere::heap::Heap::watcher(config.heap).unwrap();
    let (small, large) = (0x7000_0000_0000, 0x7000_4000_0000);
    heap.saw_malloc(1, small, 1000, ALL_STREAMS);
    heap.saw_malloc(1, large, 30 * MIB, DEFAULT);
    let reader = gruyere::record::Reader::own(heap.record()).unwrap();
    let device = reader.device(1).unwrap();
    assert_eq!(device.live, 30 * MIB + 1024);
    assert_eq!(device.gauge(gruyere::record::DeviceGauge::Reserved), 30 * MIB + 1024);
    // Freed unseen, and handed out again.
    heap.saw_malloc(1, small, 2000, ALL_STREAMS);
    assert!(heap.saw_free(large, DEFAULT));
    assert!(!heap.saw_free(large, DEFAULT));
    let device = reader.device(1).unwrap();
    assert_eq!(device.live, 2048);
    assert_eq!(device.gauge(gruyere::record::DeviceGauge::Reserved), 2048);
    heap.shut_down();
}
