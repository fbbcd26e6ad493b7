//! Where a replay takes place: the device as the traced program sees it.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::clock::Clock;
use crate::trace::Trace;
use gruyere::driver::{DeviceId, DevicePtr, Driver, DriverError, EventHandle, StreamHandle};
use gruyere_phantom::{Caller, Config, Costs, Gpu, HostTime, SimError, StreamKind, as_program};
use gruyere_phantom_driver::PhantomDriver;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The program's side of a device: its streams, kernels, events and waits, and the books of what is
/// held.
///
/// Streams and events are the indices of the trace. A stream belongs to a device, so it has a
/// handle on each that uses it.
pub trait Stage {
    /// The handle of `stream` on `device`; created when first asked for, stream 0 being the default
    /// stream.
    ///
    /// # Errors
    /// A failed driver call.
    fn stream(&mut self, device: DeviceId, stream: u16) -> Result<StreamHandle, StageError>;
    /// Launches `count` kernels.
    ///
    /// # Errors
    /// A failed driver call.
    fn launch(&mut self, device: DeviceId, stream: u16, count: u32) -> Result<(), StageError>;
    /// Records `event`.
    ///
    /// # Errors
    /// A failed driver call.
    fn record(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError>;
    /// Makes `stream` wait for `event`.
    ///
    /// # Errors
    /// A failed driver call.
    fn wait(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError>;
    /// Waits on the host for `event`.
    ///
    /// # Errors
    /// A failed driver call.
    fn host_wait_event(&mut self, event: u32) -> Result<(), StageError>;
    /// Waits on the host for `stream`.
    ///
    /// # Errors
    /// A failed driver call.
    fn host_wait_stream(&mut self, device: DeviceId, stream: u16) -> Result<(), StageError>;
    /// Waits on the host for every device.
    ///
    /// # Errors
    /// A failed driver call.
    fn host_wait_devices(&mut self) -> Result<(), StageError>;
    /// Physical bytes that the process holds on all devices.
    fn held(&self) -> u64;
    /// The most that [`Stage::held`] ever was, between operations included where the stage can
    /// tell.
    fn held_peak(&self) -> u64;
    /// The program calls malloc or free.
    fn operation(&mut self) {}
    /// The program ends a step.
    fn end_step(&mut self) {}
    /// The allocator handed a block out; `id` is the trace's.
    fn block_malloc(&mut self, _id: u64, _block: NewBlock) {}
    /// The program is about to free the block at `address`.
    fn block_free(&mut self, _address: DevicePtr) {}
    /// The program is about to tell the allocator of another stream of the block at `address`.
    fn block_record_stream(
        &mut self,
        _device: DeviceId,
        _address: DevicePtr,
        _stream: StreamHandle,
    ) {
    }
}

/// A block that an allocator handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBlock {
    /// Where it is.
    pub address: DevicePtr,
    /// Bytes asked for.
    pub size: u64,
    /// Its device.
    pub device: DeviceId,
    /// Its stream.
    pub stream: StreamHandle,
}

/// A call of the program failed: the trace asks for what the device cannot do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageError(String);

impl fmt::Display for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a call of the traced program failed: {}", self.0)
    }
}

impl std::error::Error for StageError {}

impl From<SimError> for StageError {
    fn from(error: SimError) -> Self {
        Self(error.to_string())
    }
}

impl From<DriverError> for StageError {
    fn from(error: DriverError) -> Self {
        Self(error.to_string())
    }
}

/// Handles of streams by device, and of events; made when first used.
struct Handles {
    streams: Vec<Vec<Option<usize>>>,
    events: Vec<Option<(DeviceId, usize)>>,
}

impl Handles {
    fn new(trace: &Trace) -> Self {
        let streams = vec![vec![None; trace.streams.len()]; trace.devices.into()];
        Self { streams, events: vec![None; trace.events as usize] }
    }

