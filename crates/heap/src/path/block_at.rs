//! The block that starts at an address: its facts, and what the program says of it after allocation
//! (its lifetime, its site).
//!
//! The page table names the blocks that start in a page, or in a cell of a split page. Only pools
//! with outside segments may have more blocks in a cell than its word can name: `Central::overflow`
//! has those, by address.
//!
//! An optimiser's state looks like the temporaries of its step while the step runs; afterwards it
//! can be recognised. A block tagged then counts under its new lifetime, but does not move.

use crate::central::{Central, SMALL};
use crate::device::{Device, is_large};
use crate::heap::Heap;
use crate::lifetime::Lifetime;
use crate::pools::Reuse;
use crate::request::Request;
use crate::runs::arena::{Arenas, Run, RunId, RunState};
use crate::runs::page_table::{CELL, Owner, Page, PageTable};
use crate::shared::Shared;
use crate::small::shard::Shard;
use crate::small::size_class::round;
use crate::small::slab::SlotState;
use crate::sync::lock;
use gruyere_record::gauges::pool_of;
use gruyere_record::sites::SiteId;
use gruyere_record::{BlockSlot, ShardWriter};

/// A live block, or a freed one that waits for streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockFacts {
    pub(crate) stream: u32,
    /// Its length, a multiple of 512 B.
    pub(crate) bytes: u64,
    /// Bytes that the program asked for.
    pub(crate) requested: u64,
    /// Freed by the program.
    pub(crate) is_pending: bool,
    pub(crate) is_shared: bool,
    /// The reuse rule of its pool; `None`: ordinary memory, or a block of `backing:passthrough`.
    pub(crate) apart: Option<Reuse>,
}

impl BlockFacts {
    /// Whether its memory stays taken when the program frees it.
    pub(crate) fn waits(&self) -> bool {
        self.is_shared || self.apart == Some(Reuse::Never)
    }
}

fn in_slab(shard: &Shard, slab: u32, address: u64, apart: Option<Reuse>) -> Option<BlockFacts> {
    let slab = shard.slab(slab)?;
    let slot = slab.slot_at(address)?;
    let state = slab.state(slot);
    let requested = slab.facts(slot).requested;
    (state != SlotState::Free).then(|| BlockFacts {
        stream: slab.stream,
        bytes: round(requested),
        requested,
        is_pending: state == SlotState::Pending,
        is_shared: shard.is_used_elsewhere(address),
        apart,
    })
}

impl Device {
    /// The block that starts at `address`, in pages of `owner`, if any.
    pub(crate) fn block_at(&self, address: u64, owner: Owner) -> Option<BlockFacts> {
        match owner {
            Owner::Slab { shard, slab, .. } => {
                self.in_shard(shard, |shard, _, apart| in_slab(shard, slab, address, apart))
            }
            Owner::Large { blocks, .. } => {
                let central = lock(&self.central);
                let (_, run) = central.run_at(address, blocks).filter(|(_, run)| !run.is_slab)?;
                let is_pending = run.state == RunState::Pending;
                let pool = central.pools.of_space(central.arenas.region(run.region).space);
                (is_pending || run.state == RunState::Live).then(|| BlockFacts {
                    stream: run.stream,
                    bytes: run.bytes,
                    requested: run.requested(),
                    is_pending,
                    is_shared: run.is_shared(),
                    apart: pool.filter(|pool| !pool.is_ordinary()).map(|pool| pool.rules.reuse),
                })
            }
            Owner::None => {
                let (bytes, requested) = lock(&self.central).direct_block(address)?;
                Some(BlockFacts {
                    stream: 0,
                    bytes,
                    requested,
                    is_pending: false,
                    is_shared: false,
                    apart: None,
                })
            }
        }
    }

    pub(crate) fn tag(&self, address: u64, owner: Owner, lifetime: Lifetime) -> Option<()> {
        let lifetime = lifetime as u8;
        match owner {
            Owner::Slab { shard, slab, .. } => {
                self.in_shard(shard, |shard, writer, _| shard.tag(writer, slab, address, lifetime))
            }
            Owner::Large { blocks, .. } => {
                let central = &mut *lock(&self.central);
                let (id, run) = central.find(address, blocks)?;
                let (slot, requested, from) = (run.slot, run.requested(), run.lifetime);
                if from != lifetime {
                    let (size, writers) = (round(requested), &mut central.writers);
                    writers[pool_of(size)].block_retag(slot, size, requested, from, lifetime);
                    central.arenas.run_mut(id)?.lifetime = lifetime;
                }
                Some(())
            }
            Owner::None => None,
        }
    }

