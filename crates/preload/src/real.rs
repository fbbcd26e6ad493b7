//! The real `dlsym`: the one that the program's lookups would reach without us.

use std::ffi::{CStr, c_char, c_void};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::objects;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The next `dlsym` behind ours: glibc's, or that of another library in `LD_PRELOAD` that replaces
/// it as we do.
///
/// ```text
/// state     meaning                     changed by
/// 0         not asked yet               -> address: prepare(), any number of threads at once, each
///                                       with the same address
/// address   of the next dlsym           never again
/// ```
///
/// Release and acquire (on x86-64 a plain load is one): a thread that sees it sees the others
/// below.
pub static NEXT: AtomicUsize = AtomicUsize::new(0);

/// glibc's own `dlsym`. Written before [`NEXT`], never changed.
pub static LIBC: AtomicUsize = AtomicUsize::new(0);

/// The first byte of the object of [`NEXT`], and its length in bytes: 0 and 0 where that is glibc.
/// Lookups from there get glibc's `dlsym`, as that object may find ours when it searches for the
/// one behind itself. Written before [`NEXT`], never changed.
pub static NEXT_START: AtomicUsize = AtomicUsize::new(0);
/// See [`NEXT_START`].
pub static NEXT_LENGTH: AtomicUsize = AtomicUsize::new(0);

/// The versions of glibc's `dlsym`: since 2.34 in libc.so.6, before that in libdl.so.2. Without a
/// version our own would be found.
#[cfg(target_arch = "x86_64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
#[cfg(target_arch = "aarch64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.17"];

/// Finds [`NEXT`] and the rest; returns [`NEXT`], 0 where there is no `dlsym` but ours.
pub extern "C" fn prepare() -> usize {
    let mut libc = 0;
    for version in VERSIONS {
        if libc == 0 {
            // SAFETY: both strings are NUL-terminated. RTLD_NEXT: behind this library, which makes
            // the call (black_box keeps it from becoming a jump, which would leave our caller's
            // return address).
            libc = black_box(unsafe {
                libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) as usize
            });
        }
    }
    let Some(glibc) = function(libc) else { return 0 };
    // SAFETY: as above.
    let mut next = black_box(unsafe { glibc(libc::RTLD_NEXT, c"dlsym".as_ptr()) as usize });
    if next == 0 {
        next = libc;
    }
    LIBC.store(libc, Ordering::Relaxed);
    if next != libc
        && let Some(range) = objects::range_of(next)
    {
        NEXT_START.store(range.start, Ordering::Relaxed);
        NEXT_LENGTH.store(range.end - range.start, Ordering::Relaxed);
    }
    NEXT.store(next, Ordering::Release);
    next
}

fn function(address: usize) -> Option<Dlsym> {
    // SAFETY: 0 is None; any other value here is the address of a function named dlsym.
    unsafe { std::mem::transmute::<usize, Option<Dlsym>>(address) }
}

/// The result of the real `dlsym` for `handle` and `name`, called by code at `caller`; `handle` is
/// one of `dlopen`'s or `RTLD_DEFAULT`.
///
/// # Safety
/// `handle` is such a handle, and valid.
pub unsafe fn look_up(handle: *mut c_void, name: &CStr, caller: *const c_void) -> *mut c_void {
    let next = match NEXT.load(Ordering::Acquire) {
        0 => prepare(),
        next => next,
    };
    let is_next = (caller as usize).wrapping_sub(NEXT_START.load(Ordering::Relaxed))
        < NEXT_LENGTH.load(Ordering::Relaxed);
    let dlsym = function(if is_next { LIBC.load(Ordering::Relaxed) } else { next });
    // SAFETY: the caller's promise; `name` is NUL-terminated.
    dlsym.map_or(std::ptr::null_mut(), |dlsym| black_box(unsafe { dlsym(handle, name.as_ptr()) }))
}

/// The symbol `name` behind this library in the order of the dynamic linker.
pub fn behind_us(name: &CStr) -> *mut c_void {
    if NEXT.load(Ordering::Acquire) == 0 {
        prepare();
    }
    // SAFETY: RTLD_NEXT, from this library (black_box: see prepare()).
    let ask = |dlsym: Dlsym| black_box(unsafe { dlsym(libc::RTLD_NEXT, name.as_ptr()) });
    // glibc's: it goes by the return address, which a library in between would change to its own.
    function(LIBC.load(Ordering::Relaxed)).map_or(std::ptr::null_mut(), ask)
}
