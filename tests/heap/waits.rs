//! Effects of the heap's own waits on a program of several ranks, and the conditions for such
//! waits.
//!
//! Two ranks, each with a heap and a device. Both use two communicators on two streams, whose
//! collectives run on a rank only when the other rank has reached its counterpart, as NCCL's
//! kernels do. The ranks launch them in opposite orders: allowed, since nothing orders the two
//! streams of a rank. A wait of one stream for the other does.

use crate::common::{GIB, MIB, Rig, malloc_again, wait};
use crate::world::World;
use gruyere::driver::StreamHandle;
use gruyere::heap::Heap;
use gruyere_phantom::{CallKind, Caller, Config as GpuConfig, Gpu, as_program};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

const KERNEL: u64 = 20_000;

/// One process of the job.
struct Rank {
    heap: Heap,
    device: u32,
    /// A stream for each communicator, in the order in which this rank launches.
    order: [(u64, StreamHandle); 2],
}

/// Two ranks of `memory` bytes each.
fn job(memory: u64, conf: &str) -> (Arc<Gpu>, [Rank; 2]) {
    let gpu = Arc::new(Gpu::new(GpuConfig::devices(2, memory)));
    let ranks = [(0, [1, 2]), (1, [2, 1])].map(|(device, communicators)| {
        let rig = Rig::on(&gpu, conf);
        rig.heap.announce_hooks(3);
        let order = communicators.map(|communicator| (communicator, rig.stream_of(device)));
        for (_, stream) in order {
            malloc_again(&rig.heap, device, stream);
        }
        Rank { heap: rig.heap, device, order }
    });
    (gpu, ranks)
}

/// A step of a rank: buffers of `bytes`, a kernel and a collective on each of its streams. The
/// second stream requests as much as the first has used and freed. `inject`: between the two, the
/// second waits for the first, as it would if an allocator handed the memory over.
fn step(gpu: &Gpu, rank: &Rank, bytes: u64, inject: bool) {
    let device = rank.device;
    let mut freed_on: Option<StreamHandle> = None;
    for (communicator, stream) in rank.order {
        if inject && let Some(first) = freed_on {
            wait(gpu, device, [stream, first]).unwrap();
        }
        let address = rank.heap.malloc(bytes, i64::from(device), stream).unwrap();
        as_program(|| {
            gpu.launch(device, stream.0, 1, KERNEL)?;
            gpu.launch_collective(device, stream.0, communicator, 2, KERNEL)
        })
        .unwrap();
        assert!(rank.heap.free(address));
        malloc_again(&rank.heap, device, stream);
        freed_on = Some(stream);
    }
}

/// Waits of the allocator: of streams for events, of the host for events and devices, and the
/// host's time in waits of any kind. (Pools synchronise their own stream, which never has work of
/// the program.)
fn waits(gpu: &Gpu) -> [u64; 4] {
    let counts = gpu.counts(Caller::Allocator);
    let kinds =
        [CallKind::StreamWaitEvent, CallKind::EventSynchronize, CallKind::DeviceSynchronize];
    let [streams, events, devices] = kinds.map(|kind| counts.of(kind));
    [streams, events, devices, gpu.host_time().blocked_by_allocator]
}

#[test]
fn a_wait_between_two_communicators_streams_can_close_a_cycle_across_ranks() {
    let (gpu, ranks) = job(1 << 30, "");
    for rank in &ranks {
        step(&gpu, rank, 64 * MIB, true);
    }
    let deadlock = gpu.deadlock().expect("the ranks wait for each other");
    assert!(deadlock.to_string().starts_with("no stream can make progress"), "{deadlock}");
}

#[test]
fn the_default_settings_inject_no_wait_while_memory_is_not_exhausted() {
    for conf in ["", "backing:pool", "backing:stitch"] {
        let (gpu, ranks) = job(1 << 30, conf);
        let before = waits(&gpu);
        for number in 0..50u64 {
            // Other sizes from step to step, so that memory must change hands or grow.
            let bytes = (16 + 16 * (number % 5)) * MIB + 4096 * number;
            for rank in &ranks {
                step(&gpu, rank, bytes, false);
            }
            assert_eq!(gpu.deadlock(), None, "{conf}, step {number}");
            ranks.iter().for_each(|rank| rank.heap.mark_step());
        }
        assert_eq!(waits(&gpu), before, "{conf}");
        assert_eq!(gpu.open_streams(), [], "{conf}: every collective has met its counterpart");
        for rank in &ranks {
            rank.heap.validate().unwrap();
        }
        assert_eq!(gpu.misuses(), []);
    }
}

