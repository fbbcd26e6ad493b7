//! From an address to its owner: a two-level radix tree over 2 MiB pages, read without locks.
//!
//! The word of a page names the blocks of the arena that start in it, at most two. If more start,
//! or a slab lies there, the page is *split*: each of its cells ([`CELL`]) has a word of its own.
//! Blocks of the arena are longer than half a cell, so two are enough again. Only in pools with
//! segments from outside, where small blocks are runs, may more start in a cell: its word then says
//! just that.
//!
//! ```text
//!   word            bits 0-1   2-7      8-35              36-63
//!   NONE            0          0        0                 0            no owner
//!   slab            1          device   shard             slab         a cell of that slab
//!   large           2          device   block + 1 or 0    block + 1    blocks of the arena that
//!                                                                      start in the page or cell
//!   overflow        3          device   0                 0            more blocks of the arena
//!                                                                      than that start in the cell
//!   SPLIT           all ones                                           of a page: see its cells
//! ```
//!
//! States: of a page NONE -> large -> ... -> NONE, and NONE or large -> SPLIT for ever (the holder
//! of the device's central lock; what was named is in the cells before the page says SPLIT); of a
//! cell NONE -> slab -> NONE (the thread that holds the slab's shard lock, or has not published the
//! slab yet), NONE -> large -> ... -> NONE and large -> overflow -> NONE (the holder of the central
//! lock, which knows the blocks of an overflow cell). A reader takes a word as a hint and checks it
//! under the owner's lock: a word that has changed names a block that does not start at the
//! reader's address, and a page that was split meanwhile says so then ([`Page::is_split`]).

use crate::small::size_class::{PAGE, SMALL_MAX};
use once_cell::race::OnceBox;
use std::sync::atomic::{AtomicU64, Ordering};

/// Addresses are below 2^48: 47 bits of user address space on x86-64, 48 on aarch64.
const ADDRESS_BITS: u32 = 48;
const PAGE_BITS: u32 = PAGE.trailing_zeros();
const LEAF_BITS: u32 = 13;
const ROOT_BITS: u32 = ADDRESS_BITS - PAGE_BITS - LEAF_BITS;

/// The number of a large block in its device's arenas, below [`BLOCK_LIMIT`].
pub(crate) type BlockId = u32;
/// Block numbers take 28 bits of a word.
pub(crate) const BLOCK_LIMIT: u32 = (1 << 28) - 1;

/// The part of a split page with a word; at most two blocks of the arena start there (bytes).
pub(crate) const CELL: u64 = 2 * SMALL_MAX;
const CELLS: usize = (PAGE / CELL) as usize;

const SLAB: u64 = 1;
const LARGE: u64 = 2;
const OVERFLOW: u64 = 3;
/// The word of a split page, and of nothing else: the fields of an overflow cell are zero.
const SPLIT: u64 = u64::MAX;
const DEVICE: u32 = 2;
const LOW: u32 = 8;
const HIGH: u32 = 36;
const FIELD: u64 = (1 << 28) - 1;

/// The owner of a page or a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// No owner, or the page is split.
    None,
    /// A cell of a slab.
    Slab {
        device: u32,
        /// The shard that owns the slab.
        shard: u32,
        /// The slab's number in the shard.
        slab: u32,
    },
    /// Blocks of the arena start here.
    Large {
        device: u32,
        /// The blocks; none in an overflow cell.
        blocks: [Option<BlockId>; 2],
    },
}

impl Owner {
    #[inline]
    fn decode(word: u64) -> Self {
        let device = (word >> DEVICE & 0x3f) as u32;
        let (low, high) = ((word >> LOW & FIELD) as u32, (word >> HIGH) as u32);
        match word & 3 {
            SLAB => Self::Slab { device, shard: low, slab: high },
            LARGE => Self::Large { device, blocks: [low.checked_sub(1), high.checked_sub(1)] },
            OVERFLOW if word != SPLIT => Self::Large { device, blocks: [None, None] },
            _ => Self::None,
        }
    }

    /// The word; not of an overflow cell, which [`Page::become_overflow`] writes.
    fn encode(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Slab { device, shard, slab } => {
                SLAB | u64::from(device) << DEVICE
                    | u64::from(shard) << LOW
                    | u64::from(slab) << HIGH
            }
            Self::Large { blocks: [None, None], .. } => 0,
            Self::Large { device, blocks: [a, b] } => {
                let field = |block: Option<BlockId>| block.map_or(0, |id| u64::from(id) + 1);
                LARGE | u64::from(device) << DEVICE | field(a) << LOW | field(b) << HIGH
            }
        }
    }
}

