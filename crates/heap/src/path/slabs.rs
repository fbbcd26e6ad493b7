//! Slabs come and go: in the shards of streams, and in pools with a shard of their own.
//!
//! A run becomes a slab ([`Device::make_slab`]), enters a shard ([`Device::add_slab`]), and once
//! empty goes back to its arena: at a free that leaves a surplus, or when a request finds nothing
//! free ([`Device::return_empty_slabs`]).

use crate::central::{Central, SMALL};
use crate::device::{Device, ShardCell};
use crate::order::streams::ALL_STREAMS;
use crate::pools::{PoolNumber, Reuse};
use crate::request::Request;
use crate::runs::arena::RunId;
use crate::runs::page_table::Owner;
use crate::shared::Shared;
use crate::small::shard::{SHARDS, Shard};
use crate::small::slab::Slab;
use crate::sync::{MutexGuard, lock};
use gruyere_record::{BlockTag, SegmentEntry, ShardWriter};

impl Device {
    /// Applies `look` to shard `number` under its lock: a shard of streams, or a pool's own, for
    /// which `look` also gets the pool's reuse rule. `None`: there is no such shard.
    pub(crate) fn in_shard<T>(
        &self,
        number: u32,
        look: impl FnOnce(&mut Shard, &mut ShardWriter, Option<Reuse>) -> Option<T>,
    ) -> Option<T> {
        if let Some(cell) = self.shards.get(number as usize) {
            let cell = &mut *lock(cell);
            return look(&mut cell.shard, &mut cell.writer, None);
        }
        let central = &mut *lock(&self.central);
        let pool = central.pools.get_mut(number)?;
        look(pool.shard.as_mut()?, &mut central.writers[SMALL], Some(pool.rules.reuse))
    }

    /// Makes a run just taken for `request` a slab of `class`, not in any shard yet. `capture`: the
    /// tag under which the record counts it. `None`: there is no such run.
    pub(crate) fn make_slab(
        &self,
        shared: &Shared,
        central: &mut Central,
        run: RunId,
        class: u8,
        request: &Request,
        capture: u8,
    ) -> Option<Slab> {
        let facts = central.arenas.run_mut(run)?;
        facts.is_slab = true;
        let (base, epoch) = (facts.address, facts.epoch);
        let tag = BlockTag::new(self.id as u8, request.lifetime as u8, capture, request.stream);
        let mut slab = Slab::new(base, class, tag, run);
        // Another thread may return the slab before any block in it is used: the stream's earlier
        // work there is not done then.
        slab.epoch = epoch;
        // `add_slab` writes the table without this lock: by then the slab's cells have words of
        // their own.
        central.split(&shared.table, base, slab.bytes());
        central.usage.slab_taken(slab.bytes());
        let entry = SegmentEntry { site: request.site, ..slab.segment_entry() };
        slab.segment = shared.record.segment_insert(&entry);
        Some(slab)
    }

    /// Puts a slab into shard `number`; from then on lookups find its blocks. Call under the
    /// shard's lock.
    pub(crate) fn add_slab(&self, shared: &Shared, number: u32, shard: &mut Shard, slab: Slab) {
        let (base, bytes) = (slab.base, slab.bytes());
        let slab = shard.add_slab(slab);
        shared.table.set_range(base, bytes, Owner::Slab { device: self.id, shard: number, slab });
    }

    /// Takes an empty slab out of its shard; `None` if it is in use again. Its pages have no owner
    /// from then on. Call under the shard's lock, so that no free meets a stale owner.
    pub(crate) fn remove_slab(&self, shared: &Shared, shard: &mut Shard, id: u32) -> Option<Slab> {
        let slab = shard.remove_slab(id)?;
        shared.table.set_range(slab.base, slab.bytes(), Owner::None);
        shared.record.segment_remove(slab.segment);
        Some(slab)
    }

