//! The way of a call, of the runtime or of the driver.

use super::inside::{self, Inside};
use super::mode::{self, Mode};

/// The treatment of a call.
pub enum Way {
    /// Straight through.
    Through,
    /// The heap serves it.
    Manage(Inside),
    /// It passes through and is recorded.
    Observe(Inside),
    /// The process is ending.
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
