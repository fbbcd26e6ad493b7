//! Ranges and pages: address space with memory behind it, and that memory.

use std::collections::HashMap;
use std::collections::btree_map::{BTreeMap, Entry};

use super::{MOST_PAGES, PAGE, Page, Picture, Piece, Range, RangeKind, Reservation, StaleAlias};
use crate::{SegmentEntry, SegmentKind};

/// Pages of the longest chunk: the bits of a view's mask.
const CHUNK_PAGES: u32 = u128::BITS;

/// Contiguous address space over contiguous memory: a span, or pages of one chunk.
#[derive(Clone, Copy)]
struct Part {
    address: u64,
    end: u64,
    kind: RangeKind,
    /// For a stitched part: the chunk and its first page.
    chunk: Option<u32>,
    number: u32,
    lifetime: u8,
    capture: u8,
    /// Its reservation; parts of different ones are not joined.
    reservation: Option<usize>,
}

impl Part {
    fn pages(&self) -> usize {
        usize::try_from((self.end - self.address).div_ceil(PAGE)).unwrap_or(usize::MAX)
    }
}

/// Fills in the picture's ranges (without their pieces), pages, stale aliases and reservations.
/// Finds among `blocks` those outside all segments. Blocks and slabs are by address.
pub fn build(
    picture: &mut Picture,
    segments: &[SegmentEntry],
    blocks: &[Piece],
) -> Vec<SegmentEntry> {
    let mut ours: Vec<&SegmentEntry> = Vec::new();
    for segment in segments.iter().filter(|segment| u32::from(segment.device) == picture.device) {
        match segment.address.checked_add(segment.bytes) {
            Some(_) if segment.bytes > 0 => ours.push(segment),
            _ => picture.misfits.segments += 1,
        }
    }
    ours.sort_by_key(|segment| segment.address);
    let of = |kind| ours.iter().copied().filter(move |segment| segment.kind == kind);
    picture.reservations = of(SegmentKind::Reservation).map(reservation).collect();
    let mut budget = MOST_PAGES;
    let mut parts = spans(picture, of(SegmentKind::Span), &mut budget);
    let mut chunks = chunks(picture, of(SegmentKind::Chunk), &mut budget);
    parts.extend(views(picture, of(SegmentKind::View), &mut chunks, &mut budget));
    let mut parts = apart(picture, parts);
    add_lone_blocks(picture, &mut parts, blocks, &mut budget);
    lay_out(picture, &parts);
    add_spare(picture, &parts, &chunks);
    of(SegmentKind::Slab).copied().collect()
}

fn reservation(segment: &SegmentEntry) -> Reservation {
    let SegmentEntry { address, bytes, lifetime, capture, .. } = *segment;
    Reservation { address, bytes, lifetime, capture }
}

/// Takes `pages` from the budget, if it has as many.
fn afford(budget: &mut usize, pages: usize) -> bool {
    let left = budget.checked_sub(pages);
    *budget = left.unwrap_or(*budget);
    left.is_some()
}

fn spans<'a>(
    picture: &mut Picture,
    segments: impl Iterator<Item = &'a SegmentEntry>,
    budget: &mut usize,
) -> Vec<Part> {
    let mut parts = Vec::new();
    for segment in segments {
        let part = Part {
            address: segment.address,
            end: segment.address + segment.bytes,
            kind: RangeKind::Span,
            chunk: None,
            number: 0,
            lifetime: segment.lifetime,
            capture: segment.capture,
            reservation: None,
        };
        match afford(budget, part.pages()) {
            true => parts.push(part),
            false => picture.misfits.segments += 1,
        }
    }
    parts
}

/// Chunks and their pages.
fn chunks<'a>(
    picture: &mut Picture,
    segments: impl Iterator<Item = &'a SegmentEntry>,
    budget: &mut usize,
) -> BTreeMap<u32, u32> {
    let mut chunks = BTreeMap::new();
    for segment in segments {
        let pages = u32::try_from(segment.bytes / PAGE).unwrap_or(u32::MAX);
        let sound = segment.bytes % PAGE == 0 && pages <= CHUNK_PAGES;
        // A number may be used again: the old chunk's entry and the new one's, read at different
        // moments.
        if !sound || chunks.contains_key(&segment.chunk) || !afford(budget, pages as usize) {
            picture.misfits.segments += 1;
            continue;
        }
        chunks.insert(segment.chunk, pages);
    }
    chunks
}

