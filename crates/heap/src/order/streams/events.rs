//! Records events behind frees, asks them, and waits for them.

use super::fences::{Fence, Fences, Unfinished};
use super::stream::{PER_THREAD, is_quiet, thread_token};
use super::{ALL_STREAMS, FenceCounts, Streams};
use crate::driver::{CaptureStatus, Driver, ErrorKind, EventHandle, StreamHandle};
use crate::order::pending::Work;
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

/// Busy streams after which a poll stops, unless it is the last resort; and streams that are asked
/// about capture for the sake of one free. With thousands of streams, a malloc that looks for
/// memory must not ask all of them each time.
const ENOUGH: usize = 16;

/// Where a stream may be used.
pub(super) enum Reach {
    /// Here, by this handle.
    Here(StreamHandle),
    OtherThread,
    /// In calls that name it, if it still exists.
    Nowhere,
}

/// What a stream's events showed.
#[derive(Clone, Copy, Default)]
pub(super) struct Polled {
    /// An event was done.
    pub(super) further: bool,
    /// An event was not done.
    pub(super) busy: bool,
}

impl Streams {
    /// Asks every recorded event whether it is done. True if a stream got further.
    ///
    /// Never call it while anything captures on the device.
    pub(crate) fn poll(&self, driver: &dyn Driver) -> bool {
        self.poll_until(driver, usize::MAX)
    }

    /// [`Streams::poll`] for a caller with other means: stops after [`ENOUGH`] busy streams. The
    /// next call starts with the rest.
    pub(crate) fn poll_some(&self, driver: &dyn Driver) -> bool {
        self.poll_until(driver, ENOUGH)
    }

    fn poll_until(&self, driver: &dyn Driver, enough: usize) -> bool {
        let mut guard = lock(&self.fences);
        let fences = &mut *guard;
        let (mut further, mut busy) = (false, 0);
        for _ in 0..fences.pending.len() {
            let after = fences
                .pending
                .range(fences.next..)
                .next()
                .or_else(|| fences.pending.first_key_value());
            let Some((&number, _)) = after else { break };
            if busy == enough {
                fences.next = number;
                return further;
            }
            let polled = self.poll_stream(driver, fences, number);
            further |= polled.further;
            busy += usize::from(polled.busy);
            fences.next = number + 1;
        }
        fences.next = 0;
        further
    }

    /// Asks a stream's events until one is not done.
    fn poll_stream(&self, driver: &dyn Driver, fences: &mut Fences, number: u32) -> Polled {
        let mut polled = Polled::default();
        let Fences { pending, spare, covered, reached, .. } = fences;
        let Some(queue) = pending.get_mut(&number) else { return polled };
        while let Some(&Fence { work, event, age, clock, at }) = queue.front() {
            self.queried.fetch_add(1, Ordering::Relaxed);
            match driver.event_query(self.device, event) {
                Ok(true) => {
                    self.raise(number, work);
                    reached.insert(number, clock);
                    self.pass(covered.remove(&age).unwrap_or_default());
                    polled.further = true;
                }
                Ok(false) => {
                    self.lag.note(at.elapsed());
                    polled.busy = true;
                    return polled;
                }
                Err(error)
                    if matches!(error.kind, ErrorKind::DeviceLost | ErrorKind::Deinitialized) =>
                {
                    return polled;
                }
                // An event that cannot be asked proves nothing, and the events behind it must not
                // wait for it: the next one stands for its frees.
                Err(_) => {
                    self.unfenced.insert(number);
                    self.mark_unfenced(&covered.remove(&age).unwrap_or_default());
                }
            }
            queue.pop_front();
            spare.push(event);
        }
        pending.remove(&number);
        polled
    }

    /// Records an event behind the frees of every stream that has some and can be used here: not of
    /// a dead stream, a capturing one, another thread's per-thread stream, or a passing one other
    /// than `named`, which this call names. True if it recorded one. Frees that need an event
    /// behind all work of the device (those of a stream that has not allocated since, too) wait
    /// until enough of them have gathered.
    ///
    /// Never call it while an announced capture is open on the device.
    pub(crate) fn fence(
        &self,
        driver: &dyn Driver,
        hears_of_captures: bool,
        named: Option<u32>,
    ) -> bool {
        self.fence_each(driver, named) | self.fence_device(driver, hears_of_captures, ENOUGH as u64)
    }

