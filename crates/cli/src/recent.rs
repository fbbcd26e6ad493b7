//! The recent peak of a device, for every view: `PEAK` in tables, `peak_bytes` in JSON.

use std::time::{SystemTime, UNIX_EPOCH};

use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::timeline::TimelineEntry;
use gruyere_record::watch;

/// [`watch::recent_peak`]. For an ended process, the last minute is the one before its end.
pub fn peak(timeline: &[TimelineEntry], device: &DeviceSnapshot, is_live: bool) -> u64 {
    let end = timeline.last().map_or(0, |last| last.realtime_nanoseconds);
    watch::recent_peak(timeline, device, if is_live { now() } else { end })
}

/// Nanoseconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
