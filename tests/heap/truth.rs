//! The figures reported to torch: numbers against a model of every block, snapshots that tile, and
//! the history.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::heap::Error;
use gruyere::heap::history::{self, Action};
use gruyere::heap::snapshot::{BlockState, Snapshot};
use gruyere::record::peaks::{ALL, LARGE, SMALL, Stat};
use gruyere_phantom::Config as GpuConfig;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

fn round(size: u64) -> u64 {
    size.next_multiple_of(512)
}

/// One number by pool, updated from everything after each call.
#[derive(Default)]
struct Counter {
    now: [u64; 3],
    peak: [u64; 3],
    came: [u64; 3],
    went: [u64; 3],
}

impl Counter {
    fn come(&mut self, pool: usize, n: u64) {
        for pool in [ALL, pool] {
            self.now[pool] += n;
            self.came[pool] += n;
        }
    }

    fn go(&mut self, pool: usize, n: u64) {
        for pool in [ALL, pool] {
            self.now[pool] -= n;
            self.went[pool] += n;
        }
    }

    fn note(&mut self) {
        for pool in 0..3 {
            self.peak[pool] = self.peak[pool].max(self.now[pool]);
        }
    }

    fn reset_peaks(&mut self) {
        self.peak = self.now;
    }

    fn reset_accumulated(&mut self) {
        (self.came, self.went) = ([0; 3], [0; 3]);
    }

    fn stats(&self) -> [Stat; 3] {
        std::array::from_fn(|pool| Stat {
            current: self.now[pool],
            peak: self.peak[pool],
            allocated: self.came[pool],
            freed: self.went[pool],
        })
    }
}

/// A program on a heap, with its own counters. Blocks that wait for streams count as active until
/// the snapshot shows them free.
struct Program {
    rig: Rig,
    streams: Vec<StreamHandle>,
    /// Requested bytes, by address.
    live: BTreeMap<u64, u64>,
    waiting: BTreeMap<u64, u64>,
    /// Live blocks, live bytes, active blocks, active bytes, requested bytes.
    counters: [Counter; 5],
}

impl Program {
    fn new(conf: &str) -> Self {
        let rig = Rig::new(conf);
        let streams = vec![DEFAULT, rig.stream(), rig.stream()];
        Self {
            rig,
            streams,
            live: BTreeMap::new(),
            waiting: BTreeMap::new(),
            counters: Default::default(),
        }
    }

    fn amounts(size: u64) -> (usize, [u64; 5]) {
        let pool = if round(size) <= MIB { SMALL } else { LARGE };
        (pool, [1, round(size), 1, round(size), size])
    }

    fn malloc(&mut self, size: u64, stream: usize) {
        let address = self.rig.malloc(size, self.streams[stream % self.streams.len()]);
        self.complete_frees();
        let (pool, amounts) = Self::amounts(size);
        self.counters
            .iter_mut()
            .zip(amounts)
            .for_each(|(counter, amount)| counter.come(pool, amount));
        self.live.insert(address, size);
        self.check();
    }

    fn free(&mut self, at: usize, user: Option<usize>) {
        let Some((&address, &size)) = self.live.iter().nth(at % self.live.len().max(1)) else {
            return;
        };
        if let Some(user) = user {
            self.rig.heap.record_stream(address, self.streams[user % self.streams.len()]);
        }
        self.live.remove(&address);
        self.waiting.insert(address, size);
        assert!(self.rig.heap.free(address));
        let (pool, amounts) = Self::amounts(size);
        self.counters
            .iter_mut()
            .zip(amounts)
            .take(2)
            .for_each(|(counter, amount)| counter.go(pool, amount));
        self.complete_frees();
        self.check();
    }

