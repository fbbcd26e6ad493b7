//! What explaining out-of-memories may cost: a share of the program's time, and so many dumps.
//!
//! Programs run out of memory and go on: cuDNN asks for workspaces until one fits, a search halves
//! its batch. Which out-of-memory ends the program is not known when it happens, so the latest ones
//! are kept, and none of them goes without an explanation for a mere count.

use crate::log_pace::LogPace;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Dumps of each device that stay in the folder: the latest.
pub const MOST_DUMPS: usize = 32;
/// Time for explanations that no program misses.
const ALLOWANCE: Duration = Duration::from_secs(3);
/// Beyond it: this part of the time since the first out-of-memory.
const SHARE: u32 = 100;

/// The explanations so far.
#[derive(Debug)]
pub struct Bounds {
    first: Option<Instant>,
    log: LogPace,
    spent: Duration,
    dumps: BTreeMap<(PathBuf, u32), VecDeque<String>>,
}

impl Bounds {
    pub const fn new() -> Self {
        Self { first: None, log: LogPace::new(1), spent: Duration::ZERO, dumps: BTreeMap::new() }
    }

    /// Whether there is time for one more explanation.
    pub fn has_time(&mut self, now: Instant) -> bool {
        let first = *self.first.get_or_insert(now);
        self.spent <= ALLOWANCE + now.saturating_duration_since(first) / SHARE
    }

    pub fn spend(&mut self, time: Duration) {
        self.spent += time;
    }

    /// Whether the log has a line about a dump, at most one a minute.
    pub fn tells(&mut self, now: Instant) -> bool {
        self.log.tells(now).is_some()
    }

    /// Notes a dump; returns the one that has to go for it.
    pub fn keep(&mut self, folder: &Path, device: u32, name: String) -> Option<String> {
        let dumps = self.dumps.entry((folder.to_owned(), device)).or_default();
        dumps.push_back(name);
        if dumps.len() > MOST_DUMPS { dumps.pop_front() } else { None }
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explanations_take_a_hundredth_of_the_time_beyond_three_seconds() {
        let (mut bounds, began) = (Bounds::new(), Instant::now());
        let mut explained = 0;
        // Ten out-of-memories a second for 1,000 s, 100 ms each.
        for tenth in 0..10_000 {
            if bounds.has_time(began + tenth * Duration::from_millis(100)) {
                bounds.spend(Duration::from_millis(100));
                explained += 1;
            }
        }
        assert_eq!(explained, 130);
    }

    #[test]
    fn the_log_has_a_line_a_minute() {
        let (mut bounds, began) = (Bounds::new(), Instant::now());
        let told = (0..150).filter(|&n| bounds.tells(began + Duration::from_secs(n)));
        assert_eq!(told.collect::<Vec<_>>(), [0, 60, 120]);
    }

    #[test]
    fn the_latest_dumps_of_each_device_and_folder_stay() {
        let mut bounds = Bounds::new();
        let mut keep = |folder: &str, device, n: usize| {
            bounds.keep(Path::new(folder), device, n.to_string()).map(|gone| gone.parse().unwrap())
        };
        for n in 0..100 {
            assert_eq!(keep("a", 0, n), n.checked_sub(MOST_DUMPS));
        }
        assert_eq!((keep("b", 0, 1), keep("a", 1, 1)), (None, None));
    }
}
