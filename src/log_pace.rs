//! The pace of lines of the log that a program may cause by the thousand.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::time::{Duration, Instant};

/// Between two lines, after the first ones.
const PAUSE: Duration = Duration::from_secs(60);

/// Which lines of a kind the log gets: the first ones, then one a minute.
#[derive(Debug)]
pub struct LogPace {
    /// Lines that are written whatever their pace.
    first: u32,
    told: u32,
    last: Option<Instant>,
    /// Since the last line that was written.
    untold: u64,
}

impl LogPace {
    /// No line so far; `first` of them are written whatever their pace.
    pub const fn new(first: u32) -> Self {
        Self { first, told: 0, last: None, untold: 0 }
    }

    /// Whether a line is written now, and how many were not since the last.
    pub fn tells(&mut self, now: Instant) -> Option<u64> {
        let is_soon = self.last.is_some_and(|last| now.saturating_duration_since(last) < PAUSE);
        if self.told >= self.first && is_soon {
            self.untold += 1;
            return None;
        }
        self.told = self.told.saturating_add(1);
        self.last = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_of_the_first_out_of_memories_and_then_of_one_a_minute() {
        let (mut pace, began) = (LogPace::new(8), Instant::now());
        // Ten a second, for 150 s.
        let told = (0..1500).filter_map(|tenth| {
            let now = began + tenth * Duration::from_millis(100);
            pace.tells(now).map(|untold| (tenth, untold))
        });
        let told: Vec<_> = told.collect();
        assert_eq!(told[..8], [0, 1, 2, 3, 4, 5, 6, 7].map(|tenth| (tenth, 0)));
        assert_eq!(told[8..], [(607, 599), (1207, 599)]);
    }
}
