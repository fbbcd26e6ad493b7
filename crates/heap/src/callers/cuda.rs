//! Calls for CUDA programs (`cudaMalloc` and its kin, through the LD_PRELOAD door), which keep
//! CUDA's own rules of order.
//!
//! torch's hooks name the streams that use a block, and free it as soon as the host is done with
//! it. A CUDA program says less and promises more:
//! - Any stream may use the memory of `cudaMalloc` at once, and `cudaFree` must not release it
//!   before all work on the device is past it. Such blocks belong to
//!   [`crate::order::streams::ALL_STREAMS`]. A free waits for an event behind all work of the
//!   context, or for a synchronisation, such as the program's own ([`Heap::synchronized`]); the
//!   call itself never waits. One event serves any number of frees; the allocator records it when
//!   it needs memory.
//! - `cudaFreeAsync` names a stream, and the program guarantees that every use comes before that
//!   point of it, whichever stream allocated the block.

use crate::central::Central;
use crate::device::{Device, Owned};
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::heap::{Heap, PASSTHROUGH, WATCH_CAPTURES};
use crate::order::streams;
use crate::report::walk::{Visitor, WalkedShard};
use crate::request::Eviction;
use crate::runs::arena::{Run, RunId, RunState};
use crate::runs::page_table::Owner;
use crate::shared::Shared;
use crate::small::size_class::PAGE;
use crate::sync::lock;
use gruyere_record::size::Bytes;
use gruyere_record::{DeviceGauge, EventKind, clock};
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::Ordering;

impl Heap {
    /// Whether `address` is the heap's: it lies in a page that has blocks.
    #[inline]
    pub fn is_ours(&self, address: u64) -> bool {
        self.find_owner(address).is_some() || self.is_direct(address)
    }

    fn is_direct(&self, address: u64) -> bool {
        self.special.load(Ordering::Relaxed) & PASSTHROUGH != 0
            && self.devices().any(|device| lock(&device.central).is_direct(address))
    }

    /// The live block that starts at `address`.
    pub fn owns(&self, address: u64) -> Option<OwnedBlock> {
        let owner = self.shared.table.get(address);
        let block = |device: &Device| {
            let block = device.block_at(address, owner).filter(|block| !block.is_pending)?;
            Some(OwnedBlock { device: device.id, bytes: block.bytes, requested: block.requested })
        };
        match owner {
            Owner::Slab { device, .. } | Owner::Large { device, .. } => {
                block(self.device(i64::from(device)).ok()?)
            }
            Owner::None => self.devices().find_map(block),
        }
    }

    /// `cudaFree`: frees the block at `address`. It is not reused before all present work of the
    /// device is done. False if no live block starts there (counted and logged as a bad free).
    pub fn free_device_wide(&self, address: u64) -> bool {
        self.free_on(address, StreamHandle::ALL_STREAMS)
    }

    /// `cudaFreeAsync`: frees the block at `address`; all its uses come before future work of
    /// `stream`. False if no live block starts there (counted and logged as a bad free).
    pub fn free_on(&self, address: u64, stream: StreamHandle) -> bool {
        if address == 0 {
            return true;
        }
        let owner = self.shared.table.get(address);
        if let Owner::Slab { device, .. } | Owner::Large { device, .. } = owner
            && let Ok(device) = self.device(i64::from(device))
        {
            let shared = &self.shared;
            let named = device.named(shared, stream).ok();
            let user = named.as_ref().map_or(streams::ALL_STREAMS, |found| found.number);
            if let Some(owned) = self.owner(address)
                && device.free_behind(shared, owned, address, user).is_some()
            {
                return true;
            }
            device.record_stream(address, owner, user);
            let freed = self.free(address);
            // That free names no stream; this call does.
            if let Some(_guard) = device.query_guard() {
                device.streams.fence_lost(&*shared.driver, user);
            }
            return freed;
        }
        self.free(address)
    }

    /// Call before the program synchronises `device`; pass the result to [`Heap::synchronized`].
    /// Frees during the wait count as later ones.
    pub fn before_synchronize(&self, device: i64) -> SyncPoint {
        let device = self.device_in_use(device).ok().flatten();
        SyncPoint(device.map_or_else(HashMap::new, |device| device.streams.open_epochs()))
    }

