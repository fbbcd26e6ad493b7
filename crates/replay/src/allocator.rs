//! The interface of an allocator under replay.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use gruyere::driver::{DeviceId, DevicePtr, DriverError, StreamHandle};
use std::fmt;

/// An allocator under replay.
pub trait Allocator {
    /// Its name in reports.
    fn name(&self) -> &str;
    /// Allocates `size` bytes; for 0 bytes returns address 0.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] if every way to get memory has failed; the allocator stays
    /// usable.
    fn malloc(
        &mut self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<DevicePtr, AllocError>;
    /// Frees `address` of [`Allocator::malloc`] with the same `size`, `device` and `stream`;
    /// address 0 is valid.
    ///
    /// # Errors
    /// [`AllocError::UnknownAddress`] if `address` is not live, or [`AllocError::Driver`] if a
    /// driver call fails.
    fn free(
        &mut self,
        address: DevicePtr,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<(), AllocError>;
    /// Reports that `stream` uses the block at `address` too.
    ///
    /// # Errors
    /// [`AllocError::UnknownAddress`] if `address` is not live.
    fn record_stream(&mut self, address: DevicePtr, stream: StreamHandle)
    -> Result<(), AllocError>;
    /// Reports that `stream` of `device` lasts until the end of the replay; called before any call
    /// that names it.
    fn stream_lasts(&mut self, _device: DeviceId, _stream: StreamHandle) {}
    /// Reports that the traced process was the only rank of its job; called before the first
    /// allocation.
    fn is_alone(&mut self) {}
    /// Reports that the program is about to record an event on `stream`. Returns a mark of the work
    /// that the stream has so far, if the allocator keeps account of the program's waits.
    fn mark_work(&mut self, _device: DeviceId, _stream: StreamHandle) -> Option<u64> {
        None
    }
    /// Reports that the program has made `stream` wait for the event recorded after `mark`.
    fn stream_waits(&mut self, _device: DeviceId, _stream: StreamHandle, _mark: u64) {}
    /// Reports the end of a training step or request.
    fn step(&mut self) {}
    /// Returns unused memory to the device (`torch.cuda.empty_cache`). By default there is none.
    ///
    /// # Errors
    /// [`AllocError::Driver`] if a driver call fails.
    fn release(&mut self) -> Result<(), AllocError> {
        Ok(())
    }
    /// Checks the allocator's books. By default there are none.
    ///
    /// # Errors
    /// If an invariant is broken: which one.
    fn validate(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Errors of an allocator under replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllocError {
    /// No memory, after every attempt.
    OutOfMemory,
    /// A device unknown to the driver.
    NoDevice(DeviceId),
    /// A free or record_stream of an address that is not live.
    UnknownAddress(DevicePtr),
    /// A failed driver call, other than for lack of memory.
    Driver(DriverError),
    /// The allocator could not be set up.
    Setup(String),
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory => write!(f, "out of memory"),
            Self::NoDevice(device) => write!(f, "there is no device {device}"),
            Self::UnknownAddress(address) => write!(f, "address {address:#x} is not live"),
            Self::Driver(error) => write!(f, "{error}"),
            Self::Setup(why) => write!(f, "{why}"),
        }
    }
}

impl std::error::Error for AllocError {}

impl From<DriverError> for AllocError {
    fn from(error: DriverError) -> Self {
        if error.is_out_of_memory() { Self::OutOfMemory } else { Self::Driver(error) }
    }
}
