//! Threads in one heap: random programs on several streams, frees by other threads, trims, steps,
//! statistics and captures in between. Live blocks never overlap, stream order holds, and nothing
//! is lost.

use crate::common::{MIB, Random};
use crate::flaky::Plan;
use crate::world::World;
use gruyere::driver::StreamHandle;
use gruyere::heap::{Error, Lifetime, lifetime};
use gruyere_phantom::{CaptureMode, Config as GpuConfig, as_program};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Live blocks by address: bytes and number.
type Live = BTreeMap<u64, (u64, u64)>;

struct Arena {
    world: World,
    streams: Vec<StreamHandle>,
    live: Mutex<Live>,
    /// Blocks that any thread may free.
    handed: Mutex<Vec<(u64, u64)>>,
    done: AtomicBool,
    oracle: bool,
}

impl Arena {
    fn new(conf: &str, oracle: bool, memory: u64) -> Self {
        let gpu = GpuConfig { oracle, ..GpuConfig::new(memory) };
        let world = World::seeded(gpu, conf, 42);
        world.rig.heap.announce_hooks(3);
        let streams = (0..3).map(|_| world.rig.passing_stream()).collect();
        Self {
            world,
            streams,
            live: Mutex::default(),
            handed: Mutex::default(),
            done: AtomicBool::new(false),
            oracle,
        }
    }

    fn malloc(&self, size: u64, stream: StreamHandle) -> Option<(u64, u64)> {
        let address = match self.world.rig.heap.malloc(size, 0, stream) {
            Ok(address) => address,
            Err(Error::OutOfMemory(_) | Error::Driver(_)) => return None,
            Err(other) => panic!("{other}"),
        };
        let stamp = self.world.next_id();
        {
            let mut live = self.live.lock().unwrap();
            let before = live.range(..address + size).next_back();
            if let Some((&other, &(bytes, _))) = before {
                assert!(
                    other + bytes <= address,
                    "{address:#x} of {size} B overlaps {other:#x} of {bytes} B"
                );
            }
            live.insert(address, (size, stamp));
        }
        if self.oracle {
            self.world.rig.gpu.block_malloc(stamp, address, size, 0, stream.0);
        }
        Some((address, stamp))
    }

    fn free(&self, (address, stamp): (u64, u64)) {
        let (_, found) = self.live.lock().unwrap().remove(&address).unwrap();
        assert_eq!(found, stamp, "{address:#x} was handed out twice");
        if self.oracle {
            self.world.rig.gpu.block_free(address);
        }
        assert!(self.world.rig.heap.free(address));
    }

    fn record_stream(&self, address: u64, stream: StreamHandle) {
        if self.oracle {
            self.world.rig.gpu.block_record_stream(address, 0, stream.0);
        }
        assert!(self.world.rig.heap.record_stream(address, stream));
    }

    fn run(&self, seed: u64) {
        let mut random = Random(seed);
        let mut own = Vec::new();
        while !self.done.load(Ordering::Relaxed) {
            let stream = self.streams[random.below(self.streams.len() as u64) as usize];
            match random.below(72) {
                0..28 => {
                    let size = match random.below(12) {
                        0..6 => 1 + random.below(8192),
                        6..10 => 8192 + random.below(MIB),
                        10 => MIB + random.below(8 * MIB),
                        _ => 1 + random.below(64 * MIB),
                    };
                    assert!(lifetime::push(Lifetime::ALL[random.below(4) as usize]));
                    own.extend(self.malloc(size, stream));
                    assert!(lifetime::pop());
                }
                28..46 if !own.is_empty() => {
                    self.free(own.swap_remove(random.below(own.len() as u64) as usize));
                }
                46..52 if !own.is_empty() => {
                    let block = own.swap_remove(random.below(own.len() as u64) as usize);
                    self.handed.lock().unwrap().push(block);
                }
                52..58 => {
                    let block = self.handed.lock().unwrap().pop();
                    if let Some(block) = block {
                        self.free(block);
                    }
                }
                58..60 if !own.is_empty() => {
                    self.record_stream(own[random.below(own.len() as u64) as usize].0, stream);
                }
                60 if random.below(8) == 0 => {
                    self.world.rig.heap.trim();
                }
                61 => self.world.rig.heap.mark_step(),
                62 if random.below(8) == 0 => {
                    self.world.rig.heap.stats(0).unwrap();
                }
                63.. if self.oracle => {
                    as_program(|| self.world.rig.gpu.launch(0, stream.0, 1, 20_000)).unwrap()
                }
                _ => {}
            }
            while own.len() > 200 {
                self.free(own.swap_remove(random.below(own.len() as u64) as usize));
            }
        }
        own.into_iter().for_each(|block| self.free(block));
    }

