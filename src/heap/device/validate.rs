//! Walks every page and block, and holds the books against the driver's.
#![deny(unsafe_code)]

use crate::heap::arena::RunState;
use crate::heap::device::Device;
use crate::heap::lane::LANES;
use crate::heap::named::NAMED_LANES;
use crate::heap::page_table::Owner;
use crate::heap::shared::Shared;
use crate::heap::size_class::round;
use crate::heap::slab::{Slab, SlotState};
use crate::heap::sync::lock;

impl Device {
    pub(in crate::heap) fn validate(&self, shared: &Shared) -> Result<(), String> {
        let mut live = 0;
        let mut slab_runs = std::collections::HashMap::new();
        for (number, cell) in self.lanes.iter().enumerate() {
            let cell = lock(cell);
            cell.lane.validate()?;
            if cell.lane.overlooks_waits(&self.streams) {
                return Err(format!("lane {number} does not look at a block whose wait is over"));
            }
            for (id, slab) in cell.lane.slabs() {
                live += self.validate_slab(shared, number as u32, id, slab)?;
                slab_runs.insert(slab.run, slab.base);
            }
        }
        let central = lock(&self.central);
        for (number, pool) in central.captures.pools.iter().enumerate() {
            let Some(pool) = pool else { continue };
            pool.lane.validate()?;
            for (id, slab) in pool.lane.slabs() {
                live += self.validate_slab(shared, LANES as u32 + number as u32, id, slab)?;
                slab_runs.insert(slab.run, slab.base);
            }
        }
        for (number, pool) in central.named.iter() {
            pool.lane.validate()?;
            let mut small = 0;
            for (id, slab) in pool.lane.slabs() {
                small += self.validate_slab(shared, NAMED_LANES + number, id, slab)?;
                slab_runs.insert(slab.run, slab.base);
            }
            let runs = central.arenas.blocks().map(|(_, run)| run);
            let large = runs
                .filter(|run| run.state == RunState::Live && !run.is_slab)
                .filter(|run| central.arenas.region(run.region).space == pool.space);
            let bytes = small + large.map(|run| run.bytes).sum::<u64>();
            if bytes != pool.live_bytes {
                let (name, counted) = (&pool.name, pool.live_bytes);
                return Err(format!("pool {name:?} has {bytes} B live and counts {counted}"));
            }
            live += small;
        }
        central.arenas.validate()?;
        let is_further = |stream| self.streams.has_got_further(stream);
        if let Some(stream) = central.arenas.overlooked(&|stream| self.streams.completed(stream), &is_further)
        {
            return Err(format!("nobody looks at what stream {stream} has freed and is past"));
        }
        if central.overlooks_waits(&self.streams) {
            return Err("nobody looks at a large block whose wait is over".to_owned());
        }
        central.validate_small(&shared.table)?;
        for (id, run) in central.arenas.blocks() {
            if run.is_slab {
                if slab_runs.remove(&id) != Some(run.address) {
                    return Err(format!("run {:#x} is a slab's, but no slab lies there", run.address));
                }
                continue;
            }
            if run.state == RunState::Pending {
                continue;
            }
            let Owner::Large { device, blocks } = shared.table.get(run.address) else {
                return Err(format!("block {:#x} is not found from its address", run.address));
            };
            if device != self.id || central.run_at(run.address, blocks).map(|found| found.0) != Some(id) {
                return Err(format!("block {:#x} is not the one that its address names", run.address));
            }
            if round(run.requested()) != run.bytes {
                return Err(format!("block {:#x} is not as long as what was asked for", run.address));
            }
            live += run.bytes;
        }
        let busy: u64 = central.arenas.blocks().map(|(_, run)| run.bytes).sum();
        if busy != central.arenas.busy() {
            return Err(format!("runs of {busy} B are in use, the arenas count {} B", central.arenas.busy()));
        }
        if let Some((_, base)) = slab_runs.into_iter().next() {
            return Err(format!("slab {base:#x} lies in no run of its own"));
        }
        live += central.direct_blocks().map(|(_, bytes)| bytes).sum::<u64>() + central.watched.held();
        let (recorded, _) = shared.record.live(self.id);
        if live != recorded {
            return Err(format!("{live} B are live, the record says {recorded}"));
        }
        central.backing.pages.validate()?;
        let (books, pages) = (central.arenas.mapped_bytes(), &central.backing.pages);
        if books != (pages.owned(), pages.shadowed()) {
            let (owned, shadowed) = (pages.owned(), pages.shadowed());
            return Err(format!(
                "the arena has {} B of pages and {} B of shadow, the pages' books {owned} and {shadowed}",
                books.0, books.1
            ));
        }
        let pages = central.backing.pages.held();
        let spans = central.arenas.regions().filter(|(id, _)| !central.arenas.is_stitched(*id));
        let spans: u64 = spans.map(|(_, region)| region.span.1).sum();
        let direct: u64 = central.direct_blocks().map(|(_, bytes)| bytes).sum();
        let held = central.backing.held;
        if spans + direct + pages + central.backing.orphaned() != held {
            return Err(format!("regions have {spans} B, {held} are held"));
        }
        if let Some(used) = central.backing.used_by_driver(&*shared.driver)
            && used != held
        {
            return Err(format!("{held} B are held, the driver's pools say {used}"));
        }
        Ok(())
    }

    /// Live bytes of a slab.
    fn validate_slab(&self, shared: &Shared, lane: u32, id: u32, slab: &Slab) -> Result<u64, String> {
        let class = slab.size_class();
        for page in
            (slab.base..slab.base + class.slab_bytes()).step_by(crate::heap::size_class::PAGE as usize)
        {
            if shared.table.get(page) != (Owner::Slab { device: self.id, lane, slab: id }) {
                return Err(format!("page {page:#x} does not name its slab"));
            }
        }
        let live = (0..class.slots).filter(|&slot| matches!(slab.state(slot), SlotState::Live { .. }));
        Ok(live.map(|slot| round(slab.facts(slot).requested)).sum())
    }
}