    /// [`Streams::fence`], however few the gathered frees are.
    pub(crate) fn fence_all(
        &self,
        driver: &dyn Driver,
        hears_of_captures: bool,
        named: Option<u32>,
    ) -> bool {
        self.fence_each(driver, named) | self.fence_device(driver, hears_of_captures, u64::MAX)
    }

    /// Records the event owed since the stream's last call, in a call that names it. That is one
    /// event for each time that a request needed memory or a batch of frees was complete.
    pub(crate) fn fence_lost(&self, driver: &dyn Driver, named: u32) -> bool {
        self.lost.contains(named) && self.fence_one(driver, named, Some(named))
    }

    /// [`Streams::fence`], without an event behind all work of the device.
    pub(crate) fn fence_each(&self, driver: &dyn Driver, named: Option<u32>) -> bool {
        let unfenced = self.unfenced.iter(self.count()).filter(|&number| number != ALL_STREAMS);
        let any = unfenced.fold(false, |any, number| self.fence_one(driver, number, named) | any);
        // A passing stream gets its event in the malloc that makes it ripe.
        let unripe = self.unripe.iter(self.count()).filter(|&number| !self.is_lasting(number));
        unripe.for_each(|number| self.wanted.insert(number));
        any
    }

    /// Records the event that a fence has wanted behind what stream `named` had freed before this
    /// malloc on it.
    pub(crate) fn fence_wanted(&self, driver: &dyn Driver, named: u32) {
        if self.wanted.remove(named) {
            self.fence_one(driver, named, Some(named));
        }
    }

    /// Where the handle of a stream may be used now, in a call that names stream `named`. Call it
    /// under `fences`, unless the call names the stream.
    pub(super) fn reach(&self, number: u32, named: Option<u32>) -> Reach {
        let Some(stream) = self.get(number) else { return Reach::Nowhere };
        match (stream.handle(), stream.is_lasting()) {
            _ if stream.is_dead() => Reach::Nowhere,
            (PER_THREAD, _) if stream.identity() == thread_token() => Reach::Here(PER_THREAD),
            (PER_THREAD, _) => Reach::OtherThread,
            (handle, lasting) if lasting || named == Some(number) => Reach::Here(handle),
            _ => Reach::Nowhere,
        }
    }

    /// Calls `call` with the handle of a stream that exists whatever the program does meanwhile.
    /// `None`: the stream may be gone, or may be used only in its own thread or calls.
    pub(crate) fn with_lasting<T>(
        &self,
        number: u32,
        call: impl FnOnce(StreamHandle) -> T,
    ) -> Option<T> {
        let _fences = lock(&self.fences);
        match self.reach(number, None) {
            Reach::Here(handle) => Some(call(handle)),
            _ => None,
        }
    }

    /// Records an event behind all work of the device, if frees wait for all streams, or for a
    /// stream that only its own thread, or a call that names it, could record on, or for one that
    /// has not allocated since; the event covers dead streams too. Never while a stream captures:
    /// the driver would refuse, and make the capture fail. So it first asks every lasting stream; a
    /// free that waits is worth `questions` of them.
    fn fence_device(&self, driver: &dyn Driver, hears_of_captures: bool, questions: u64) -> bool {
        if !self.records_context_events(hears_of_captures) {
            return false;
        }
        let is_others = |number: u32| {
            self.get(number).is_some_and(|stream| {
                stream.handle() == PER_THREAD && stream.identity() != thread_token()
            })
        };
        // Dead streams alone are not worth it: there may be thousands.
        let others =
            self.unfenced.iter(self.count()).filter(|&number| is_others(number)).count() as u64;
        let waiting = if self.unfenced.contains(ALL_STREAMS) {
            self.gathered.load(Ordering::Relaxed).max(1)
        } else {
            0
        };
        let stranded = self.stranded.load(Ordering::Relaxed);
        let unripe = self.unripe.iter(self.count()).count() as u64;
        let worth = (waiting + others + stranded + unripe).saturating_mul(questions);
        if worth == 0 || worth < self.lasting.load(Ordering::Relaxed) || self.any_capturing(driver)
        {
            return false;
        }
        self.gathered.store(0, Ordering::Relaxed);
        self.stranded.store(0, Ordering::Relaxed);
        let reopened = self
            .unfenced
            .iter(self.count())
            .filter(|&number| self.is_dead(number) || is_others(number));
        let unripe = self.unripe.iter(self.count());
        let mut numbers: Vec<u32> =
            reopened.chain(self.lost.iter(self.count())).chain(unripe).collect();
        numbers.sort_unstable();
        numbers.dedup();
        // The fence belongs to an epoch of ALL_STREAMS.
        if !numbers.contains(&ALL_STREAMS) {
            numbers.push(ALL_STREAMS);
        }
        let mut fences = lock(&self.fences);
        let Some(event) = fences.take_event(driver, self.device) else { return false };
        let close = |number| {
            let stream = self.get(number)?;
            self.unfenced.remove(number);
            self.unripe.remove(number);
            self.lost.remove(number);
            Some((number, stream.epoch.fetch_add(1, Ordering::SeqCst)))
        };
        let epochs: Vec<(u32, u64)> = numbers.into_iter().filter_map(close).collect();
        if driver.context_event_record(self.device, event).is_err() {
            // The epochs stay without an event; the next one covers them.
            self.mark_unfenced(&epochs);
            fences.spare.push(event);
            return false;
        }
        let own = epochs.iter().find(|&&(number, _)| number == ALL_STREAMS);
        let epoch = own.map_or(0, |&(_, epoch)| epoch);
        fences.push(ALL_STREAMS, self.recorded_now(Work::of_all(epoch), event), epochs);
        true
    }