    /// Captures one graph after another, on its own stream, while the other threads go on.
    fn capture(&self) {
        let stream = self.world.rig.passing_stream();
        let mut random = Random(99);
        for graph in 1.. {
            if self.done.load(Ordering::Relaxed) {
                break;
            }
            self.world.rig.heap.begin_allocate_to_pool(0, (0, graph)).unwrap();
            as_program(|| {
                self.world.rig.gpu.begin_capture(0, stream.0, CaptureMode::Relaxed, None)
            })
            .unwrap();
            let blocks: Vec<_> =
                (0..10).filter_map(|_| self.malloc(1 + random.below(2 * MIB), stream)).collect();
            as_program(|| self.world.rig.gpu.launch(0, stream.0, 1, 1000)).unwrap();
            blocks.into_iter().for_each(|block| self.free(block));
            let graph_handle = as_program(|| self.world.rig.gpu.end_capture(0, stream.0)).unwrap();
            self.world.rig.heap.end_allocate_to_pool(0, (0, graph)).unwrap();
            as_program(|| self.world.rig.gpu.graph_destroy(0, graph_handle)).unwrap();
            self.world.rig.heap.release_pool(0, (0, graph)).unwrap();
        }
    }

    /// Runs `threads` threads for `time`, then frees everything; nothing is held.
    fn play(&self, threads: u64, captures: bool, time: Duration) {
        let until = Instant::now() + time;
        std::thread::scope(|scope| {
            let mut workers: Vec<_> =
                (0..threads).map(|seed| scope.spawn(move || self.run(seed + 1))).collect();
            if captures {
                workers.push(scope.spawn(|| self.capture()));
            }
            // A failing thread ends the others too.
            while Instant::now() < until && workers.iter().all(|worker| !worker.is_finished()) {
                std::thread::sleep(Duration::from_millis(10));
            }
            self.done.store(true, Ordering::Relaxed);
        });
        self.world.driver.set(Plan::Sound);
        let handed = std::mem::take(&mut *self.handed.lock().unwrap());
        handed.into_iter().for_each(|block| self.free(block));
        self.world.rig.heap.validate().unwrap();
        assert_eq!(self.world.rig.heap.stats(0).unwrap().live, 0);
        self.world.check_all_comes_back();
        assert!(self.world.next_id() > 1000, "hardly anything was allocated");
    }
}

const TIME: Duration = Duration::from_millis(1500);

#[test]
fn live_blocks_of_threads_never_overlap() {
    for conf in
        ["backing:pool,record:on", "backing:fixed,record:on", "backing:passthrough,record:on"]
    {
        Arena::new(conf, false, 16 << 30).play(6, false, TIME);
    }
}

#[test]
fn threads_keep_to_stream_order_with_little_memory_too() {
    for memory in [16 << 30, 700 * MIB] {
        Arena::new("backing:pool,headroom:0,record:on", true, memory).play(4, false, TIME);
    }
}

#[test]
fn a_thread_that_captures_is_not_disturbed_by_the_others() {
    for memory in [16 << 30, 1500 * MIB] {
        Arena::new("backing:pool,headroom:0,record:on", true, memory).play(4, true, TIME);
    }
}

#[test]
fn nothing_is_lost_when_driver_calls_of_threads_fail_at_random() {
    for conf in ["backing:pool,headroom:0,record:on", "backing:fixed,headroom:0,record:on"] {
        for memory in [16 << 30, 700 * MIB] {
            let arena = Arena::new(conf, true, memory);
            arena.world.rig.heap.free(arena.world.rig.heap.malloc(1, 0, StreamHandle(0)).unwrap());
            arena.world.driver.set(Plan::OneIn(20));
            arena.play(4, false, TIME);
        }
    }
}
