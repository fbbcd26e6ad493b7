//! libcudart: memory, pools, copies and fills.

use crate::abi::{In, Out, runtime};
use crate::context::runtime_device;
use crate::driver_memory::{
    AccessDesc, PoolProps, pool_create, pool_get_attribute, pool_set_access, pool_set_attribute,
};
use crate::gpu::{failed, gpu};

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

    fn cudaMallocAsync(out: Out<u64>, bytes: usize, stream: usize) {
        let device = runtime_device();
        let owner = gpu().sim.stream_device(device, stream).map_err(failed)?;
        out.put(gpu().sim.pool_alloc(device, gpu().default_pool(owner)?, bytes as u64, stream).map_err(failed)?)
    }

    fn cudaMallocFromPoolAsync(out: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        out.put(gpu().sim.pool_alloc(runtime_device(), pool, bytes as u64, stream).map_err(failed)?)
    }

    fn cudaFreeAsync(address: u64, stream: usize) {
        gpu().sim.pool_free(runtime_device(), address, stream).map_err(failed)
    }

    fn cudaDeviceGetDefaultMemPool(out: Out<usize>, device: i32) {
        out.put(gpu().default_pool(gpu().device(device)?)?)
    }

    fn cudaMemPoolCreate(out: Out<usize>, props: In<PoolProps>) { pool_create(out, props) }
    fn cudaMemPoolDestroy(pool: usize) { gpu().sim.pool_destroy(0, pool).map_err(failed) }
    fn cudaMemPoolTrimTo(pool: usize, keep: usize) { gpu().sim.pool_trim(0, pool, keep as u64).map_err(failed) }
    fn cudaMemPoolGetAttribute(pool: usize, number: i32, out: Out<u64>) { pool_get_attribute(pool, number, out) }
    fn cudaMemPoolSetAttribute(pool: usize, number: i32, value: In<u64>) { pool_set_attribute(pool, number, value) }
    fn cudaMemPoolSetAccess(pool: usize, descs: In<AccessDesc>, n: usize) { pool_set_access(pool, descs, n) }

    fn cudaMemcpy(to: u64, from: u64, bytes: usize, _kind: u32) { gpu().copy(to, from, bytes, 0) }
    fn cudaMemcpyAsync(to: u64, from: u64, bytes: usize, _kind: u32, stream: usize) {
        gpu().copy(to, from, bytes, stream)
    }
    fn cudaMemcpyPeerAsync(to: u64, _to_device: i32, from: u64, _from_device: i32, bytes: usize, stream: usize) {
        gpu().copy(to, from, bytes, stream)
    }
    fn cudaMemcpy2DAsync(
        to: u64, to_pitch: usize, from: u64, from_pitch: usize, width: usize, height: usize, _kind: u32, stream: usize,
    ) {
        for row in 0..height {
            gpu().copy(to + (row * to_pitch) as u64, from + (row * from_pitch) as u64, width, stream)?;
        }
        Ok(())
    }
    fn cudaMemset(address: u64, value: i32, n: usize) { gpu().fill(address, &[value as u8], n, 0) }
    fn cudaMemsetAsync(address: u64, value: i32, n: usize, stream: usize) {
        gpu().fill(address, &[value as u8], n, stream)
    }
}