    /// The fence of an event that was recorded just now behind `work`.
    fn recorded_now(&self, work: Work, event: EventHandle) -> Fence {
        let age = self.recorded.fetch_add(1, Ordering::Relaxed);
        Fence { work, event, age, clock: self.host_clock(), at: Instant::now() }
    }

    /// Marks these streams unfenced: the frees of their epochs need another event.
    fn mark_unfenced(&self, epochs: &[(u32, u64)]) {
        for &(number, _) in epochs {
            self.unfenced.insert(number);
            if !self.is_ripe_at_once(number) {
                self.unripe.insert(number);
            }
        }
    }

    /// Moves an unfenced stream to `lost`, as it is dead or usable only in its own calls: until
    /// such a call, only an event behind all work of the device covers its frees.
    fn give_up(&self, number: u32) {
        if !self.is_dead(number) {
            self.stranded.fetch_add(1, Ordering::Relaxed);
        }
        self.lost.insert(number);
        self.unfenced.remove(number);
    }

    fn fence_one(&self, driver: &dyn Driver, number: u32, named: Option<u32>) -> bool {
        // Under this lock no number passes to another stream, and the end of a lasting stream
        // waits.
        let mut fences = lock(&self.fences);
        let handle = match self.reach(number, named) {
            Reach::Here(handle) => handle,
            Reach::OtherThread => return false,
            Reach::Nowhere => {
                self.give_up(number);
                return false;
            }
        };
        // An unannounced capture must live too.
        if !is_quiet(driver.capture_status(self.device, handle)) {
            return false;
        }
        // A program that misses no more asks for none of its events; each new one asks for those
        // before it, so that they don't gather.
        self.poll_stream(driver, &mut fences, number);
        let Some(event) = fences.take_event(driver, self.device) else { return false };
        self.unfenced.remove(number);
        self.lost.remove(number);
        // A malloc that still found the stream in the set has raised `ripe` before.
        fence(Ordering::SeqCst);
        let work = self.close_work(number);
        if driver.event_record(self.device, event, handle).is_ok() {
            fences.push(number, self.recorded_now(work, event), Vec::new());
            return true;
        }
        // The epoch stays without an event of its own; the next one covers it.
        self.unfenced.insert(number);
        fences.spare.push(event);
        false
    }

