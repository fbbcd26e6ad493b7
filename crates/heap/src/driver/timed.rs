//! Times driver calls: for the record those that change memory or wait, elsewhere
//! (`gruyere bench --device cuda`) all.
//!
//! For the record a call costs two reads of the clock and one locked instruction more. Questions
//! (captures, ids, events asked for or recorded) pass untimed there; those of the hot path go
//! around it (`Shared::questions`).

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::driver::{Driver, Result};
use gruyere_record::calls::{CallTimes, CallWriter, DriverCall, RECORDED_CALLS};
use gruyere_record::{Record, clock};

/// A receiver of the times of calls.
pub trait Stopwatch: Send + Sync {
    /// Makes a call about `bytes` (0: the call has none) and notes its time, if wanted. A failed
    /// call counts too.
    fn time<T>(&self, call: DriverCall, bytes: u64, make: impl FnOnce() -> T) -> T;
}

/// A driver that times its calls.
pub struct Timed<S> {
    inner: Arc<dyn Driver>,
    watch: S,
}

impl<S: Stopwatch> Timed<S> {
    /// Wraps `inner`, timed by `watch`.
    pub fn new(inner: Arc<dyn Driver>, watch: S) -> Self {
        Self { inner, watch }
    }

    /// The stopwatch.
    pub fn watch(&self) -> &S {
        &self.watch
    }

    #[inline(always)]
    fn time<T>(
        &self,
        call: DriverCall,
        bytes: u64,
        make: impl FnOnce(&dyn Driver) -> Result<T>,
    ) -> Result<T> {
        self.watch.time(call, bytes, || make(&*self.inner))
    }
}

/// Writes the times of calls to the record.
pub struct OnRecord {
    record: &'static Record,
    /// By call, from its first on; `None`: the record has no room for it.
    times: [OnceLock<Option<&'static CallTimes>>; RECORDED_CALLS],
    writers: [CallWriter; RECORDED_CALLS],
}

impl OnRecord {
    /// A stopwatch that writes to `record`.
    pub fn new(record: &'static Record) -> Self {
        Self {
            record,
            times: [const { OnceLock::new() }; RECORDED_CALLS],
            writers: Default::default(),
        }
    }
}

impl Stopwatch for OnRecord {
    #[inline(always)]
    fn time<T>(&self, call: DriverCall, bytes: u64, make: impl FnOnce() -> T) -> T {
        // Known at compile time, as is the call: a question compiles to the bare call.
        if !call.is_recorded() {
            return make();
        }
        let start = clock::now();
        let answer = make();
        // The counters of two processors may differ a little.
        let ticks = clock::now().saturating_sub(start);
        let times = self.times[call as usize].get_or_init(|| self.record.call_times(call));
        if let Some(times) = times {
            self.writers[call as usize].note(times, bytes, ticks);
        }
        answer
    }
}

macro_rules! timed {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $call:ident, $bytes:expr;)*) => {
        impl<S: Stopwatch> Driver for Timed<S> {
            $(fn $name(&self, $($argument: $type),*) -> Result<$result> {
                self.time(DriverCall::$call, $bytes, |driver| driver.$name($($argument),*))
            })*

            fn host_time(&self) -> Duration {
                self.inner.host_time()
            }
        }
    };
}

crate::each_driver_call!(timed);
