//! What the C functions promise a loader.

use gruyere::door::control::*;
use gruyere::door::loader::*;
use std::ffi::{CStr, CString, c_char};
use std::ptr::{null, null_mut};

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
