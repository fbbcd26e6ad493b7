//! Low-memory phases: when a program uses far less than before, idle memory goes back to the
//! device.
//!
//! A program that stops training and evaluates, or serves fewer requests, keeps the memory of its
//! peak, which other processes on the device could use. Returning it costs driver calls now, and
//! again when the program comes back to its peak. So a training loop, far below its peak in a part
//! of every step, must never cause a return.
//!
//! **The rule.** Time is counted in frees of runs (blocks above 16 KiB, and slabs), so that a
//! repeated program gets the same result. *Use* is the bytes of blocks and slabs; its highest value
//! between two looks is exact. A *lull* is the time since use was last at half of its high or
//! above. A lull of [`LEAST`] frees is a low-memory phase. The allocator then keeps the highest use
//! in the later half of the lull, plus a sixteenth, and returns the rest in portions, a look apart;
//! that highest use is the new high. If use comes back, the phase was a mistake, and the next one
//! takes twice as long to be found, up to [`MOST`]. So no alternation returns memory more than a
//! handful of times unless its lulls are very long.
//!
//! **Marks.** A program may announce validation or a checkpoint (`gruyere_mark_phase`). Idle memory
//! then goes back at once, down to the need of earlier phases of that kind: at most once in
//! [`MARK_INTERVAL`] frees, and for `gruyere_checkpoint` at most once in [`CHECKPOINT_INTERVAL`];
//! both count from the last time that either returned memory.
//!
//! Nothing here waits: events are recorded behind the frees, and memory that they do not prove
//! finished by the next look stays.

use crate::small::size_class::PAGE;
use std::time::{Duration, Instant};

const INTERVAL: u64 = 256;
/// A lull of this many frees is a phase until the first mistake: a large model's step must not look
/// like one.
pub(crate) const LEAST: u64 = 1 << 15;
/// A lull of this many frees is a phase whatever was found before: to return memory and take it
/// again then costs one second in many minutes.
pub(crate) const MOST: u64 = 1 << 20;
/// Tries of a phase to return memory.
const TRIES: u32 = 16;
/// Looks between two updates of the gauges, at least.
const PUBLISHING: u64 = 16;
/// Growth by this part of what was held updates a gauge.
const GROWTH: u64 = 8;
/// Frees between two marks that return memory.
const MARK_INTERVAL: u64 = 1 << 10;
/// The least that goes back at a time (bytes).
const PORTION: u64 = crate::supply::pages::LONGEST_CHUNK;

/// Time between two returns of memory at checkpoints.
pub(crate) const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(30);

/// The last return of memory at a program's mark or checkpoint.
#[derive(Clone, Copy, Debug, Default)]
struct LastGiven {
    frees: Option<u64>,
    time: Option<Instant>,
}

/// The program's phase, announced by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// The usual phase: training, or serving.
    Training = 0,
    /// Validation: no gradients for a while.
    Validation = 1,
    /// Writing a checkpoint.
    Checkpoint = 2,
}

impl Phase {
    /// The phase of a number of the C API.
    pub const fn from_u8(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Training),
            1 => Some(Self::Validation),
            2 => Some(Self::Checkpoint),
            _ => None,
        }
    }
}

/// The reason for a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// Enough was freed since the last look.
    Due,
    Step,
    /// The program announces a phase.
    Mark(Phase),
}

/// The figures at a look, in bytes but for `now` and `time`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) now: u64,
    /// The time of day, used for checkpoints only.
    pub(crate) time: Instant,
    pub(crate) busy: u64,
    /// The most in use since the last look.
    pub(crate) peak: u64,
    pub(crate) held: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drain {
    /// Bytes that stay held.
    pub(crate) keep: u64,
    /// The most to return this time (bytes).
    pub(crate) most: u64,
}

#[derive(Clone, Copy, Debug)]
struct Draining {
    drain: Drain,
    tries: u32,
}

