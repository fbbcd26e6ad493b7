//! Answers a lookup of one of our names.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;

use crate::objects::Object;
use crate::{entry_point, names, real, table};

/// `dlsym` for one of our names, called by the code at `caller`.
///
/// # Safety
/// `handle` is a valid one of `dlopen`'s, or RTLD_DEFAULT; `name` is NUL-terminated.
pub unsafe extern "C" fn answer(
    handle: *mut c_void,
    name: *const c_char,
    caller: *const c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    // SAFETY: as above.
    let found = unsafe { without_us(handle, name, caller) };
    if found.is_null() {
        return undefined(name);
    }
    let answer = names::of_symbol(name).map_or(found, |index| in_place_of(index, found, caller));
    // A failed step on the way is no failure of the program's lookup: its dlerror must be empty.
    // SAFETY: no preconditions.
    unsafe { libc::dlerror() };
    answer
}

/// Returns null after a lookup that fails, so that the program's dlerror has a message.
fn undefined(name: &CStr) -> *mut c_void {
    if real::behind_us(name).is_null() {
        return null_mut();
    }
    // There is one behind us, which the caller's handle does not reach: look up a name that does
    // not exist.
    real::behind_us(c"gruyere_no_such_function");
    null_mut()
}

/// The function to hand out to `caller` for number `index`, whose real address is `real`.
pub fn in_place_of(index: usize, real: *mut c_void, caller: *const c_void) -> *mut c_void {
    let asker = Object::of(caller);
    // The driver's own lookups, and any object's for a function of its own: with our replacement it
    // would call itself for ever.
    if asker.is_some_and(|asker| {
        asker.is_driver() || Object::of(real).is_some_and(|owner| owner == asker)
    }) {
        return real;
    }
    let replaced = names::FUNCTIONS
        .get(index)
        .and_then(|function| table::replacement(function.symbol, real, caller));
    match replaced {
        None => real,
        Some(_) if index == names::GET_PROC_ADDRESS => entry_point::over(real),
        Some(_) if index == names::GET_PROC_ADDRESS_V2 => entry_point::over_v2(real),
        Some(ours) => ours,
    }
}

/// The result of the real `dlsym` in a process without this library's own exports.
///
/// RTLD_DEFAULT depends on the caller: it searches the global scope, then the calling object and
/// its dependencies. Called from here, the real one would leave the second out.
///
/// # Safety
/// As [`answer`].
unsafe fn without_us(handle: *mut c_void, name: &CStr, caller: *const c_void) -> *mut c_void {
    // SAFETY: the caller's promise.
    let found = unsafe { real::look_up(handle, name, caller) };
    if !found.is_null() && Object::of(found) != Object::own() {
        return found;
    }
    // Our own export, in the global scope, hides those behind it.
    let behind = if found.is_null() { found } else { real::behind_us(name) };
    if !behind.is_null() || handle != libc::RTLD_DEFAULT {
        return behind;
    }
    let Some(path) = Object::of(caller).and_then(Object::path) else { return null_mut() };
    // SAFETY: the name of a loaded object, which is found again and not loaded.
    let asking = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if asking.is_null() {
        return null_mut();
    }
    // SAFETY: a handle that was just opened. Its object stays loaded: its code is waiting for this
    // answer.
    let found = unsafe { real::look_up(asking, name, caller) };
    // SAFETY: as above; closes our own reference only.
    unsafe { libc::dlclose(asking) };
    // The executable's handle stands for the global scope, us included.
    if Object::of(found) == Object::own() { null_mut() } else { found }
}
