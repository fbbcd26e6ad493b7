//! Pieces: the blocks of each range, and the memory between them.

use super::{NO_STREAM, PAGE, Page, Picture, Piece, PieceKind, Range};
use crate::sites::SiteId;
use crate::{BlockEntry, BlockState, SegmentEntry};

/// The device's blocks as pieces, by address.
pub fn blocks_of(picture: &mut Picture, blocks: &[(BlockEntry, BlockState)]) -> Vec<Piece> {
    let mut found = Vec::new();
    for (block, state) in
        blocks.iter().filter(|(block, _)| u32::from(block.device) == picture.device)
    {
        if block.size == 0
            || block.address.checked_add(block.size).is_none()
            || *state == BlockState::Free
        {
            picture.misfits.blocks_dropped += 1;
            continue;
        }
        found.push(Piece {
            address: block.address,
            bytes: block.size,
            requested: block.requested,
            slot: 0,
            stream: block.stream,
            step: block.step,
            kind: PieceKind::from(*state),
            lifetime: block.lifetime,
            capture: block.capture,
            is_sent: block.is_sent,
            site: block.site,
        });
    }
    // Of two at one address, the longer comes first and stays.
    found.sort_unstable_by_key(|piece| (piece.address, u64::MAX - piece.bytes));
    found
}

/// Tiles every range. Both lists are by address.
pub fn tile(picture: &mut Picture, slabs: &[SegmentEntry], blocks: &mut [Piece]) {
    let mut ranges = std::mem::take(&mut picture.ranges);
    let (mut slab, mut block) = (0, 0);
    for range in &mut ranges {
        let mut tiler = Tiler { picture, slabs, blocks, slab, block, at: range.address };
        range.pieces = tiler.range(range);
        (slab, block) = (tiler.slab, tiler.block);
    }
    picture.misfits.slabs += (slabs.len() - slab) as u64;
    picture.misfits.blocks_dropped += (blocks.len() - block) as u64;
    picture.ranges = ranges;
}

/// Walks through one range.
struct Tiler<'a> {
    picture: &'a mut Picture,
    slabs: &'a [SegmentEntry],
    blocks: &'a [Piece],
    /// The next slab.
    slab: usize,
    /// The next block.
    block: usize,
    /// End of the tiled part.
    at: u64,
}

impl Tiler<'_> {
    /// The pieces of `range`.
    fn range(&mut self, range: &mut Range) -> std::ops::Range<usize> {
        let first = self.picture.pieces.len();
        let end = range.address + range.bytes;
        let nothing = Piece {
            address: 0,
            bytes: 0,
            requested: 0,
            slot: 0,
            stream: NO_STREAM,
            step: 0,
            kind: PieceKind::FreeRun,
            lifetime: range.lifetime,
            capture: range.capture,
            is_sent: false,
            site: SiteId::NONE,
        };
        loop {
            let slab = self.next_slab(end);
            let before = slab.map_or(end, |slab| slab.address);
            if let Some(block) = self.next_block(before) {
                self.fill(block.address, nothing);
                self.place(block, before);
            } else if let Some(slab) = slab {
                self.fill(slab.address, nothing);
                self.slab(&slab, end);
            } else {
                break;
            }
        }
        self.fill(end, nothing);
        let pieces = first..self.picture.pieces.len();
        spread(&self.picture.pieces[pieces.clone()], range, &mut self.picture.pages);
        pieces
    }

    /// The next slab that begins before `end` and after the tiled part.
    fn next_slab(&mut self, end: u64) -> Option<SegmentEntry> {
        loop {
            let slab = self.slabs.get(self.slab).filter(|slab| slab.address < end)?;
            if slab.address >= self.at && slab.slot > 0 && slab.slot <= slab.bytes {
                return Some(*slab);
            }
            self.picture.misfits.slabs += 1;
            self.slab += 1;
        }
    }

    /// Consumes the next block that begins before `end` and after the tiled part.
    fn next_block(&mut self, end: u64) -> Option<Piece> {
        loop {
            let block = *self.blocks.get(self.block).filter(|block| block.address < end)?;
            self.block += 1;
            if block.address >= self.at {
                return Some(block);
            }
            self.picture.misfits.blocks_dropped += 1;
        }
    }

    /// `like` up to `end`.
    fn fill(&mut self, end: u64, like: Piece) {
        if end > self.at {
            self.picture.pieces.push(Piece { address: self.at, bytes: end - self.at, ..like });
            self.at = end;
        }
    }

    /// Adds a block at the end of the tiled part, up to `most`.
    fn place(&mut self, block: Piece, most: u64) {
        let end = block.end().min(most);
        self.picture.misfits.blocks_cut += u64::from(end < block.end());
        self.fill(end, block);
    }

    /// Adds a slab at the end of the tiled part.
    fn slab(&mut self, slab: &SegmentEntry, range_end: u64) {
        self.slab += 1;
        let told = slab.address + slab.bytes;
        let end = told.min(range_end);
        self.picture.misfits.slabs += u64::from(end < told);
        let slots_end = slab.address + slab.bytes / slab.slot * slab.slot;
        let like = Piece {
            address: 0,
            bytes: 0,
            requested: 0,
            slot: slab.slot,
            stream: slab.stream,
            step: 0,
            kind: PieceKind::IdleSlab,
            lifetime: slab.lifetime,
            capture: slab.capture,
            is_sent: false,
            site: SiteId::NONE,
        };
        let mut idle = true;
        while let Some(block) = self.next_block(end) {
            idle = false;
            self.between_slots(slab, slots_end, block.address, like);
            let offset = (block.address - slab.address) % slab.slot;
            self.picture.misfits.blocks_off_slot +=
                u64::from(offset != 0 || block.bytes > slab.slot);
            // The request that made the slab stands for all that share it.
            let site = if block.site == SiteId::NONE { slab.site } else { block.site };
            self.place(Piece { slot: slab.slot, site, ..block }, end);
        }
        if idle {
            self.fill(end, like);
        } else {
            self.between_slots(slab, slots_end, end, like);
        }
    }

    /// Fills from the end of a slab's block to `to`: the rest of its slot, free slots, the tail.
    fn between_slots(&mut self, slab: &SegmentEntry, slots_end: u64, to: u64, like: Piece) {
        let inside = (self.at - slab.address) % slab.slot;
        if inside != 0 && self.at < slots_end {
            let slot_end = self.at - inside + slab.slot;
            self.fill(slot_end.min(to), Piece { kind: PieceKind::SlotRest, ..like });
        }
        self.fill(slots_end.min(to), Piece { kind: PieceKind::FreeSlots, ..like });
        self.fill(to, Piece { kind: PieceKind::SlabTail, ..like });
    }
}

/// Adds the pieces of a range to the sums of its pages.
fn spread(pieces: &[Piece], range: &Range, pages: &mut [Page]) {
    let pages = &mut pages[range.pages.clone()];
    for piece in pieces {
        let mut at = piece.address;
        while at < piece.end() {
            let offset = at - range.address;
            let end = piece.end().min(range.address.saturating_add((offset / PAGE + 1) * PAGE));
            let Some(page) = pages.get_mut((offset / PAGE) as usize) else { return };
            let sum = match piece.kind {
                PieceKind::Live => &mut page.live,
                PieceKind::Pending => &mut page.pending,
                PieceKind::FreeRun | PieceKind::IdleSlab => &mut page.free,
                PieceKind::FreeSlots | PieceKind::SlotRest | PieceKind::SlabTail => {
                    &mut page.slab_free
                }
            };
            *sum += (end - at) as u32;
            at = end;
        }
    }
}
