//! Reports a passed threshold, but neither repeatedly nor too often.

use super::metric::Facts;
use super::threshold::{Standing, Threshold};

/// A threshold on one device, and the time of its last report.
///
/// *Hysteresis:* it reports when the value passes the bound, and is armed again once the value is
/// back by a tenth of the bound. *Rate limit:* never twice within `every` seconds; a threshold
/// passed in that time is reported at its end if the value is still beyond the bound.
#[derive(Clone, Debug)]
pub struct Alarm {
    threshold: Threshold,
    every: f64,
    is_armed: bool,
    last: Option<f64>,
    count: u64,
}

/// A threshold was passed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passed {
    /// The value, in the metric's unit.
    pub value: f64,
    /// Reports of this alarm, this one included.
    pub count: u64,
}

impl Alarm {
    /// Armed; reports at most once in `every` seconds.
    pub fn new(threshold: Threshold, every: f64) -> Self {
        Self { threshold, every, is_armed: true, last: None, count: 0 }
    }

    /// Its threshold.
    pub fn threshold(&self) -> &Threshold {
        &self.threshold
    }

    /// Checks the values of a moment (seconds on a monotonic clock). An unknown value changes
    /// nothing.
    pub fn look(&mut self, seconds: f64, facts: &Facts<'_>) -> Option<Passed> {
        let value = self.threshold.metric.value(facts)?;
        match self.threshold.standing(value, facts) {
            Standing::Clear => self.is_armed = true,
            Standing::Near => {}
            Standing::Passed => {
                let too_soon = self.last.is_some_and(|last| seconds - last < self.every);
                if self.is_armed && !too_soon {
                    self.is_armed = false;
                    self.last = Some(seconds);
                    self.count += 1;
                    return Some(Passed { value, count: self.count });
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceGauge;
    use crate::reader::DeviceSnapshot;
    use crate::watch::Forecast;

    /// Whether the alarm reports on a device of 1000 bytes with `live` bytes live.
    fn look(alarm: &mut Alarm, seconds: f64, live: u64) -> bool {
        let mut device =
            DeviceSnapshot { live, gauges: vec![0; DeviceGauge::ALL.len()], ..Default::default() };
        device.gauges[DeviceGauge::Limit as usize] = 1000;
        let facts = Facts { device: &device, rate: None, forecast: Forecast::Unknown };
        alarm.look(seconds, &facts).is_some()
    }

    fn alarm(text: &str, every: f64) -> Alarm {
        Alarm::new(text.parse().unwrap_or_else(|error| panic!("{error}")), every)
    }

    #[test]
    fn it_speaks_once_until_the_value_was_back_by_the_margin() {
        let mut alarm = alarm("live>50%", 0.0);
        let said: Vec<bool> = [400, 501, 600, 499, 501, 451, 502, 450, 501]
            .iter()
            .enumerate()
            .map(|(n, &live)| look(&mut alarm, n as f64, live))
            .collect();
        assert_eq!(said, [false, true, false, false, false, false, false, false, true]);
    }

    #[test]
    fn below_a_bound_the_way_back_is_up() {
        let mut alarm = alarm("live<500B", 0.0);
        let said: Vec<bool> = [500, 499, 540, 400, 550, 499]
            .iter()
            .map(|&live| look(&mut alarm, 0.0, live))
            .collect();
        assert_eq!(said, [false, true, false, false, false, true]);
    }

    #[test]
    fn within_the_rate_limit_it_waits_and_speaks_at_its_end_if_it_still_stands() {
        let mut alarm = alarm("live>=500B", 60.0);
        assert!(look(&mut alarm, 0.0, 500));
        assert!(!look(&mut alarm, 1.0, 0));
        assert!(!look(&mut alarm, 2.0, 900), "too soon");
        assert!(look(&mut alarm, 60.0, 900), "it still stands");
        assert!(!look(&mut alarm, 61.0, 0));
        assert!(!look(&mut alarm, 62.0, 900));
        assert!(!look(&mut alarm, 63.0, 0), "over before the time was up");
        assert!(!look(&mut alarm, 180.0, 0));
    }
}
