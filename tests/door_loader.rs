//! What the C functions promise a loader.

mod common;

use common::{GIB, MIB};
use gruyere::door::control::*;
use gruyere::door::loader::*;
use gruyere::door::torch::gruyere_free;
use gruyere::door::{current, install};
use gruyere_phantom::{Config as GpuConfig, Gpu};
use gruyere_phantom_driver::PhantomDriver;
use std::ffi::{CStr, CString, c_char};
use std::ptr::{null, null_mut};
use std::sync::Arc;

/// The answer to `settings` with `room` bytes for the message, and the message.
fn check(settings: &str, room: usize) -> (i32, String) {
    let settings = CString::new(settings).unwrap();
    let mut message = vec![0x7f as c_char; room + 1];
    // SAFETY: a NUL-terminated string, and `room` bytes to write to.
    let code =
        unsafe { gruyere_check_configuration(settings.as_ptr(), message.as_mut_ptr(), room) };
    assert_eq!(message[room], 0x7f, "written past the room");
    if code == GRUYERE_OK || room == 0 {
        return (code, String::new());
    }
    // SAFETY: terminated, by the function's promise; `message` lives on.
    (code, unsafe { CStr::from_ptr(message.as_ptr()) }.to_str().unwrap().to_owned())
}

#[test]
fn settings_are_checked_with_a_message_and_without_touching_cuda() {
    assert_eq!(check("", 4096).0, GRUYERE_OK);
    assert_eq!(check("backing:pool,limit:90%", 4096).0, GRUYERE_OK);
    let (code, message) = check("bogus:1", 4096);
    assert_eq!(code, GRUYERE_INVALID);
    assert!(
        message.contains("bogus:1") && message.contains("backing") && message.contains("limit"),
        "{message}"
    );
    // SAFETY: NULL is allowed.
    assert_eq!(unsafe { gruyere_check_configuration(null(), null_mut(), 0) }, GRUYERE_INVALID);
}

#[test]
fn a_message_is_cut_to_the_room_between_characters() {
    let whole = check("käse:1", 4096).1;
    for room in 0..=whole.len() + 1 {
        let (code, message) = check("käse:1", room);
        assert_eq!(code, GRUYERE_INVALID);
        assert!(whole.starts_with(&message));
        assert!(
            room == 0 || message.len() + 2 >= room.min(whole.len() + 1),
            "{room}: {}",
            message.len()
        );
    }
}

#[test]
fn a_segment_that_does_not_fit_is_null_and_the_next_one_is_served() {
    install(Arc::new(PhantomDriver::new(Arc::new(Gpu::new(GpuConfig::new(GIB))))), "").unwrap();
    let ask = |bytes: u64| gruyere_segment_malloc(bytes as isize, 0, null_mut());
    let segment = ask(20 * MIB);
    assert!(!segment.is_null());
    assert!(ask(2 * GIB).is_null());
    assert!(gruyere_segment_malloc(-1, 0, null_mut()).is_null());
    assert!(ask(0).is_null());
    let other = ask(2 * MIB);
    assert!(!other.is_null());
    for segment in [segment, other] {
        gruyere_free(segment, 0, 0, null_mut());
    }
    assert_eq!(current().unwrap().stats(0).unwrap().live, 0);
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}
