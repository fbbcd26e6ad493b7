//! Frees, and uses of a block by other streams (torch's `record_stream`).
//!
//! A free finds the owner of the address in the page table: a slab of a shard, or a run. A block
//! that other streams use waits until each of them is past its free ([`crate::order::pending`]);
//! any other is free at once, to its own stream.

use crate::central::Central;
use crate::device::{Device, Owned, ShardCell};
use crate::driver::{CaptureStatus, StreamHandle};
use crate::heap::{DEBUG, HISTORY, Heap, PASSTHROUGH, POISON_FREED, TOLD, TRACE};
use crate::order::streams::{self, ALL_STREAMS, Streams};
use crate::path::block_at::block_at;
use crate::path::malloc::sample_latency;
use crate::runs::arena::{Run, RunId, RunState, SHARED, WATCHED};
use crate::runs::page_table::{Owner, Page};
use crate::shared::Shared;
use crate::small::shard::FreeOutcome;
use crate::sync::{MutexGuard, lock};
use gruyere_record::gauges::pool_of;
use gruyere_record::{Block, BlockTag, DeviceGauge, EventKind, bucket_of, clock};
use once_cell::race::OnceBox;
use std::sync::atomic::Ordering;

impl Heap {
    /// Frees the block at `address`. Address 0 is fine. An address at which no live block starts is
    /// counted, logged and otherwise ignored (false).
    pub fn free(&self, address: u64) -> bool {
        let special = self.special.load(Ordering::Relaxed) & (DEBUG | HISTORY | TRACE);
        if special != 0 && address != 0 {
            self.before_free(address);
        }
        match self.find_owner(address) {
            Some(Owned::Small(device, shard, slab)) => {
                self.free_small(device, shard, slab, address)
            }
            Some(Owned::Large(device, page)) => self.free_large(device, page, address),
            None => self.free_other(address),
        }
    }

