//! Calls that enqueue work which may wait for a later action of the host or of another process. The
//! first such call is announced to the heap before it runs. From then on the heap makes no stream
//! wait where that could close a cycle (`waits:auto`; the argument is in
//! `crates/heap/src/order/waits.rs`).

use super::way::{Way, way};
use crate::door::process::{forbid_waits, guarded};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the heap has been notified. false -> true, for good, by any thread that has notified it.
static TOLD: AtomicBool = AtomicBool::new(false);

/// Announces that the program is about to make `call`.
#[inline]
pub fn forbid_waits_before(call: &str) {
    tell(|| format!("the program calls {call}"));
}

/// Announces that the program is about to make a communicator of `ranks` by `call`.
#[inline]
pub fn forbid_waits_before_ranks(ranks: i32, call: &str) {
    if ranks != 1 {
        tell(|| format!("the program calls {call} for {ranks} ranks"));
    }
}

fn tell(why: impl FnOnce() -> String) {
    if TOLD.load(Ordering::Acquire) {
        return;
    }
    // A program that is not served has no stream that the heap makes wait; and the library's own
    // calls wait for nothing.
    if let Way::Manage(_inside) = way() {
        guarded((), || forbid_waits(&why()));
        TOLD.store(true, Ordering::Release);
    }
}
