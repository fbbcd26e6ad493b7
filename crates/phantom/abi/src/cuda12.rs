//! Functions of torch for CUDA 12 that CUDA 13's libraries lack or define differently.

use crate::abi::Out;
use crate::call_log::large;
use crate::context::runtime_device;
use crate::driver_order::capture_info;
use crate::entry::runtime;
use crate::gpu::gpu;
use crate::numbers::*;
use crate::properties::{attribute, uuid};
use std::ffi::c_char;

large! { Properties }

/// Size of a device's properties in CUDA 12. CUDA 13 removed clock rates and modes.
const PROPERTIES_BYTES: usize = 1032;

#[repr(C, align(8))]
pub struct Properties([u8; PROPERTIES_BYTES]);

/// A struct written member by member, each at its C offset.
struct Members {
    bytes: [u8; PROPERTIES_BYTES],
    at: usize,
}

impl Members {
    fn put(&mut self, value: &[u8], align: usize) {
        self.at = self.at.next_multiple_of(align);
        self.bytes[self.at..][..value.len()].copy_from_slice(value);
        self.at += value.len();
    }

    fn int(&mut self, value: i32) {
        self.put(&value.to_ne_bytes(), 4);
    }

    fn size(&mut self, value: usize) {
        self.put(&value.to_ne_bytes(), 8);
    }
}

/// A member after the memory's size.
enum Member {
    /// An attribute, as an `int`.
    Int(i32),
    /// An attribute, as a `size_t`.
    Size(i32),
    /// This many limits of textures and surfaces.
    Limits(usize),
    /// This many `int`s that are 0 here, or reserved.
    Nothing(usize),
}

use Member::{Int, Limits, Nothing, Size};

const MEMBERS: &[Member] = &[
    Size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
    Int(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
    Int(CU_DEVICE_ATTRIBUTE_WARP_SIZE),
    Size(CU_DEVICE_ATTRIBUTE_MAX_PITCH),
    Int(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
    Int(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
    Int(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
    Int(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z),
    Int(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
    Int(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
    Int(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z),
    Int(CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
    Size(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY),
    Int(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
    Int(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    Size(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT),
    Size(CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT),
    Int(CU_DEVICE_ATTRIBUTE_GPU_OVERLAP),
    Int(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
    Nothing(1), // kernelExecTimeoutEnabled
    Int(CU_DEVICE_ATTRIBUTE_INTEGRATED),
    Int(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
    Nothing(1), // computeMode
    Limits(40),
    Size(CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT),
    Int(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS),
    Int(CU_DEVICE_ATTRIBUTE_ECC_ENABLED),
    Int(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
    Int(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),
    Int(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
    Int(CU_DEVICE_ATTRIBUTE_TCC_DRIVER),
    Int(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
    Int(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
    Int(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
    Int(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
    Int(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
    Int(CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE),
    Int(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
    Int(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED),
    Size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
    Int(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR),
    Int(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
    Int(CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD),
    Int(CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID),
    Int(CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED),
    Nothing(1), // singleToDoublePrecisionPerfRatio
    Int(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS),
    Int(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS),
    Int(CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
    Int(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH),
    Int(CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH),
    Size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
    Int(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES),
    Int(CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST),
    Int(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR),
    Int(CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE),
    Size(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK),
    Int(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS),
    Int(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
    Int(CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES),
    Int(CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED),
    Int(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH),
    Int(CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS),
    Nothing(63), // reserved
];

/// Writes all members, with `value` for the attributes.
fn write(members: &mut Members, value: impl Fn(i32) -> i32) {
    for member in MEMBERS {
        match *member {
            Int(number) => members.int(value(number)),
            Size(number) => members.size(value(number) as usize),
            Limits(count) => (0..count).for_each(|_| members.int(16384)),
            Nothing(count) => (0..count).for_each(|_| members.int(0)),
        }
    }
}

fn properties(device: u32) -> Result<Properties, u32> {
    let mut members = Members { bytes: [0; PROPERTIES_BYTES], at: 0 };
    let name = gpu().looks.name.as_bytes();
    members.bytes[..name.len()].copy_from_slice(name);
    members.at = 256;
    members.put(&uuid(device), 1);
    members.at += 12; // luid, luidDeviceNodeMask
    members.size(gpu().total_memory(device)? as usize);
    write(&mut members, |number| attribute(device, number));
    Ok(Properties(members.bytes))
}

runtime! {
    fn cudaGetDeviceProperties_v2(out: Out<Properties>, device: i32) {
        out.put(properties(gpu().device(device)?)?)
    }

    /// Without the edges' data.
    fn cudaStreamGetCaptureInfo_v2(
        stream: usize, status: Out<u32>, id: Out<u64>, graph: Out<usize>, dependencies: Out<usize>,
        count: Out<usize>,
    ) {
        let (found, number) = capture_info(runtime_device(), stream)?;
        status.put(found)?;
        id.put_if_wanted(number);
        graph.put_if_wanted(0);
        dependencies.put_if_wanted(0);
        count.put_if_wanted(0);
        Ok(())
    }
}

// libnvToolsExt, linked by torch up to 2.7: marks for profilers, which do not exist here.

#[unsafe(no_mangle)]
pub extern "C" fn nvtxMarkA(_message: *const c_char) {}

#[unsafe(no_mangle)]
pub extern "C" fn nvtxRangePushA(_message: *const c_char) -> i32 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvtxRangePop() -> i32 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvtxRangeStartA(_message: *const c_char) -> u64 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvtxRangeEnd(_range: u64) {}

#[cfg(test)]
mod tests {
    use super::*;

    /// The offsets of `driver_types.h` of CUDA 12.8.
    #[test]
    fn members_lie_where_c_puts_them() {
        let mut members = Members { bytes: [0; PROPERTIES_BYTES], at: 256 + 16 + 12 };
        members.size(0);
        assert_eq!(members.at, 296, "sharedMemPerBlock");
        write(&mut members, |number| number);
        assert_eq!(members.at, PROPERTIES_BYTES);
        let at = |offset: usize| {
            i32::from_ne_bytes(members.bytes[offset..offset + 4].try_into().unwrap())
        };
        assert_eq!(at(360), CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        assert_eq!(at(388), CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        assert_eq!(at(616), CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
        assert_eq!(at(624), CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    }
}
