//! Blocks of `backing:passthrough`: the driver serves each request itself, and the allocator only
//! keeps the books of its blocks.
//!
//! A graph uses memory that must stay when its block is freed; that lies in plain spans
//! ([`super::spans`]).

use crate::central::{Central, Direct};
use crate::device::Device;
use crate::driver::{ErrorKind, Result};
use crate::error::Error;
use crate::journal::Action;
use crate::request::Request;
use crate::shared::Shared;
use crate::sync::lock;
use gruyere_record::gauges::pool_of;
use gruyere_record::{BlockEntry, BlockSlot, EventKind};

impl Central {
    pub(crate) fn add_direct(&mut self, entry: &BlockEntry) {
        let slot = self.writers[pool_of(entry.size)].block_insert(entry);
        let BlockEntry { address, size, requested, lifetime, .. } = *entry;
        self.backing.hold(size);
        self.backing.reserved = self.backing.held;
        self.backing.log.note(Action::SegmentAlloc, address, size);
        self.direct.insert(address, Direct { size, requested, lifetime, slot });
        self.publish_reserved();
    }

    /// Live bytes and requested bytes of the block of `backing:passthrough` at `address`.
    pub(crate) fn direct_block(&self, address: u64) -> Option<(u64, u64)> {
        self.direct.get(&address).map(|block| (block.size, block.requested))
    }

    /// Whether `address` is a block of `backing:passthrough`.
    pub(crate) fn is_direct(&self, address: u64) -> bool {
        self.direct.contains_key(&address)
    }

    /// The place in the block map of the block of `backing:passthrough` at `address`.
    pub(crate) fn direct_slot(&self, address: u64) -> Option<BlockSlot> {
        Some(self.direct.get(&address)?.slot)
    }

    /// Takes a block of `backing:passthrough` off the books before the driver frees it; its live
    /// bytes.
    pub(crate) fn remove_direct(&mut self, address: u64) -> Option<u64> {
        let Direct { size, requested, lifetime, slot } = self.direct.remove(&address)?;
        self.writers[pool_of(size)].block_remove(slot, size, requested, lifetime, false);
        Some(size)
    }

    /// Notes the driver's answer to the free of a block of `backing:passthrough`. If it refused, or
    /// could not be asked (`None`), the next trim tries again.
    pub(crate) fn complete_direct_free(
        &mut self,
        address: u64,
        size: u64,
        result: Option<Result<()>>,
    ) {
        self.backing.calls += u64::from(result.is_some());
        self.backing.unhold(size);
        match result {
            Some(Ok(())) => self.backing.log.note(Action::SegmentFree, address, size),
            Some(Err(error)) if error.kind == ErrorKind::Deinitialized => {}
            Some(Err(error)) => {
                log::warn!("cuMemFree({address:#x}) failed: {error}; it will be retried");
                self.backing.errors += 1;
                self.backing.keep_orphan(address, size);
            }
            None => self.backing.keep_orphan(address, size),
        }
        self.backing.reserved = self.backing.held;
        self.publish_reserved();
    }

    /// Blocks of `backing:passthrough`: address and bytes.
    pub(crate) fn direct_blocks(&self) -> impl Iterator<Item = (u64, u64)> {
        self.direct.iter().map(|(&address, block)| (address, block.size))
    }

    /// The known blocks of `backing:passthrough`, and their places in the block map.
    pub(crate) fn direct_facts(&self) -> impl Iterator<Item = (BlockEntry, BlockSlot)> {
        self.direct.iter().map(|(&address, block)| {
            let &Direct { size, requested, lifetime, slot } = block;
            (BlockEntry { address, size, requested, lifetime, ..BlockEntry::default() }, slot)
        })
    }
}

impl Device {
    /// Allocates a block of `backing:passthrough` from the driver.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the driver has no memory or the ceiling would be passed; any other
    /// error of the driver.
    pub(crate) fn malloc_direct(
        &self,
        shared: &Shared,
        request: Request,
    ) -> std::result::Result<u64, Error> {
        let mut entry = request.entry(self.id, shared.step(), 0);
        let over = {
            let central = lock(&self.central);
            central.backing.held.checked_add(entry.size).is_none_or(|held| held > central.limit)
        };
        let result = if over { None } else { Some(shared.driver.alloc(self.id, request.size)) };
        let mut central = lock(&self.central);
        central.backing.calls += 1;
        match result {
            Some(Ok(address)) => {
                entry.address = address;
                central.add_direct(&entry);
                request.note(&mut central.writers[pool_of(entry.size)], address);
                Ok(address)
            }
            None => {
                drop(central);
                Err(self.out_of_memory(shared, request.size, request.stream))
            }
            Some(Err(error)) => {
                central.backing.errors += 1;
                drop(central);
                if error.kind == ErrorKind::OutOfMemory {
                    return Err(self.out_of_memory(shared, request.size, request.stream));
                }
                Err(error.into())
            }
        }
    }

    /// Frees a block of `backing:passthrough`. `None`: no block starts there.
    pub(crate) fn free_direct(&self, shared: &Shared, address: u64, start: u64) -> Option<()> {
        let size = lock(&self.central).remove_direct(address)?;
        // Without the central lock: cuMemFree waits for the device. A block freed during a capture
        // goes to the driver after the capture.
        let result = self.release_guard(shared).map(|_guard| shared.driver.free(self.id, address));
        let mut central = lock(&self.central);
        central.complete_direct_free(address, size, result);
        central.writers[pool_of(size)].event(EventKind::Free, 0, 0, address, size, start);
        Some(())
    }
}
