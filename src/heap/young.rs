//! Small blocks of a young heap: all sizes share its first page.
//!
//! A slab for each size is right where a program has many blocks of each, and many times what a program needs that has few of any. So a heap that has
//! never held more than a page serves small blocks from its runs, by best fit, as it serves large ones. More than two blocks may start in a page
//! then, which its word in the page table cannot name: it says *crowd*, and they are known here, by address.
#![deny(unsafe_code)]

use super::arena::{Run, RunId};
use super::backing::Kind;
use super::central::{Central, block_at};
use super::page_table::{Page, PageTable};
use super::size_class::{PAGE, SMALL_MAX};
use std::collections::BTreeMap;

/// A young heap has at most so many small blocks in its first page: each is found by a search there, and told by itself in a dump.
const YOUNG_BLOCKS: u64 = 256;
/// And so many mallocs are served from it: a program that goes on has a use for slabs, which are several times as fast.
const YOUNG_MALLOCS: u32 = 4096;

/// The small blocks of a device's arena. Guarded by its central lock.
pub struct Young {
    /// The blocks of pages in which more start than the page table can name, by address.
    crowds: BTreeMap<u64, RunId>,
    /// Those that are live or pending: how many, and their bytes.
    small: (u64, u64),
    /// How many may still be served.
    youth: u32,
}

impl Default for Young {
    fn default() -> Self {
        Self { crowds: BTreeMap::new(), small: (0, 0), youth: YOUNG_MALLOCS }
    }
}

impl Young {
    /// The block of a crowd that starts at `address`.
    pub fn crowded(&self, address: u64) -> Option<RunId> {
        self.crowds.get(&address).copied()
    }

    /// Those that are live or pending: how many, and their bytes.
    pub fn small_blocks(&self) -> (u64, u64) {
        self.small
    }
}

impl Central {
    /// Notes that block `id` starts at `address` in `page`, as more others do than its word can name.
    #[cold]
    #[inline(never)]
    pub(super) fn join_crowd(&mut self, page: Page<'_>, address: u64, id: RunId) {
        for other in page.become_crowd(self.device).into_iter().flatten() {
            if let Some(run) = self.arenas.run(other) {
                self.young.crowds.insert(run.address, other);
            }
        }
        self.young.crowds.insert(address, id);
    }

    /// The block of a crowd that starts at `address` in `page`, taken out.
    #[cold]
    #[inline(never)]
    pub(super) fn leave_crowd(&mut self, page: Page<'_>, address: u64) -> Option<RunId> {
        let id = self.young.crowded(address)?;
        block_at(&self.arenas, id, address)?;
        self.young.crowds.remove(&address);
        let start = address / PAGE * PAGE;
        if self.young.crowds.range(start..start + PAGE).next().is_none() {
            page.disperse();
        }
        Some(id)
    }

    /// A block of `size` bytes of the arena has become live; counted if it is small.
    pub(super) fn has_come(&mut self, size: u64) {
        if size <= SMALL_MAX {
            let (count, bytes) = &mut self.young.small;
            (*count, *bytes) = (*count + 1, *bytes + size);
            // Where it lies is the small pool's, as a slab would be.
            self.tally.slab_taken(size);
        }
    }

    /// A block of `size` bytes of the arena is neither live nor pending any more; counted if it is small.
    pub(super) fn is_gone(&mut self, size: u64) {
        if size <= SMALL_MAX {
            let (count, bytes) = &mut self.young.small;
            (*count, *bytes) = (*count - 1, *bytes - size);
            self.tally.slab_given(size);
        }
    }

    /// Whether one small block more may be served from the arena: the heap has never held more than a page, and few were served so. True counts one.
    pub(super) fn is_young(&mut self) -> bool {
        let young = self.backing.kind == Kind::Stitch
            && self.peak_reserved <= PAGE
            && self.young.small.0 < YOUNG_BLOCKS
            && self.young.youth > 0;
        self.young.youth -= u32::from(young);
        young
    }

    /// Checks what is noted of small blocks and of crowds against the runs and the page table.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn validate_small(&self, table: &PageTable) -> std::result::Result<(), String> {
        let blocks = self.arenas.blocks().filter(|(_, run)| !run.is_slab && run.bytes <= SMALL_MAX);
        let small = blocks.fold((0, 0), |sum, (_, run)| (sum.0 + 1, sum.1 + run.bytes));
        if small != self.young.small {
            return Err(format!("small blocks come to {small:?}, and {:?} is counted", self.young.small));
        }
        for (&address, &id) in &self.young.crowds {
            let is_crowd = table.page(address).is_some_and(Page::is_crowd);
            if block_at(&self.arenas, id, address).is_none() || !is_crowd {
                return Err(format!("{address:#x} starts no block of a crowd, and is counted as one"));
            }
        }
        Ok(())
    }

    /// The blocks that may start at `address`: those that the page table named, and that of a crowd.
    fn candidates(&self, address: u64, blocks: [Option<RunId>; 2]) -> impl Iterator<Item = RunId> + use<> {
        blocks.into_iter().flatten().chain(self.young.crowded(address))
    }

    /// The live block that starts at `address`, among those that the page table named and those of crowds.
    pub(super) fn find(&self, address: u64, blocks: [Option<RunId>; 2]) -> Option<(RunId, &Run)> {
        self.candidates(address, blocks).find_map(|id| block_at(&self.arenas, id, address))
    }

    /// As [`Central::find`], whatever it is: pending, too.
    pub(super) fn run_at(&self, address: u64, blocks: [Option<RunId>; 2]) -> Option<(RunId, &Run)> {
        let mut runs = self.candidates(address, blocks).filter_map(|id| Some((id, self.arenas.run(id)?)));
        runs.find(|(_, run)| run.address == address)
    }
}
