//! Driver functions by name, for `cuGetProcAddress`.

use std::ffi::{CStr, CString, c_void};
use std::sync::OnceLock;

/// Functions whose newest version is not simply the one with the highest suffix: name, and the
/// first CUDA version of each variant, newest first.
const VERSIONED: &[(&str, &[(i32, &str)])] = &[
    (
        "cuStreamGetCaptureInfo",
        &[
            (12_030, "cuStreamGetCaptureInfo_v3"),
            (11_030, "cuStreamGetCaptureInfo_v2"),
            (0, "cuStreamGetCaptureInfo"),
        ],
    ),
    ("cuGetProcAddress", &[(12_000, "cuGetProcAddress_v2"), (0, "cuGetProcAddress")]),
    ("cuCtxSynchronize", &[(13_000, "cuCtxSynchronize"), (0, "cuCtxSynchronize")]),
    ("cuCtxGetDevice", &[(13_000, "cuCtxGetDevice"), (0, "cuCtxGetDevice")]),
];

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM` and its like in the runtime.
const PER_THREAD: u64 = 2;

/// The address of function `name` in CUDA `version` (12020 for 12.2); `flags` can choose the
/// variant with the thread's own stream as stream 0.
pub fn driver_symbol(name: &CStr, version: i32, flags: u64) -> Option<usize> {
    let text = name.to_str().ok()?;
    if !text.starts_with("cu") {
        return None;
    }
    if let Some((_, variants)) = VERSIONED.iter().find(|(known, _)| *known == text) {
        let (_, variant) = variants.iter().find(|(from, _)| version >= *from)?;
        return own_symbol(variant);
    }
    let twins = ["_v2_ptsz", "_v2_ptds", "_ptsz", "_ptds"];
    let of_thread = twins.iter().filter(|_| flags & PER_THREAD != 0);
    let plain = ["_v2", ""];
    of_thread.chain(&plain).find_map(|ending| own_symbol(&format!("{text}{ending}")))
}

/// A function of this library, wherever it was loaded from: other libraries of the process may
/// define the same names.
fn own_symbol(name: &str) -> Option<usize> {
    let name = CString::new(name).ok()?;
    // SAFETY: the handle is this library's own, and dlsym only reads the name.
    let address = unsafe { libc::dlsym(own_handle()? as *mut c_void, name.as_ptr()) };
    (!address.is_null()).then_some(address as usize)
}

fn own_handle() -> Option<usize> {
    static HANDLE: OnceLock<Option<usize>> = OnceLock::new();
    *HANDLE.get_or_init(|| {
        let here = own_handle as *const c_void;
        let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: `here` is an address of this library; on success dladdr fills `info`, whose file
        // name lives as long as the library, which dlopen then only finds again.
        let handle = unsafe {
            if libc::dladdr(here, info.as_mut_ptr()) == 0 {
                return None;
            }
            libc::dlopen(info.assume_init().dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD)
        };
        (!handle.is_null()).then_some(handle as usize)
    })
}
