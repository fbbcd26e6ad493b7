//! The books of a heap that only watches: another allocator serves the program, and the heap enters
//! each of its blocks here.
//!
//! Live memory counts as held: the other allocator packs its blocks on pages as it likes, and the
//! heap never asks the driver ([`crate::driver::absent::AbsentDriver`]). Blocks are on the record
//! as a managing heap's are, so every reader of a record shows them.
//!
//! The table from addresses to blocks has two operations for each block of the program, so its cost
//! is the cost of watching. Open addressing with linear probing in a table at most a quarter full;
//! a removal moves later cells of its row back, so no tombstones remain (Knuth, The Art of Computer
//! Programming 3, 6.4, algorithms L and R). About 15 instructions each, a third of a general
//! table's.
#![deny(clippy::unwrap_used)]

use gruyere_record::BlockSlot;

/// Devices that a watched program may use: no node has more.
pub(crate) const DEVICES: u32 = 16;

/// The record's pool of large blocks. All blocks go there, as the heap cannot know which of them
/// share pages; and so one lock serves both the book and the record.
pub(crate) const POOL: usize = 1;

/// Blocks that come or go between two updates of the timeline.
pub(crate) const SAMPLE_EVERY: u64 = 64;

/// A block of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) size: u64,
    pub(crate) stream: u32,
    pub(crate) slot: BlockSlot,
}

impl Default for Seen {
    fn default() -> Self {
        Self { size: 0, stream: 0, slot: BlockSlot::NONE }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Watched {
    pub(crate) blocks: AddressBook<Seen>,
    pub(crate) held: u64,
    pub(crate) changes: u64,
}

impl Watched {
    /// Bytes of the blocks, each rounded up to 512.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }
}

/// Cells of the smallest table.
const LEAST: usize = 2048;

/// A cell. Address 0: empty.
#[derive(Clone, Copy, Debug, Default)]
struct Cell<T> {
    address: u64,
    value: T,
}

/// Values by address; no address is 0.
#[derive(Debug)]
pub(crate) struct AddressBook<T> {
    /// A power of two of them, or none.
    cells: Box<[Cell<T>]>,
    /// 64 less the bits of an index.
    shift: u32,
    live: usize,
}

impl<T> Default for AddressBook<T> {
    fn default() -> Self {
        Self { cells: Box::default(), shift: 63, live: 0 }
    }
}

impl<T: Copy + Default> AddressBook<T> {
    pub(crate) fn len(&self) -> usize {
        self.live
    }

    /// The start of an address's row. Addresses are multiples of 512 and far from random: a
    /// multiplication by an odd constant (2^64 over the golden ratio) spreads them over the high
    /// bits.
    #[inline(always)]
    fn home(&self, address: u64) -> usize {
        (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// Inserts a value; returns the one that was there.
    #[inline]
    pub(crate) fn insert(&mut self, address: u64, value: T) -> Option<T> {
        if self.live * 4 >= self.cells.len() {
            self.grow();
        }
        let mask = self.cells.len() - 1;
        let mut at = self.home(address);
        loop {
            let cell = &mut self.cells[at & mask];
            if cell.address == 0 {
                *cell = Cell { address, value };
                self.live += 1;
                return None;
            }
            if cell.address == address {
                return Some(std::mem::replace(&mut cell.value, value));
            }
            at += 1;
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, address: u64) -> Option<T> {
        if self.live == 0 || address == 0 {
            return None;
        }
        let mask = self.cells.len() - 1;
        let mut at = self.home(address) & mask;
        while self.cells[at].address != address {
            if self.cells[at].address == 0 {
                return None;
            }
            at = (at + 1) & mask;
        }
        let value = self.cells[at].value;
        self.live -= 1;
        // Each later cell of the row that could not be in its place if this one had always been
        // empty moves here.
        let mut hole = at;
        loop {
            at = (at + 1) & mask;
            let cell = self.cells[at];
            if cell.address == 0 {
                break;
            }
            let from_home = at.wrapping_sub(self.home(cell.address)) & mask;
            let from_hole = at.wrapping_sub(hole) & mask;
            if from_home >= from_hole {
                self.cells[hole] = cell;
                hole = at;
            }
        }
        self.cells[hole] = Cell::default();
        Some(value)
    }

    #[cold]
    fn grow(&mut self) {
        let size = (self.cells.len() * 2).max(LEAST);
        let old = std::mem::replace(&mut self.cells, vec![Cell::default(); size].into());
        self.shift = 64 - size.trailing_zeros();
        self.live = 0;
        for cell in old.iter().filter(|cell| cell.address != 0) {
            self.insert(cell.address, cell.value);
        }
    }

    /// The addresses, in no order.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> + '_ {
        self.cells.iter().map(|cell| cell.address).filter(|&address| address != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn it_knows_what_a_map_of_the_standard_library_knows() {
        let (mut book, mut map) = (AddressBook::default(), HashMap::new());
        let mut state = 1u64;
        for step in 0..200_000u64 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // Waves of growth and decline, over few addresses, so that rows are long and wrap
            // around.
            let address = 0x7000_0000_0000 + (state >> 40) % 6000 * 512;
            if state >> 20 & 7 < if step / 20_000 % 2 == 0 { 5 } else { 3 } {
                assert_eq!(book.insert(address, step), map.insert(address, step));
            } else {
                assert_eq!(book.remove(address), map.remove(&address));
            }
            assert_eq!(book.len(), map.len());
        }
        let mut all: Vec<_> = book.addresses().collect();
        let mut expected: Vec<_> = map.keys().copied().collect();
        all.sort_unstable();
        expected.sort_unstable();
        assert_eq!(all, expected);
        assert!(map.into_iter().all(|(address, step)| book.remove(address) == Some(step)));
    }

    #[test]
    fn an_empty_book_knows_nothing() {
        let mut book = AddressBook::<u32>::default();
        assert_eq!((book.remove(512), book.remove(0), book.len()), (None, None, 0));
        assert_eq!(book.insert(512, 7), None);
        assert_eq!((book.remove(1024), book.remove(512), book.remove(512)), (None, Some(7), None));
    }
}