#[test]
fn no_wait_is_injected_while_the_other_rank_is_steps_behind() {
    // One host runs far ahead: all its freed memory lies behind collectives that have not met.
    let (gpu, ranks) = job(4 << 30, "");
    let before = waits(&gpu);
    for _ in 0..8 {
        step(&gpu, &ranks[0], 32 * MIB, false);
    }
    assert_eq!(gpu.open_streams().len(), 2);
    for _ in 0..8 {
        step(&gpu, &ranks[1], 32 * MIB, false);
    }
    assert_eq!((waits(&gpu), gpu.deadlock(), gpu.open_streams().len()), (before, None, 0));
}

#[test]
fn a_heap_that_may_wait_to_hold_its_slack_closes_the_cycle_by_itself() {
    // The reason why `waits:budget` is only for safe programs: the same job as above, with no wait
    // but the heap's own.
    let (gpu, ranks) = job(1 << 30, "slack:0.5%,waits:budget");
    for rank in &ranks {
        step(&gpu, rank, 64 * MIB, false);
    }
    assert!(waits(&gpu)[0] > 0);
    let deadlock = gpu.deadlock().expect("the ranks wait for each other");
    assert!(deadlock.to_string().starts_with("no stream can make progress"), "{deadlock}");
}

#[test]
fn with_waits_off_no_stream_waits_even_where_memory_runs_out() {
    let (gpu, ranks) = job(128 * MIB, "headroom:0,waits:off");
    let rank = &ranks[0];
    let [(_, first), (_, second)] = rank.order;
    let address = rank.heap.malloc(100 * MIB, 0, first).unwrap();
    as_program(|| gpu.launch(0, first.0, 1, KERNEL)).unwrap();
    assert!(rank.heap.free(address));
    // The host waits for the event instead.
    rank.heap.malloc(100 * MIB, 0, second).unwrap();
    assert_eq!(waits(&gpu)[0], 0);
    assert!(waits(&gpu)[3] > 0);
}

#[test]
fn where_memory_runs_out_a_stream_waits_on_the_device_and_the_host_does_not() {
    for conf in ["headroom:0", "headroom:0,backing:pool", "headroom:0,backing:fixed"] {
        let (gpu, ranks) = job(128 * MIB, conf);
        let rank = &ranks[0];
        let [(_, first), (_, second)] = rank.order;
        let address = rank.heap.malloc(96 * MIB, 0, first).unwrap();
        gpu.block_malloc(1, address, 96 * MIB, 0, first.0);
        as_program(|| gpu.launch(0, first.0, 1, KERNEL)).unwrap();
        gpu.block_free(address);
        assert!(rank.heap.free(address));
        malloc_again(&rank.heap, 0, first);
        let again = rank.heap.malloc(96 * MIB, 0, second).unwrap();
        gpu.block_malloc(2, again, 96 * MIB, 0, second.0);
        as_program(|| gpu.launch(0, second.0, 1, KERNEL)).unwrap();
        assert_eq!(waits(&gpu)[0], 1, "{conf}");
        assert_eq!(waits(&gpu)[1..], [0, 0, 0], "{conf}");
        gpu.block_free(again);
        assert!(rank.heap.free(again));
        rank.heap.validate().unwrap();
        assert!(gpu.faults().is_empty() && gpu.misuses().is_empty(), "{conf}: {:?}", gpu.faults());
    }
}

/// A rank on its own: two streams take turns with blocks of `bytes`, with their work always
/// pending. Bytes held at the peak.
fn turns(gpu: &Gpu, rank: &Rank, rounds: u64, bytes: u64) -> u64 {
    let device = rank.device;
    for _ in 0..rounds {
        for (_, stream) in rank.order {
            let address = rank.heap.malloc(bytes, i64::from(device), stream).unwrap();
            as_program(|| gpu.launch(device, stream.0, 100, KERNEL)).unwrap();
            assert!(rank.heap.free(address));
            malloc_again(&rank.heap, device, stream);
        }
    }
    gpu.books(device).physical_peak
}

/// Reports to a heap before the program runs.
type Said<'a> = &'a dyn Fn(&Heap);

