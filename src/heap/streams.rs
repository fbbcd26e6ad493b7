//! Stream order: who may reuse what, and when.
//!
//! Every stream has epochs. A free on a stream belongs to the epoch that is open at that moment. Sealing closes the open epoch
//! and records one event behind it; once the event is done, the stream is past every free of that epoch and of all before it.
//! So one event stands for any number of frees, and is recorded only when somebody hungry needs it.
//!
//! ```text
//!   epoch       1 -> 2 -> 3 ...   the open one; raised by the sealer (under `fences`) BEFORE it records the event. A free reads
//!                                 it after its stream's last use was enqueued: if it reads e, the event of e is recorded later.
//!   completed   0 -> ... < epoch  the stream is past all frees up to it; raised by whoever saw an event done or has
//!                                 synchronised the device, never lowered.
//!   dirty       false <-> true    true: a free may belong to the open epoch. Set by the freeing thread after it read `epoch`,
//!                                 cleared by the sealer before it raises `epoch`: a free that slips between is covered by the event.
//!   dead        false -> true     the program has destroyed the stream, its handle names another by now, or the driver has refused it:
//!                                 nothing is recorded on it again, and only what is behind all work of the device completes its
//!                                 epochs. A program that still uses the handle gets a new number for it.
//! ```
#![deny(unsafe_code)]

use super::{Mutex, MutexGuard, lock};
use crate::driver::{CaptureStatus, DeviceId, Driver, ErrorKind, EventHandle, StreamHandle};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Numbers of streams, [`EVERY`] and the arenas' everybody among them.
pub const NUMBERS: u32 = 4096;
/// Streams a device that are told apart at a time; the numbers of dead ones are used again once nothing refers to them.
pub const MAX_STREAMS: usize = NUMBERS as usize - 2;
/// The number of the legacy default stream.
pub const DEFAULT_STREAM: u32 = 0;
/// The number that stands for all streams of the device, those included that nobody told us of: blocks of `cudaMalloc` are its own, and the
/// free of a block used by a stream that got no number is one of its frees. Its events are recorded behind all work of the device's context, where
/// the driver can; else only a synchronisation of the device completes its epochs.
///
/// Nothing that is freed on it is used again before such an event or synchronisation: unlike a stream it comes in no order with itself.
pub const EVERY: u32 = MAX_STREAMS as u32;

/// Entries of the handle cache; a power of two.
const CACHE: usize = 256;

/// The handle that means the calling thread's own stream.
const PER_THREAD: StreamHandle = StreamHandle(2);

/// One stream.
pub struct Stream {
    handle: AtomicUsize,
    /// The driver's id, 0 where it tells none; for the per-thread handle, the thread's token.
    identity: AtomicU64,
    /// The system's id of the thread of a per-thread handle; 0: not known.
    thread: AtomicU32,
    epoch: AtomicU64,
    completed: AtomicU64,
    dirty: AtomicBool,
    dead: AtomicBool,
}

impl Stream {
    fn new(handle: StreamHandle, identity: u64) -> Self {
        Self {
            handle: AtomicUsize::new(handle.0),
            identity: AtomicU64::new(identity),
            thread: AtomicU32::new(if handle == PER_THREAD { system_thread_id() } else { 0 }),
            epoch: AtomicU64::new(1),
            completed: AtomicU64::new(0),
            dirty: AtomicBool::new(false),
            dead: AtomicBool::new(false),
        }
    }

    #[inline]
    fn handle(&self) -> StreamHandle {
        StreamHandle(self.handle.load(Ordering::Acquire))
    }

    #[inline]
    fn identity(&self) -> u64 {
        self.identity.load(Ordering::Acquire)
    }

    #[inline]
    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// The number is another stream's from now on.
    fn becomes(&self, handle: StreamHandle, identity: u64) {
        self.handle.store(handle.0, Ordering::Release);
        self.identity.store(identity, Ordering::Release);
        self.thread.store(if handle == PER_THREAD { system_thread_id() } else { 0 }, Ordering::Release);
        self.dead.store(false, Ordering::Release);
    }
}

