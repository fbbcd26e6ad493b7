//! The replaced functions of the driver, under every name that a program may use.
#![deny(unsafe_code)]

use std::ffi::CStr;

/// A function of the driver.
pub struct Function {
    /// Its name in libcuda.
    pub symbol: &'static CStr,
    /// Its name for `cuGetProcAddress`: without `_v2` and `_ptsz`.
    pub base: &'static CStr,
    /// The CUDA version since which `base` means this function (11020 for 11.2); an older variant
    /// has another signature.
    since: i32,
    /// The version up to which it does, where a newer one is another function.
    before: i32,
    /// The meaning of stream 0: the calling thread's own stream, that of the process, or no
    /// difference.
    streams: Streams,
}

/// The meaning of stream 0 for a function.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Streams {
    /// It takes none, or an existing one.
    Any,
    /// The legacy default stream.
    Legacy,
    /// The calling thread's own (`_ptsz`).
    PerThread,
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

const fn function(
    symbol: &'static CStr,
    base: &'static CStr,
    since: i32,
    streams: Streams,
) -> Function {
    Function { symbol, base, since, before: i32::MAX, streams }
}

/// `older`, which becomes another function at `version`.
const fn until(version: i32, older: Function) -> Function {
    Function { before: version, ..older }
}

/// The number of functions.
pub const COUNT: usize = 47;

/// The index of `cuGetProcAddress` in [`FUNCTIONS`].
pub const GET_PROC_ADDRESS: usize = 0;
/// That of `cuGetProcAddress_v2`.
pub const GET_PROC_ADDRESS_V2: usize = 1;

/// All functions, in the order of the trampolines.
pub static FUNCTIONS: [Function; COUNT] = [
    until(12000, function(c"cuGetProcAddress", c"cuGetProcAddress", 11030, Streams::Any)),
    function(c"cuGetProcAddress_v2", c"cuGetProcAddress", 12000, Streams::Any),
    function(c"cuMemAlloc_v2", c"cuMemAlloc", 3020, Streams::Any),
    function(c"cuMemFree_v2", c"cuMemFree", 3020, Streams::Any),
    function(c"cuMemAllocPitch_v2", c"cuMemAllocPitch", 3020, Streams::Any),
    function(c"cuMemGetInfo_v2", c"cuMemGetInfo", 3020, Streams::Any),
    function(c"cuMemAllocAsync", c"cuMemAllocAsync", 11020, Streams::Legacy),
    function(c"cuMemAllocAsync_ptsz", c"cuMemAllocAsync", 11020, Streams::PerThread),
    function(c"cuMemFreeAsync", c"cuMemFreeAsync", 11020, Streams::Legacy),
    function(c"cuMemFreeAsync_ptsz", c"cuMemFreeAsync", 11020, Streams::PerThread),
    function(c"cuMemAllocFromPoolAsync", c"cuMemAllocFromPoolAsync", 11020, Streams::Legacy),
    function(
        c"cuMemAllocFromPoolAsync_ptsz",
        c"cuMemAllocFromPoolAsync",
        11020,
        Streams::PerThread,
    ),
    function(c"cuCtxSynchronize", c"cuCtxSynchronize", 2000, Streams::Any),
    function(c"cuStreamDestroy_v2", c"cuStreamDestroy", 4000, Streams::Any),
    function(c"cuStreamBeginCapture_v2", c"cuStreamBeginCapture", 10010, Streams::Legacy),
    function(c"cuStreamBeginCapture_v2_ptsz", c"cuStreamBeginCapture", 10010, Streams::PerThread),
    function(
        c"cuStreamBeginCaptureToGraph",
        c"cuStreamBeginCaptureToGraph",
        12030,
        Streams::Legacy,
    ),
    function(
        c"cuStreamBeginCaptureToGraph_ptsz",
        c"cuStreamBeginCaptureToGraph",
        12030,
        Streams::PerThread,
    ),
    function(c"cuStreamEndCapture", c"cuStreamEndCapture", 10000, Streams::Legacy),
    function(c"cuStreamEndCapture_ptsz", c"cuStreamEndCapture", 10000, Streams::PerThread),
    function(c"cuIpcGetMemHandle", c"cuIpcGetMemHandle", 4010, Streams::Any),
    function(c"cuDevicePrimaryCtxReset_v2", c"cuDevicePrimaryCtxReset", 11000, Streams::Any),
    function(c"cuMemPoolSetAccess", c"cuMemPoolSetAccess", 11020, Streams::Any),
    // Watched: pages that a program maps itself, as torch's expandable segments do.
    function(c"cuMemCreate", c"cuMemCreate", 10020, Streams::Any),
    function(c"cuMemRelease", c"cuMemRelease", 10020, Streams::Any),
    function(c"cuMemMap", c"cuMemMap", 10020, Streams::Any),
    function(c"cuMemUnmap", c"cuMemUnmap", 10020, Streams::Any),
    // Announced before they are enqueued: calls that may wait for a later action of the host.
    until(13010, function(c"cuLaunchHostFunc", c"cuLaunchHostFunc", 10000, Streams::Legacy)),
    until(
        13010,
        function(c"cuLaunchHostFunc_ptsz", c"cuLaunchHostFunc", 10000, Streams::PerThread),
    ),
    function(c"cuLaunchHostFunc_v2", c"cuLaunchHostFunc", 13010, Streams::Legacy),
    function(c"cuLaunchHostFunc_v2_ptsz", c"cuLaunchHostFunc", 13010, Streams::PerThread),
    function(c"cuStreamAddCallback", c"cuStreamAddCallback", 5000, Streams::Legacy),
    function(c"cuStreamAddCallback_ptsz", c"cuStreamAddCallback", 7000, Streams::PerThread),
    until(11070, function(c"cuStreamWaitValue32", c"cuStreamWaitValue32", 8000, Streams::Legacy)),
    until(
        11070,
        function(c"cuStreamWaitValue32_ptsz", c"cuStreamWaitValue32", 8000, Streams::PerThread),
    ),
    function(c"cuStreamWaitValue32_v2", c"cuStreamWaitValue32", 11070, Streams::Legacy),
    function(c"cuStreamWaitValue32_v2_ptsz", c"cuStreamWaitValue32", 11070, Streams::PerThread),
    until(11070, function(c"cuStreamWaitValue64", c"cuStreamWaitValue64", 9000, Streams::Legacy)),
    until(
        11070,
        function(c"cuStreamWaitValue64_ptsz", c"cuStreamWaitValue64", 9000, Streams::PerThread),
    ),
    function(c"cuStreamWaitValue64_v2", c"cuStreamWaitValue64", 11070, Streams::Legacy),
    function(c"cuStreamWaitValue64_v2_ptsz", c"cuStreamWaitValue64", 11070, Streams::PerThread),
    until(11070, function(c"cuStreamBatchMemOp", c"cuStreamBatchMemOp", 8000, Streams::Legacy)),
    until(
        11070,
        function(c"cuStreamBatchMemOp_ptsz", c"cuStreamBatchMemOp", 8000, Streams::PerThread),
    ),
    function(c"cuStreamBatchMemOp_v2", c"cuStreamBatchMemOp", 11070, Streams::Legacy),
    function(c"cuStreamBatchMemOp_v2_ptsz", c"cuStreamBatchMemOp", 11070, Streams::PerThread),
    function(c"cuGraphAddHostNode", c"cuGraphAddHostNode", 10000, Streams::Any),
    function(c"cuGraphAddBatchMemOpNode", c"cuGraphAddBatchMemOpNode", 11070, Streams::Any),
];