    /// Blocks no longer pending are no longer active.
    fn complete_frees(&mut self) {
        let snapshot = self.rig.heap.snapshot(0).unwrap();
        let pending: Vec<u64> =
            blocks(&snapshot, BlockState::PendingFree).map(|(address, ..)| address).collect();
        let over: Vec<u64> =
            self.waiting.keys().copied().filter(|address| !pending.contains(address)).collect();
        for address in over {
            let size = self.waiting.remove(&address).unwrap();
            let (pool, amounts) = Self::amounts(size);
            self.counters
                .iter_mut()
                .zip(amounts)
                .skip(2)
                .for_each(|(counter, amount)| counter.go(pool, amount));
        }
    }

    fn check(&mut self) {
        self.counters.iter_mut().for_each(Counter::note);
        let stats = self.rig.heap.torch_stats(0).unwrap();
        let [allocation, bytes, active, active_bytes, requested] =
            self.counters.each_ref().map(Counter::stats);
        assert_eq!(stats.blocks.allocation, allocation);
        assert_eq!(stats.blocks.allocated_bytes, bytes);
        assert_eq!(stats.blocks.active, active);
        assert_eq!(stats.blocks.active_bytes, active_bytes);
        assert_eq!(stats.blocks.requested_bytes, requested);
        let reserved = self.rig.heap.stats(0).unwrap().reserved;
        for held in [stats.held.segment, stats.held.reserved_bytes] {
            assert_eq!(held[ALL].current, held[SMALL].current + held[LARGE].current);
            assert!(held.iter().all(|stat| stat.peak >= stat.current));
        }
        assert_eq!(stats.held.reserved_bytes[ALL].current, reserved);
        let inactive = stats.held.inactive_split_bytes;
        for pool in [SMALL, LARGE] {
            let free =
                stats.held.reserved_bytes[pool].current.saturating_sub(active_bytes[pool].current);
            // Under passthrough small blocks lie in no slab.
            if self.rig.heap.settings().backing != gruyere::config::Backing::Passthrough {
                assert!(
                    inactive[pool].current <= free,
                    "{pool}: {} of {free}",
                    inactive[pool].current
                );
            }
        }
    }
}

fn blocks(snapshot: &Snapshot, state: BlockState) -> impl Iterator<Item = (u64, u64, u64)> {
    let all = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
    all.filter(move |block| block.state == state)
        .map(|block| (block.address, block.bytes, block.requested))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_number_is_that_of_a_model_that_looks_at_every_block(
        backing in 0usize..4,
        record in prop::bool::ANY,
        calls in proptest::collection::vec((0u8..10, 1u64..3000, 0usize..100), 1..60),
    ) {
        let record = if record { "record:on,record_blocks:2048" } else { "record:off" };
        let mut program = Program::new(&format!("{},{record}", BACKINGS[backing]));
        for (what, size, at) in calls {
            match what {
                0..=2 => program.malloc(size * 17, at),
                3..=4 => program.malloc(size * 4001, at),
                5..=6 if !program.live.is_empty() => program.free(at, None),
                7 if !program.live.is_empty() => program.free(at, Some(at / 7)),
                8 if at < 20 => {
                    program.rig.heap.reset_peaks(0).unwrap();
                    program.counters.iter_mut().for_each(Counter::reset_peaks);
                    program.check();
                }
                9 if at < 20 => {
                    program.rig.heap.reset_accumulated(0).unwrap();
                    program.counters.iter_mut().for_each(Counter::reset_accumulated);
                    program.check();
                }
                9 => {
                    program.rig.heap.trim();
                    program.complete_frees();
                    program.check();
                }
                _ => {}
            }
            let snapshot = program.rig.heap.snapshot(0).unwrap();
            check_tiling(&snapshot, program.rig.heap.stats(0).unwrap().reserved);
            if BACKINGS[backing].starts_with("backing:stitch") {
                let held = program.rig.heap.torch_stats(0).unwrap().held;
                let small = snapshot.segments.iter().filter(|segment| segment.is_small());
                let small: u64 = small.map(|segment| segment.bytes).sum();
                prop_assert_eq!(small, held.reserved_bytes[SMALL].current);
            }
            let told: Vec<(u64, u64, u64)> = blocks(&snapshot, BlockState::Allocated).collect();
            let live: Vec<(u64, u64, u64)> =
                program.live.iter().map(|(&address, &size)| (address, round(size), size)).collect();
            prop_assert_eq!(told, live);
            let waiting: Vec<u64> =
                blocks(&snapshot, BlockState::PendingFree).map(|(address, ..)| address).collect();
            prop_assert_eq!(waiting, program.waiting.keys().copied().collect::<Vec<_>>());
        }
        program.rig.check();
    }
}

