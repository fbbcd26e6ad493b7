//! What the record tells of stitched pages: chunks, where each is mapped and which of its pages
//! belong to the arena there, and reserved address space. So a reader can draw address space
//! against physical memory, and see which views are retired.
//!
//! `stitch` calls this wherever its own books change, under the central lock. The segment table has
//! a fixed size; what it cannot take is counted (`segments_unrecorded`) and missing there, and
//! nothing else depends on it. No driver call is made.

use crate::driver::DeviceId;
use crate::request::Growth;
use crate::runs::arena::UNOWNED;
use crate::supply::pages::ChunkId;
use gruyere_record::{Record, SegmentEntry, SegmentKind, SegmentSlot};
use std::collections::HashMap;

/// A device's part of the record's segment table, as far as pages are concerned. The default one
/// writes nothing.
#[derive(Default)]
pub(crate) struct MappingBook {
    record: Option<&'static Record>,
    device: u8,
    /// By first byte.
    reservations: HashMap<u64, SegmentSlot>,
}

impl MappingBook {
    /// For the pages of `device`, of which nothing is known yet.
    pub(crate) fn new(record: &'static Record, device: DeviceId) -> Self {
        Self { record: Some(record), device: device as u8, ..Self::default() }
    }

    /// The entry's place; none where the record is off, or full.
    fn insert(&self, entry: SegmentEntry) -> SegmentSlot {
        let entry = SegmentEntry { stream: UNOWNED, device: self.device, ..entry };
        self.record.map_or(SegmentSlot::NONE, |record| record.segment_insert(&entry))
    }

    /// The driver has back what is at a place, or has unmapped it.
    pub(crate) fn remove(&self, slot: SegmentSlot) {
        if let Some(record) = self.record {
            record.segment_remove(slot);
        }
    }

    /// The driver gave a chunk.
    pub(crate) fn add_chunk(&self, chunk: ChunkId, bytes: u64) -> SegmentSlot {
        self.insert(SegmentEntry {
            kind: SegmentKind::Chunk,
            bytes,
            chunk,
            ..SegmentEntry::default()
        })
    }

    /// A chunk of `bytes` is mapped at `address`; these of its pages, a bit each, belong to the
    /// arena there.
    pub(crate) fn add_view(
        &self,
        address: u64,
        chunk: ChunkId,
        bytes: u64,
        pages: u64,
    ) -> SegmentSlot {
        let kind = SegmentKind::View;
        let pages = u128::from(pages);
        self.insert(SegmentEntry { kind, address, bytes, chunk, pages, ..SegmentEntry::default() })
    }

    /// The pages of a view that belong to the arena there are these now.
    pub(crate) fn set_pages(&self, slot: SegmentSlot, pages: u64) {
        if let Some(record) = self.record {
            record.segment_pages(slot, u128::from(pages));
        }
    }

    /// Address space was reserved, for what `ctx` grows.
    pub(crate) fn reserve(&mut self, address: u64, bytes: u64, ctx: &Growth<'_>) {
        let slot = self.insert(SegmentEntry {
            kind: SegmentKind::Reservation,
            address,
            bytes,
            lifetime: ctx.lifetime as u8,
            capture: ctx.capture,
            ..SegmentEntry::default()
        });
        self.reservations.insert(address, slot);
    }

    /// The reservation at `address` was given back.
    pub(crate) fn unreserve(&mut self, address: u64) {
        if let Some(slot) = self.reservations.remove(&address) {
            self.remove(slot);
        }
    }
}