const LEAF: usize = 1 << LEAF_BITS;
const ROOT: usize = 1 << ROOT_BITS;

type Cells = [AtomicU64; CELLS];

/// A page: its word, and those of its cells, made at its first split and kept.
#[derive(Default)]
struct Entry {
    word: AtomicU64,
    cells: OnceBox<Cells>,
}

type Leaf = [Entry; LEAF];

/// The tree. Leaves (128 KiB, 16 GiB of addresses each) are made at their first write and kept.
pub(crate) struct PageTable {
    root: Box<[OnceBox<Leaf>; ROOT]>,
}

/// `N` of them on the host's heap, without a stop on the stack.
fn boxed<T: Default, const N: usize>() -> Box<[T; N]> {
    let all: Box<[T]> = (0..N).map(|_| T::default()).collect();
    all.try_into().unwrap_or_else(|_| unreachable!("as many as were asked for"))
}

impl Default for PageTable {
    fn default() -> Self {
        Self { root: boxed() }
    }
}

/// The word of a page or, if that is split, of a cell: found once for all that the caller does with
/// it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Page<'a>(&'a AtomicU64);

/// A page's word, not decoded further than needed.
#[derive(Clone, Copy)]
pub(crate) struct Word(u64);

impl Word {
    #[inline]
    pub(crate) fn owner(self) -> Owner {
        Owner::decode(self.0)
    }

    /// The device, if there is an owner.
    #[inline(always)]
    pub(crate) fn device(self) -> u32 {
        (self.0 >> DEVICE & 0x3f) as u32
    }

    /// The shard and number of the slab, if it is a slab's.
    #[inline(always)]
    pub(crate) fn slab(self) -> Option<(u32, u32)> {
        (self.0 & 3 == SLAB).then_some(((self.0 >> LOW & FIELD) as u32, (self.0 >> HIGH) as u32))
    }

    /// Whether blocks of the arena start there.
    #[inline(always)]
    pub(crate) fn is_large(self) -> bool {
        self.0 & LARGE != 0
    }
}

impl Page<'_> {
    #[inline(always)]
    pub(crate) fn word(self) -> Word {
        // Acquire: pairs with the publisher's release, so that what the word names is there to be
        // locked.
        Word(self.0.load(Ordering::Acquire))
    }

    /// Notes that block `id` of the arena starts there (under the central lock). False: the word
    /// has no room for it.
    #[inline(always)]
    #[must_use]
    pub(crate) fn add_block(self, device: u32, id: BlockId) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        let field = u64::from(id) + 1;
        let word = match word & 3 {
            LARGE if word >> LOW & FIELD == 0 => word | field << LOW,
            LARGE if word >> HIGH == 0 => word | field << HIGH,
            LARGE | OVERFLOW => return false,
            _ => LARGE | u64::from(device) << DEVICE | field << LOW,
        };
        self.0.store(word, Ordering::Release);
        true
    }

    /// Makes the cell an overflow cell (under the central lock, whose holder knows its blocks from
    /// now on); returns the blocks that the word named.
    pub(crate) fn become_overflow(self, device: u32) -> [Option<BlockId>; 2] {
        let named = match self.word().owner() {
            Owner::Large { blocks, .. } => blocks,
            _ => [None, None],
        };
        self.0.store(OVERFLOW | u64::from(device) << DEVICE, Ordering::Release);
        named
    }

    pub(crate) fn is_overflow(self) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        word & 3 == OVERFLOW && word != SPLIT
    }

    /// Whether the page has been split since the caller found this word.
    pub(crate) fn is_split(self) -> bool {
        self.0.load(Ordering::Relaxed) == SPLIT
    }

    /// Clears an overflow cell whose last block is gone (under the central lock).
    pub(crate) fn clear_overflow(self) {
        self.0.store(0, Ordering::Release);
    }

    /// Takes out the large block that starts there and that `is_it` knows (under the central lock).
    #[inline(always)]
    pub(crate) fn remove_block<T>(self, is_it: impl Fn(BlockId) -> Option<T>) -> Option<T> {
        let word = self.0.load(Ordering::Relaxed);
        if word & 3 != LARGE {
            return None;
        }
        // No block's number is that of an empty field less one.
        let number = |field: u32| ((word >> field & FIELD) as BlockId).wrapping_sub(1);
        let (found, others) = match is_it(number(LOW)) {
            Some(found) => (found, word & !(FIELD << LOW)),
            None => (is_it(number(HIGH))?, word & !(FIELD << HIGH)),
        };
        self.0.store(if others >> LOW == 0 { 0 } else { others }, Ordering::Release);
        Some(found)
    }
}