#[test]
fn by_default_streams_wait_to_hold_less_only_where_that_was_allowed_and_not_taken_back() {
    let held = |prepare: Said| {
        let (gpu, [rank, _]) = job(4 << 30, "");
        prepare(&rank.heap);
        // Within what streams may stand idle at first.
        let held = turns(&gpu, &rank, 2, 64 * MIB);
        rank.heap.validate().unwrap();
        (held, waits(&gpu)[0] > 0)
    };
    // With a page of small blocks.
    assert_eq!(held(&|heap| heap.allow_waits()), (66 * MIB, true));
    let cases: [(&str, Said); 4] = [
        ("nobody said anything", &|_| {}),
        ("taken back", &|heap| {
            heap.allow_waits();
            heap.forbid_waits("a group of two ranks");
        }),
        ("forbidden before it was allowed", &|heap| {
            heap.forbid_waits("a group of two ranks");
            heap.allow_waits();
        }),
        ("a second device", &|heap| {
            heap.allow_waits();
            heap.malloc(MIB, 0, StreamHandle(0)).unwrap();
            heap.malloc(MIB, 1, StreamHandle(0)).unwrap();
        }),
    ];
    for (case, prepare) in cases {
        let (held, waited) = held(prepare);
        assert!(held >= 128 * MIB && !waited, "{case}: {held} B held");
    }
}

/// Each of two streams has as much work as the other, so each wait for the other's last work is
/// time in which the device does half of what it could.
#[test]
fn streams_that_could_work_at_once_soon_have_memory_each() {
    let took = |conf: &str| {
        let (gpu, [rank, _]) = job(4 << 30, conf);
        rank.heap.allow_waits();
        let held = turns(&gpu, &rank, 400, 64 * MIB);
        (gpu.host_time().device_end, held, waits(&gpu)[0])
    };
    let ((end, held, waits), (end_without, ..)) = (took(""), took("waits:off"));
    assert!(waits > 0 && held >= 128 * MIB, "{waits} waits, {held} B held");
    let ratio = end as f64 / end_without as f64;
    assert!(ratio < 1.25, "{ratio}: {waits} waits");
}

#[test]
fn up_to_the_slack_more_than_live_blocks_need_is_held_before_a_stream_waits() {
    let (gpu, [rank, _]) = job(4 << 30, "");
    rank.heap.allow_waits();
    let [(_, first), (_, second)] = rank.order;
    rank.heap.malloc(2 << 30, 0, first).unwrap();
    // 8 MiB are freed by the one while the other asks for as much, and the slack is 64 MiB: fresh
    // memory, and no wait.
    let freed = rank.heap.malloc(8 * MIB, 0, first).unwrap();
    let other = rank.heap.malloc(2 * MIB, 0, second).unwrap();
    as_program(|| gpu.launch(0, first.0, 100, KERNEL)).unwrap();
    assert!(rank.heap.free(freed));
    malloc_again(&rank.heap, 0, first);
    let asked = rank.heap.malloc(8 * MIB, 0, second).unwrap();
    assert_eq!(waits(&gpu)[0], 0);
    assert!(gpu.books(0).physical_peak <= (2 << 30) + (64 + 18) * MIB);
    for address in [other, asked] {
        assert!(rank.heap.free(address));
    }
    // A sixteenth: the second stream waits for the first.
    for stream in [first, second] {
        let address = rank.heap.malloc(128 * MIB, 0, stream).unwrap();
        as_program(|| gpu.launch(0, stream.0, 100, KERNEL)).unwrap();
        assert!(rank.heap.free(address));
        malloc_again(&rank.heap, 0, stream);
    }
    assert!(waits(&gpu)[0] > 0);
}

/// A process that is alone and holds nothing beyond live blocks before streams wait; and its
/// streams.
fn alone<const STREAMS: usize>() -> (Arc<Gpu>, Heap, [StreamHandle; STREAMS]) {
    let rig = Rig::bare(4 * GIB, "slack:0B");
    rig.heap.announce_hooks(3);
    rig.heap.allow_waits();
    let streams = [(); STREAMS].map(|()| rig.stream());
    streams.iter().for_each(|&stream| malloc_again(&rig.heap, 0, stream));
    (rig.gpu, rig.heap, streams)
}

/// Frees a block behind the work of `kernels` on its stream.
fn free_behind(gpu: &Gpu, heap: &Heap, (stream, address): (StreamHandle, u64), kernels: u64) {
    as_program(|| gpu.launch(0, stream.0, kernels, KERNEL)).unwrap();
    assert!(heap.free(address));
    malloc_again(heap, 0, stream);
}

