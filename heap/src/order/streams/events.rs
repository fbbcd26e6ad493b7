//! Events are recorded behind frees, asked, and waited for.

use super::fences::{Fence, Fences, Unfinished};
use super::stream::{PER_THREAD, is_quiet, thread_token};
use super::{ALL_STREAMS, FenceCounts, Streams};
use crate::driver::{CaptureStatus, Driver, ErrorKind, StreamHandle};
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Streams that a poll which is not the last resort finds busy before it stops, and streams that
/// are asked whether they capture for the sake of one free: with thousands of streams, a malloc
/// that looks for memory must not ask them all each time.
const ENOUGH: usize = 16;

/// From where a stream may be used.
pub(super) enum Reach {
    /// From here, by this handle.
    Here(StreamHandle),
    OtherThread,
    /// From calls that name it, if it is there at all.
    Nowhere,
}

/// What the events of a stream have told.
#[derive(Clone, Copy, Default)]
pub(super) struct Polled {
    /// One of the events was done.
    pub(super) further: bool,
    /// One of the events was not done.
    pub(super) busy: bool,
}

impl Streams {
    /// Asks every recorded event whether it is done. True if a stream got further.
    ///
    /// Never call it while anything captures on the device.
    pub(crate) fn poll(&self, driver: &dyn Driver) -> bool {
        self.poll_until(driver, usize::MAX)
    }

    /// As [`Streams::poll`], where more may be had by other means: after [`ENOUGH`] streams that
    /// have got no further the rest are left to the next call, which begins with them.
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

