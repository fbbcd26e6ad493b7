//! The program's side of a replay on the phantom's C interface: what a real program would call, and
//! the virtual clock.

use gruyere::driver::{DeviceId, StreamHandle};
use gruyere_replay::stage::{OPERATION_NS, Stage, StageError};
use gruyere_replay::trace::Trace;

/// Functions of the phantom, which was preloaded: every name is there when this library is loaded.
#[allow(non_snake_case)]
mod c {
    unsafe extern "C" {
        pub fn cudaStreamCreateWithFlags(stream: *mut usize, flags: u32) -> u32;
        pub fn cudaStreamWaitEvent(stream: usize, event: usize, flags: u32) -> u32;
        pub fn cudaStreamSynchronize(stream: usize) -> u32;
        pub fn cudaEventCreateWithFlags(event: *mut usize, flags: u32) -> u32;
        pub fn cudaEventRecord(event: usize, stream: usize) -> u32;
        pub fn cudaEventSynchronize(event: usize) -> u32;
        pub fn cudaDeviceSynchronize() -> u32;
        pub fn phantom_launch(stream: usize, count: u64) -> u32;
        pub fn phantom_host_spend(ns: u64);
        pub fn phantom_host_now() -> u64;
        pub fn phantom_device_end() -> u64;
        pub fn phantom_physical(device: u32) -> u64;
        pub fn phantom_physical_peak(device: u32) -> u64;
    }
}

const NON_BLOCKING: u32 = 1;
const NO_TIMING: u32 = 2;

/// Device 0 of the phantom.
pub struct AbiStage {
    streams: Vec<usize>,
    events: Vec<usize>,
    charged: bool,
}

/// Makes one call; the error is its code.
macro_rules! call {
    ($name:ident($($argument:expr),*)) => {{
        // SAFETY: the phantom's function has this type; result pointers are to locals or fields
        // that outlive the call.
        match unsafe { c::$name($($argument),*) } {
            0 => Ok(()),
            code => Err(
                StageError::from(gruyere_phantom::SimError { call: stringify!($name), code })
            ),
        }
    }};
}

impl AbiStage {
    /// For a trace of one device. `charged`: mallocs and frees cost the host time.
    pub fn new(trace: &Trace, charged: bool) -> Self {
        Self {
            streams: vec![0; trace.streams.len()],
            events: vec![0; trace.events as usize],
            charged,
        }
    }

    /// The host's clock, and when the device is done, virtual nanoseconds.
    pub fn time(&self) -> (u64, u64) {
        // SAFETY: functions without arguments.
        unsafe { (c::phantom_host_now(), c::phantom_device_end()) }
    }
}

impl Stage for AbiStage {
    fn stream(&mut self, _: DeviceId, stream: u16) -> Result<StreamHandle, StageError> {
        let place = &mut self.streams[stream as usize];
        if stream != 0 && *place == 0 {
            call!(cudaStreamCreateWithFlags(place, NON_BLOCKING))?;
        }
        Ok(StreamHandle(*place))
    }

    fn launch(&mut self, device: DeviceId, stream: u16, count: u32) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?.0;
        call!(phantom_launch(handle, count.into()))
    }

    fn record(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?.0;
        let place = &mut self.events[event as usize];
        if *place == 0 {
            call!(cudaEventCreateWithFlags(place, NO_TIMING))?;
        }
        call!(cudaEventRecord(*place, handle))
    }

    fn wait(&mut self, device: DeviceId, stream: u16, event: u32) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?.0;
        match self.events[event as usize] {
            0 => Ok(()),
            event => call!(cudaStreamWaitEvent(handle, event, 0)),
        }
    }

    fn host_wait_event(&mut self, event: u32) -> Result<(), StageError> {
        match self.events[event as usize] {
            0 => Ok(()),
            event => call!(cudaEventSynchronize(event)),
        }
    }

    fn host_wait_stream(&mut self, device: DeviceId, stream: u16) -> Result<(), StageError> {
        let handle = self.stream(device, stream)?.0;
        call!(cudaStreamSynchronize(handle))
    }

    fn host_wait_devices(&mut self) -> Result<(), StageError> {
        call!(cudaDeviceSynchronize())
    }

    fn operation(&mut self) {
        if self.charged {
            // SAFETY: a function of a number.
            unsafe { c::phantom_host_spend(OPERATION_NS) };
        }
    }

    fn held(&self) -> u64 {
        // SAFETY: a function of a number.
        unsafe { c::phantom_physical(0) }
    }

    fn held_peak(&self) -> u64 {
        // SAFETY: a function of a number.
        unsafe { c::phantom_physical_peak(0) }
    }
}
