//! Growth and forecast as metrics, with the recent peak, without which growth can't be judged.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::cmp::Reverse;

use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sites::Line;
use gruyere_record::timeline::TimelineEntry;
use gruyere_record::watch::{Forecast, Point, capacity, forecast, minute_peak};

use super::families::{Families, Of};
use crate::recent;

/// Lines of the program exported by growth, per device.
pub const GROWING: usize = 5;

/// A device's forecast, its growth and the peak of its last minute.
pub fn of_device(
    families: &mut Families,
    device: &DeviceSnapshot,
    timeline: &[TimelineEntry],
    of: &Of,
) {
    let said = (
        "gruyere_live_recent_peak_bytes",
        "bytes",
        "Highest live memory in the last minute; small blocks count by their slabs.",
    );
    families.gauge(said, of, minute_peak(timeline, device, recent::now()));
    let points: Vec<Point> = timeline.iter().map(Point::from).collect();
    // No sample without growth: a panel of the soonest shows only devices that have a forecast.
    if let Forecast::Growing(growth) = forecast(&points, capacity(device)) {
        let said = (
            "gruyere_out_of_memory_forecast_seconds",
            "seconds",
            "Time until memory runs out at the current growth; absent without a forecast.",
        );
        families.number(said, of, growth.seconds);
        let said = (
            "gruyere_growth_bytes_per_second",
            "bytes_per_second",
            "Growth of live memory; absent without a forecast.",
        );
        families.number(said, of, growth.bytes_per_second);
    }
}

/// The lines that grow most, with their growth per step.
pub fn most_growing(found: &[Line]) -> Vec<(&Line, u64)> {
    let mut growing: Vec<(&Line, u64)> =
        found.iter().filter_map(|line| Some((line, line.growth?.bytes_a_step))).collect();
    growing.sort_by_key(|(line, bytes)| (Reverse(*bytes), Reverse(line.live_bytes)));
    growing.truncate(GROWING);
    growing
}

#[cfg(test)]
mod tests {
    use gruyere_record::sites::Growth;

    use super::*;

    #[test]
    fn of_many_lines_that_grow_the_five_that_grow_most_are_told() {
        let line = |n: u64| Line {
            name: format!("train.py:{n}"),
            growth: (n != 9).then(|| Growth { bytes_a_step: n, since: 1, bytes: 10 * n }),
            live_bytes: 1000 - n,
            ..Line::default()
        };
        let found: Vec<Line> = (0..12).map(line).collect();
        let told: Vec<u64> = most_growing(&found).into_iter().map(|(_, bytes)| bytes).collect();
        assert_eq!(told, [11, 10, 8, 7, 6], "9 does not grow");
    }
}
