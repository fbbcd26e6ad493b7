//! The project's models of torch's allocators, on the same trace.

use gruyere::driver::{Driver, StreamHandle};
use gruyere_phantom::{Config, Costs, Gpu, StreamKind};
use gruyere_phantom_driver::PhantomDriver;
use gruyere_replay::allocator::Allocator;
use gruyere_replay::peers::Torch;
use gruyere_replay::trace::{Op, Trace};
use std::sync::Arc;

/// The peak of physical bytes on a device of `capacity` bytes.
pub fn peak(trace: &Trace, expandable: bool, capacity: u64) -> Result<u64, String> {
    let config = Config { costs: Costs::zero(), oracle: false, ..Config::new(capacity) };
    let gpu = Arc::new(Gpu::new(config));
    let driver: Arc<dyn Driver> = Arc::new(PhantomDriver::new(gpu.clone()));
    let made = if expandable { Torch::expandable(&driver) } else { Torch::native(&driver) };
    let mut torch = made.map_err(|error| error.to_string())?;
    let mut streams = vec![StreamHandle(0)];
    for _ in 1..trace.streams.len() {
        let handle = gpu.stream_create(0, StreamKind::NonBlocking).map_err(|error| error.to_string())?;
        streams.push(StreamHandle(handle));
    }
    let stream = |index: u16| streams[index as usize];
    let mut blocks = vec![(0, 0, StreamHandle(0)); trace.blocks()];
    for &op in &trace.ops {
        match op {
            Op::Alloc { size, block, stream: s, device } => {
                let address =
                    torch.malloc(size, device.into(), stream(s)).map_err(|error| error.to_string())?;
                blocks[block as usize] = (address, size, stream(s));
            }
            Op::Free { block } => {
                let (address, size, s) = blocks[block as usize];
                torch.free(address, size, 0, s).map_err(|error| error.to_string())?;
            }
            Op::RecordStream { block, stream: s } => {
                torch
                    .record_stream(blocks[block as usize].0, stream(s))
                    .map_err(|error| error.to_string())?;
            }
            _ => {}
        }
    }
    Ok(gpu.books(0).physical_peak)
}
