//! The shared ring: rare events of all shards. Many producers, overwriting; readers detect losses.
//!
//! A producer takes a position with one fetch-add, claims the slot of that position with one swap,
//! writes the words and publishes the tag. It never waits: if a producer a whole lap behind still
//! writes the slot, the event is dropped and counted. A reader copies a slot and accepts it only if
//! the tag is that of the expected position, before and after.
//!
//! Time passes between the fetch-add and the tag: the kernel may preempt the producer, or the
//! slot's memory must still be allocated. So an unwritten position is no loss yet. A follower
//! ([`Place`]) remembers it and looks again, until the event is there or can't come any more.

use std::collections::VecDeque;

use crate::sync::{AtomicU64, Ordering, fence};
use crate::{EventKind, layout::Shared};

/// One entry, 32 bytes.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RingCell {
    /// Position and state in the high half, stream in the low half.
    ///
    /// ```text
    /// high 32 bits                    means                           who changes it, to what
    /// 0, and kind 0 in `packed`       never written                   a producer (swap): busy
    /// lap bits, bit 0 clear           complete: position = lap|index  a producer one lap or more
    ///                                                                 on (swap): busy
    /// lap bits, bit 0 set (busy)      being written                   its producer: complete
    ///                                                                 another producer (swap):
    ///                                                                 busy, and drops its event
    /// ```
    /// The lap bits are the position's low 32 bits less the index bits (so bit 0 is free: a ring
    /// has two slots at least); they repeat after 2^32 events, which a reader would have to sleep
    /// through exactly, inside one entry.
    tag: AtomicU64,
    address: AtomicU64,
    /// Size in the high 48 bits; then kind (6 bits), lifetime (2 bits), device (8 bits).
    packed: AtomicU64,
    time: AtomicU64,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<RingCell>() == 32 && align_of::<RingCell>() == 8);

/// The head, on a cache line of its own: every producer writes it.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct RingHead {
    /// Events ever begun = the next position. Only grows; producers fetch-add it.
    position: AtomicU64,
    /// Events dropped because the slot was still being written a lap later, or had no memory.
    conflicts: AtomicU64,
    _room: [AtomicU64; 6],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<RingHead>() == 64);

// SAFETY: repr(C), nothing but atomics and unread room; every bit pattern is a value.
unsafe impl Shared for RingCell {}
// SAFETY: as above.
unsafe impl Shared for RingHead {}

const BUSY: u64 = 1 << 32;
/// The largest size in the ring, which stands for all larger ones too.
pub const MAX_EVENT_SIZE: u64 = (1 << 48) - 1;

/// One event, for a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number in the process's life, from 0.
    pub position: u64,
    /// What happened.
    pub kind: EventKind,
    /// The device it happened on.
    pub device: u8,
    /// Lifetime class of the block.
    pub lifetime: u8,
    /// Process-wide number of the stream.
    pub stream: u32,
    /// Address of the block or segment.
    pub address: u64,
    /// Bytes (for a wait: nanoseconds; for a step: its number); in the shared ring
    /// [`MAX_EVENT_SIZE`] at most.
    pub size: u64,
    /// Ticks ([`crate::clock::now`]) when the call began.
    pub time: u64,
    /// The event did not happen before this: its time, or that of an earlier event in the same
    /// ring, if later. A call that waited for its lock began before other events and happened after
    /// them. In this order a ring's events are as they happened.
    pub turn: u64,
}

/// The number of the kind in [`RingCell`]'s `packed`.
fn kind_of(packed: u64) -> u8 {
    (packed >> 10) as u8 & 0x3f
}

/// What a reader finds at a position.
enum Found {
    Whole(Event),
    /// Nothing yet: its producer has begun and not written it, or has dropped it.
    Coming,
    /// Overwritten, or not written by a producer of ours.
    Gone,
}

/// A position begun but unwritten at the last look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Late {
    position: u64,
    /// The latest time of an event before it.
    since: u64,
}

