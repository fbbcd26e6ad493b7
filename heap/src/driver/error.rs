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
    /// The driver has been shut down (`CUDA_ERROR_DEINITIALIZED`, or the context is destroyed): the
    /// process exits.
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

const INVALID_HANDLE: u32 = 400;

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

    /// Classifies a non-zero `CUresult` of `call`, by what cuda.h (13) says of each. `DeviceLost`
    /// are those of which it says that any further work will return the same error, and hardware
    /// faults.
    pub const fn from_code(call: &'static str, code: u32) -> Self {
        let kind = match code {
            2 => ErrorKind::OutOfMemory,
            1 | 101 | INVALID_HANDLE => ErrorKind::InvalidValue,
            3 | 100 | 34 => ErrorKind::NoDriver,
            4 | 709 => ErrorKind::Deinitialized,
            500 | 801 => ErrorKind::NotSupported,
            // STREAM_CAPTURE_UNSUPPORTED to STREAM_CAPTURE_WRONG_THREAD. 909 is TIMEOUT.
            900..=908 => ErrorKind::Capturing,
            // ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED; ILLEGAL_ADDRESS, LAUNCH_TIMEOUT,
            // ASSERT; HARDWARE_STACK_ERROR to LAUNCH_FAILED, TENSOR_MEMORY_LEAK; EXTERNAL_DEVICE.
            // 219, INVALID_GRAPHICS_CONTEXT, is not one.
            214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721 | 911 => ErrorKind::DeviceLost,
            _ => ErrorKind::Other,
        };
        Self { call, kind, code }
    }

    /// Whether the driver says that a handle is nobody's (`CUDA_ERROR_INVALID_HANDLE`).
    pub fn is_invalid_handle(&self) -> bool {
        self.code == INVALID_HANDLE
    }

    /// Whether no later call can succeed either.
    pub fn is_final(&self) -> bool {
        matches!(self.kind, ErrorKind::DeviceLost | ErrorKind::Deinitialized | ErrorKind::NoDriver)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_classified_as_cuda_h_describes_them() {
        let kind = |code| DriverError::from_code("cuMemCreate", code).kind;
        for code in [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 911] {
            assert_eq!(kind(code), ErrorKind::DeviceLost, "{code}: nothing more will succeed");
        }
        for code in 900..=908 {
            assert_eq!(kind(code), ErrorKind::Capturing, "{code}");
        }
        // No graphics context, no compiler, a wait that lasted too long, a graph that can't be
        // updated: this call failed, and no other.
        for code in [219, 221, 909, 910] {
            assert_eq!(kind(code), ErrorKind::Other, "{code}");
        }
    }
}