/// The function that libcuda exports as `symbol`.
pub fn of_symbol(symbol: &CStr) -> Option<usize> {
    FUNCTIONS.iter().position(|function| function.symbol == symbol)
}

/// The function that `cuGetProcAddress` means by `name` for a program of CUDA `version` with
/// `flags`.
pub fn of_entry_point(name: &CStr, version: i32, flags: u64) -> Option<usize> {
    let unwanted =
        if flags & PER_THREAD_DEFAULT_STREAM != 0 { Streams::Legacy } else { Streams::PerThread };
    FUNCTIONS.iter().position(|function| {
        function.base == name
            && (function.since..function.before).contains(&version)
            && function.streams != unwanted
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry_point(name: &CStr, version: i32, flags: u64) -> Option<&'static str> {
        of_entry_point(name, version, flags).map(|found| FUNCTIONS[found].symbol.to_str().unwrap())
    }

    #[test]
    fn every_function_is_found_by_its_symbol() {
        for (index, function) in FUNCTIONS.iter().enumerate() {
            assert_eq!(of_symbol(function.symbol), Some(index));
        }
        for other in [c"", c"cu", c"cuMemAlloc", c"cuMemAlloc_v20", c"cuInit", c"dlsym"] {
            assert_eq!(of_symbol(other), None, "{other:?}");
        }
    }

    #[test]
    fn the_two_functions_with_a_place_of_their_own_are_there() {
        assert_eq!(of_symbol(c"cuGetProcAddress"), Some(GET_PROC_ADDRESS));
        assert_eq!(of_symbol(c"cuGetProcAddress_v2"), Some(GET_PROC_ADDRESS_V2));
    }

    #[test]
    fn an_entry_point_is_the_variant_of_the_version_asked_for() {
        assert_eq!(entry_point(c"cuMemAlloc", 13000, 0), Some("cuMemAlloc_v2"));
        assert_eq!(entry_point(c"cuMemAlloc", 3000, 0), None, "32-bit addresses");
        assert_eq!(entry_point(c"cuGetProcAddress", 11040, 0), Some("cuGetProcAddress"));
        assert_eq!(entry_point(c"cuGetProcAddress", 12000, 0), Some("cuGetProcAddress_v2"));
        assert_eq!(entry_point(c"cuStreamBeginCapture", 10000, 0), None, "without a mode");
        assert_eq!(entry_point(c"cuInit", 13000, 0), None);
        assert_eq!(entry_point(c"cuStreamWaitValue32", 11060, 0), Some("cuStreamWaitValue32"));
        assert_eq!(entry_point(c"cuStreamWaitValue32", 12000, 0), Some("cuStreamWaitValue32_v2"));
    }

    #[test]
    fn the_flag_for_a_stream_a_thread_gives_the_variant_for_it() {
        for flags in [0, 1, 4] {
            assert_eq!(entry_point(c"cuMemFreeAsync", 12000, flags), Some("cuMemFreeAsync"));
        }
        assert_eq!(entry_point(c"cuMemFreeAsync", 12000, 2), Some("cuMemFreeAsync_ptsz"));
        assert_eq!(entry_point(c"cuMemFree", 12000, 2), Some("cuMemFree_v2"), "it has no variant");
    }
}
