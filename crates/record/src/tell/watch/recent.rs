//! The recent peak: a program's recurring need of a device.
//!
//! Between two steps little is live, so `live` alone makes a training look wasteful. The recent
//! peak shows the need of the steps; the peak of the whole run would show what a warm-up needed
//! once.

use crate::reader::DeviceSnapshot;
use crate::timeline::{Sample, TimelineEntry};

/// Without step marks, the span of the peak (ns).
const MINUTE: u64 = 60_000_000_000;

/// The highest live memory of the last step, bytes; without step marks, of the last minute. `now`:
/// nanoseconds since 1970; for an ended process, the end of its timeline.
///
/// Both the running step and the whole one before it count: at the start of a step only the latter
/// shows a step's need. Blocks of up to 16 KiB count by their slabs.
pub fn recent_peak(timeline: &[TimelineEntry], device: &DeviceSnapshot, now: u64) -> u64 {
    let is_marked = timeline
        .last()
        .zip(timeline.first())
        .is_some_and(|(last, first)| last.sample.step > first.sample.step);
    if !is_marked {
        return minute_peak(timeline, device, now);
    }
    let step = timeline.last().map_or(0, |last| last.sample.step).saturating_sub(1);
    highest(timeline.iter().rev().take_while(|entry| entry.sample.step >= step), device)
}

/// The highest live memory of the last minute, bytes.
pub fn minute_peak(timeline: &[TimelineEntry], device: &DeviceSnapshot, now: u64) -> u64 {
    let since = now.saturating_sub(MINUTE);
    highest(timeline.iter().rev().take_while(|entry| entry.realtime_nanoseconds >= since), device)
}

fn highest<'a>(recent: impl Iterator<Item = &'a TimelineEntry>, device: &DeviceSnapshot) -> u64 {
    recent.map(|entry| needed(&entry.sample)).max().unwrap_or(0).max(device.live)
}

/// The highest need at once. `backing:passthrough` has neither runs nor slabs: only the live bytes
/// at the looks are known.
pub(super) fn needed(sample: &Sample) -> u64 {
    sample.high()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A run with a look each second: its steps and highs.
    fn timeline(looks: &[(u64, u64)]) -> Vec<TimelineEntry> {
        let entry = |(n, &(step, high)): (usize, &(u64, u64))| TimelineEntry {
            realtime_nanoseconds: n as u64 * SECOND,
            sample: Sample { step, in_use_high: high, ..Sample::default() },
        };
        looks.iter().enumerate().map(entry).collect()
    }

    fn live(bytes: u64) -> DeviceSnapshot {
        DeviceSnapshot { live: bytes, ..DeviceSnapshot::default() }
    }

    #[test]
    fn the_peak_of_late_is_that_of_the_last_whole_step_and_not_of_the_warm_up() {
        let run = timeline(&[(0, 900), (1, 700), (2, 500), (2, 90), (3, 510), (4, 20)]);
        // Step 4 has just begun, long after the others.
        assert_eq!(recent_peak(&run, &live(20), 500 * SECOND), 510);
        assert_eq!(recent_peak(&run, &live(600), 500 * SECOND), 600, "it goes on growing");
    }

    #[test]
    fn where_no_steps_are_marked_the_peak_is_that_of_the_last_minute() {
        let run = timeline(&[(0, 900), (0, 300), (0, 400)]);
        assert_eq!(recent_peak(&run, &live(20), 61 * SECOND), 400);
        assert_eq!(recent_peak(&run, &live(20), 2 * SECOND), 900);
        assert_eq!(recent_peak(&run, &live(20), 500 * SECOND), 20, "nothing has happened since");
        assert_eq!(recent_peak(&[], &live(20), 0), 20);
    }

    #[test]
    fn without_slabs_and_runs_the_looks_say_what_was_live() {
        let mut run = timeline(&[(0, 0)]);
        run[0].sample.live_high = 70;
        assert_eq!(recent_peak(&run, &live(20), SECOND), 70);
        run[0].sample.live_high = 5u64.wrapping_sub(9);
        assert_eq!(recent_peak(&run, &live(20), SECOND), 20);
    }
}
