//! What a replay asks of an allocator.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use gruyere::driver::{DeviceId, DevicePtr, DriverError, StreamHandle};
use std::fmt;

/// An allocator under replay.
pub trait Allocator {
    /// Its name in reports.
    fn name(&self) -> &str;
    /// Allocates `size` bytes; 0 bytes give address 0.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] when every way to get memory has been tried; the allocator stays
    /// usable.
    fn malloc(
        &mut self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<DevicePtr, AllocError>;
    /// Frees `address`, which [`Allocator::malloc`] gave for `size`, `device` and `stream`; address
    /// 0 is fine.
    ///
    /// # Errors
    /// [`AllocError::UnknownAddress`], or a failed driver call.
    fn free(
        &mut self,
        address: DevicePtr,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<(), AllocError>;
    /// `stream` uses the block at `address` too.
    ///
    /// # Errors
    /// [`AllocError::UnknownAddress`].
    fn record_stream(&mut self, address: DevicePtr, stream: StreamHandle)
    -> Result<(), AllocError>;
    /// `stream` of `device` is there for as long as the replay goes on; told before it is named.
    fn stream_lasts(&mut self, _device: DeviceId, _stream: StreamHandle) {}
    /// The traced process was the only rank of its job; told before anything is allocated.
    fn is_alone(&mut self) {}
    /// A training step or request ended.
    fn step(&mut self) {}
    /// Gives back to the device what nobody uses (`torch.cuda.empty_cache`).
    ///
    /// # Errors
    /// A failed driver call.
    fn release(&mut self) -> Result<(), AllocError>;
    /// Walks the allocator's books.
    ///
    /// # Errors
    /// Which invariant is broken.
    fn validate(&self) -> Result<(), String>;
}

/// What went wrong in an allocator under replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllocError {
    /// No memory, after everything was tried.
    OutOfMemory,
    /// A device that the driver does not have.
    NoDevice(DeviceId),
    /// A free or record_stream of an address that is not live.
    UnknownAddress(DevicePtr),
    /// A failed driver call, other than for want of memory.
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
