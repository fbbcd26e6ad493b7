//! The setup of a simulated GPU.

use crate::costs::Costs;

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Physical memory, bytes.
    pub capacity: u64,
    /// The devices that can map this device's memory; `None`: all of them.
    pub peers: Option<Vec<u32>>,
    /// Has virtual memory management.
    pub vmm: bool,
    /// Has stream-ordered pools.
    pub pools: bool,
    /// Bytes of host memory that the device shares. The simulator does not refuse allocations
    /// beyond it: a real machine would hang.
    pub host_memory: Option<u64>,
    /// The unit of physical memory and of mappings, bytes: a power of two.
    pub granularity: u64,
}

impl DeviceConfig {
    /// A device of `capacity` bytes with every feature.
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

/// The result of `cuStreamGetId` on a capturing stream. CUDA's documentation states no rule;
/// NVIDIA's own code (CCCL, `cudax` `places`) was changed to ask before a capture begins. A program
/// that never asks during a capture is right under every variant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CapturingIds {
    /// The id, as of any stream.
    #[default]
    Told,
    /// Code 900.
    Refused,
    /// Code 900, and the capture fails, in relaxed mode too.
    Invalidate,
}

/// The result of an allocator's call on a destroyed stream's handle. The driver's documentation
/// leaves it undefined ("passing an invalid handle will result in undefined behavior", cuda.h,
/// `cuStreamGetId`), so an allocator must not make such a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DestroyedStreams {
    /// Code 400, and noted as a misuse.
    #[default]
    Misuse,
    /// Code 400, as most drivers return.
    Refused,
}

/// A simulated GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The devices.
    pub devices: Vec<DeviceConfig>,
    /// The price of calls. [`Costs::zero`]: nothing.
    pub costs: Costs,
    /// How far a stream may lag behind the host before a launch blocks the host, nanoseconds.
    pub run_ahead: u64,
    /// Bits of address space.
    pub address_bits: u32,
    /// Alignment of a reservation that asks for none, bytes. Below 2 MiB, such reservations begin
    /// at no multiple of 2 MiB: the driver promises none ("zero for default alignment",
    /// cuMemAddressReserve), so the allocator must not rely on it.
    pub default_alignment: u64,
    /// Plain allocations take physical memory in multiples of this many bytes.
    pub plain_granularity: u64,
    /// Streams have ids (drivers since 12.0).
    pub stream_ids: bool,
    /// An event can be recorded behind all work of a context (drivers since 12.5).
    pub context_events: bool,
    /// The result of asking for the id of a capturing stream.
    pub capturing_ids: CapturingIds,
    /// The result of an allocator's call on a destroyed stream's handle.
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
