//! Stitched pages: physical memory that can be mapped wherever a row of it is needed.
//!
//! A *chunk* is a physical handle of one or more pages. The driver maps and unmaps whole chunks
//! only, but a chunk may be mapped at several addresses at once; each mapping is a *view*. Every
//! page of a chunk belongs to the arena at one address at most: its *owner*. So a move maps a
//! second view of the chunk where its pages are needed and makes them belong there, a few pages of
//! a chunk if need be; work that still runs through the old view is ahead of them in stream order,
//! and no stream waits. A view without pages is *retired*; it is unmapped later, in batches, the
//! oldest first, once the last work through it is known to be done.
//!
//! ```text
//!   chunk    (the driver's)  -- create -->  spare: no page has an owner
//!            spare, without views  -- release -->  (the driver's)
//!   page     unowned  -- map -->  owned at one address  -- map elsewhere -->  owned there
//!            -- disown -->  unowned
//!   view     -- map -->  has pages  -- its last page goes -->  retired  -- unmap -->  gone
//!            -- map, then a later call of the same move fails -->  unmapped at once, or retired
//!                                                                  where that fails too
//! ```
//!
//! A move changes the owners only after every driver call of it has succeeded, so undoing it means
//! unmapping what it mapped.

use crate::driver::{DeviceId, Driver, PhysicalHandle, Result};
use crate::journal::{Action, SegmentLog};
use crate::small::size_class::PAGE;
use crate::supply::pages::mapping_book::MappingBook;
use crate::supply::pages::reservations::{Reservations, Row};
use crate::supply::pages::{ChunkId, LONGEST_CHUNK};
use gruyere_record::SegmentSlot;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;

// A view's pages are the bits of one number.
const _: () = assert!(LONGEST_CHUNK / PAGE <= u64::BITS as u64);

struct Chunk {
    handle: PhysicalHandle,
    /// Number of its pages.
    pages: u32,
    /// Pages that belong to the arena, in one of its views.
    owned: u32,
    /// Number of its views.
    views: u32,
    /// Its place in the record.
    slot: SegmentSlot,
}

impl Chunk {
    fn bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE
    }
}

struct View {
    chunk: ChunkId,
    /// The pages of the chunk that belong to the arena here, a bit each.
    pages: u64,
    /// For each stream, the last work through the view by pages that have left it: (stream, epoch).
    uses: Vec<(u32, u64)>,
    /// Its place in the record.
    slot: SegmentSlot,
    /// In the order in which the views were made.
    number: u64,
}

/// A whole chunk at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) handle: PhysicalHandle,
    /// No other mapping of the device, past or to come, has this number.
    pub(crate) number: u64,
}

fn bits(first: u32, count: u32) -> u64 {
    u64::MAX.checked_shr(u64::BITS - count).unwrap_or(0) << first
}

/// Adjacent pages of one chunk, adjacent in the arena too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The addresses of the pages now.
    pub(crate) pages: Range<u64>,
    /// Their chunk.
    pub(crate) chunk: ChunkId,
    /// The first page, within the chunk.
    pub(crate) first: u32,
    /// Pages of the chunk behind these.
    pub(crate) behind: u32,
}

impl Part {
    /// Number of pages.
    pub(crate) fn count(&self) -> u32 {
        ((self.pages.end - self.pages.start) / PAGE) as u32
    }

    /// Its first `count` pages.
    pub(crate) fn front(&self, count: u32) -> Self {
        let pages = self.pages.start..self.pages.start + u64::from(count) * PAGE;
        Self { pages, behind: self.behind + self.count() - count, ..self.clone() }
    }

    /// Its last `count` pages.
    pub(crate) fn back(&self, count: u32) -> Self {
        let pages = self.pages.end - u64::from(count) * PAGE..self.pages.end;
        Self { pages, first: self.first + self.count() - count, ..self.clone() }
    }
}

/// The stream and epoch of the last work on pages, unless known to be done.
type LastUse = Option<(u32, u64)>;

/// A part of a planned row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) chunk: ChunkId,
    /// The first page, within the chunk.
    pub(crate) first: u32,
    /// Number of pages.
    pub(crate) count: u32,
}

