//! Trackers of segments: one function of the shim's, which calls torch's trackers.

use super::super::torch::MempoolId;
use std::ffi::c_int;
use std::sync::OnceLock;

/// A segment of a MemPool is new, or about to be freed.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereSegmentEvent {
    /// 0: the segment is new, and not used yet; 1: it is about to be freed, and still there.
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

/// Receives events of segments, on the thread that allocates or frees, with no lock of the library
/// held. Must not unwind.
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
