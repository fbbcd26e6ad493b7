//! Validation: walks every page and block, and checks the books against the driver's.

use crate::central::Central;
use crate::device::Device;
use crate::heap::Heap;
use crate::pools::{Pool, PoolNumber, Purpose, Source};
use crate::report::walk::{Visitor, WalkedShard};
use crate::runs::arena::{Run, RunId, RunState};
use crate::runs::page_table::{CELL, Owner};
use crate::shared::Shared;
use crate::small::size_class::round;
use crate::small::slab::Slab;
use std::collections::{BTreeMap, HashMap};

/// The findings of a walk.
struct Audit<'a> {
    device: &'a Device,
    shared: &'a Shared,
    /// Bytes of live blocks.
    live: u64,
    /// Bytes of runs in use.
    busy: u64,
    /// The first byte of each slab whose run has not come yet.
    slabs: HashMap<RunId, u64>,
    /// For each pool apart: the live bytes found, and its own count.
    pools: BTreeMap<PoolNumber, (Purpose, [u64; 2])>,
    /// The pool of each space whose pool counts its runs.
    by_space: HashMap<u32, PoolNumber>,
}

impl Visitor for Audit<'_> {
    type Error = String;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), String> {
        let &WalkedShard { number, shard, pool, .. } = walked;
        shard.validate()?;
        if pool.is_none() && shard.overlooks_waits(&self.device.streams) {
            return Err(format!("shard {number} overlooks a block whose wait is over"));
        }
        for (id, slab) in shard.slabs() {
            self.check_pages(number, id, slab)?;
            let live = slab.live_slots().map(|slot| round(slab.facts(slot).requested)).sum::<u64>();
            self.live += live;
            if let Some((_, [found, _])) = self.pools.get_mut(&number) {
                *found += live;
            }
            self.slabs.insert(slab.run, slab.base);
        }
        Ok(())
    }

    fn pool(&mut self, number: PoolNumber, pool: &Pool, _: &Central) -> Result<(), String> {
        if !pool.is_ordinary() {
            self.pools.insert(number, (pool.purpose.clone(), [0, pool.live_bytes]));
            self.by_space.extend(pool.spaces().iter().map(|&space| (space, number)));
        }
        Ok(())
    }

    fn run(&mut self, id: RunId, run: &Run, central: &Central) -> Result<(), String> {
        if !matches!(run.state, RunState::Live | RunState::Pending) {
            return Ok(());
        }
        self.busy += run.bytes;
        if run.is_slab {
            if self.slabs.remove(&id) != Some(run.address) {
                return Err(format!("run {:#x} is a slab's, but no slab lies there", run.address));
            }
            return Ok(());
        }
        if run.state == RunState::Pending {
            return Ok(());
        }
        let Owner::Large { device, blocks } = self.shared.table.get(run.address) else {
            return Err(format!("block {:#x} is not found from its address", run.address));
        };
        if device != self.device.id
            || central.run_at(run.address, blocks).map(|found| found.0) != Some(id)
        {
            return Err(format!("block {:#x} is not the one that its address names", run.address));
        }
        let space = central.arenas.region(run.region).space;
        let is_whole = central
            .pools
            .of_space(space)
            .is_some_and(|pool| pool.rules.source == Source::Outside { split: false });
        if round(run.requested()) != run.bytes && !is_whole {
            return Err(format!("block {:#x} is not as long as what was asked for", run.address));
        }
        self.live += run.bytes;
        let number = self.by_space.get(&space);
        if let Some((_, [found, _])) = number.and_then(|number| self.pools.get_mut(number)) {
            *found += run.bytes;
        }
        Ok(())
    }
}

