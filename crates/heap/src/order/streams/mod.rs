//! Streams, and how far each is known to be: epochs, and the events behind them. What a stream may
//! reuse by it is `path/order_rule.rs`.
//!
//! Every stream has epochs. A free on a stream belongs to the epoch that is open at that moment. A
//! fence closes the open epoch: it records one event behind it. Once the event is done, the stream
//! is past every free of that epoch and of all before it. So one event stands for any number of
//! frees; it is recorded when a request needs memory, and behind each batch of frees.
//!
//! ```text
//!   epoch       1 -> 2 -> 3 ...   the open one; raised by the recorder (under `fences`) BEFORE it
//!                                 records the event. A free reads it after its stream's last use
//!                                 was enqueued: if it reads e, the event of e is recorded later.
//!                                 Raised likewise before the program records an event: that epoch
//!                                 has no event of ours until that of a later one.
//!   completed   0 -> ... < epoch  the stream is past all frees up to it; raised by the thread that
//!                                 saw an event done or synchronised the device, never lowered.
//!   unfenced    out <-> in        in the set: a free may belong to the open epoch, and an event
//!                                 would do for it. Put in by the freeing thread after it read
//!                                 `epoch`, taken out by the recorder before it raises `epoch`: a
//!                                 free that slips between is covered by the event.
//!   unripe      out <-> in        in the set: a block of the stream's may have been freed since
//!                                 its last malloc. Put in by the freeing thread after it read
//!                                 `epoch`; taken out by the next malloc on the stream, before it
//!                                 raises `epoch`, and by the recorder of an event behind all work
//!                                 of the device.
//!   wanted      out <-> in        in the set: a recorder found a passing stream in `unripe`. The
//!                                 next malloc on the stream takes it out, and records the event.
//!   ripe        0 -> ... < epoch  the last epoch that a malloc on the stream has closed; raised
//!                                 BEFORE the stream is put into `unfenced`. The recorder reads it
//!                                 after it has taken the stream out.
//!   reusable    0 -> ... <= completed
//!                                 the last epoch whose freed memory every stream may have: what
//!                                 was `ripe` when an event that is done was recorded, or the epoch
//!                                 itself if all work of the device was done. Raised with
//!                                 `completed`.
//!   lost        out <-> in        in the set: unfenced, but dead, or passing and not named by the
//!                                 recorder's call. Moved there by the recorder, which would look
//!                                 at each in vain for ever; taken out by an event behind all work
//!                                 of the device, and by the next call that names the stream.
//!   further     out <-> in        in the set: `completed` was raised. Put in after that, taken out
//!                                 under the central lock by the thread that then looks at all that
//!                                 waits for the stream.
//!   state       passing           the first: only a call in which the program names the stream may
//!                                 use its handle ([`naming`])
//!               lasting           announced: its handle may be used until its end; from passing,
//!                                 or at once
//!               withdrawn         no call named it, and its number may be taken away; from
//!                                 passing, and back if something refers to it
//!               dead              the program has destroyed it, or its handle names another by
//!                                 now: nothing is recorded on it again, and only what is behind
//!                                 all work of the device completes its epochs. A program that
//!                                 still uses the handle gets a new number for it. From all others
//!   calls       n <-> n + 1       calls under way that name a passing stream; raised BEFORE the
//!                                 call looks at `state`. A withdrawal raises `state` BEFORE it
//!                                 looks at `calls`: of the two, one sees the other.
//!   seen        quiet             what a passing stream did about capture when a call named it
//!                                 last: nothing
//!               in a pool scope   it captured, while an announced capture was open
//!               unannounced       it captured, and no announced capture was open
//! ```

mod captures;
mod events;
mod fences;
mod marks;
mod names;
mod naming;
mod stream;

use crate::driver::{DeviceId, StreamHandle};
use crate::hook_bits::{HOOK_RECORD_STREAM, ORDERED_CALLERS};
pub(crate) use crate::number_set::NUMBERS;
use crate::number_set::SharedSet;
use crate::order::pending::Work;
use crate::sync::Mutex;
use fences::Fences;
pub(crate) use fences::{Lag, Unfinished};
pub(crate) use names::Resolved;
use names::{Cache, Numbers};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
pub(crate) use stream::Stream;
use stream::{DEAD, LASTING};

/// Streams of a device that have numbers at a time; a dead stream's number is free once nothing
/// refers to it.
pub const MAX_STREAMS: usize = NUMBERS as usize - 2;
/// The number of the legacy default stream.
pub(crate) const DEFAULT_STREAM: u32 = 0;
/// The number of all streams of the device together, unknown ones included. It owns the blocks of
/// `cudaMalloc`, and gets the frees of blocks that a stream without a number used. Its events are
/// recorded behind all work of the device's context, if the driver can; else only a synchronisation
/// of the device completes its epochs.
///
/// Memory freed on it waits for such an event or synchronisation: unlike a stream, it has no order
/// with itself.
pub(crate) const ALL_STREAMS: u32 = MAX_STREAMS as u32;
const _: () =
    assert!(ALL_STREAMS == gruyere_record::stream::ALL_STREAMS, "readers know it by this number");