/// An event behind the frees of an epoch.
#[derive(Clone, Copy)]
struct Fence {
    epoch: u64,
    event: EventHandle,
    /// Of two fences the lower was recorded first.
    age: u64,
}

/// Events recorded and not yet seen done, and spare ones.
#[derive(Default)]
struct Fences {
    /// By stream, oldest first. In the order of numbers, so that a replay asks its events in the same order each time.
    pending: BTreeMap<u32, VecDeque<Fence>>,
    /// By the age of a fence of [`EVERY`]: the epochs of dead streams that it stands for too.
    dead: HashMap<u64, Vec<(u32, u64)>>,
    spare: Vec<EventHandle>,
}

/// Which stream has which number.
#[derive(Default)]
struct Numbers {
    by_handle: HashMap<(usize, u64), u32>,
    /// Below the count, and nobody's.
    unused: Vec<u32>,
}

/// What the book-keeping of events did, for the gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FenceCounts {
    /// Events recorded.
    pub recorded: u64,
    /// Events asked about.
    pub queried: u64,
}

/// The streams of a device.
pub struct Streams {
    device: DeviceId,
    ids: bool,
    context_events: bool,
    streams: Box<[OnceLock<Stream>]>,
    count: AtomicU32,
    /// handle -> number + 1, direct mapped. A pair is published number first; a reader checks the stream's handle.
    cache: Box<[(AtomicUsize, AtomicU32)]>,
    /// Before `fences`, where both are held.
    numbers: Mutex<Numbers>,
    fences: Mutex<Fences>,
    recycling: Mutex<()>,
    /// The last epoch of [`EVERY`] that a free waits for; only ever raised.
    parked: AtomicU64,
    recorded: AtomicU64,
    queried: AtomicU64,
}

thread_local! {
    static TOKEN: Cell<u64> = const { Cell::new(0) };
}

fn thread_token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    TOKEN.with(|token| {
        if token.get() == 0 {
            token.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        token.get()
    })
}

/// The system's id of the calling thread, as its folder in /proc is called; 0 where there is no /proc.
fn system_thread_id() -> u32 {
    let link = std::fs::read_link("/proc/thread-self").ok();
    let name = link.as_deref().and_then(|path| path.file_name()?.to_str()?.parse().ok());
    name.unwrap_or(0)
}

/// Whether the thread of that id is no more; false where that is not known.
fn thread_has_ended(thread: u32) -> bool {
    thread != 0 && matches!(std::fs::exists(format!("/proc/self/task/{thread}")), Ok(false))
}

impl Streams {
    /// The streams of `device`; `ids`: the driver tells stream ids; `context_events`: it records events behind all work of a context.
    pub fn new(device: DeviceId, ids: bool, context_events: bool) -> Self {
        let streams: Box<[OnceLock<Stream>]> = (0..=MAX_STREAMS).map(|_| OnceLock::new()).collect();
        let _ = streams[DEFAULT_STREAM as usize].set(Stream::new(StreamHandle(0), 0));
        let every = Stream::new(StreamHandle(0), 0);
        every.dead.store(true, Ordering::Release);
        let _ = streams[EVERY as usize].set(every);
        Self {
            device,
            ids,
            context_events,
            streams,
            count: AtomicU32::new(1),
            cache: (0..CACHE).map(|_| (AtomicUsize::new(0), AtomicU32::new(0))).collect(),
            numbers: Mutex::default(),
            fences: Mutex::default(),
            recycling: Mutex::default(),
            parked: AtomicU64::new(0),
            recorded: AtomicU64::new(0),
            queried: AtomicU64::new(0),
        }
    }

