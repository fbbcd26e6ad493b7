//! The state of the thresholds of `alert:`. A device checks them whenever it looks at its use of
//! memory (`phase`): without a thread of their own, off the hot path and with no lock of the heap
//! held.

use crate::driver::DeviceId;
use crate::sync::Mutex;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::watch::{
    Alarm, Facts, Forecast, Metric, Passed, Point, Rate, Rule, capacity, forecast,
};
use gruyere_record::{DeviceGauge, Reader, Record};
use std::time::{Duration, Instant};

/// Time between two checks. A check reads a hundred cache lines or so of the record.
const LOOKS: Duration = Duration::from_millis(100);
/// Time between two forecasts: half a millisecond each, at most.
const FORECASTS: Duration = Duration::from_secs(2);
/// Time between two alerts of one threshold, seconds.
pub(crate) const REPEAT_SECONDS: f64 = 60.0;

pub(crate) struct Watching(pub(crate) Option<Mutex<State>>);

pub(crate) struct State {
    alarms: Vec<Alarm>,
    needs_forecast: bool,
    begin: Instant,
    pub(crate) next: Instant,
    next_forecast: Instant,
    forecast: Forecast,
    rate: Rate,
}

impl Watching {
    /// The watching for `rules`; without rules, it never looks.
    pub(crate) fn new(rules: &[Rule]) -> Self {
        if rules.is_empty() {
            return Self(None);
        }
        let now = Instant::now();
        Self(Some(Mutex::new(State {
            alarms: rules
                .iter()
                .map(|rule| Alarm::new(rule.threshold.clone(), REPEAT_SECONDS))
                .collect(),
            needs_forecast: rules.iter().any(|rule| rule.threshold.metric == Metric::OomIn),
            begin: now,
            next: now,
            next_forecast: now,
            forecast: Forecast::Unknown,
            rate: Rate::default(),
        })))
    }
}

/// The rules that are passed, and the memory in the same reading.
pub(crate) struct Look {
    /// By number.
    pub(crate) passed: Vec<(usize, Passed)>,
    pub(crate) live: u64,
    pub(crate) live_peak: u64,
    pub(crate) reserved: u64,
}

impl State {
    /// Checks the rules of `device`. `without_record`: the snapshot for a heap without a record.
    pub(crate) fn look(
        &mut self,
        record: &Record,
        device: DeviceId,
        now: Instant,
        without_record: impl FnOnce() -> DeviceSnapshot,
    ) -> Look {
        self.next = now + LOOKS;
        let reader = Reader::own(record);
        let snapshot = reader.as_ref().and_then(|reader| reader.device(device));
        let snapshot = snapshot.unwrap_or_else(without_record);
        if self.needs_forecast
            && now >= self.next_forecast
            && let Some(reader) = &reader
        {
            self.next_forecast = now + FORECASTS;
            let points: Vec<Point> =
                reader.timeline(device).entries.iter().map(Point::from).collect();
            self.forecast = forecast(&points, capacity(&snapshot));
        }
        let seconds = now.duration_since(self.begin).as_secs_f64();
        let rate = self.rate.look(seconds, snapshot.total().malloc_bytes);
        let facts = Facts { device: &snapshot, rate, forecast: self.forecast };
        let looks = self.alarms.iter_mut().map(|alarm| alarm.look(seconds, &facts)).enumerate();
        Look {
            passed: looks.filter_map(|(number, passed)| Some((number, passed?))).collect(),
            live: snapshot.live,
            live_peak: snapshot.live_peak,
            reserved: snapshot.gauge(DeviceGauge::Reserved),
        }
    }
}
