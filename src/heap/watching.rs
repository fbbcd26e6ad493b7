//! The thresholds of `alert:`: looked at where the device looks at its use of memory anyway (`phase`), so without a thread of their own, off the hot
//! path and with no lock of the heap held.
#![deny(unsafe_code)]

use super::alerts::{ALERTS, Alert, AlertKind};
use super::device::Device;
use super::shared::Shared;
use super::sync::Mutex;
use crate::record::reader::DeviceSnapshot;
use crate::record::{DEVICE_GAUGES, DeviceGauge, Reader};
use crate::watch::{Action, Alarm, Facts, Forecast, Metric, Passed, Point, Rate, Rule, capacity, forecast};
use std::time::{Duration, Instant};

/// Between two looks. One reads a hundred cache lines or so of the record.
const LOOKS: Duration = Duration::from_millis(100);
/// Between two forecasts: half a millisecond each, at most.
const FORECASTS: Duration = Duration::from_secs(2);
/// Between two times that a threshold speaks, seconds.
const EVERY: f64 = 60.0;

/// The thresholds of a device.
pub struct Watching(Option<Mutex<State>>);

struct State {
    alarms: Vec<Alarm>,
    needs_forecast: bool,
    begin: Instant,
    next: Instant,
    next_forecast: Instant,
    forecast: Forecast,
    rate: Rate,
}

impl Watching {
    /// For `rules`; where there are none, it never looks.
    pub fn new(rules: &[Rule]) -> Self {
        if rules.is_empty() {
            return Self(None);
        }
        let now = Instant::now();
        Self(Some(Mutex::new(State {
            alarms: rules.iter().map(|rule| Alarm::new(rule.threshold.clone(), EVERY)).collect(),
            needs_forecast: rules.iter().any(|rule| rule.threshold.metric == Metric::OomIn),
            begin: now,
            next: now,
            next_forecast: now,
            forecast: Forecast::Unknown,
            rate: Rate::default(),
        })))
    }
}

impl State {
    /// The rules that speak now, by number.
    fn look(&mut self, device: &Device, shared: &Shared, now: Instant) -> Vec<(usize, Passed)> {
        self.next = now + LOOKS;
        let reader = Reader::own(shared.record);
        let snapshot = reader.as_ref().and_then(|reader| reader.device(device.id));
        let snapshot = snapshot.unwrap_or_else(|| without_record(device, shared));
        if self.needs_forecast
            && now >= self.next_forecast
            && let Some(reader) = &reader
        {
            self.next_forecast = now + FORECASTS;
            let points: Vec<Point> = reader.timeline(device.id).entries.iter().map(Point::from).collect();
            self.forecast = forecast(&points, capacity(&snapshot));
        }
        let seconds = now.duration_since(self.begin).as_secs_f64();
        let rate = self.rate.look(seconds, snapshot.total().malloc_bytes);
        let facts = Facts { device: &snapshot, rate, forecast: self.forecast };
        let looks = self.alarms.iter_mut().map(|alarm| alarm.look(seconds, &facts)).enumerate();
        looks.filter_map(|(number, passed)| Some((number, passed?))).collect()
    }
}

/// What is known where no record is kept: the heap's own numbers, and no gauges that only the record has.
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
        (DeviceGauge::LargestRequest, stats.largest_request),
        (DeviceGauge::LargestGrowing, stats.largest_growing),
    ] {
        snapshot.gauges[gauge as usize] = value;
    }
    // What is live and waits, so that fragmentation of every kind has its parts.
    let sum = &mut snapshot.blocks[0][0];
    (sum.malloc_bytes, sum.malloc_requested, sum.pending_begun_bytes) =
        (stats.live, stats.requested, stats.pending);
    snapshot
}

impl Device {
    /// Looks at the thresholds of `alert:`, and does what they say. To be called without any lock.
    pub(super) fn look_at_thresholds(&self, shared: &Shared, now: Instant) {
        let Some(state) = &self.watching.0 else { return };
        // Whoever has it looks already.
        let Some(mut state) = state.try_lock() else { return };
        if now < state.next {
            return;
        }
        let passed = state.look(self, shared, now);
        // Those who are told may allocate, and come by here again.
        drop(state);
        for (number, passed) in passed {
            if let Some(rule) = shared.config.alert.get(number) {
                self.act(shared, number, rule, passed);
            }
        }
    }

    fn act(&self, shared: &Shared, number: usize, rule: &Rule, passed: Passed) {
        let (live, live_peak) = shared.record.live(self.id);
        let reserved = super::lock(&self.central).backing.reserved;
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
                    format!("; {} B were given back", self.trim(shared))
                } else {
                    String::new()
                };
                log::warn!(
                    "device {}: {} is passed: {} is {value} ({live} B live, {reserved} B held){given}",
                    self.id,
                    rule.threshold,
                    metric.name()
                );
            }
        }
    }
}
