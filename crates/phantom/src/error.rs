//! Errors of simulated calls.

use std::fmt;

/// A failed simulated call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimError {
    /// The driver's name of the call, such as `cuMemCreate`.
    pub call: &'static str,
    /// The `CUresult`.
    pub code: u32,
}

/// The result of a simulated call.
pub type SimResult<T> = Result<T, SimError>;

impl fmt::Display for SimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: CUresult {}", self.call, self.code)
    }
}

impl std::error::Error for SimError {}

/// The `CUresult` codes that the simulator returns.
pub mod code {
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: u32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`: no physical memory or no address space is left.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_DEINITIALIZED`.
    pub const DEINITIALIZED: u32 = 4;
    /// `CUDA_ERROR_INVALID_DEVICE`.
    pub const INVALID_DEVICE: u32 = 101;
    /// `CUDA_ERROR_INVALID_HANDLE`: a stream, event or pool that does not exist or was destroyed.
    pub const INVALID_HANDLE: u32 = 400;
    /// `CUDA_ERROR_NOT_READY`: for faces whose queries return a code.
    pub const NOT_READY: u32 = 600;
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: sticky.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// `CUDA_ERROR_LAUNCH_TIMEOUT`: a wait for a collective before all ranks have reached it.
    pub const LAUNCH_TIMEOUT: u32 = 702;
    /// `CUDA_ERROR_LAUNCH_FAILED`: sticky; the device is lost to this process.
    pub const LAUNCH_FAILED: u32 = 719;
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u32 = 801;
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: not permitted while a stream captures.
    pub const CAPTURE_UNSUPPORTED: u32 = 900;
    /// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`: the capture has already failed.
    pub const CAPTURE_INVALIDATED: u32 = 901;
    /// `CUDA_ERROR_STREAM_CAPTURE_UNMATCHED`: the capture was not begun on this stream.
    pub const CAPTURE_UNMATCHED: u32 = 903;
    /// `CUDA_ERROR_STREAM_CAPTURE_UNJOINED`: a forked stream was not joined before the end.
    pub const CAPTURE_UNJOINED: u32 = 904;
    /// `CUDA_ERROR_STREAM_CAPTURE_ISOLATION`: a dependency on work outside the capture.
    pub const CAPTURE_ISOLATION: u32 = 905;
    /// `CUDA_ERROR_CAPTURED_EVENT`: the event was last recorded in a capture.
    pub const CAPTURED_EVENT: u32 = 907;

    /// True for errors after which every call of the context fails.
    pub const fn is_sticky(code: u32) -> bool {
        matches!(code, 4 | 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721 | 911)
    }
}
