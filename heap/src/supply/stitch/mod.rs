//! Stitched pages: physical memory that can be mapped wherever a run of it is needed.
//!
//! A *chunk* is a physical handle of one or more pages. The driver maps and unmaps whole chunks only, but a chunk may be mapped at
//! several addresses at once; each mapping is a *view*. Every page of a chunk belongs to the arena at exactly one address, or to nobody: its
//! *owner*. So a move maps a second view of the chunk where its pages are needed and makes them belong there, a few pages of a chunk if
//! need be; work that still runs through the old view is ahead of them in stream order, and nobody waits. A view to which no page belongs any
//! more is *retired*; it is unmapped later, in batches, once the last work through it is known to be done.
//!
//! ```text
//!   chunk    (the driver's) -- create -->  spare: no page has an owner;  spare without views -- release --> (the driver's)
//!   page     nobody's  -- map -->  owned at one address  -- map elsewhere -->  owned there  -- disown -->  nobody's
//!   view     -- map -->  has pages  -- its last page goes -->  retired  -- unmap -->  gone
//!            -- map, then a later call of the same move fails -->  unmapped at once, or retired where that fails too
//! ```
//!
//! A move changes the owners only when every driver call of it has succeeded, so undoing one is to unmap what it mapped.

mod access;

use crate::driver::{DeviceId, Driver, PhysicalHandle, Result};
use crate::report::entry::Action;
use crate::small::size_class::PAGE;
use crate::supply::addresses::{Reservations, Row};
use crate::supply::chunk::{ChunkId, LONGEST_CHUNK};
use crate::supply::mapping_book::MappingBook;
use crate::supply::segment_log::SegmentLog;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// Stands for the owner of a page that belongs to nobody.
const NOBODY: u64 = 0;

/// A physical handle.
struct Chunk {
    handle: PhysicalHandle,
    /// By page: the address at which it belongs to the arena.
    owners: Box<[u64]>,
    /// Pages with an owner.
    owned: u32,
    /// Views, by their first byte.
    views: Vec<u64>,
}

impl Chunk {
    fn bytes(&self) -> u64 {
        self.owners.len() as u64 * PAGE
    }
}

/// A mapping of a whole chunk.
struct View {
    chunk: ChunkId,
    /// Pages that belong to the arena here.
    owned: u32,
    /// The last work through it on each stream, as far as pages have left it: (stream, epoch).
    uses: Vec<(u32, u64)>,
}

/// Pages of one chunk that belong to the arena next to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where they belong now.
    pub pages: Range<u64>,
    /// Their chunk.
    pub chunk: ChunkId,
    /// The first of them within the chunk.
    pub first: u32,
    /// Pages of the chunk behind them.
    pub behind: u32,
}

impl Part {
    /// How many pages.
    pub fn count(&self) -> u32 {
        ((self.pages.end - self.pages.start) / PAGE) as u32
    }

    /// Its first `count` pages.
    pub fn front(&self, count: u32) -> Self {
        let pages = self.pages.start..self.pages.start + u64::from(count) * PAGE;
        Self { pages, behind: self.behind + self.count() - count, ..self.clone() }
    }

    /// Its last `count` pages.
    pub fn back(&self, count: u32) -> Self {
        let pages = self.pages.end - u64::from(count) * PAGE..self.pages.end;
        Self { pages, first: self.first + self.count() - count, ..self.clone() }
    }
}

/// The stream and epoch of the last work on pages, where that is not known to be done.
type LastUse = Option<(u32, u64)>;

/// A part of a planned row, in the order of addresses.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The chunk.
    pub chunk: ChunkId,
    /// The first page within the chunk.
    pub first: u32,
    /// How many pages.
    pub count: u32,
}

/// The chunks of a device.
#[derive(Default)]
pub struct Pages {
    pub(crate) device: DeviceId,
    pub(crate) peers: Vec<DeviceId>,
    chunks: Vec<Option<Chunk>>,
    unused: Vec<ChunkId>,
    /// The address space that views lie in.
    pub reservations: Reservations,
    /// By first byte.
    views: BTreeMap<u64, View>,
    /// Views without pages, by first byte.
    retired: BTreeSet<u64>,
    /// Views that the driver has refused to unmap: it is asked for each alone from then on, so that it is in the way of no other.
    refused: BTreeSet<u64>,
    /// Views that not all of `peers` reach yet, because the driver refused.
    pub(crate) unshared: VecDeque<u64>,
    /// Chunks without owned pages.
    spare: Vec<ChunkId>,
    held: u64,
    owned: u64,
    /// Where pages come to belong and cease to, for the history.
    pub log: SegmentLog,
    /// Driver calls made.
    pub calls: u64,
    /// Those that failed.
    pub errors: u64,
    /// What of all this is on the record.
    pub book: MappingBook,
}

