//! Chooses, for libgruyere_driver.so, the function to hand out in place of one of the driver's.

use super::super::super::fork;
use super::super::mode;
use super::calls;
use super::real::{self, Function};
use crate::config::Config;
use std::ffi::{CStr, c_char, c_void};
use std::panic::catch_unwind;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

/// The version of [`DriverDoor`].
const VERSION: u32 = 1;

/// `struct gruyere_driver_door`: this library's table for libgruyere_driver.so. Newer versions may
/// be longer.
///
/// Not for programs: gruyere.h does not declare it.
#[repr(C)]
pub struct DriverDoor {
    version: u32,
    /// Size of this struct in bytes.
    size: u32,
    /// Returns our replacement of the driver's function `name` at `real`, for code at `caller`;
    /// NULL: hand out the real one. For `cuGetProcAddress` and `cuGetProcAddress_v2` it returns
    /// `real` if the door is open: libgruyere_driver.so replaces those itself.
    replacement: unsafe extern "C" fn(
        name: *const c_char,
        real: *mut c_void,
        caller: *const c_void,
    ) -> *mut c_void,
}

static DOOR: DriverDoor =
    DriverDoor { version: VERSION, size: size_of::<DriverDoor>() as u32, replacement };

/// Returns the table for a libgruyere_driver.so of `version`; NULL for any other version.
///
/// cbindgen:ignore
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_driver_door(version: u32) -> *const DriverDoor {
    if version == VERSION { &raw const DOOR } else { ptr::null() }
}

/// Whether the configuration asks for the driver's calls.
///
/// ```text
/// 0 -> NO | YES   is_wanted(), at the first lookup; all threads read the same configuration
/// ```
static WANTED: AtomicU8 = AtomicU8::new(0);
const NO: u8 = 1;
const YES: u8 = 2;

fn is_wanted() -> bool {
    match WANTED.load(Ordering::Relaxed) {
        0 => {}
        known => return known == YES,
    }
    let wanted = Config::from_env().is_ok_and(|config| config.preload.driver);
    WANTED.store(if wanted { YES } else { NO }, Ordering::Relaxed);
    wanted
}

/// See [`DriverDoor`]. Runs inside the program's `dlsym`.
///
/// # Safety
/// `name` is NULL or NUL-terminated; `real` is the address of the driver's function of that name.
unsafe extern "C" fn replacement(
    name: *const c_char,
    real: *mut c_void,
    caller: *const c_void,
) -> *mut c_void {
    if name.is_null() || real.is_null() || fork::is_forked_child() {
        return ptr::null_mut();
    }
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    // A panic is not logged: no log may work here.
    catch_unwind(|| choose(name, real, caller)).unwrap_or(ptr::null_mut())
}

fn choose(name: &CStr, real: *mut c_void, caller: *const c_void) -> *mut c_void {
    // A program may keep for ever a function handed out before the library's initialiser has run;
    // ours passes calls through until then.
    let shut = || !mode::may_open() || !is_wanted();
    // Our own lookups; the stub's functions, which all fail; a door that is shut.
    if real::same_object(caller, replacement as *const c_void) || real::is_in_stub(real) || shut() {
        return ptr::null_mut();
    }
    if name == c"cuGetProcAddress" || name == c"cuGetProcAddress_v2" {
        return real;
    }
    let Some(function) = Function::ALL.iter().copied().find(|function| function.symbol() == name)
    else {
        return ptr::null_mut();
    };
    let Some(ours) = calls::of(function) else { return ptr::null_mut() };
    // Noted before any call of ours. Of two addresses for one function (a name looked up in two
    // ways), the first serves both: handing out the second as it is would part the frees from the
    // mallocs.
    real::found(function, real);
    ours.cast_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_for_the_version_that_is_understood_and_no_other() {
        assert!(gruyere_driver_door(0).is_null() && gruyere_driver_door(VERSION + 1).is_null());
        // SAFETY: a table that lives for ever.
        let door = unsafe { gruyere_driver_door(VERSION).as_ref() }.unwrap();
        assert_eq!((door.version, door.size as usize), (VERSION, size_of::<DriverDoor>()));
    }

    #[test]
    fn a_door_that_is_shut_replaces_nothing() {
        let real = gruyere_driver_door as *mut c_void;
        for name in [c"cuMemAlloc_v2", c"cuGetProcAddress_v2", c"cuInit", c""] {
            // SAFETY: the name is NUL-terminated; nothing is called at the address.
            assert!(unsafe { replacement(name.as_ptr(), real, ptr::null()) }.is_null());
        }
        // SAFETY: NULL is allowed.
        assert!(unsafe { replacement(ptr::null(), real, ptr::null()) }.is_null());
    }
}
