//! Thresholds as users write them: `fragmentation>30%`, `largest<2GiB`, `oom-in<10min`.

use super::amount::{DURATION_FORMS, Duration, Unit, decimal};
use super::metric::{Facts, Metric};
use crate::size::Size;
use std::fmt;
use std::str::FromStr;

/// How far a value must return before its threshold is armed again, as a share of the threshold.
const MARGIN: f64 = 0.1;

/// The limit for a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// A number in the metric's unit.
    Value(f64),
    /// For bytes: a share of the ceiling on the device's memory.
    OfLimit(f64),
}

/// A metric and its bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    /// The watched metric.
    pub metric: Metric,
    /// Passed above the bound (`>`), rather than below (`<`).
    pub is_above: bool,
    /// Passed at the bound too (`>=`, `<=`).
    pub is_inclusive: bool,
    /// The bound.
    pub bound: Bound,
    text: String,
}

/// Why a threshold does not parse: the input, the reason and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The user's text.
    pub input: String,
    /// The fault and the remedy.
    pub reason: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\": {}", self.input, self.reason)
    }
}

impl std::error::Error for ParseError {}

/// The shape of a threshold, for messages.
const SHAPE: &str =
    "expected METRIC>VALUE or METRIC<VALUE, as in fragmentation>30%, largest<2GiB or oom-in<10min";

impl FromStr for Threshold {
    type Err = ParseError;

    fn from_str(input: &str) -> Result<Self, ParseError> {
        let error = |reason: String| ParseError { input: input.trim().to_owned(), reason };
        let compact: String = input.chars().filter(|c| !c.is_whitespace()).collect();
        let Some(at) = compact.find(['<', '>']) else {
            return Err(error(format!("no threshold; {SHAPE}")));
        };
        let (name, rest) = compact.split_at(at);
        let is_above = rest.starts_with('>');
        let value = &rest[1..];
        let (is_inclusive, value) =
            value.strip_prefix('=').map_or((false, value), |value| (true, value));
        if name.is_empty() || value.is_empty() {
            let missing = if name.is_empty() { "the metric" } else { "the value" };
            return Err(error(format!("{missing} is missing; {SHAPE}")));
        }
        let metric = Metric::named(name).ok_or_else(|| error(unknown(name)))?;
        let bound = bound(metric, value)
            .map_err(|reason| error(format!("{reason}, as {}", example(metric))))?;
        Ok(Self { metric, is_above, is_inclusive, bound, text: compact })
    }
}

fn unknown(name: &str) -> String {
    let near = Metric::near(name);
    let names = "fragmentation, lost, idle, unused, external, internal, largest, live, held, \
                 pending, rate, oom-in";
    match near.as_slice() {
        [] => format!(
            "there is no metric \"{name}\"; there are {names}, and the gauges that `gruyere stat` \
             prints"
        ),
        near => format!("there is no metric \"{name}\"; did you mean {}?", near.join(" or ")),
    }
}

fn example(metric: Metric) -> String {
    let value = match metric.unit() {
        Unit::Share => ">30%",
        Unit::Bytes => ">2GiB",
        Unit::BytesPerSecond => ">10GiB/s",
        Unit::Seconds => "<10min",
        Unit::Count => ">0",
    };
    format!("in {}{value}", metric.name())
}

