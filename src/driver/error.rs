//! What a driver call answers when it fails.

use std::fmt;

/// The reason of a failed driver call, as far as the allocator acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// `CUDA_ERROR_OUT_OF_MEMORY`: no physical memory, or no address space, is left.
    OutOfMemory,
    /// The library, a symbol or a device feature is missing.
    NotSupported,
    /// No device, no libcuda, or a stub libcuda: CUDA cannot be used in this process.
    NoDriver,
    /// The driver has been shut down (`CUDA_ERROR_DEINITIALIZED`, or the context is destroyed): the process exits.
    Deinitialized,
    /// A call that is not permitted while a stream is capturing.
    Capturing,
    /// An argument was refused: a misuse on our side, or a stream that has been destroyed.
    InvalidValue,
    /// A sticky error of the context: an illegal access, a lost device. No later call will succeed.
    DeviceLost,
    /// Anything else.
    Other,
}

/// A failed driver call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DriverError {
    /// The driver's own name of the call, `cuMemCreate` for one.
    pub call: &'static str,
    /// What the allocator makes of it.
    pub kind: ErrorKind,
    /// The `CUresult`, 0 where the call was never made.
    pub code: u32,
}

/// The result of a driver call.
pub type Result<T> = std::result::Result<T, DriverError>;

impl DriverError {
    /// An error of `kind` from `call`, with the driver's code.
    pub const fn new(call: &'static str, kind: ErrorKind, code: u32) -> Self {
        Self { call, kind, code }
    }

    /// Classifies a non-zero `CUresult` of `call`.
    pub const fn from_code(call: &'static str, code: u32) -> Self {
        let kind = match code {
            2 => ErrorKind::OutOfMemory,
            1 | 101 | 400 => ErrorKind::InvalidValue,
            3 | 100 | 34 => ErrorKind::NoDriver,
            4 | 709 => ErrorKind::Deinitialized,
            500 | 801 => ErrorKind::NotSupported,
            900..=909 => ErrorKind::Capturing,
            214 | 219 | 700 | 702 | 710 | 714..=719 => ErrorKind::DeviceLost,
            _ => ErrorKind::Other,
        };
        Self { call, kind, code }
    }

    /// True for the errors that more memory would cure.
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == ErrorKind::OutOfMemory
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            ErrorKind::OutOfMemory => "out of memory",
            ErrorKind::NotSupported => "not supported here",
            ErrorKind::NoDriver => "no usable CUDA driver",
            ErrorKind::Deinitialized => "the driver has been shut down",
            ErrorKind::Capturing => "not permitted while a stream is capturing",
            ErrorKind::InvalidValue => "invalid argument or handle",
            ErrorKind::DeviceLost => "the context is lost",
            ErrorKind::Other => "failed",
        };
        write!(f, "{}: {what} (CUresult {})", self.call, self.code)
    }
}

impl fmt::Debug for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for DriverError {}