impl Audit<'_> {
    fn check_pages(&self, shard: u32, id: u32, slab: &Slab) -> Result<(), String> {
        let owner = Owner::Slab { device: self.device.id, shard, slab: id };
        let mut cells = (slab.base..slab.base + slab.bytes()).step_by(CELL as usize);
        match cells.find(|&cell| self.shared.table.get(cell) != owner) {
            Some(cell) => Err(format!("cell {cell:#x} does not name its slab")),
            None => Ok(()),
        }
    }

    /// Compares the findings with the books.
    fn close(self, central: &Central) -> Result<(), String> {
        let (device, shared) = (self.device, self.shared);
        for (number, (purpose, [found, counted])) in &self.pools {
            if found != counted {
                return Err(format!(
                    "pool {number} ({purpose:?}) has {found} B live and counts {counted}"
                ));
            }
        }
        if self.busy != central.arenas.busy() {
            let (busy, counted) = (self.busy, central.arenas.busy());
            return Err(format!("runs of {busy} B are in use, the arenas count {counted} B"));
        }
        if let Some((_, base)) = self.slabs.into_iter().next() {
            return Err(format!("slab {base:#x} lies in no run of its own"));
        }
        let direct: u64 = central.direct_blocks().map(|(_, bytes)| bytes).sum();
        let live = self.live + direct + central.watched.held();
        let (recorded, _) = shared.record.live(device.id);
        if live != recorded {
            return Err(format!("{live} B are live, the record says {recorded}"));
        }
        let (books, pages) = (central.arenas.mapped_bytes(), &central.backing.pages);
        if books != (pages.owned(), pages.stale_alias_bytes()) {
            let (owned, stale) = (pages.owned(), pages.stale_alias_bytes());
            return Err(format!(
                "the arena has {} B of pages and {} B of stale aliases, the pages' books {owned} \
                 and {stale}",
                books.0, books.1
            ));
        }
        let spans = central.arenas.regions().filter(|(id, _)| !central.arenas.is_stitched(*id));
        let spans: u64 = spans.map(|(_, region)| region.span.1).sum();
        let held = central.backing.held;
        if spans + direct + pages.held() + central.backing.orphaned() != held {
            return Err(format!("regions have {spans} B, {held} are held"));
        }
        if let Some(used) = central.backing.used_by_driver(&*shared.driver)
            && used != held
        {
            return Err(format!("{held} B are held, the driver's pools say {used}"));
        }
        Ok(())
    }
}

impl Device {
    /// Walks everything.
    ///
    /// # Errors
    /// The first broken invariant, in words.
    pub(crate) fn validate(&self, shared: &Shared) -> Result<(), String> {
        let mut audit = Audit {
            device: self,
            shared,
            live: 0,
            busy: 0,
            slabs: HashMap::new(),
            pools: BTreeMap::new(),
            by_space: HashMap::new(),
        };
        let central = self.walk(&mut audit)?;
        central.arenas.validate()?;
        central.backing.pages.validate()?;
        let is_further = |stream| self.streams.has_got_further(stream);
        if let Some(stream) =
            central.arenas.overlooked(&|stream| self.streams.reusable(stream), &is_further)
        {
            return Err(format!("the arenas overlook what stream {stream} has freed and is past"));
        }
        if central
            .pending
            .overlooks(self.streams.strides(), |stream| self.streams.completed(stream))
        {
            return Err("the pending frees overlook a large block whose wait is over".to_owned());
        }
        central.validate_overflow(&shared.table)?;
        audit.close(&central)
    }
}

impl Heap {
    /// Checks every invariant that can be checked from inside: runs tile their regions; slabs lie
    /// in the runs taken for them and are found from each of their pages; blocks are found from
    /// their addresses; live bytes equal the record's; and the memory held equals the driver's
    /// count. No other thread may be in the heap.
    ///
    /// # Errors
    /// The first broken invariant, in words.
    pub fn validate(&self) -> Result<(), String> {
        self.devices().try_for_each(|device| {
            device.validate(&self.shared).map_err(|what| format!("device {}: {what}", device.id))
        })
    }
}
