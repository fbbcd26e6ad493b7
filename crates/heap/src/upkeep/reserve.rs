//! Reserves: memory mapped before it is asked for, for a lifetime (`reserve:`) or a pool.
//!
//! A reserve is a floor under the memory of its space. Its pages neither move to where others need
//! them nor go back at a trim. Those of lifetimes are mapped when a device comes into use, and
//! given up as the last step before out of memory.

use crate::central::Central;
use crate::device::{Device, ceiling};
use crate::driver::{DriverError, ErrorKind};
use crate::error::{Error, Refused};
use crate::lifetime::Lifetime;
use crate::request::{Eviction, Growth, Want};
use crate::runs::arena::{SpaceId, UNOWNED};
use crate::shared::Shared;
use crate::small::size_class::{PAGE, round_up};
use crate::sync::lock;
use gruyere_record::size::{Bytes, Size};

impl Device {
    /// Maps the reserves of `reserve:`, at the device's start, before its first use.
    ///
    /// # Errors
    /// [`Error::Reserve`] and [`Error::Setting`]; nothing is held then.
    pub(crate) fn map_reserves(&self, shared: &Shared) -> Result<(), Error> {
        let total = self.capabilities.total_memory;
        if shared.settings.reserve.iter().all(|reserve| reserve.resolve(total) == 0) {
            return Ok(());
        }
        if let Err(who) = self.supply.may_keep() {
            log::warn!("reserve: has no effect with {who}");
            return Ok(());
        }
        self.check_reserves(shared)?;
        for lifetime in Lifetime::ALL {
            let bytes = whole_pages(shared.settings.reserve[lifetime as usize], total);
            let mut central = lock(&self.central);
            let space = central.spaces.of(lifetime);
            if let Some(pool) = central.pools.ordinary_mut(lifetime) {
                pool.rules.reserve = bytes;
            }
            let Err(error) = self.extend_to(shared, &mut central, space, lifetime, bytes) else {
                continue;
            };
            central.pools.drop_reserves();
            self.supply.evict(&mut central, &Eviction::of(shared, &self.streams));
            for space in central.open_spaces() {
                central.free_addresses(&*shared.driver, space);
            }
            self.supply.close(&mut central, &*shared.driver);
            drop(central);
            return Err(Error::Reserve(Box::new(Refused {
                device: self.id,
                lifetime,
                said: shared.settings.reserve[lifetime as usize].to_string(),
                bytes,
                free: shared.driver.memory_info(self.id).ok().map(|info| info.free),
                error,
            })));
        }
        Ok(())
    }

    /// Refuses reserves that are too much together, or beside `limit:`, before one of them fails
    /// although the device has room for that one.
    fn check_reserves(&self, shared: &Shared) -> Result<(), Error> {
        let total = self.capabilities.total_memory;
        let most = ceiling(&shared.settings, &self.capabilities).min(total);
        let (mut sum, mut said) = (0_u64, Vec::new());
        for lifetime in Lifetime::ALL {
            let size = shared.settings.reserve[lifetime as usize];
            let bytes = whole_pages(size, total);
            if bytes > 0 {
                sum = sum.saturating_add(bytes);
                said.push(format!("{}={size}", lifetime.name()));
            }
        }
        if sum <= most || (said.len() == 1 && most == total) {
            return Ok(());
        }
        Err(Error::Setting(
            format!(
                "reserve:{}: {} in all, more than the {} that may be held on device {} (its \
                 memory, or limit:); reserve less",
                said.join("+"),
                Bytes(sum),
                Bytes(most),
                self.id
            )
            .into(),
        ))
    }

    /// Extends `space` to `bytes` with unowned memory; if memory is short, first trims the device.
    ///
    /// # Errors
    /// The driver's error; out of memory also if the headroom would be touched. What was mapped
    /// stays.
    pub(crate) fn fill(
        &self,
        shared: &Shared,
        space: SpaceId,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let extend =
            || self.extend_to(shared, &mut lock(&self.central), space, Lifetime::Auto, bytes);
        match extend() {
            Err(error) if error.is_out_of_memory() => {
                self.trim(shared);
                extend()
            }
            done => done,
        }
    }

    fn extend_to(
        &self,
        shared: &Shared,
        central: &mut Central,
        space: SpaceId,
        lifetime: Lifetime,
        bytes: u64,
    ) -> Result<(), DriverError> {
        loop {
            let missing = bytes.saturating_sub(central.arenas.held_bytes(space));
            if missing == 0 {
                return Ok(());
            }
            // A reserve leaves the headroom free, even where requests already use it.
            let fresh = self.free_beside(shared, central, self.headroom(shared));
            if fresh < missing {
                return Err(DriverError::new("headroom", ErrorKind::OutOfMemory, 0));
            }
            // Fresh memory only: other reserves must not move here.
            let growth = Growth { fresh, ..Growth::of(shared, &self.streams, lifetime) };
            let want = Want { space, bytes: missing, align: PAGE, stream: UNOWNED };
            // A row of pages beside a free run is shorter than `missing`; the next turn maps the
            // rest.
            self.supply.extend(central, &growth, want, false)?;
        }
    }

    /// The last memory before an out-of-memory: gives up the reserves of lifetimes for good. The
    /// bytes returned to the driver.
    pub(crate) fn give_up_reserves(&self, shared: &Shared) -> u64 {
        let mut central = lock(&self.central);
        let reserved: u64 = central.pools.reserves().iter().sum();
        if reserved == 0 {
            return 0;
        }
        let Some(_guard) = self.release_guard(shared) else { return 0 };
        central.pools.drop_reserves();
        let bytes = self.supply.evict(&mut central, &Eviction::of(shared, &self.streams));
        self.supply.release(&mut central, &*shared.driver);
        central.publish_reserved();
        log::warn!(
            "device {}: memory is short, so the {} of `reserve:` are released",
            self.id,
            Bytes(reserved)
        );
        bytes
    }
}

/// A reserve on a device of `total` bytes, in whole pages.
fn whole_pages(reserve: Size, total: u64) -> u64 {
    round_up(reserve.resolve(total), PAGE).unwrap_or(u64::MAX / PAGE * PAGE)
}

impl Central {
    /// The memory that a space keeps even if idle: the reserve of its lifetime, or of its pool.
    pub(crate) fn reserve_of(&self, space: SpaceId) -> u64 {
        // A reserve is for large blocks; a small block's span is one page.
        self.pools
            .of_space(space)
            .filter(|pool| pool.space() == space)
            .map_or(0, |pool| pool.rules.reserve)
    }

    /// The memory of a space above its reserve; as much may be taken from it if idle.
    pub(crate) fn spare_of(&self, space: SpaceId) -> u64 {
        self.arenas.held_bytes(space).saturating_sub(self.reserve_of(space))
    }

    /// The ordinary spaces that hold more than their lifetimes' reserves.
    pub(crate) fn movable_spaces(&self) -> Vec<SpaceId> {
        self.spaces.iter().filter(|&space| self.spare_of(space) > 0).collect()
    }

    /// The spaces whose memory the ladder may return.
    pub(crate) fn open_spaces(&self) -> Vec<SpaceId> {
        let supplied =
            |&space: &SpaceId| self.pools.of_space(space).is_some_and(|pool| !pool.is_outside());
        self.pools.shared_spaces().filter(supplied).collect()
    }
}
