//! Which way a call goes, of the runtime or of the driver.

use super::inside::{self, Inside};
use super::mode::{self, Mode};

/// What to do with a call.
pub enum Way {
    /// Straight through.
    Through,
    /// The heap serves it.
    Manage(Inside),
    /// It goes through and is recorded.
    Observe(Inside),
    /// As at the end of the process.
    Leaving(Inside),
}

/// Straight through where the door is shut, and where the thread is in the library already.
#[inline(always)]
pub fn way() -> Way {
    let mode = mode::mode();
    if mode == Mode::Off {
        return Way::Through;
    }
    match (inside::enter(), mode) {
        (Some(inside), Mode::Manage) => Way::Manage(inside),
        (Some(inside), Mode::Observe) => Way::Observe(inside),
        (Some(inside), Mode::Leaving) => Way::Leaving(inside),
        _ => Way::Through,
    }
}