#[derive(Default)]
pub(crate) struct Pages {
    pub(crate) device: DeviceId,
    pub(crate) peers: Vec<DeviceId>,
    chunks: Vec<Option<Chunk>>,
    unused: Vec<ChunkId>,
    /// The address space of the views.
    pub(crate) reservations: Reservations,
    /// The views by first byte.
    views: BTreeMap<u64, View>,
    /// Views without pages, by first byte, numbered in the order in which they retired.
    retired: BTreeMap<u64, u64>,
    next_retired: u64,
    next_view: u64,
    /// Views that the driver refused to unmap: from then on each has a call of its own, so that it
    /// blocks no other.
    refused: BTreeSet<u64>,
    /// Views that some of `peers` cannot reach yet, because the driver refused.
    pub(crate) unshared: VecDeque<u64>,
    /// Chunks without owned pages.
    spare: Vec<ChunkId>,
    held: u64,
    owned: u64,
    /// Pages that gained or lost an owner, for the history.
    pub(crate) log: SegmentLog,
    pub(crate) calls: u64,
    pub(crate) errors: u64,
    /// The record's entries of all this.
    pub(crate) book: MappingBook,
}

impl Pages {
    /// The pages of a device without chunks.
    pub(crate) fn new(device: DeviceId) -> Self {
        Self { device, log: SegmentLog::new(device), ..Self::default() }
    }

    pub(crate) fn counted<T>(&mut self, result: Result<T>) -> Result<T> {
        self.calls += 1;
        self.errors += u64::from(result.is_err());
        result
    }

    fn chunk(&self, id: ChunkId) -> Option<&Chunk> {
        self.chunks.get(id as usize)?.as_ref()
    }

    fn chunk_mut(&mut self, id: ChunkId) -> Option<&mut Chunk> {
        self.chunks.get_mut(id as usize)?.as_mut()
    }

    /// Physical bytes held.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    /// Bytes that belong to the arena.
    pub(crate) fn owned(&self) -> u64 {
        self.owned * PAGE
    }

    /// Bytes of stale aliases: address space of views without an owned page there.
    pub(crate) fn stale_alias_bytes(&self) -> u64 {
        let viewed: u64 =
            self.views.values().filter_map(|view| self.chunk(view.chunk)).map(Chunk::bytes).sum();
        viewed - self.owned()
    }

    /// Number of views that wait to be unmapped.
    pub(crate) fn retired(&self) -> usize {
        self.retired.len()
    }

    /// Bytes of chunks without owned pages.
    pub(crate) fn spare(&self) -> u64 {
        self.spare.iter().filter_map(|&id| self.chunk(id)).map(Chunk::bytes).sum()
    }

    /// The chunks without owned pages, whole.
    pub(crate) fn spare_pieces(&self) -> impl Iterator<Item = Piece> {
        let count = |id| self.chunk(id).map_or(0, |chunk| chunk.pages);
        self.spare.iter().map(move |&chunk| Piece { chunk, first: 0, count: count(chunk) })
    }

    /// Takes `bytes` (whole pages) from the driver as spare chunks of at most `longest`, and adds
    /// them to `pieces`.
    ///
    /// # Errors
    /// The driver's error; chunks that it gave before are spare.
    pub(crate) fn create(
        &mut self,
        driver: &dyn Driver,
        bytes: u64,
        longest: u64,
        pieces: &mut Vec<Piece>,
    ) -> Result<()> {
        let (mut left, mut longest) = (bytes, longest.clamp(PAGE, LONGEST_CHUNK));
        while left > 0 {
            let length = left.min(longest);
            let result = driver.physical_create(self.device, length);
            match self.counted(result) {
                Ok(handle) => {
                    let chunk = self.add_chunk(handle, length);
                    pieces.push(Piece { chunk, first: 0, count: (length / PAGE) as u32 });
                    left -= length;
                }
                // A nearly full device may still have it in pieces.
                Err(error) if error.is_out_of_memory() && length > PAGE => {
                    longest = (length / 2).next_multiple_of(PAGE);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn add_chunk(&mut self, handle: PhysicalHandle, bytes: u64) -> ChunkId {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.chunks.push(None);
            self.chunks.len() as ChunkId - 1
        });
        let (pages, slot) = ((bytes / PAGE) as u32, self.book.add_chunk(id, bytes));
        self.chunks[id as usize] = Some(Chunk { handle, pages, owned: 0, views: 0, slot });
        self.held += bytes;
        self.spare.push(id);
        id
    }

    /// The views that touch a range, by first byte, with their chunks.
    fn views_in(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &View, &Chunk)> + use<'_> {
        let before = self.views.range(..range.start).next_back();
        let (start, views) =
            (range.start, before.into_iter().chain(self.views.range(range.clone())));
        views
            .filter_map(|(&address, view)| Some((address, view, self.chunk(view.chunk)?)))
            .filter(move |(address, _, chunk)| address + chunk.bytes() > start)
    }

    /// The mappings that touch a range, by address.
    pub(crate) fn mappings(&self, range: &Range<u64>) -> impl Iterator<Item = Mapping> + use<'_> {
        self.views_in(range).map(|(address, view, chunk)| Mapping {
            address,
            bytes: chunk.bytes(),
            handle: chunk.handle,
            number: view.number,
        })
    }

