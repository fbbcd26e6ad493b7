//! The time that moves may take.
//!
//! A move saves memory and takes the host some 45 us for each chunk. For most programs that is
//! little, or the device has work meanwhile. A program that moves pages at nearly every request
//! would spend most of its time on it, and hold no less in the end: each move takes pages out of
//! rows that later requests need. So moves may take a share of the program's time. Once that is
//! used up they pause, and the heap grows instead. A move counts only if the requesting stream had
//! run out of work by its end. Where little memory is left, and with `slack:`, pages move whatever
//! time that takes. docs/decisions/moving-pages.md has the figures.

use std::time::Duration;

/// Moves may take one part in this of the host's time.
const SHARE: u32 = 10;
/// Time that they have not taken is left for later moves, up to this.
const MOST: Duration = Duration::from_millis(20);
/// The first time that none is left they pause for so long, and each time after twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The host's time that moves have left.
pub(crate) struct MoveTime {
    left: Duration,
    /// The host's time when `left` was counted; in a pause, its end.
    counted: Duration,
    pause: Duration,
}

impl Default for MoveTime {
    fn default() -> Self {
        Self { left: MOST, counted: Duration::ZERO, pause: FIRST_PAUSE }
    }
}

impl MoveTime {
    /// Whether some is left at `now`.
    pub(crate) fn is_left(&mut self, now: Duration) -> bool {
        let Some(passed) = now.checked_sub(self.counted) else { return false };
        self.left = (self.left + passed / SHARE).min(MOST);
        self.counted = now;
        true
    }

    /// Counts a move that took `time` and ended at `now`. If that leaves none, moves pause for the
    /// time returned.
    pub(crate) fn take(&mut self, time: Duration, now: Duration) -> Option<Duration> {
        self.left = self.left.saturating_sub(time);
        if !self.left.is_zero() {
            return None;
        }
        let pause = self.pause;
        (self.left, self.counted) = (MOST, now.saturating_add(pause));
        self.pause = pause.saturating_mul(2);
        Some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The share of its time that a program moves which would for `move_for` in each millisecond
    /// of its own, and how often moves have paused.
    fn share(move_for: Duration, milliseconds: u32) -> (f64, u32) {
        let (mut time, mut now) = (MoveTime::default(), Duration::ZERO);
        let (mut moved, mut pauses) = (Duration::ZERO, 0);
        for _ in 0..milliseconds {
            now += MS;
            if time.is_left(now) {
                now += move_for;
                moved += move_for;
                pauses += u32::from(time.take(move_for, now).is_some());
            }
        }
        (moved.as_secs_f64() / now.as_secs_f64(), pauses)
    }

    #[test]
    fn moves_of_a_tenth_of_the_time_go_on_and_more_end() {
        let (moved, pauses) = share(MS / 10, 100_000);
        assert!(pauses == 0 && moved > 0.09, "{moved}");
        let (moved, pauses) = share(MS * 3, 100_000);
        assert!((5..9).contains(&pauses) && moved < 0.002, "{moved} {pauses}");
    }

    #[test]
    fn time_without_moves_is_left_for_later_ones_up_to_a_bound() {
        let mut time = MoveTime::default();
        let hour = Duration::from_secs(3600);
        assert!(time.is_left(hour));
        assert_eq!(time.take(MOST - MS, hour), None);
        let later = hour + 10 * MS;
        assert!(time.is_left(later));
        assert_eq!(time.take(MS, later), None, "a tenth has come back");
        assert_eq!(time.take(MS, later), Some(FIRST_PAUSE), "an hour leaves no more");
        assert!(!time.is_left(later + FIRST_PAUSE - MS));
        assert!(time.is_left(later + FIRST_PAUSE));
        assert_eq!(time.take(hour, 2 * hour), Some(2 * FIRST_PAUSE));
    }
}