fn bound(metric: Metric, value: &str) -> Result<Bound, String> {
    let size = |value: &str| match value.parse::<Size>() {
        Ok(Size::Bytes(bytes)) => Ok(Bound::Value(bytes as f64)),
        Ok(Size::Percent(percent)) => Ok(Bound::OfLimit(percent / 100.0)),
        Err(reason) => Err(format!("\"{value}\": {reason}")),
    };
    match metric.unit() {
        Unit::Share => {
            let percent =
                value.strip_suffix('%').and_then(decimal).filter(|percent| *percent <= 100.0);
            percent
                .map(|percent| Bound::Value(percent / 100.0))
                .ok_or_else(|| format!("\"{value}\" is not a share; expected 0% to 100%"))
        }
        Unit::Bytes => size(value),
        Unit::BytesPerSecond => match size(value.strip_suffix("/s").unwrap_or(value))? {
            Bound::OfLimit(_) => {
                Err(format!("\"{value}\" is not a rate; expected a size a second"))
            }
            bound => Ok(bound),
        },
        Unit::Seconds => value
            .parse::<Duration>()
            .map(|duration| Bound::Value(duration.0))
            .map_err(|_| format!("\"{value}\" is not a duration; expected {DURATION_FORMS}")),
        Unit::Count => value
            .parse::<u64>()
            .map(|count| Bound::Value(count as f64))
            .map_err(|_| format!("\"{value}\" is not a whole number")),
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A value's place relative to a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// On the wrong side.
    Passed,
    /// On the right side, within the margin.
    Near,
    /// On the right side, beyond the margin.
    Clear,
}

impl Threshold {
    /// The user's text, without spaces.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The bound in the metric's unit.
    pub fn bound(&self, facts: &Facts<'_>) -> f64 {
        match self.bound {
            Bound::Value(value) => value,
            Bound::OfLimit(share) => share * facts.limit() as f64,
        }
    }

    /// Where `value` stands.
    pub(super) fn standing(&self, value: f64, facts: &Facts<'_>) -> Standing {
        let bound = self.bound(facts);
        let margin = bound.abs() * MARGIN;
        let (passed, clear) = if self.is_above {
            (value > bound, value <= bound - margin)
        } else {
            (value < bound, value >= bound + margin)
        };
        if passed || (self.is_inclusive && value == bound) {
            Standing::Passed
        } else if clear {
            Standing::Clear
        } else {
            Standing::Near
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceGauge;

    fn threshold(text: &str) -> Threshold {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn error(text: &str) -> String {
        text.parse::<Threshold>().expect_err(text).to_string()
    }

    #[test]
    fn thresholds_of_every_unit_are_read() {
        for (text, metric, is_above, bound) in [
            ("fragmentation>30%", Metric::Fragmentation, true, Bound::Value(0.3)),
            (" largest < 2GiB ", Metric::Largest, false, Bound::Value(f64::from(1u32 << 31))),
            ("held>95%", Metric::Reserved, true, Bound::OfLimit(0.95)),
            // torch's word for it.
            ("reserved>95%", Metric::Reserved, true, Bound::OfLimit(0.95)),
            ("oom-in<10min", Metric::OomIn, false, Bound::Value(600.0)),
            ("rate>1GiB/s", Metric::Rate, true, Bound::Value(f64::from(1u32 << 30))),
            ("rate>1GiB", Metric::Rate, true, Bound::Value(f64::from(1u32 << 30))),
            (
                "out_of_memories>0",
                Metric::Gauge(DeviceGauge::OutOfMemories),
                true,
                Bound::Value(0.0),
            ),
            (
                "host_wait_nanoseconds>5s",
                Metric::Gauge(DeviceGauge::HostWaitNanoseconds),
                true,
                Bound::Value(5.0),
            ),
        ] {
            let read = threshold(text);
            assert_eq!(
                (read.metric, read.is_above, read.bound),
                (metric, is_above, bound),
                "{text}"
            );
            assert_eq!(read.text(), text.replace(' ', ""));
        }
        assert!(threshold("retries>=1").is_inclusive && !threshold("retries>1").is_inclusive);
    }

    #[test]
    fn every_metric_can_be_watched_as_its_example_says() {
        for metric in Metric::all() {
            let example = example(metric);
            assert_eq!(threshold(example.trim_start_matches("in ")).metric, metric, "{example}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_input_and_its_remedy() {
        for (text, parts) in [
            ("fragmentaton>30%", ["\"fragmentaton>30%\"", "did you mean fragmentation?"]),
            ("xyzzy>1", ["no metric \"xyzzy\"", "gruyere stat"]),
            ("fragmentation>0.3", ["\"0.3\" is not a share", "fragmentation>30%"]),
            ("fragmentation>130%", ["\"130%\"", "0% to 100%"]),
            ("oom-in<10", ["\"10\" is not a duration", "oom-in<10min"]),
            ("oom-in<soon", ["\"soon\"", "10min"]),
            ("largest<lots", ["\"lots\"", "512KiB"]),
            ("rate>50%", ["\"50%\" is not a rate", "rate>10GiB/s"]),
            ("retries>many", ["\"many\" is not a whole number", "retries>0"]),
            ("retries", ["no threshold", "METRIC>VALUE"]),
            (">30%", ["the metric is missing", "METRIC>VALUE"]),
            ("live>", ["the value is missing", "METRIC>VALUE"]),
        ] {
            let message = error(text);
            for part in parts {
                assert!(message.contains(part), "{message} has no {part}");
            }
        }
    }
}