impl PageTable {
    #[inline]
    pub(crate) fn get(&self, address: u64) -> Owner {
        // Of one read: between two, the page may be split, and then it names nothing itself.
        self.lookup(address).map_or(Owner::None, |(_, word)| word.owner())
    }

    /// The page or cell of `address`; `None` if no range there was ever covered.
    #[inline(always)]
    pub(crate) fn page(&self, address: u64) -> Option<Page<'_>> {
        self.lookup(address).map(|(page, _)| page)
    }

    /// [`PageTable::page`] with its word.
    #[inline(always)]
    pub(crate) fn lookup(&self, address: u64) -> Option<(Page<'_>, Word)> {
        let entry = self.entry(address)?;
        let page = Page(&entry.word);
        let word = page.word();
        if word.0 != SPLIT {
            return Some((page, word));
        }
        let cell = Page(&entry.cells.get()?[(address / CELL) as usize % CELLS]);
        Some((cell, cell.word()))
    }

    #[inline(always)]
    fn entry(&self, address: u64) -> Option<&Entry> {
        let page = address >> PAGE_BITS;
        let leaf = self.root.get((page >> LEAF_BITS) as usize)?.get()?;
        Some(&leaf[page as usize & (LEAF - 1)])
    }

    /// Whether the tree has room for a range.
    pub(crate) fn reaches(address: u64, bytes: u64) -> bool {
        address.checked_add(bytes.saturating_sub(1)).is_some_and(|last| last >> ADDRESS_BITS == 0)
    }

    /// Makes the leaves of a range, so that later writes there need no memory. False: the range is
    /// beyond the tree's addresses.
    pub(crate) fn cover(&self, address: u64, bytes: u64) -> bool {
        if !Self::reaches(address, bytes) {
            return false;
        }
        let last = address + bytes.saturating_sub(1);
        for leaf in (address >> (PAGE_BITS + LEAF_BITS))..=(last >> (PAGE_BITS + LEAF_BITS)) {
            self.root[leaf as usize].get_or_init(boxed);
        }
        true
    }

    /// Splits the pages of a covered range (under the central lock); `at` is the start of a block
    /// that their words name.
    pub(crate) fn split(&self, address: u64, bytes: u64, at: impl Fn(BlockId) -> Option<u64>) {
        for page in address / PAGE..(address + bytes).div_ceil(PAGE) {
            if let Some(entry) = self.entry(page * PAGE)
                && entry.word.load(Ordering::Relaxed) != SPLIT
            {
                Self::split_entry(entry, &at);
            }
        }
    }

    #[cold]
    fn split_entry(entry: &Entry, at: &impl Fn(BlockId) -> Option<u64>) {
        let cells = entry.cells.get_or_init(boxed);
        if let Owner::Large { device, blocks } = Page(&entry.word).word().owner() {
            for id in blocks.into_iter().flatten() {
                if let Some(start) = at(id) {
                    // A cell that held nothing has room for both.
                    let _ = Page(&cells[(start / CELL) as usize % CELLS]).add_block(device, id);
                }
            }
        }
        entry.word.store(SPLIT, Ordering::Release);
    }

    /// Writes the owner of every cell of a range whose pages are split.
    pub(crate) fn set_range(&self, address: u64, bytes: u64, owner: Owner) {
        // Once, out of the loop: the compiler would split the loop by the owner's fields, and None
        // has none (valgrind sees it look).
        let encoded = owner.encode();
        for cell in address / CELL..(address + bytes) / CELL {
            if let Some(cells) = self.entry(cell * CELL).and_then(|entry| entry.cells.get()) {
                cells[cell as usize % CELLS].store(encoded, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_never_covered_belongs_to_nobody() {
        let table = PageTable::default();
        for address in [0, 1, PAGE, 1 << 47, 1 << 48, u64::MAX] {
            assert_eq!(table.get(address), Owner::None);
        }
        assert!(!table.cover(1 << 48, PAGE));
        assert!(!table.cover(u64::MAX - 5, 10));
    }

    /// The page at `address`, split, with nothing in it.
    fn split(table: &PageTable, address: u64, bytes: u64) {
        assert!(table.cover(address, bytes));
        table.split(address, bytes, |_| None);
    }

    #[test]
    fn every_cell_of_a_slab_names_it_until_it_is_taken_back() {
        let table = PageTable::default();
        let base = (16 << 30) - CELL;
        split(&table, base, 4 * CELL);
        let owner = Owner::Slab { device: 5, shard: 30, slab: 1234 };
        table.set_range(base, 4 * CELL, owner);
        assert_eq!(table.get(base + 4 * CELL - 1), owner);
        assert_eq!([table.get(base - 1), table.get(base + 4 * CELL)], [Owner::None; 2]);
        table.set_range(base, 4 * CELL, Owner::None);
        assert_eq!(table.get(base), Owner::None);
    }

    #[test]
    fn more_than_two_blocks_of_a_page_are_named_by_its_cells() {
        let table = PageTable::default();
        assert!(table.cover(PAGE, PAGE));
        let whole = table.page(PAGE).unwrap();
        assert!(whole.add_block(3, 7) && whole.add_block(3, 9));
        assert!(!whole.add_block(3, 11) && !whole.is_split());
        table.split(PAGE + 512, 1, |id| Some(PAGE + (u64::from(id) - 7) * CELL));
        assert!(whole.is_split() && !whole.is_overflow());
        assert_eq!((whole.word().owner(), whole.remove_block(Some)), (Owner::None, None));
        let cell = |number| table.page(PAGE + number * CELL + 512).unwrap();
        let named = |id| Owner::Large { device: 3, blocks: [Some(id), None] };
        assert_eq!(
            [cell(0).word().owner(), cell(1).word().owner(), cell(2).word().owner()],
            [named(7), Owner::None, named(9)]
        );
        assert!(cell(1).add_block(3, 11));
        for (number, id) in [(0, 7), (1, 11), (2, 9)] {
            assert_eq!(cell(number).remove_block(|other| (other == id).then_some(id)), Some(id));
            assert_eq!(cell(number).word().owner(), Owner::None);
        }
    }

    #[test]
    fn more_than_two_blocks_of_a_cell_are_an_overflow_cell_until_the_last_is_gone() {
        let table = PageTable::default();
        split(&table, PAGE, PAGE);
        let cell = table.page(PAGE).unwrap();
        assert!(cell.add_block(3, 7) && cell.add_block(3, 9));
        assert!(!cell.add_block(3, 11));
        assert_eq!(cell.become_overflow(3), [Some(7), Some(9)]);
        assert_eq!(table.get(PAGE + 512), Owner::Large { device: 3, blocks: [None, None] });
        assert!(!cell.add_block(3, 11) && cell.word().is_large() && cell.word().slab().is_none());
        assert_eq!((cell.word().device(), cell.remove_block(Some)), (3, None));
        cell.clear_overflow();
        assert_eq!(table.get(PAGE), Owner::None);
    }

    #[test]
    fn a_block_is_found_while_its_page_is_split() {
        const PAGES: u64 = 20_000;
        let table = PageTable::default();
        assert!(table.cover(PAGE, PAGES * PAGE));
        let pages = || (1..=PAGES).map(|page| page * PAGE);
        for address in pages() {
            assert!(table.page(address).is_some_and(|page| page.add_block(3, 7)));
        }
        let named = Owner::Large { device: 3, blocks: [Some(7), None] };
        let splits = AtomicU64::new(PAGE);
        let mut missed = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for address in pages() {
                    // The reader is at this page.
                    while splits.load(Ordering::Relaxed) < address {
                        std::hint::spin_loop();
                    }
                    table.split(address, 1, |_| Some(address));
                }
            });
            for address in pages() {
                splits.store(address, Ordering::Relaxed);
                while table.entry(address).is_some_and(|entry| !Page(&entry.word).is_split()) {
                    missed += u32::from(table.get(address) != named);
                }
            }
        });
        assert_eq!(missed, 0);
    }

    #[test]
    fn two_large_blocks_may_start_in_one_page() {
        let table = PageTable::default();
        assert!(table.cover(PAGE, PAGE));
        let page = table.page(PAGE).unwrap();
        assert!(page.add_block(3, 7) && page.add_block(3, BLOCK_LIMIT - 1));
        assert_eq!(
            table.get(PAGE),
            Owner::Large { device: 3, blocks: [Some(7), Some(BLOCK_LIMIT - 1)] }
        );
        let remove = |id| page.remove_block(|other| (other == id).then_some(id));
        assert_eq!((remove(9), remove(7)), (None, Some(7)));
        assert_eq!(
            table.get(PAGE + 512),
            Owner::Large { device: 3, blocks: [None, Some(BLOCK_LIMIT - 1)] }
        );
        assert!(page.add_block(3, 0));
        assert_eq!(
            table.get(PAGE),
            Owner::Large { device: 3, blocks: [Some(0), Some(BLOCK_LIMIT - 1)] }
        );
        assert_eq!(
            (remove(0), remove(0), remove(BLOCK_LIMIT - 1)),
            (Some(0), None, Some(BLOCK_LIMIT - 1))
        );
        assert_eq!(table.get(PAGE), Owner::None);
    }
}
