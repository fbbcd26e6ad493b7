//! Thresholds on a device's numbers, and a forecast of when its memory runs out.
//!
//! Pure logic. `gruyere watch` and `gruyere top` pass in what they read from outside, the process
//! itself the numbers of its record (`alert:` in the configuration), so that a name means the same
//! to all of them.
//!
//! - [`Metric`]: what can be watched, by name. [`Facts`]: the source of its value.
//! - [`Threshold`]: `fragmentation>30%`, `largest<2GiB`, `oom-in<10min`.
//! - [`Alarm`]: reports a threshold once when it is passed, then again only after the value was
//!   back, and not too often.
//! - [`Rule`]: a threshold and the process's action, from `alert:`.
//! - [`forecast`]: the time to out of memory.
//! - [`recent_peak`]: the need of the last step.
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
