//! Checks a loader's settings before they take effect.

use super::process::{GRUYERE_INVALID, GRUYERE_OK, guarded};
use crate::config::Config;
use std::ffi::{CStr, c_char, c_int};

/// Checks `settings`, in the syntax of `GRUYERE_CONF`. Writes the error, if any, to `message` as a
/// NUL-terminated string, truncated to `room` bytes. Changes nothing, and does not touch CUDA.
///
/// Returns 0 if the settings are valid; -2 if they are not, or `settings` is NULL or not UTF-8.
///
/// # Safety
/// `settings` is NULL or a NUL-terminated string; `message` is NULL or valid for writes of `room`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_check_configuration(
    settings: *const c_char,
    message: *mut c_char,
    room: usize,
) -> c_int {
    guarded(GRUYERE_INVALID, || {
        let text = if settings.is_null() {
            Err("no settings were given (NULL)".to_owned())
        } else {
            // SAFETY: the caller's promise.
            let text = unsafe { CStr::from_ptr(settings) };
            text.to_str().map_err(|error| format!("not valid UTF-8: {error}"))
        };
        let Err(reason) =
            text.and_then(|text| Config::parse(text).map_err(|error| error.to_string()))
        else {
            return GRUYERE_OK;
        };
        if !message.is_null() && room > 0 {
            let mut end = reason.len().min(room - 1);
            while !reason.is_char_boundary(end) {
                end -= 1;
            }
            let bytes = &reason.as_bytes()[..end];
            // SAFETY: at most room - 1 bytes and a NUL, by the caller's promise; `bytes` is our
            // own.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), message.cast::<u8>(), bytes.len());
                message.add(bytes.len()).write(0);
            }
        }
        GRUYERE_INVALID
    })
}
