//! Shared parts of the heap's tests: a heap on the simulator.
#![allow(dead_code)]

use gruyere::config::Config;
use gruyere::driver::{Driver, StreamHandle};
use gruyere::heap::Heap;
use gruyere_phantom::{Config as GpuConfig, Gpu, SimResult, StreamKind, as_program, vouching};
use gruyere_phantom_driver::PhantomDriver;
use std::sync::Arc;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// Numbers drawn in an order that follows from the seed: Knuth's MMIX generator, its upper bits.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// Every way to get memory, each with the whole device.
pub const BACKINGS: [&str; 4] = [
    "backing:stitch,headroom:0",
    "backing:pool,headroom:0",
    "backing:fixed,headroom:0",
    "backing:passthrough",
];
/// Those of [`BACKINGS`] that keep memory.
pub const KEEPING: [&str; 3] = [BACKINGS[0], BACKINGS[1], BACKINGS[2]];

/// The program makes one stream of `device` wait for what another has now.
pub fn wait(gpu: &Gpu, device: u32, [waiting, other]: [StreamHandle; 2]) -> SimResult<()> {
    as_program(|| {
        let event = gpu.event_create(device)?;
        let waits = gpu
            .event_record(device, event, other.0)
            .and_then(|()| gpu.stream_wait_event(device, waiting.0, event));
        gpu.event_destroy(device, event)?;
        waits
    })
}

/// [`wait`], and the program tells the heap. False: the driver refused a call, which the heap is
/// then not told of.
pub fn wait_and_tell(
    gpu: &Gpu,
    heap: &Heap,
    device: u32,
    [waiting, other]: [StreamHandle; 2],
) -> bool {
    let mark = vouching(other.0, || heap.mark_work(device.into(), other));
    let waits = wait(gpu, device, [waiting, other]);
    if let (Ok(()), Some(mark)) = (&waits, mark) {
        vouching(waiting.0, || heap.stream_waits(device.into(), waiting, mark));
    }
    waits.is_ok()
}

/// The next malloc on `stream`: others may have what the stream had freed once they are behind its
/// work. The block stays. It takes a page of what is free unless the stream has a small block: call
/// it first too.
pub fn malloc_again(heap: &Heap, device: u32, stream: StreamHandle) {
    heap.malloc(512, device.into(), stream).unwrap();
}

/// A heap and its device.
pub struct Rig {
    pub gpu: Arc<Gpu>,
    pub heap: Heap,
}

impl Rig {
    /// One device of 16 GiB, with the hooks announced. The record is off unless `conf` turns it on.
    pub fn new(conf: &str) -> Self {
        let rig = Self::bare(16 * GIB, conf);
        rig.heap.announce_hooks(3);
        rig
    }

    /// One device of `memory` bytes, without the hooks.
    pub fn bare(memory: u64, conf: &str) -> Self {
        Self::over(GpuConfig::new(memory), conf)
    }

    /// Any simulated GPU.
    pub fn over(config: GpuConfig, conf: &str) -> Self {
        Self::on(&Arc::new(Gpu::new(config)), conf)
    }

    /// A heap on a GPU that other heaps may use too, as other processes would.
    pub fn on(gpu: &Arc<Gpu>, conf: &str) -> Self {
        Self::with(gpu.clone(), Arc::new(PhantomDriver::new(gpu.clone())), conf)
    }

    /// A heap over `driver`, which is one of `gpu`.
    pub fn with(gpu: Arc<Gpu>, driver: Arc<dyn Driver>, conf: &str) -> Self {
        let mut config = Config::parse(conf).unwrap();
        if !conf.contains("record") {
            config.heap.record = false;
        }
        if config.nvtx {
            gruyere::nvtx::attach();
        }
        let heap = Heap::new(driver, config.heap).unwrap();
        Self { gpu, heap }
    }

    /// A stream of the program, announced to the heap as lasting, like those of torch's pools.
    pub fn stream(&self) -> StreamHandle {
        self.stream_of(0)
    }

    /// As [`Rig::stream`], of any device.
    pub fn stream_of(&self, device: u32) -> StreamHandle {
        let created = as_program(|| self.gpu.stream_create(device, StreamKind::NonBlocking));
        let stream = StreamHandle(created.unwrap());
        self.gpu.stream_lasts(device, stream.0);
        vouching(stream.0, || self.heap.stream_lasts(device.into(), stream)).unwrap();
        stream
    }

    /// A stream of the program, not announced.
    pub fn passing_stream(&self) -> StreamHandle {
        StreamHandle(as_program(|| self.gpu.stream_create(0, StreamKind::NonBlocking)).unwrap())
    }

    /// Announces to the heap that a stream lasts.
    pub fn announce(&self, stream: StreamHandle) {
        self.gpu.stream_lasts(0, stream.0);
        vouching(stream.0, || self.heap.stream_lasts(0, stream)).unwrap();
    }

    /// Announces the end of a stream to the heap, and destroys it.
    pub fn end(&self, stream: StreamHandle) {
        vouching(stream.0, || self.heap.stream_ends(0, stream)).unwrap();
        self.destroy(stream);
    }

    /// Destroys a stream that was not announced.
    pub fn destroy(&self, stream: StreamHandle) {
        as_program(|| self.gpu.stream_destroy(0, stream.0)).unwrap();
    }

    pub fn malloc(&self, size: u64, stream: StreamHandle) -> u64 {
        vouching(stream.0, || self.heap.malloc(size, 0, stream)).unwrap()
    }

    pub fn record_stream(&self, address: u64, stream: StreamHandle) -> bool {
        vouching(stream.0, || self.heap.record_stream(address, stream))
    }

    /// Checks the heap's invariants and that the driver noted no misuse.
    pub fn check(&self) {
        self.heap.validate().unwrap();
        assert_eq!(self.gpu.misuses(), []);
    }
}

impl Rig {
    /// As [`Rig::check`], and that the oracle has found no fault.
    #[track_caller]
    pub fn check_order(&self) {
        self.check();
        let faults = self.gpu.faults();
        assert!(faults.is_empty(), "{} faults, the first: {}", faults.len(), faults[0]);
    }

    /// Ends the heap after all frees, and checks that the device is as empty as before.
    #[track_caller]
    pub fn finish(self) {
        assert_eq!(self.heap.stats(0).unwrap().live, 0);
        self.heap.trim();
        self.heap.trim();
        self.check_order();
        assert_eq!(self.gpu.books(0).physical, 0, "memory is lost");
        self.heap.shut_down();
    }
}

/// The legacy default stream.
pub const DEFAULT: StreamHandle = StreamHandle(0);