    /// The device has been synchronised since `point`: memory freed before is free.
    pub fn synchronized(&self, device: i64, point: SyncPoint) {
        if let Ok(Some(device)) = self.device_in_use(device) {
            device.streams.forget_captures();
            device.streams.passed(&point.0);
        }
    }

    /// The program promises not to destroy `stream` before [`Heap::stream_ends`]: until then the
    /// allocator may query the stream and record events on it at any time.
    ///
    /// # Errors
    /// The error for an unknown or unusable device.
    pub fn stream_lasts(&self, device: i64, stream: StreamHandle) -> Result<(), Error> {
        self.device(device)?.streams.lasts(&*self.shared.driver, stream);
        Ok(())
    }

    /// The program is about to destroy `stream`; its frees up to its last malloc get their event
    /// now, later ones need one behind all work of the device.
    ///
    /// # Errors
    /// The error for an unknown device.
    pub fn stream_ends(&self, device: i64, stream: StreamHandle) -> Result<(), Error> {
        let Some(device) = self.device_in_use(device)? else { return Ok(()) };
        if device.streams.is_known(stream) {
            self.capture_ends(i64::from(device.id), stream);
            let named = device.streams.resolve(&*self.shared.driver, stream);
            if let Some(_guard) = device.query_guard() {
                let number = named.as_ref().map(|found| found.number);
                device.fence(&self.shared, number);
                number.map(|number| device.streams.fence_lost(&*self.shared.driver, number));
            }
            drop(named);
            device.streams.end(stream);
        }
        Ok(())
    }

    /// A capture is about to begin on `stream` of `device`. Until it ends, the allocator makes no
    /// driver call that could make it fail.
    pub fn capture_begins(&self, device: i64, stream: StreamHandle) {
        let Ok(device) = self.device(device) else { return };
        // Numbers a stream not seen yet, so that the capture's end finds it.
        let named = device.named(&self.shared, stream).ok();
        // Turns frees into events now, while no stream captures: during the capture the allocator
        // may record none.
        if let Some(_guard) = device.query_guard() {
            device.fence_all(&self.shared, named.as_ref().map(|found| found.number));
        }
        drop(named);
        device.open_pool_scope();
        lock(&device.capturing).push(stream);
        let mut pool_scopes = lock(&self.pool_scopes);
        *pool_scopes += 1;
        self.special.fetch_or(WATCH_CAPTURES, Ordering::AcqRel);
        drop(pool_scopes);
        lock(&device.central).gauges.add(DeviceGauge::CapturesBegun, 1);
        device.event(&self.shared, EventKind::CaptureBegin, 0, 0);
    }

    /// The capture on `stream` has ended, or never began because the driver refused it. Does
    /// nothing if no capture was announced.
    pub fn capture_ends(&self, device: i64, stream: StreamHandle) {
        let Ok(Some(device)) = self.device_in_use(device) else { return };
        {
            let mut capturing = lock(&device.capturing);
            let Some(at) = capturing.iter().position(|&known| known == stream) else { return };
            capturing.swap_remove(at);
        }
        self.pool_scopes_closed(device, 1);
        device.event(&self.shared, EventKind::CaptureEnd, 0, 0);
    }

    /// Bytes that the heap could return to the device: idle whole pages, and large blocks that wait
    /// for streams.
    pub fn could_give_back(&self, device: i64) -> u64 {
        let Ok(Some(device)) = self.device_in_use(device) else { return 0 };
        let shared = &self.shared;
        if let Some(_guard) = device.query_guard() {
            device.fence_all(shared, None);
            device.streams.poll(&*shared.driver);
        }
        device.return_empty_slabs(shared);
        let mut central = lock(&device.central);
        device.collect_completed(shared, &mut central);
        device.supply.evictable(&central) + central.pending_bytes() / PAGE * PAGE
    }

    /// The program uses these devices and accesses each other's memory: the heap maps present and
    /// future memory of each for all that can. A device that cannot be used says so at its first
    /// malloc.
    pub fn use_devices(&self, devices: &[i64]) {
        for &device in devices {
            let _ = self.device(device);
        }
    }