    /// `request` with its site, if a new slab may serve it. Call before taking the locks under
    /// which slabs are made.
    pub(crate) fn located(&self, shared: &Shared, request: Request) -> Request {
        if is_large(request.size) {
            return request;
        }
        Request { site: shared.site(request.size), ..request }
    }

    /// Records the site of the block at `address`, in pages of `owner`. `None`: no block starts
    /// there.
    pub(crate) fn set_site(&self, address: u64, owner: Owner, site: SiteId) -> Option<()> {
        self.in_map(address, owner, |writer, slot| writer.set_site(slot, site))
    }

    /// Records that the block at `address`, in pages of `owner`, was sent to other processes.
    /// `None`: no block starts there.
    pub(crate) fn mark_sent(&self, address: u64, owner: Owner) -> Option<()> {
        self.in_map(address, owner, ShardWriter::mark_sent)
    }

    /// Writes about the block at `address`, in pages of `owner`, with its place in the block map.
    /// `None`: no block starts there.
    fn in_map(
        &self,
        address: u64,
        owner: Owner,
        write: impl FnOnce(&mut ShardWriter, BlockSlot),
    ) -> Option<()> {
        match owner {
            Owner::Slab { shard, slab, .. } => self.in_shard(shard, |shard, writer, _| {
                let slab = shard.slab(slab)?;
                write(writer, slab.facts(slab.slot_at(address)?).block);
                Some(())
            }),
            Owner::Large { blocks, .. } => {
                let central = &mut *lock(&self.central);
                let slot = central.find(address, blocks)?.1.slot;
                write(&mut central.writers[SMALL], slot);
                Some(())
            }
            Owner::None => {
                let central = &mut *lock(&self.central);
                let slot = central.direct_slot(address)?;
                write(&mut central.writers[SMALL], slot);
                Some(())
            }
        }
    }
}

impl Central {
    /// Notes in the page table that block `id` starts at `address`, if its page or cell has no room
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

    /// Splits the pages of a range, so that each cell has a word of its own.
    pub(crate) fn split(&self, table: &PageTable, address: u64, bytes: u64) {
        table.split(address, bytes, |id| self.arenas.run(id).map(|run| run.address));
    }

    /// Takes the block that starts at `address` out of the overflow cell in `page`. `None`, too, if
    /// `page` was split since its lookup: the caller then looks again.
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

    /// The blocks that may start at `address`: those that the page table named, and the one of an
    /// overflow cell.
    fn candidates(
        &self,
        address: u64,
        blocks: [Option<RunId>; 2],
    ) -> impl Iterator<Item = RunId> + use<> {
        blocks.into_iter().flatten().chain(self.overflow.get(&address).copied())
    }

    /// The live block that starts at `address`, by the page table or an overflow cell.
    pub(crate) fn find(&self, address: u64, blocks: [Option<RunId>; 2]) -> Option<(RunId, &Run)> {
        self.candidates(address, blocks).find_map(|id| block_at(&self.arenas, id, address))
    }

    /// As [`Central::find`], in any state, pending included.
    pub(crate) fn run_at(&self, address: u64, blocks: [Option<RunId>; 2]) -> Option<(RunId, &Run)> {
        let mut runs =
            self.candidates(address, blocks).filter_map(|id| Some((id, self.arenas.run(id)?)));
        runs.find(|(_, run)| run.address == address)
    }

    /// Checks the blocks of overflow cells against the runs and the page table.
    ///
    /// # Errors
    /// What is wrong, in words.
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

impl Heap {
    /// The base and length of the region that holds `address`: CUDA's IPC handles name base
    /// pointers.
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        self.devices().find_map(|device| {
            let central = lock(&device.central);
            let direct = central
                .direct_blocks()
                .find(|&(base, bytes)| (base..base + bytes).contains(&address));
            direct.or_else(|| {
                central.arenas.region_at(address).map(|region| (region.address, region.bytes))
            })
        })
    }

    /// Counts the live block that starts at `address` under `lifetime`. False, and nothing done, if
    /// no live block of this heap starts there.
    pub fn tag(&self, address: u64, lifetime: Lifetime) -> bool {
        let owner = self.shared.table.get(address);
        let (Owner::Slab { device, .. } | Owner::Large { device, .. }) = owner else {
            return false;
        };
        let device = self.device(i64::from(device));
        device.ok().and_then(|device| device.tag(address, owner, lifetime)).is_some()
    }
}

/// Block `id`, if it is a live large block that starts at `address`.
#[inline(always)]
pub(crate) fn block_at(arenas: &Arenas, id: RunId, address: u64) -> Option<(RunId, &Run)> {
    let run = arenas.run(id)?;
    (run.address == address && run.state == RunState::Live && !run.is_slab).then_some((id, run))
}