    /// Events of other streams recorded and not yet seen done, from the view of `waiter`: least
    /// work before them first, then oldest first. Without the events of a stream whose work `gains`
    /// nothing: the oldest of its queue, and nearly all where the host is far ahead of the device.
    /// `wait`: the stream for which `waiter` already waits, and up to which clock of the host.
    pub(crate) fn unfinished(
        &self,
        waiter: u32,
        wait: Option<(u32, u64)>,
        gains: impl Fn(u32, Work) -> bool,
    ) -> Vec<Unfinished> {
        let fences = lock(&self.fences);
        let now = self.host_clock();
        let oldest = fences.pending.get(&waiter).and_then(|queue| queue.front());
        let own = oldest.map_or(0, |oldest| now.saturating_sub(oldest.clock));
        let behind = own.max(wait.map_or(0, |wait| fences.left_of(wait)));
        let mut found: Vec<(u64, Unfinished)> = Vec::new();
        for (&stream, queue) in fences.pending.iter().filter(|&(&stream, _)| stream != waiter) {
            // An event behind all work of the device covers other streams too.
            let first = match stream {
                ALL_STREAMS => 0,
                _ => queue.partition_point(|fence| !gains(stream, fence.work)),
            };
            found.extend(queue.range(first..).map(|fence| {
                (fence.age, fences.unfinished((waiter, behind), (stream, fence), now))
            }));
        }
        found.sort_unstable_by_key(|(age, event)| (event.ahead, *age));
        found.into_iter().map(|(_, event)| event).collect()
    }

    /// Makes `waiter`, which this call names, wait on the device until `stream` is past `epoch`,
    /// whose event is recorded: later work of `waiter` comes after all frees up to that epoch.
    /// False: the wait cannot be added now, or the driver refused it.
    ///
    /// Never call it while anything captures on the device.
    pub(crate) fn make_wait(
        &self,
        driver: &dyn Driver,
        waiter: u32,
        stream: u32,
        epoch: u64,
    ) -> bool {
        // Under this lock the number passes to no other stream, and the event is not recorded
        // again.
        let fences = lock(&self.fences);
        let Some(fence) = fences
            .pending
            .get(&stream)
            .and_then(|queue| queue.iter().find(|fence| fence.work.epoch >= epoch))
        else {
            return self.completed(stream) >= epoch;
        };
        let Reach::Here(handle) = self.reach(waiter, Some(waiter)) else { return false };
        if driver.capture_status(self.device, handle) != Ok(CaptureStatus::None) {
            return false;
        }
        driver.stream_wait_event(self.device, handle, fence.event).is_ok()
    }

    /// Waits on the host for the oldest event of all streams. False: there is none, or the wait
    /// failed.
    pub(crate) fn wait_for_oldest(&self, driver: &dyn Driver) -> bool {
        let event = {
            let fences = lock(&self.fences);
            fences
                .pending
                .values()
                .filter_map(|queue| queue.front())
                .min_by_key(|fence| fence.age)
                .map(|fence| fence.event)
        };
        event.is_some_and(|event| {
            driver.event_synchronize(self.device, event).is_ok() && self.poll(driver)
        })
    }

    /// Closes and returns the open epoch of every stream. Take them before a device-wide
    /// synchronisation, and hand them to [`Streams::passed`] after it.
    pub(crate) fn open_epochs(&self) -> HashMap<u32, u64> {
        let numbers = (0..self.count()).chain([ALL_STREAMS]);
        // Closes each epoch, so that frees during the synchronisation belong to a later one.
        numbers
            .filter_map(|number| {
                Some((number, self.get(number)?.epoch.fetch_add(1, Ordering::SeqCst)))
            })
            .collect()
    }

    /// Notes that the device was synchronised after `epochs` were taken: every stream is past its
    /// own.
    pub(crate) fn passed(&self, epochs: &HashMap<u32, u64>) {
        self.pass(epochs.iter().map(|(&number, &epoch)| (number, epoch)));
    }

    fn pass(&self, epochs: impl IntoIterator<Item = (u32, u64)>) {
        for (number, epoch) in epochs {
            self.raise(number, Work::of_all(epoch));
        }
    }

    /// Events recorded and asked since the start.
    pub(crate) fn counts(&self) -> FenceCounts {
        FenceCounts {
            recorded: self.recorded.load(Ordering::Relaxed),
            queried: self.queried.load(Ordering::Relaxed),
        }
    }

    /// Gives every event back to the driver (at the heap's end).
    pub(crate) fn destroy_events(&self, driver: &dyn Driver) {
        let mut fences = lock(&self.fences);
        let pending = std::mem::take(&mut fences.pending);
        fences.covered.clear();
        let events = pending.into_values().flatten().map(|fence| fence.event);
        for event in events.chain(std::mem::take(&mut fences.spare)) {
            let _ = driver.event_destroy(self.device, event);
        }
    }
}
