//! Virtual time.
//!
//! One host clock advances by the costs of calls, the program's own time, and waits. A stream is a
//! queue: its `tail` is the end of its last work. Streams run in parallel at full speed. No real
//! clock is read, so every run is the same.

use crate::calls::{Caller, current_caller};

/// The host's clock.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    host: u64,
    waited: [u64; 2],
    charged: [u64; 2],
    throttled: u64,
}

impl Timeline {
    pub(crate) fn now(&self) -> u64 {
        self.host
    }

    /// The program works.
    pub(crate) fn work(&mut self, ns: u64) {
        self.host += ns;
    }

    /// Charges a call to its caller.
    pub(crate) fn spend(&mut self, ns: u64) {
        self.host += ns;
        self.charged[current_caller() as usize] += ns;
    }

    /// The cost of the calls of `caller`, without launches and waits.
    pub(crate) fn charged(&self, caller: Caller) -> u64 {
        self.charged[caller as usize]
    }

    /// The host stands still until `time`, in a wait of `caller`.
    pub(crate) fn wait_until(&mut self, time: u64, caller: Caller) {
        if time > self.host {
            self.waited[caller as usize] += time - self.host;
            self.host = time;
        }
    }

    /// Time spent in host waits of `caller`.
    pub(crate) fn waited(&self, caller: Caller) -> u64 {
        self.waited[caller as usize]
    }

    /// Host time spent on a full device queue.
    pub(crate) fn throttled(&self) -> u64 {
        self.throttled
    }

    fn throttle(&mut self, tail: u64, run_ahead: u64) {
        let floor = tail.saturating_sub(run_ahead);
        if floor > self.host {
            self.throttled += floor - self.host;
            self.host = floor;
        }
    }

    /// Enqueues `kernels` of `each` nanoseconds behind `tail`, each at a host cost of `launch`;
    /// returns the new tail.
    ///
    /// Equals one launch after the other: the i-th starts once the host has launched it and its
    /// predecessor is done, so the end is the latest of: queue busy throughout, device waiting for
    /// the first launch, device waiting for the last one. (The cases between are linear, so one of
    /// the two ends is the worst.)
    pub(crate) fn launch(
        &mut self,
        tail: u64,
        kernels: u64,
        each: u64,
        launch: u64,
        run_ahead: u64,
    ) -> u64 {
        if kernels == 0 {
            return tail;
        }
        self.throttle(tail, run_ahead);
        let first = self.host + launch + kernels * each;
        let last = self.host + kernels * launch + each;
        let end = (tail + kernels * each).max(first).max(last);
        self.host += kernels * launch;
        self.throttle(end, run_ahead);
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch of launches takes exactly as long as its launches one by one.
    #[test]
    fn a_batch_is_its_launches_one_by_one() {
        for (tail, kernels, each, launch, ahead) in [
            (0, 5, 20, 8, 1000),
            (500, 7, 3, 8, 1000),
            (0, 9, 20, 8, 45),
            (300, 4, 8, 8, 20),
            (90, 6, 1, 30, 10),
        ] {
            let (mut batch, mut single) = (Timeline::default(), Timeline::default());
            batch.work(50);
            single.work(50);
            let end = batch.launch(tail, kernels, each, launch, ahead);
            let mut t = tail;
            for _ in 0..kernels {
                t = single.launch(t, 1, each, launch, ahead);
            }
            assert_eq!(
                (end, batch.now()),
                (t, single.now()),
                "{tail} {kernels} {each} {launch} {ahead}"
            );
        }
    }
}
