//! The numbers of streams that are gone, for streams to come.
//!
//! Programs that make a stream for each request see more streams than there are numbers. When all
//! are taken, the device is synchronised, and the numbers of streams that nothing refers to any
//! more are free again: of those that are gone for certain, and of passing ones that no call is
//! naming now. Whether those are gone cannot be asked ([`crate::order::streams`]); one that is not
//! gets another number when it is named again, and as it had nothing, it has lost nothing. What
//! refers to a stream: slabs and runs that are its own, blocks that it uses and blocks that wait
//! for it.
//!
//! References to a stream that is gone only become fewer, or move from a shard to the central part,
//! whose run of a slab names the stream all the while. So looking at one shard after the other,
//! then at the central part, misses none.

use crate::central::Central;
use crate::device::Device;
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::order::streams::Resolved;
use crate::path::order_rule::Unsynchronized;
use crate::shared::Shared;
use crate::sync::lock;
use std::collections::HashSet;

impl Device {
    /// The number of the stream that `handle` names, for which there was none left.
    ///
    /// # Errors
    /// [`Error::TooManyStreams`]: there is none still, since as many streams are alive or have
    /// blocks that are, or a capture keeps the device from being synchronised. [`Error::Driver`]:
    /// the driver refused to synchronise it, or to say whether anything captures.
    #[cold]
    pub(crate) fn resolve_by_recycling(
        &self,
        shared: &Shared,
        handle: StreamHandle,
    ) -> Result<Resolved<'_>, Error> {
        let driver = &*shared.driver;
        let _recycling = self.streams.recycling();
        // Another thread may have made room meanwhile.
        if let Some(found) = self.streams.resolve(driver, handle) {
            return Ok(found);
        }
        let recycled = self.recycle(shared);
        match (self.streams.resolve(driver, handle), recycled) {
            (Some(found), _) => Ok(found),
            (None, Err(Unsynchronized::Refused(error))) => Err(Error::Driver(error)),
            (None, Ok(()) | Err(Unsynchronized::Capturing)) => Err(Error::TooManyStreams),
        }
    }

    fn recycle(&self, shared: &Shared) -> Result<(), Unsynchronized> {
        let gone = self.streams.withdraw();
        let unreferred = self.unreferred(shared, &gone);
        let released = unreferred.as_deref().unwrap_or_default();
        self.forget_order(released);
        self.streams.release(&gone, released);
        unreferred.map(drop)
    }

    /// Those of `gone` to which nothing refers, once the device has been synchronised.
    fn unreferred(&self, shared: &Shared, gone: &HashSet<u32>) -> Result<Vec<u32>, Unsynchronized> {
        if gone.is_empty() {
            return Ok(Vec::new());
        }
        let epochs = self.synchronize_epochs(shared)?;
        let mut referred = HashSet::new();
        for cell in self.shards.iter() {
            lock(cell).shard.streams_referred(&mut referred);
        }
        let mut central = lock(&self.central);
        // With `share:off` too: all that the program had enqueued anywhere before those frees is
        // done.
        central.promote_to(&|stream| {
            if gone.contains(&stream) { epochs.get(&stream).copied().unwrap_or(0) } else { 0 }
        });
        central.streams_referred(&mut referred);
        drop(central);
        Ok(gone.difference(&referred).copied().collect())
    }
}

impl Central {
    /// Adds every stream that owns a run, uses a block or is waited for.
    pub(crate) fn streams_referred(&self, referred: &mut HashSet<u32>) {
        referred.extend(self.arenas.streams());
        referred.extend(self.users.values().flatten().copied().chain(self.pending.streams()));
        for (_, shard) in self.pools.shards() {
            shard.streams_referred(referred);
        }
    }
}
