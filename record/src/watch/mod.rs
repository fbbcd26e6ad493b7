//! Thresholds on what a device's numbers say, and a forecast of when its memory will have run out.
//!
//! Pure logic: it is given what was read, and answers. `gruyere watch` and `gruyere top` give it
//! what they read from outside, the process itself what its record says (`alert:` in the
//! configuration), so that all of them mean the same by a name.
//!
//! - [`Metric`]: what can be watched, by name. [`Facts`] are what its value is taken from.
//! - [`Threshold`]: `fragmentation>30%`, `largest<2GiB`, `oom-in<10min`.
//! - [`Alarm`]: a threshold that speaks once when it is passed, and again only after the value was
//!   back, and not too often.
//! - [`Rule`]: a threshold with what the process does then, as `alert:` says it.
//! - [`forecast`]: the time to out of memory.
//! - [`recent_peak`]: what the last step needed.
#![deny(unsafe_code, clippy::unwrap_used)]

mod alarm;
mod amount;
mod forecast;
mod metric;
mod rate;
mod recent;
mod rule;
mod threshold;
mod trend;

pub use alarm::{Alarm, Passed};
pub use amount::{Duration, Unit};
pub use forecast::{Forecast, Growth, Point, capacity, forecast};
pub use metric::{Facts, Metric};
pub use rate::Rate;
pub use recent::{minute_peak, recent_peak};
pub use rule::{Action, Rule, parse_rules};
pub use threshold::{Bound, ParseError, Threshold};
pub use trend::median;
