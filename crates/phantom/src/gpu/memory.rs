//! Virtual memory management and plain memory.

use super::{Gpu, State, fail};
use crate::GRANULARITY;
use crate::backing::{Backing, Source};
use crate::books::Part;
use crate::calls::CallKind;
use crate::error::{SimResult, code};
use crate::oracle::Taken;
use crate::vmm::{Physical, granular};

impl State {
    fn no_vmm(&self, device: u32) -> bool {
        !self.config.devices[device as usize].vmm
    }

    fn drop_physical(&mut self, memory: &Physical, part: Part) {
        let now = self.time.now();
        if !memory.imported {
            self.devices[memory.device as usize].books.give(memory.bytes, part, now);
        }
        if let Some(oracle) = &mut self.oracle {
            oracle.vanished(memory.physical, memory.bytes);
        }
    }

    /// Charges and reserves address space; `None`: exhausted.
    pub(crate) fn take_space(&mut self, bytes: u64, align: u64) -> Option<u64> {
        if !self.space.take(bytes) {
            return None;
        }
        let address = self.addresses.reserve(bytes, align);
        if address.is_none() {
            self.space.give(bytes);
        }
        address
    }

    pub(crate) fn give_space(&mut self, address: u64, bytes: u64) {
        self.space.give(bytes);
        self.addresses.release(address, bytes);
    }
}

impl Gpu {
    /// Reserves `bytes` of address space, aligned to `align` (0:
    /// [`crate::Config::default_alignment`]). Code 2 if none is left.
    pub fn address_reserve(&self, device: u32, bytes: u64, align: u64) -> SimResult<u64> {
        const KIND: CallKind = CallKind::AddressReserve;
        let mut state = self.lock();
        let cost = state.config.costs.address;
        state.enter_for(KIND, device, cost)?;
        if state.no_vmm(device) {
            return fail(KIND, code::NOT_SUPPORTED);
        }
        if !state.vmm.granular(0, bytes) || (align != 0 && !align.is_power_of_two()) {
            return state.refuse(KIND, "reservation that is not whole granules", bytes);
        }
        let align = if align == 0 { state.config.default_alignment } else { align };
        // No better aligned than requested: a gap before it takes up the excess.
        let gap = if align < GRANULARITY { align } else { 0 };
        let Some(address) = state.take_space(bytes + gap, align.max(GRANULARITY)) else {
            return fail(KIND, code::OUT_OF_MEMORY);
        };
        if gap > 0 {
            state.give_space(address, gap);
        }
        state.vmm.reserve(address + gap, bytes);
        Ok(address + gap)
    }

