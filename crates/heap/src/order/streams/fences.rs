//! Events behind frees.

use crate::driver::{DeviceId, Driver, EventHandle};
use crate::order::pending::Work;
use crate::order::streams::ALL_STREAMS;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The most events of a stream that are kept apart until they are seen done. Where the host is
/// further ahead, each request would look at more of them.
const MOST: usize = 256;

/// An event behind the frees of an epoch.
#[derive(Clone, Copy)]
pub(crate) struct Fence {
    pub(crate) work: Work,
    pub(crate) event: EventHandle,
    /// The lower of two was recorded first.
    pub(crate) age: u64,
    /// [`Streams::host_clock`](super::Streams::host_clock) at its record.
    pub(crate) clock: u64,
    pub(crate) at: Instant,
}

/// An event not yet seen done, from the view of a stream that could wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unfinished {
    /// Its stream.
    pub(crate) stream: u32,
    /// The work of its stream behind which it was recorded.
    pub(crate) work: Work,
    /// Of one behind all work of the device: the streams whose frees need it, without the waiting
    /// one, and the last epoch of each before it.
    pub(crate) covers: Vec<(u32, u64)>,
    /// Of one behind all work of the device: the streams other than the waiting one that are not
    /// past it, as far as older events tell.
    pub(crate) busy: Vec<u32>,
    /// Work of its stream before it that is not known to be done. This and what follows are in
    /// ticks of [`Streams::host_clock`](super::Streams::host_clock).
    pub(crate) ahead: u64,
    /// How much longer that takes than the work that the waiting stream has before the wait: so
    /// long it would stand idle, if two streams are equally fast.
    pub(crate) idle: u64,
    /// How far that exceeds what the host has enqueued on the device since the event: while that
    /// runs, the device is busy.
    pub(crate) uncovered: u64,
    /// When it was recorded.
    pub(crate) clock: u64,
}

/// Events recorded and not yet seen done, and spare ones.
#[derive(Default)]
pub(crate) struct Fences {
    /// By stream, oldest first. Ordered by number, so that a replay asks its events in the same
    /// order each time.
    pub(crate) pending: BTreeMap<u32, VecDeque<Fence>>,
    /// By the age of a fence of [`ALL_STREAMS`]: the epochs that it covers, of streams whose frees
    /// need it.
    pub(crate) covered: HashMap<u64, Vec<(u32, u64)>>,
    pub(crate) spare: Vec<EventHandle>,
    /// By stream: the clock of its last event seen done.
    pub(crate) reached: HashMap<u32, u64>,
    /// The number at which the next poll starts.
    pub(crate) next: u32,
}

impl Unfinished {
    /// All work behind which it was recorded and that frees wait for, by stream.
    pub(crate) fn all_work(&self) -> impl Iterator<Item = (u32, Work)> {
        let covers = self.covers.iter().map(|&(stream, epoch)| (stream, Work::of_all(epoch)));
        std::iter::once((self.stream, self.work)).chain(covers)
    }

    /// Whether the waiting stream would not stand idle.
    pub(crate) fn is_near(&self) -> bool {
        self.idle == 0
    }
}

impl Fences {
    /// An event that nothing waits for: a spare one, or a new one. `None`: the driver makes none.
    pub(super) fn take_event(
        &mut self,
        driver: &dyn Driver,
        device: DeviceId,
    ) -> Option<EventHandle> {
        self.spare.pop().or_else(|| driver.event_create(device).ok())
    }

    /// Adds an event of `stream` that is just recorded; `covers`: the epochs that it covers, if it
    /// is one of [`ALL_STREAMS`]. Past [`MOST`] it takes the place of the one before it, behind
    /// whose work it is too.
    pub(crate) fn push(&mut self, stream: u32, fence: Fence, mut covers: Vec<(u32, u64)>) {
        let queue = self.pending.entry(stream).or_default();
        if queue.len() >= MOST
            && let Some(before) = queue.pop_back()
        {
            self.spare.push(before.event);
            for (number, epoch) in self.covered.remove(&before.age).unwrap_or_default() {
                // An epoch that it covers too is a later one.
                if covers.iter().all(|&(covered, _)| covered != number) {
                    covers.push((number, epoch));
                }
            }
        }
        queue.push_back(fence);
        if !covers.is_empty() {
            self.covered.insert(fence.age, covers);
        }
    }

    /// The clock up to which `stream` is known to be, by its events and those behind all work.
    fn reached(&self, stream: u32) -> u64 {
        let by = |stream| self.reached.get(&stream).copied().unwrap_or(0);
        by(stream).max(by(ALL_STREAMS))
    }

    /// How long a stream that waits for what the host had enqueued on `stream` at `clock` has still
    /// to wait. A stream without unfinished events is taken to be as far as the last of the others.
    pub(crate) fn left_of(&self, (stream, clock): (u32, u64)) -> u64 {
        let mut reached = self.reached(stream);
        if !self.pending.contains_key(&stream) {
            let others = self.pending.keys().map(|&other| self.reached(other));
            reached = reached.max(others.min().unwrap_or(clock));
        }
        clock.saturating_sub(reached)
    }