    /// The parts that make up a range of owned pages.
    pub(crate) fn parts(&self, range: &Range<u64>) -> impl Iterator<Item = Part> + use<'_> {
        let range = range.clone();
        self.views_in(&range).map(move |(address, view, chunk)| part(&range, address, view, chunk))
    }

    /// As [`Pages::parts`], the last part first: one search in place of two.
    pub(crate) fn parts_back(&self, range: &Range<u64>) -> impl Iterator<Item = Part> + use<'_> {
        let range = range.clone();
        let start = range.start;
        let views = self.views.range(..range.end).rev();
        views
            .map_while(|(&address, view)| Some((address, view, self.chunk(view.chunk)?)))
            .take_while(move |(address, _, chunk)| address + chunk.bytes() > start)
            .map(move |(address, view, chunk)| part(&range, address, view, chunk))
    }

    /// The range of the view at `address`.
    pub(crate) fn view_at(&self, address: u64) -> Option<Range<u64>> {
        let bytes = self.bytes_of(self.views.get(&address)?.chunk);
        Some(address..address + bytes)
    }

    /// The ranges of all views, by address.
    pub(crate) fn all_views(&self) -> impl Iterator<Item = Range<u64>> {
        self.views.keys().filter_map(|&address| self.view_at(address))
    }

    /// The ranges of the views without pages that touch a range.
    pub(crate) fn retired_in(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let views = self.views_in(range).filter(|(_, view, _)| view.pages == 0);
        views.map(|(address, _, chunk)| address..address + chunk.bytes()).collect()
    }

    /// Maps a row: the pages of `pieces`, one behind the other from `start` on, then belong there.
    /// `sources` are those that belong elsewhere until then. Only the first piece may begin within
    /// its chunk and only the last may end within one; the address space of the rest of those two
    /// chunks, before and behind the row, must be free too.
    ///
    /// # Errors
    /// The driver's error. All pages then belong where they did, and views that could not be
    /// unmapped again are retired.
    pub(crate) fn map<'a>(
        &mut self,
        driver: &dyn Driver,
        start: u64,
        pieces: &[Piece],
        sources: impl IntoIterator<Item = (&'a Part, LastUse)>,
    ) -> Result<()> {
        let (mut next, mut views) = (start, Vec::with_capacity(pieces.len()));
        let mut result = Ok(());
        for piece in pieces {
            let Some(chunk) = self.chunk(piece.chunk) else { continue };
            let (view, bytes, handle) =
                (next - u64::from(piece.first) * PAGE, chunk.bytes(), chunk.handle);
            let mapped = driver.map(self.device, view, bytes, handle);
            result = self.counted(mapped);
            if result.is_err() {
                break;
            }
            views.push(view..view + bytes);
            next += u64::from(piece.count) * PAGE;
        }
        // A planned row lies in one unmapped range, and that in one reservation.
        result = result.and_then(|()| self.grant(driver, &views));
        if result.is_err() {
            for (view, piece) in views.into_iter().zip(pieces).rev() {
                match self.unmap(driver, &view) {
                    Ok(()) => self.unshared.retain(|&other| other != view.start),
                    Err(_) => self.add_view(view.start, piece.chunk, 0),
                }
            }
            return result;
        }
        for (part, used) in sources {
            self.disown(part, used);
        }
        let mut next = start;
        for piece in pieces {
            self.own(piece, next);
            next += u64::from(piece.count) * PAGE;
        }
        self.spare
            .retain(|&id| self.chunks[id as usize].as_ref().is_some_and(|chunk| chunk.owned == 0));
        if !self.unshared.is_empty() {
            self.share_rest(driver);
        }
        Ok(())
    }

    fn unmap(&mut self, driver: &dyn Driver, range: &Range<u64>) -> Result<()> {
        let result = driver.unmap(self.device, range.start, range.end - range.start);
        self.counted(result)
    }

    /// Adds a view; these pages of the chunk belong to the arena there (0: it is retired).
    fn add_view(&mut self, address: u64, id: ChunkId, pages: u64) {
        let Some(chunk) = self.chunk_mut(id) else { return };
        chunk.views += 1;
        chunk.owned += pages.count_ones();
        let slot = self.book.add_view(address, id, self.bytes_of(id), pages);
        self.owned += u64::from(pages.count_ones());
        let number = self.next_view;
        self.next_view += 1;
        self.views.insert(address, View { chunk: id, pages, uses: Vec::new(), slot, number });
        if pages == 0 {
            self.retire(address);
        }
    }

    fn retire(&mut self, address: u64) {
        self.retired.insert(address, self.next_retired);
        self.next_retired += 1;
    }

    fn remove_view(&mut self, address: u64) {
        self.retired.remove(&address);
        self.refused.remove(&address);
        if !self.unshared.is_empty() {
            self.unshared.retain(|&other| other != address);
        }
        let Some(view) = self.views.remove(&address) else { return };
        self.book.remove(view.slot);
        if let Some(chunk) = self.chunk_mut(view.chunk) {
            chunk.views -= 1;
        }
    }

    /// Gives the pages of a piece to the arena from `address` on, where its chunk has been mapped.
    fn own(&mut self, piece: &Piece, address: u64) {
        let &Piece { chunk, first, count } = piece;
        self.add_view(address - u64::from(first) * PAGE, chunk, bits(first, count));
        self.log.note(Action::SegmentMap, address, u64::from(count) * PAGE);
    }

    /// Takes the pages of a part from the arena.
    fn disown(&mut self, part: &Part, used: LastUse) {
        let (address, count) = (part.pages.start, part.count());
        let start = address - u64::from(part.first) * PAGE;
        let Some(view) = self.views.get_mut(&start) else { return };
        let pages = bits(part.first, count);
        if view.pages & pages == 0 {
            return;
        }
        view.pages &= !pages;
        self.book.set_pages(view.slot, view.pages);
        if let Some((stream, epoch)) = used {
            match view.uses.iter_mut().find(|other| other.0 == stream) {
                Some(other) => other.1 = other.1.max(epoch),
                None => view.uses.push((stream, epoch)),
            }
        }
        if view.pages == 0 {
            self.retire(start);
        }
        if let Some(chunk) = self.chunk_mut(part.chunk) {
            chunk.owned -= count;
        }
        self.owned -= u64::from(count);
        self.log.note(Action::SegmentUnmap, address, u64::from(count) * PAGE);
    }

    /// Takes the pages of a part from the arena for good. All work on them must be done.
    pub(crate) fn abandon(&mut self, part: &Part) {
        self.disown(part, None);
        if self.chunk(part.chunk).is_some_and(|chunk| chunk.owned == 0) {
            self.spare.push(part.chunk);
        }
    }

    /// The length of a chunk; 0: no such chunk.
    pub(crate) fn bytes_of(&self, id: ChunkId) -> u64 {
        self.chunk(id).map_or(0, Chunk::bytes)
    }

    /// Unmaps the retired views with finished work (`completed` returns the last epoch that a
    /// stream is past), but for the last `keep` that retired: neighbours in one call, or each by
    /// itself if that fails. Returns the address ranges now clear.
    pub(crate) fn unmap_retired(
        &mut self,
        driver: &dyn Driver,
        completed: &dyn Fn(u32) -> u64,
        keep: usize,
    ) -> Vec<Range<u64>> {
        let first_kept = self.first_of_last_retired(keep);
        let is_done =
            |view: &View| view.uses.iter().all(|&(stream, epoch)| completed(stream) >= epoch);
        let range = |(&address, &number): (&u64, &u64)| {
            let goes = |view: &&View| number < first_kept && is_done(view);
            let view = self.views.get(&address).filter(goes)?;
            Some((address..address + self.bytes_of(view.chunk), self.refused.contains(&address)))
        };
        let rows = self.reservations.rows(self.retired.iter().filter_map(range));
        let mut clear = Vec::new();
        for row in rows {
            match self.unmap(driver, &row.range) {
                Ok(()) => self.forget_views(row, &mut clear),
                Err(error) if error.is_final() => return clear,
                Err(_) if row.views.len() == 1 => {
                    self.refused.insert(row.range.start);
                }
                // One bad mapping must not keep its neighbours.
                Err(_) => {
                    for view in row.views {
                        match self.unmap(driver, &view) {
                            Ok(()) => self.forget_views(Row::of(view), &mut clear),
                            Err(_) => {
                                self.refused.insert(view.start);
                            }
                        }
                    }
                }
            }
        }
        clear
    }

    /// The number of the first among the last `count` views that retired; after all of them, none.
    fn first_of_last_retired(&self, count: usize) -> u64 {
        let mut numbers: Vec<u64> = self.retired.values().copied().collect();
        numbers.sort_unstable();
        let first = numbers.len().saturating_sub(count);
        numbers.get(first).copied().unwrap_or(self.next_retired)
    }

    fn forget_views(&mut self, row: Row, clear: &mut Vec<Range<u64>>) {
        row.views.iter().for_each(|view| self.remove_view(view.start));
        clear.push(row.range);
    }

    /// Returns up to `most` bytes of spare chunks without views to the driver; the bytes returned.
    pub(crate) fn release(&mut self, driver: &dyn Driver, most: u64) -> u64 {
        let mut given = 0;
        for id in std::mem::take(&mut self.spare) {
            let Some(chunk) = self.chunk(id) else { continue };
            let (bytes, handle, slot) = (chunk.bytes(), chunk.handle, chunk.slot);
            let released = chunk.views == 0 && given + bytes <= most && {
                let result = driver.physical_release(self.device, handle);
                self.counted(result).is_ok()
            };
            if released {
                self.chunks[id as usize] = None;
                self.unused.push(id);
                self.book.remove(slot);
                self.held -= bytes;
                given += bytes;
            } else {
                self.spare.push(id);
            }
        }
        given
    }

    /// Checks the counts against the owners and the views.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn validate(&self) -> std::result::Result<(), String> {
        // Each chunk's views, and their pages.
        let mut found = HashMap::new();
        for (&address, view) in &self.views {
            let wrong = |what: &str| {
                Err(format!("the view at {address:#x} of chunk {} {what}", view.chunk))
            };
            let Some(chunk) = self.chunk(view.chunk) else { return wrong("names no chunk") };
            if self.reservations.end_of(address).is_none_or(|end| address + chunk.bytes() > end) {
                return wrong("is not within one reservation");
            }
            let (views, pages) = found.entry(view.chunk).or_insert((0, 0));
            if *pages & view.pages != 0 || view.pages & !bits(0, chunk.pages) != 0 {
                return wrong("has pages that belong elsewhere");
            }
            if self.retired.contains_key(&address) != (view.pages == 0) {
                return wrong("is retired and has pages, or neither");
            }
            *views += 1;
            *pages |= view.pages;
        }
        let (mut held, mut owned) = (0, 0);
        for (id, chunk) in self.chunks.iter().enumerate() {
            let Some(chunk) = chunk else { continue };
            held += chunk.bytes();
            owned += u64::from(chunk.owned);
            let (views, pages) = found.get(&(id as ChunkId)).copied().unwrap_or_default();
            if (chunk.views, chunk.owned) != (views, pages.count_ones())
                || (chunk.owned == 0) != self.spare.contains(&(id as ChunkId))
            {
                return Err(format!("chunk {id} is miscounted"));
            }
        }
        let retired = self.views.values().filter(|view| view.pages == 0).count();
        if (held, owned, retired) != (self.held, self.owned, self.retired.len()) {
            return Err(format!(
                "chunks hold {held} B and {owned} pages and have {retired} retired views, the \
                 books say otherwise"
            ));
        }
        Ok(())
    }
}

/// The part of a range in a view of a chunk at `address`.
fn part(range: &Range<u64>, address: u64, view: &View, chunk: &Chunk) -> Part {
    let pages = address.max(range.start)..(address + chunk.bytes()).min(range.end);
    let (first, end) = ((pages.start - address) / PAGE, (pages.end - address) / PAGE);
    let behind = u64::from(chunk.pages) - end;
    Part { pages, chunk: view.chunk, first: first as u32, behind: behind as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bits_of_pages_are_theirs_up_to_the_longest_chunk() {
        let most = (LONGEST_CHUNK / PAGE) as u32;
        assert_eq!(bits(3, 0), 0);
        assert_eq!(bits(1, 3), 0b1110);
        assert_eq!(bits(0, most).count_ones(), most);
        assert_eq!(bits(most - 1, 1), 1 << (most - 1));
        assert_eq!(bits(0, u64::BITS), u64::MAX);
    }
}