    /// The program is about to reset `device` (`cudaDeviceReset`): drops every block on it and
    /// returns all memory. The device's heap is then as new, and its streams are gone. No other
    /// thread may use the device, as CUDA demands too.
    pub fn reset_device(&self, device: i64) {
        let Ok(Some(device)) = self.device_in_use(device) else { return };
        for address in device.seen() {
            self.saw_free(address, StreamHandle::ALL_STREAMS);
        }
        let shared = &self.shared;
        let capturing = std::mem::take(&mut *lock(&device.capturing)).len();
        self.pool_scopes_closed(device, u32::try_from(capturing).unwrap_or(0));
        // The reset would cut off work that still runs; our memory must not be unmapped under it.
        let _ = shared.driver.device_synchronize(device.id);
        for address in device.live_addresses() {
            self.free(address);
        }
        let epochs = device.streams.open_epochs();
        device.streams.passed(&epochs);
        device.return_empty_slabs(shared);
        let mut central = lock(&device.central);
        device.collect_completed(shared, &mut central);
        let completed = |stream| device.streams.reusable(stream);
        central.pools.drop_reserves();
        central.headroom_is_open = false;
        let eviction = Eviction { completed: &completed, ..Eviction::of(shared, &device.streams) };
        device.supply.evict(&mut central, &eviction);
        device.supply.release(&mut central, &*shared.driver);
        for space in central.open_spaces() {
            central.free_addresses(&*shared.driver, space);
        }
        central.publish_reserved();
        device.streams.destroy_events(&*shared.driver);
        if central.backing.held == 0 {
            device.supply.close(&mut central, &*shared.driver);
        } else {
            log::warn!(
                "cudaDeviceReset: {} of device {} could not be released before it (captured graphs \
                 or named pools keep them)",
                Bytes(central.backing.held),
                device.id
            );
        }
        device.streams.end_all();
    }
}

impl Device {
    /// Polls parked blocks before a large block of all streams is cut. A cut from another free run
    /// instead would leave a gap here and there, and two driver calls are little beside the usual
    /// cost of `cudaMalloc` (docs/decisions/preload.md).
    pub(crate) fn poll_parked(&self, shared: &Shared) {
        if lock(&self.central).pending.is_empty() {
            return;
        }
        if let Some(_guard) = self.query_guard() {
            self.fence(shared, None);
            self.streams.poll_some(&*shared.driver);
            self.collect_completed(shared, &mut lock(&self.central));
        }
    }

    /// Frees the block at `address`, not to be reused before stream `user` is past this moment.
    /// `None`, and nothing done, if no ordinary small block and no large block starts there.
    pub(crate) fn free_behind(
        &self,
        shared: &Shared,
        owned: Owned<'_>,
        address: u64,
        user: u32,
    ) -> Option<()> {
        let start = clock::now();
        match owned {
            Owned::Small(_, shard, slab) => {
                let mut guard = lock(self.shards.get(shard as usize)?);
                let cell = &mut *guard;
                let (shard, writer) = (&mut cell.shard, &mut cell.writer);
                let outcome = shard.free_behind(writer, slab, address, start, &self.streams, user);
                self.freed_otherwise(shared, guard, outcome)?;
            }
            Owned::Large(_, page) => {
                self.free_large(shared, page, address, start, Some(user))?;
            }
        }
        Some(())
    }

    /// The addresses of all live blocks.
    pub(crate) fn live_addresses(&self) -> Vec<u64> {
        let mut live = Live::default();
        let Ok(central) = self.walk(&mut live);
        live.0.extend(central.direct_blocks().map(|(address, _)| address));
        live.0
    }
}

#[derive(Default)]
struct Live(Vec<u64>);

impl Visitor for Live {
    type Error = Infallible;

    fn shard(&mut self, walked: &WalkedShard<'_>) -> Result<(), Infallible> {
        let slabs = walked.shard.slabs().map(|(_, slab)| slab);
        self.0.extend(slabs.flat_map(|slab| slab.live_slots().map(|slot| slab.address(slot))));
        Ok(())
    }

    fn run(&mut self, _: RunId, run: &Run, _: &Central) -> Result<(), Infallible> {
        let is_live = run.state == RunState::Live && !run.is_slab;
        self.0.extend(is_live.then_some(run.address));
        Ok(())
    }
}

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedBlock {
    /// Its device.
    pub device: u32,
    /// Its bytes, rounded up to 512.
    pub bytes: u64,
    /// Bytes that the program asked for.
    pub requested: u64,
}

/// The moment before a synchronisation; frees up to it are over after it.
#[derive(Debug, Default)]
#[must_use = "to be handed to Heap::synchronized once the device is"]
pub struct SyncPoint(pub(crate) HashMap<u32, u64>);
