//! What the heap's tests share: a heap on the stand-in GPU.
#![allow(dead_code)]

use gruyere::config::Config;
use gruyere::driver::StreamHandle;
use gruyere::heap::Heap;
use gruyere_phantom::{Config as GpuConfig, Gpu, StreamKind, as_program};
use gruyere_phantom_driver::PhantomDriver;
use std::sync::Arc;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// A heap, and the device under it.
pub struct Rig {
    pub gpu: Arc<Gpu>,
    pub heap: Heap,
}

impl Rig {
    /// One device of 16 GiB, with the hooks announced. The record is off unless `conf` says otherwise.
    pub fn new(conf: &str) -> Self {
        let rig = Self::bare(16 * GIB, conf);
        rig.heap.announce_hooks(3);
        rig
    }

    /// One device of `memory` bytes, without the hooks.
    pub fn bare(memory: u64, conf: &str) -> Self {
        Self::over(GpuConfig::new(memory), conf)
    }

    /// Any stand-in GPU.
    pub fn over(config: GpuConfig, conf: &str) -> Self {
        let gpu = Arc::new(Gpu::new(config));
        let mut config = Config::parse(conf).unwrap();
        if !conf.contains("record") {
            config.record = false;
        }
        let heap = Heap::new(Arc::new(PhantomDriver::new(gpu.clone())), config).unwrap();
        Self { gpu, heap }
    }

    /// A stream of the program's.
    pub fn stream(&self) -> StreamHandle {
        StreamHandle(as_program(|| self.gpu.stream_create(0, StreamKind::NonBlocking)).unwrap())
    }

    pub fn malloc(&self, size: u64, stream: StreamHandle) -> u64 {
        self.heap.malloc(size, 0, stream).unwrap()
    }

    /// Checks the heap's invariants and that the driver noted no misuse.
    pub fn check(&self) {
        self.heap.validate().unwrap();
        assert_eq!(self.gpu.misuses(), []);
    }
}

/// The legacy default stream.
pub const DEFAULT: StreamHandle = StreamHandle(0);
