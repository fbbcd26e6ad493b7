//! The project's models of torch's allocators, on the same trace.

use gruyere::driver::{Driver, StreamHandle};
use gruyere_replay::allocator::Allocator;
use gruyere_replay::instant::InstantDevice;
use gruyere_replay::peers::Torch;
use gruyere_replay::trace::{Op, Trace};
use std::sync::Arc;

/// The peak of physical bytes on a device of `capacity` bytes.
pub fn peak(trace: &Trace, expandable: bool, capacity: u64) -> Result<u64, String> {
    let device = Arc::new(InstantDevice::new(capacity));
    let driver: Arc<dyn Driver> = device.clone();
    let made = if expandable { Torch::expandable(&driver) } else { Torch::native(&driver) };
    let mut torch = made.map_err(|error| error.to_string())?;
    let mut blocks = vec![(0, 0, StreamHandle(0)); trace.blocks as usize];
    for &op in &trace.ops {
        let stream = |index: u16| StreamHandle(trace.streams[index as usize] as usize);
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
    Ok(device.peak())
}