/// Watches a device's use of memory for low-memory phases.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    enabled: bool,
    next: u64,
    high: u64,
    /// The time at which use was last at half of `high` or above.
    busy_at: u64,
    /// The most in use in this lull, since half of `patience`.
    lull_peak: u64,
    /// The length at which a lull is a phase, in frees.
    patience: u64,
    /// The high before the earliest phase that has not ended yet.
    found: Option<u64>,
    draining: Option<Draining>,
    announced: Option<Phase>,
    last_given: LastGiven,
    /// The most in use in announced phases, by kind.
    needs: [u64; 3],
    /// Returns of memory so far: their number and bytes.
    pub(crate) given: (u64, u64),
    /// Looks until the next update of the gauges.
    until_publishing: u64,
    /// Bytes held at the last update for growth.
    published_held: u64,
}

/// The memory to keep after a use of `bytes`.
fn with_slack(bytes: u64) -> u64 {
    (bytes + bytes / 16).next_multiple_of(PAGE)
}

impl Watch {
    /// A watch; unless `enabled`, it returns no memory.
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, next: INTERVAL, patience: LEAST, ..Self::default() }
    }

    /// Whether a look is due after this many frees.
    #[inline]
    pub(crate) fn is_due(&self, now: u64) -> bool {
        now >= self.next
    }

    /// Whether this look updates the gauges, in case the program never marks a step. An update
    /// reads all `runs` of the arenas: at least as many frees pass between two, so that its time is
    /// a small share at any size of the heap.
    pub(crate) fn is_time_to_publish(&mut self, runs: usize) -> bool {
        let now = self.until_publishing == 0;
        self.until_publishing = match now {
            true => PUBLISHING.max(runs as u64 / INTERVAL),
            false => self.until_publishing - 1,
        };
        now
    }

    /// Whether growth to `held` bytes updates the largest request that can be served: a program
    /// that loads its weights frees too little for a look, and may then rest.
    pub(crate) fn has_outgrown(&mut self, held: u64) -> bool {
        let outgrown = held.abs_diff(self.published_held) > self.published_held / GROWTH;
        if outgrown {
            self.published_held = held;
        }
        outgrown
    }

    /// Returns of memory so far: their number and bytes.
    pub(crate) fn given(&self) -> (u64, u64) {
        self.given
    }

    /// Takes a look; the memory to return now, if any.
    pub(crate) fn look(&mut self, occasion: Occasion, seen: Seen) -> Option<Drain> {
        self.next = seen.now + INTERVAL;
        if !self.enabled {
            return None;
        }
        if let Occasion::Mark(phase) = occasion {
            self.mark(phase, seen);
        }
        match self.announced {
            // The peak before the mark does not count for this phase.
            Some(_) if matches!(occasion, Occasion::Mark(_)) => {}
            Some(phase) => {
                let need = &mut self.needs[phase as usize];
                *need = seen.peak.max(*need);
            }
            None => self.follow(seen),
        }
        let draining = self.draining.as_mut()?;
        if !matches!(occasion, Occasion::Mark(_)) {
            draining.drain.keep = draining.drain.keep.max(with_slack(seen.peak));
        }
        if draining.tries == 0 || seen.held <= draining.drain.keep {
            self.draining = None;
            return None;
        }
        draining.tries -= 1;
        Some(draining.drain)
    }

    fn mark(&mut self, phase: Phase, seen: Seen) {
        self.draining = None;
        if phase == Phase::Training {
            self.announced = None;
            self.begin_lull(seen.now);
            return;
        }
        self.announced = Some(phase);
        let too_soon = self.last_given.frees.is_some_and(|at| seen.now - at < MARK_INTERVAL);
        if !too_soon {
            self.last_given = LastGiven { frees: Some(seen.now), time: Some(seen.time) };
            let keep = with_slack(seen.busy.max(self.needs[phase as usize]));
            self.draining = Some(Draining { drain: Drain { keep, most: u64::MAX }, tries: TRIES });
        }
    }

    /// Whether a checkpoint may return memory now, after this many frees; if so, notes that it
    /// does.
    pub(crate) fn checkpoint(&mut self, frees: u64, now: Instant) -> bool {
        let past = self.last_given.time.and_then(|last| now.checked_duration_since(last));
        let is_due =
            self.last_given.time.is_none() || past.is_some_and(|past| past >= CHECKPOINT_INTERVAL);
        if is_due {
            self.last_given = LastGiven { frees: Some(frees), time: Some(now) };
        }
        is_due
    }

    fn begin_lull(&mut self, now: u64) {
        (self.busy_at, self.lull_peak) = (now, 0);
    }

    fn follow(&mut self, seen: Seen) {
        let Seen { now, peak, held, .. } = seen;
        if self.found.is_some_and(|high| peak >= high / 2) {
            // The program has come back: it was no phase.
            self.patience = (2 * self.patience).min(MOST);
            (self.found, self.draining) = (None, None);
        }
        self.high = self.high.max(peak);
        if peak >= self.high / 2 {
            self.begin_lull(now);
            return;
        }
        let lull = now - self.busy_at;
        if lull >= self.patience / 2 {
            // The way down from the peak is not part of the phase's need.
            self.lull_peak = self.lull_peak.max(peak);
        }
        let keep = with_slack(self.lull_peak);
        if lull < self.patience || held <= keep {
            return;
        }
        self.found.get_or_insert(self.high);
        self.high = self.lull_peak;
        self.begin_lull(now);
        let most = ((held - keep) / 8).max(PORTION);
        self.draining = Some(Draining { drain: Drain { keep, most }, tries: TRIES });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A program on a watch: use as given, one free a unit of time; the memory held follows the
    /// drains and the use at once.
    struct Program {
        watch: Watch,
        now: u64,
        time: Instant,
        held: u64,
        peak: u64,
        busy: u64,
        drains: u32,
    }

    impl Program {
        fn new() -> Self {
            Self {
                watch: Watch::new(true),
                now: 0,
                time: Instant::now(),
                held: 0,
                peak: 0,
                busy: 0,
                drains: 0,
            }
        }

        fn look(&mut self, occasion: Occasion) {
            let Self { now, time, held, busy, .. } = *self;
            let peak = std::mem::replace(&mut self.peak, busy);
            if let Some(drain) = self.watch.look(occasion, Seen { now, time, busy, peak, held }) {
                self.drains += 1;
                self.held -= (self.held - drain.keep).min(drain.most);
            }
        }

        /// Uses `bytes` for `frees` units of time.
        fn uses(&mut self, bytes: u64, frees: u64) {
            self.busy = bytes;
            for _ in 0..frees {
                self.held = self.held.max(bytes);
                self.peak = self.peak.max(bytes);
                self.now += 1;
                if self.watch.is_due(self.now) {
                    self.look(Occasion::Due);
                }
            }
        }

        fn steps(&mut self, count: u32, low: u64, high: u64) {
            for _ in 0..count {
                self.uses(1 << 30, low);
                self.uses(10 << 30, high);
                self.busy = 1 << 30;
                self.look(Occasion::Step);
            }
        }
    }

    #[test]
    fn as_many_frees_as_runs_pass_between_two_updates_of_the_gauges() {
        for (runs, looks) in [(1, PUBLISHING), (1 << 20, (1 << 20) / INTERVAL)] {
            let mut watch = Watch::new(true);
            assert!(watch.is_time_to_publish(runs), "at the first look");
            let waited = (1..).find(|_| watch.is_time_to_publish(runs));
            assert_eq!(waited, Some(looks + 1), "{runs} runs");
        }
    }

    proptest! {
        // A case is a million looks at a counter.
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn no_loop_gives_anything_back(low in 1u64..LEAST - 512, high in 1u64..2000, marked: bool) {
            let mut program = Program::new();
            for _ in 0..20 {
                program.uses(1 << 30, low);
                program.uses(10 << 30, high);
                program.busy = 1 << 30;
                if marked {
                    program.look(Occasion::Step);
                }
            }
            prop_assert_eq!(program.drains, 0);
        }

        #[test]
        fn no_alternation_of_any_length_gives_back_more_than_a_few_times(
            lulls in proptest::collection::vec(1u64..LEAST * 8, 30),
        ) {
            let mut program = Program::new();
            let mut phases = 0;
            for lull in lulls {
                program.uses(10 << 30, 300);
                let before = program.drains;
                program.uses(1 << 30, lull);
                phases += u32::from(program.drains > before);
            }
            // The patience at least doubles each time: from 2^15 up to 2^18.
            prop_assert!(phases <= 4, "{} phases", phases);
        }
    }

    #[test]
    fn memory_comes_back_once_the_program_has_used_little_for_long() {
        let mut program = Program::new();
        program.steps(5, 2000, 1000);
        assert_eq!(program.drains, 0);
        program.uses(2 << 30, LEAST - INTERVAL);
        assert_eq!(program.drains, 0);
        program.uses(2 << 30, 20 * INTERVAL);
        assert!(program.drains >= 1);
        assert!(program.held <= with_slack(2 << 30), "{} B are held", program.held);
        let drains = program.drains;
        program.uses(2 << 30, 200_000);
        assert_eq!(program.drains, drains, "it never stops");
    }

    #[test]
    fn a_phase_that_was_none_makes_the_next_take_twice_as_long() {
        let mut program = Program::new();
        program.uses(10 << 30, 1000);
        for turn in 0..3 {
            program.uses(1 << 30, (LEAST << turn) - INTERVAL);
            let before = program.drains;
            program.uses(1 << 30, 2 * INTERVAL);
            assert!(program.drains > before, "turn {turn}");
            program.uses(10 << 30, 1000);
        }
    }

    #[test]
    fn memory_goes_back_in_portions() {
        let mut program = Program::new();
        program.steps(5, 2000, 1000);
        program.uses(1 << 30, LEAST - INTERVAL);
        while program.drains == 0 {
            program.uses(1 << 30, 1);
        }
        assert!(
            program.held >= (10 << 30) - (10 << 30) / 8,
            "{} B at once",
            (10 << 30) - program.held
        );
    }

    #[test]
    fn a_mark_gives_back_at_once_what_such_phases_have_not_needed() {
        let mut program = Program::new();
        for turn in 0..4 {
            program.steps(3, 2000, 1000);
            program.look(Occasion::Mark(Phase::Validation));
            let kept = if turn == 0 { 1 << 30 } else { 3 << 30 };
            assert_eq!(program.held, with_slack(kept), "turn {turn}");
            program.uses(3 << 30, 5000);
            program.look(Occasion::Mark(Phase::Training));
        }
        program.steps(3, 2000, 1000);
        assert_eq!(program.held, 10 << 30);
    }

    #[test]
    fn marks_in_a_hot_loop_give_back_once() {
        let mut program = Program::new();
        program.steps(3, 2000, 1000);
        for _ in 0..50 {
            program.look(Occasion::Mark(Phase::Checkpoint));
            program.look(Occasion::Mark(Phase::Training));
            program.uses(10 << 30, 10);
        }
        assert_eq!(program.drains, 1);
    }

    #[test]
    fn marks_and_checkpoints_have_one_limit() {
        let mut program = Program::new();
        let start = program.time;
        let after = |seconds| start + Duration::from_secs(seconds);
        program.uses(10 << 30, 100);
        program.uses(1 << 30, 10);
        assert!(program.watch.checkpoint(program.now, after(0)));
        program.look(Occasion::Mark(Phase::Checkpoint));
        assert_eq!(program.drains, 0, "a checkpoint has just given memory back");
        program.look(Occasion::Mark(Phase::Training));
        program.uses(1 << 30, MARK_INTERVAL);
        program.time = after(100);
        program.look(Occasion::Mark(Phase::Checkpoint));
        assert_eq!(program.drains, 1);
        assert!(!program.watch.checkpoint(program.now, after(129)), "the mark has just done so");
        assert!(program.watch.checkpoint(program.now, after(130)));
    }

    #[test]
    fn a_watch_that_is_off_sees_nothing() {
        let mut program = Program { watch: Watch::new(false), ..Program::new() };
        program.steps(5, 2000, 1000);
        program.uses(1 << 30, 4 * MOST);
        program.look(Occasion::Mark(Phase::Validation));
        assert_eq!(program.drains, 0);
    }
}
