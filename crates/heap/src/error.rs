//! Errors of requests.

use crate::driver::DriverError;
use crate::lifetime::Lifetime;
use crate::order::streams;
use crate::report::cause::Report;
use gruyere_record::size::Bytes;
use std::fmt;

/// Why a request was not served.
#[derive(Debug)]
pub enum Error {
    /// No memory, after everything was tried.
    OutOfMemory(Box<Report>),
    /// The driver failed, not for lack of memory.
    Driver(DriverError),
    /// There is no such device.
    NoSuchDevice(i64),
    /// [`streams::MAX_STREAMS`] streams of a device were announced or have live blocks.
    TooManyStreams,
    /// The pool's memory comes from outside, and nothing in it fits: a segment of so many bytes
    /// would.
    NoSegment(u64),
    /// A ceiling that is no share of a device's memory.
    InvalidFraction(f64),
    /// The memory that `reserve:` asks for is not to be had.
    Reserve(Box<Refused>),
    /// A setting that a device cannot meet: the setting, the reason and the remedy.
    Setting(Box<str>),
    /// An invariant of the heap is broken; the call did nothing.
    Internal(&'static str),
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory(report) => report.fmt(f),
            Self::Driver(error) => write!(f, "gruyere: the CUDA driver failed: {error}"),
            Self::NoSuchDevice(device) => {
                write!(f, "gruyere: there is no device {device} in this process")
            }
            Self::TooManyStreams => write!(
                f,
                "gruyere: more than {} streams of one device have live blocks or were announced \
                 (or so many were used, and a capture keeps the allocator from finding those \
                 without blocks); create streams once and reuse them",
                streams::MAX_STREAMS
            ),
            Self::NoSegment(bytes) => write!(
                f,
                "gruyere: the pool needs a segment of {bytes} bytes, which only its creator can \
                 provide"
            ),
            Self::InvalidFraction(fraction) => {
                write!(f, "gruyere: invalid fraction {fraction}: it lies in 0 to 1")
            }
            Self::Reserve(refused) => refused.fmt(f),
            Self::Setting(said) => write!(f, "gruyere: GRUYERE_CONF {said}"),
            Self::Internal(what) => write!(f, "gruyere: internal error: {what}; please report it"),
        }
    }
}

impl std::error::Error for Error {}

/// A failed `reserve:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The device.
    pub device: u32,
    /// The lifetime that it was for.
    pub lifetime: Lifetime,
    /// The size as the setting has it.
    pub said: String,
    /// Bytes asked for.
    pub bytes: u64,
    /// Bytes that the device has free, if known.
    pub free: Option<u64>,
    /// The error of the driver, or of the budget.
    pub error: DriverError,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { device, lifetime, said, bytes, free, error } = self;
        let free =
            free.map_or_else(|| "an unknown amount".to_owned(), |free| Bytes(free).to_string());
        write!(
            f,
            "gruyere: GRUYERE_CONF reserve:{}={said}: {} could not be mapped on device {device} \
             ({error}), which has {free} free; reserve less, free memory of the device, or lower \
             headroom:",
            lifetime.name(),
            Bytes(*bytes)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::ErrorKind;

    #[test]
    fn a_refused_reserve_is_told_as_it_was_typed_and_by_no_code_of_success() {
        let refused = |code| Refused {
            device: 0,
            lifetime: Lifetime::Auto,
            said: "100GiB".to_owned(),
            bytes: 100 << 30,
            free: Some(80 << 30),
            error: DriverError::new("headroom", ErrorKind::OutOfMemory, code),
        };
        let said = refused(0).to_string();
        assert!(said.contains("reserve:auto=100GiB: 100.00 GiB could not be mapped"), "{said}");
        assert!(said.contains("(headroom: out of memory), which has 80.00 GiB free"), "{said}");
        assert!(refused(2).to_string().contains("(CUresult 2)"));
    }
}