    /// Asks the recorded events of a stream, until one is not done.
    fn poll_stream(&self, driver: &dyn Driver, fences: &mut Fences, number: u32) -> Polled {
        let mut polled = Polled::default();
        let Fences { pending, spare, dead, reached, .. } = fences;
        let Some(queue) = pending.get_mut(&number) else { return polled };
        while let Some(&Fence { epoch, event, age, at }) = queue.front() {
            self.queried.fetch_add(1, Ordering::Relaxed);
            match driver.event_query(self.device, event) {
                Ok(true) => {
                    self.raise(number, epoch);
                    reached.insert(number, age);
                    self.pass(dead.remove(&age).unwrap_or_default());
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
                // An event that cannot be asked proves nothing, and those behind it must not wait
                // for it: the next one stands for its frees.
                Err(_) => {
                    self.unfenced.insert(number);
                    self.mark_unfenced(&dead.remove(&age).unwrap_or_default());
                }
            }
            queue.pop_front();
            spare.push(event);
        }
        pending.remove(&number);
        polled
    }

    /// Records an event behind the frees of every stream that has some, where that can be done: not
    /// on a dead stream, a capturing one, another thread's per-thread stream, or a passing one
    /// other than `named`, which this call names. True if an event was recorded. Frees that only an
    /// event behind all work of the device would do for wait until enough of them have gathered.
    ///
    /// Never call it while anything captures on the device of which we were told.
    pub(crate) fn fence(
        &self,
        driver: &dyn Driver,
        hears_of_captures: bool,
        named: Option<u32>,
    ) -> bool {
        self.fence_each(driver, named) | self.fence_device(driver, hears_of_captures, ENOUGH as u64)
    }

    /// As [`Streams::fence`], however few they are.
    pub(crate) fn fence_all(
        &self,
        driver: &dyn Driver,
        hears_of_captures: bool,
        named: Option<u32>,
    ) -> bool {
        self.fence_each(driver, named) | self.fence_device(driver, hears_of_captures, u64::MAX)
    }

    /// This call names a stream: records the event behind its frees that a call before would have
    /// recorded, had it named the stream too. So that is one event for each time that memory was
    /// needed.
    pub(crate) fn fence_lost(&self, driver: &dyn Driver, named: u32) -> bool {
        self.lost.contains(named) && self.fence_one(driver, named, Some(named))
    }

    fn fence_each(&self, driver: &dyn Driver, named: Option<u32>) -> bool {
        let unfenced = self.unfenced.iter(self.count()).filter(|&number| number != ALL_STREAMS);
        unfenced.fold(false, |any, number| self.fence_one(driver, number, named) | any)
    }

    /// Whether the handle of a stream may be used now, in a call that names stream `named`. Under
    /// `fences`, where no call names the stream.
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

    /// What `call` answers for the handle of a stream that is there whatever the program does
    /// meanwhile; `None`: it may be gone, or be used in its own thread or calls only.
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

    /// Records an event behind all work of the device, where something is freed that waits for all
    /// streams, or for one that only its own thread can record on, or only a call that names it; it
    /// stands for the streams that are no more too. Not while a stream captures: the driver would
    /// refuse, and make the capture fail. So every stream that lasts is asked before, and so many
    /// `questions` are worth one free that waits.
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
        let worth = (waiting + others + stranded).saturating_mul(questions);
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
        let mut numbers: Vec<u32> = reopened.chain(self.lost.iter(self.count())).collect();
        // The fence is one of an epoch of ALL_STREAMS.
        if !numbers.contains(&ALL_STREAMS) {
            numbers.push(ALL_STREAMS);
        }
        let mut fences = lock(&self.fences);
        let Some(event) = fences.spare.pop().or_else(|| driver.event_create(self.device).ok())
        else {
            return false;
        };
        let close = |number| {
            let stream = self.get(number)?;
            self.unfenced.remove(number);
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
        let (age, at) = (self.recorded.fetch_add(1, Ordering::Relaxed), Instant::now());
        let own = epochs.iter().find(|&&(number, _)| number == ALL_STREAMS);
        let epoch = own.map_or(0, |&(_, epoch)| epoch);
        fences.pending.entry(ALL_STREAMS).or_default().push_back(Fence { epoch, event, age, at });
        fences.dead.insert(age, epochs);
        true
    }

    /// The frees of these epochs need another event.
    fn mark_unfenced(&self, epochs: &[(u32, u64)]) {
        epochs.iter().for_each(|&(number, _)| self.unfenced.insert(number));
    }

    /// A stream with unfenced frees is dead, or may be used in its own calls only: until one comes,
    /// only an event behind all work of the device is behind its frees.
    fn give_up(&self, number: u32) {
        if !self.is_dead(number) {
            self.stranded.fetch_add(1, Ordering::Relaxed);
        }
        self.lost.insert(number);
        self.unfenced.remove(number);
    }

    fn fence_one(&self, driver: &dyn Driver, number: u32, named: Option<u32>) -> bool {
        let Some(stream) = self.get(number) else { return false };
        // Under this lock the number becomes no other stream's, and the end of a lasting one waits.
        let mut fences = lock(&self.fences);
        let handle = match self.reach(number, named) {
            Reach::Here(handle) => handle,
            Reach::OtherThread => return false,
            Reach::Nowhere => {
                self.give_up(number);
                return false;
            }
        };
        // A capture that nobody announced must live too.
        if !is_quiet(driver.capture_status(self.device, handle)) {
            return false;
        }
        let Some(event) = fences.spare.pop().or_else(|| driver.event_create(self.device).ok())
        else {
            return false;
        };
        self.unfenced.remove(number);
        self.lost.remove(number);
        let epoch = stream.epoch.fetch_add(1, Ordering::SeqCst);
        if driver.event_record(self.device, event, handle).is_ok() {
            let (age, at) = (self.recorded.fetch_add(1, Ordering::Relaxed), Instant::now());
            fences.pending.entry(number).or_default().push_back(Fence { epoch, event, age, at });
            return true;
        }
        // The epoch stays without an event of its own; the next one covers it.
        self.unfenced.insert(number);
        fences.spare.push(event);
        false
    }

    /// The events of other streams that are recorded and not yet seen done, as they look to
    /// `waiter`: those first that have the least work before them, then the older ones.
    pub(crate) fn unfinished(&self, waiter: u32) -> Vec<Unfinished> {
        let fences = lock(&self.fences);
        let now = self.recorded.load(Ordering::Relaxed);
        let behind = fences
            .pending
            .get(&waiter)
            .and_then(|queue| queue.front())
            .map_or(0, |oldest| now - oldest.age);
        let mut found: Vec<(u64, Unfinished)> = Vec::new();
        for (&stream, queue) in fences.pending.iter().filter(|&(&stream, _)| stream != waiter) {
            // None done yet: all that came before any event may lie before this one.
            let reached = fences.reached.get(&stream).map_or(0, |age| age + 1);
            found.extend(queue.iter().map(|fence| {
                let ahead = fence.age + 1 - reached;
                let is_near = ahead <= behind;
                (fence.age, Unfinished { stream, epoch: fence.epoch, ahead, is_near })
            }));
        }
        found.sort_unstable_by_key(|&(age, event)| (event.ahead, age));
        found.into_iter().map(|(_, event)| event).collect()
    }

    /// Makes `waiter`, which this call names, wait on the device until `stream` is past `epoch`,
    /// whose event is recorded: what `waiter` is given to do from now on comes after all frees of
    /// that epoch and before. False: it cannot be done now, or the driver refused.
    ///
    /// Never call it while anything captures on the device.
    pub(crate) fn make_wait(
        &self,
        driver: &dyn Driver,
        waiter: u32,
        stream: u32,
        epoch: u64,
    ) -> bool {
        // Under this lock the number becomes no other stream's, and the event is not recorded
        // again.
        let fences = lock(&self.fences);
        let Some(fence) = fences
            .pending
            .get(&stream)
            .and_then(|queue| queue.iter().find(|fence| fence.epoch >= epoch))
        else {
            return self.completed(stream) >= epoch;
        };
        let Reach::Here(handle) = self.reach(waiter, Some(waiter)) else { return false };
        if driver.capture_status(self.device, handle) != Ok(CaptureStatus::None) {
            return false;
        }
        driver.stream_wait_event(self.device, handle, fence.event).is_ok()
    }

    /// Waits on the host for the oldest event of the stream that has waited longest. False: there
    /// is none, or the wait failed.
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

    /// The epochs that are open now, by stream: take them before a device-wide synchronisation, and
    /// hand them to [`Streams::passed`] after it.
    pub(crate) fn open_epochs(&self) -> HashMap<u32, u64> {
        let numbers = (0..self.count()).chain([ALL_STREAMS]);
        // Closes each epoch, so that frees during the synchronisation belong to a later one.
        numbers
            .filter_map(|number| {
                Some((number, self.get(number)?.epoch.fetch_add(1, Ordering::SeqCst)))
            })
            .collect()
    }

    /// The device was synchronised after `epochs` were taken: every stream is past its own.
    pub(crate) fn passed(&self, epochs: &HashMap<u32, u64>) {
        self.pass(epochs.iter().map(|(&number, &epoch)| (number, epoch)));
    }

    /// Each of these streams is past its epoch.
    fn pass(&self, epochs: impl IntoIterator<Item = (u32, u64)>) {
        for (number, epoch) in epochs {
            self.raise(number, epoch);
        }
    }

    /// Events recorded and asked about since the start.
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
        fences.dead.clear();
        let events = pending.into_values().flatten().map(|fence| fence.event);
        for event in events.chain(std::mem::take(&mut fences.spare)) {
            let _ = driver.event_destroy(self.device, event);
        }
    }
}