    /// Frees a whole reservation, in which nothing may be mapped.
    pub fn address_free(&self, device: u32, address: u64, bytes: u64) -> SimResult<()> {
        const KIND: CallKind = CallKind::AddressFree;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.address)?;
        match state.vmm.unreserve(address, bytes, &state.backings) {
            Err(what) => state.refuse(KIND, what, address),
            Ok(()) => {
                state.give_space(address, bytes);
                Ok(())
            }
        }
    }

    /// Creates physical memory. Code 2 if the device has too little.
    pub fn physical_create(&self, device: u32, bytes: u64) -> SimResult<u64> {
        const KIND: CallKind = CallKind::Create;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        if state.no_vmm(device) {
            return fail(KIND, code::NOT_SUPPORTED);
        }
        if !granular(0, bytes, state.config.devices[device as usize].granularity) {
            return state.refuse(KIND, "physical memory that is not whole granules", bytes);
        }
        let now = state.time.now();
        if !state.devices[device as usize].books.take(bytes, Part::Handles, now) {
            return fail(KIND, code::OUT_OF_MEMORY);
        }
        state.time.spend(state.config.costs.create_of(bytes));
        let physical = state.number(bytes);
        Ok(state.vmm.create(device, bytes, physical, false))
    }

    /// Takes up physical memory of another process, which has it from the device: here it costs
    /// none.
    pub fn physical_import(&self, device: u32, bytes: u64) -> SimResult<u64> {
        const KIND: CallKind = CallKind::Import;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.map)?;
        if state.no_vmm(device) {
            return fail(KIND, code::NOT_SUPPORTED);
        }
        if !granular(0, bytes, state.config.devices[device as usize].granularity) {
            return state.refuse(KIND, "imported memory that is not whole granules", bytes);
        }
        let physical = state.number(bytes);
        Ok(state.vmm.create(device, bytes, physical, true))
    }

    /// Imports a handle of this simulator, by another of its allocators: the same handle, to be
    /// released once more.
    pub fn physical_retain(&self, device: u32, handle: u64) -> SimResult<()> {
        const KIND: CallKind = CallKind::Import;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.map)?;
        match state.vmm.retain(handle) {
            Err(what) => state.refuse(KIND, what, handle),
            Ok(()) => Ok(()),
        }
    }

    /// The bytes of an unreleased handle.
    pub fn physical_bytes(&self, handle: u64) -> Option<u64> {
        let state = self.lock();
        state.vmm.handle(handle).filter(|memory| memory.references > 0).map(|memory| memory.bytes)
    }

    /// Releases a handle; its memory lives on while mapped.
    pub fn physical_release(&self, device: u32, handle: u64) -> SimResult<()> {
        const KIND: CallKind = CallKind::Release;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        let bytes = state.vmm.handle(handle).map_or(0, |memory| memory.bytes);
        match state.vmm.release(handle) {
            Err(what) => state.refuse(KIND, what, handle),
            Ok(gone) => {
                state.time.spend(state.config.costs.release_of(bytes));
                if let Some(memory) = gone {
                    state.drop_physical(&memory, Part::Handles);
                }
                Ok(())
            }
        }
    }

    /// Maps the whole of `handle` at `address`; `offset` must be 0, as the driver requires.
    pub fn map(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        offset: u64,
        handle: u64,
    ) -> SimResult<()> {
        const KIND: CallKind = CallKind::Map;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.map)?;
        match state.vmm.map(address, bytes, offset, handle, &mut state.backings) {
            Err(what) => state.refuse(KIND, what, address),
            Ok(()) => Ok(()),
        }
    }

    /// Grants `devices` access to a range of whole mappings.
    pub fn set_access(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        devices: &[u32],
    ) -> SimResult<()> {
        const KIND: CallKind = CallKind::SetAccess;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        let whole = match state.vmm.whole_mappings(address, bytes, &state.backings) {
            Err(what) => return state.refuse(KIND, what, address),
            Ok(whole) => whole,
        };
        let mut grant = 0;
        for &peer in devices {
            if whole.iter().any(|mapping| !state.reaches(peer, mapping.device)) {
                return state.refuse(KIND, "access for a device that is no peer", address);
            }
            grant |= 1 << peer;
        }
        state.time.spend(state.config.costs.set_access_of(
            bytes,
            whole.len() as u64,
            devices.len() as u64,
        ));
        for mapping in &whole {
            state.backings.grant(mapping.address, grant);
        }
        Ok(())
    }

    /// Unmaps whole mappings.
    pub fn unmap(&self, device: u32, address: u64, bytes: u64) -> SimResult<()> {
        const KIND: CallKind = CallKind::Unmap;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        let whole = match state.vmm.whole_mappings(address, bytes, &state.backings) {
            Err(what) => return state.refuse(KIND, what, address),
            Ok(whole) => whole,
        };
        state.time.spend(state.config.costs.unmap_of(bytes, whole.len() as u64));
        let now = state.time.now();
        if let Some(oracle) = &mut state.oracle {
            oracle.unmapped(address, bytes);
            for piece in state.backings.pieces(address, bytes) {
                oracle.taken_from_kernels(KIND.name(), Taken::of(&piece), now);
            }
        }
        for mapping in &whole {
            if let Some(memory) = state.vmm.unmap(mapping, &mut state.backings) {
                state.drop_physical(&memory, Part::Handles);
            }
        }
        Ok(())
    }

    /// `cuMemAlloc`. Physical memory is taken in multiples of [`crate::Config::plain_granularity`].
    pub fn alloc(&self, device: u32, bytes: u64) -> SimResult<u64> {
        const KIND: CallKind = CallKind::Alloc;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        state.forbidden_by_capture(KIND)?;
        if bytes == 0 {
            return state.refuse(KIND, "allocation of nothing", 0);
        }
        let granule = state.config.plain_granularity;
        let Some(held) = bytes.checked_next_multiple_of(granule) else {
            return fail(KIND, code::OUT_OF_MEMORY);
        };
        let now = state.time.now();
        if !state.devices[device as usize].books.take(held, Part::Plain, now) {
            return fail(KIND, code::OUT_OF_MEMORY);
        }
        let Some(address) = state.take_space(held, granule.next_power_of_two()) else {
            state.devices[device as usize].books.give(held, Part::Plain, now);
            return fail(KIND, code::OUT_OF_MEMORY);
        };
        state.time.spend(state.config.costs.alloc_of(held));
        let physical = state.number(held);
        let access = state.all_reaching(device);
        let source = Source::Plain;
        state.backings.insert(Backing {
            address,
            bytes: held,
            physical,
            offset: 0,
            device,
            source,
            access,
        });
        Ok(address)
    }

    /// `cuMemFree`: waits for the device first.
    pub fn free(&self, device: u32, address: u64) -> SimResult<()> {
        const KIND: CallKind = CallKind::Free;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        if address == 0 {
            return Ok(());
        }
        state.forbidden_by_capture(KIND)?;
        let Some(backing) =
            state.backings.get(address).copied().filter(|b| b.source == Source::Plain)
        else {
            return state.refuse(KIND, "free of an address that is no plain allocation", address);
        };
        state.no_endless_wait(KIND, backing.device)?;
        state.wait_for_device(backing.device);
        state.time.spend(state.config.costs.free_of(backing.bytes));
        if let Some(oracle) = &mut state.oracle {
            oracle.plain_freed(Taken::of(&backing));
        }
        state.backings.remove(address);
        let now = state.time.now();
        state.devices[backing.device as usize].books.give(backing.bytes, Part::Plain, now);
        state.give_space(address, backing.bytes);
        Ok(())
    }
}
