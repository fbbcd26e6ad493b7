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
//!   dirty       out <-> in        in the set: a free may belong to the open epoch. Put in by the freeing thread after it read `epoch`, taken
//!                                 out by the sealer before it raises `epoch`: a free that slips between is covered by the event.
//!   lost        out <-> in        in the set: dirty, but dead, or passing and not named by the sealer's call. Moved there by the sealer, which would look at each in vain for
//!                                 ever; taken out by an event behind all work of the device, and by the next call that names the stream.
//!   further     out <-> in        in the set: `completed` was raised. Put in after that, taken out by whoever then looks at all that waits for
//!                                 the stream, under the central lock.
//!   state       passing          its handle may be used only in a call in which the program names it ([`naming`]); as every stream begins
//!               lasting          announced: its handle may be used until its end; from passing, or at once
//!               retired          no call named it, and its number may be taken away; from passing, and back if something refers to it
//!               dead             the program has destroyed it, or its handle names another by now: nothing is recorded on it again, and only what is behind all
//!                                work of the device completes its epochs. A program that still uses the handle gets a new number for it. From all others
//!   calls       n <-> n + 1      calls under way that name a passing stream; raised BEFORE `state` is looked at. Whoever retires it raises `state` BEFORE it looks at
//!                                `calls`: of the two, one sees the other.
//!   seen        quiet            what a passing stream did about capture when a call named it last: nothing
//!               in a bracket     it captured, while a capture that was announced was open
//!               unannounced      it captured, and none was
//! ```
#![deny(unsafe_code)]

mod captures;
mod naming;

pub use super::number_set::NUMBERS;
use super::number_set::SharedSet;
use super::sync::{Mutex, lock};
use crate::driver::{CaptureStatus, DeviceId, Driver, ErrorKind, EventHandle, StreamHandle};
use captures::QUIET;
pub use naming::Resolved;
use naming::{Cache, Numbers, PER_THREAD};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

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
const _: () = assert!(EVERY == crate::record::stream::ALL_STREAMS, "readers know it by this number");

/// Streams that a poll which is not the last resort finds busy before it stops, and streams that are asked whether they capture for the sake of one free: with
/// thousands of streams, a malloc that looks for memory must not ask them all each time.
const ENOUGH: usize = 16;

/// States of a stream, as at the top of this file.
const PASSING: u8 = 0;
const LASTING: u8 = 1;
const RETIRED: u8 = 2;
const DEAD: u8 = 3;

/// The identity of a stream that has been seen in captures only.
const UNTOLD: u64 = u64::MAX;

/// What the driver says of a stream and captures.
pub type Status = crate::driver::Result<CaptureStatus>;

/// Whether a stream says that it captures nothing, or that nothing ever does.
fn is_quiet(status: Status) -> bool {
    match status {
        Ok(status) => status == CaptureStatus::None,
        Err(error) => error.kind == ErrorKind::NotSupported || is_gone(error),
    }
}

/// Whether the driver says that there is no such stream. No other error tells that: it may be a capture's.
fn is_gone(error: crate::driver::DriverError) -> bool {
    error.is_invalid_handle()
}

/// One stream.
pub struct Stream {
    handle: AtomicUsize,
    /// The driver's id, 0 where it tells none, [`UNTOLD`] where it was never asked; for the per-thread handle, the thread's token.
    identity: AtomicU64,
    /// The system's id of the thread of a per-thread handle; 0: not known.
    thread: AtomicU32,
    epoch: AtomicU64,
    completed: AtomicU64,
    state: AtomicU8,
    calls: AtomicU32,
    seen: AtomicU8,
}