    fn remove_empty_slabs(&self, shared: &Shared, shard: &mut Shard) -> Vec<Slab> {
        shard
            .empty_slabs()
            .into_iter()
            .filter_map(|id| self.remove_slab(shared, shard, id))
            .collect()
    }

    /// Returns to the arenas a slab that its stream's shard can spare.
    pub(crate) fn drop_surplus(
        &self,
        shared: &Shared,
        mut cell: MutexGuard<'_, ShardCell>,
        id: u32,
    ) {
        let slab = self.remove_slab(shared, &mut cell.shard, id);
        drop(cell);
        if let Some(slab) = slab {
            lock(&self.central).release_slab(&slab);
        }
    }

    /// Returns to the arenas slabs that have left their shard; the bytes returned.
    fn release_slabs(&self, slabs: &[Slab]) -> u64 {
        if slabs.is_empty() { 0 } else { lock(&self.central).release_slabs(slabs) }
    }

    /// Frees the small blocks of a stream's shard whose waits are over.
    pub(crate) fn complete_shard_frees(&self, shared: &Shared, stream: u32) {
        let slabs: Vec<Slab> = {
            let cell = &mut *self.shard(stream);
            let surplus = cell.shard.complete_frees(&mut cell.writer, &self.streams);
            surplus
                .into_iter()
                .filter_map(|id| self.remove_slab(shared, &mut cell.shard, id))
                .collect()
        };
        self.release_slabs(&slabs);
    }

    /// Returns every empty slab of the streams' shards, and of pools that streams share, to the
    /// arenas; the bytes returned.
    pub(crate) fn return_empty_slabs(&self, shared: &Shared) -> u64 {
        let mut bytes = 0;
        // Runs at every growth past the slack: so it visits only shards that have a stream, and
        // most of those have nothing to return.
        let known = self.streams.count();
        let is_used = |&shard: &u32| shard < known || shard == Self::shard_number(ALL_STREAMS);
        for shard in (0..SHARDS as u32).filter(is_used) {
            let (waits, idles) = {
                let shard = &self.shard(shard).shard;
                (shard.has_pending(), shard.has_empty_slabs())
            };
            if waits {
                self.complete_shard_frees(shared, shard);
            } else if !idles {
                continue;
            }
            let slabs = self.remove_empty_slabs(shared, &mut self.shard(shard).shard);
            bytes += self.release_slabs(&slabs);
        }
        let central = &mut *lock(&self.central);
        if !central.pools.has_apart() {
            return bytes;
        }
        let is_shared = |&number: &PoolNumber| {
            central.pools.get(number).is_some_and(|pool| pool.rules.reuse == Reuse::Shared)
        };
        let pools: Vec<PoolNumber> =
            central.pools.shards().map(|shard| shard.0).filter(is_shared).collect();
        bytes
            + pools
                .into_iter()
                .map(|pool| self.return_pool_slabs(shared, central, pool))
                .sum::<u64>()
    }

    /// Frees the small blocks of a pool whose waits are over, and returns its empty slabs to its
    /// space; the bytes returned.
    pub(crate) fn return_pool_slabs(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: PoolNumber,
    ) -> u64 {
        let Some(shard) = central.pools.shard_mut(number) else { return 0 };
        shard.complete_frees(&mut central.writers[SMALL], &self.streams);
        let slabs = self.remove_empty_slabs(shared, shard);
        central.release_slabs(&slabs)
    }
}

impl Central {
    /// Returns to its arena a slab that has left its shard.
    pub(crate) fn release_slab(&mut self, slab: &Slab) {
        if let Some(run) = self.arenas.run_mut(slab.run) {
            run.is_slab = false;
            self.usage.slab_given(run.bytes);
        }
        self.arenas.release(slab.run, slab.stream, slab.epoch);
    }

    /// As [`Central::release_slab`], for several; the bytes returned.
    pub(crate) fn release_slabs(&mut self, slabs: &[Slab]) -> u64 {
        slabs.iter().for_each(|slab| self.release_slab(slab));
        slabs.iter().map(|slab| slab.bytes()).sum()
    }
}