    /// Streams known, dead ones included.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    #[inline]
    fn get(&self, stream: u32) -> Option<&Stream> {
        self.streams.get(stream as usize)?.get()
    }

    /// The handle of a stream.
    pub fn handle(&self, stream: u32) -> Option<StreamHandle> {
        self.get(stream).map(Stream::handle)
    }

    /// The number of the stream that `handle` names now. `None`: it has none, and all are taken.
    ///
    /// The program is about to use the stream, so the handle is valid. Where the driver tells ids, a handle that was recycled is
    /// found out here, by one driver call; the old stream is dead from then on.
    #[inline]
    pub fn resolve(&self, driver: &dyn Driver, handle: StreamHandle) -> Option<u32> {
        if handle.0 <= 1 {
            return Some(DEFAULT_STREAM);
        }
        self.resolve_other(driver, handle)
    }

    fn resolve_other(&self, driver: &dyn Driver, handle: StreamHandle) -> Option<u32> {
        if handle == StreamHandle::EVERY {
            return Some(EVERY);
        }
        let identity = if handle == PER_THREAD {
            thread_token()
        } else if self.ids {
            driver.stream_id(self.device, handle).unwrap_or(0)
        } else {
            0
        };
        let (cached_handle, number) = &self.cache[(handle.0 >> 4 ^ handle.0 >> 12) & (CACHE - 1)];
        if cached_handle.load(Ordering::Acquire) == handle.0 {
            let number = number.load(Ordering::Acquire).wrapping_sub(1);
            if let Some(stream) = self.get(number)
                && (stream.handle(), stream.identity()) == (handle, identity)
                && !stream.is_dead()
            {
                return Some(number);
            }
        }
        let mut guard = lock(&self.numbers);
        let numbers = &mut *guard;
        let known = numbers.by_handle.get(&(handle.0, identity)).copied();
        let found = match known.filter(|&known| !self.is_dead(known)) {
            Some(found) => found,
            None => self.assign(numbers, handle, identity)?,
        };
        if handle != PER_THREAD {
            number.store(found + 1, Ordering::Release);
            cached_handle.store(handle.0, Ordering::Release);
        }
        Some(found)
    }

    /// A number for a stream that has none.
    fn assign(&self, numbers: &mut Numbers, handle: StreamHandle, identity: u64) -> Option<u32> {
        let count = self.count.load(Ordering::Relaxed);
        let new = match numbers.unused.pop() {
            Some(unused) => {
                // Whoever is about to record an event on the stream that had the number is done with that, or will find it changed.
                let _fences = lock(&self.fences);
                self.get(unused)?.becomes(handle, identity);
                unused
            }
            None if count as usize == MAX_STREAMS => return None,
            None => {
                let _ = self.streams[count as usize].set(Stream::new(handle, identity));
                self.count.store(count + 1, Ordering::Release);
                count
            }
        };
        if handle != PER_THREAD {
            for (_, &old) in numbers.by_handle.iter().filter(|((other, _), _)| *other == handle.0) {
                if let Some(old) = self.get(old) {
                    old.dead.store(true, Ordering::Release);
                }
            }
            numbers.by_handle.retain(|&(other, _), _| other != handle.0);
        }
        numbers.by_handle.insert((handle.0, identity), new);
        Some(new)
    }

