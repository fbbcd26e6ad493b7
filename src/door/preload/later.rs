//! Calls that enqueue what may wait for something that comes later: for what the host does, or for
//! another process. The heap is told before the first of them goes on, and makes no stream wait
//! from then on where that could close a cycle (`waits:auto`; the argument is
//! `heap/src/order/waits.rs`).

use super::way::{Way, way};
use crate::door::{forbid_waits, guarded};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the heap has been told. false -> true, for good, by whoever has told it.
static TOLD: AtomicBool = AtomicBool::new(false);

/// The program is about to make `call`.
#[inline]
pub fn forbid_waits_before(call: &str) {
    tell(|| format!("the program calls {call}"));
}

/// The program is about to make a communicator of `ranks`, by `call`.
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
    // Where programs are not served, no stream of theirs is made to wait; and the library's own
    // calls wait for nothing.
    if let Way::Manage(_inside) = way() {
        guarded((), || forbid_waits(&why()));
        TOLD.store(true, Ordering::Release);
    }
}