#[test]
fn a_stream_waits_for_the_one_event_that_alone_brings_a_block_and_for_no_other() {
    let (gpu, heap, [first, second, third]) = alone();
    // All live at once, so that each has memory of its own.
    let blocks = [(first, 16 * MIB), (second, 64 * MIB)]
        .map(|(stream, bytes)| (stream, heap.malloc(bytes, 0, stream).unwrap()));
    for block in blocks {
        free_behind(&gpu, &heap, block, 100);
    }
    // The first stream's freed memory comes first, and is not enough.
    let address = heap.malloc(64 * MIB, 0, third).unwrap();
    assert_eq!(waits(&gpu)[0], 1);
    // With a page of small blocks.
    assert_eq!(gpu.books(0).physical_peak, 82 * MIB, "no fresh memory");
    free_behind(&gpu, &heap, (third, address), 1);
    heap.validate().unwrap();
}

#[test]
fn where_one_event_is_not_enough_a_stream_waits_for_those_that_it_need_not_stand_idle_for() {
    for is_busy in [false, true] {
        let (gpu, heap, [first, second, third]) = alone();
        let [one, two, three] = [first, second, third]
            .map(|stream| (stream, heap.malloc(32 * MIB, 0, stream).unwrap()));
        let further = [(); 4].map(|()| (third, heap.malloc(64 << 10, 0, third).unwrap()));
        // The third stream has pending work from before the others and after them, or none. An
        // event is recorded behind each free.
        if is_busy {
            free_behind(&gpu, &heap, three, 300);
        }
        for block in [two, one] {
            free_behind(&gpu, &heap, block, 100);
        }
        if is_busy {
            further.into_iter().for_each(|block| free_behind(&gpu, &heap, block, 1));
        }
        let before = waits(&gpu)[0];
        heap.malloc(64 * MIB, 0, third).unwrap();
        assert_eq!(waits(&gpu)[0] > before, is_busy, "the third is busy: {is_busy}");
        heap.validate().unwrap();
    }
}

/// What such a stream frees passes on behind all work of the device (`untold_uses.rs`).
#[test]
fn a_stream_waits_for_what_one_freed_that_allocates_no_more_but_not_for_the_work_of_others() {
    for other_is_busy in [false, true] {
        let (gpu, heap, [first, second, third]) = alone();
        let [block, other] = [(first, 64 * MIB), (second, 16 * MIB)]
            .map(|(stream, bytes)| (stream, heap.malloc(bytes, 0, stream).unwrap()));
        if other_is_busy {
            free_behind(&gpu, &heap, other, 300);
        }
        as_program(|| gpu.launch(0, first.0, 100, KERNEL)).unwrap();
        assert!(heap.free(block.1));
        let held = gpu.books(0).physical_peak;
        heap.malloc(64 * MIB, 0, third).unwrap();
        assert_eq!(waits(&gpu)[0], u64::from(!other_is_busy), "the other is busy: {other_is_busy}");
        assert_eq!(gpu.books(0).physical_peak > held, other_is_busy);
        heap.validate().unwrap();
    }
}

#[test]
fn who_forbids_waits_goes_on_only_when_none_is_being_added() {
    let World { rig, driver, .. } = World::new(4 * GIB, "slack:0B");
    rig.heap.allow_waits();
    let [first, second] = [(); 2].map(|()| rig.stream());
    malloc_again(&rig.heap, 0, first);
    let Rig { gpu, heap } = rig;
    let address = heap.malloc(64 * MIB, 0, first).unwrap();
    free_behind(&gpu, &heap, (first, address), 100);
    // A request has seen that it may make its stream wait, and stands just before that.
    let (there, go) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let (is_there, may_go) = (there.clone(), go.clone());
    driver.intrude("stream_wait_event", move || {
        is_there.wait();
        may_go.wait();
    });
    let is_forbidden = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| heap.malloc(64 * MIB, 0, second).unwrap());
        there.wait();
        scope.spawn(|| {
            heap.forbid_waits("a group of two ranks");
            is_forbidden.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(200));
        let went_on = is_forbidden.load(Ordering::SeqCst);
        go.wait();
        assert!(!went_on, "beside the request");
    });
    assert!(is_forbidden.load(Ordering::SeqCst));
    assert_eq!(gpu.counts(gruyere_phantom::Caller::Allocator).of(CallKind::StreamWaitEvent), 1);
}