impl Pages {
    /// None yet.
    pub fn new(device: DeviceId) -> Self {
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
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Bytes that belong to the arena.
    pub fn owned(&self) -> u64 {
        self.owned * PAGE
    }

    /// Bytes of address space that views take, and to which no page belongs.
    pub fn shadowed(&self) -> u64 {
        let viewed: u64 =
            self.views.values().filter_map(|view| self.chunk(view.chunk)).map(Chunk::bytes).sum();
        viewed - self.owned()
    }

    /// Views that wait to be unmapped.
    pub fn retired(&self) -> usize {
        self.retired.len()
    }

    /// Bytes of chunks without owned pages.
    pub fn spare(&self) -> u64 {
        self.spare.iter().filter_map(|&id| self.chunk(id)).map(Chunk::bytes).sum()
    }

    /// The chunks without owned pages, whole.
    pub fn spare_pieces(&self) -> impl Iterator<Item = Piece> {
        let count = |id| self.chunk(id).map_or(0, |chunk| chunk.owners.len() as u32);
        self.spare.iter().map(move |&chunk| Piece { chunk, first: 0, count: count(chunk) })
    }

    /// Takes `bytes` (whole pages) from the driver, in chunks of at most `longest`, spare then.
    ///
    /// # Errors
    /// The driver's; what it gave before is spare.
    pub fn create(&mut self, driver: &dyn Driver, bytes: u64, longest: u64) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
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
        Ok(pieces)
    }

    fn add_chunk(&mut self, handle: PhysicalHandle, bytes: u64) -> ChunkId {
        let owners = vec![NOBODY; (bytes / PAGE) as usize].into();
        let chunk = Some(Chunk { handle, owners, owned: 0, views: Vec::new() });
        let id = match self.unused.pop() {
            Some(id) => {
                self.chunks[id as usize] = chunk;
                id
            }
            None => {
                self.chunks.push(chunk);
                self.chunks.len() as ChunkId - 1
            }
        };
        self.held += bytes;
        self.spare.push(id);
        self.book.add_chunk(id, bytes);
        id
    }

