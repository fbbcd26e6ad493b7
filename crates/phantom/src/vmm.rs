//! The books of virtual memory management: reservations, handles, and the rules of calls on them.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::backing::{Backing, Backings, Source};

/// Physical memory behind a handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Physical {
    pub(crate) device: u32,
    pub(crate) bytes: u64,
    /// The number of its first byte.
    pub(crate) physical: u64,
    /// The number of its mappings.
    pub(crate) mappings: u32,
    /// References to the handle: one of its creation, one of each import; 0: it was released.
    pub(crate) references: u32,
    /// It is another process's: no memory of the device's is taken for it here.
    pub(crate) imported: bool,
}

/// The reason for a refusal: the text of the misuse.
pub(crate) type Refused = &'static str;

#[derive(Debug)]
pub(crate) struct Vmm {
    /// Reserved ranges: address -> bytes.
    reservations: BTreeMap<u64, u64>,
    handles: FxHashMap<u64, Physical>,
    next_handle: u64,
    /// The smallest granularity of a device.
    granularity: u64,
}

/// Whether `bytes` and `address` are multiples of `granularity` and the range does not overflow.
pub(crate) fn granular(address: u64, bytes: u64, granularity: u64) -> bool {
    bytes > 0
        && bytes.is_multiple_of(granularity)
        && address.is_multiple_of(granularity)
        && address.checked_add(bytes).is_some()
}

impl Vmm {
    pub(crate) fn new(granularity: u64) -> Self {
        Self {
            reservations: BTreeMap::new(),
            handles: FxHashMap::default(),
            next_handle: 0,
            granularity,
        }
    }

    /// Whether the range is whole granules of the device with the smallest granularity.
    pub(crate) fn granular(&self, address: u64, bytes: u64) -> bool {
        granular(address, bytes, self.granularity)
    }

    pub(crate) fn reserve(&mut self, address: u64, bytes: u64) {
        self.reservations.insert(address, bytes);
    }

    /// Removes exactly this reservation, in which nothing may be mapped.
    pub(crate) fn unreserve(
        &mut self,
        address: u64,
        bytes: u64,
        backings: &Backings,
    ) -> Result<(), Refused> {
        match self.reservations.get(&address) {
            None => return Err("free of an address range that was never reserved"),
            Some(&reserved) if reserved != bytes => return Err("free of a part of a reservation"),
            Some(_) => {}
        }
        if backings.touching(address, bytes).next().is_some() {
            return Err("free of an address range in which memory is mapped");
        }
        self.reservations.remove(&address);
        Ok(())
    }

    pub(crate) fn create(&mut self, device: u32, bytes: u64, physical: u64, imported: bool) -> u64 {
        self.next_handle += 1;
        let memory = Physical { device, bytes, physical, mappings: 0, references: 1, imported };
        self.handles.insert(self.next_handle, memory);
        self.next_handle
    }

    pub(crate) fn handle(&self, handle: u64) -> Option<&Physical> {
        self.handles.get(&handle)
    }

    /// Adds a reference to an unreleased handle.
    pub(crate) fn retain(&mut self, handle: u64) -> Result<(), Refused> {
        match self.handles.get_mut(&handle).filter(|memory| memory.references > 0) {
            None => Err("import of a handle that does not exist (any more)"),
            Some(memory) => {
                memory.references += 1;
                Ok(())
            }
        }
    }

    /// Drops a reference to the handle; returns the memory if nothing maps it.
    pub(crate) fn release(&mut self, handle: u64) -> Result<Option<Physical>, Refused> {
        match self.handles.get_mut(&handle) {
            None => Err("release of a handle that does not exist (any more)"),
            Some(memory) if memory.references == 0 => Err("second release of a handle"),
            Some(memory) => {
                memory.references -= 1;
                Ok(self.reap(handle))
            }
        }
    }

    fn reap(&mut self, handle: u64) -> Option<Physical> {
        let memory = self.handles.get(&handle)?;
        if memory.references == 0 && memory.mappings == 0 {
            self.handles.remove(&handle)
        } else {
            None
        }
    }

    /// Maps the whole handle at `address`.
    pub(crate) fn map(
        &mut self,
        address: u64,
        bytes: u64,
        offset: u64,
        handle: u64,
        backings: &mut Backings,
    ) -> Result<(), Refused> {
        if !self.granular(address, bytes) {
            return Err("map of a range that is not whole granules");
        }
        if offset != 0 {
            return Err("map at an offset other than 0");
        }
        let is_reserved = self.in_one_reservation(address, bytes);
        let Some(memory) = self.handles.get_mut(&handle).filter(|memory| memory.references > 0)
        else {
            return Err("map of a handle that does not exist (any more)");
        };
        if memory.bytes != bytes {
            return Err("map of a part of a handle, or of more than it has");
        }
        if !is_reserved {
            return Err("map outside of a reservation, or across the end of one");
        }
        if backings.touching(address, bytes).next().is_some() {
            return Err("map over a mapping");
        }
        memory.mappings += 1;
        backings.insert(Backing {
            address,
            bytes,
            physical: memory.physical,
            offset: 0,
            device: memory.device,
            source: Source::Mapping(handle),
            access: 0,
        });
        Ok(())
    }

    /// Whether the range lies in one reservation; the next reservation may begin where it ends.
    fn in_one_reservation(&self, address: u64, bytes: u64) -> bool {
        let reserved = self.reservations.range(..=address).next_back();
        reserved.is_some_and(|(&start, &length)| address + bytes <= start + length)
    }

    /// The mappings that tile the range exactly, all in one reservation.
    pub(crate) fn whole_mappings(
        &self,
        address: u64,
        bytes: u64,
        backings: &Backings,
    ) -> Result<Vec<Backing>, Refused> {
        if !self.granular(address, bytes) {
            return Err("a range that is not whole granules");
        }
        let mut expected = address;
        let mut whole = Vec::new();
        for &backing in backings.touching(address, bytes) {
            if !matches!(backing.source, Source::Mapping(_)) {
                return Err("a range that is no mapping");
            }
            if backing.address < address || backing.address + backing.bytes > address + bytes {
                return Err("a part of a mapping");
            }
            if backing.address != expected {
                return Err("a range with a hole in which nothing is mapped");
            }
            expected += backing.bytes;
            whole.push(backing);
        }
        if expected != address + bytes {
            return Err("a range in which nothing is mapped");
        }
        if !self.in_one_reservation(address, bytes) {
            return Err("a range across the end of a reservation");
        }
        Ok(whole)
    }

    /// Removes one mapping; returns the memory if that was the last use of it.
    pub(crate) fn unmap(&mut self, mapping: &Backing, backings: &mut Backings) -> Option<Physical> {
        backings.remove(mapping.address);
        let Source::Mapping(handle) = mapping.source else { return None };
        self.handles.get_mut(&handle)?.mappings -= 1;
        self.reap(handle)
    }

    /// The numbers of unreleased handles and of reservations.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (
            self.handles.values().filter(|memory| memory.references > 0).count(),
            self.reservations.len(),
        )
    }
}
