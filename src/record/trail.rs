//! A lane's own event ring: one writer, overwriting, readers detect loss. No locked instruction, no tag on the entries.
//!
//! The head is the protocol. A writer at position `p` writes the cell `p mod n`, then sets the head to `p + 1`. A reader
//! that copied the cell of position `q` looks at the head afterwards: below `q + n`, the writer had not begun to overwrite
//! it. So a trail of `n` cells holds `n - 1` events that can be read.

use super::layout::Shared;
use super::ring::Event;
use super::sync::{AtomicU64, Ordering, fence};
use super::{BlockTag, EventKind, layout};

/// One entry, 32 bytes.
#[repr(C)]
#[derive(Debug, Default)]
pub struct TrailCell {
    /// [`BlockTag::event`].
    what: AtomicU64,
    address: AtomicU64,
    size: AtomicU64,
    time: AtomicU64,
}

/// The head, in the lane's area.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct TrailHead {
    /// Events ever written = the next position. Only grows; the lane's writer stores it after the cell (release), and orders
    /// it before its next stores to a cell (release fence).
    position: AtomicU64,
    /// 1 when the cells are allocated; before, nobody touches them. The lane's writer, once.
    ready: AtomicU64,
    _room: [AtomicU64; 6],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<TrailCell>() == 32 && size_of::<TrailHead>() == 64);

// SAFETY: repr(C), atomics throughout.
unsafe impl Shared for TrailCell {}

impl TrailHead {
    /// Says that the cells may be read.
    pub fn open(&self) {
        self.ready.store(1, Ordering::Release);
    }

    /// Whether the cells may be read.
    pub fn is_open(&self) -> bool {
        self.ready.load(Ordering::Acquire) == 1
    }

    /// Events ever written.
    pub fn position(&self) -> u64 {
        self.position.load(Ordering::Acquire)
    }

    /// Adds an event; about 11 instructions.
    ///
    /// # Safety
    /// `cells` points at `mask + 1` cells, a power of two, that may be touched; the caller is the trail's only writer.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn push(
        &self,
        cells: *const TrailCell,
        mask: u64,
        kind: EventKind,
        tag: BlockTag,
        address: u64,
        size: u64,
        time: u64,
    ) {
        let position = self.position.load(Ordering::Relaxed);
        // SAFETY: masked, so one of the cells.
        let cell = unsafe { &*cells.add((position & mask) as usize) };
        // A reader that sees any word of this event sees this head, and drops the event that was here.
        fence(Ordering::Release);
        cell.what.store(tag.event(kind), Ordering::Relaxed);
        cell.address.store(address, Ordering::Relaxed);
        cell.size.store(size, Ordering::Relaxed);
        cell.time.store(time, Ordering::Relaxed);
        // Read again: that lets the compiler use one `inc` on memory.
        self.position.store(self.position.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// The event at `position` of these cells; `None` when it is overwritten (or about to be), or not written yet.
    pub fn read(&self, cells: &[TrailCell], position: u64) -> Option<Event> {
        let cell = cells.get((position % cells.len() as u64) as usize)?;
        // Acquire: the words of a position below the head are written. (loom found the reader that looked at the head only
        // afterwards, and took words from before the event.)
        if position >= self.position() {
            return None;
        }
        let what = BlockTag(cell.what.load(Ordering::Relaxed));
        let event = Event {
            position,
            // Checked below: a torn kind must not be told from a damaged one before the head was looked at.
            kind: EventKind::from_number(what.kind()).unwrap_or(EventKind::Malloc),
            device: what.device(),
            lifetime: what.lifetime() & 3,
            stream: what.stream(),
            address: cell.address.load(Ordering::Relaxed),
            size: cell.size.load(Ordering::Relaxed),
            time: cell.time.load(Ordering::Relaxed),
        };
        // Orders the words before the look at the head.
        fence(Ordering::Acquire);
        let head = self.position.load(Ordering::Relaxed);
        let whole = head.wrapping_sub(position) < cells.len() as u64;
        (whole && EventKind::from_number(what.kind()).is_some()).then_some(event)
    }

    /// As [`super::ring::Ring::read_since`].
    pub fn read_since(&self, cells: &[TrailCell], since: u64) -> (Vec<Event>, u64, u64) {
        let end = self.position();
        let start = since.max(end.saturating_sub((cells.len() as u64).saturating_sub(1)));
        let mut events = Vec::with_capacity(end.saturating_sub(start).min(cells.len() as u64) as usize);
        events.extend((start..end).filter_map(|position| self.read(cells, position)));
        let lost = end.saturating_sub(since).saturating_sub(events.len() as u64);
        (events, lost, end)
    }
}

/// Cells of each lane's trail, for a ring of so many events: lanes in use are few, so each gets a quarter.
pub fn cells(ring_events: u64) -> u64 {
    (ring_events / 4).clamp(64, layout::PAGE * 1024)
}