    /// The views that touch a range: first byte and view.
    fn views_in(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &View, &Chunk)> + use<'_> {
        let before = self.views.range(..range.start).next_back();
        let (start, views) = (range.start, before.into_iter().chain(self.views.range(range.clone())));
        views
            .filter_map(|(&address, view)| Some((address, view, self.chunk(view.chunk)?)))
            .filter(move |(address, _, chunk)| address + chunk.bytes() > start)
    }

    /// The parts of which a range of pages that belong to the arena consists.
    pub fn parts(&self, range: &Range<u64>) -> impl Iterator<Item = Part> + use<'_> {
        let range = range.clone();
        self.views_in(&range).map(move |(address, view, chunk)| part(&range, address, view, chunk))
    }

    /// As [`Pages::parts`], the last part first: one search in place of two.
    pub fn parts_back(&self, range: &Range<u64>) -> impl Iterator<Item = Part> + use<'_> {
        let range = range.clone();
        let start = range.start;
        let views = self.views.range(..range.end).rev();
        views
            .map_while(|(&address, view)| Some((address, view, self.chunk(view.chunk)?)))
            .take_while(move |(address, _, chunk)| address + chunk.bytes() > start)
            .map(move |(address, view, chunk)| part(&range, address, view, chunk))
    }

    /// Where the view at `address` lies.
    pub(crate) fn view_at(&self, address: u64) -> Option<Range<u64>> {
        let bytes = self.bytes_of(self.views.get(&address)?.chunk);
        Some(address..address + bytes)
    }

    /// Where all views lie, in the order of addresses.
    pub(crate) fn all_views(&self) -> impl Iterator<Item = Range<u64>> {
        self.views.keys().filter_map(|&address| self.view_at(address))
    }

    /// Address ranges of the views that touch a range and to which no page belongs.
    pub fn retired_in(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let views = self.views_in(range).filter(|(_, view, _)| view.owned == 0);
        views.map(|(address, _, chunk)| address..address + chunk.bytes()).collect()
    }

    /// Maps a row: the pages of `pieces`, one behind the other from `start` on. They belong there then. `sources` are those of them that
    /// belong elsewhere until then. Only the first piece may begin within its chunk and only the last may end within one; the address
    /// space that the rest of those two chunks takes before and behind the row must be free too.
    ///
    /// # Errors
    /// The driver's. Nothing belongs elsewhere then, and the views that could not be taken away again are retired.
    pub fn map<'a>(
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
            let (view, bytes, handle) = (next - u64::from(piece.first) * PAGE, chunk.bytes(), chunk.handle);
            let mapped = driver.map(self.device, view, bytes, handle);
            result = self.counted(mapped);
            if result.is_err() {
                break;
            }
            views.push(view..view + bytes);
            self.add_view(view, piece.chunk);
            next += u64::from(piece.count) * PAGE;
        }
        // A planned row lies in one void, which lies in one reservation.
        result = result.and_then(|()| self.grant(driver, &views));
        if result.is_err() {
            for view in views.into_iter().rev() {
                if self.unmap(driver, &view).is_ok() {
                    self.remove_view(view.start);
                }
            }
            return result;
        }
        for (part, used) in sources {
            self.disown(part.chunk, part.first..part.first + part.count(), used);
        }
        let mut next = start;
        for piece in pieces {
            self.own(piece.chunk, piece.first..piece.first + piece.count, next);
            next += u64::from(piece.count) * PAGE;
        }
        self.spare.retain(|&id| self.chunks[id as usize].as_ref().is_some_and(|chunk| chunk.owned == 0));
        if !self.unshared.is_empty() {
            self.share_rest(driver);
        }
        Ok(())
    }

    fn unmap(&mut self, driver: &dyn Driver, range: &Range<u64>) -> Result<()> {
        let result = driver.unmap(self.device, range.start, range.end - range.start);
        self.counted(result)
    }

    /// Adds a view, retired until a page belongs there.
    fn add_view(&mut self, address: u64, chunk: ChunkId) {
        self.views.insert(address, View { chunk, owned: 0, uses: Vec::new() });
        self.retired.insert(address);
        self.book.add_view(address, chunk, self.bytes_of(chunk));
        if let Some(chunk) = self.chunk_mut(chunk) {
            chunk.views.push(address);
        }
    }

    fn remove_view(&mut self, address: u64) {
        self.retired.remove(&address);
        self.refused.remove(&address);
        if !self.unshared.is_empty() {
            self.unshared.retain(|&other| other != address);
        }
        self.book.remove_view(address);
        if let Some(view) = self.views.remove(&address)
            && let Some(chunk) = self.chunk_mut(view.chunk)
        {
            chunk.views.retain(|&other| other != address);
        }
    }

    /// Pages of a chunk belong to the arena from `address` on, where a view of it is.
    fn own(&mut self, id: ChunkId, pages: Range<u32>, address: u64) {
        let count = pages.len() as u32;
        let start = address - u64::from(pages.start) * PAGE;
        self.book.own(start, pages.clone());
        let Some(chunk) = self.chunk_mut(id) else { return };
        for page in pages {
            chunk.owners[page as usize] = start + u64::from(page) * PAGE;
        }
        chunk.owned += count;
        self.owned += u64::from(count);
        self.log.note(Action::SegmentMap, address, u64::from(count) * PAGE);
        if let Some(view) = self.views.get_mut(&start) {
            view.owned += count;
            self.retired.remove(&start);
        }
    }

    /// Pages of a chunk, which belong next to each other, belong to nobody.
    fn disown(&mut self, id: ChunkId, pages: Range<u32>, used: LastUse) {
        let (first, count) = (pages.start, pages.len() as u32);
        let Some(chunk) = self.chunk_mut(id) else { return };
        let address = chunk.owners[first as usize];
        if address == NOBODY {
            return;
        }
        chunk.owners[first as usize..pages.end as usize].fill(NOBODY);
        chunk.owned -= count;
        self.owned -= u64::from(count);
        self.log.note(Action::SegmentUnmap, address, u64::from(count) * PAGE);
        let start = address - u64::from(first) * PAGE;
        self.book.disown(start, pages);
        let Some(view) = self.views.get_mut(&start) else { return };
        view.owned -= count;
        if view.owned == 0 {
            self.retired.insert(start);
        }
        let Some((stream, epoch)) = used else { return };
        match view.uses.iter_mut().find(|other| other.0 == stream) {
            Some(other) => other.1 = other.1.max(epoch),
            None => view.uses.push((stream, epoch)),
        }
    }

    /// The pages of a part belong to nobody any more. All work on them must be done.
    pub fn abandon(&mut self, part: &Part) {
        self.disown(part.chunk, part.first..part.first + part.count(), None);
        if self.chunk(part.chunk).is_some_and(|chunk| chunk.owned == 0) {
            self.spare.push(part.chunk);
        }
    }

    /// The length of a chunk; 0: there is none.
    pub fn bytes_of(&self, id: ChunkId) -> u64 {
        self.chunk(id).map_or(0, Chunk::bytes)
    }

    /// Unmaps the retired views whose work is done (`completed` tells the last epoch that a stream is past), neighbours in one call; where that fails, each
    /// by itself. The address ranges that are clear now.
    pub fn unmap_retired(&mut self, driver: &dyn Driver, completed: &dyn Fn(u32) -> u64) -> Vec<Range<u64>> {
        let is_done = |view: &View| view.uses.iter().all(|&(stream, epoch)| completed(stream) >= epoch);
        let range = |&address: &u64| {
            let view = self.views.get(&address).filter(|view| is_done(view))?;
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

    fn forget_views(&mut self, row: Row, clear: &mut Vec<Range<u64>>) {
        row.views.iter().for_each(|view| self.remove_view(view.start));
        clear.push(row.range);
    }

    /// Gives spare chunks without views back to the driver, `most` bytes of them. The bytes given.
    pub fn release(&mut self, driver: &dyn Driver, most: u64) -> u64 {
        let mut given = 0;
        for id in std::mem::take(&mut self.spare) {
            let Some(chunk) = self.chunk(id) else { continue };
            let (bytes, handle) = (chunk.bytes(), chunk.handle);
            let released = chunk.views.is_empty() && given + bytes <= most && {
                let result = driver.physical_release(self.device, handle);
                self.counted(result).is_ok()
            };
            if released {
                self.chunks[id as usize] = None;
                self.unused.push(id);
                self.book.remove_chunk(id);
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
    /// What is wrong.
    pub fn validate(&self) -> std::result::Result<(), String> {
        let (mut held, mut owned, mut views) = (0, 0, 0);
        for (id, chunk) in self.chunks.iter().enumerate() {
            let Some(chunk) = chunk else { continue };
            held += chunk.bytes();
            views += chunk.views.len();
            let mut here = vec![0u32; chunk.views.len()];
            self.book.validate(&chunk.views, &chunk.owners)?;
            for (page, &owner) in chunk.owners.iter().enumerate().filter(|page| *page.1 != NOBODY) {
                owned += 1;
                let view = owner - page as u64 * PAGE;
                let Some(at) = chunk.views.iter().position(|&other| other == view) else {
                    return Err(format!(
                        "page {page} of chunk {id} belongs to {owner:#x}, where it is not mapped"
                    ));
                };
                here[at] += 1;
            }
            for (&view, owned) in chunk.views.iter().zip(&here) {
                if self.reservations.end_of(view).is_none_or(|end| view + chunk.bytes() > end) {
                    return Err(format!("the view at {view:#x} of chunk {id} lies in no one reservation"));
                }
                let known = self.views.get(&view);
                if !known.is_some_and(|view| view.chunk as usize == id && view.owned == *owned)
                    || self.retired.contains(&view) != (*owned == 0)
                {
                    return Err(format!("the view at {view:#x} of chunk {id} is miscounted"));
                }
            }
            if chunk.owned != here.iter().sum::<u32>()
                || (chunk.owned == 0) != self.spare.contains(&(id as u32))
            {
                return Err(format!("chunk {id} is miscounted"));
            }
        }
        if (held, owned, views) != (self.held, self.owned, self.views.len()) {
            return Err(format!(
                "chunks hold {held} B and {owned} pages in {views} views, the books say otherwise"
            ));
        }
        Ok(())
    }
}

/// What a view of a chunk at `address` has of a range.
fn part(range: &Range<u64>, address: u64, view: &View, chunk: &Chunk) -> Part {
    let pages = address.max(range.start)..(address + chunk.bytes()).min(range.end);
    let (first, end) = ((pages.start - address) / PAGE, (pages.end - address) / PAGE);
    let behind = chunk.owners.len() as u64 - end;
    Part { pages, chunk: view.chunk, first: first as u32, behind: behind as u32 }
}
