//! The engine: replays a trace through an allocator on a stage.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::allocator::{AllocError, Allocator};
use crate::stage::{NewBlock, Stage, StageError};
use crate::trace::{Op, Trace, rounded};
use gruyere::driver::{DeviceId, DevicePtr, StreamHandle};
use std::collections::HashMap;
use std::fmt;

/// The end of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Every operation succeeded.
    Completed,
    /// The allocator ran out of memory at this operation.
    OutOfMemory {
        /// Index into [`Trace::ops`].
        op: usize,
    },
}

/// Reasons for a replay to break off: neither completed nor out of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayError {
    /// The allocator failed at the operation with this index.
    Allocator(usize, AllocError),
    /// The program's own call failed at the operation with this index.
    Program(usize, StageError),
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allocator(op, error) => write!(f, "at operation {op}: {error}"),
            Self::Program(op, error) => write!(f, "at operation {op}: {error}"),
        }
    }
}

impl std::error::Error for ReplayError {}

/// An observer of each allocation and free of a replay.
pub trait Watch {
    /// Called after an operation with the `live` bytes (each block rounded up to 512); `held`
    /// queries the stage.
    fn after(&mut self, live: u64, held: impl FnOnce() -> u64);
}

/// Observes nothing.
pub struct Blind;

impl Watch for Blind {
    fn after(&mut self, _live: u64, _held: impl FnOnce() -> u64) {}
}

/// A block's place; address 0: not live.
#[derive(Clone, Copy, Default)]
struct Place {
    address: DevicePtr,
    size: u64,
    stream: u16,
    device: u8,
}

/// The blocks of a replay, to free the remaining ones after the trace.
pub struct Blocks(Vec<Place>);

impl Blocks {
    /// No live block, room for those of `trace`.
    pub fn new(trace: &Trace) -> Self {
        Self(vec![Place::default(); trace.blocks()])
    }

    /// Frees the blocks that the trace left live.
    ///
    /// # Errors
    /// As [`replay`].
    pub fn free_all<A: Allocator + ?Sized, S: Stage>(
        &mut self,
        trace: &Trace,
        stage: &mut S,
        allocator: &mut A,
    ) -> Result<(), ReplayError> {
        let end = trace.ops.len();
        for place in self.0.iter_mut().map(std::mem::take).filter(|place| place.address != 0) {
            let device = place.device.into();
            let handle =
                stage.stream(device, place.stream).map_err(|e| ReplayError::Program(end, e))?;
            stage.block_free(place.address);
            allocator
                .free(place.address, place.size, device, handle)
                .map_err(|e| ReplayError::Allocator(end, e))?;
        }
        Ok(())
    }
}

/// Streams announced to the allocator.
struct Announced(Vec<Vec<bool>>);

impl Announced {
    fn new(trace: &Trace) -> Self {
        Self(vec![vec![false; trace.streams.len()]; trace.devices.into()])
    }

    /// Announces once that a stream lasts: no trace has a stream's end.
    fn announce<A: Allocator + ?Sized>(
        &mut self,
        allocator: &mut A,
        (device, stream): (u8, u16),
        handle: StreamHandle,
    ) {
        let told = &mut self.0[usize::from(device)][usize::from(stream)];
        if !std::mem::replace(told, true) {
            allocator.stream_lasts(device.into(), handle);
        }
    }
}

/// Replays `trace` through `allocator`; the program's own calls go to `stage`.
///
/// # Errors
/// [`ReplayError`] if a call fails for any reason but lack of memory.
pub fn replay<A: Allocator + ?Sized, S: Stage>(
    trace: &Trace,
    stage: &mut S,
    allocator: &mut A,
    watch: &mut impl Watch,
) -> Result<End, ReplayError> {
    replay_into(trace, stage, allocator, watch, &mut Blocks::new(trace))
}

