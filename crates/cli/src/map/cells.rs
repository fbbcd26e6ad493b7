//! Cells: the memory of a device cut into equal parts, in order of addresses or of physical pages,
//! with the contents of each part.

use super::strokes::{CLASSES, Classes, INKS, Ink, Stroke, of_range};
use gruyere_record::picture::{Page, Picture};

/// An equal part of the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// Start: an address, or in the physical view a chunk and a page.
    pub place: Place,
    /// Bytes by ink.
    pub inks: [u64; INKS],
    /// Live bytes by class.
    pub classes: [u64; CLASSES],
}

impl Cell {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.inks.iter().sum()
    }

    /// Bytes of one ink.
    pub fn of(&self, ink: Ink) -> u64 {
        self.inks[ink as usize]
    }

    /// Bytes of live and pending blocks.
    pub fn taken(&self) -> u64 {
        self.of(Ink::Live) + self.of(Ink::Pending)
    }

    /// Free bytes in partly used pages.
    pub fn unusable(&self) -> u64 {
        Ink::ALL.iter().filter(|ink| ink.is_unusable()).map(|&ink| self.of(ink)).sum()
    }

    /// The class with the most live bytes.
    pub fn class(&self) -> usize {
        (0..CLASSES).rev().max_by_key(|&class| self.classes[class]).unwrap_or(0)
    }
}

/// Start of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At an address.
    Address(u64),
    /// At a page of a chunk.
    Page(u32, u32),
}

impl Default for Place {
    fn default() -> Place {
        Place::Address(0)
    }
}

/// A row of cells over memory that is contiguous in the view.
pub type Stretch = Vec<Cell>;

/// Cuts memory into cells of `cell` bytes. A cell ends at the end of its range, unless ranges are
/// `joined`.
pub fn by_address(
    picture: &Picture,
    classes: &Classes<'_>,
    cell: u64,
    joined: bool,
) -> Vec<Stretch> {
    let mut cutter = Cutter::new(cell);
    for range in &picture.ranges {
        if !joined {
            cutter.end_stretch();
        }
        for stroke in of_range(picture, range) {
            cutter.add(Place::Address(stroke.address), stroke, classes);
        }
    }
    cutter.finish()
}

/// As [`by_address`], in the order of chunks and their pages; memory of no chunk follows, by
/// address.
pub fn by_page(picture: &Picture, classes: &Classes<'_>, cell: u64) -> Vec<Stretch> {
    let strokes: Vec<Stroke<'_>> =
        picture.ranges.iter().flat_map(|range| of_range(picture, range)).collect();
    let mut cutter = Cutter::new(cell);
    for page in in_physical_order(picture) {
        let place = page.chunk.map(|chunk| Place::Page(chunk, page.number));
        let Some(address) = page.address else {
            cutter.ink(place.unwrap_or_default(), u64::from(page.bytes), Ink::Spare, None);
            continue;
        };
        let end = address + u64::from(page.bytes);
        let first = strokes.partition_point(|stroke| stroke.address + stroke.bytes <= address);
        for stroke in strokes[first..].iter().take_while(|stroke| stroke.address < end) {
            let from = stroke.address.max(address);
            let to = (stroke.address + stroke.bytes).min(end);
            let part = Stroke { address: from, bytes: to - from, ..*stroke };
            cutter.add(place.unwrap_or(Place::Address(from)), part, classes);
        }
    }
    cutter.finish()
}

/// The pages by chunk and number, then the pages of spans by address.
pub fn in_physical_order(picture: &Picture) -> Vec<&Page> {
    let mut pages: Vec<&Page> = picture.pages.iter().collect();
    pages.sort_by_key(|page| {
        (
            page.chunk.is_none(),
            page.chunk,
            page.number * u32::from(page.chunk.is_some()),
            page.address,
        )
    });
    pages
}

struct Cutter {
    cell: u64,
    stretches: Vec<Stretch>,
    now: Cell,
    filled: u64,
}

impl Cutter {
    fn new(cell: u64) -> Cutter {
        Cutter {
            cell: cell.max(1),
            stretches: vec![Stretch::new()],
            now: Cell::default(),
            filled: 0,
        }
    }

    fn add(&mut self, place: Place, stroke: Stroke<'_>, classes: &Classes<'_>) {
        let class = (stroke.ink == Ink::Live).then(|| classes.of(stroke.piece));
        self.ink(place, stroke.bytes, stroke.ink, class);
    }

    fn ink(&mut self, place: Place, bytes: u64, ink: Ink, class: Option<usize>) {
        let mut left = bytes;
        while left > 0 {
            if self.filled == 0 {
                self.now.place = match place {
                    Place::Address(address) => Place::Address(address + (bytes - left)),
                    page => page,
                };
            }
            let part = left.min(self.cell - self.filled);
            self.now.inks[ink as usize] += part;
            if let Some(class) = class {
                self.now.classes[class] += part;
            }
            self.filled += part;
            left -= part;
            if self.filled == self.cell {
                self.flush();
            }
        }
    }

    fn flush(&mut self) {
        if self.filled > 0 {
            if let Some(stretch) = self.stretches.last_mut() {
                stretch.push(self.now);
            }
            (self.now, self.filled) = (Cell::default(), 0);
        }
    }

    fn end_stretch(&mut self) {
        self.flush();
        if self.stretches.last().is_some_and(|stretch| !stretch.is_empty()) {
            self.stretches.push(Stretch::new());
        }
    }

    fn finish(mut self) -> Vec<Stretch> {
        self.end_stretch();
        self.stretches.retain(|stretch| !stretch.is_empty());
        self.stretches
    }
}
