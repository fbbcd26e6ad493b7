//! What the record tells of stitched pages: chunks, where each is mapped and which of its pages belong to the arena there, and reserved address
//! space. So a reader can draw address space against physical memory, and see which views are retired.
//!
//! `stitch` calls this wherever its own books change, under the central lock. The segment table has a fixed size; what it cannot take is counted
//! (`segments_unrecorded`) and missing there, and nothing else depends on it. No driver call is made.

use crate::driver::DeviceId;
use crate::request::Growth;
use crate::runs::arena::EVERYBODY;
use crate::small::size_class::PAGE;
use crate::supply::chunk::{ChunkId, LONGEST_CHUNK};
use gruyere_record::{Record, SegmentEntry, SegmentKind, SegmentSlot};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

// A view's pages are the bits of one number.
const _: () = assert!(LONGEST_CHUNK / PAGE <= u128::BITS as u64);

/// For addresses of views: pages of ours, which nobody chooses to make them meet. Fibonacci hashing (Knuth, vol. 3, 6.4).
#[derive(Default)]
struct PageHasher(u64);

impl Hasher for PageHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, address: u64) {
        let mixed = (self.0 ^ (address / PAGE)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A view on the record.
struct View {
    slot: SegmentSlot,
    /// The pages that belong to the arena there.
    pages: u128,
}

/// A device's part of the record's segment table, as far as pages are concerned. The default one writes nothing.
#[derive(Default)]
pub struct MappingBook {
    record: Option<&'static Record>,
    device: u8,
    /// By number.
    chunks: Vec<SegmentSlot>,
    /// By first byte, as the reservations are.
    views: HashMap<u64, View, BuildHasherDefault<PageHasher>>,
    reservations: HashMap<u64, SegmentSlot>,
}

impl MappingBook {
    /// For the pages of `device`, of which nothing is known yet.
    pub fn new(record: &'static Record, device: DeviceId) -> Self {
        Self { record: Some(record), device: device as u8, ..Self::default() }
    }

    /// `None`: the record is off, or full.
    fn insert(&self, entry: SegmentEntry) -> Option<SegmentSlot> {
        let entry = SegmentEntry { stream: EVERYBODY, device: self.device, ..entry };
        let slot = self.record?.segment_insert(&entry);
        (slot != SegmentSlot::NONE).then_some(slot)
    }

    fn remove(&self, slot: Option<SegmentSlot>) {
        if let (Some(record), Some(slot)) = (self.record, slot) {
            record.segment_remove(slot);
        }
    }

    /// The driver gave a chunk.
    pub fn add_chunk(&mut self, chunk: ChunkId, bytes: u64) {
        let entry = SegmentEntry { kind: SegmentKind::Chunk, bytes, chunk, ..SegmentEntry::default() };
        let slot = self.insert(entry).unwrap_or(SegmentSlot::NONE);
        if self.record.is_some() {
            let count = self.chunks.len().max(chunk as usize + 1);
            self.chunks.resize(count, SegmentSlot::NONE);
            self.chunks[chunk as usize] = slot;
        }
    }

    /// The driver has a chunk back.
    pub fn remove_chunk(&mut self, chunk: ChunkId) {
        let slot = self.chunks.get_mut(chunk as usize);
        let slot = slot.map(|slot| std::mem::replace(slot, SegmentSlot::NONE));
        self.remove(slot);
    }

    /// A chunk of `bytes` is mapped at `address`; none of its pages belongs there yet.
    pub fn add_view(&mut self, address: u64, chunk: ChunkId, bytes: u64) {
        let entry =
            SegmentEntry { kind: SegmentKind::View, address, bytes, chunk, ..SegmentEntry::default() };
        if let Some(slot) = self.insert(entry) {
            self.views.insert(address, View { slot, pages: 0 });
        }
    }

    /// The view at `address` is unmapped.
    pub fn remove_view(&mut self, address: u64) {
        let slot = self.views.remove(&address).map(|view| view.slot);
        self.remove(slot);
    }

    /// Pages of a chunk belong to the arena in its view at `address`.
    pub fn own(&mut self, address: u64, pages: Range<u32>) {
        self.change(address, |known| known | bits(&pages));
    }

    /// They do not belong there any more.
    pub fn disown(&mut self, address: u64, pages: Range<u32>) {
        self.change(address, |known| known & !bits(&pages));
    }

    fn change(&mut self, address: u64, change: impl FnOnce(u128) -> u128) {
        if let (Some(record), Some(view)) = (self.record, self.views.get_mut(&address)) {
            view.pages = change(view.pages);
            record.segment_pages(view.slot, view.pages);
        }
    }

    /// Address space was reserved, for what `ctx` grows.
    pub fn reserve(&mut self, address: u64, bytes: u64, ctx: &Growth<'_>) {
        let entry = SegmentEntry {
            kind: SegmentKind::Reservation,
            address,
            bytes,
            lifetime: ctx.lifetime as u8,
            capture: ctx.capture,
            ..SegmentEntry::default()
        };
        if let Some(slot) = self.insert(entry) {
            self.reservations.insert(address, slot);
        }
    }

    /// The reservation at `address` was given back.
    pub fn unreserve(&mut self, address: u64) {
        let slot = self.reservations.remove(&address);
        self.remove(slot);
    }

    /// Checks what is told of a chunk, of which `views` are the addresses and `owners` says by page where it belongs.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validate(&self, views: &[u64], owners: &[u64]) -> Result<(), String> {
        for &address in views {
            let belongs = |page: &usize| owners[*page] == address + *page as u64 * PAGE;
            let pages = (0..owners.len()).filter(belongs).fold(0, |pages, page| pages | 1u128 << page);
            if self.views.get(&address).is_some_and(|view| view.pages != pages) {
                return Err(format!("the record has other pages in the view at {address:#x} than there are"));
            }
        }
        Ok(())
    }
}

fn bits(pages: &Range<u32>) -> u128 {
    let below = |end: u32| 1u128.checked_shl(end).map_or(u128::MAX, |bit| bit - 1);
    below(pages.end) & !below(pages.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bits_of_a_range_are_its_pages_up_to_the_longest_chunk() {
        assert_eq!(bits(&(0..0)), 0);
        assert_eq!(bits(&(1..4)), 0b1110);
        assert_eq!(bits(&(0..128)), u128::MAX);
        assert_eq!(bits(&(127..128)), 1 << 127);
    }
}
