//! The stage of a replay: the device as the traced program sees it.

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

/// The program's side of a device: streams, kernels, events, waits, and the books of held memory.
///
/// Streams and events are indices of the trace. A stream has a handle on each device that uses it.
pub trait Stage {
    /// The handle of `stream` on `device`, created at first use; stream 0 is the default stream.
    ///
    /// # Errors
    /// If a driver call fails.
    fn stream(&mut self, device: DeviceId, stream: u16) -> Result<StreamHandle, StageError>;
    /// Launches `count` kernels.
    ///
    /// # Errors
    /// If a driver call fails.
    fn launch(&mut self, device: DeviceId, stream: u16, count: u32) -> Result<(), StageError>;
    /// Records `event`.
    ///
    /// # Errors
    /// If a driver call fails.
    fn record(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError>;
    /// Makes `stream` wait for `event`.
    ///
    /// # Errors
    /// If a driver call fails.
    fn wait(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError>;
    /// Waits on the host for `event`.
    ///
    /// # Errors
    /// If a driver call fails.
    fn host_wait_event(&mut self, event: u32) -> Result<(), StageError>;
    /// Waits on the host for `stream`.
    ///
    /// # Errors
    /// If a driver call fails.
    fn host_wait_stream(&mut self, device: DeviceId, stream: u16) -> Result<(), StageError>;
    /// Waits on the host for every device.
    ///
    /// # Errors
    /// If a driver call fails.
    fn host_wait_devices(&mut self) -> Result<(), StageError>;
    /// Physical bytes held by the process on all devices.
    fn held(&self) -> u64;
    /// The peak of [`Stage::held`], also between operations if the stage knows it.
    fn held_peak(&self) -> u64;
    /// The program calls malloc or free.
    fn operation(&mut self) {}
    /// The program ends a step.
    fn end_step(&mut self) {}
    /// The allocator handed out a block; `id` is the trace's.
    fn block_malloc(&mut self, _id: u64, _block: NewBlock) {}
    /// The program is about to free the block at `address`.
    fn block_free(&mut self, _address: DevicePtr) {}
    /// The program is about to record another stream on the block at `address`.
    fn block_record_stream(
        &mut self,
        _device: DeviceId,
        _address: DevicePtr,
        _stream: StreamHandle,
    ) {
    }
}

/// A block handed out by an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBlock {
    /// Its address.
    pub address: DevicePtr,
    /// Requested bytes.
    pub size: u64,
    /// Its device.
    pub device: DeviceId,
    /// Its stream.
    pub stream: StreamHandle,
}

/// A failed call of the program: the device does not support the trace.
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

/// Handles of streams by device, and of events; created at first use.
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

    /// An event belongs to one device's context: a record on another device's stream creates a new
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

/// Calls that cost host time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Charge {
    /// Nothing.
    Nothing,
    /// Launches, mallocs and frees.
    Program,
    /// As `Program`, and each driver call at its price.
    DriverCalls,
}

/// Host time of a malloc or free itself, nanoseconds: the same for every allocator, of the order of
/// torch's. With it the models hold exactly as much on the timeline as the real allocators in
/// measurements.
pub const OPERATION_NS: u64 = 150;

/// Setup of the simulated GPU of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Physical bytes of each device.
    pub capacity: u64,
    /// Duration of a kernel, nanoseconds; 0: all work ends when enqueued.
    pub kernel_ns: u64,
    /// Calls that cost host time.
    pub charge: Charge,
    /// The prices of driver calls; [`Setup::charge`] selects the charged ones.
    pub prices: Costs,
    /// Whether the oracle of stream order is on.
    pub oracle: bool,
}

impl Setup {
    /// The instant clock, for peaks and for the smallest device.
    pub fn instant(capacity: u64) -> Self {
        Self {
            capacity,
            kernel_ns: 0,
            charge: Charge::Nothing,
            prices: Costs::default(),
            oracle: false,
        }
    }

    /// Kernels of 20 us, 8 us of host per launch, 0.15 us per malloc or free, the host at most 10
    /// ms ahead.
    pub fn timeline(capacity: u64, charge: Charge) -> Self {
        Self { charge, oracle: true, ..Self::at(Clock::USUAL, capacity) }
    }

    /// The same with the kernels of `clock`, free driver calls and no oracle; on [`Clock::INSTANT`]
    /// as [`Setup::instant`].
    pub fn at(clock: Clock, capacity: u64) -> Self {
        let charge = if clock.lags() { Charge::Program } else { Charge::Nothing };
        Self { kernel_ns: clock.kernel_ns(), charge, ..Self::instant(capacity) }
    }
}

/// A simulated GPU.
pub struct PhantomStage {
    gpu: Arc<Gpu>,
    setup: Setup,
    handles: Handles,
    devices: DeviceId,
    /// By step: end of all work enqueued up to the step's end, device nanoseconds.
    step_ends: Vec<u64>,
}

impl PhantomStage {
    /// A fresh simulated GPU with the devices of `trace`.
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

    /// The driver for an allocator on this stage.
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::new(PhantomDriver::new(self.gpu.clone()))
    }

    /// The uses of the host's time, and the end of the devices.
    pub fn time(&self) -> HostTime {
        self.gpu.host_time()
    }

    /// The device's time for the second half of the steps, nanoseconds: the steps after a run's
    /// memory has grown. `None`: fewer than two steps.
    pub fn later_steps_ns(&self) -> Option<u64> {
        let ends = &self.step_ends;
        Some(ends.last()? - ends.get(ends.len().checked_sub(2)? / 2)?)
    }

    /// Driver calls of the allocator.
    pub fn allocator_calls(&self) -> u64 {
        self.gpu.counts(Caller::Allocator).total()
    }

    /// The same by kind, under the driver's names.
    pub fn allocator_calls_by_kind(&self) -> BTreeMap<String, u64> {
        let counts = self.gpu.counts(Caller::Allocator);
        counts.iter().map(|(kind, count)| (kind.name().to_owned(), count)).collect()
    }

    /// The peak of reserved address space, bytes.
    pub fn peak_address(&self) -> u64 {
        self.gpu.address_books().peak
    }

    /// The simulator: its books and counts.
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
    /// The devices behind `driver`; memory already held does not count.
    ///
    /// # Errors
    /// If the driver has fewer devices than the trace, or no usable one.
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
        // Ignores a failed call: the handles are gone either way.
        for &(device, event) in self.handles.events.iter().flatten() {
            let _ = self.driver.event_destroy(device, EventHandle(event));
        }
        for (device, streams) in self.handles.streams.iter().enumerate() {
            for &stream in streams.iter().flatten() {
                // The heap may count the stream as lasting, and outlives the stage.
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
