//! A device's account of physical memory.

/// Memory that a device holds and held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceBooks {
    /// Physical bytes on the device.
    pub capacity: u64,
    /// Bytes held by others: other processes, NCCL, cuBLAS.
    pub taken: u64,
    /// Physical bytes held by this process: pools, handles, plain allocations.
    pub physical: u64,
    /// The highest `physical` since the last reset.
    pub physical_peak: u64,
    /// The integral of `physical` over virtual time, byte nanoseconds, up to now.
    pub physical_area: u128,
    /// The part of `physical` in pools.
    pub in_pools: u64,
    /// The part of `physical` in handles, mapped or not.
    pub in_handles: u64,
    /// The part of `physical` in plain allocations.
    pub in_plain: u64,
    /// The area is counted up to this virtual time, nanoseconds.
    pub(crate) counted_to: u64,
}

/// The part of the account that a change affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Pools,
    Handles,
    Plain,
}

impl DeviceBooks {
    /// Free physical bytes.
    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.taken).saturating_sub(self.physical)
    }

    pub(crate) fn count_to(&mut self, now: u64) {
        self.physical_area +=
            u128::from(self.physical) * u128::from(now.saturating_sub(self.counted_to));
        self.counted_to = self.counted_to.max(now);
    }

    fn part(&mut self, part: Part) -> &mut u64 {
        match part {
            Part::Pools => &mut self.in_pools,
            Part::Handles => &mut self.in_handles,
            Part::Plain => &mut self.in_plain,
        }
    }

    /// False: no room.
    pub(crate) fn take(&mut self, bytes: u64, part: Part, now: u64) -> bool {
        if bytes > self.free() {
            return false;
        }
        self.count_to(now);
        self.physical += bytes;
        self.physical_peak = self.physical_peak.max(self.physical);
        *self.part(part) += bytes;
        true
    }

    pub(crate) fn give(&mut self, bytes: u64, part: Part, now: u64) {
        self.count_to(now);
        self.physical -= bytes;
        *self.part(part) -= bytes;
    }
}

/// The account of address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressBooks {
    /// Bytes in total.
    pub limit: u64,
    /// Bytes in use: reservations, pools, plain allocations.
    pub reserved: u64,
    /// The highest `reserved`.
    pub peak: u64,
}

impl AddressBooks {
    /// False: exhausted.
    pub(crate) fn take(&mut self, bytes: u64) -> bool {
        if bytes > self.limit - self.reserved {
            return false;
        }
        self.reserved += bytes;
        self.peak = self.peak.max(self.reserved);
        true
    }

    pub(crate) fn give(&mut self, bytes: u64) {
        self.reserved -= bytes;
    }
}