    /// The owner of `address`, for the free that follows at once. `None` for anything unusual,
    /// which [`Heap::free`] handles.
    #[inline(always)]
    pub fn owner(&self, address: u64) -> Option<Owned<'_>> {
        let special = self.special.load(Ordering::Relaxed) & (DEBUG | HISTORY | TRACE | TOLD);
        if special != 0 { None } else { self.find_owner(address) }
    }

    #[inline(always)]
    pub(crate) fn find_owner(&self, address: u64) -> Option<Owned<'_>> {
        let (page, word) = self.shared.table.lookup(address)?;
        let device = self.devices.get(word.device() as usize).and_then(OnceBox::get)?;
        match word.slab() {
            Some((shard, slab)) => Some(Owned::Small(device, shard, slab)),
            None => word.is_large().then_some(Owned::Large(device, page)),
        }
    }

    /// As [`Heap::free`], for the owner that [`Heap::owner`] returned.
    #[inline(always)]
    pub fn free_small(&self, device: &Device, shard: u32, slab: u32, address: u64) -> bool {
        let start = clock::now();
        let done = device.free_small(&self.shared, shard, slab, address, start);
        self.freed(done, address, start)
    }

    /// As [`Heap::free`], for the owner that [`Heap::owner`] returned.
    #[inline(always)]
    pub fn free_large(&self, device: &Device, page: Page<'_>, address: u64) -> bool {
        let start = clock::now();
        let done = device.free_large(&self.shared, page, address, start, None);
        if done.is_none() && page.is_split() {
            // The page was split since it was looked up: its cells have its blocks now.
            return self.free(address);
        }
        self.freed(done, address, start)
    }

    #[inline(always)]
    fn freed(&self, done: Option<()>, address: u64, start: u64) -> bool {
        if done.is_none() {
            self.bad_pointer("free", address);
            return false;
        }
        sample_latency(self.shared.record, false, start);
        true
    }

    /// As [`Heap::free`], for an address outside all pages: 0, a block of `backing:passthrough`, or
    /// a mistake.
    #[cold]
    #[inline(never)]
    fn free_other(&self, address: u64) -> bool {
        if address == 0 {
            return true;
        }
        let start = clock::now();
        let done = self.free_direct(address, start);
        self.freed(done, address, start)
    }

    fn free_direct(&self, address: u64, start: u64) -> Option<()> {
        if self.special.load(Ordering::Relaxed) & PASSTHROUGH == 0 {
            return None;
        }
        self.devices().find_map(|device| device.free_direct(&self.shared, address, start))
    }

    #[cold]
    #[inline(never)]
    fn bad_pointer(&self, call: &str, address: u64) {
        let count = self.bad_frees.fetch_add(1, Ordering::Relaxed) + 1;
        self.shared.record.event(EventKind::BadFree, 0, 0, 0, address, 0, clock::now());
        if let Some(device) = self.devices().next() {
            lock(&device.central).gauges.set(&[(DeviceGauge::BadFrees, count)]);
        }
        // One line for each of the first few: a program that repeats the mistake in a loop must not
        // fill the disk.
        if count <= 10 || count.is_power_of_two() {
            log::error!(
                "{call}({address:#x}): no live block of this allocator starts there (freed twice, \
                 or allocated by another allocator); ignored, {count} so far"
            );
        }
    }

    /// Serves the history, the trace, `debug:sync` and `debug:poison` before a free.
    #[cold]
    fn before_free(&self, address: u64) {
        if self.has_history() {
            self.note_free(address);
        }
        if let Some(trace) = &self.trace {
            trace.free(address);
        }
        let shared = &self.shared;
        let owner = shared.table.get(address);
        let (Owner::Slab { device, .. } | Owner::Large { device, .. }) = owner else { return };
        let Ok(device) = self.device(i64::from(device)) else { return };
        if shared.settings.debug.sync {
            device.synchronize(shared);
        }
        if shared.settings.debug.poison
            && let Some(_guard) = device.query_guard()
            && let Some(block) = device.block_at(address, owner)
            // Not while other streams or a graph use it.
            && !block.is_pending && !block.is_shared && block.apart.is_none()
            && let Some(Err(error)) = device.streams.with_lasting(block.stream, |handle| {
                match shared.driver.capture_status(device.id, handle) {
                    Ok(CaptureStatus::None) => {
                        shared.driver.memset(device.id, address, POISON_FREED, block.bytes, handle)
                    }
                    _ => Ok(()),
                }
            })
        {
            log::warn!("debug:poison could not fill the freed block at {address:#x}: {error}");
        }
    }

    /// Notes that `stream` uses the block at `address` too: after its free, the block is not reused
    /// before that stream is past the free. False if no live block starts there (counted and logged
    /// as a bad free).
    pub fn record_stream(&self, address: u64, stream: StreamHandle) -> bool {
        if address == 0 {
            return true;
        }
        let owner = self.shared.table.get(address);
        let done = match owner {
            Owner::Slab { device, .. } | Owner::Large { device, .. } => {
                self.device(i64::from(device)).ok().and_then(|device| {
                    let named = device.named(&self.shared, stream).ok();
                    // With or without a number, the stream must keep the block from early reuse.
                    let user = named.as_ref().map_or(streams::ALL_STREAMS, |found| found.number);
                    device.record_stream(address, owner, user)?;
                    if let Some(trace) = &self.trace {
                        trace.record_stream(address, device.id, user);
                    }
                    let (kind, id) = (EventKind::RecordStream, device.id as u8);
                    self.shared.record.event(kind, id, 0, user, address, 0, clock::now());
                    Some(())
                })
            }
            Owner::None => {
                self.devices().find_map(|device| device.record_stream(address, owner, 0))
            }
        };
        if done.is_none() {
            self.bad_pointer("record_stream", address);
        }
        done.is_some()
    }
}