    fn stream<E>(
        &mut self,
        device: DeviceId,
        stream: u16,
        create: impl FnOnce() -> Result<usize, E>,
    ) -> Result<usize, E> {
        if stream == 0 {
            return Ok(0);
        }
        let place = &mut self.streams[device as usize][stream as usize];
        match *place {
            Some(handle) => Ok(handle),
            None => create().inspect(|&handle| *place = Some(handle)),
        }
    }

    /// An event belongs to one device's context: recorded on another device's stream it is a new
    /// one.
    fn event<E>(
        &mut self,
        device: DeviceId,
        event: u32,
        create: impl FnOnce() -> Result<usize, E>,
    ) -> Result<usize, E> {
        let place = &mut self.events[event as usize];
        match *place {
            Some((of, handle)) if of == device => Ok(handle),
            _ => create().inspect(|&handle| *place = Some((device, handle))),
        }
    }

    fn recorded(&self, event: u32) -> Option<(DeviceId, usize)> {
        self.events[event as usize]
    }
}

/// What host time is charged for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Charge {
    /// Nothing.
    Nothing,
    /// Launches, mallocs and frees.
    Program,
    /// Those, and each driver call at its cost.
    DriverCalls,
}

/// Host time of a malloc or free itself, nanoseconds: the same for every allocator, of the order of
/// what torch's takes. With it the models hold on the timeline, to the digit, what the real
/// allocators were measured to hold.
pub const OPERATION_NS: u64 = 150;

/// How the stand-in GPU of a replay is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Physical bytes of each device.
    pub capacity: u64,
    /// Nanoseconds that a kernel takes; 0: all work is done as soon as it is enqueued.
    pub kernel_ns: u64,
    /// What host time costs.
    pub charge: Charge,
    /// The prices of driver calls, of which [`Setup::charge`] says which are charged.
    pub prices: Costs,
    /// The oracle of stream order watches.
    pub oracle: bool,
}

impl Setup {
    /// Nothing takes time: for peaks and for the smallest device.
    pub fn instant(capacity: u64) -> Self {
        Self {
            capacity,
            kernel_ns: 0,
            charge: Charge::Nothing,
            prices: Costs::default(),
            oracle: false,
        }
    }

    /// Kernels of 20 us, 8 us of host a launch, 0.15 us a malloc or free, the host at most 10 ms
    /// ahead.
    pub fn timeline(capacity: u64, charge: Charge) -> Self {
        Self { charge, oracle: true, ..Self::at(Clock::USUAL, capacity) }
    }

    /// The same with kernels of another length, driver calls free and no oracle; on
    /// [`Clock::INSTANT`] as [`Setup::instant`].
    pub fn at(clock: Clock, capacity: u64) -> Self {
        let charge = if clock.lags() { Charge::Program } else { Charge::Nothing };
        Self { kernel_ns: clock.kernel_ns(), charge, ..Self::instant(capacity) }
    }
}

/// A stand-in GPU.
pub struct PhantomStage {
    gpu: Arc<Gpu>,
    setup: Setup,
    handles: Handles,
    devices: DeviceId,
    /// At the end of each step: when all that is enqueued so far is done, device nanoseconds.
    step_ends: Vec<u64>,
}

impl PhantomStage {
    /// A fresh stand-in GPU with the devices that `trace` names.
    pub fn new(trace: &Trace, setup: Setup) -> Self {
        let mut config = Config::devices(trace.devices.into(), setup.capacity);
        config.oracle = setup.oracle;
        config.costs = match setup.charge {
            Charge::Nothing => Costs::zero(),
            Charge::Program => Costs { launch: setup.prices.launch, ..Costs::zero() },
            Charge::DriverCalls => setup.prices,
        };
        Self {
            gpu: Arc::new(Gpu::new(config)),
            setup,
            handles: Handles::new(trace),
            devices: trace.devices.into(),
            step_ends: Vec::new(),
        }
    }

