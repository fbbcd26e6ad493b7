//! libcuda: plain memory, pools, copies and fills.

use crate::abi::{Answer, In, Out, SomeResult, code};
use crate::context::{driver_device, stream_device};
use crate::entry::driver;
use crate::gpu::{failed, gpu, own, pool_attribute};
use crate::numbers::CU_MEM_LOCATION_TYPE_DEVICE;
use gruyere_phantom::{CaptureStatus, error};

/// `CUmemLocation` and `cudaMemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: u32,
    id: i32,
}

impl Location {
    /// The device; refuses host memory.
    pub fn device(self) -> Result<u32, u32> {
        if self.kind != CU_MEM_LOCATION_TYPE_DEVICE {
            return Err(code::NOT_SUPPORTED);
        }
        gpu().device(self.id)
    }
}

/// `CUmemPoolProps` and `cudaMemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PoolProps {
    kind: u32,
    handle_types: u32,
    location: Location,
    security: usize,
    max_size: usize,
    reserved: [u8; 56],
}

/// `CUmemAccessDesc` and `cudaMemAccessDesc`; flags 3: read and write, 0: none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: u32,
}

pub fn pool_create(out: Out<usize>, props: In<PoolProps>) -> Answer {
    let props = props.get()?;
    let pool =
        gpu().sim.pool_create(props.location.device()?, props.max_size as u64).map_err(failed)?;
    out.put(pool)
}

/// A device's default pool cannot be destroyed.
pub fn pool_destroy(pool: usize) -> Answer {
    if gpu().is_default_pool(pool) {
        return Err(code::INVALID_VALUE);
    }
    gpu().sim.pool_destroy(0, pool).map_err(failed)
}

pub fn pool_get_attribute(pool: usize, number: i32, out: Out<SomeResult>) -> Answer {
    let (attribute, is_int) = pool_attribute(number)?;
    let value = gpu().sim.pool_attribute(0, pool, attribute).map_err(failed)?;
    if is_int { out.cast::<u32>().put(value as u32) } else { out.cast::<u64>().put(value) }
}

pub fn pool_set_attribute(pool: usize, number: i32, value: In<u64>) -> Answer {
    let (attribute, is_int) = pool_attribute(number)?;
    let value = if is_int {
        // SAFETY: for this attribute the argument is an int; `In` is a transparent pointer.
        u64::from(unsafe { std::mem::transmute::<In<u64>, In<u32>>(value) }.get()?)
    } else {
        value.get()?
    };
    gpu().sim.pool_set_attribute(0, pool, attribute, value).map_err(failed)
}

pub fn pool_set_access(pool: usize, descs: In<AccessDesc>, n: usize) -> Answer {
    for i in 0..n {
        let desc = descs.nth(i)?;
        if desc.flags != 0 {
            gpu().sim.pool_allow_peer(0, pool, desc.location.device()?).map_err(failed)?;
        }
    }
    Ok(())
}

/// Rows of `width` bytes begin at multiples of this, bytes.
const PITCH: usize = 512;

/// `cudaMallocPitch`; 0 bytes: NULL.
pub fn alloc_rows(
    device: u32,
    out: Out<u64>,
    pitch: Out<usize>,
    width: usize,
    rows: usize,
) -> Answer {
    let row = width.checked_next_multiple_of(PITCH).ok_or(error::code::OUT_OF_MEMORY)?;
    let bytes = row.checked_mul(rows).ok_or(error::code::OUT_OF_MEMORY)?;
    out.put(if bytes == 0 { 0 } else { gpu().sim.alloc(device, bytes as u64).map_err(failed)? })?;
    pitch.put(row)
}

/// `cudaMallocFromPoolAsync`: on a captured stream the memory belongs to the graph, not to the
/// pool.
pub fn alloc_from_pool(
    device: u32,
    out: Out<u64>,
    bytes: usize,
    pool: usize,
    stream: usize,
) -> Answer {
    let sim = &gpu().sim;
    match sim.capture_status(device, stream).map_err(failed)? {
        CaptureStatus::None => take_from_pool(device, out, bytes, pool, stream),
        _ => out.put(sim.graph_alloc(device, bytes as u64, stream).map_err(failed)?),
    }
}

/// A block of a pool's, which may be memory that was used before.
fn take_from_pool(device: u32, out: Out<u64>, bytes: usize, pool: usize, stream: usize) -> Answer {
    let address = gpu().sim.pool_alloc(device, pool, bytes as u64, stream).map_err(failed)?;
    if let Some(values) = &gpu().values {
        values.lost(address, bytes as u64);
    }
    out.put(address)
}

/// `cudaMallocAsync`: from the current pool of the stream's device; 0 bytes: NULL.
pub fn alloc_from_current(device: u32, out: Out<u64>, bytes: usize, stream: usize) -> Answer {
    let owner = gpu().sim.stream_device(device, stream).map_err(failed)?;
    if bytes == 0 {
        return out.put(0);
    }
    alloc_from_pool(device, out, bytes, gpu().current_pool(owner)?, stream)
}

