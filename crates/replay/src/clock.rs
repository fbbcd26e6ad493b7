//! The clock of a replay: a kernel's duration. Every GPU lags behind its host, by an amount that
//! depends on the program, so figures are given for several clocks.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Duration of every kernel of a replay, in whole microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Clock(u64);

impl Clock {
    /// All work ends when enqueued, and nothing takes time.
    pub const INSTANT: Self = Self(0);
    /// The default clock of figures.
    pub const USUAL: Self = Self(20);
    /// Small kernels, where the host is slower; medium ones; large ones.
    pub const LAGGING: [Self; 3] = [Self(5), Self::USUAL, Self(100)];

    /// Nanoseconds of a kernel.
    #[must_use]
    pub fn kernel_ns(self) -> u64 {
        self.0 * 1000
    }

    /// Whether kernels take time.
    #[must_use]
    pub fn lags(self) -> bool {
        self != Self::INSTANT
    }
}

impl fmt::Display for Clock {
    /// As in the input: `20us`, `0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => write!(f, "0"),
            us => write!(f, "{us}us"),
        }
    }
}

/// An invalid name of a clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoClock;

impl fmt::Display for NoClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a kernel's time, such as 5us, 20us or 100us; or 0: a device that is done at once"
        )
    }
}

impl std::error::Error for NoClock {}

impl FromStr for Clock {
    type Err = NoClock;

    fn from_str(text: &str) -> Result<Self, NoClock> {
        let us = match text {
            "0" => "0",
            _ => text.strip_suffix("us").ok_or(NoClock)?,
        };
        // Kernels of a second or more occur in no program.
        us.parse().ok().filter(|&us: &u64| us < 1_000_000).map(Self).ok_or(NoClock)
    }
}

impl Serialize for Clock {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_read_as_it_is_shown() {
        for clock in Clock::LAGGING.into_iter().chain([Clock::INSTANT]) {
            assert_eq!(clock.to_string().parse(), Ok(clock));
        }
        assert_eq!("20us".parse::<Clock>().map(Clock::kernel_ns), Ok(20_000));
        for text in ["", "20", "us", "-5us", "20ms", "1000000us"] {
            assert_eq!(text.parse::<Clock>(), Err(NoClock), "{text}");
        }
    }
}
