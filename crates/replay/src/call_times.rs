//! Times of a replay's driver calls on a real device. Every call is kept, so quantiles are exact.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use gruyere::heap::driver::timed::Stopwatch;
use gruyere::record::calls::{CallTime, DriverCall, SIZE_CLASSES, class_of};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Times of calls, nanoseconds on the monotonic clock, by call and class of sizes.
#[derive(Debug, Default)]
pub struct CallSamples(Mutex<BTreeMap<(DriverCall, usize), Vec<u64>>>);

impl Stopwatch for CallSamples {
    fn time<T>(&self, call: DriverCall, bytes: u64, make: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let answer = make();
        let taken = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry((call, class_of(bytes)))
            .or_default()
            .push(taken);
        answer
    }
}

impl CallSamples {
    /// Takes the times since the last call, by call and class of sizes.
    pub fn take(&self) -> Vec<CallTime> {
        let samples = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        samples.into_iter().map(|((call, class), times)| told(call, class, times)).collect()
    }
}

fn told(call: DriverCall, class: usize, mut times: Vec<u64>) -> CallTime {
    times.sort_unstable();
    let quantile = |share: f64| {
        let rank = (share * times.len() as f64).ceil().max(1.0) as usize;
        times.get(rank - 1).copied().unwrap_or(0)
    };
    CallTime {
        call: call.name().to_owned(),
        up_to_bytes: Some(SIZE_CLASSES[class]).filter(|&most| call.is_sized() && most < u64::MAX),
        is_sized: call.is_sized(),
        count: times.len() as u64,
        total_nanoseconds: times.iter().fold(0, |sum, &time| sum.saturating_add(time)),
        p50_nanoseconds: quantile(0.5),
        p99_nanoseconds: quantile(0.99),
        max_nanoseconds: quantile(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_samples() {
        let time = told(DriverCall::Create, 1, (1..=200).rev().collect());
        assert_eq!(
            (time.count, time.p50_nanoseconds, time.p99_nanoseconds, time.max_nanoseconds),
            (200, 100, 198, 200)
        );
        assert_eq!((time.total_nanoseconds, time.up_to_bytes), (20_100, Some(32 << 20)));
        let one = told(DriverCall::Release, 0, vec![7]);
        assert_eq!(
            (one.p50_nanoseconds, one.max_nanoseconds, one.up_to_bytes, one.is_sized),
            (7, 7, None, false)
        );
    }

    #[test]
    fn calls_are_taken_once() {
        let samples = CallSamples::default();
        assert_eq!(samples.time(DriverCall::Map, 2 << 20, || 5), 5);
        samples.time(DriverCall::Map, 1 << 30, || ());
        let times = samples.take();
        assert_eq!(
            times.iter().map(|time| (time.up_to_bytes, time.count)).collect::<Vec<_>>(),
            [(Some(2 << 20), 1), (None, 1)]
        );
        assert_eq!(samples.take(), []);
    }
}