/// The parts with pages of the arena; stale aliases go into the picture.
fn views<'a>(
    picture: &mut Picture,
    segments: impl Iterator<Item = &'a SegmentEntry>,
    chunks: &mut BTreeMap<u32, u32>,
    budget: &mut usize,
) -> Vec<Part> {
    let mut owned: HashMap<u32, u128> = HashMap::new();
    let mut parts = Vec::new();
    for view in segments {
        let told = u32::try_from(view.bytes / PAGE).unwrap_or(u32::MAX).min(CHUNK_PAGES);
        let aligned = view.address % PAGE == 0 && view.bytes % PAGE == 0;
        if !aligned || !afford(budget, told as usize) {
            picture.misfits.segments += 1;
            continue;
        }
        let pages = match chunks.entry(view.chunk) {
            Entry::Occupied(pages) => *pages.get(),
            Entry::Vacant(place) => {
                picture.misfits.chunks_missing += 1;
                if !afford(budget, told as usize) {
                    continue;
                }
                *place.insert(told)
            }
        };
        picture.misfits.segments += u64::from(u64::from(pages) * PAGE != view.bytes);
        let pages = pages.min(told);
        let there = if pages == CHUNK_PAGES { u128::MAX } else { (1 << pages) - 1 };
        let known = owned.entry(view.chunk).or_default();
        picture.misfits.pages_twice += u64::from((view.pages & there & *known).count_ones());
        let mine = view.pages & there & !*known;
        *known |= mine;
        let reservation = reservation_at(&picture.reservations, view.address);
        for (range, is_mine) in runs(mine, pages) {
            let address = view.address + u64::from(range.start) * PAGE;
            let end = view.address + u64::from(range.end) * PAGE;
            let (chunk, number) = (view.chunk, range.start);
            if !is_mine {
                let retired = view.pages == 0;
                picture.stale_aliases.push(StaleAlias {
                    address,
                    bytes: end - address,
                    chunk,
                    number,
                    retired,
                });
                continue;
            }
            let place = reservation.map(|place| &picture.reservations[place]);
            parts.push(Part {
                address,
                end,
                kind: RangeKind::Stitched,
                chunk: Some(chunk),
                number,
                lifetime: place.map_or(0, |place| place.lifetime),
                capture: place.map_or(0, |place| place.capture),
                reservation,
            });
        }
    }
    parts
}

fn reservation_at(reservations: &[Reservation], address: u64) -> Option<usize> {
    let at = reservations.partition_point(|place| place.address <= address).checked_sub(1)?;
    (address - reservations[at].address < reservations[at].bytes).then_some(at)
}

/// The runs of equal bits among the first `count`.
fn runs(bits: u128, count: u32) -> Vec<(std::ops::Range<u32>, bool)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < count {
        let set = bits >> at & 1 == 1;
        let same = if set { (bits >> at).trailing_ones() } else { (bits >> at).trailing_zeros() };
        let end = at.saturating_add(same).min(count);
        found.push((at..end, set));
        at = end;
    }
    found
}

/// Sorts by address and cuts overlaps.
fn apart(picture: &mut Picture, mut parts: Vec<Part>) -> Vec<Part> {
    parts.sort_by_key(|part| part.address);
    let mut end = 0;
    parts.retain_mut(|part| {
        if part.address < end {
            picture.misfits.segments += 1;
            // The pages before the cut are left out whole: their memory is another part's here.
            let cut = (end - part.address).div_ceil(PAGE);
            let Some(address) =
                cut.checked_mul(PAGE).and_then(|bytes| part.address.checked_add(bytes))
            else {
                return false;
            };
            if address >= part.end {
                return false;
            }
            part.address = address;
            part.number += cut as u32;
        }
        end = part.end;
        true
    });
    parts
}

