//! Reusing the numbers of streams that are gone.
//!
//! A program that makes a stream for each request sees more streams than there are numbers. When
//! all are taken, the allocator synchronises the device and frees the numbers of unreferenced
//! streams: those certainly gone, and passing ones that no call is naming now. Whether a passing
//! stream is gone cannot be asked ([`crate::order::streams`]); one that is not gets another number
//! when it is named again, and as it had nothing, it has lost nothing. The references to a stream
//! are its own slabs and runs, the blocks that it uses, and the blocks that wait for it.
//!
//! References to a gone stream only become fewer, or move from a shard to the central part, whose
//! run of a slab names the stream all the while. So a look at one shard after the other, then at
//! the central part, misses none.

use crate::central::Central;
use crate::device::Device;
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::order::streams::Resolved;
use crate::path::synchronize::Unsynchronized;
use crate::shared::Shared;
use crate::sync::lock;
use std::collections::HashSet;

impl Device {
    /// The number of the stream that `handle` names, when all numbers are taken.
    ///
    /// # Errors
    /// [`Error::TooManyStreams`]: none is free still, since that many streams are alive or have
    /// live blocks, or a capture prevents synchronising the device. [`Error::Driver`]: the driver
    /// refused to synchronise, or to say whether a stream captures.
    #[cold]
    pub(crate) fn resolve_by_recycling(
        &self,
        shared: &Shared,
        handle: StreamHandle,
    ) -> Result<Resolved<'_>, Error> {
        let driver = &*shared.driver;
        let _recycling = self.streams.recycling();
        // Another thread may have freed a number meanwhile.
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
        lock(&self.central).order.forget(released);
        self.streams.release(&gone, released);
        unreferred.map(drop)
    }

    /// The streams of `gone` without references, after synchronising the device.
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
        // With `share:off` too: all work enqueued anywhere before those frees is done.
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
