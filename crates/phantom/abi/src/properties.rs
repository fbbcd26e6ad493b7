//! The reported properties of a simulated device.

use crate::abi::{Answer, In, Out, code};
use crate::call_log::large;
use crate::entry::runtime;
use crate::fatbin;
use crate::gpu::gpu;
use crate::numbers::*;
use crate::sharing::Rdma;

large! { DeviceProp FuncAttributes }

const WARP: i32 = 32;
const SHARED_PER_BLOCK: i32 = 48 << 10;
const SHARED_RESERVED: i32 = 1 << 10;
const REGISTERS: i32 = 1 << 16;
const CLOCK_KHZ: i32 = 1_980_000;
const MEMORY_CLOCK_KHZ: i32 = 2_619_000;

/// The UUID of `device`: recognisable, and different for each.
pub fn uuid(device: u32) -> [u8; 16] {
    let mut uuid = *b"phantom-device-\0";
    uuid[15] = device as u8;
    uuid
}

/// The PCI bus number of `device`.
pub fn pci_bus(device: u32) -> i32 {
    0x10 + device as i32
}

/// `CUdevice_attribute` and `cudaDeviceAttr` (with the same numbers). Attributes that such a GPU
/// lacks are 0.
pub fn attribute(device: u32, attribute: i32) -> i32 {
    let looks = &gpu().looks;
    match attribute {
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => i32::MAX,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65535,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => SHARED_PER_BLOCK,
        CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 1 << 16, // bytes
        CU_DEVICE_ATTRIBUTE_WARP_SIZE => WARP,
        CU_DEVICE_ATTRIBUTE_MAX_PITCH => i32::MAX,
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK => REGISTERS,
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE => CLOCK_KHZ,
        CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT => 512,
        CU_DEVICE_ATTRIBUTE_GPU_OVERLAP | CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY => 1,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => looks.multiprocessors,
        CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT => 512,
        CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS | CU_DEVICE_ATTRIBUTE_ECC_ENABLED => 1,
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => pci_bus(device),
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => MEMORY_CLOCK_KHZ,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => 5120, // bits
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => looks.generation.l2_bytes(),
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => looks.generation.threads,
        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
        CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING => 1,
        CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT => 32,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => looks.generation.capability.0,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => looks.generation.capability.1,
        CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED => 1,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => looks.generation.shared_bytes(),
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR => REGISTERS,
        CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
        | CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM => 1,
        CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1
        | CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1
        | CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        | CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH => 1,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => {
            looks.generation.shared_bytes_of_block()
        }
        CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED => 1,
        CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED => {
            i32::from(gpu().has_vmm(device))
        }
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED => {
            offered(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        }
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED => offered(CU_MEM_HANDLE_TYPE_FABRIC),
        CU_DEVICE_ATTRIBUTE_INTEGRATED => i32::from(gpu().integrated),
        CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => looks.generation.blocks,
        // Since Ampere part of the cache may be set aside.
        CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE
        | CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE
            if looks.generation.capability.0 >= 8 =>
        {
            looks.generation.l2_bytes() / 2
        }
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED => i32::from(gpu().rdma != Rdma::Missing),
        CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => SHARED_RESERVED,
        CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED => 1,
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => i32::from(gpu().has_pools(device)),
        CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES => {
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        }
        CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH => i32::from(looks.generation.capability.0 >= 9),
        CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR => 1,
        CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS => 1,
        _ => 0,
    }
}

/// Whether the devices offer physical memory with that handle type.
fn offered(handle_type: i32) -> i32 {
    i32::from(gpu().handle_types.offered & handle_type as u32 != 0)
}

/// `cudaDeviceProp` in CUDA 13's layout.
#[repr(C)]
pub struct DeviceProp {
    name: [u8; 256],
    uuid: [u8; 16],
    luid: [u8; 8],
    luid_device_node_mask: u32,
    total_global_mem: usize,
    shared_mem_per_block: usize,
    regs_per_block: i32,
    warp_size: i32,
    mem_pitch: usize,
    max_threads_per_block: i32,
    max_threads_dim: [i32; 3],
    max_grid_size: [i32; 3],
    total_const_mem: usize,
    major: i32,
    minor: i32,
    texture_alignment: usize,
    texture_pitch_alignment: usize,
    multi_processor_count: i32,
    integrated: i32,
    can_map_host_memory: i32,
    texture_and_surface_limits: [i32; 39],
    surface_alignment: usize,
    concurrent_kernels: i32,
    ecc_enabled: i32,
    pci_bus_id: i32,
    pci_device_id: i32,
    pci_domain_id: i32,
    tcc_driver: i32,
    async_engine_count: i32,
    unified_addressing: i32,
    memory_bus_width: i32,
    l2_cache_size: i32,
    persisting_l2_cache_max_size: i32,
    max_threads_per_multi_processor: i32,
    stream_priorities_supported: i32,
    global_l1_cache_supported: i32,
    local_l1_cache_supported: i32,
    shared_mem_per_multiprocessor: usize,
    regs_per_multiprocessor: i32,
    managed_memory: i32,
    is_multi_gpu_board: i32,
    multi_gpu_board_group_id: i32,
    host_native_atomic_supported: i32,
    pageable_memory_access: i32,
    concurrent_managed_access: i32,
    compute_preemption_supported: i32,
    can_use_host_pointer_for_registered_mem: i32,
    cooperative_launch: i32,
    shared_mem_per_block_optin: usize,
    pageable_memory_access_uses_host_page_tables: i32,
    direct_managed_mem_access_from_host: i32,
    max_blocks_per_multi_processor: i32,
    access_policy_max_window_size: i32,
    reserved_shared_mem_per_block: usize,
    host_register_supported: i32,
    sparse_cuda_array_supported: i32,
    host_register_read_only_supported: i32,
    timeline_semaphore_interop_supported: i32,
    memory_pools_supported: i32,
    gpu_direct_rdma_supported: i32,
    gpu_direct_rdma_flush_writes_options: u32,
    gpu_direct_rdma_writes_ordering: i32,
    memory_pool_supported_handle_types: u32,
    deferred_mapping_cuda_array_supported: i32,
    ipc_event_supported: i32,
    cluster_launch: i32,
    unified_function_pointers: i32,
    device_numa_config: i32,
    device_numa_id: i32,
    mps_enabled: i32,
    host_numa_id: i32,
    gpu_pci_device_id: u32,
    gpu_pci_subsystem_id: u32,
    host_numa_multinode_ipc_supported: i32,
    reserved: [i32; 56],
}

// The size of the C struct in CUDA 13, on 64-bit Linux.
const _: () = assert!(size_of::<DeviceProp>() == 1008);

fn properties(device: u32) -> Result<DeviceProp, u32> {
    let mut name = [0; 256];
    let said = gpu().looks.name.as_bytes();
    name[..said.len()].copy_from_slice(said);
    let total_global_mem = gpu().total_memory(device)? as usize;
    let int = |number| attribute(device, number);
    let bytes = |number| attribute(device, number) as usize;
    Ok(DeviceProp {
        name,
        uuid: uuid(device),
        luid: [0; 8],
        luid_device_node_mask: 0,
        total_global_mem,
        shared_mem_per_block: bytes(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
        regs_per_block: int(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
        warp_size: int(CU_DEVICE_ATTRIBUTE_WARP_SIZE),
        mem_pitch: bytes(CU_DEVICE_ATTRIBUTE_MAX_PITCH),
        max_threads_per_block: int(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        max_threads_dim: [
            int(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
            int(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
            int(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z),
        ],
        max_grid_size: [
            int(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
            int(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
            int(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z),
        ],
        total_const_mem: bytes(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY),
        major: int(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        minor: int(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        texture_alignment: bytes(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT),
        texture_pitch_alignment: bytes(CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT),
        multi_processor_count: int(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        integrated: int(CU_DEVICE_ATTRIBUTE_INTEGRATED),
        can_map_host_memory: int(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
        texture_and_surface_limits: [16384; 39],
        surface_alignment: bytes(CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT),
        concurrent_kernels: int(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS),
        ecc_enabled: int(CU_DEVICE_ATTRIBUTE_ECC_ENABLED),
        pci_bus_id: int(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
        pci_device_id: int(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),
        pci_domain_id: int(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
        tcc_driver: int(CU_DEVICE_ATTRIBUTE_TCC_DRIVER),
        async_engine_count: int(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
        unified_addressing: int(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
        memory_bus_width: int(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
        l2_cache_size: int(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        persisting_l2_cache_max_size: int(CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE),
        max_threads_per_multi_processor: int(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
        stream_priorities_supported: int(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED),
        global_l1_cache_supported: int(CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED),
        local_l1_cache_supported: int(CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED),
        shared_mem_per_multiprocessor: bytes(
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        ),
        regs_per_multiprocessor: int(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR),
        managed_memory: int(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
        is_multi_gpu_board: int(CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD),
        multi_gpu_board_group_id: int(CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID),
        host_native_atomic_supported: int(CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED),
        pageable_memory_access: int(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS),
        concurrent_managed_access: int(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS),
        compute_preemption_supported: int(CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED),
        can_use_host_pointer_for_registered_mem: int(
            CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
        ),
        cooperative_launch: int(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH),
        shared_mem_per_block_optin: bytes(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        pageable_memory_access_uses_host_page_tables: int(
            CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
        ),
        direct_managed_mem_access_from_host: int(
            CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
        ),
        max_blocks_per_multi_processor: int(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR),
        access_policy_max_window_size: int(CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE),
        reserved_shared_mem_per_block: bytes(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK),
        host_register_supported: int(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
        sparse_cuda_array_supported: int(CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED),
        host_register_read_only_supported: int(
            CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
        ),
        timeline_semaphore_interop_supported: int(
            CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED,
        ),
        memory_pools_supported: int(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
        gpu_direct_rdma_supported: int(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
        gpu_direct_rdma_flush_writes_options: int(
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
        ) as u32,
        gpu_direct_rdma_writes_ordering: int(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
        memory_pool_supported_handle_types: int(CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)
            as u32,
        deferred_mapping_cuda_array_supported: int(
            CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED,
        ),
        ipc_event_supported: int(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED),
        cluster_launch: int(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH),
        unified_function_pointers: int(CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS),
        device_numa_config: 0,
        device_numa_id: -1,
        mps_enabled: 0,
        host_numa_id: -1,
        gpu_pci_device_id: 0,
        gpu_pci_subsystem_id: 0,
        host_numa_multinode_ipc_supported: 0,
        reserved: [0; 56],
    })
}

/// `cudaFuncAttributes`.
#[repr(C)]
#[derive(Default)]
pub struct FuncAttributes {
    shared_bytes: usize,
    const_bytes: usize,
    local_bytes: usize,
    max_threads_per_block: i32,
    registers: i32,
    ptx_version: i32,
    binary_version: i32,
    cache_mode: i32,
    max_dynamic_shared_bytes: i32,
    preferred_carveout: i32,
    cluster: [i32; 6],
    reserved: [i32; 16],
}

runtime! {
    fn cudaGetDeviceProperties(out: Out<DeviceProp>, device: i32) {
        let device = gpu().device(device)?;
        out.put(properties(device)?)
    }

    fn cudaDeviceGetAttribute(out: Out<i32>, number: i32, device: i32) {
        let device = gpu().device(device)?;
        out.put(attribute(device, number))
    }

    fn cudaFuncGetAttributes(out: Out<FuncAttributes>, function: usize) {
        let version = fatbin::serving(function, gpu().looks.generation.number());
        out.put(FuncAttributes {
            max_threads_per_block: 1024,
            registers: 32,
            ptx_version: version,
            binary_version: version,
            max_dynamic_shared_bytes: gpu().looks.generation.shared_bytes_of_block(),
            ..FuncAttributes::default()
        })
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        out: Out<i32>, _function: In<u8>, _block: i32, _shared: usize
    ) {
        out.put(2)
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        out: Out<i32>, _function: In<u8>, _block: i32, _shared: usize, _flags: u32,
    ) {
        out.put(2)
    }

    fn cudaDeviceGetPCIBusId(text: Out<u8>, length: i32, device: i32) {
        let device = gpu().device(device)?;
        pci_bus_id(text, length, device)
    }
}

/// Writes the PCI address of `device`, as `cuDeviceGetPCIBusId` does.
pub fn pci_bus_id(text: Out<u8>, length: i32, device: u32) -> Answer {
    put_text(text, length, &format!("0000:{:02x}:00.0", pci_bus(device)))
}

/// Writes `value` with its NUL into a buffer of `length` bytes, truncated if needed.
pub fn put_text(text: Out<u8>, length: i32, value: &str) -> Answer {
    let length = usize::try_from(length).ok().filter(|&n| n > 0).ok_or(code::INVALID_VALUE)?;
    if text.raw().is_null() {
        return Err(code::INVALID_VALUE);
    }
    let n = value.len().min(length - 1);
    // SAFETY: the C caller's buffer holds `length` bytes, and n < length.
    unsafe {
        text.raw().copy_from_nonoverlapping(value.as_ptr(), n);
        text.raw().add(n).write(0);
    }
    Ok(())
}
