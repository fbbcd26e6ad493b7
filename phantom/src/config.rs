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
}

impl DeviceConfig {
    /// A device of `capacity` bytes that can do everything.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, peers: None, vmm: true, pools: true }
    }
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
    /// Plain allocations take physical memory in multiples of this, bytes.
    pub plain_granularity: u64,
    /// Streams have ids (drivers from 12.0 on).
    pub stream_ids: bool,
    /// An event can be recorded behind all work of a context (drivers from 12.5 on).
    pub context_events: bool,
    /// Watch the order of all work (see [`crate::oracle`]).
    pub oracle: bool,
}

impl Config {
    /// One device of `capacity` bytes, costs as published, the oracle on.
    pub fn new(capacity: u64) -> Self {
        Self {
            devices: vec![DeviceConfig::new(capacity)],
            costs: Costs::default(),
            run_ahead: 10_000_000,
            address_bits: 47,
            plain_granularity: crate::GRANULARITY,
            stream_ids: true,
            context_events: true,
            oracle: true,
        }
    }

    /// `count` devices of `capacity` bytes each.
    pub fn devices(count: u32, capacity: u64) -> Self {
        Self { devices: vec![DeviceConfig::new(capacity); count as usize], ..Self::new(capacity) }
    }
}
