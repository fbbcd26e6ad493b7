//! Models of other allocators: torch's caching allocator by default, and with expandable segments.
//!
//! They follow the rules of `c10/cuda/CUDACachingAllocator.cpp` in PyTorch 2.11.0 to the byte,
//! including the retry paths, and use [`Driver`] for memory and order, as Gruyère does, so the same
//! driver calls cost the same on the same device. The models omit features that the traces do not
//! use: graph captures, memory pools of the user, garbage collection
//! (`garbage_collection_threshold`), `max_split_size_mb` and memory fractions, all off by default.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

mod blocks;
mod caching;
mod events;
mod expandable;

use crate::allocator::{AllocError, Allocator};
use caching::{DeviceAllocator, Rules};
use gruyere::driver::{DeviceId, DevicePtr, Driver, Result, StreamHandle};
use std::collections::HashMap;
use std::sync::Arc;

/// torch's caching allocator.
pub struct Torch {
    name: &'static str,
    devices: Vec<DeviceAllocator>,
    owners: HashMap<DevicePtr, (DeviceId, blocks::BlockId)>,
}

impl Torch {
    /// torch with its default settings: segments from cudaMalloc.
    ///
    /// # Errors
    /// If the driver cannot list its devices.
    pub fn native(driver: &Arc<dyn Driver>) -> Result<Self> {
        Self::new("torch", driver, Rules::Native)
    }

    /// torch with `expandable_segments:True`.
    ///
    /// # Errors
    /// If the driver cannot list its devices.
    pub fn expandable(driver: &Arc<dyn Driver>) -> Result<Self> {
        Self::new("expandable", driver, Rules::Expandable)
    }

    fn new(name: &'static str, driver: &Arc<dyn Driver>, rules: Rules) -> Result<Self> {
        let devices = (0..driver.device_count()?)
            .map(|device| DeviceAllocator::new(driver.clone(), device, rules))
            .collect::<Result<_>>()?;
        Ok(Self { name, devices, owners: HashMap::new() })
    }

    /// Physical bytes held on `device`, by the allocator's count.
    pub fn reserved(&self, device: DeviceId) -> u64 {
        self.devices.get(device as usize).map_or(0, DeviceAllocator::reserved)
    }
}

impl Allocator for Torch {
    fn name(&self) -> &str {
        self.name
    }

    fn malloc(
        &mut self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> std::result::Result<DevicePtr, AllocError> {
        if size == 0 {
            return Ok(0);
        }
        let heap = self.devices.get_mut(device as usize).ok_or(AllocError::NoDevice(device))?;
        let (block, address) = heap.malloc(size, stream)?;
        self.owners.insert(address, (device, block));
        Ok(address)
    }

    fn free(
        &mut self,
        address: DevicePtr,
        _size: u64,
        _device: DeviceId,
        _stream: StreamHandle,
    ) -> std::result::Result<(), AllocError> {
        if address == 0 {
            return Ok(());
        }
        let (device, block) =
            self.owners.remove(&address).ok_or(AllocError::UnknownAddress(address))?;
        Ok(self.devices[device as usize].free(block)?)
    }

    fn record_stream(
        &mut self,
        address: DevicePtr,
        stream: StreamHandle,
    ) -> std::result::Result<(), AllocError> {
        if address == 0 {
            return Ok(());
        }
        let &(device, block) =
            self.owners.get(&address).ok_or(AllocError::UnknownAddress(address))?;
        self.devices[device as usize].record_stream(block, stream);
        Ok(())
    }

    fn release(&mut self) -> std::result::Result<(), AllocError> {
        Ok(self.devices.iter_mut().try_for_each(DeviceAllocator::release_cached)?)
    }

    fn validate(&self) -> std::result::Result<(), String> {
        self.devices.iter().try_for_each(DeviceAllocator::validate)
    }
}