    /// A pending event of `stream`, from the view of `waiter`, which has `behind` ticks of work of
    /// its own; the host's clock is `now`.
    pub(crate) fn unfinished(
        &self,
        (waiter, behind): (u32, u64),
        (stream, fence): (u32, &Fence),
        now: u64,
    ) -> Unfinished {
        let is_other = |number: u32| number != waiter && number != ALL_STREAMS;
        let covers = self.covered.get(&fence.age).into_iter().flatten();
        let covers = covers.copied().filter(|&(number, _)| is_other(number)).collect();
        let is_busy =
            |queue: &VecDeque<Fence>| queue.front().is_some_and(|oldest| oldest.age < fence.age);
        let others = self.pending.iter().filter(|_| stream == ALL_STREAMS);
        let busy = others.filter(|&(&number, queue)| is_other(number) && is_busy(queue));
        let busy = busy.map(|(&number, _)| number).collect();
        let clock = fence.clock;
        let ahead = clock.saturating_sub(self.reached(stream)).max(1);
        let idle = ahead.saturating_sub(behind);
        let uncovered = idle.saturating_sub(now.saturating_sub(clock));
        Unfinished { stream, work: fence.work, covers, busy, ahead, idle, uncovered, clock }
    }
}

/// The longest that an event was seen unfinished, nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Lag {
    of_this_step: AtomicU64,
    of_the_last: AtomicU64,
}

impl Lag {
    /// Notes that an event was not done `age` after its record.
    pub(crate) fn note(&self, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        self.of_this_step.fetch_max(age, Ordering::Relaxed);
    }

    pub(crate) fn end_step(&self) {
        let ended = self.of_this_step.swap(0, Ordering::Relaxed);
        self.of_the_last.store(ended, Ordering::Relaxed);
    }

    /// How far ahead the host was at least, in this step or the last, nanoseconds.
    pub(crate) fn nanoseconds(&self) -> u64 {
        let last = self.of_the_last.load(Ordering::Relaxed);
        self.of_this_step.load(Ordering::Relaxed).max(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(age: u64) -> Fence {
        let (event, at) = (EventHandle(age as usize), Instant::now());
        Fence { work: Work::of_all(age), event, age, clock: age, at }
    }

    #[test]
    fn past_the_most_an_event_stands_for_the_one_before_it_and_nothing_that_it_covers_is_lost() {
        let mut fences = Fences::default();
        let number = MOST as u64 + 3;
        for age in 0..number {
            // Each covers the stream of all, and two others in turn.
            fences.push(ALL_STREAMS, fence(age), vec![(ALL_STREAMS, age), (age as u32 % 2, age)]);
        }
        let queue = &fences.pending[&ALL_STREAMS];
        let ages: Vec<u64> = queue.iter().map(|fence| fence.age).collect();
        let kept: Vec<u64> = (0..MOST as u64 - 1).chain([number - 1]).collect();
        assert_eq!(ages, kept);
        assert_eq!(fences.spare.len(), 3, "the events of the others are used again");
        let mut last = fences.covered[&(number - 1)].clone();
        last.sort_unstable();
        let newest = |parity: u64| (0..number).filter(|age| age % 2 == parity).max().unwrap();
        let all = [(0, newest(0)), (1, newest(1)), (ALL_STREAMS, number - 1)];
        assert_eq!(last, all);
        assert_eq!(fences.covered.len(), MOST);
    }

    #[test]
    fn a_stream_stands_idle_for_what_it_has_less_to_do_and_what_is_enqueued_since_covers_that() {
        let mut fences = Fences::default();
        fences.push(1, fence(40), Vec::new());
        fences.reached.insert(1, 10);
        let event = |behind, now| fences.unfinished((2, behind), (1, &fence(40)), now);
        let of = |event: Unfinished| (event.ahead, event.idle, event.uncovered);
        assert_eq!(of(event(0, 40)), (30, 30, 30));
        assert_eq!(of(event(12, 45)), (30, 18, 13));
        assert_eq!(of(event(12, 60)), (30, 18, 0));
        assert!(event(30, 40).is_near() && !event(29, 40).is_near());
        assert_eq!(fences.unfinished((2, 0), (1, &fence(10)), 40).ahead, 1, "work without a free");
    }

    #[test]
    fn what_is_left_of_a_wait_is_counted_from_where_its_stream_or_else_the_last_one_is() {
        let mut fences = Fences::default();
        assert_eq!(fences.left_of((1, 50)), 0, "nothing is unfinished");
        fences.push(1, fence(40), Vec::new());
        fences.push(2, fence(45), Vec::new());
        fences.reached.extend([(1, 10), (2, 30)]);
        assert_eq!((fences.left_of((1, 50)), fences.left_of((2, 50))), (40, 20));
        assert_eq!(fences.left_of((3, 50)), 40, "it has no event: as far as the last");
        fences.reached.insert(ALL_STREAMS, 48);
        assert_eq!((fences.left_of((1, 50)), fences.left_of((1, 47))), (2, 0));
    }
}
