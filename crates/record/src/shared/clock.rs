//! Time for the ring: the machine's cheapest monotonic counter, and the facts that convert its
//! ticks to time.
//!
//! x86-64: the time stamp counter (assumed invariant, as on every server of this century; the
//! record has the processor's guarantee). aarch64: the virtual counter. Elsewhere: the monotonic
//! clock in nanoseconds.

use crate::seqlock::Sequence;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Ticks of the machine's counter.
#[inline(always)]
pub fn now() -> u64 {
    #[cfg(debug_assertions)]
    if let Some(ticks) = SET.get() {
        return ticks;
    }
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction; Linux lets user space run it.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        let ticks: u64;
        // SAFETY: reads a counter that Linux opens to user space; touches neither memory nor flags.
        unsafe {
            core::arch::asm!(
                "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)
            )
        };
        ticks
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    nanoseconds(libc::CLOCK_MONOTONIC)
}

#[cfg(debug_assertions)]
thread_local! {
    static SET: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

/// Sets the value of [`now`] on this thread; `None`: the machine's counter. For tests that depend
/// on time, and would otherwise depend on the machine's load. Only in builds with debug assertions.
#[cfg(debug_assertions)]
pub fn set(ticks: Option<u64>) {
    SET.set(ticks);
}

/// The counter behind [`now`]: 1 time stamp counter, 2 virtual counter, 3 monotonic clock.
pub const COUNTER: u32 = if cfg!(target_arch = "x86_64") {
    1
} else if cfg!(target_arch = "aarch64") {
    2
} else {
    3
};

fn nanoseconds(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A moment on three clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Ticks of [`now`].
    pub ticks: u64,
    /// Nanoseconds since 1970.
    pub realtime: u64,
    /// Nanoseconds since boot, without sleep.
    pub monotonic: u64,
}

impl Moment {
    /// This moment.
    pub fn take() -> Moment {
        // The middle of the ticks before and after the reads: a preemption between them would skew
        // the pair.
        let before = now();
        let (realtime, monotonic) =
            (nanoseconds(libc::CLOCK_REALTIME), nanoseconds(libc::CLOCK_MONOTONIC));
        let after = now();
        Moment { ticks: before + after.saturating_sub(before) / 2, realtime, monotonic }
    }
}

/// The counter's facts in the header: a first moment and the latest.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct ClockFacts {
    counter: AtomicU32,
    /// ```text
    /// 0 idle        any thread (swap): 1
    /// 1 refreshing  that thread: 0
    /// ```
    refreshing: AtomicU32,
    first: [AtomicU64; 3],
    sequence: Sequence,
    latest: [AtomicU64; 3],
    _room: [AtomicU64; 7],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<ClockFacts>() == 128);

fn store(words: &[AtomicU64; 3], moment: Moment) {
    words[0].store(moment.ticks, Ordering::Relaxed);
    words[1].store(moment.realtime, Ordering::Relaxed);
    words[2].store(moment.monotonic, Ordering::Relaxed);
}

fn load(words: &[AtomicU64; 3]) -> Moment {
    let [ticks, realtime, monotonic] = [0, 1, 2].map(|i| words[i].load(Ordering::Relaxed));
    Moment { ticks, realtime, monotonic }
}

impl ClockFacts {
    /// Writes the first moment, before the record is published.
    pub fn start(&self) {
        let moment = Moment::take();
        self.counter.store(COUNTER, Ordering::Relaxed);
        store(&self.first, moment);
        self.sequence.write(|| store(&self.latest, moment));
    }

    /// Refreshes the latest moment, unless that was done in the last 2^27 ticks (about 50 ms) or is
    /// under way.
    #[inline]
    pub fn refresh(&self, ticks: u64) {
        if ticks.wrapping_sub(self.latest[0].load(Ordering::Relaxed)) > 1 << 27 {
            self.refresh_now();
        }
    }

    #[cold]
    fn refresh_now(&self) {
        if self.refreshing.swap(1, Ordering::Acquire) == 0 {
            let moment = Moment::take();
            self.sequence.write(|| store(&self.latest, moment));
            self.refreshing.store(0, Ordering::Release);
        }
    }

    /// The counter, the first moment, and the latest; `None` if that is torn.
    pub fn read(&self, attempts: u32) -> (u32, Moment, Option<Moment>) {
        let latest = self.sequence.read(attempts, || load(&self.latest));
        (self.counter.load(Ordering::Relaxed), load(&self.first), latest)
    }
}

/// Closer moments measure a tick's length too poorly.
const LEAST_NANOSECONDS: u64 = 5_000_000;

/// Converts ticks to time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Nanoseconds per tick.
    pub nanoseconds_per_tick: f64,
    origin: Moment,
}

impl Scale {
    /// From a moment of this machine to now. If that is too short a time, waits: 5 ms at most.
    pub fn until_now(first: Moment) -> Option<Scale> {
        let passed = nanoseconds(libc::CLOCK_MONOTONIC).checked_sub(first.monotonic)?;
        if let Some(left @ 1..) = LEAST_NANOSECONDS.checked_sub(passed) {
            std::thread::sleep(std::time::Duration::from_nanos(left));
        }
        Scale::between(first, Moment::take())
    }

    /// From two moments of one machine at least 5 ms apart.
    pub fn between(first: Moment, later: Moment) -> Option<Scale> {
        let (ticks, nanoseconds) =
            (later.ticks.checked_sub(first.ticks)?, later.monotonic.checked_sub(first.monotonic)?);
        if ticks == 0 || nanoseconds < LEAST_NANOSECONDS {
            return None;
        }
        Some(Scale { nanoseconds_per_tick: nanoseconds as f64 / ticks as f64, origin: later })
    }

    /// `ticks` in nanoseconds since 1970.
    pub fn realtime(&self, ticks: u64) -> u64 {
        let away = ticks.wrapping_sub(self.origin.ticks) as i64 as f64 * self.nanoseconds_per_tick;
        self.origin.realtime.saturating_add_signed(away as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_turn_into_the_time_that_passed() {
        let first = Moment::take();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let later = Moment::take();
        let scale = Scale::between(first, later).expect("20 ms apart");
        let apart = scale.realtime(later.ticks) as i128 - scale.realtime(first.ticks) as i128;
        let truth = (later.monotonic - first.monotonic) as i128;
        assert!((apart - truth).abs() < truth / 100, "{apart} against {truth}");
    }

    #[test]
    fn a_young_record_has_times_too() {
        assert!(Scale::until_now(Moment::take()).is_some());
        let future = Moment { monotonic: u64::MAX, ..Moment::take() };
        assert_eq!(Scale::until_now(future), None);
    }

    #[test]
    fn moments_too_close_give_no_scale() {
        let moment = Moment::take();
        assert_eq!(Scale::between(moment, moment), None);
    }
}
