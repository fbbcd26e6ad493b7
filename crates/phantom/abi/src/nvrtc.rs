//! NVRTC: every program compiles to nothing, since no kernel runs.
//!
//! torch caches compiled programs in the user's files, keyed by NVRTC's version among others. A run
//! on a GPU must never find ours there, so the version is one that NVIDIA will not use.

use crate::abi::Out;
use crate::entry::succeeds;
use crate::handle::objects;
use std::ffi::c_char;

/// `NVRTC_ERROR_INVALID_INPUT`.
const INVALID_INPUT: u32 = 3;
const VERSION: (i32, i32) = (13, 9999);

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcVersion(major: Out<i32>, minor: Out<i32>) -> u32 {
    major.put_if_wanted(VERSION.0);
    minor.put_if_wanted(VERSION.1);
    0
}

/// Exports a function that returns the size of a text and one that writes it: only the final NUL.
macro_rules! empty {
    ($($size:ident $text:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $size(_program: usize, bytes: Out<usize>) -> u32 {
            bytes.put(1).map_or(INVALID_INPUT, |()| 0)
        }

        #[unsafe(no_mangle)]
        pub extern "C" fn $text(_program: usize, text: Out<u8>) -> u32 {
            text.put(0).map_or(INVALID_INPUT, |()| 0)
        }
    )*};
}

empty! {
    nvrtcGetCUBINSize nvrtcGetCUBIN
    nvrtcGetPTXSize nvrtcGetPTX
    nvrtcGetProgramLogSize nvrtcGetProgramLog
}

/// The lowered name is the name itself.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetLoweredName(
    _program: usize,
    name: *const c_char,
    out: Out<*const c_char>,
) -> u32 {
    out.put(name).map_or(INVALID_INPUT, |()| 0)
}

objects! { INVALID_INPUT => nvrtcCreateProgram }

succeeds! { nvrtcAddNameExpression nvrtcCompileProgram nvrtcDestroyProgram }
