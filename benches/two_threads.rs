//! Two threads on two streams against one thread: `cargo bench --bench two_threads`.
//!
//! The library in process, the record on, over the stand-in GPU with costs of zero. Its one lock
//! would be what is measured: so the ids of streams and whether they capture, the only questions
//! that the steady state asks of the driver, are answered without it, as the CUDA driver does.
//! Rounds alternate between one thread, two, and two with a heap each (what the machine has to
//! give), so that what else the machine does meets them all.

use gruyere::config::Config;
use gruyere::driver::{CaptureStatus, Driver, Result, StreamHandle};
use gruyere::heap::Heap;
use gruyere_phantom::{Config as GpuConfig, Costs, Gpu, StreamKind, as_program};
use gruyere_phantom_driver::PhantomDriver;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::Instant;

/// The stand-in GPU's driver, but for what is asked of a stream at each malloc.
struct Quick(PhantomDriver);

macro_rules! answer {
    (capture_status, $driver:ident, $device:ident, $stream:ident) => {
        Ok(CaptureStatus::None)
    };
    (stream_id, $driver:ident, $device:ident, $stream:ident) => {
        Ok($stream.0 as u64)
    };
    ($name:ident, $driver:ident $(, $argument:ident)*) => {
        $driver.0.$name($($argument),*)
    };
}

macro_rules! quick {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $call:ident, $bytes:expr;)*) => {
        impl Driver for Quick {
            $(#[allow(unused_variables)]
            fn $name(&self, $($argument: $type),*) -> Result<$result> {
                let driver = self;
                answer!($name, driver $(, $argument)*)
            })*
        }
    };
}

gruyere::heap::each_driver_call!(quick);

/// What a thread asks for.
#[derive(Clone, Copy)]
enum Sizes {
    /// Up to 16 KiB: slots of slabs, without a shared lock.
    Small,
    /// Up to 64 KiB: three of four are runs, through the device's central lock.
    Medium,
    /// Mostly small, some up to a mebibyte; one in 64 above, through the device's central lock.
    Mix,
}

/// Blocks that a thread holds.
const HELD: usize = 256;

fn work(heap: &Heap, stream: StreamHandle, sizes: Sizes, operations: u64, seed: u64) {
    let mut random = seed;
    let mut held = [0u64; HELD];
    for _ in 0..operations / 2 {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = random >> 24;
        let size = match sizes {
            Sizes::Small => 1 + bits % 16_384,
            Sizes::Medium => 1 + bits % 65_536,
            Sizes::Mix if random >> 58 == 0 => (1 << 20) + 1 + bits % (16 << 20),
            Sizes::Mix if random >> 61 == 1 => 1 + bits % (1 << 20),
            Sizes::Mix => 1 + bits % 16_384,
        };
        let place = &mut held[(random >> 40) as usize % HELD];
        heap.free(std::mem::replace(place, black_box(heap.malloc(size, 0, stream)).unwrap_or(0)));
    }
    held.into_iter().for_each(|address| {
        heap.free(address);
    });
}

/// A heap over a stand-in GPU of its own, and a stream there.
struct Home {
    heap: Heap,
    gpu: Arc<Gpu>,
}

impl Home {
    fn new() -> std::result::Result<Self, Box<dyn std::error::Error>> {
        let config = GpuConfig { costs: Costs::zero(), oracle: false, ..GpuConfig::new(64 << 30) };
        let gpu = Arc::new(Gpu::new(config));
        let settings = Config::parse("record:on")?.heap;
        let heap = Heap::new(Arc::new(Quick(PhantomDriver::new(gpu.clone()))), settings)?;
        heap.announce_hooks(3);
        Ok(Self { heap, gpu })
    }

    fn stream(&self) -> std::result::Result<StreamHandle, Box<dyn std::error::Error>> {
        Ok(StreamHandle(as_program(|| self.gpu.stream_create(0, StreamKind::NonBlocking))?))
    }
}

/// Operations a second of one thread for each place, all at once.
fn measure(places: &[(&Heap, StreamHandle)], sizes: Sizes, operations: u64) -> f64 {
    let barrier = Barrier::new(places.len() + 1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = places
            .iter()
            .enumerate()
            .map(|(seed, &(heap, stream))| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    work(heap, stream, sizes, operations, seed as u64 + 1);
                })
            })
            .collect();
        barrier.wait();
        let start = Instant::now();
        for worker in workers {
            let _ = worker.join();
        }
        (operations * places.len() as u64) as f64 / start.elapsed().as_secs_f64()
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // Many and short: on a machine that others use too, some find both cores free.
    const ROUNDS: usize = 150;
    const OPERATIONS: u64 = 400_000;
    let all = [("small", Sizes::Small), ("medium", Sizes::Medium), ("mix", Sizes::Mix)];
    for (name, sizes) in all {
        let (home, other) = (Home::new()?, Home::new()?);
        let shared = [(&home.heap, home.stream()?), (&home.heap, home.stream()?)];
        // What the machine gives to two threads that have nothing in common.
        let apart = [shared[0], (&other.heap, other.stream()?)];
        measure(&shared, sizes, OPERATIONS);
        measure(&apart, sizes, OPERATIONS);
        let mut rounds = [Vec::new(), Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            let single = round % 2;
            for (rates, places) in
                rounds.iter_mut().zip([&shared[single..=single], &shared[..], &apart[..]])
            {
                rates.push(measure(places, sizes, OPERATIONS));
            }
        }
        let best = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let [one, two, control] = &rounds;
        for (what, rates) in
            [("one thread", one), ("two threads", two), ("two, a heap each", control)]
        {
            let ratios = one.iter().zip(rates).map(|(one, two)| two / one).collect();
            println!(
                "{name:<6} {what:<17} {:6.2} M operations a second, median ({:6.2} best); to one \
                 thread {:.2} ({:.2})",
                median(rates.clone()) / 1e6,
                best(rates) / 1e6,
                median(ratios),
                best(rates) / best(one)
            );
        }
        home.heap.shut_down();
        other.heap.shut_down();
    }
    Ok(())
}
