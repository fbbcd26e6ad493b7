//! One walk over all memory of a device: each report, count or check is a [`Visitor`].

use crate::central::{Central, SMALL};
use crate::device::Device;
use crate::pools::{Pool, PoolNumber};
use crate::runs::arena::{Region, RegionId, Run, RunId};
use crate::small::shard::Shard;
use crate::sync::{MutexGuard, lock};
use gruyere_record::ShardWriter;

/// A shard of small blocks on a walk.
pub(crate) struct WalkedShard<'a> {
    /// The shard's number in the page table.
    pub(crate) number: u32,
    pub(crate) shard: &'a Shard,
    /// The writer of the shard's part of the record.
    pub(crate) writer: &'a ShardWriter,
    /// The pool that owns the shard; `None`: it is one of streams.
    pub(crate) pool: Option<&'a Pool>,
}

/// Visits, on a walk: the shards of streams, then under the central lock each pool and its shard,
/// then each region and its runs.
pub(crate) trait Visitor {
    /// The error that ends the walk.
    type Error;
    /// Whether to visit regions and runs.
    const RUNS: bool = true;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), Self::Error>;

    /// A pool, before its shard.
    fn pool(
        &mut self,
        _number: PoolNumber,
        _pool: &Pool,
        _central: &Central,
    ) -> Result<(), Self::Error> {
        Ok(())
    }

    /// A region, before its runs.
    fn region(
        &mut self,
        _id: RegionId,
        _region: &Region,
        _central: &Central,
    ) -> Result<(), Self::Error> {
        Ok(())
    }

    /// A run, by address within its region.
    fn run(&mut self, _id: RunId, _run: &Run, _central: &Central) -> Result<(), Self::Error> {
        Ok(())
    }
}

impl Device {
    /// Takes one lock after the other; returns the central one, under which it visited pools and
    /// runs.
    ///
    /// # Errors
    /// The visitor's error, at once.
    pub(crate) fn walk<V: Visitor>(
        &self,
        visitor: &mut V,
    ) -> Result<MutexGuard<'_, Central>, V::Error> {
        for (number, cell) in self.shards.iter().enumerate() {
            let cell = lock(cell);
            let (number, shard, writer) = (number as u32, &cell.shard, &cell.writer);
            visitor.shard(&WalkedShard { number, shard, writer, pool: None })?;
        }
        let guard = lock(&self.central);
        let central = &*guard;
        for (number, pool) in central.pools.iter() {
            visitor.pool(number, pool, central)?;
            if let Some(shard) = &pool.shard {
                visitor.shard(&WalkedShard {
                    number,
                    shard,
                    writer: &central.writers[SMALL],
                    pool: Some(pool),
                })?;
            }
        }
        if V::RUNS {
            for (id, region) in central.arenas.regions() {
                visitor.region(id, region, central)?;
                for (id, run) in central.arenas.runs_of(id) {
                    visitor.run(id, run, central)?;
                }
            }
        }
        Ok(guard)
    }
}