    /// Held by whoever looks for numbers to be used again.
    pub fn recycling(&self) -> MutexGuard<'_, ()> {
        lock(&self.recycling)
    }

    /// The streams that are gone for certain, by number, and dead from now on: the driver says that the handle is another's or
    /// nobody's, or the thread has ended. Asks the driver about each stream; call it under [`Streams::recycling`].
    pub fn gone(&self, driver: &dyn Driver) -> Vec<u32> {
        let unused = lock(&self.numbers).unused.clone();
        let is_gone = |stream: &Stream| match stream.handle() {
            handle if handle.0 < PER_THREAD.0 => false,
            _ if stream.is_dead() => true,
            PER_THREAD => thread_has_ended(stream.thread.load(Ordering::Acquire)),
            _ if !self.ids => false,
            handle => match driver.stream_id(self.device, handle) {
                Ok(identity) => identity != stream.identity(),
                Err(error) => error.kind == ErrorKind::InvalidValue,
            },
        };
        (0..self.count())
            .filter(|number| !unused.contains(number))
            .filter(|&number| {
                self.get(number).is_some_and(|stream| {
                    let gone = is_gone(stream);
                    if gone {
                        stream.dead.store(true, Ordering::Release);
                    }
                    gone
                })
            })
            .collect()
    }

    /// The program destroys the stream that `handle` names: its number is a dead one's from now on. Seal before, where that can be done.
    pub fn end(&self, handle: StreamHandle) {
        let mut numbers = lock(&self.numbers);
        let ended =
            numbers.by_handle.iter().filter(|((known, _), _)| *known == handle.0 && handle.0 > PER_THREAD.0);
        for stream in ended.filter_map(|(_, &number)| self.get(number)) {
            stream.dead.store(true, Ordering::Release);
        }
        numbers.by_handle.retain(|&(known, _), _| known != handle.0 || handle.0 <= PER_THREAD.0);
    }

    /// All streams but the default one are gone, and all that was enqueued is done: the device's context is made anew.
    pub fn end_all(&self) {
        let mut numbers = lock(&self.numbers);
        for stream in (1..self.count()).filter_map(|number| self.get(number)) {
            stream.dead.store(true, Ordering::Release);
        }
        numbers.by_handle.clear();
    }

    /// Lets `numbers`, of streams that are gone and that nothing refers to, be used again; call it under [`Streams::recycling`].
    pub fn release(&self, released: &[u32]) {
        let mut numbers = lock(&self.numbers);
        numbers.by_handle.retain(|_, number| !released.contains(number));
        numbers.unused.extend_from_slice(released);
    }

    /// The open epoch of `stream`, to which a free of this moment belongs.
    #[inline]
    pub fn note_free(&self, stream: u32) -> u64 {
        let Some(stream) = self.get(stream) else { return u64::MAX };
        let epoch = stream.epoch.load(Ordering::Acquire);
        if !stream.dirty.load(Ordering::Relaxed) {
            stream.dirty.store(true, Ordering::Release);
        }
        epoch
    }

    /// As [`Streams::note_free`], of a free that waits for `stream`.
    #[inline]
    pub fn note_wait(&self, stream: u32) -> u64 {
        let epoch = self.note_free(stream);
        if stream == EVERY {
            self.parked.fetch_max(epoch, Ordering::Relaxed);
        }
        epoch
    }

    /// Whether frees wait for all streams, of a driver that only a synchronisation makes tell of them.
    pub fn needs_synchronisation(&self) -> bool {
        !self.context_events && self.parked.load(Ordering::Relaxed) > self.completed(EVERY)
    }

    /// The last epoch that `stream` is past.
    #[inline]
    pub fn completed(&self, stream: u32) -> u64 {
        self.get(stream).map_or(0, |stream| stream.completed.load(Ordering::Acquire))
    }

    /// Whether `handle` has a number.
    pub fn is_known(&self, handle: StreamHandle) -> bool {
        lock(&self.numbers).by_handle.keys().any(|&(known, _)| known == handle.0)
    }

    /// Whether the stream is known to be gone.
    pub fn is_dead(&self, stream: u32) -> bool {
        self.get(stream).is_none_or(Stream::is_dead)
    }

    /// Asks every recorded event whether it is done. True if a stream got further.
    ///
    /// Never call it while anything captures on the device.
    pub fn poll(&self, driver: &dyn Driver) -> bool {
        let mut fences = lock(&self.fences);
        let Fences { pending, spare, dead } = &mut *fences;
        let mut further = false;
        for (&number, queue) in pending.iter_mut() {
            let Some(stream) = self.get(number) else { continue };
            while let Some(&Fence { epoch, event, age }) = queue.front() {
                self.queried.fetch_add(1, Ordering::Relaxed);
                match driver.event_query(self.device, event) {
                    Ok(true) => {
                        stream.completed.fetch_max(epoch, Ordering::AcqRel);
                        self.pass(dead.remove(&age).unwrap_or_default());
                        further = true;
                    }
                    Ok(false) => break,
                    Err(error) if matches!(error.kind, ErrorKind::DeviceLost | ErrorKind::Deinitialized) => {
                        break;
                    }
                    // An event that cannot be asked proves nothing, and those behind it must not wait for it: the next one
                    // stands for its frees.
                    Err(_) => {
                        stream.dirty.store(true, Ordering::Release);
                        self.soil(&dead.remove(&age).unwrap_or_default());
                    }
                }
                queue.pop_front();
                spare.push(event);
            }
        }
        pending.retain(|_, queue| !queue.is_empty());
        further
    }

    /// Records an event behind the frees of every stream that has some, where that can be done: not on a dead stream, a capturing
    /// one, or another thread's per-thread stream. True if an event was recorded.
    ///
    /// Never call it while anything captures on the device of which we were told.
    pub fn seal(&self, driver: &dyn Driver) -> bool {
        let mut any = false;
        for number in 0..self.count() {
            any |= self.seal_one(driver, number);
        }
        any | self.seal_every(driver)
    }

    /// Records an event behind all work of the device, where something is freed that waits for all streams, or for one that only its own thread can
    /// record on; it stands for the streams that are no more too. Not while a stream captures that we know of: the driver would refuse, and
    /// make the capture fail.
    fn seal_every(&self, driver: &dyn Driver) -> bool {
        if !self.context_events {
            return false;
        }
        let is_others =
            |stream: &Stream| stream.handle() == PER_THREAD && stream.identity() != thread_token();
        let numbers = (0..self.count()).chain([EVERY]);
        let soiled = numbers.filter_map(|number| Some((number, self.get(number)?)));
        let soiled = soiled.filter(|(_, stream)| stream.dirty.load(Ordering::Acquire));
        let soiled: Vec<(u32, &Stream)> =
            soiled.filter(|(_, stream)| stream.is_dead() || is_others(stream)).collect();
        // Dead streams alone are not worth it: there may be thousands.
        let is_due = soiled.iter().any(|&(number, stream)| number == EVERY || is_others(stream));
        if !is_due || self.any_capturing(driver) {
            return false;
        }
        // The fence is one of an epoch of EVERY.
        let mut numbers: Vec<u32> = soiled.into_iter().map(|(number, _)| number).collect();
        if !numbers.contains(&EVERY) {
            numbers.push(EVERY);
        }
        let mut fences = lock(&self.fences);
        let Some(event) = fences.spare.pop().or_else(|| driver.event_create(self.device).ok()) else {
            return false;
        };
        let close = |number| {
            let stream = self.get(number)?;
            stream.dirty.store(false, Ordering::SeqCst);
            Some((number, stream.epoch.fetch_add(1, Ordering::SeqCst)))
        };
        let epochs: Vec<(u32, u64)> = numbers.into_iter().filter_map(close).collect();
        if driver.context_event_record(self.device, event).is_err() {
            // The epochs stay without an event; the next one covers them.
            self.soil(&epochs);
            fences.spare.push(event);
            return false;
        }
        let age = self.recorded.fetch_add(1, Ordering::Relaxed);
        let own = epochs.iter().find(|&&(number, _)| number == EVERY);
        let epoch = own.map_or(0, |&(_, epoch)| epoch);
        fences.pending.entry(EVERY).or_default().push_back(Fence { epoch, event, age });
        fences.dead.insert(age, epochs);
        true
    }

    /// The frees of these epochs need another event.
    fn soil(&self, epochs: &[(u32, u64)]) {
        for stream in epochs.iter().filter_map(|&(number, _)| self.get(number)) {
            stream.dirty.store(true, Ordering::Release);
        }
    }

    fn seal_one(&self, driver: &dyn Driver, number: u32) -> bool {
        let Some(stream) = self.get(number) else { return false };
        if !stream.dirty.load(Ordering::Acquire) || stream.is_dead() {
            return false;
        }
        // Under this lock the number becomes no other stream's.
        let mut fences = lock(&self.fences);
        let handle = stream.handle();
        if handle == PER_THREAD && stream.identity() != thread_token() {
            return false;
        }
        // The stream was last named by the program when it used it; it may be gone since, and its handle another's.
        let still_there =
            || handle.0 <= 2 || !self.ids || driver.stream_id(self.device, handle) == Ok(stream.identity());
        if !still_there() {
            stream.dead.store(true, Ordering::Release);
            return false;
        }
        if driver.capture_status(self.device, handle) != Ok(CaptureStatus::None) {
            return false;
        }
        let Some(event) = fences.spare.pop().or_else(|| driver.event_create(self.device).ok()) else {
            return false;
        };
        stream.dirty.store(false, Ordering::SeqCst);
        let epoch = stream.epoch.fetch_add(1, Ordering::SeqCst);
        let recorded = driver.event_record(self.device, event, handle);
        // Ids are never reused: if the handle has the same one before and after, the event is behind this stream's work.
        if recorded.is_ok() && still_there() {
            let age = self.recorded.fetch_add(1, Ordering::Relaxed);
            fences.pending.entry(number).or_default().push_back(Fence { epoch, event, age });
            return true;
        }
        // The epoch stays without an event of its own; the next one covers it.
        stream.dirty.store(true, Ordering::Release);
        if recorded.is_ok() || recorded.is_err_and(|error| error.kind == ErrorKind::InvalidValue) {
            stream.dead.store(true, Ordering::Release);
        }
        fences.spare.push(event);
        false
    }

    /// Whether a stream is capturing, announced or not: then nothing may be waited for. Asks the driver about each stream.
    pub fn any_capturing(&self, driver: &dyn Driver) -> bool {
        self.statuses(driver).into_iter().any(|status| match status {
            Ok(status) => status != CaptureStatus::None,
            // What the legacy stream answers while another stream captures.
            Err(error) => error.kind == ErrorKind::Capturing,
        })
    }

    /// Whether every known stream says that it captures nothing; one that cannot say might. Asks the driver about each stream.
    pub fn none_captures(&self, driver: &dyn Driver) -> bool {
        self.statuses(driver).into_iter().all(|status| matches!(status, Ok(CaptureStatus::None)))
    }

    /// The captures that known streams are in. Asks the driver about each stream.
    pub fn running_captures(&self, driver: &dyn Driver) -> Vec<u64> {
        let active = |status| match status {
            Ok(CaptureStatus::Active(id)) => Some(id),
            _ => None,
        };
        self.statuses(driver).into_iter().filter_map(active).collect()
    }

    /// What the streams that can be asked do about capture.
    fn statuses(&self, driver: &dyn Driver) -> Vec<crate::driver::Result<CaptureStatus>> {
        // Under this lock no number becomes another stream's.
        let _fences = lock(&self.fences);
        let streams = (0..self.count()).filter_map(|number| self.get(number));
        let status = |stream: &Stream| {
            let (handle, identity) = (stream.handle(), stream.identity());
            let gone = stream.is_dead()
                || handle == PER_THREAD && identity != thread_token()
                || handle.0 > 2 && self.ids && driver.stream_id(self.device, handle) != Ok(identity);
            (!gone).then(|| driver.capture_status(self.device, handle))
        };
        streams.filter_map(status).collect()
    }

    /// The epochs whose events are recorded and not yet seen done, by stream, in the order in which they were recorded.
    pub fn unfinished(&self) -> Vec<(u32, u64)> {
        let fences = lock(&self.fences);
        let pending = fences.pending.iter();
        let mut found: Vec<(u64, u32, u64)> = pending
            .flat_map(|(&number, queue)| queue.iter().map(move |fence| (fence.age, number, fence.epoch)))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, number, epoch)| (number, epoch)).collect()
    }

    /// Makes `waiter` wait on the device until `stream` is past `epoch`, whose event is recorded: what `waiter` is given to do from now on comes
    /// after all frees of that epoch and before. False: it cannot be done now, or the driver refused.
    ///
    /// Never call it while anything captures on the device.
    pub fn make_wait(&self, driver: &dyn Driver, waiter: u32, stream: u32, epoch: u64) -> bool {
        let Some(waiting) = self.get(waiter).filter(|waiting| !waiting.is_dead()) else { return false };
        // Under this lock the number becomes no other stream's, and the event is not recorded again.
        let fences = lock(&self.fences);
        let Some(fence) =
            fences.pending.get(&stream).and_then(|queue| queue.iter().find(|fence| fence.epoch >= epoch))
        else {
            return self.completed(stream) >= epoch;
        };
        let handle = waiting.handle();
        let is_anothers = handle == PER_THREAD && waiting.identity() != thread_token();
        if is_anothers || driver.capture_status(self.device, handle) != Ok(CaptureStatus::None) {
            return false;
        }
        driver.stream_wait_event(self.device, handle, fence.event).is_ok()
    }

    /// Waits on the host for the oldest event of the stream that has waited longest. False: there is none, or the wait failed.
    pub fn wait_for_oldest(&self, driver: &dyn Driver) -> bool {
        let event = {
            let fences = lock(&self.fences);
            fences
                .pending
                .values()
                .filter_map(|queue| queue.front())
                .min_by_key(|fence| fence.age)
                .map(|fence| fence.event)
        };
        event.is_some_and(|event| driver.event_synchronize(self.device, event).is_ok() && self.poll(driver))
    }

    /// The epochs that are open now, by stream: take them before a device-wide synchronisation, and hand them to
    /// [`Streams::passed`] after it.
    pub fn open_epochs(&self) -> HashMap<u32, u64> {
        let numbers = (0..self.count()).chain([EVERY]);
        // Closes each epoch, so that frees during the synchronisation belong to a later one.
        numbers
            .filter_map(|number| Some((number, self.get(number)?.epoch.fetch_add(1, Ordering::SeqCst))))
            .collect()
    }

    /// The device was synchronised after `epochs` were taken: every stream is past its own.
    pub fn passed(&self, epochs: &HashMap<u32, u64>) {
        self.pass(epochs.iter().map(|(&number, &epoch)| (number, epoch)));
    }

    /// Each of these streams is past its epoch.
    fn pass(&self, epochs: impl IntoIterator<Item = (u32, u64)>) {
        for (number, epoch) in epochs {
            if let Some(stream) = self.get(number) {
                stream.completed.fetch_max(epoch, Ordering::AcqRel);
            }
        }
    }

    /// Events recorded and asked about since the start.
    pub fn counts(&self) -> FenceCounts {
        FenceCounts {
            recorded: self.recorded.load(Ordering::Relaxed),
            queried: self.queried.load(Ordering::Relaxed),
        }
    }

    /// Gives every event back to the driver (at the heap's end).
    pub fn destroy_events(&self, driver: &dyn Driver) {
        let mut fences = lock(&self.fences);
        let pending = std::mem::take(&mut fences.pending);
        fences.dead.clear();
        let events = pending.into_values().flatten().map(|fence| fence.event);
        for event in events.chain(std::mem::take(&mut fences.spare)) {
            let _ = driver.event_destroy(self.device, event);
        }
    }
}
