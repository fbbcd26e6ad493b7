//! A program on the simulator, with every block watched by the oracle, over a driver with
//! injectable faults.

use crate::common::Rig;
use crate::flaky::FlakyDriver;
use gruyere::driver::StreamHandle;
use gruyere::heap::Error;
use gruyere_phantom::{
    CallKind, Caller, CaptureMode, Config as GpuConfig, Gpu, as_program, vouching,
};
use gruyere_phantom_driver::PhantomDriver;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub struct World {
    pub rig: Rig,
    /// Sound until a test injects faults.
    pub driver: Arc<FlakyDriver>,
    blocks: AtomicU64,
    /// The stream of each block ever allocated, by address: the latest one there.
    pub streams: Mutex<HashMap<u64, StreamHandle>>,
}

impl World {
    /// One device of `memory` bytes, the record off, the hooks announced.
    pub fn new(memory: u64, conf: &str) -> Self {
        let world = Self::over(GpuConfig::new(memory), conf);
        world.rig.heap.announce_hooks(3);
        world
    }

    /// Without the hooks.
    pub fn over(config: GpuConfig, conf: &str) -> Self {
        Self::seeded(config, conf, 0)
    }

    /// Without the hooks, over a driver whose random faults follow from `seed`.
    pub fn seeded(config: GpuConfig, conf: &str, seed: u64) -> Self {
        let gpu = Arc::new(Gpu::new(config));
        let driver = Arc::new(FlakyDriver::new(PhantomDriver::new(gpu.clone()), seed));
        Self {
            rig: Rig::with(gpu, driver.clone(), conf),
            driver,
            blocks: AtomicU64::new(0),
            streams: Mutex::default(),
        }
    }

    /// The oracle's number for the next block.
    pub fn next_id(&self) -> u64 {
        self.blocks.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn try_malloc(&self, size: u64, device: u32, stream: StreamHandle) -> Result<u64, Error> {
        let address = vouching(stream.0, || self.rig.heap.malloc(size, i64::from(device), stream))?;
        self.rig.gpu.block_malloc(self.next_id(), address, size, device, stream.0);
        self.streams.lock().unwrap().insert(address, stream);
        Ok(address)
    }

    /// `None` if memory ran out or the driver failed.
    pub fn malloc_if_possible(&self, size: u64, stream: StreamHandle) -> Option<u64> {
        match self.try_malloc(size, 0, stream) {
            Ok(address) => Some(address),
            Err(Error::OutOfMemory(_) | Error::Driver(_)) => None,
            Err(other) => panic!("{other}"),
        }
    }

    #[track_caller]
    pub fn malloc(&self, size: u64, stream: StreamHandle) -> u64 {
        self.try_malloc(size, 0, stream).unwrap()
    }

    #[track_caller]
    pub fn free(&self, address: u64) {
        self.rig.gpu.block_free(address);
        assert!(self.rig.heap.free(address), "{address:#x} is not live");
    }

    pub fn record_stream(&self, address: u64, stream: StreamHandle) {
        self.rig.gpu.block_record_stream(address, 0, stream.0);
        assert!(self.rig.record_stream(address, stream));
    }

    /// Work of `kernels` kernels of 20 us.
    pub fn launch(&self, stream: StreamHandle, kernels: u64) {
        as_program(|| self.rig.gpu.launch(0, stream.0, kernels, 20_000)).unwrap();
    }

    /// The allocator's calls of `kind`.
    pub fn count(&self, kind: CallKind) -> u64 {
        self.rig.gpu.counts(Caller::Allocator).of(kind)
    }

    pub fn physical(&self) -> u64 {
        self.rig.gpu.books(0).physical
    }

    #[track_caller]
    pub fn check(&self) {
        self.rig.check_order();
    }

    /// With nothing live and no graph left, all memory must come back.
    #[track_caller]
    pub fn check_all_comes_back(&self) {
        self.rig.heap.trim();
        self.rig.heap.trim();
        self.check();
        assert_eq!(self.rig.heap.stats(0).map_or(0, |stats| stats.captured), 0);
        assert_eq!(self.physical(), 0, "memory is lost");
    }
}

/// Graphs. Pool ids are small numbers, also the oracle's groups.
impl World {
    pub fn open(&self, pool: u64) {
        self.rig.heap.begin_allocate_to_pool(0, (0, pool)).unwrap();
    }

    pub fn close(&self, pool: u64) {
        self.rig.heap.end_allocate_to_pool(0, (0, pool)).unwrap();
    }

    pub fn release(&self, pool: u64) {
        self.rig.heap.release_pool(0, (0, pool)).unwrap();
    }

    pub fn capture(&self, pool: u64, stream: StreamHandle) {
        as_program(|| self.rig.gpu.begin_capture(0, stream.0, CaptureMode::Global, Some(pool)))
            .unwrap();
    }

    pub fn end_capture(&self, stream: StreamHandle) -> u64 {
        as_program(|| self.rig.gpu.end_capture(0, stream.0)).unwrap()
    }

    /// As torch.cuda.graph: the hook, then the capture.
    pub fn begin(&self, pool: u64, stream: StreamHandle) {
        self.open(pool);
        self.capture(pool, stream);
    }

    pub fn end(&self, pool: u64, stream: StreamHandle) -> u64 {
        let graph = self.end_capture(stream);
        self.close(pool);
        graph
    }

    pub fn replay(&self, graph: u64, stream: StreamHandle) {
        as_program(|| self.rig.gpu.replay(0, graph, stream.0)).unwrap();
    }

    pub fn destroy(&self, graph: u64) {
        as_program(|| self.rig.gpu.graph_destroy(0, graph)).unwrap();
    }
}
