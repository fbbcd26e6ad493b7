//! Leaves the record of a program that ends with a failure after an out-of-memory, for `gruyere
//! post`: a C program checks each call, and exits with a status. Its exit is clean otherwise, and
//! would remove the record. (The Python package does the same for an uncaught exception.)
#![deny(unsafe_code)]

use super::python;
use crate::heap::Heap;
use crate::record::sweep::is_copy;
use crate::record::{DeviceGauge, Reader};
use parking_lot::Mutex;
use std::ffi::c_int;

/// The process at its latest out-of-memory.
static LATEST: Mutex<Option<Served>> = Mutex::new(None);

/// What the process has been served, of all devices.
#[derive(Clone, Copy)]
struct Served {
    bytes: u64,
    live: u64,
    step: u64,
}

impl Served {
    fn of(heap: &Heap) -> Option<Self> {
        let devices = Reader::own(heap.record())?.device_snapshots();
        let sum = |of: fn(&crate::record::reader::DeviceSnapshot) -> u64| {
            devices.iter().fold(0, |sum: u64, device| sum.saturating_add(of(device)))
        };
        Some(Self {
            bytes: sum(|device| device.total().malloc_bytes),
            live: sum(|device| device.live),
            step: sum(|device| device.gauge(DeviceGauge::Step)),
        })
    }

    /// Whether the program has gone on since `then`: what is served while it ends is little.
    fn has_gone_on(self, then: Self) -> bool {
        self.step > then.step || self.bytes.saturating_sub(then.bytes) > then.live
    }
}

/// Notes an out-of-memory that reaches the program.
pub(super) fn note(heap: &Heap) {
    *LATEST.lock() = Served::of(heap);
}

/// At the end of the process, whose record still exists.
pub(super) fn at_exit(heap: &Heap, status: c_int) {
    // The package has kept the record of an uncaught exception, and knows one that was caught.
    if status == 0 || python::is_begun() {
        return;
    }
    // A thread that is in `note` has no failure to tell of yet.
    let Some(then) = LATEST.try_lock().and_then(|latest| *latest) else { return };
    if Served::of(heap).is_none_or(|now| now.has_gone_on(then)) {
        return;
    }
    if super::control::keep_record().is_some_and(|path| is_copy(&path)) {
        log::warn!(
            "the program ends with status {status} after an out-of-memory: `gruyere post {}` \
             shows what was live then",
            std::process::id()
        );
    }
}
