//! Figures of the reclaim ladder's rungs: calls, bytes, host time. `path::ladder` has the
//! rungs themselves.

use gruyere_record::device_gauge::RUNGS;
use gruyere_record::size::Bytes;
use std::fmt;
use std::time::{Duration, Instant};

/// The figures of one rung since the device's heap was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rung {
    /// Times that the rung was tried.
    pub calls: u64,
    /// Bytes that it gained: found for the request (rung 0), returned to the arenas (1), returned
    /// to the driver (2 to 4).
    pub bytes: u64,
    /// Host time in it, the retry of the request included. In nanoseconds: most rungs take less
    /// than a microsecond.
    pub nanoseconds: u64,
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} times, {}, {} us", self.calls, Bytes(self.bytes), self.nanoseconds / 1000)
    }
}

/// All rungs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ladder {
    /// The rungs, by number.
    pub rungs: [Rung; RUNGS.len()],
}

impl Ladder {
    /// The rungs tried at least once, with their names.
    pub fn tried(&self) -> impl Iterator<Item = (&'static str, &Rung)> {
        RUNGS.iter().map(|rung| rung.name).zip(&self.rungs).filter(|(_, rung)| rung.calls > 0)
    }
}

impl Ladder {
    /// The increase since `before`.
    pub fn since(&self, before: &Ladder) -> Ladder {
        let rung = |number: usize| {
            let (now, then) = (self.rungs[number], before.rungs[number]);
            Rung {
                calls: now.calls.saturating_sub(then.calls),
                bytes: now.bytes.saturating_sub(then.bytes),
                nanoseconds: now.nanoseconds.saturating_sub(then.nanoseconds),
            }
        };
        Ladder { rungs: std::array::from_fn(rung) }
    }
}

/// Splits the time of one try among its rungs: each gets the time since the previous lap.
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now - std::mem::replace(&mut self.0, now)
    }
}
