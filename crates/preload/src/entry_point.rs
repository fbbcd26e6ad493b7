//! `cuGetProcAddress`: calls the real one, and replaces the address that it found.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::{lookup, names};

/// The driver's two, as far as looked up.
///
/// ```text
/// null -> address   over(), over_v2(): the first one found counts, before any call of ours
/// ```
static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static REAL_V2: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Our replacement of the driver's `cuGetProcAddress` at `real`.
pub fn over(real: *mut c_void) -> *mut c_void {
    let _ = REAL.compare_exchange(null_mut(), real, Ordering::AcqRel, Ordering::Acquire);
    get as *mut c_void
}

/// Our replacement of the driver's `cuGetProcAddress_v2` at `real`.
pub fn over_v2(real: *mut c_void) -> *mut c_void {
    let _ = REAL_V2.compare_exchange(null_mut(), real, Ordering::AcqRel, Ordering::Acquire);
    get_v2 as *mut c_void
}

/// `CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)`,
/// of CUDA 11.3 to 11.8.
#[unsafe(naked)]
unsafe extern "C" fn get(
    _name: *const c_char,
    _found: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
) -> u32 {
    // The return address becomes an extra argument.
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc", "endbr64", "mov r8, qword ptr [rsp]", "jmp {with}", ".cfi_endproc",
        with = sym get_with
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc", "hint #34", "mov x4, x30", "b {with}", ".cfi_endproc", with = sym get_with
    );
}

/// `CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
/// CUdriverProcAddressQueryResult *status)`.
#[unsafe(naked)]
unsafe extern "C" fn get_v2(
    _name: *const c_char,
    _found: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    _status: *mut c_int,
) -> u32 {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc", "endbr64", "mov r9, qword ptr [rsp]", "jmp {with}", ".cfi_endproc",
        with = sym get_v2_with
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc", "hint #34", "mov x5, x30", "b {with}", ".cfi_endproc",
        with = sym get_v2_with
    );
}

type Get = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> u32;
type GetV2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> u32;

unsafe extern "C" fn get_with(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
    caller: *const c_void,
) -> u32 {
    // SAFETY: ours is handed out only once the real one is known, and that is a function of this
    // signature.
    let code = unsafe {
        let real = std::mem::transmute::<*mut c_void, Get>(REAL.load(Ordering::Acquire));
        real(name, found, version, flags)
    };
    // SAFETY: the arguments are the caller's, as the driver's function wants them.
    unsafe { replace(code, name, found, version, flags, caller) }
}

unsafe extern "C" fn get_v2_with(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
    caller: *const c_void,
) -> u32 {
    // SAFETY: as in get_with().
    let code = unsafe {
        let real = std::mem::transmute::<*mut c_void, GetV2>(REAL_V2.load(Ordering::Acquire));
        real(name, found, version, flags, status)
    };
    // SAFETY: as in get_with().
    unsafe { replace(code, name, found, version, flags, caller) }
}

/// Replaces `*found` where the driver returned success and found one of our functions.
///
/// # Safety
/// The driver has accepted `name` and `found`: NULL, or a string and a place for a pointer.
unsafe fn replace(
    code: u32,
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
    caller: *const c_void,
) -> u32 {
    if code != 0 || name.is_null() || found.is_null() {
        return code;
    }
    // SAFETY: the caller's promise.
    let (name, real) = unsafe { (CStr::from_ptr(name), found.read()) };
    if !real.is_null()
        && let Some(index) = names::of_entry_point(name, version, flags)
        && !is_another(real, index)
    {
        // SAFETY: as above: the driver has just written there.
        unsafe { found.write(lookup::in_place_of(index, real, caller)) };
    }
    code
}

/// Whether the driver exports `real` under a name that we do not know: a newer variant, with
/// another signature.
fn is_another(real: *mut c_void, index: usize) -> bool {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and fills `info` where it returns anything but 0.
    let info = unsafe {
        if libc::dladdr(real, info.as_mut_ptr()) == 0 {
            return false;
        }
        info.assume_init()
    };
    if info.dli_sname.is_null() || info.dli_saddr != real {
        return false;
    }
    // SAFETY: a symbol's name in a loaded object, NUL-terminated.
    let symbol = unsafe { CStr::from_ptr(info.dli_sname) };
    let base = |index: usize| names::FUNCTIONS.get(index).map(|function| function.base);
    match names::of_symbol(symbol) {
        Some(known) => base(known) != base(index),
        // One address may have several names: only a longer form of this very name is another
        // variant.
        None => base(index).is_some_and(|base| symbol.to_bytes().starts_with(base.to_bytes())),
    }
}