/// Events recorded and asked, for the gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FenceCounts {
    pub(crate) recorded: u64,
    pub(crate) queried: u64,
}

/// The streams of a device.
pub(crate) struct Streams {
    device: DeviceId,
    /// What the loader has announced ([`crate::hook_bits`]).
    hooks: Arc<AtomicU32>,
    ids: bool,
    context_events: bool,
    streams: Box<[OnceLock<Stream>]>,
    count: AtomicU32,
    cache: Cache,
    /// Taken before `fences`, if both are held.
    numbers: Mutex<Numbers>,
    fences: Mutex<Fences>,
    recycling: Mutex<()>,
    unfenced: SharedSet,
    unripe: SharedSet,
    wanted: SharedSet,
    lost: SharedSet,
    further: SharedSet,
    /// Times that a stream got further.
    strides: AtomicU64,
    /// The last epoch of [`ALL_STREAMS`] that a free waits for; only raised.
    parked: AtomicU64,
    /// Frees that wait for all streams since the last event behind all work of the device.
    gathered: AtomicU64,
    lasting: AtomicU64,
    /// Passing streams with frees that the call of a recorder did not name, since the last event
    /// behind all work of the device.
    stranded: AtomicU64,
    /// 1: a passing stream was seen to capture; never 0 again.
    capturing: AtomicU8,
    recorded: AtomicU64,
    queried: AtomicU64,
    /// Large blocks freed so far: a clock of how far the host is. Raised under the central lock.
    clock: AtomicU64,
    /// How far the host has run ahead.
    pub(crate) lag: Lag,
}

impl Streams {
    /// The streams of `device`. `ids`: the driver has stream ids; `context_events`: it records
    /// events behind all work of a context; `hooks`: what the loader has announced.
    pub(crate) fn new(
        device: DeviceId,
        ids: bool,
        context_events: bool,
        hooks: Arc<AtomicU32>,
    ) -> Self {
        let streams: Box<[OnceLock<Stream>]> = (0..=MAX_STREAMS).map(|_| OnceLock::new()).collect();
        let _ = streams[DEFAULT_STREAM as usize].set(Stream::new(StreamHandle(0), 0, LASTING));
        let _ = streams[ALL_STREAMS as usize].set(Stream::new(StreamHandle(0), 0, DEAD));
        Self {
            device,
            hooks,
            ids,
            context_events,
            streams,
            count: AtomicU32::new(1),
            cache: Cache::default(),
            numbers: Mutex::default(),
            fences: Mutex::default(),
            recycling: Mutex::default(),
            unfenced: SharedSet::default(),
            unripe: SharedSet::default(),
            wanted: SharedSet::default(),
            lost: SharedSet::default(),
            further: SharedSet::default(),
            strides: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            gathered: AtomicU64::new(0),
            lasting: AtomicU64::new(1),
            stranded: AtomicU64::new(0),
            capturing: AtomicU8::new(0),
            recorded: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            queried: AtomicU64::new(0),
            lag: Lag::default(),
        }
    }

    /// Numbered streams, dead ones included.
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    #[inline]
    fn get(&self, stream: u32) -> Option<&Stream> {
        self.streams.get(stream as usize)?.get()
    }

    pub(crate) fn handle(&self, stream: u32) -> Option<StreamHandle> {
        self.get(stream).map(Stream::handle)
    }

    /// The open epoch of `stream`, to which the free of a block of its own belongs at this moment.
    #[inline]
    pub(crate) fn note_free(&self, stream: u32) -> u64 {
        // The hot path.
        if stream == DEFAULT_STREAM {
            let epoch = self.open_epoch(DEFAULT_STREAM);
            self.unfenced.insert(DEFAULT_STREAM);
            return epoch;
        }
        self.note_free_elsewhere(stream)
    }

    #[inline(never)]
    fn note_free_elsewhere(&self, stream: u32) -> u64 {
        let epoch = self.open_epoch(stream);
        let set = if self.is_ripe_at_once(stream) { &self.unfenced } else { &self.unripe };
        set.insert(stream);
        epoch
    }

    /// Whether an event behind the free of a block on its own stream is behind all its uses.
    ///
    /// It need not be: torch's allocator gives the block back to that stream alone, at its next
    /// malloc. A program may let another stream use it till then without `record_stream`, and have
    /// the block's stream wait for that one before the malloc. FSDP's reductions do, and much else
    /// (docs/decisions/streams.md). Of blocks of the default stream it is assumed: its mallocs are
    /// the hot path.
    #[inline]
    fn is_ripe_at_once(&self, stream: u32) -> bool {
        stream == DEFAULT_STREAM
            || stream == ALL_STREAMS
            || self.hooks.load(Ordering::Relaxed) & (ORDERED_CALLERS | HOOK_RECORD_STREAM)
                == ORDERED_CALLERS
    }

    /// Whether a malloc on `stream` is to be noted ([`Streams::ripen`]).
    #[inline]
    pub(crate) fn is_unripe(&self, stream: u32) -> bool {
        stream != DEFAULT_STREAM && self.unripe.contains(stream)
    }