/// Most late events, about as many as threads; beyond that the oldest count as lost.
const MOST_LATE: usize = 256;

/// A follower's place in a ring; the default is the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    position: u64,
    /// The latest time of an event before the position.
    since: u64,
    /// Oldest first.
    late: VecDeque<Late>,
    /// Dropped events that are no longer among the late ones.
    dropped: u64,
}

impl Place {
    /// The next position to look at.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Events begun but unwritten at the last look. Neither read nor lost: the next look decides.
    pub fn late(&self) -> u64 {
        self.late.len() as u64
    }

    /// Stops waiting for them; returns their number.
    pub fn give_up(&mut self) -> u64 {
        std::mem::take(&mut self.late).len() as u64
    }
}

/// A view of a ring in memory: `cells` points at `mask + 1` cells.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    cells: *const RingCell,
    head: *const RingHead,
    mask: u64,
}

// SAFETY: it points at atomics only, made for many threads; `new`'s caller keeps them alive.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// # Safety
    /// `cells` points at `count` initialised cells (a power of two, at least 2), `head` at a head,
    /// and both stay valid for as long as the ring is used.
    pub unsafe fn new(cells: *const RingCell, count: u64, head: *const RingHead) -> Ring {
        assert!(count.is_power_of_two() && count >= 2);
        Ring { cells, head, mask: count - 1 }
    }

    fn head(&self) -> &RingHead {
        // SAFETY: valid by `new`'s contract.
        unsafe { &*self.head }
    }

    #[inline(always)]
    fn cell(&self, position: u64) -> &RingCell {
        // SAFETY: masked, so inside the `mask + 1` cells of `new`'s contract.
        unsafe { &*self.cells.add((position & self.mask) as usize) }
    }

    /// Adds an event; about 27 instructions, two of them locked. `has_room` returns whether the
    /// cell of a position may be touched; if not, the event is dropped and counted.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub fn push(
        &self,
        kind: EventKind,
        device: u8,
        lifetime: u8,
        stream: u32,
        address: u64,
        size: u64,
        time: u64,
        has_room: impl FnOnce(u64) -> bool,
    ) {
        // SAFETY: valid by `new`'s contract; the head is atomics.
        let position = unsafe { &(*self.head).position }.fetch_add(1, Ordering::Relaxed);
        if !has_room(position) {
            return self.conflict();
        }
        let cell = self.cell(position);
        let done = ((position & !self.mask) << 32) | u64::from(stream);
        // Acquire: our stores come after those of the slot's last writer.
        if cell.tag.swap(done | BUSY, Ordering::Acquire) & BUSY != 0 {
            return self.conflict();
        }
        // A reader that sees any of our words also sees that the tag is busy (or ours).
        fence(Ordering::Release);
        let meta = ((kind as u64) << 10) | (u64::from(lifetime & 3) << 8) | u64::from(device);
        cell.address.store(address, Ordering::Relaxed);
        // A refused request may be of any size: cut bits would make it a small one.
        let size = size.min(MAX_EVENT_SIZE);
        cell.packed.store((size << 16) | meta, Ordering::Relaxed);
        cell.time.store(time, Ordering::Relaxed);
        cell.tag.store(done, Ordering::Release);
    }

    #[cold]
    #[inline(never)]
    fn conflict(&self) {
        // Release: a reader that sees this sees the dropped position.
        self.head().conflicts.fetch_add(1, Ordering::Release);
    }

    /// Events ever begun.
    pub fn position(&self) -> u64 {
        self.head().position.load(Ordering::Acquire)
    }

    /// Events dropped by producers.
    pub fn conflicts(&self) -> u64 {
        self.head().conflicts.load(Ordering::Acquire)
    }

    /// Events the ring holds.
    pub fn capacity(&self) -> u64 {
        self.mask + 1
    }

    /// The event at `position`; `None` if overwritten, being written, dropped, or never begun.
    pub fn read(&self, position: u64) -> Option<Event> {
        match self.find(position) {
            Found::Whole(event) => Some(event),
            Found::Coming | Found::Gone => None,
        }
    }

    fn find(&self, position: u64) -> Found {
        let cell = self.cell(position);
        let expected = (position & !self.mask) as u32;
        let mut before = cell.tag.load(Ordering::Acquire);
        if before == 0 {
            // Never written, or complete: stream 0 in the first lap. A reader that sees the kind
            // sees a tag of then or later, so the kind decides.
            if kind_of(cell.packed.load(Ordering::Relaxed)) == 0 {
                return Found::Coming;
            }
            fence(Ordering::Acquire);
            before = cell.tag.load(Ordering::Acquire);
        }
        let lap = (before >> 32) as u32;
        if lap != expected {
            // From an earlier lap, or busy for this one. (A slot busy for a later lap is
            // overwritten, even if the producer of this lap still writes.)
            let is_younger = (lap & !1).wrapping_sub(expected) as i32 > 0;
            return if is_younger { Found::Gone } else { Found::Coming };
        }
        let address = cell.address.load(Ordering::Relaxed);
        let packed = cell.packed.load(Ordering::Relaxed);
        let time = cell.time.load(Ordering::Relaxed);
        // Orders the words before the second look at the tag.
        fence(Ordering::Acquire);
        if cell.tag.load(Ordering::Relaxed) != before {
            return Found::Gone;
        }
        let Some(kind) = EventKind::from_number(kind_of(packed)) else { return Found::Gone };
        Found::Whole(Event {
            position,
            kind,
            device: packed as u8,
            lifetime: (packed >> 8) as u8 & 3,
            stream: before as u32,
            address,
            size: packed >> 16,
            time,
            turn: time,
        })
    }

    /// The events since the last look from this place, and the number lost: overwritten before or
    /// during the read, or dropped. Cells from `reach` on are not touched; `reach` is read after
    /// the position, so that it covers all events written before that.
    pub fn follow(&self, place: &mut Place, reach: impl FnOnce() -> u64) -> (Vec<Event>, u64) {
        // Before the position: the position of a dropped event is before the end.
        let dropped = self.conflicts();
        let end = self.position();
        let reach = reach();
        let oldest = end.saturating_sub(self.capacity());
        let start = place.position.max(oldest);
        let mut lost = start.saturating_sub(place.position);
        let mut events = Vec::with_capacity(end.saturating_sub(start) as usize);
        let mut late = VecDeque::new();
        let mut look = |position: u64, since: &mut u64| {
            let is_there = position & self.mask < reach;
            match if is_there { self.find(position) } else { Found::Coming } {
                Found::Whole(event) => {
                    *since = event.time.max(*since);
                    events.push(Event { turn: *since, ..event });
                }
                Found::Coming if position >= oldest => {
                    late.push_back(Late { position, since: *since })
                }
                Found::Coming | Found::Gone => lost = lost.saturating_add(1),
            }
            if late.len() > MOST_LATE {
                late.pop_front();
                lost = lost.saturating_add(1);
            }
        };
        for Late { position, mut since } in std::mem::take(&mut place.late) {
            look(position, &mut since);
        }
        (start..end).for_each(|position| look(position, &mut place.since));
        // As many late as dropped: they are the dropped ones. With more, some still come, and which
        // is unknown.
        if late.len() as u64 <= dropped.saturating_sub(place.dropped) {
            lost = lost.saturating_add(late.len() as u64);
            late.clear();
            place.dropped = dropped;
        }
        (place.position, place.late) = (end, late);
        (events, lost)
    }

    /// [`Ring::follow`] for a single look: all present events from `since` (a position) on, the
    /// number missing, and the next position.
    pub fn read_since(&self, since: u64, reach: impl FnOnce() -> u64) -> (Vec<Event>, u64, u64) {
        let mut place = Place { position: since, ..Place::default() };
        let (events, lost) = self.follow(&mut place, reach);
        (events, lost.saturating_add(place.give_up()), place.position)
    }
}
