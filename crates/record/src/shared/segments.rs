//! The segment table: memory and address space held from the driver, its mappings, and the slabs
//! cut out of it. Calls are rare, so writers share one mutex.

use crate::block_map::SlotRead;
use crate::layout::Shared;
use crate::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence, pause};
use crate::{BlockState, SegmentEntry, SegmentKind, SiteId};

/// One slot, 64 bytes. The writer holds the table's mutex, or owns the slot and changes only
/// `pages`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct SegmentCell {
    /// Only grows:
    ///
    /// ```text
    /// even, free    insert, after the words    odd, taken
    /// odd, taken    remove                     even, free (the next life)
    /// ```
    /// The words below are written only while it is free, except `pages`: each of its bits is
    /// independent, and may change while the slot is taken.
    state: AtomicU32,
    kind: AtomicU8,
    device: AtomicU8,
    lifetime: AtomicU8,
    capture: AtomicU8,
    address: AtomicU64,
    bytes: AtomicU64,
    slot: AtomicU64,
    stream: AtomicU32,
    chunk: AtomicU32,
    pages: [AtomicU64; 2],
    site: AtomicU32,
    _room: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<SegmentCell>() == 64);

// SAFETY: repr(C), atomics throughout.
unsafe impl Shared for SegmentCell {}

impl SegmentCell {
    fn advance(&self) {
        self.state.store(self.state.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// Makes a free slot a segment.
    pub fn insert(&self, entry: &SegmentEntry) {
        fence(Ordering::Release);
        self.kind.store(entry.kind as u8, Ordering::Relaxed);
        self.device.store(entry.device, Ordering::Relaxed);
        self.lifetime.store(entry.lifetime, Ordering::Relaxed);
        self.capture.store(entry.capture, Ordering::Relaxed);
        self.address.store(entry.address, Ordering::Relaxed);
        self.bytes.store(entry.bytes, Ordering::Relaxed);
        self.slot.store(entry.slot, Ordering::Relaxed);
        self.stream.store(entry.stream, Ordering::Relaxed);
        self.chunk.store(entry.chunk, Ordering::Relaxed);
        self.set_pages(entry.pages);
        self.site.store(entry.site.0, Ordering::Relaxed);
        self.advance();
    }

    /// Sets the pages of the view here.
    pub fn set_pages(&self, pages: u128) {
        for (word, value) in self.pages.iter().zip([pages as u64, (pages >> 64) as u64]) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Frees a taken slot.
    pub fn remove(&self) {
        debug_assert!(self.is_taken());
        self.advance();
    }

    /// Whether a segment is here.
    pub fn is_taken(&self) -> bool {
        self.state.load(Ordering::Relaxed) & 1 == 1
    }

    /// The segment here, read whole or not at all.
    pub fn read(&self, attempts: u32) -> SlotRead<SegmentEntry> {
        for _ in 0..attempts {
            let before = self.state.load(Ordering::Acquire);
            if before & 1 == 0 {
                return SlotRead::Free;
            }
            let kind = match self.kind.load(Ordering::Relaxed) {
                1 => SegmentKind::Span,
                2 => SegmentKind::Slab,
                3 => SegmentKind::Chunk,
                4 => SegmentKind::View,
                5 => SegmentKind::Reservation,
                _ => return SlotRead::Torn,
            };
            let entry = SegmentEntry {
                kind,
                address: self.address.load(Ordering::Relaxed),
                bytes: self.bytes.load(Ordering::Relaxed),
                slot: self.slot.load(Ordering::Relaxed),
                stream: self.stream.load(Ordering::Relaxed),
                device: self.device.load(Ordering::Relaxed),
                lifetime: self.lifetime.load(Ordering::Relaxed),
                capture: self.capture.load(Ordering::Relaxed),
                chunk: self.chunk.load(Ordering::Relaxed),
                pages: u128::from(self.pages[0].load(Ordering::Relaxed))
                    | u128::from(self.pages[1].load(Ordering::Relaxed)) << 64,
                site: SiteId(self.site.load(Ordering::Relaxed)),
            };
            fence(Ordering::Acquire);
            if self.state.load(Ordering::Relaxed) == before {
                return SlotRead::Taken(entry, BlockState::Live);
            }
            pause();
        }
        SlotRead::Torn
    }
}
