//! Page-locked and managed memory, and attributes of pointers.

use crate::abi::{Answer, In, Out, SomeResult, code};
use crate::call_log::{by_value, large};
use crate::driver_memory::Location;
use crate::entry::{driver, runtime};
use crate::gpu::gpu;
use crate::host_memory::Kind;
use crate::numbers::*;
use gruyere_phantom::Source;
use std::ptr;

by_value! { Location }
large! { PointerAttributes }

/// `cudaPointerAttributes` in CUDA 13's layout.
#[repr(C)]
pub struct PointerAttributes {
    kind: u32,
    device: i32,
    device_pointer: usize,
    host_pointer: usize,
    reserved: [i64; 8],
}

/// `CU_MEMORYTYPE_HOST` and `cudaMemoryTypeHost`. Memory unknown to CUDA is 0.
const HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE` and `cudaMemoryTypeDevice`.
const DEVICE: u32 = 2;
/// `cudaMemoryTypeManaged`. To the driver it is device memory.
const MANAGED: u32 = 3;

fn attributes(address: usize) -> PointerAttributes {
    let (kind, device, device_pointer, host_pointer) = match gpu().device_of_address(address as u64)
    {
        Some(device) => (DEVICE, device as i32, address, 0),
        None => match gpu().host.kind(address) {
            Some(Kind::Managed) => (MANAGED, 0, address, address),
            Some(Kind::Pinned | Kind::Registered) => (HOST, 0, address, address),
            None => (0, -2, 0, address),
        },
    };
    PointerAttributes { kind, device, device_pointer, host_pointer, reserved: [0; 8] }
}

runtime! {
    fn cudaHostAlloc(out: Out<usize>, bytes: usize, _flags: u32) {
        out.put(gpu().host.allocate(bytes)?)
    }

    fn cudaMallocHost(out: Out<usize>, bytes: usize) {
        out.put(gpu().host.allocate(bytes)?)
    }

    fn cudaMallocManaged(out: Out<usize>, bytes: usize, _flags: u32) {
        out.put(gpu().host.allocate_managed(bytes)?)
    }

    /// A hint. A caller for CUDA 12 passes a device and a stream after the range.
    fn cudaMemPrefetchAsync(
        start: usize, _bytes: usize, _place: Location, _flags: u32, _stream: usize
    ) {
        hinted(start)
    }

    fn cudaMemAdvise(start: usize, _bytes: usize, _advice: u32, _place: Location) {
        hinted(start)
    }

    fn cudaFreeHost(start: usize) {
        gpu().host.free(start)
    }

    fn cudaHostRegister(start: usize, bytes: usize, _flags: u32) {
        gpu().host.register(start, bytes)
    }

    fn cudaHostUnregister(start: usize) {
        gpu().host.unregister(start)
    }

    fn cudaHostGetDevicePointer(out: Out<usize>, start: usize, _flags: u32) {
        out.put(start)
    }

    fn cudaPointerGetAttributes(out: Out<PointerAttributes>, address: usize) {
        let found = attributes(address);
        if out.raw().is_null() {
            return Err(code::INVALID_VALUE);
        }
        // A caller's struct for CUDA 12 ends before the reserved words.
        let bytes = std::mem::offset_of!(PointerAttributes, reserved);
        // SAFETY: not null, and by the C contract the caller's struct, which has at least these.
        unsafe {
            ptr::copy_nonoverlapping((&raw const found).cast::<u8>(), out.raw().cast(), bytes);
        }
        Ok(())
    }
}

/// A hint to a driver that moves managed memory.
fn hinted(start: usize) -> Answer {
    (gpu().host.kind(start) == Some(Kind::Managed)).then_some(()).ok_or(code::INVALID_VALUE)
}

driver! {
    fn cuMemAllocManaged(out: Out<usize>, bytes: usize, _flags: u32) {
        out.put(gpu().host.allocate_managed(bytes)?)
    }

    fn cuMemPrefetchAsync(start: usize, _bytes: usize, _device: i32, _stream: usize) {
        hinted(start)
    }

    fn cuMemPrefetchAsync_v2(
        start: usize, _bytes: usize, _place: Location, _flags: u32, _stream: usize
    ) {
        hinted(start)
    }

    fn cuMemAdvise(start: usize, _bytes: usize, _advice: u32, _device: i32) {
        hinted(start)
    }

    fn cuMemAdvise_v2(start: usize, _bytes: usize, _advice: u32, _place: Location) {
        hinted(start)
    }

    fn cuMemAllocHost_v2(out: Out<usize>, bytes: usize) {
        out.put(gpu().host.allocate(bytes)?)
    }

    fn cuMemHostAlloc(out: Out<usize>, bytes: usize, _flags: u32) {
        out.put(gpu().host.allocate(bytes)?)
    }

    fn cuMemFreeHost(start: usize) {
        gpu().host.free(start)
    }

    fn cuMemHostRegister_v2(start: usize, bytes: usize, _flags: u32) {
        gpu().host.register(start, bytes)
    }

    fn cuMemHostUnregister(start: usize) {
        gpu().host.unregister(start)
    }

    fn cuMemHostGetDevicePointer_v2(out: Out<usize>, start: usize, _flags: u32) {
        out.put(start)
    }

    fn cuMemHostGetFlags(out: Out<u32>, _start: usize) {
        out.put(0)
    }

    fn cuPointerGetAttribute(out: Out<SomeResult>, attribute: i32, address: usize) {
        pointer_attribute(out, attribute, address)
    }

    /// A missing attribute is zero, not an error.
    fn cuPointerGetAttributes(n: u32, wanted: In<i32>, outs: In<usize>, address: usize) {
        for i in 0..n as usize {
            let (attribute, out) = (wanted.nth(i)?, outs.nth(i)?);
            // SAFETY: `Out` is a transparent pointer, and the caller's array holds result pointers.
            let out = unsafe { std::mem::transmute::<usize, Out<SomeResult>>(out) };
            let _ = pointer_attribute(out, attribute, address);
        }
        Ok(())
    }

    fn cuPointerSetAttribute(_value: In<u8>, _attribute: i32, _address: usize) {
        Ok(())
    }
}

/// One `CUpointer_attribute`. Results have several sizes: an int is written as an int.
fn pointer_attribute(out: Out<SomeResult>, attribute: i32, address: usize) -> Result<(), u32> {
    let facts = attributes(address);
    if facts.kind == 0 {
        return Err(code::INVALID_VALUE);
    }
    let put_int = |value: u32| out.cast::<u32>().put(value);
    let put = |value: u64| out.cast::<u64>().put(value);
    match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => put(crate::context::primary(facts.device as u32) as u64),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
            put_int(if facts.kind == MANAGED { DEVICE } else { facts.kind })
        }
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => put(facts.device_pointer as u64),
        CU_POINTER_ATTRIBUTE_HOST_POINTER => put(facts.host_pointer as u64),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => Ok(()), // can only be set
        CU_POINTER_ATTRIBUTE_BUFFER_ID => {
            put(gpu().allocation_of(address as u64).map_or(0, |(start, _)| start))
        }
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put_int(facts.device as u32),
        CU_POINTER_ATTRIBUTE_IS_MANAGED => put_int(u32::from(facts.kind == MANAGED)),
        // Memory that cudaIpcGetMemHandle accepts.
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
            put_int(u32::from(source(address) == Some(Source::Plain)))
        }
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => {
            put(gpu().allocation_of(address as u64).ok_or(code::INVALID_VALUE)?.0)
        }
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => {
            put(gpu().allocation_of(address as u64).ok_or(code::INVALID_VALUE)?.1)
        }
        CU_POINTER_ATTRIBUTE_MAPPED => put_int(1),
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => put(match source(address) {
            Some(Source::Pool(pool)) => pool as u64,
            _ => 0,
        }),
        _ => Err(code::NOT_SUPPORTED),
    }
}

fn source(address: usize) -> Option<Source> {
    gpu().sim.allocation(address as u64).map(|backing| backing.source)
}
