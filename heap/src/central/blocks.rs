//! Which block of the arena starts at an address.
//!
//! The page table names the blocks that start in a page, or in a cell of a split one. Only pools
//! whose segments come from outside have more in a cell than its word can name: those are known
//! here, by address.

use crate::central::{Central, block_at};
use crate::runs::arena::{Run, RunId};
use crate::runs::page_table::{CELL, Page, PageTable};

impl Central {
    /// Notes in the page table that block `id` starts at `address`, whose page or cell has no room
    /// for it.
    #[cold]
    #[inline(never)]
    pub(crate) fn name_among_many(&mut self, table: &PageTable, id: RunId, address: u64) {
        self.split(table, address, 1);
        let Some(cell) = table.page(address) else { return };
        if cell.add_block(self.device, id) {
            return;
        }
        for other in cell.become_overflow(self.device).into_iter().flatten() {
            if let Some(run) = self.arenas.run(other) {
                self.overflow.insert(run.address, other);
            }
        }
        self.overflow.insert(address, id);
    }

    /// Splits the pages of a range, so that each of its cells has a word of its own.
    pub(crate) fn split(&self, table: &PageTable, address: u64, bytes: u64) {
        table.split(address, bytes, |id| self.arenas.run(id).map(|run| run.address));
    }

    /// The block of an overflow cell that starts at `address` in `page`, taken out. `None` too
    /// where `page` was split since it was found: then the caller looks again.
    #[cold]
    #[inline(never)]
    pub(crate) fn remove_from_overflow(&mut self, page: Page<'_>, address: u64) -> Option<RunId> {
        if !page.is_overflow() {
            return None;
        }
        let id = self.overflow.get(&address).copied()?;
        block_at(&self.arenas, id, address)?;
        self.overflow.remove(&address);
        let start = address / CELL * CELL;
        if self.overflow.range(start..start + CELL).next().is_none() {
            page.clear_overflow();
        }
        Some(id)
    }

    /// The blocks that may start at `address`: those that the page table named, and that of an
    /// overflow cell.
    fn candidates(
        &self,
        address: u64,
        blocks: [Option<RunId>; 2],
    ) -> impl Iterator<Item = RunId> + use<> {
        blocks.into_iter().flatten().chain(self.overflow.get(&address).copied())
    }

    /// The live block that starts at `address`, among those that the page table named and those of
    /// overflow cells.
    pub(crate) fn find(&self, address: u64, blocks: [Option<RunId>; 2]) -> Option<(RunId, &Run)> {
        self.candidates(address, blocks).find_map(|id| block_at(&self.arenas, id, address))
    }

    /// As [`Central::find`], whatever it is: pending, too.
    pub(crate) fn run_at(&self, address: u64, blocks: [Option<RunId>; 2]) -> Option<(RunId, &Run)> {
        let mut runs =
            self.candidates(address, blocks).filter_map(|id| Some((id, self.arenas.run(id)?)));
        runs.find(|(_, run)| run.address == address)
    }

    /// Checks the blocks of overflow cells against the runs and the page table.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn validate_overflow(&self, table: &PageTable) -> std::result::Result<(), String> {
        let is_wrong = |block: &(&u64, &RunId)| {
            let (&address, &id) = *block;
            let is_overflow = table.page(address).is_some_and(Page::is_overflow);
            block_at(&self.arenas, id, address).is_none() || !is_overflow
        };
        match self.overflow.iter().find(is_wrong) {
            Some((address, _)) => Err(format!(
                "{address:#x} starts no block of an overflow cell, and is counted as one"
            )),
            None => Ok(()),
        }
    }
}
