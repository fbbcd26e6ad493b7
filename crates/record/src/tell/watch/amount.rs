//! Amounts as users write and read them: durations, shares, sizes, rates, counts.

use std::fmt;
use std::str::FromStr;

use crate::size::binary;

/// A duration as users write it: `10min`, `90s`, `1.5h`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Duration(
    /// In seconds.
    pub f64,
);

/// The ways to write a duration, for messages.
pub const DURATION_FORMS: &str = "a duration such as 500ms, 90s, 10min, 1.5h or 2d";

/// The longest possible suffix comes first: `min` and `ms` end in neither `m` nor `s` alone.
const UNITS: [(&str, f64); 7] = [
    ("ms", 1e-3),
    ("min", 60.0),
    ("sec", 1.0),
    ("s", 1.0),
    ("m", 60.0),
    ("h", 3600.0),
    ("d", 86400.0),
];

impl FromStr for Duration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("\"{text}\" is not a duration; expected {DURATION_FORMS}");
        let (number, unit) = UNITS
            .iter()
            .find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, *seconds)))
            .ok_or_else(refuse)?;
        Ok(Self(decimal(number.trim_end()).ok_or_else(refuse)? * unit))
    }
}

/// A plain decimal number: no sign, exponent or `inf`, all of which `f64::from_str` accepts.
pub(super) fn decimal(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    plain.then(|| text.parse().ok()).flatten()
}

impl From<Duration> for std::time::Duration {
    fn from(Duration(seconds): Duration) -> Self {
        Self::try_from_secs_f64(seconds).unwrap_or(Self::MAX)
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0;
        // If one unit's text would round up to the next unit, takes the next.
        if !seconds.is_finite() {
            f.write_str("never")
        } else if seconds < 0.9995 {
            write!(f, "{:.0} ms", seconds * 1e3)
        } else if seconds < 9.95 {
            write!(f, "{seconds:.1} s")
        } else if seconds < 119.5 {
            write!(f, "{seconds:.0} s")
        } else if seconds < 119.5 * 60.0 {
            write!(f, "{:.0} min", seconds / 60.0)
        } else if seconds < 47.95 * 3600.0 {
            write!(f, "{:.1} h", seconds / 3600.0)
        } else {
            write!(f, "{:.1} d", seconds / 86400.0)
        }
    }
}

/// Unit of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A share of a whole, 0 to 1; written and shown in per cent.
    Share,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    BytesPerSecond,
    /// Seconds.
    Seconds,
    /// A plain count.
    Count,
}

impl Unit {
    /// `value` as text for users.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Share => format!("{:.1}%", value * 100.0),
            Self::Bytes => binary(value),
            Self::BytesPerSecond => format!("{}/s", binary(value)),
            Self::Seconds => Duration(value).to_string(),
            Self::Count => format!("{value:.0}"),
        }
    }

    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Bytes => "bytes",
            Self::BytesPerSecond => "bytes_per_second",
            Self::Seconds => "seconds",
            Self::Count => "count",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_in_every_unit_and_shown_in_the_fitting_one() {
        for (text, seconds, shown) in [
            ("500ms", 0.5, "500 ms"),
            ("90s", 90.0, "90 s"),
            ("5 sec", 5.0, "5.0 s"),
            ("10min", 600.0, "10 min"),
            ("10m", 600.0, "10 min"),
            ("1.5h", 5400.0, "90 min"),
            ("3h", 10800.0, "3.0 h"),
            ("2d", 172_800.0, "2.0 d"),
        ] {
            let duration: Duration = text.parse().expect(text);
            assert_eq!((duration.0, duration.to_string().as_str()), (seconds, shown), "{text}");
        }
        for text in ["", "10", "min", "-5s", "1e3s", "infs", "nans", "10 years"] {
            let refused = text.parse::<Duration>().expect_err(text);
            assert!(refused.contains("10min"), "{refused}");
        }
    }

    #[test]
    fn no_text_of_a_unit_is_the_next_units_one() {
        for seconds in [0.9996, 59.99, 119.6, 7199.0, 172_799.0] {
            let text = Duration(seconds).to_string();
            assert!(
                !text.starts_with("1000 ms") && !text.starts_with("120 s"),
                "{seconds}: {text}"
            );
        }
        assert_eq!(Unit::Bytes.show(1023.999 * 1024.0), "1.00 MiB");
        assert_eq!(Unit::Bytes.show(512.0), "512 B");
        assert_eq!(Unit::Share.show(0.3), "30.0%");
        assert_eq!(Unit::BytesPerSecond.show(1.5 * f64::from(1 << 30)), "1.50 GiB/s");
        assert_eq!(Unit::Seconds.show(f64::INFINITY), "never");
    }
}