/// [`replay`] that leaves the remaining live blocks in `blocks`.
///
/// # Errors
/// As [`replay`].
pub fn replay_into<A: Allocator + ?Sized, S: Stage>(
    trace: &Trace,
    stage: &mut S,
    allocator: &mut A,
    watch: &mut impl Watch,
    Blocks(blocks): &mut Blocks,
) -> Result<End, ReplayError> {
    let homes = homes(trace);
    if trace.ranks() == 1 {
        allocator.is_alone();
    }
    let mut announced = Announced::new(trace);
    let mut marks = HashMap::new();
    let mut live = 0;
    for (index, &op) in trace.ops.iter().enumerate() {
        let program = |error| ReplayError::Program(index, error);
        let refused = |error| ReplayError::Allocator(index, error);
        match op {
            Op::Alloc { size, block, stream, device } => {
                let handle = stage.stream(device.into(), stream).map_err(program)?;
                announced.announce(allocator, (device, stream), handle);
                stage.operation();
                let address = match allocator.malloc(size, device.into(), handle) {
                    Ok(address) => address,
                    Err(AllocError::OutOfMemory) => return Ok(End::OutOfMemory { op: index }),
                    Err(error) => return Err(refused(error)),
                };
                if address != 0 {
                    let new = NewBlock { address, size, device: device.into(), stream: handle };
                    stage.block_malloc(trace.ids[block as usize], new);
                }
                blocks[block as usize] = Place { address, size, stream, device };
                live += rounded(size);
                watch.after(live, || stage.held());
            }
            Op::Free { block } => {
                let Place { address, size, stream, device } =
                    std::mem::take(&mut blocks[block as usize]);
                let handle = stage.stream(device.into(), stream).map_err(program)?;
                if address != 0 {
                    stage.block_free(address);
                }
                stage.operation();
                allocator.free(address, size, device.into(), handle).map_err(refused)?;
                live -= rounded(size);
                watch.after(live, || stage.held());
            }
            Op::RecordStream { block, stream } => {
                let Place { address, device, .. } = blocks[block as usize];
                if address != 0 {
                    let handle = stage.stream(device.into(), stream).map_err(program)?;
                    announced.announce(allocator, (device, stream), handle);
                    stage.block_record_stream(device.into(), address, handle);
                    allocator.record_stream(address, handle).map_err(refused)?;
                }
            }
            Op::Kernels { count, stream } => {
                stage.launch(homes[stream as usize], stream, count).map_err(program)?;
            }
            Op::EventRecord { event, stream } => {
                let home = homes[stream as usize];
                let handle = stage.stream(home, stream).map_err(program)?;
                announced.announce(allocator, (home as u8, stream), handle);
                marks.insert(event, allocator.mark_work(home, handle));
                stage.record(home, stream, event).map_err(program)?;
            }
            Op::StreamWait { event, stream } => {
                let home = homes[stream as usize];
                stage.wait(home, stream, event).map_err(program)?;
                if let Some(&Some(mark)) = marks.get(&event) {
                    let handle = stage.stream(home, stream).map_err(program)?;
                    announced.announce(allocator, (home as u8, stream), handle);
                    allocator.stream_waits(home, handle, mark);
                }
            }
            Op::HostWaitEvent { event } => stage.host_wait_event(event).map_err(program)?,
            Op::HostWaitStream { stream } => {
                stage.host_wait_stream(homes[stream as usize], stream).map_err(program)?;
            }
            Op::HostWaitDevice => stage.host_wait_devices().map_err(program)?,
            Op::Step => {
                stage.end_step();
                allocator.step();
            }
            Op::Mark { .. } => {}
        }
    }
    Ok(End::Completed)
}

/// The device of each stream for lines without a device: that of its first allocation.
fn homes(trace: &Trace) -> Vec<DeviceId> {
    let mut homes = vec![None; trace.streams.len()];
    homes[0] = Some(0);
    for op in &trace.ops {
        if let Op::Alloc { stream, device, .. } = *op {
            homes[stream as usize].get_or_insert(device.into());
        }
    }
    homes.into_iter().map(Option::unwrap_or_default).collect()
}

/// An allocator without costs and without end: only addresses, none used twice. Gives the best
/// possible timeline.
#[derive(Default)]
pub struct Perfect {
    next: DevicePtr,
}

impl Allocator for Perfect {
    fn name(&self) -> &str {
        "perfect"
    }

    fn malloc(
        &mut self,
        size: u64,
        _device: DeviceId,
        _stream: StreamHandle,
    ) -> Result<DevicePtr, AllocError> {
        let address = self.next + rounded(1);
        self.next = address + rounded(size);
        Ok(address)
    }

    fn free(
        &mut self,
        _: DevicePtr,
        _: u64,
        _: DeviceId,
        _: StreamHandle,
    ) -> Result<(), AllocError> {
        Ok(())
    }

    fn record_stream(&mut self, _: DevicePtr, _: StreamHandle) -> Result<(), AllocError> {
        Ok(())
    }
}