impl Device {
    /// Frees the small block at `address`, in slab `slab` of `shard` by the page table. `None`: no
    /// block starts there.
    #[inline(always)]
    pub(crate) fn free_small(
        &self,
        shared: &Shared,
        shard: u32,
        slab: u32,
        address: u64,
        start: u64,
    ) -> Option<()> {
        let Some(mutex) = self.shards.get(shard as usize) else {
            return self.free_apart(shared, shard, slab, address, start);
        };
        let mut guard = lock(mutex);
        let cell = &mut *guard;
        let outcome = cell.shard.free(&mut cell.writer, slab, address, start, &self.streams);
        // A comparison, not a jump table.
        if outcome == FreeOutcome::Freed {
            return Some(());
        }
        self.freed_otherwise(shared, guard, outcome)
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn freed_otherwise(
        &self,
        shared: &Shared,
        cell: MutexGuard<'_, ShardCell>,
        outcome: FreeOutcome,
    ) -> Option<()> {
        match outcome {
            FreeOutcome::Freed | FreeOutcome::Waits => Some(()),
            FreeOutcome::Surplus(id) => {
                self.drop_surplus(shared, cell, id);
                Some(())
            }
            FreeOutcome::Unknown => None,
        }
    }

    /// Frees the large block at `address`, which starts in `page`: not reused before its users, and
    /// the stream `named` by this call, are past this moment. `None`: no block starts there.
    #[inline(always)]
    pub(crate) fn free_large(
        &self,
        shared: &Shared,
        page: Page<'_>,
        address: u64,
        start: u64,
        named: Option<u32>,
    ) -> Option<()> {
        let mut central = lock(&self.central);
        central.free_large(page, &self.streams, address, start, named)?;
        if central.is_batch_freed() {
            self.fence_batch(shared, central, named);
        }
        Some(())
    }

    /// Notes that stream `user` uses the block at `address`. `None`: no live block starts there.
    pub(crate) fn record_stream(&self, address: u64, owner: Owner, user: u32) -> Option<()> {
        match owner {
            Owner::Slab { shard, slab, .. } => {
                self.in_shard(shard, |shard, _, _| shard.record_stream(slab, address, user))
            }
            Owner::Large { blocks, .. } => lock(&self.central).record_stream(address, blocks, user),
            Owner::None => lock(&self.central).is_direct(address).then_some(()),
        }
    }
}

impl Central {
    /// Frees the large block that starts at `address` in `page`, and notes it in the record. The
    /// block is not reused before its users and stream `also` are past this moment. `None`: no
    /// large block starts there.
    #[inline(always)]
    pub(crate) fn free_large(
        &mut self,
        page: Page<'_>,
        streams: &Streams,
        address: u64,
        time: u64,
        also: Option<u32>,
    ) -> Option<()> {
        let arenas = &self.arenas;
        let (id, run) = match page.remove_block(|id| block_at(arenas, id, address)) {
            Some(found) => found,
            None => {
                let id = self.remove_from_overflow(page, address)?;
                (id, self.arenas.run(id)?)
            }
        };
        let (size, requested) = (run.bytes, run.requested());
        let Run { stream, lifetime, slot, traits, .. } = *run;
        self.freed += size;
        streams.tick();
        let also = also.filter(|&user| user != stream || user == ALL_STREAMS);
        let is_unusual = traits != 0 || also.is_some() || self.pools.has_apart();
        if is_unusual && self.free_unusual(streams, id, also) {
            let writer = &mut self.writers[pool_of(size)];
            writer.block_pending(slot, size, requested, lifetime);
            writer.event(EventKind::Free, lifetime, stream, address, size, time);
            return Some(());
        }
        let tag = BlockTag::new(self.device as u8, lifetime, 0, stream);
        // Before the run is merged: what the record needs is at hand here, and need not be kept
        // across the merge.
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        self.usage.block_given(size);
        self.writers[pool_of(size)].free(slot, block, time);
        self.arenas.release_block(id, streams)?;
        Some(())
    }

    /// What the free of block `id` takes beyond the usual. Whether the block waits from now on.
    #[cold]
    #[inline(never)]
    fn free_unusual(&mut self, streams: &Streams, id: RunId, also: Option<u32>) -> bool {
        let Some(run) = self.arenas.run(id) else { return false };
        let (traits, region, size) = (run.traits, run.region, run.bytes);
        if traits & WATCHED != 0 {
            self.spaces.note_freed(id, self.freed);
        }
        let waits = traits & SHARED != 0 || also.is_some();
        let frozen =
            self.pools.has_apart() && self.note_free_apart(self.arenas.region(region).space, size);
        if waits || frozen {
            self.free_pending(streams, id, also, frozen);
        }
        waits || frozen
    }

    /// Makes the block wait for its users and `also`; for ever if `frozen`.
    fn free_pending(&mut self, streams: &Streams, id: RunId, also: Option<u32>, frozen: bool) {
        let Some(run) = self.arenas.run_mut(id) else { return };
        run.state = RunState::Pending;
        let (stream, shared) = (run.stream, run.is_shared());
        // The owner "all streams" has no work of its own to wait for.
        let own = (stream, if stream == ALL_STREAMS { 0 } else { streams.note_free(stream) });
        let users = if shared { self.users.remove(&id).unwrap_or_default() } else { Vec::new() };
        if !frozen {
            self.pending.push(id, own, users, also, |user| streams.note_wait(user));
        }
    }

    /// Notes that `user` uses the large block at `address` too. `None`: no such block.
    pub(crate) fn record_stream(
        &mut self,
        address: u64,
        blocks: [Option<RunId>; 2],
        user: u32,
    ) -> Option<()> {
        let (id, run) = self.find(address, blocks)?;
        if run.stream != user || user == ALL_STREAMS {
            self.arenas.run_mut(id)?.traits |= SHARED;
            let users = self.users.entry(id).or_default();
            if !users.contains(&user) {
                users.push(user);
            }
        }
        Some(())
    }
}
