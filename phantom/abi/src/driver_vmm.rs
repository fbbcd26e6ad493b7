//! libcuda: virtual memory management.

use crate::abi::{In, Out, code, driver};
use crate::driver_memory::{AccessDesc, Location};
use crate::gpu::{failed, gpu};
use gruyere_phantom::GRANULARITY;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProp {
    /// 1: pinned, the only kind there is.
    kind: u32,
    handle_types: u32,
    location: Location,
    metadata: usize,
    flags: [u8; 8],
}

driver! {
    fn cuMemGetAllocationGranularity(out: Out<usize>, prop: In<AllocationProp>, _option: u32) {
        prop.get()?.location.device()?;
        out.put(GRANULARITY as usize)
    }

    fn cuMemAddressReserve(out: Out<u64>, bytes: usize, align: usize, _hint: u64, flags: u64) {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        out.put(gpu().sim.address_reserve(0, bytes as u64, align as u64).map_err(failed)?)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        gpu().sim.address_free(0, address, bytes as u64).map_err(failed)
    }

    fn cuMemCreate(out: Out<u64>, bytes: usize, prop: In<AllocationProp>, _flags: u64) {
        let prop = prop.get()?;
        if prop.kind != 1 {
            return Err(code::INVALID_VALUE);
        }
        out.put(gpu().sim.physical_create(prop.location.device()?, bytes as u64).map_err(failed)?)
    }

    fn cuMemRelease(handle: u64) {
        gpu().sim.physical_release(0, handle).map_err(failed)
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) {
        gpu().sim.map(0, address, bytes as u64, offset as u64, handle).map_err(failed)
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        gpu().sim.unmap(0, address, bytes as u64).map_err(failed)
    }

    fn cuMemSetAccess(address: u64, bytes: usize, descs: In<AccessDesc>, n: usize) {
        let mut devices = Vec::with_capacity(n);
        for i in 0..n {
            let desc = descs.nth(i)?;
            if desc.flags != 0 {
                devices.push(desc.location.device()?);
            }
        }
        gpu().sim.set_access(0, address, bytes as u64, &devices).map_err(failed)
    }

    fn cuMemGetAccess(flags: Out<u64>, location: In<Location>, address: u64) {
        let device = location.get()?.device()?;
        let backing = gpu().sim.backing(address, 1);
        let access = backing.first().ok_or(code::INVALID_VALUE)?.access;
        flags.put(if access & (1 << device) != 0 { 3 } else { 0 })
    }
}
