//! libgruyere.so's side of this library: the table with the replacements of the driver's functions.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::real;

/// The version of the table that this library understands.
const VERSION: u32 = 1;

/// `struct gruyere_driver_door` of libgruyere.so. Newer versions may be longer.
#[repr(C)]
struct Door {
    version: u32,
    /// Size of this struct in bytes.
    size: u32,
    /// Returns libgruyere.so's replacement of the driver's function `name` at `real`, for code at
    /// `caller`; NULL: hand out the real one.
    replacement: Option<
        unsafe extern "C" fn(
            name: *const c_char,
            real: *mut c_void,
            caller: *const c_void,
        ) -> *mut c_void,
    >,
}

/// ```text
/// null  -> door   find(), once libgruyere.so is loaded and understood; every thread finds the same
/// ```
static DOOR: AtomicPtr<Door> = AtomicPtr::new(null_mut());

/// libgruyere.so's replacement of `real`, where it wants the call.
pub fn replacement(name: &CStr, real: *mut c_void, caller: *const c_void) -> Option<*mut c_void> {
    let door = NonNull::new(DOOR.load(Ordering::Acquire)).or_else(find)?;
    // SAFETY: of libgruyere.so, which is never unloaded; its table never changes.
    let replacement = unsafe { door.as_ref() }.replacement?;
    // SAFETY: as the table says; `name` is NUL-terminated.
    let ours = unsafe { replacement(name.as_ptr(), real, caller) };
    (!ours.is_null()).then_some(ours)
}

#[cold]
fn find() -> Option<NonNull<Door>> {
    // SAFETY: RTLD_DEFAULT is always valid. From here it means the global scope.
    let address =
        unsafe { real::look_up(libc::RTLD_DEFAULT, c"gruyere_driver_door", find as *const c_void) };
    if address.is_null() {
        complain(
            c"gruyere: libgruyere_driver.so is preloaded without libgruyere.so, so it does \
              nothing; preload both (LD_PRELOAD=\"libgruyere_driver.so libgruyere.so\"), or use \
              `gruyere run`\n",
        );
        return None;
    }
    // SAFETY: the one function of that name is libgruyere.so's: it takes a version and returns a
    // table or NULL.
    let door = unsafe {
        let open =
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u32) -> *mut Door>(address);
        NonNull::new(open(VERSION))
    };
    // SAFETY: a table has a version and a size at least, and only those are read before the size is
    // known.
    let understood = door.filter(|door| unsafe {
        let version = (&raw const (*door.as_ptr()).version).read();
        let size = (&raw const (*door.as_ptr()).size).read();
        version == VERSION && size as usize >= size_of::<Door>()
    });
    if let Some(door) = understood {
        DOOR.store(door.as_ptr(), Ordering::Release);
        return Some(door);
    }
    complain(
        c"gruyere: libgruyere_driver.so and libgruyere.so are of different versions, so the \
          driver's functions stay unchanged; preload both from one build\n",
    );
    None
}

/// Prints `message` on stderr, once. A system call: nothing else is sure to work wherever a program
/// looks a symbol up.
fn complain(message: &CStr) {
    // false -> true, once, by the first thread that complains.
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        let bytes = message.to_bytes();
        // SAFETY: writes `bytes`, which live for ever, to a descriptor.
        unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
    }
}
