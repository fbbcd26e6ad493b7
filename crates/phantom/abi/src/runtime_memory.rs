//! libcudart: memory, pools, copies and fills.

use crate::abi::{Answer, In, Out, SomeResult};
use crate::call_log::{by_value, large};
use crate::context::runtime_device;
use crate::driver_memory::{
    AccessDesc, PoolProps, alloc_from_current, alloc_from_pool, alloc_rows, pool_create,
    pool_destroy, pool_get_attribute, pool_set_access, pool_set_attribute,
};
use crate::entry::runtime;
use crate::gpu::{failed, gpu, own};
use gruyere_phantom::error;

by_value! { Extent }
large! { PitchedPtr }

/// `cudaPitchedPtr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PitchedPtr {
    address: u64,
    pitch: usize,
    width: usize,
    height: usize,
}

/// `cudaExtent`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extent {
    width: usize,
    height: usize,
    depth: usize,
}

fn malloc_async(out: Out<u64>, bytes: usize, stream: usize) -> Answer {
    alloc_from_current(runtime_device(), out, bytes, stream)
}

runtime! {
    /// 0 bytes: NULL.
    fn cudaMalloc(out: Out<u64>, bytes: usize) {
        let device = runtime_device();
        out.put(if bytes == 0 { 0 } else { gpu().sim.alloc(device, bytes as u64).map_err(failed)? })
    }

    fn cudaFree(address: u64) {
        runtime_device();
        gpu().free(address)
    }

    fn cudaMemGetInfo(free: Out<usize>, total: Out<usize>) {
        let (f, t) = gpu().memory_info(runtime_device())?;
        free.put_if_wanted(f as usize);
        total.put_if_wanted(t as usize);
        Ok(())
    }

    fn cudaMallocPitch(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize) {
        alloc_rows(runtime_device(), out, pitch, width, height)
    }

    /// Allocates height times depth rows.
    fn cudaMalloc3D(out: Out<PitchedPtr>, extent: Extent) {
        let Extent { width, height, depth } = extent;
        let (mut address, mut pitch) = (0, 0);
        let rows = height.checked_mul(depth).ok_or(error::code::OUT_OF_MEMORY)?;
        alloc_rows(runtime_device(), Out::to(&mut address), Out::to(&mut pitch), width, rows)?;
        out.put(PitchedPtr { address, pitch, width, height })
    }

    fn cudaMallocAsync(out: Out<u64>, bytes: usize, stream: usize) {
        malloc_async(out, bytes, stream)
    }
    fn cudaMallocAsync_ptsz(out: Out<u64>, bytes: usize, stream: usize) {
        malloc_async(out, bytes, own(stream))
    }
    fn cudaMallocFromPoolAsync(out: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        alloc_from_pool(runtime_device(), out, bytes, pool, stream)
    }
    fn cudaMallocFromPoolAsync_ptsz(out: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        alloc_from_pool(runtime_device(), out, bytes, pool, own(stream))
    }
    fn cudaFreeAsync(address: u64, stream: usize) {
        gpu().free_async(runtime_device(), address, stream)
    }
    fn cudaFreeAsync_ptsz(address: u64, stream: usize) {
        gpu().free_async(runtime_device(), address, own(stream))
    }

    fn cudaDeviceGetDefaultMemPool(out: Out<usize>, device: i32) {
        out.put(gpu().default_pool(gpu().device(device)?)?)
    }
    fn cudaDeviceGetMemPool(out: Out<usize>, device: i32) {
        out.put(gpu().current_pool(gpu().device(device)?)?)
    }
    fn cudaDeviceSetMemPool(device: i32, pool: usize) {
        gpu().set_current_pool(gpu().device(device)?, pool)
    }

    fn cudaMemPoolCreate(out: Out<usize>, props: In<PoolProps>) { pool_create(out, props) }
    fn cudaMemPoolDestroy(pool: usize) { pool_destroy(pool) }
    fn cudaMemPoolTrimTo(pool: usize, keep: usize) {
        gpu().sim.pool_trim(0, pool, keep as u64).map_err(failed)
    }
    fn cudaMemPoolGetAttribute(pool: usize, number: i32, out: Out<SomeResult>) {
        pool_get_attribute(pool, number, out)
    }
    fn cudaMemPoolSetAttribute(pool: usize, number: i32, value: In<u64>) {
        pool_set_attribute(pool, number, value)
    }
    fn cudaMemPoolSetAccess(pool: usize, descs: In<AccessDesc>, n: usize) {
        pool_set_access(pool, descs, n)
    }

    fn cudaMemcpy(to: u64, from: u64, bytes: usize, _kind: u32) {
        gpu().copy_and_wait(to, from, bytes, 0)
    }
    fn cudaMemcpy_ptds(to: u64, from: u64, bytes: usize, _kind: u32) {
        gpu().copy_and_wait(to, from, bytes, own(0))
    }
    fn cudaMemcpyAsync(to: u64, from: u64, bytes: usize, _kind: u32, stream: usize) {
        gpu().copy(to, from, bytes, stream)
    }
    fn cudaMemcpyAsync_ptsz(to: u64, from: u64, bytes: usize, _kind: u32, stream: usize) {
        gpu().copy(to, from, bytes, own(stream))
    }
    fn cudaMemcpyPeer(to: u64, _to_device: i32, from: u64, _from_device: i32, bytes: usize) {
        gpu().copy_and_wait(to, from, bytes, 0)
    }
    fn cudaMemcpyPeerAsync(
        to: u64, _to_device: i32, from: u64, _from_device: i32, bytes: usize, stream: usize
    ) {
        gpu().copy(to, from, bytes, stream)
    }
    fn cudaMemcpy2DAsync(
        to: u64, to_pitch: usize, from: u64, from_pitch: usize, width: usize, height: usize,
        _kind: u32, stream: usize,
    ) {
        copy_rows(to, to_pitch, from, from_pitch, width, height, stream)
    }
    fn cudaMemcpy2DAsync_ptsz(
        to: u64, to_pitch: usize, from: u64, from_pitch: usize, width: usize, height: usize,
        _kind: u32, stream: usize,
    ) {
        copy_rows(to, to_pitch, from, from_pitch, width, height, own(stream))
    }
    fn cudaMemcpy2D(
        to: u64, to_pitch: usize, from: u64, from_pitch: usize, width: usize, height: usize,
        _kind: u32,
    ) {
        copy_rows(to, to_pitch, from, from_pitch, width, height, 0)?;
        gpu().wait_for_stream(0)
    }
    fn cudaMemset(address: u64, value: i32, n: usize) { gpu().fill(address, &[value as u8], n, 0) }
    fn cudaMemset_ptds(address: u64, value: i32, n: usize) {
        gpu().fill(address, &[value as u8], n, own(0))
    }
    fn cudaMemsetAsync(address: u64, value: i32, n: usize, stream: usize) {
        gpu().fill(address, &[value as u8], n, stream)
    }
    fn cudaMemsetAsync_ptsz(address: u64, value: i32, n: usize, stream: usize) {
        gpu().fill(address, &[value as u8], n, own(stream))
    }
    fn cudaMemset2D(address: u64, pitch: usize, value: i32, width: usize, height: usize) {
        fill_rows(address, pitch, value, width, height, 0)
    }
    fn cudaMemset2DAsync(
        address: u64, pitch: usize, value: i32, width: usize, height: usize, stream: usize
    ) {
        fill_rows(address, pitch, value, width, height, stream)
    }
}

fn copy_rows(
    to: u64,
    to_pitch: usize,
    from: u64,
    from_pitch: usize,
    width: usize,
    height: usize,
    stream: usize,
) -> Answer {
    gpu().copy_rows((to, to_pitch), (from, from_pitch), width, height, stream)
}

fn fill_rows(
    address: u64,
    pitch: usize,
    value: i32,
    width: usize,
    height: usize,
    stream: usize,
) -> Answer {
    for row in 0..height {
        gpu().fill(address + (row * pitch) as u64, &[value as u8], width, stream)?;
    }
    Ok(())
}