impl Stream {
    fn new(handle: StreamHandle, identity: u64, state: u8) -> Self {
        Self {
            handle: AtomicUsize::new(handle.0),
            identity: AtomicU64::new(identity),
            thread: AtomicU32::new(if handle == PER_THREAD { system_thread_id() } else { 0 }),
            epoch: AtomicU64::new(1),
            completed: AtomicU64::new(0),
            state: AtomicU8::new(state),
            calls: AtomicU32::new(0),
            seen: AtomicU8::new(QUIET),
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
        self.state.load(Ordering::SeqCst) >= RETIRED
    }

    #[inline]
    fn is_lasting(&self) -> bool {
        self.state.load(Ordering::Acquire) == LASTING
    }

    /// Whether its identity is this one; where it was never asked, it is from now on. (All that is known of such a stream was done in captures, by graphs that run elsewhere.)
    fn is_called(&self, identity: u64) -> bool {
        let known = self.identity();
        if known == UNTOLD {
            self.identity.store(identity, Ordering::Release);
        }
        known == identity || known == UNTOLD
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
    /// The number from which on the next poll asks.
    next: u32,
}

/// From where a stream may be used.
enum Reach {
    /// From here, by this handle.
    Here(StreamHandle),
    /// From its own thread.
    OtherThread,
    /// From calls that name it, if it is there at all.
    Nowhere,
}

/// What the events of a stream have told.
#[derive(Clone, Copy, Default)]
struct Asked {
    /// One was done.
    further: bool,
    /// One was not.
    busy: bool,
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
    cache: Cache,
    /// Before `fences`, where both are held.
    numbers: Mutex<Numbers>,
    fences: Mutex<Fences>,
    recycling: Mutex<()>,
    dirty: SharedSet,
    lost: SharedSet,
    further: SharedSet,
    /// Times that a stream got further.
    strides: AtomicU64,
    /// The last epoch of [`EVERY`] that a free waits for; only ever raised.
    parked: AtomicU64,
    /// Frees that wait for all streams since the last event behind all work of the device.
    gathered: AtomicU64,
    /// Streams that last.
    lasting: AtomicU64,
    /// Passing streams that freed something and were not named by the call that would have recorded an event, since the last one behind all work of the device.
    stranded: AtomicU64,
    /// 1: a passing stream has been seen to capture; never 0 again.
    capturing: AtomicU8,
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
        let _ = streams[DEFAULT_STREAM as usize].set(Stream::new(StreamHandle(0), 0, LASTING));
        let _ = streams[EVERY as usize].set(Stream::new(StreamHandle(0), 0, DEAD));
        Self {
            device,
            ids,
            context_events,
            streams,
            count: AtomicU32::new(1),
            cache: Cache::default(),
            numbers: Mutex::default(),
            fences: Mutex::default(),
            recycling: Mutex::default(),
            dirty: SharedSet::default(),
            lost: SharedSet::default(),
            further: SharedSet::default(),
            strides: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            gathered: AtomicU64::new(0),
            lasting: AtomicU64::new(1),
            stranded: AtomicU64::new(0),
            capturing: AtomicU8::new(0),
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

    /// The open epoch of `stream`, to which a free of this moment belongs.
    #[inline]
    pub fn note_free(&self, stream: u32) -> u64 {
        let Some(known) = self.get(stream) else { return u64::MAX };
        let epoch = known.epoch.load(Ordering::Acquire);
        self.dirty.insert(stream);
        epoch
    }

    /// As [`Streams::note_free`], of a free that waits for `stream`.
    #[inline]
    pub fn note_wait(&self, stream: u32) -> u64 {
        let epoch = self.note_free(stream);
        if stream == EVERY {
            self.parked.fetch_max(epoch, Ordering::Relaxed);
            self.gathered.fetch_add(1, Ordering::Relaxed);
        }
        epoch
    }

    /// Whether frees wait for all streams, of a driver that only a synchronisation makes tell of them.
    pub fn needs_synchronisation(&self, hears_of_captures: bool) -> bool {
        !self.records_context_events(hears_of_captures)
            && self.parked.load(Ordering::Relaxed) > self.completed(EVERY)
    }

    /// Whether events may be recorded behind all work of the context: the driver can, and captures are told of, as one that runs would fail.
    fn records_context_events(&self, hears_of_captures: bool) -> bool {
        self.context_events && hears_of_captures
    }

    /// The last epoch that `stream` is past.
    #[inline]
    pub fn completed(&self, stream: u32) -> u64 {
        self.get(stream).map_or(0, |stream| stream.completed.load(Ordering::Acquire))
    }

    /// The stream is past `epoch`, and maybe was before. True if not.
    fn raise(&self, number: u32, epoch: u64) -> bool {
        let Some(stream) = self.get(number) else { return false };
        let further = stream.completed.fetch_max(epoch, Ordering::AcqRel) < epoch;
        if further {
            self.further.insert(number);
            self.strides.fetch_add(1, Ordering::Release);
        }
        further
    }

    /// The streams that have got further since this was called last; call it under the central lock.
    pub fn take_further(&self) -> impl Iterator<Item = u32> {
        let every = self.further.remove_seen(EVERY).then_some(EVERY);
        self.further.take(self.count()).chain(every)
    }

    /// Whether [`Streams::take_further`] would tell of `stream`.
    pub fn has_got_further(&self, stream: u32) -> bool {
        self.further.contains(stream)
    }

    /// Grows whenever a stream gets further.
    pub fn strides(&self) -> u64 {
        self.strides.load(Ordering::Acquire)
    }

    /// Whether the stream is known to be gone.
    pub fn is_dead(&self, stream: u32) -> bool {
        self.get(stream).is_none_or(Stream::is_dead)
    }

    /// Asks every recorded event whether it is done. True if a stream got further.
    ///
    /// Never call it while anything captures on the device.
    pub fn poll(&self, driver: &dyn Driver) -> bool {
        self.poll_until(driver, usize::MAX)
    }

    /// As [`Streams::poll`], where more may be had by other means: after [`ENOUGH`] streams that have got no further the rest are left to the next call,
    /// which begins with them.
    pub fn poll_some(&self, driver: &dyn Driver) -> bool {
        self.poll_until(driver, ENOUGH)
    }

    fn poll_until(&self, driver: &dyn Driver, enough: usize) -> bool {
        let mut guard = lock(&self.fences);
        let fences = &mut *guard;
        let (mut further, mut busy) = (false, 0);
        for _ in 0..fences.pending.len() {
            let after =
                fences.pending.range(fences.next..).next().or_else(|| fences.pending.first_key_value());
            let Some((&number, _)) = after else { break };
            if busy == enough {
                fences.next = number;
                return further;
            }
            let asked = self.ask(driver, fences, number);
            further |= asked.further;
            busy += usize::from(asked.busy);
            fences.next = number + 1;
        }
        fences.next = 0;
        further
    }

    /// Asks the recorded events of a stream, until one is not done.
    fn ask(&self, driver: &dyn Driver, fences: &mut Fences, number: u32) -> Asked {
        let mut asked = Asked::default();
        let Fences { pending, spare, dead, .. } = fences;
        let Some(queue) = pending.get_mut(&number) else { return asked };
        while let Some(&Fence { epoch, event, age }) = queue.front() {
            self.queried.fetch_add(1, Ordering::Relaxed);
            match driver.event_query(self.device, event) {
                Ok(true) => {
                    self.raise(number, epoch);
                    self.pass(dead.remove(&age).unwrap_or_default());
                    asked.further = true;
                }
                Ok(false) => {
                    asked.busy = true;
                    return asked;
                }
                Err(error) if matches!(error.kind, ErrorKind::DeviceLost | ErrorKind::Deinitialized) => {
                    return asked;
                }
                // An event that cannot be asked proves nothing, and those behind it must not wait for it: the next one
                // stands for its frees.
                Err(_) => {
                    self.dirty.insert(number);
                    self.soil(&dead.remove(&age).unwrap_or_default());
                }
            }
            queue.pop_front();
            spare.push(event);
        }
        pending.remove(&number);
        asked
    }

    /// Records an event behind the frees of every stream that has some, where that can be done: not on a dead stream, a capturing
    /// one, another thread's per-thread stream, or a passing one other than `named`, which this call names. True if an event was recorded. Frees that only an event
    /// behind all work of the device would do for wait until enough of them have gathered.
    ///
    /// Never call it while anything captures on the device of which we were told.
    pub fn seal(&self, driver: &dyn Driver, hears_of_captures: bool, named: Option<u32>) -> bool {
        self.seal_each(driver, named) | self.seal_every(driver, hears_of_captures, ENOUGH as u64)
    }

    /// As [`Streams::seal`], however few they are.
    pub fn seal_all(&self, driver: &dyn Driver, hears_of_captures: bool, named: Option<u32>) -> bool {
        self.seal_each(driver, named) | self.seal_every(driver, hears_of_captures, u64::MAX)
    }

    /// This call names a stream: records the event behind its frees that a call before would have recorded, had it named the stream too. So that is one event for each time
    /// that somebody was hungry.
    pub fn seal_lost(&self, driver: &dyn Driver, named: u32) -> bool {
        self.lost.contains(named) && self.seal_one(driver, named, Some(named))
    }

    fn seal_each(&self, driver: &dyn Driver, named: Option<u32>) -> bool {
        let dirty = self.dirty.iter(self.count()).filter(|&number| number != EVERY);
        dirty.fold(false, |any, number| self.seal_one(driver, number, named) | any)
    }

    /// Whether the handle of a stream may be used now, in a call that names stream `named`. Under `fences`, where no call names the stream.
    fn reach(&self, number: u32, named: Option<u32>) -> Reach {
        let Some(stream) = self.get(number) else { return Reach::Nowhere };
        match (stream.handle(), stream.is_lasting()) {
            _ if stream.is_dead() => Reach::Nowhere,
            (PER_THREAD, _) if stream.identity() == thread_token() => Reach::Here(PER_THREAD),
            (PER_THREAD, _) => Reach::OtherThread,
            (handle, lasting) if lasting || named == Some(number) => Reach::Here(handle),
            _ => Reach::Nowhere,
        }
    }

    /// What `call` answers for the handle of a stream that is there whatever the program does meanwhile; `None`: it may be gone, or be used in its own thread or calls only.
    pub fn with_lasting<T>(&self, number: u32, call: impl FnOnce(StreamHandle) -> T) -> Option<T> {
        let _fences = lock(&self.fences);
        match self.reach(number, None) {
            Reach::Here(handle) => Some(call(handle)),
            _ => None,
        }
    }

    /// Records an event behind all work of the device, where something is freed that waits for all streams, or for one that only its own thread can
    /// record on, or only a call that names it; it stands for the streams that are no more too. Not while a stream captures: the driver would refuse, and
    /// make the capture fail. So every stream that lasts is asked before, and so many `questions` are worth one free that waits.
    fn seal_every(&self, driver: &dyn Driver, hears_of_captures: bool, questions: u64) -> bool {
        if !self.records_context_events(hears_of_captures) {
            return false;
        }
        let is_others = |number: u32| {
            self.get(number)
                .is_some_and(|stream| stream.handle() == PER_THREAD && stream.identity() != thread_token())
        };
        // Dead streams alone are not worth it: there may be thousands.
        let others = self.dirty.iter(self.count()).filter(|&number| is_others(number)).count() as u64;
        let waiting =
            if self.dirty.contains(EVERY) { self.gathered.load(Ordering::Relaxed).max(1) } else { 0 };
        let stranded = self.stranded.load(Ordering::Relaxed);
        let worth = (waiting + others + stranded).saturating_mul(questions);
        if worth == 0 || worth < self.lasting.load(Ordering::Relaxed) || self.any_capturing(driver) {
            return false;
        }
        self.gathered.store(0, Ordering::Relaxed);
        self.stranded.store(0, Ordering::Relaxed);
        let soiled =
            self.dirty.iter(self.count()).filter(|&number| self.is_dead(number) || is_others(number));
        let mut numbers: Vec<u32> = soiled.chain(self.lost.iter(self.count())).collect();
        // The fence is one of an epoch of EVERY.
        if !numbers.contains(&EVERY) {
            numbers.push(EVERY);
        }
        let mut fences = lock(&self.fences);
        let Some(event) = fences.spare.pop().or_else(|| driver.event_create(self.device).ok()) else {
            return false;
        };
        let close = |number| {
            let stream = self.get(number)?;
            self.dirty.remove(number);
            self.lost.remove(number);
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
        epochs.iter().for_each(|&(number, _)| self.dirty.insert(number));
    }

    /// A dirty stream is dead, or may be used in its own calls only: until one comes, only an event behind all work of the device is behind its frees.
    fn give_up(&self, number: u32) {
        if !self.is_dead(number) {
            self.stranded.fetch_add(1, Ordering::Relaxed);
        }
        self.lost.insert(number);
        self.dirty.remove(number);
    }

    fn seal_one(&self, driver: &dyn Driver, number: u32, named: Option<u32>) -> bool {
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
        let Some(event) = fences.spare.pop().or_else(|| driver.event_create(self.device).ok()) else {
            return false;
        };
        self.dirty.remove(number);
        self.lost.remove(number);
        let epoch = stream.epoch.fetch_add(1, Ordering::SeqCst);
        if driver.event_record(self.device, event, handle).is_ok() {
            let age = self.recorded.fetch_add(1, Ordering::Relaxed);
            fences.pending.entry(number).or_default().push_back(Fence { epoch, event, age });
            return true;
        }
        // The epoch stays without an event of its own; the next one covers it.
        self.dirty.insert(number);
        fences.spare.push(event);
        false
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

    /// Makes `waiter`, which this call names, wait on the device until `stream` is past `epoch`, whose event is recorded: what `waiter` is given to do from now on comes
    /// after all frees of that epoch and before. False: it cannot be done now, or the driver refused.
    ///
    /// Never call it while anything captures on the device.
    pub fn make_wait(&self, driver: &dyn Driver, waiter: u32, stream: u32, epoch: u64) -> bool {
        // Under this lock the number becomes no other stream's, and the event is not recorded again.
        let fences = lock(&self.fences);
        let Some(fence) =
            fences.pending.get(&stream).and_then(|queue| queue.iter().find(|fence| fence.epoch >= epoch))
        else {
            return self.completed(stream) >= epoch;
        };
        let Reach::Here(handle) = self.reach(waiter, Some(waiter)) else { return false };
        if driver.capture_status(self.device, handle) != Ok(CaptureStatus::None) {
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
            self.raise(number, epoch);
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
