//! Facts and books: what the driver reports, and what only a simulator knows.

use super::{Gpu, Misuse, State};
use crate::backing::{Backing, Source};
use crate::books::{AddressBooks, DeviceBooks};
use crate::calls::{CallCounts, CallKind, Caller};
use crate::config::DeviceConfig;
use crate::error::SimResult;
use crate::pool::Pool;

/// Existing objects; without leaks, every count returns to its former value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Pools.
    pub pools: usize,
    /// Allocations from pools.
    pub pool_allocations: usize,
    /// Physical handles not yet released.
    pub handles: usize,
    /// Mappings.
    pub mappings: usize,
    /// Address reservations.
    pub reservations: usize,
    /// Plain allocations.
    pub plain: usize,
    /// Events.
    pub events: usize,
    /// Streams other than the default ones.
    pub streams: usize,
}

/// The uses of the host's time, virtual nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTime {
    /// The host's clock.
    pub now: u64,
    /// The end of the last work of any device.
    pub device_end: u64,
    /// Time in waits of the allocator.
    pub blocked_by_allocator: u64,
    /// Time in waits of the program.
    pub blocked_by_program: u64,
    /// Cost of the allocator's calls, without waits.
    pub charged_to_allocator: u64,
    /// Cost of the program's calls, without waits and launches.
    pub charged_to_program: u64,
    /// Time spent on a full device queue.
    pub throttled: u64,
}

impl State {
    /// Whether `device` can map memory of `owner`.
    pub(crate) fn reaches(&self, device: u32, owner: u32) -> bool {
        (device as usize) < self.devices.len()
            && (device == owner
                || self.config.devices[owner as usize]
                    .peers
                    .as_ref()
                    .is_none_or(|p| p.contains(&device)))
    }

    /// Mask of the devices that can map memory of `owner`.
    pub(crate) fn all_reaching(&self, owner: u32) -> u64 {
        (0..self.devices.len() as u32).filter(|&d| self.reaches(d, owner)).map(|d| 1 << d).sum()
    }
}

impl Gpu {
    /// The number of devices.
    pub fn device_count(&self) -> u32 {
        self.lock().devices.len() as u32
    }

    /// The device's configuration. Fails if a fault is armed for [`CallKind::DeviceQuery`].
    pub fn device_config(&self, device: u32) -> SimResult<DeviceConfig> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(CallKind::DeviceQuery, device, state.config.costs.query)?;
        Ok(state.config.devices[device as usize].clone())
    }

    /// Whether streams have ids.
    pub fn has_stream_ids(&self) -> bool {
        self.lock().config.stream_ids
    }

    /// Whether events can be recorded behind all work of a context.
    pub fn has_context_events(&self) -> bool {
        self.lock().config.context_events
    }

    /// Whether `device` can map memory of `peer`; false for itself, as in the driver.
    pub fn can_access_peer(&self, device: u32, peer: u32) -> SimResult<bool> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(CallKind::DeviceQuery, device, state.config.costs.query)?;
        Ok(device != peer && (peer as usize) < state.devices.len() && state.reaches(device, peer))
    }

    /// Free and total physical memory of a device, bytes.
    pub fn memory_info(&self, device: u32) -> SimResult<(u64, u64)> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(CallKind::MemoryInfo, device, state.config.costs.memory_info)?;
        let books = &state.devices[device as usize].books;
        Ok((books.free(), books.capacity))
    }

    /// Sets the bytes of the device's memory that others (processes, libraries) hold from now on.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn set_taken(&self, device: u32, bytes: u64) {
        self.lock().devices[device as usize].books.taken = bytes;
    }

    /// A device's account, with its area counted up to now.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn books(&self, device: u32) -> DeviceBooks {
        let mut guard = self.lock();
        let now = guard.time.now();
        let books = &mut guard.devices[device as usize].books;
        books.count_to(now);
        *books
    }

    /// Resets the peak of physical memory to the current value.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn reset_peak(&self, device: u32) {
        let books = &mut self.lock().devices[device as usize].books;
        books.physical_peak = books.physical;
    }

    /// The account of address space.
    pub fn address_books(&self) -> AddressBooks {
        self.lock().space
    }

    /// The uses of the host's time.
    pub fn host_time(&self) -> HostTime {
        let state = self.lock();
        HostTime {
            now: state.time.now(),
            device_end: state.devices.iter().map(|device| device.tail).max().unwrap_or(0),
            blocked_by_allocator: state.time.waited(Caller::Allocator),
            blocked_by_program: state.time.waited(Caller::Program),
            charged_to_allocator: state.time.charged(Caller::Allocator),
            charged_to_program: state.time.charged(Caller::Program),
            throttled: state.time.throttled(),
        }
    }

    /// The host works for `ns` nanoseconds.
    pub fn host_spend(&self, ns: u64) {
        self.lock().time.work(ns);
    }

    /// The number of calls of `caller` by kind, failed ones included.
    pub fn counts(&self, caller: Caller) -> CallCounts {
        self.lock().counts[caller as usize].clone()
    }

    /// Every misuse refused so far.
    pub fn misuses(&self) -> Vec<Misuse> {
        self.lock().misuses.clone()
    }

    /// The backing of a range, piece by piece from its start to its first hole: the handle, pool or
    /// allocation, and the offset.
    pub fn backing(&self, address: u64, bytes: u64) -> Vec<Backing> {
        self.lock().backings.pieces(address, bytes).collect()
    }

    /// The whole allocation or mapping that holds `address`; of a pool's block that lies across
    /// chunks, `physical` is that of its first byte.
    pub fn allocation(&self, address: u64) -> Option<Backing> {
        let state = self.lock();
        let backing = *state.backings.holding(address)?;
        let Source::Pool(pool) = backing.source else { return Some(backing) };
        let (start, bytes) = state.pools.get(&pool)?.block_with(address)?;
        Some(Backing { bytes, ..*state.backings.get(start)? })
    }

    /// True if every byte of the range is backed.
    pub fn is_backed(&self, address: u64, bytes: u64) -> bool {
        self.lock().backings.pieces(address, bytes).map(|piece| piece.bytes).sum::<u64>() == bytes
    }

    /// Every backed range, by address: the driver's map, against which a heap can check its own.
    pub fn all_backings(&self) -> Vec<Backing> {
        self.lock().backings.iter().copied().collect()
    }

    /// Counts of the existing objects.
    pub fn held(&self) -> Held {
        let state = self.lock();
        let (handles, reservations) = state.vmm.counts();
        let mut held = Held {
            pools: state.pools.len(),
            handles,
            reservations,
            events: state.events.len(),
            streams: state.streams.user_streams(),
            ..Held::default()
        };
        for backing in state.backings.iter() {
            match backing.source {
                Source::Pool(_) => {}
                Source::Mapping(_) => held.mappings += 1,
                Source::Plain | Source::Graph { .. } => held.plain += 1,
            }
        }
        held.pool_allocations = state.pools.values().map(Pool::live).sum();
        held
    }

    /// Unreleased handles, and address reservations: both 0 if nothing leaks.
    pub fn vmm_counts(&self) -> (usize, usize) {
        self.lock().vmm.counts()
    }
}