    /// Notes a malloc on a stream: whoever used the blocks that it has freed, its work to come is
    /// behind that.
    pub(crate) fn ripen(&self, number: u32) {
        let Some(stream) = self.get(number) else { return };
        self.unripe.remove(number);
        let closed = self.close_epoch(number);
        stream.ripe.fetch_max(closed, Ordering::SeqCst);
        // Before the look whether it is in the set; the recorder has the other half.
        fence(Ordering::SeqCst);
        self.unfenced.insert(number);
    }

    /// Whether the next malloc on a stream is to record its event.
    pub(crate) fn is_wanted(&self, stream: u32) -> bool {
        self.wanted.contains(stream)
    }

    /// What frees of other callers noted is not ripe for those of torch's hooks.
    pub(crate) fn doubt_all(&self) {
        (1..self.count()).for_each(|number| self.unripe.insert(number));
    }

    /// Closes the open epoch of a stream. Returns the work that an event recorded from now on is
    /// behind.
    pub(crate) fn close_work(&self, number: u32) -> Work {
        // A malloc meanwhile comes too late.
        let ripe = self.get(number).map_or(0, |stream| stream.ripe.load(Ordering::SeqCst));
        let epoch = self.close_epoch(number);
        if self.is_ripe_at_once(number) { Work::of_all(epoch) } else { Work { epoch, ripe } }
    }

    /// How far the host is: large blocks freed so far. Streams run what it enqueues at some pace;
    /// so the clock tells how much work lies between two moments, with no clock of the device's.
    pub(crate) fn host_clock(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Counts a freed block, under the central lock.
    #[inline]
    pub(crate) fn tick(&self) {
        self.clock.store(self.clock.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The open epoch of `stream`.
    #[inline]
    pub(crate) fn open_epoch(&self, stream: u32) -> u64 {
        self.get(stream).map_or(u64::MAX, |stream| stream.epoch.load(Ordering::Acquire))
    }

    /// Closes and returns the open epoch of `stream`: later frees belong to the next.
    fn close_epoch(&self, stream: u32) -> u64 {
        self.get(stream).map_or(0, |stream| stream.epoch.fetch_add(1, Ordering::SeqCst))
    }

    /// The open epoch of `stream`, which a free of this moment waits for as the stream used the
    /// block.
    #[inline]
    pub(crate) fn note_wait(&self, stream: u32) -> u64 {
        let epoch = self.open_epoch(stream);
        self.unfenced.insert(stream);
        if stream == ALL_STREAMS {
            self.parked.fetch_max(epoch, Ordering::Relaxed);
            self.gathered.fetch_add(1, Ordering::Relaxed);
        }
        epoch
    }

    /// Whether frees wait for all streams, and only a synchronisation of the device completes them.
    pub(crate) fn needs_synchronisation(&self, hears_of_captures: bool) -> bool {
        !self.records_context_events(hears_of_captures)
            && self.parked.load(Ordering::Relaxed) > self.completed(ALL_STREAMS)
    }

    /// Whether events may be recorded behind all work of the context: the driver can, and every
    /// capture is announced, as such an event makes a running capture fail.
    fn records_context_events(&self, hears_of_captures: bool) -> bool {
        self.context_events && hears_of_captures
    }

    /// The last epoch that `stream` is past.
    #[inline]
    pub(crate) fn completed(&self, stream: u32) -> u64 {
        self.get(stream).map_or(0, |stream| stream.completed.load(Ordering::Acquire))
    }

    /// The last epoch of `stream` whose freed memory every stream may have.
    #[inline]
    pub(crate) fn reusable(&self, stream: u32) -> u64 {
        self.get(stream).map_or(0, |stream| stream.reusable.load(Ordering::Acquire))
    }

    /// Notes that a stream is past `work`. True if that is news.
    fn raise(&self, number: u32, Work { epoch, ripe }: Work) -> bool {
        let Some(stream) = self.get(number) else { return false };
        let passed = stream.completed.fetch_max(epoch, Ordering::AcqRel) < epoch;
        let further = (stream.reusable.fetch_max(ripe, Ordering::AcqRel) < ripe) | passed;
        if further {
            self.further.insert(number);
            self.strides.fetch_add(1, Ordering::Release);
        }
        further
    }

    /// The streams that have got further since the last call. Call it under the central lock.
    pub(crate) fn take_further(&self) -> impl Iterator<Item = u32> {
        let every = self.further.remove_seen(ALL_STREAMS).then_some(ALL_STREAMS);
        self.further.take(self.count()).chain(every)
    }

    /// Whether [`Streams::take_further`] would return `stream`.
    pub(crate) fn has_got_further(&self, stream: u32) -> bool {
        self.further.contains(stream)
    }

    /// Grows whenever a stream gets further.
    pub(crate) fn strides(&self) -> u64 {
        self.strides.load(Ordering::Acquire)
    }

    /// Whether the stream is known to be gone.
    pub(crate) fn is_dead(&self, stream: u32) -> bool {
        self.get(stream).is_none_or(Stream::is_dead)
    }
}
