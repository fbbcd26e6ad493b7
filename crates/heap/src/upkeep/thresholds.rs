//! Alerts of a device: checks the thresholds of `alert:`, acts on those passed, and calls
//! listeners.

use crate::device::Device;
use crate::shared::Shared;
use crate::upkeep::alerts::{ALERTS, Alert, AlertKind};
use crate::upkeep::watching::Look;
use gruyere_record::facts::Process;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::watch::{Action, Passed, Rule};
use gruyere_record::{DEVICE_GAUGES, DeviceGauge};
use std::time::Instant;

/// The snapshot without a record: the heap's own figures, without the gauges that only a record
/// has.
fn without_record(device: &Device, shared: &Shared) -> DeviceSnapshot {
    let stats = device.stats(shared);
    let mut snapshot = DeviceSnapshot {
        device: device.id,
        live: stats.live,
        live_peak: stats.live_peak,
        gauges: vec![0; DEVICE_GAUGES],
        ..DeviceSnapshot::default()
    };
    for (gauge, value) in [
        (DeviceGauge::Reserved, stats.reserved),
        (DeviceGauge::ReservedPeak, stats.reserved_peak),
        (DeviceGauge::ArenaFree, stats.arena_free),
        (DeviceGauge::LargestFree, stats.largest_free),
        (DeviceGauge::CapturePinned, stats.captured),
        (DeviceGauge::Pending, stats.pending),
        (DeviceGauge::SlabBytes, stats.slab_bytes),
        (DeviceGauge::Limit, stats.limit),
        (DeviceGauge::TotalMemory, stats.total_memory),
        (DeviceGauge::Retries, stats.retries),
        (DeviceGauge::OutOfMemories, stats.out_of_memories),
        (DeviceGauge::BadFrees, stats.bad_frees),
        (DeviceGauge::Step, u64::from(shared.step())),
        (DeviceGauge::Lost, stats.lost),
        (DeviceGauge::TypicalRequest, stats.typical_request),
        (DeviceGauge::LargestRequest, stats.largest_request),
        (DeviceGauge::LargestGrowing, stats.largest_growing),
    ] {
        snapshot.gauges[gauge as usize] = value;
    }
    // Live and pending bytes, so that every kind of fragmentation has its parts.
    let sum = &mut snapshot.blocks[0][0];
    (sum.malloc_bytes, sum.malloc_requested, sum.pending_begun_bytes) =
        (stats.live, stats.requested, stats.pending);
    snapshot
}

/// Before a line of the log, where several ranks may share it.
fn whose(process: &Process) -> String {
    let rank = process.rank.filter(|_| process.world_size.is_some_and(|size| size > 1));
    rank.map_or_else(String::new, |rank| format!("rank {rank}: "))
}

impl Device {
    /// Checks the thresholds of `alert:` and acts on those passed. Call with no lock held.
    pub(crate) fn look_at_thresholds(&self, shared: &Shared, now: Instant) {
        let Some(state) = &self.watching.0 else { return };
        // A thread that holds the lock is checking already.
        let Some(mut state) = state.try_lock() else { return };
        if now < state.next {
            return;
        }
        let look = state.look(shared.record, self.id, now, || without_record(self, shared));
        // The listeners may allocate, and come by here again.
        drop(state);
        for &(number, passed) in &look.passed {
            if let Some(rule) = shared.settings.alert.get(number) {
                self.act(shared, number, rule, passed, &look);
            }
        }
    }

    fn act(&self, shared: &Shared, number: usize, rule: &Rule, passed: Passed, look: &Look) {
        // Before any memory goes back.
        ALERTS.passed(self.id, rule.threshold.text());
        // Not read again: other threads go on, and the figures would contradict the value.
        let &Look { live, live_peak, reserved, .. } = look;
        match rule.action {
            Action::Callback => ALERTS.raise(&Alert {
                kind: AlertKind::Threshold,
                device: self.id,
                asked: 0,
                reserved,
                live,
                live_peak,
                count: passed.count,
                threshold: number as u32,
                value: passed.value,
            }),
            Action::Log | Action::Trim => {
                let metric = rule.threshold.metric;
                let value = metric.unit().show(passed.value);
                let given = if rule.action == Action::Trim {
                    format!("; {} B were released", self.trim(shared))
                } else {
                    String::new()
                };
                log::warn!(
                    "{}device {}: {} is passed: {} is {value} ({live} B live, {reserved} B \
                     held){given}",
                    whose(&Process::current()),
                    self.id,
                    rule.threshold,
                    metric.name()
                );
            }
        }
    }

    /// Raises an alert of the device. Call with no lock held.
    pub(crate) fn alert(
        &self,
        shared: &Shared,
        kind: AlertKind,
        asked: u64,
        reserved: u64,
        count: u64,
    ) {
        if ALERTS.are_wanted() {
            let (live, live_peak) = shared.record.live(self.id);
            let device = self.id;
            ALERTS.raise(&Alert {
                kind,
                device,
                asked,
                reserved,
                live,
                live_peak,
                count,
                threshold: 0,
                value: 0.0,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_names_the_rank_where_there_are_several() {
        let of = |rank, world_size| whose(&Process { rank, world_size, ..Process::default() });
        assert_eq!(of(Some(1), Some(2)), "rank 1: ");
        assert_eq!((of(Some(0), Some(1)), of(None, None)), (String::new(), String::new()));
    }
}