/// Segments are disjoint and ordered by address, blocks tile them, and their sum is the held
/// memory.
fn check_tiling(snapshot: &Snapshot, reserved: u64) {
    let mut end = 0;
    for segment in &snapshot.segments {
        assert!(segment.address >= end && segment.bytes > 0);
        let mut at = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, at);
            assert!(block.bytes > 0 && block.bytes % 512 == 0 && block.requested <= block.bytes);
            assert_eq!(block.requested == 0, block.state == BlockState::Inactive);
            at += block.bytes;
        }
        end = segment.address + segment.bytes;
        assert_eq!(at, end, "the blocks of {:#x} do not tile it", segment.address);
    }
    let told: u64 = snapshot.segments.iter().map(|segment| segment.bytes).sum();
    assert_eq!(told + snapshot.unmapped, reserved);
}

#[test]
fn whole_free_pages_of_a_row_are_a_segment_of_their_own() {
    let rig = Rig::new("backing:stitch");
    let blocks = [3 * MIB, 8 * MIB, 3 * MIB].map(|bytes| rig.malloc(bytes, DEFAULT));
    let told = || {
        let segments = rig.heap.snapshot(0).unwrap().segments;
        let at = |address: u64| (address - blocks[0]) / MIB;
        segments
            .iter()
            .map(|segment| (at(segment.address), at(segment.address + segment.bytes)))
            .collect::<Vec<_>>()
    };
    assert_eq!(told(), [(0, 14)]);
    assert!(rig.heap.free(blocks[1]));
    // Of the hole from 3 to 11 MiB, a MiB on either side is on the pages of the neighbours.
    assert_eq!(told(), [(0, 4), (4, 10), (10, 14)]);
    check_tiling(&rig.heap.snapshot(0).unwrap(), rig.heap.stats(0).unwrap().reserved);
    assert!(rig.heap.free(blocks[2]));
    assert_eq!(told(), [(0, 4), (4, 14)]);
    rig.check();
}

#[test]
fn requests_are_off_the_hot_path_while_somebody_is_told_of_blocks_and_on_it_afterwards() {
    let rig = Rig::new("");
    rig.heap.announce_hooks(3);
    let block = rig.malloc(5000, DEFAULT);
    for told in [false, true, false] {
        rig.heap.tell_of_blocks(told);
        assert_eq!(rig.heap.tells_of_blocks(), told);
        assert_eq!(rig.heap.is_plain(), !told);
        assert_eq!(rig.heap.owner(block).is_none(), told);
        assert!(rig.heap.owns(block).is_some());
    }
    assert!(rig.heap.free(block));
}

#[test]
fn a_device_that_nobody_has_used_has_no_segments_and_one_that_there_is_not_is_named() {
    let rig = Rig::new("");
    assert_eq!(rig.heap.snapshot(0).unwrap(), Snapshot::default());
    assert!(rig.heap.snapshot(1).is_err() && rig.heap.snapshot(-1).is_err());
    assert!(rig.heap.torch_stats(1).is_err());
    assert!(rig.heap.reset_peaks(7).is_err() && rig.heap.reset_accumulated(7).is_err());
}