    /// The driver that an allocator on this stage uses.
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::new(PhantomDriver::new(self.gpu.clone()))
    }

    /// Where the host's time went, and when the devices were done.
    pub fn time(&self) -> HostTime {
        self.gpu.host_time()
    }

    /// The device's time for the second half of the steps, nanoseconds: what a step takes once a
    /// run's memory has grown. `None`: there were fewer than two.
    pub fn later_steps_ns(&self) -> Option<u64> {
        let ends = &self.step_ends;
        Some(ends.last()? - ends.get(ends.len().checked_sub(2)? / 2)?)
    }

    /// Driver calls of the allocator.
    pub fn allocator_calls(&self) -> u64 {
        self.gpu.counts(Caller::Allocator).total()
    }

    /// The same by kind, under the driver's own names.
    pub fn allocator_calls_by_kind(&self) -> BTreeMap<String, u64> {
        let counts = self.gpu.counts(Caller::Allocator);
        counts.iter().map(|(kind, count)| (kind.name().to_owned(), count)).collect()
    }

    /// The most address space that was ever reserved, bytes.
    pub fn peak_address(&self) -> u64 {
        self.gpu.address_books().peak
    }

    /// The stand-in itself: its books and counts.
    pub fn gpu(&self) -> Arc<Gpu> {
        self.gpu.clone()
    }

    /// Misuses of the driver and violations of stream order so far, the oldest first.
    pub fn faults(&self) -> Vec<String> {
        let misuses = self.gpu.misuses();
        let misuses = misuses.iter().map(|misuse| format!("misuse of the driver: {misuse}"));
        misuses.chain(self.gpu.faults().iter().map(ToString::to_string)).collect()
    }
}

impl Stage for PhantomStage {
    fn end_step(&mut self) {
        self.step_ends.push(self.time().device_end);
    }

    fn stream(&mut self, device: DeviceId, stream: u16) -> Result<StreamHandle, StageError> {
        let gpu = &self.gpu;
        let create = || as_program(|| gpu.stream_create(device, StreamKind::NonBlocking));
        Ok(StreamHandle(self.handles.stream(device, stream, create)?))
    }

    fn launch(&mut self, device: DeviceId, stream: u16, count: u32) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?.0;
        Ok(as_program(|| self.gpu.launch(device, handle, count.into(), self.setup.kernel_ns))?)
    }

    fn record(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?.0;
        let gpu = &self.gpu;
        let event =
            self.handles.event(device, event, || as_program(|| gpu.event_create(device)))?;
        Ok(as_program(|| gpu.event_record(device, event, handle))?)
    }

    fn wait(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?.0;
        let Some((_, event)) = self.handles.recorded(event) else { return Ok(()) };
        Ok(as_program(|| self.gpu.stream_wait_event(device, handle, event))?)
    }

    fn host_wait_event(&mut self, event: u32) -> Result<(), StageError> {
        let Some((device, event)) = self.handles.recorded(event) else { return Ok(()) };
        Ok(as_program(|| self.gpu.event_synchronize(device, event))?)
    }

    fn host_wait_stream(&mut self, device: DeviceId, stream: u16) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?.0;
        Ok(as_program(|| self.gpu.stream_synchronize(device, handle))?)
    }

    fn host_wait_devices(&mut self) -> Result<(), StageError> {
        (0..self.devices)
            .try_for_each(|device| Ok(as_program(|| self.gpu.device_synchronize(device))?))
    }

    fn operation(&mut self) {
        if self.setup.charge != Charge::Nothing {
            self.gpu.host_spend(OPERATION_NS);
        }
    }

    fn block_malloc(&mut self, id: u64, block: NewBlock) {
        if self.setup.oracle {
            self.gpu.block_malloc(id, block.address, block.size, block.device, block.stream.0);
        }
    }

    fn block_free(&mut self, address: DevicePtr) {
        if self.setup.oracle {
            self.gpu.block_free(address);
        }
    }

    fn block_record_stream(&mut self, device: DeviceId, address: DevicePtr, stream: StreamHandle) {
        if self.setup.oracle {
            self.gpu.block_record_stream(address, device, stream.0);
        }
    }

    fn held(&self) -> u64 {
        (0..self.devices).map(|device| self.gpu.books(device).physical).sum()
    }

    fn held_peak(&self) -> u64 {
        (0..self.devices).map(|device| self.gpu.books(device).physical_peak).sum()
    }
}

