//! A shard's own event ring: one writer, overwriting; readers detect losses. No locked instruction,
//! no tag on the entries.
//!
//! The head is the protocol. A writer at position `p` writes the cell `p mod n`, then sets the head
//! to `p + 1`. A reader that copied the cell of position `q` looks at the head afterwards: below
//! `q + n`, the writer had not begun to overwrite it. So `n - 1` events of a ring of `n` cells are
//! readable.
//!
//! An event ring begins with few cells, and doubles each time that all of them were written for the
//! first time: until then a position's cell is the same whatever `n`, so nothing is copied, and a
//! reader with the old `n` or the new one finds the same events.

use crate::layout::Shared;
use crate::ring::Event;
use crate::sync::{AtomicU64, Ordering, fence};
use crate::{BlockTag, EventKind, layout};

/// One entry, 32 bytes.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ShardRingCell {
    /// [`BlockTag::event`].
    what: AtomicU64,
    address: AtomicU64,
    size: AtomicU64,
    time: AtomicU64,
}

/// The head, in the shard's area.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct ShardRingHead {
    /// Events ever written = the next position. Only grows; the shard's writer stores it after the
    /// cell (release), and orders it before its next stores to a cell (release fence).
    position: AtomicU64,
    /// Allocated cells, a power of two; 0: none yet. Others must not be touched. Only grows; the
    /// shard's writer stores it (release) before the position of the first event that needs it.
    cells: AtomicU64,
    _room: [AtomicU64; 6],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<ShardRingCell>() == 32 && size_of::<ShardRingHead>() == 64);

// SAFETY: repr(C), atomics throughout.
unsafe impl Shared for ShardRingCell {}

impl ShardRingHead {
    /// Lets readers read `cells` cells.
    pub fn open(&self, cells: u64) {
        self.cells.store(cells, Ordering::Release);
    }

    /// Number of readable cells.
    pub fn cells(&self) -> u64 {
        self.cells.load(Ordering::Acquire)
    }

    /// Events ever written.
    pub fn position(&self) -> u64 {
        self.position.load(Ordering::Acquire)
    }

    /// As [`ShardRingHead::position`], for the event ring's only writer.
    #[inline(always)]
    pub fn next(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    /// Adds an event in `cell`, that of [`ShardRingHead::next`]; about eight instructions. The
    /// caller is the event ring's only writer.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub fn push(
        &self,
        cell: &ShardRingCell,
        kind: EventKind,
        tag: BlockTag,
        address: u64,
        size: u64,
        time: u64,
    ) {
        // A reader that sees any word of this event sees this head, and drops the overwritten
        // event.
        fence(Ordering::Release);
        cell.what.store(tag.event(kind), Ordering::Relaxed);
        cell.address.store(address, Ordering::Relaxed);
        cell.size.store(size, Ordering::Relaxed);
        cell.time.store(time, Ordering::Relaxed);
        // A second read lets the compiler use one `inc` on memory.
        self.position
            .store(self.position.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// The event at `position` of these cells; `None` if overwritten (or about to be) or not yet
    /// written.
    pub fn read(&self, cells: &[ShardRingCell], position: u64) -> Option<Event> {
        let cell = cells.get((position % cells.len() as u64) as usize)?;
        // Acquire: the words of a position below the head are written. (loom found that a reader
        // which looked at the head only afterwards took words from before the event.)
        if position >= self.position() {
            return None;
        }
        let what = BlockTag(cell.what.load(Ordering::Relaxed));
        let time = cell.time.load(Ordering::Relaxed);
        let event = Event {
            position,
            // Checked below: before the look at the head, a torn kind and a damaged one look the
            // same.
            kind: EventKind::from_number(what.kind()).unwrap_or(EventKind::Malloc),
            device: what.device(),
            lifetime: what.lifetime() & 3,
            stream: what.stream(),
            address: cell.address.load(Ordering::Relaxed),
            size: cell.size.load(Ordering::Relaxed),
            time,
            turn: time,
        };
        // Orders the words before the look at the head.
        fence(Ordering::Acquire);
        let head = self.position.load(Ordering::Relaxed);
        let whole = head.wrapping_sub(position) < cells.len() as u64;
        (whole && EventKind::from_number(what.kind()).is_some()).then_some(event)
    }

    /// All present events from `since` (a position) on, the number missing, and the next position;
    /// `cells` are the most there may be.
    pub fn read_since(&self, cells: &[ShardRingCell], since: u64) -> (Vec<Event>, u64, u64) {
        let end = self.position();
        // After the position: at least so many cells existed when the last of the events was
        // written.
        let open = usize::try_from(self.cells()).unwrap_or(usize::MAX);
        let Some(cells) = cells.get(..open.min(cells.len())).filter(|cells| !cells.is_empty())
        else {
            return (Vec::new(), end.saturating_sub(since), end);
        };
        let start = since.max(end.saturating_sub((cells.len() as u64).saturating_sub(1)));
        let mut events =
            Vec::with_capacity(end.saturating_sub(start).min(cells.len() as u64) as usize);
        events.extend((start..end).filter_map(|position| self.read(cells, position)));
        let lost = end.saturating_sub(since).saturating_sub(events.len() as u64);
        (events, lost, end)
    }
}

/// Cells of a new event ring: two pages.
pub const FIRST_CELLS: u64 = 256;

/// The most cells of each shard's event ring, for a shared ring of `ring_events`: few shards are in
/// use, so each gets a quarter.
pub fn cells(ring_events: u64) -> u64 {
    (ring_events / 4).clamp(64, layout::PAGE * 1024)
}