#[test]
fn threads_lose_no_update_and_counts_only_grow() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 3000;
    let rig = Rig::new("");
    let streams: Vec<StreamHandle> = (0..THREADS).map(|_| rig.stream()).collect();
    let done = AtomicBool::new(false);
    // On a busy machine the workers could finish before the watcher's first look.
    let looked = Barrier::new(THREADS as usize + 1);
    let size = |i: u64| if i.is_multiple_of(17) { 2 * MIB } else { 512 * (1 + i % 9) };
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut before = [Stat::default(); 3];
            let mut looks = 0;
            loop {
                // Read before the look, so that the last look covers all work.
                let is_last = done.load(Ordering::Acquire);
                let stats = rig.heap.torch_stats(0).unwrap().blocks.allocation;
                for (now, before) in stats.iter().zip(before) {
                    assert!(now.allocated >= before.allocated && now.freed >= before.freed);
                    assert!(now.peak >= before.peak && now.peak >= now.current);
                }
                before = stats;
                looks += 1;
                if looks == 1 {
                    looked.wait();
                }
                if is_last {
                    return looks;
                }
            }
        });
        let workers: Vec<_> = streams
            .iter()
            .map(|&stream| {
                let (rig, looked) = (&rig, &looked);
                scope.spawn(move || {
                    looked.wait();
                    let mut kept = Vec::new();
                    for i in 0..ROUNDS {
                        kept.push(rig.malloc(size(i), stream));
                        if kept.len() == 50 {
                            kept.drain(..).for_each(|address| assert!(rig.heap.free(address)));
                        }
                    }
                    kept.into_iter().for_each(|address| assert!(rig.heap.free(address)));
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        done.store(true, Ordering::Release);
        assert!(watcher.join().unwrap() > 1);
    });
    let stats = rig.heap.torch_stats(0).unwrap().blocks;
    let bytes: u64 = (0..ROUNDS).map(size).sum::<u64>() * THREADS;
    let all = stats.allocation[ALL];
    assert_eq!((all.current, all.allocated, all.freed), (0, THREADS * ROUNDS, THREADS * ROUNDS));
    let all = stats.allocated_bytes[ALL];
    assert_eq!((all.current, all.allocated, all.freed), (0, bytes, bytes));
    assert!((50..=50 * THREADS).contains(&stats.allocation[ALL].peak));
    rig.check();
}

#[test]
fn retries_out_of_memories_and_synchronisations_are_counted_and_reset() {
    let rig = Rig::bare(GIB, "headroom:0");
    rig.heap.announce_hooks(3);
    let Err(gruyere::heap::Error::OutOfMemory(mut report)) = rig.heap.malloc(2 * GIB, 0, DEFAULT)
    else {
        panic!("a gigabyte is not enough")
    };
    let held = rig.heap.torch_stats(0).unwrap().held;
    assert_eq!((held.retries, held.out_of_memories), (1, 0), "a door may know another way");
    rig.heap.note_out_of_memory(&mut report, DEFAULT);
    let held = rig.heap.torch_stats(0).unwrap().held;
    assert_eq!((held.retries, held.out_of_memories, report.count), (1, 1, 1));
    assert!(held.synchronisations >= 1);
    rig.heap.reset_accumulated(0).unwrap();
    let held = rig.heap.torch_stats(0).unwrap().held;
    assert_eq!((held.retries, held.out_of_memories, held.synchronisations), (0, 0, 0));
    assert_eq!(
        rig.heap.stats(0).unwrap().out_of_memories,
        1,
        "the record's count is of the whole life"
    );
}

fn is_segment(action: Action) -> bool {
    use Action::{SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap};
    matches!(action, SegmentAlloc | SegmentFree | SegmentMap | SegmentUnmap)
}

#[test]
fn the_history_tells_every_block_in_order_with_where_it_came_from() {
    for backing in BACKINGS {
        let rig = Rig::new(backing);
        let before = rig.malloc(4096, DEFAULT);
        rig.heap.start_history(100, false);
        let outer = history::set_context(7);
        let small = rig.malloc(1000, DEFAULT);
        let large = rig.malloc(3 * MIB, DEFAULT);
        assert_eq!(history::set_context(outer), 7);
        rig.heap.free(small);
        rig.heap.free(before);
        assert!(!rig.heap.free(before), "what is no block");
        let found = rig.heap.history();
        let told: Vec<_> = found
            .entries
            .iter()
            .filter(|entry| !is_segment(entry.action))
            .map(|entry| (entry.action, entry.address, entry.bytes, entry.context, entry.origin))
            .collect();
        let expected = [
            (Action::Alloc, small, 1000, 7, 0),
            (Action::Alloc, large, 3 * MIB, 7, 0),
            (Action::FreeRequested, small, 1000, 0, 7),
            (Action::FreeCompleted, small, 1000, 0, 7),
            (Action::FreeRequested, before, 4096, 0, 0),
            (Action::FreeCompleted, before, 4096, 0, 0),
        ];
        assert_eq!(told, expected, "{backing}");
        let origins: Vec<_> =
            found.origins.iter().map(|origin| (origin.address, origin.context)).collect();
        assert_eq!(origins, [(large, 7)], "{backing}");
        assert_eq!(found.lost, 0);
        rig.heap.stop_history();
        assert!(!rig.heap.has_history());
        rig.heap.free(large);
        assert!(rig.heap.history().entries.is_empty());
        rig.check();
    }
}

#[test]
fn a_free_that_waits_for_a_stream_is_completed_when_the_stream_is_past_it() {
    let rig = Rig::new("backing:pool");
    let other = rig.stream();
    for size in [4096, 3 * MIB] {
        rig.heap.start_history(100, true);
        let block = rig.malloc(size, DEFAULT);
        rig.heap.record_stream(block, other);
        rig.heap.free(block);
        let of = |found: &history::Collected| {
            let mine = found
                .entries
                .iter()
                .filter(|entry| entry.address == block && !is_segment(entry.action));
            mine.map(|entry| entry.action).collect::<Vec<_>>()
        };
        assert_eq!(of(&rig.heap.history()), [Action::Alloc, Action::FreeRequested]);
        rig.heap.trim();
        let expected = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
        assert_eq!(of(&rig.heap.history()), expected);
    }
}

#[test]
fn the_history_keeps_its_latest_entries_and_counts_the_others() {
    let rig = Rig::new("");
    // Memory is there already: nothing comes from the driver in between.
    rig.malloc(512, DEFAULT);
    rig.heap.start_history(10, false);
    for _ in 0..20 {
        rig.heap.free(rig.malloc(512, DEFAULT));
    }
    let found = rig.heap.history();
    assert_eq!((found.entries.len(), found.lost), (10, 50));
    rig.heap.start_history(0, true);
    let block = rig.malloc(512, DEFAULT);
    let found = rig.heap.history();
    assert!(found.entries.is_empty());
    assert_eq!(found.origins[0].address, block);
}

#[test]
fn the_history_tells_of_spans_and_of_what_could_not_be_met() {
    let rig = Rig::bare(GIB, "backing:fixed,record:on");
    rig.heap.announce_hooks(3);
    rig.heap.start_history(100, false);
    let block = rig.malloc(64 * MIB, DEFAULT);
    rig.heap.free(block);
    rig.heap.trim();
    let Err(gruyere::heap::Error::OutOfMemory(mut report)) = rig.heap.malloc(2 * GIB, 0, DEFAULT)
    else {
        panic!("a gigabyte is not enough")
    };
    assert_eq!(rig.heap.latest_out_of_memory(), None);
    rig.heap.note_out_of_memory(&mut report, DEFAULT);
    assert_eq!(rig.heap.latest_out_of_memory().map(|report| report.asked), Some(2 * GIB));
    let found = rig.heap.history();
    let spans = |action: Action| {
        found
            .entries
            .iter()
            .filter(|entry| entry.action == action)
            .map(|entry| entry.bytes)
            .sum::<u64>()
    };
    assert_eq!(spans(Action::SegmentAlloc), spans(Action::SegmentFree));
    assert!(spans(Action::SegmentAlloc) >= 64 * MIB);
    assert_eq!(spans(Action::OutOfMemory), 2 * GIB);
}

/// Held memory by the history alone: pieces of 512 B.
fn replay(found: &history::Collected) -> BTreeSet<u64> {
    let mut held = BTreeSet::new();
    for entry in &found.entries {
        let pieces = (entry.address..entry.address + entry.bytes).step_by(512);
        match entry.action {
            Action::SegmentAlloc | Action::SegmentMap => {
                pieces.for_each(|piece| assert!(held.insert(piece), "{piece:#x} came twice"));
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                pieces.for_each(|piece| {
                    assert!(held.remove(&piece), "{piece:#x} went before it came")
                });
            }
            // A block lies in held memory.
            Action::Alloc => {
                pieces.for_each(|piece| assert!(held.contains(&piece), "{piece:#x} is not held"))
            }
            _ => {}
        }
    }
    held
}

#[test]
fn the_history_of_segments_ends_at_what_the_snapshot_shows() {
    for backing in BACKINGS {
        // A limit that makes pages move.
        let rig = Rig::new(&format!("{backing},limit:48MiB,headroom:0,slack:1%"));
        rig.heap.start_history(usize::MAX, false);
        let mut random = 1u64;
        let mut next = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % most
        };
        let mut kept = Vec::new();
        for turn in 0..300 {
            if kept.len() > 6 || (!kept.is_empty() && next(3) == 0) {
                rig.heap.free(kept.swap_remove(next(kept.len() as u64) as usize));
            } else {
                let most = [4096, 5 * MIB][next(2) as usize];
                kept.extend(rig.heap.malloc(1 + next(most), 0, DEFAULT));
            }
            if turn % 100 == 99 {
                rig.heap.trim();
            }
            if turn % 75 == 74 {
                let snapshot = rig.heap.snapshot(0).unwrap();
                let segments = snapshot.segments.iter();
                let told: BTreeSet<u64> = segments
                    .flat_map(|segment| {
                        (segment.address..segment.address + segment.bytes).step_by(512)
                    })
                    .collect();
                assert_eq!(replay(&rig.heap.history()), told, "{backing}, turn {turn}");
            }
        }
        let moved =
            rig.heap.history().entries.iter().any(|entry| entry.action == Action::SegmentUnmap);
        assert_eq!(moved, backing.starts_with("backing:stitch"));
        rig.check();
    }
}

