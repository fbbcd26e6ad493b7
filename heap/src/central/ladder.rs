//! What the reclaim ladder has given.

use crate::central::Central;
use crate::path::rungs::GAUGES;
use std::time::Duration;

impl Central {
    /// Counts one turn on a rung, here and on the record.
    pub(crate) fn count_rung(&mut self, number: usize, bytes: u64, elapsed: Duration) {
        let rung = &mut self.ladder.rungs[number];
        rung.calls += 1;
        rung.bytes += bytes;
        rung.nanoseconds += u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        let [calls, gained, microseconds] = GAUGES[number];
        let values =
            [(calls, rung.calls), (gained, rung.bytes), (microseconds, rung.nanoseconds / 1000)];
        self.gauges.set(&values);
    }
}
