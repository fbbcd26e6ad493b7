//! The block that starts at an address: what is known of it, and what is noted of it after it was
//! allocated (its lifetime, its site).
//!
//! The page table names the blocks that start in a page, or in a cell of a split one. Only pools
//! with segments from outside have more in a cell than its word can name: `Central::overflow` has
//! those, by address.

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

/// A block that is live, or freed and waits for streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The number of its stream.
    pub(crate) stream: u32,
    /// Its length, a multiple of 512.
    pub(crate) bytes: u64,
    /// Bytes that the program asked for.
    pub(crate) requested: u64,
    /// The program has freed it.
    pub(crate) is_pending: bool,
    pub(crate) is_shared: bool,
    /// Who gets its memory; `None`: it is ordinary memory, or a block of `backing:passthrough`.
    pub(crate) apart: Option<Reuse>,
}

impl Found {
    /// Whether its memory is not free at once when the program frees it.
    pub(crate) fn waits(&self) -> bool {
        self.is_shared || self.apart == Some(Reuse::Never)
    }
}

fn in_slab(shard: &Shard, slab: u32, address: u64, apart: Option<Reuse>) -> Option<Found> {
    let slab = shard.slab(slab)?;
    let slot = slab.slot_at(address)?;
    let state = slab.state(slot);
    let requested = slab.facts(slot).requested;
    (state != SlotState::Free).then(|| Found {
        stream: slab.stream,
        bytes: round(requested),
        requested,
        is_pending: state == SlotState::Pending,
        is_shared: shard.is_used_elsewhere(address),
        apart,
    })
}

impl Device {
    /// The block that starts at `address`, in pages of `owner`; `None`: none does.
    pub(crate) fn block_at(&self, address: u64, owner: Owner) -> Option<Found> {
        match owner {
            Owner::Slab { shard, slab, .. } => {
                self.in_shard(shard, |shard, _, apart| in_slab(shard, slab, address, apart))
            }
            Owner::Large { blocks, .. } => {
                let central = lock(&self.central);
                let (_, run) = central.run_at(address, blocks).filter(|(_, run)| !run.is_slab)?;
                let is_pending = run.state == RunState::Pending;
                let pool = central.pools.of_space(central.arenas.region(run.region).space);
                (is_pending || run.state == RunState::Live).then(|| Found {
                    stream: run.stream,
                    bytes: run.bytes,
                    requested: run.requested(),
                    is_pending,
                    is_shared: run.shared,
                    apart: pool.filter(|pool| !pool.is_ordinary()).map(|pool| pool.rules.reuse),
                })
            }
            Owner::None => {
                let (bytes, requested) = lock(&self.central).direct_block(address)?;
                Some(Found {
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
}

impl Device {
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
}

impl Device {
    /// `request`, and where it comes from if a slab may be made for it: asked before the locks
    /// under which slabs are made.
    pub(crate) fn located(&self, shared: &Shared, request: Request) -> Request {
        if is_large(request.size) {
            return request;
        }
        Request { site: shared.site(request.size), ..request }
    }

    /// Tells the record where the block at `address`, in pages of `owner`, comes from. `None`: no
    /// block starts there.
    pub(crate) fn set_site(&self, address: u64, owner: Owner, site: SiteId) -> Option<()> {
        match owner {
            Owner::Slab { shard, slab, .. } => self.in_shard(shard, |shard, writer, _| {
                let slab = shard.slab(slab)?;
                writer.set_site(slab.facts(slab.slot_at(address)?).block, site);
                Some(())
            }),
            Owner::Large { blocks, .. } => {
                let central = &mut *lock(&self.central);
                let slot = central.find(address, blocks)?.1.slot;
                central.writers[SMALL].set_site(slot, site);
                Some(())
            }
            Owner::None => lock(&self.central).set_direct_site(address, site),
        }
    }
}

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

impl Heap {
    /// The base and length of the region that holds `address`, for IPC by base pointers.
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        self.devices().find_map(|device| {
            let central = lock(&device.central);
            let direct = central
                .direct_blocks()
                .find(|&(base, bytes)| (base..base + bytes).contains(&address));
            direct.or_else(|| {
                let mut regions =
                    central.arenas.regions().map(|(_, region)| (region.address, region.bytes));
                regions.find(|&(base, bytes)| (base..base + bytes).contains(&address))
            })
        })
    }

    /// Counts the live block that starts at `address` under `lifetime`. False, and nothing done: no
    /// live block of ours starts there.
    pub fn tag(&self, address: u64, lifetime: Lifetime) -> bool {
        let owner = self.shared.table.get(address);
        let (Owner::Slab { device, .. } | Owner::Large { device, .. }) = owner else {
            return false;
        };
        let device = self.device(i64::from(device));
        device.ok().and_then(|device| device.tag(address, owner, lifetime)).is_some()
    }
}

/// The large block of that number, if it starts at `address`.
#[inline(always)]
pub(crate) fn block_at(arenas: &Arenas, id: RunId, address: u64) -> Option<(RunId, &Run)> {
    let run = arenas.run(id)?;
    (run.address == address && run.state == RunState::Live && !run.is_slab).then_some((id, run))
}