#[test]
fn two_devices_are_told_apart() {
    let mut config = GpuConfig::new(4 * GIB);
    config.devices.push(config.devices[0].clone());
    let rig = Rig::over(config, "");
    rig.heap.announce_hooks(3);
    let here = rig.malloc(MIB, DEFAULT);
    let there = rig.heap.malloc(5 * MIB, 1, DEFAULT).unwrap();
    for (device, address, bytes) in [(0, here, MIB), (1, there, 5 * MIB)] {
        let snapshot = rig.heap.snapshot(device).unwrap();
        let told: Vec<_> = blocks(&snapshot, BlockState::Allocated).collect();
        assert_eq!(told, [(address, bytes, bytes)]);
        assert_eq!(
            rig.heap.torch_stats(device).unwrap().blocks.allocated_bytes[ALL].current,
            bytes
        );
    }
}

#[test]
fn a_device_that_there_is_not_is_an_error_and_an_unused_one_is_empty() {
    let rig = Rig::new("");
    for missing in [-1, 1, 63, 64, i64::MAX] {
        assert!(
            matches!(rig.heap.snapshot(missing), Err(Error::NoSuchDevice(id)) if id == missing)
        );
        assert!(
            matches!(rig.heap.capture_pools(missing), Err(Error::NoSuchDevice(id)) if id == missing)
        );
    }
    assert!(rig.heap.snapshot(0).unwrap().segments.is_empty());
    assert!(rig.heap.capture_pools(0).unwrap().is_empty());
}