driver! {
    fn cuMemAllocPitch_v2(
        out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32
    ) {
        if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(code::INVALID_VALUE);
        }
        alloc_rows(driver_device()?, out, pitch, width, height)
    }

    fn cuMemAlloc_v2(out: Out<u64>, bytes: usize) {
        let device = driver_device()?;
        out.put(gpu().sim.alloc(device, bytes as u64).map_err(failed)?)
    }

    fn cuMemFree_v2(address: u64) {
        driver_device()?;
        gpu().free(address)
    }

    fn cuMemGetAddressRange_v2(start: Out<u64>, bytes: Out<usize>, address: u64) {
        let range = gpu().allocation_of(address).ok_or(code::INVALID_VALUE)?;
        start.put_if_wanted(range.0);
        bytes.put_if_wanted(range.1 as usize);
        Ok(())
    }

    fn cuMemPoolCreate(out: Out<usize>, props: In<PoolProps>) {
        pool_create(out, props)
    }

    fn cuMemPoolDestroy(pool: usize) {
        pool_destroy(pool)
    }

    fn cuMemPoolTrimTo(pool: usize, keep: usize) {
        gpu().sim.pool_trim(0, pool, keep as u64).map_err(failed)
    }

    fn cuMemPoolGetAttribute(pool: usize, number: i32, out: Out<SomeResult>) {
        pool_get_attribute(pool, number, out)
    }

    fn cuMemPoolSetAttribute(pool: usize, number: i32, value: In<u64>) {
        pool_set_attribute(pool, number, value)
    }

    fn cuMemPoolSetAccess(pool: usize, descs: In<AccessDesc>, n: usize) {
        pool_set_access(pool, descs, n)
    }

    fn cuMemAllocAsync(out: Out<u64>, bytes: usize, stream: usize) {
        driver_malloc_async(out, bytes, stream)
    }
    fn cuMemAllocAsync_ptsz(out: Out<u64>, bytes: usize, stream: usize) {
        driver_malloc_async(out, bytes, own(stream))
    }

    /// Refused on a captured stream, unlike a real driver: an allocator makes this call, and must
    /// never take a graph's memory.
    fn cuMemAllocFromPoolAsync(out: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        driver_alloc_from_pool(out, bytes, pool, stream)
    }
    fn cuMemAllocFromPoolAsync_ptsz(out: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        driver_alloc_from_pool(out, bytes, pool, own(stream))
    }

    fn cuMemFreeAsync(address: u64, stream: usize) {
        gpu().free_async(stream_device(stream)?, address, stream)
    }
    fn cuMemFreeAsync_ptsz(address: u64, stream: usize) {
        gpu().free_async(stream_device(stream)?, address, own(stream))
    }

    fn cuMemcpy(to: u64, from: u64, bytes: usize) { gpu().copy_and_wait(to, from, bytes, 0) }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, stream)
    }
    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) { gpu().copy_and_wait(to, from, bytes, 0) }
    fn cuMemcpyHtoD_v2_ptds(to: u64, from: u64, bytes: usize) {
        gpu().copy_and_wait(to, from, bytes, own(0))
    }
    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) { gpu().copy_and_wait(to, from, bytes, 0) }
    fn cuMemcpyDtoH_v2_ptds(to: u64, from: u64, bytes: usize) {
        gpu().copy_and_wait(to, from, bytes, own(0))
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) { gpu().copy(to, from, bytes, 0) }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, stream)
    }
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, stream)
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, stream)
    }
    fn cuMemcpyHtoDAsync_v2_ptsz(to: u64, from: u64, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, own(stream))
    }
    fn cuMemcpyDtoHAsync_v2_ptsz(to: u64, from: u64, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, own(stream))
    }
    fn cuMemcpyDtoDAsync_v2_ptsz(to: u64, from: u64, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, own(stream))
    }
    fn cuMemcpyAsync_ptsz(to: u64, from: u64, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, own(stream))
    }
    fn cuMemcpyPeer(to: u64, _to_context: usize, from: u64, _from_context: usize, bytes: usize) {
        gpu().copy(to, from, bytes, 0)
    }
    fn cuMemcpyPeerAsync(
        to: u64, _to_context: usize, from: u64, _from_context: usize, bytes: usize, stream: usize,
    ) {
        gpu().copy(to, from, bytes, stream)
    }

    fn cuMemsetD8_v2(address: u64, value: u8, n: usize) { gpu().fill(address, &[value], n, 0) }
    fn cuMemsetD16_v2(address: u64, value: u16, n: usize) {
        gpu().fill(address, &value.to_ne_bytes(), n, 0)
    }
    fn cuMemsetD32_v2(address: u64, value: u32, n: usize) {
        gpu().fill(address, &value.to_ne_bytes(), n, 0)
    }
    fn cuMemsetD8Async(address: u64, value: u8, n: usize, stream: usize) {
        gpu().fill(address, &[value], n, stream)
    }
    fn cuMemsetD16Async(address: u64, value: u16, n: usize, stream: usize) {
        gpu().fill(address, &value.to_ne_bytes(), n, stream)
    }
    fn cuMemsetD32Async(address: u64, value: u32, n: usize, stream: usize) {
        gpu().fill(address, &value.to_ne_bytes(), n, stream)
    }

    fn cuStreamWriteValue32_v2(stream: usize, address: u64, value: u32, _flags: u32) {
        gpu().fill(address, &value.to_ne_bytes(), 1, stream)
    }
    fn cuStreamWriteValue64_v2(stream: usize, address: u64, value: u64, _flags: u32) {
        gpu().fill(address, &value.to_ne_bytes(), 1, stream)
    }
}

fn driver_malloc_async(out: Out<u64>, bytes: usize, stream: usize) -> Answer {
    alloc_from_current(stream_device(stream)?, out, bytes, stream)
}

fn driver_alloc_from_pool(out: Out<u64>, bytes: usize, pool: usize, stream: usize) -> Answer {
    take_from_pool(stream_device(stream)?, out, bytes, pool, stream)
}
