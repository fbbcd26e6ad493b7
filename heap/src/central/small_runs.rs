//! Small blocks that are runs.

use crate::central::{Central, block_at};
use crate::runs::arena::{Run, RunId};
use crate::runs::page_table::{Page, PageTable};
use crate::small::size_class::{PAGE, SIZE_CLASSES, SMALL_MAX, class_of};
use crate::small::small_runs::SLAB_SHARE;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

impl Central {
    /// Notes that block `id` starts at `address` in `page`, as more others do than its word can
    /// name.
    #[cold]
    #[inline(never)]
    pub(crate) fn add_to_overflow(&mut self, page: Page<'_>, address: u64, id: RunId) {
        for other in page.become_overflow(self.device).into_iter().flatten() {
            if let Some(run) = self.arenas.run(other) {
                self.small_runs.overflow.insert(run.address, other);
            }
        }
        self.small_runs.overflow.insert(address, id);
    }

    /// The block of an overflow page that starts at `address` in `page`, taken out.
    #[cold]
    #[inline(never)]
    pub(crate) fn remove_from_overflow(&mut self, page: Page<'_>, address: u64) -> Option<RunId> {
        let id = self.small_runs.overflow_block(address)?;
        block_at(&self.arenas, id, address)?;
        self.small_runs.overflow.remove(&address);
        let start = address / PAGE * PAGE;
        if self.small_runs.overflow.range(start..start + PAGE).next().is_none() {
            page.clear_overflow();
        }
        Some(id)
    }

    /// A block of `size` bytes of the arena has become live, `stream`'s; counted if it is small.
    pub(crate) fn has_come(&mut self, size: u64, stream: u32) {
        if size <= SMALL_MAX {
            let (count, bytes) = &mut self.small_runs.small;
            (*count, *bytes) = (*count + 1, *bytes + size);
            *self.small_runs.by_class.entry((stream, class_of(size))).or_default() += size;
            // Where it lies is the small pool's, as a slab would be.
            self.usage.slab_taken(size);
        }
    }

    /// A block of `size` bytes of the arena is neither live nor pending any more; counted if it is
    /// small.
    pub(crate) fn is_gone(&mut self, size: u64, stream: u32) {
        if size <= SMALL_MAX {
            let (count, bytes) = &mut self.small_runs.small;
            (*count, *bytes) = (*count - 1, *bytes - size);
            if let Entry::Occupied(mut of_class) =
                self.small_runs.by_class.entry((stream, class_of(size)))
            {
                *of_class.get_mut() -= size;
                if *of_class.get() == 0 {
                    of_class.remove();
                }
            }
            self.usage.slab_given(size);
        }
    }

    /// Whether one small block more of `size` bytes for `stream` is to be a run: sizes lie apart,
    /// and the stream has few blocks of that size.
    pub(crate) fn is_for_a_run(&self, stream: u32, size: u64) -> bool {
        if !self.spaces.are_apart() {
            return false;
        }
        let class = class_of(size);
        let has = self.small_runs.by_class.get(&(stream, class)).copied().unwrap_or(0);
        has < SIZE_CLASSES[class].slab_bytes() / SLAB_SHARE
    }

    /// Checks what is noted of small blocks and of overflow pages against the runs and the page
    /// table.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn validate_small(&self, table: &PageTable) -> std::result::Result<(), String> {
        let (mut small, mut by_class) = ((0, 0), HashMap::new());
        for (_, run) in
            self.arenas.blocks().filter(|(_, run)| !run.is_slab && run.bytes <= SMALL_MAX)
        {
            small = (small.0 + 1, small.1 + run.bytes);
            *by_class.entry((run.stream, class_of(run.bytes))).or_default() += run.bytes;
        }
        if by_class != self.small_runs.by_class {
            return Err(format!(
                "small blocks come to {by_class:?} by stream and class, and {:?} is counted",
                self.small_runs.by_class
            ));
        }
        if small != self.small_runs.small {
            return Err(format!(
                "small blocks come to {small:?}, and {:?} is counted",
                self.small_runs.small
            ));
        }
        for (&address, &id) in &self.small_runs.overflow {
            let is_overflow = table.page(address).is_some_and(Page::is_overflow);
            if block_at(&self.arenas, id, address).is_none() || !is_overflow {
                return Err(format!(
                    "{address:#x} starts no block of an overflow page, and is counted as one"
                ));
            }
        }
        Ok(())
    }

    /// The blocks that may start at `address`: those that the page table named, and that of an
    /// overflow page.
    fn candidates(
        &self,
        address: u64,
        blocks: [Option<RunId>; 2],
    ) -> impl Iterator<Item = RunId> + use<> {
        blocks.into_iter().flatten().chain(self.small_runs.overflow_block(address))
    }

    /// The live block that starts at `address`, among those that the page table named and those of
    /// overflow pages.
    pub(crate) fn find(&self, address: u64, blocks: [Option<RunId>; 2]) -> Option<(RunId, &Run)> {
        self.candidates(address, blocks).find_map(|id| block_at(&self.arenas, id, address))
    }

    /// As [`Central::find`], whatever it is: pending, too.
    pub(crate) fn run_at(&self, address: u64, blocks: [Option<RunId>; 2]) -> Option<(RunId, &Run)> {
        let mut runs =
            self.candidates(address, blocks).filter_map(|id| Some((id, self.arenas.run(id)?)));
        runs.find(|(_, run)| run.address == address)
    }
}
