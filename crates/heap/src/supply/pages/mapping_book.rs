//! Stitched pages in the record: chunks, their mappings, the owned pages of each mapping, and
//! reserved address space. With it a reader can draw address space against physical memory, and see
//! which views are retired.
//!
//! `chunks` and `addresses` call this at every change of their own books, under the central lock.
//! The segment table has a fixed size; entries beyond it are counted (`segments_unrecorded`) and
//! missing there, and nothing else depends on it. No method calls the driver.

use crate::driver::DeviceId;
use crate::request::Growth;
use crate::runs::arena::UNOWNED;
use crate::supply::pages::ChunkId;
use gruyere_record::{Record, SegmentEntry, SegmentKind, SegmentSlot};
use std::collections::HashMap;

/// A device's entries for pages in the record's segment table. The default one writes nothing.
#[derive(Default)]
pub(crate) struct MappingBook {
    record: Option<&'static Record>,
    device: u8,
    /// By first byte.
    reservations: HashMap<u64, SegmentSlot>,
}

impl MappingBook {
    /// The empty book of `device`.
    pub(crate) fn new(record: &'static Record, device: DeviceId) -> Self {
        Self { record: Some(record), device: device as u8, ..Self::default() }
    }

    /// The entry's place; none if the record is off, or full.
    fn insert(&self, entry: SegmentEntry) -> SegmentSlot {
        let entry = SegmentEntry { stream: UNOWNED, device: self.device, ..entry };
        self.record.map_or(SegmentSlot::NONE, |record| record.segment_insert(&entry))
    }

    /// Removes the entry of an object that was returned or unmapped.
    pub(crate) fn remove(&self, slot: SegmentSlot) {
        if let Some(record) = self.record {
            record.segment_remove(slot);
        }
    }

    /// Adds a chunk from the driver.
    pub(crate) fn add_chunk(&self, chunk: ChunkId, bytes: u64) -> SegmentSlot {
        self.insert(SegmentEntry {
            kind: SegmentKind::Chunk,
            bytes,
            chunk,
            ..SegmentEntry::default()
        })
    }

    /// Adds a mapping of a chunk of `bytes` at `address`; `pages`, a bit each, belong to the arena
    /// there.
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

    /// Sets the pages of a view that belong to the arena there.
    pub(crate) fn set_pages(&self, slot: SegmentSlot, pages: u64) {
        if let Some(record) = self.record {
            record.segment_pages(slot, u128::from(pages));
        }
    }

    /// Adds reserved address space, for the growth `ctx`.
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

    /// Removes the reservation at `address`.
    pub(crate) fn unreserve(&mut self, address: u64) {
        if let Some(slot) = self.reservations.remove(&address) {
            self.remove(slot);
        }
    }
}
