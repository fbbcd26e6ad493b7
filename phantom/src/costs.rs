//! What driver calls cost the host, nanoseconds.
//!
//! Where a figure was published, the field says so: "A100" stands for the published VMM costs for 2 MiB on an A100 (create
//! 29 us, map 2 us, setAccess 38 us, unmap 34 us, release 23 us). Everything marked *assumed* awaits a measurement on a GPU.

/// The unit in which costs grow: the driver's granule, bytes.
const GRANULE: u64 = 2 << 20;

/// Costs of driver calls, nanoseconds of host time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Questions that never reach the device: attributes, stream ids, capture status (assumed).
    pub query: u64,
    /// `cuMemGetInfo` (assumed).
    pub memory_info: u64,
    /// `cuMemPoolCreate` and `cuMemPoolDestroy` (assumed: address space is set up or torn down).
    pub pool_create: u64,
    /// `cuMemPoolSetAccess` (assumed equal to setAccess).
    pub pool_access: u64,
    /// An allocation from a pool that needs no growth, and a free that gives nothing back (reported: about a microsecond).
    pub pool_hit: u64,
    /// `cuMemAddressReserve`, `cuMemAddressFree` (assumed).
    pub address: u64,
    /// `cuMemCreate`, first granule (A100).
    pub create: u64,
    /// `cuMemCreate`, each further granule (assumed: page tables and scrubbing, without the fixed part).
    pub create_more: u64,
    /// `cuMemMap`, a call (A100; assumed flat in the size: it only notes the range).
    pub map: u64,
    /// `cuMemSetAccess`, first granule and device (A100).
    pub set_access: u64,
    /// `cuMemSetAccess`, each further granule of a device (assumed; a call can cover a long range).
    pub set_access_more: u64,
    /// `cuMemUnmap`, first granule (A100).
    pub unmap: u64,
    /// `cuMemUnmap`, each further granule (assumed).
    pub unmap_more: u64,
    /// `cuMemRelease`, first granule (A100).
    pub release: u64,
    /// `cuMemRelease`, each further granule (assumed).
    pub release_more: u64,
    /// `cuMemAlloc`, first granule (assumed: create, map and setAccess in one).
    pub alloc: u64,
    /// `cuMemAlloc`, each further granule (assumed).
    pub alloc_more: u64,
    /// `cuMemFree`, first granule, its wait not counted (assumed: unmap and release in one).
    pub free: u64,
    /// `cuMemFree`, each further granule (assumed).
    pub free_more: u64,
    /// Event create, destroy, record, query and stream waits: enqueues without a wait (assumed, about a microsecond).
    pub event: u64,
    /// The fixed part of a host synchronisation (assumed).
    pub synchronize: u64,
    /// `cuStreamCreate`, `cuStreamDestroy` (assumed).
    pub stream_create: u64,
    /// A kernel launch or an asynchronous memset, the program's own host work included (the study's figure: 8 us).
    pub launch: u64,
    /// `cuGraphLaunch` (assumed).
    pub graph_launch: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            query: 100,
            memory_info: 2_000,
            pool_create: 50_000,
            pool_access: 38_000,
            pool_hit: 1_000,
            address: 2_000,
            create: 29_000,
            create_more: 1_000,
            map: 2_000,
            set_access: 38_000,
            set_access_more: 500,
            unmap: 34_000,
            unmap_more: 500,
            release: 23_000,
            release_more: 500,
            alloc: 69_000,
            alloc_more: 1_500,
            free: 57_000,
            free_more: 1_000,
            event: 1_000,
            synchronize: 2_000,
            stream_create: 10_000,
            launch: 8_000,
            graph_launch: 10_000,
        }
    }
}

/// `first` for the first granule of `bytes`, `more` for each further one.
fn scaled(first: u64, more: u64, bytes: u64) -> u64 {
    first + more * bytes.div_ceil(GRANULE).saturating_sub(1)
}

impl Costs {
    /// Calls that take no time: for tests whose arithmetic is done by hand.
    pub const fn zero() -> Self {
        Self {
            query: 0,
            memory_info: 0,
            pool_create: 0,
            pool_access: 0,
            pool_hit: 0,
            address: 0,
            create: 0,
            create_more: 0,
            map: 0,
            set_access: 0,
            set_access_more: 0,
            unmap: 0,
            unmap_more: 0,
            release: 0,
            release_more: 0,
            alloc: 0,
            alloc_more: 0,
            free: 0,
            free_more: 0,
            event: 0,
            synchronize: 0,
            stream_create: 0,
            launch: 0,
            graph_launch: 0,
        }
    }

    /// `cuMemCreate` of `bytes`.
    pub fn create_of(&self, bytes: u64) -> u64 {
        scaled(self.create, self.create_more, bytes)
    }

    /// `cuMemSetAccess` over `bytes` for `devices` devices: each device has page tables of its own.
    pub fn set_access_of(&self, bytes: u64, devices: u64) -> u64 {
        scaled(self.set_access, self.set_access_more, bytes) * devices
    }

    /// `cuMemUnmap` of `bytes`.
    pub fn unmap_of(&self, bytes: u64) -> u64 {
        scaled(self.unmap, self.unmap_more, bytes)
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

    /// A pool's growth by a chunk of `bytes`, visible to `devices` devices: create, map and set access.
    pub fn pool_growth_of(&self, bytes: u64, devices: u64) -> u64 {
        self.create_of(bytes) + self.map + self.set_access_of(bytes, devices)
    }

    /// A pool's return of a chunk of `bytes`: unmap and release.
    pub fn pool_shrink_of(&self, bytes: u64) -> u64 {
        self.unmap_of(bytes) + self.release_of(bytes)
    }
}
