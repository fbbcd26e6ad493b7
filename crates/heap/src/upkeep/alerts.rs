//! Alerts to the program: memory ran out, or was so short that a request climbed the reclaim
//! ladder, or a threshold was passed.
//!
//! The thread whose request causes an alert raises it, with no lock of the allocator held. The
//! alert goes to the listener, if any, on that same thread; and to a queue, from which any thread
//! takes it. Python listens at the queue: the allocating thread may hold locks of torch's, or lack
//! the interpreter's lock while a thread that holds it waits for those, so it must never wait for
//! the interpreter.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Alerts that wait in the queue; beyond that, the oldest are dropped and counted.
const MAX_WAITING: usize = 256;

/// Locks; a panic of another holder is no reason to stop serving. Not the heap's lock: threads wait
/// here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The event behind an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AlertKind {
    /// A request returned out of memory.
    OutOfMemory = 1,
    /// A request fitted nowhere, and the allocator reclaims memory (or will find that it cannot).
    Reclaim = 2,
    /// A threshold of `alert:` was passed.
    Threshold = 3,
}

/// One alert, in bytes unless noted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alert {
    /// The event.
    pub kind: AlertKind,
    /// The device.
    pub device: u32,
    /// Bytes requested.
    pub asked: u64,
    /// Bytes held at that time.
    pub reserved: u64,
    /// Bytes live at that time.
    pub live: u64,
    /// The peak of live bytes.
    pub live_peak: u64,
    /// Alerts of this kind (or of this threshold) on the device so far, this one included.
    pub count: u64,
    /// For a threshold: its place in `alert:`, from 0.
    pub threshold: u32,
    /// For a threshold: the value of its metric, in the metric's unit.
    pub value: f64,
}

/// A listener to alerts, called on the thread that caused them.
pub type Listener = Arc<dyn Fn(&Alert) + Send + Sync>;

/// Called at each passed threshold, whatever its action, with the device and the threshold's text,
/// on the thread that caused it, with no lock of the allocator held.
pub(crate) type AtThreshold = fn(device: u32, threshold: &str);

/// The alerts and their listeners.
pub struct Alerts {
    /// false -> true: by the first listener or taker. While it is false, an alert costs one load.
    wanted: AtomicBool,
    listener: Mutex<Option<Listener>>,
    /// Alerts not taken yet, oldest first, and the number dropped.
    waiting: Mutex<(VecDeque<Alert>, u64)>,
    ready: Condvar,
    at_threshold: OnceLock<AtThreshold>,
}

/// The alerts of the process; a program may ask for them before there is a heap.
pub static ALERTS: Alerts = Alerts {
    wanted: AtomicBool::new(false),
    listener: Mutex::new(None),
    waiting: Mutex::new((VecDeque::new(), 0)),
    ready: Condvar::new(),
    at_threshold: OnceLock::new(),
};

impl Alerts {
    /// Whether any listener or taker wants alerts.
    #[inline]
    pub fn are_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Keeps alerts from now on.
    pub fn want(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// Replaces the listener; the former one may still be running on other threads.
    pub fn listen(&self, listener: Option<Listener>) {
        if listener.is_some() {
            self.want();
        }
        *lock(&self.listener) = listener;
    }

    /// Sets the call for each passed threshold; the first in a process stays.
    pub fn at_threshold(&self, what: AtThreshold) {
        let _ = self.at_threshold.set(what);
    }

    /// Reports a passed threshold, before its action. Call with no lock held.
    pub fn passed(&self, device: u32, threshold: &str) {
        if let Some(what) = self.at_threshold.get() {
            what(device, threshold);
        }
    }

    /// Raises an alert. Call with no lock held.
    pub fn raise(&self, alert: &Alert) {
        if !self.are_wanted() {
            return;
        }
        {
            let mut waiting = lock(&self.waiting);
            if waiting.0.len() == MAX_WAITING {
                waiting.0.pop_front();
                waiting.1 += 1;
            }
            waiting.0.push_back(*alert);
        }
        self.ready.notify_one();
        // Called outside the lock: the listener may allocate, and so raise alerts itself.
        let listener = lock(&self.listener).clone();
        if let Some(listener) = listener {
            listener(alert);
        }
    }

    /// The oldest alert, and the number dropped before it since the last call; waits at most
    /// `timeout`.
    pub fn next(&self, timeout: Duration) -> Option<(Alert, u64)> {
        self.want();
        let end = Instant::now() + timeout;
        let mut waiting = lock(&self.waiting);
        loop {
            if let Some(alert) = waiting.0.pop_front() {
                return Some((alert, std::mem::take(&mut waiting.1)));
            }
            let left = end.checked_duration_since(Instant::now())?;
            waiting =
                self.ready.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alerts() -> Alerts {
        Alerts {
            wanted: AtomicBool::new(false),
            listener: Mutex::new(None),
            waiting: Mutex::default(),
            ready: Condvar::new(),
            at_threshold: OnceLock::new(),
        }
    }

    fn alert(count: u64) -> Alert {
        Alert {
            kind: AlertKind::Reclaim,
            device: 0,
            asked: 1,
            reserved: 2,
            live: 3,
            live_peak: 4,
            count,
            threshold: 0,
            value: 0.0,
        }
    }

    #[test]
    fn nothing_is_kept_until_somebody_wants_it() {
        let alerts = alerts();
        alerts.raise(&alert(1));
        assert_eq!(alerts.next(Duration::ZERO), None);
        alerts.raise(&alert(2));
        assert_eq!(alerts.next(Duration::ZERO), Some((alert(2), 0)));
    }

    #[test]
    fn the_oldest_are_lost_first_and_counted() {
        let alerts = alerts();
        alerts.want();
        (0..MAX_WAITING as u64 + 3).for_each(|count| alerts.raise(&alert(count)));
        assert_eq!(alerts.next(Duration::ZERO), Some((alert(3), 3)));
        assert_eq!(alerts.next(Duration::ZERO), Some((alert(4), 0)));
    }

    #[test]
    fn a_waiting_thread_hears_of_an_alert_of_another() {
        let alerts = alerts();
        alerts.want();
        std::thread::scope(|scope| {
            let heard = scope.spawn(|| alerts.next(Duration::from_secs(60)));
            alerts.raise(&alert(9));
            assert_eq!(heard.join().unwrap(), Some((alert(9), 0)));
        });
    }

    #[test]
    fn a_listener_may_raise_alerts_itself_and_be_replaced() {
        let alerts = Arc::new(alerts());
        let (heard, inner) = (Arc::new(Mutex::new(Vec::new())), alerts.clone());
        let log = heard.clone();
        alerts.listen(Some(Arc::new(move |got: &Alert| {
            lock(&log).push(got.count);
            if got.count > 0 {
                inner.raise(&alert(got.count - 1));
            }
        })));
        alerts.raise(&alert(2));
        assert_eq!(*lock(&heard), [2, 1, 0]);
        alerts.listen(None);
        alerts.raise(&alert(2));
        assert_eq!(lock(&heard).len(), 3);
    }
}
