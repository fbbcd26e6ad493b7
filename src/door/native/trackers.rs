//! Trackers of segments: one function of the shim's, which calls torch's trackers.

use super::super::torch::MempoolId;
use std::ffi::c_int;
use std::sync::OnceLock;

/// A segment of a MemPool comes or goes.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereSegmentEvent {
    /// 0: it is there, and nobody has used it yet; 1: it is about to go, and still there.
    pub is_freed: c_int,
    /// Its device.
    pub device: c_int,
    /// Its pool.
    pub pool: MempoolId,
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
}

/// Hears of segments, with no lock of the library held, on the thread that asks or gives back. It
/// never unwinds.
pub type GruyereTracker = extern "C" fn(event: *const GruyereSegmentEvent);

static TRACKER: OnceLock<GruyereTracker> = OnceLock::new();

/// Sets the tracker; the first one stays.
pub(super) extern "C" fn track(tracker: GruyereTracker) {
    let _ = TRACKER.set(tracker);
}

pub(super) fn tell(event: &GruyereSegmentEvent) {
    if let Some(tracker) = TRACKER.get() {
        tracker(event);
    }
}
