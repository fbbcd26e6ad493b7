//! Host costs of driver calls, nanoseconds.
//!
//! A call over pages and mappings costs one price for its first page and mapping, one for each
//! further page (2 MiB), and one for each further mapping; a call without a size has a constant
//! price. The figures come from price files ([`crate::Prices`]): `crates/phantom/prices/` has the
//! shipped ones, with a source for each figure.

use crate::prices::Prices;

/// Unit of growing costs: the driver's granule, bytes.
pub(crate) const PAGE: u64 = 2 << 20;

macro_rules! costs {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Costs of driver calls, nanoseconds of host time. Default: the price file `by-call`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Costs {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Costs {
            /// The names of the figures, as price files have them.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name),)*];

            /// Calls that take no time: for tests whose arithmetic is done by hand.
            pub const fn zero() -> Self {
                Self { $($name: 0,)* }
            }

            /// The figure of this name.
            pub(crate) fn named(&mut self, name: &str) -> Option<&mut u64> {
                match name {
                    $(stringify!($name) => Some(&mut self.$name),)*
                    _ => None,
                }
            }
        }
    };
}

costs! {
    /// Questions that never reach the device: attributes, stream ids, capture status.
    query,
    /// `cuMemGetInfo`.
    memory_info,
    /// `cuMemPoolCreate` and `cuMemPoolDestroy`.
    pool_create,
    /// `cuMemPoolSetAccess`.
    pool_access,
    /// An allocation from a pool that needs no growth, and a free that gives nothing back.
    pool_hit,
    /// `cuMemAddressReserve`, `cuMemAddressFree`.
    address,
    /// `cuMemCreate`, first page.
    create,
    /// `cuMemCreate`, each further page.
    create_more,
    /// `cuMemMap`, a call.
    map,
    /// `cuMemSetAccess`, first page, first mapping, each device.
    set_access,
    /// `cuMemSetAccess`, each further mapping of a device.
    set_access_mapping,
    /// `cuMemSetAccess`, each further page of a device.
    set_access_more,
    /// `cuMemUnmap`, first page, first mapping.
    unmap,
    /// `cuMemUnmap`, each further mapping.
    unmap_mapping,
    /// `cuMemUnmap`, each further page.
    unmap_more,
    /// `cuMemRelease`, first page.
    release,
    /// `cuMemRelease`, each further page.
    release_more,
    /// `cuMemAlloc`, first page.
    alloc,
    /// `cuMemAlloc`, each further page.
    alloc_more,
    /// `cuMemFree`, first page, its wait not counted.
    free,
    /// `cuMemFree`, each further page.
    free_more,
    /// Event create, destroy, record, query and stream waits: enqueues without a wait.
    event,
    /// The fixed part of a host synchronisation.
    synchronize,
    /// `cuStreamCreate`, `cuStreamDestroy`.
    stream_create,
    /// A kernel launch or an asynchronous memset, the program's own host work included.
    launch,
    /// `cuGraphLaunch`.
    graph_launch,
}

impl Default for Costs {
    fn default() -> Self {
        Prices::by_call().costs
    }
}

/// `first` for the first page of `bytes`, `more` for each further one.
fn scaled(first: u64, more: u64, bytes: u64) -> u64 {
    first + more * bytes.div_ceil(PAGE).saturating_sub(1)
}

impl Costs {
    /// `cuMemCreate` of `bytes`.
    pub fn create_of(&self, bytes: u64) -> u64 {
        scaled(self.create, self.create_more, bytes)
    }

    /// `cuMemSetAccess` over `bytes` in `mappings` mappings for `devices` devices: each device has
    /// page tables of its own.
    pub fn set_access_of(&self, bytes: u64, mappings: u64, devices: u64) -> u64 {
        let further = self.set_access_mapping * mappings.saturating_sub(1);
        (scaled(self.set_access, self.set_access_more, bytes) + further) * devices
    }

    /// `cuMemUnmap` of `bytes` in `mappings` mappings.
    pub fn unmap_of(&self, bytes: u64, mappings: u64) -> u64 {
        scaled(self.unmap, self.unmap_more, bytes) + self.unmap_mapping * mappings.saturating_sub(1)
    }

    /// `cuMemRelease` of `bytes`.
    pub fn release_of(&self, bytes: u64) -> u64 {
        scaled(self.release, self.release_more, bytes)
    }

    /// `cuMemAlloc` of `bytes`.
    pub fn alloc_of(&self, bytes: u64) -> u64 {
        scaled(self.alloc, self.alloc_more, bytes)
    }

    /// `cuMemFree` of `bytes`, without its wait.
    pub fn free_of(&self, bytes: u64) -> u64 {
        scaled(self.free, self.free_more, bytes)
    }

    /// A pool's growth by `new` bytes, and the mapping of these and others, `bytes` in all, visible
    /// to `devices` devices: create, map and set access.
    pub fn pool_growth_of(&self, new: u64, bytes: u64, devices: u64) -> u64 {
        let create = if new == 0 { 0 } else { self.create_of(new) };
        create + self.map + self.set_access_of(bytes, 1, devices)
    }

    /// A pool's return of a chunk of `bytes`: unmap and release.
    pub fn pool_shrink_of(&self, bytes: u64) -> u64 {
        self.unmap_of(bytes, 1) + self.release_of(bytes)
    }
}