/// A real device: streams, events and waits are real, kernels are left out.
pub struct DriverStage {
    driver: Arc<dyn Driver>,
    handles: Handles,
    devices: DeviceId,
    held_before: u64,
    peak: std::cell::Cell<u64>,
}

impl DriverStage {
    /// The devices behind `driver`, as they are now: what is held already is not counted.
    ///
    /// # Errors
    /// Where the driver has fewer devices than the trace names, or no usable one.
    pub fn new(trace: &Trace, driver: Arc<dyn Driver>) -> Result<Self, StageError> {
        let (devices, there) = (trace.devices.into(), driver.device_count()?);
        if devices > there {
            return Err(StageError(format!(
                "the trace names {devices} devices, there are {there}"
            )));
        }
        let mut stage = Self {
            driver,
            handles: Handles::new(trace),
            devices,
            held_before: 0,
            peak: std::cell::Cell::new(0),
        };
        stage.held_before = stage.used();
        Ok(stage)
    }

    fn used(&self) -> u64 {
        let info = (0..self.devices).filter_map(|device| self.driver.memory_info(device).ok());
        info.map(|info| info.total - info.free).sum()
    }
}

impl Drop for DriverStage {
    fn drop(&mut self) {
        // A failed call here changes nothing: the handles are gone either way.
        for &(device, event) in self.handles.events.iter().flatten() {
            let _ = self.driver.event_destroy(device, EventHandle(event));
        }
        for (device, streams) in self.handles.streams.iter().enumerate() {
            for &stream in streams.iter().flatten() {
                // The heap may have been told that it lasts, and outlives the stage.
                gruyere::door::control::gruyere_stream_ends(device as i32, stream as *mut _);
                let _ = self.driver.stream_destroy(device as DeviceId, StreamHandle(stream));
            }
        }
    }
}

impl Stage for DriverStage {
    fn stream(&mut self, device: DeviceId, stream: u16) -> Result<StreamHandle, StageError> {
        let driver = &self.driver;
        let create = || driver.stream_create(device).map(|handle| handle.0);
        Ok(StreamHandle(self.handles.stream(device, stream, create)?))
    }

    fn launch(&mut self, _device: DeviceId, _stream: u16, _count: u32) -> Result<(), StageError> {
        Ok(())
    }

    fn record(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?;
        let driver = &self.driver;
        let event = self
            .handles
            .event(device, event, || driver.event_create(device).map(|event| event.0))?;
        Ok(driver.event_record(device, EventHandle(event), handle)?)
    }

    fn wait(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?;
        let Some((_, event)) = self.handles.recorded(event) else { return Ok(()) };
        Ok(self.driver.stream_wait_event(device, handle, EventHandle(event))?)
    }

    fn host_wait_event(&mut self, event: u32) -> Result<(), StageError> {
        let Some((device, event)) = self.handles.recorded(event) else { return Ok(()) };
        Ok(self.driver.event_synchronize(device, EventHandle(event))?)
    }

    fn host_wait_stream(&mut self, device: DeviceId, stream: u16) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?;
        Ok(self.driver.stream_synchronize(device, handle)?)
    }

    fn host_wait_devices(&mut self) -> Result<(), StageError> {
        (0..self.devices).try_for_each(|device| Ok(self.driver.device_synchronize(device)?))
    }

    fn held(&self) -> u64 {
        let held = self.used().saturating_sub(self.held_before);
        self.peak.set(self.peak.get().max(held));
        held
    }

    fn held_peak(&self) -> u64 {
        self.peak.get()
    }
}
