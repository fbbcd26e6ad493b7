//! How a stand-in GPU is set up.

use crate::costs::Costs;

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Physical memory, bytes.
    pub capacity: u64,
    /// The devices that can map this one's memory; `None`: all of them.
    pub peers: Option<Vec<u32>>,
    /// Has virtual memory management.
    pub vmm: bool,
    /// Has stream-ordered pools.
    pub pools: bool,
    /// Shares the host's memory, which could give so much, bytes. What is taken beyond that is not
    /// refused: the machine would hang.
    pub host_memory: Option<u64>,
    /// The unit of physical memory and of mappings, bytes: a power of two.
    pub granularity: u64,
}

impl DeviceConfig {
    /// A device of `capacity` bytes that can do everything.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            peers: None,
            vmm: true,
            pools: true,
            host_memory: None,
            granularity: crate::GRANULARITY,
        }
    }
}

/// What `cuStreamGetId` answers about a stream that captures. CUDA's documentation names no such
/// rule; NVIDIA's own code (CCCL, `cudax` `places`) has been changed to ask before a capture
/// begins. A program that asks in none is right under all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CapturingIds {
    /// The id, as of any stream.
    #[default]
    Told,
    /// Code 900.
    Refused,
    /// Code 900, and the capture has failed, in relaxed mode too.
    Invalidate,
}

/// What a call of the allocator on a destroyed stream's handle is. The driver's documentation
/// leaves it undefined ("passing an invalid handle will result in undefined behavior", cuda.h,
/// `cuStreamGetId`), so an allocator makes none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DestroyedStreams {
    /// Code 400, and noted as a misuse.
    #[default]
    Misuse,
    /// Code 400, as drivers mostly answer.
    Refused,
}

/// A stand-in GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The devices.
    pub devices: Vec<DeviceConfig>,
    /// What calls cost. [`Costs::zero`]: nothing.
    pub costs: Costs,
    /// How far a stream may lag behind the host before a launch blocks the host, nanoseconds.
    pub run_ahead: u64,
    /// Bits of address space.
    pub address_bits: u32,
    /// What a reservation is aligned to that asks for no alignment, bytes. Below 2 MiB, such
    /// reservations begin at no multiple of 2 MiB: the driver promises none ("zero for default
    /// alignment", cuMemAddressReserve), and what is not promised must not be relied on.
    pub default_alignment: u64,
    /// Plain allocations take physical memory in multiples of this, bytes.
    pub plain_granularity: u64,
    /// Streams have ids (drivers from 12.0 on).
    pub stream_ids: bool,
    /// An event can be recorded behind all work of a context (drivers from 12.5 on).
    pub context_events: bool,
    /// What the id of a stream that captures is answered with.
    pub capturing_ids: CapturingIds,
    /// What a call of the allocator on a destroyed stream's handle is.
    pub destroyed_streams: DestroyedStreams,
    /// The program says for which streams it vouches ([`crate::vouching`]) and which last
    /// ([`crate::Gpu::stream_lasts`]); a call of the allocator on any other that it did not create
    /// itself is a misuse. So a recycled handle is found out too: it names a stream, but not the
    /// one that the allocator remembers.
    pub vouched_streams: bool,
    /// Watch the order of all work (see [`crate::oracle`]).
    pub oracle: bool,
}

impl Config {
    /// One device of `capacity` bytes, driver calls at the prices `by-call`, the oracle on.
    pub fn new(capacity: u64) -> Self {
        Self {
            devices: vec![DeviceConfig::new(capacity)],
            costs: Costs::default(),
            run_ahead: 10_000_000,
            address_bits: 47,
            default_alignment: crate::GRANULARITY,
            plain_granularity: crate::GRANULARITY,
            stream_ids: true,
            context_events: true,
            capturing_ids: CapturingIds::Told,
            destroyed_streams: DestroyedStreams::Misuse,
            vouched_streams: false,
            oracle: true,
        }
    }

    /// `count` devices of `capacity` bytes each.
    pub fn devices(count: u32, capacity: u64) -> Self {
        Self { devices: vec![DeviceConfig::new(capacity); count as usize], ..Self::new(capacity) }
    }
}