/// Makes parts of blocks that begin in no part.
fn add_lone_blocks(
    picture: &mut Picture,
    parts: &mut Vec<Part>,
    blocks: &[Piece],
    budget: &mut usize,
) {
    let has_segments = !parts.is_empty();
    let mut lone: Vec<Part> = Vec::new();
    let mut next = 0;
    for block in blocks {
        while parts.get(next).is_some_and(|part| part.end <= block.address) {
            next += 1;
        }
        let before = parts.get(next).map_or(u64::MAX, |part| part.address);
        if before <= block.address {
            continue;
        }
        picture.misfits.blocks_alone += u64::from(has_segments);
        let end = block.end().min(before);
        match lone.last_mut() {
            Some(last) if last.end >= block.address => {
                // Joined, so that adjacent blocks share pages.
                let longer = Part { end: last.end.max(end), ..*last };
                if afford(budget, longer.pages() - last.pages()) {
                    *last = longer;
                }
            }
            _ => {
                let part = Part {
                    address: block.address,
                    end,
                    kind: RangeKind::Alone,
                    chunk: None,
                    number: 0,
                    lifetime: block.lifetime,
                    capture: block.capture,
                    reservation: None,
                };
                if afford(budget, part.pages()) {
                    lone.push(part);
                }
            }
        }
    }
    parts.extend(lone);
    parts.sort_by_key(|part| part.address);
}

/// Joins parts into ranges, and adds their pages.
fn lay_out(picture: &mut Picture, parts: &[Part]) {
    for part in parts {
        let first = picture.pages.len();
        let (mut address, mut number) = (part.address, part.number);
        while address < part.end {
            let bytes = PAGE.min(part.end - address);
            let (chunk, bytes_of) = (part.chunk, bytes as u32);
            picture.pages.push(Page {
                chunk,
                number,
                bytes: bytes_of,
                address: Some(address),
                ..Page::default()
            });
            address += bytes;
            number += 1;
        }
        let pages = first..picture.pages.len();
        match picture.ranges.last_mut() {
            // Its reservation's entry may be missing: then adjacent parts are one range.
            Some(last)
                if part.kind == RangeKind::Stitched
                    && last.kind == RangeKind::Stitched
                    && last.address + last.bytes == part.address
                    && reservation_at(&picture.reservations, last.address) == part.reservation =>
            {
                last.bytes += part.end - part.address;
                last.pages.end = pages.end;
            }
            _ => picture.ranges.push(Range {
                address: part.address,
                bytes: part.end - part.address,
                kind: part.kind,
                lifetime: part.lifetime,
                capture: part.capture,
                pieces: 0..0,
                pages,
            }),
        }
    }
}

/// Pages of chunks mapped nowhere.
fn add_spare(picture: &mut Picture, parts: &[Part], chunks: &BTreeMap<u32, u32>) {
    let mut mapped: HashMap<u32, u128> = HashMap::new();
    for part in parts {
        let Some(chunk) = part.chunk else { continue };
        let pages = mapped.entry(chunk).or_default();
        (part.number..part.number + part.pages() as u32).for_each(|page| *pages |= 1 << page);
    }
    for (&chunk, &pages) in chunks {
        let mapped = mapped.get(&chunk).copied().unwrap_or(0);
        for number in (0..pages).filter(|page| mapped >> page & 1 == 0) {
            picture.pages.push(Page {
                chunk: Some(chunk),
                number,
                bytes: PAGE as u32,
                ..Page::default()
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runs_of_a_mask_are_its_bits_up_to_the_longest_chunk() {
        assert_eq!(runs(0b0110, 4), [(0..1, false), (1..3, true), (3..4, false)]);
        assert_eq!(runs(u128::MAX, 128), [(0..128, true)]);
        assert_eq!(runs(0, 128), [(0..128, false)]);
        assert_eq!(runs(1 << 127, 128), [(0..127, false), (127..128, true)]);
        assert_eq!(runs(u128::MAX, 3), [(0..3, true)]);
        assert_eq!(runs(1, 0), []);
    }
}
