//! What the stand-in device says it is: a Hopper GPU, since torch's kernels are compiled for it.

use crate::abi::{Answer, In, Out, code, runtime};
use crate::gpu::gpu;

/// The device's name, as both the driver and the runtime tell it.
pub const NAME: &str = "Phantom H100";
const MULTIPROCESSORS: i32 = 132;
const CAPABILITY: (i32, i32) = (9, 0);
const WARP: i32 = 32;
const SHARED_PER_BLOCK: i32 = 48 << 10;
const SHARED_PER_BLOCK_OPTIN: i32 = 227 << 10;
const SHARED_PER_MULTIPROCESSOR: i32 = 228 << 10;
const SHARED_RESERVED: i32 = 1 << 10;
const REGISTERS: i32 = 1 << 16;
const L2_BYTES: i32 = 50 << 20;
const CLOCK_KHZ: i32 = 1_980_000;
const MEMORY_CLOCK_KHZ: i32 = 2_619_000;
/// Handle types a pool can export: a POSIX file descriptor.
const POOL_HANDLE_TYPES: i32 = 1;

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

/// `CUdevice_attribute` and `cudaDeviceAttr` (numbered alike). What a GPU of this kind does not have is 0.
pub fn attribute(device: u32, attribute: i32) -> i32 {
    match attribute {
        1..=3 => 1024,  // threads a block; block x, y
        4 => 64,        // block z
        5 => i32::MAX,  // grid x
        6 | 7 => 65535, // grid y, z
        8 => SHARED_PER_BLOCK,
        9 => 1 << 16, // constant memory
        10 => WARP,
        11 => i32::MAX, // pitch
        12 => REGISTERS,
        13 => CLOCK_KHZ,
        14 => 512,    // texture alignment
        15 | 19 => 1, // copies overlap kernels; host memory can be mapped
        16 => MULTIPROCESSORS,
        30 => 512,    // surface alignment
        31 | 32 => 1, // concurrent kernels; ECC
        33 => pci_bus(device),
        36 => MEMORY_CLOCK_KHZ,
        37 => 5120, // memory bus, bits
        38 => L2_BYTES,
        39 => 2048, // threads a multiprocessor
        40 => 3,    // copy engines
        41 => 1,    // unified addressing
        51 => 32,   // texture pitch alignment
        75 => CAPABILITY.0,
        76 => CAPABILITY.1,
        78..=80 => 1, // stream priorities; L1 caches
        81 => SHARED_PER_MULTIPROCESSOR,
        82 => REGISTERS,   // a multiprocessor
        83 | 90 | 91 => 1, // managed memory; preemption; host pointers of registered memory
        92..=96 => 1,      // stream memory operations; cooperative launch
        97 => SHARED_PER_BLOCK_OPTIN,
        98 | 99 => 1, // remote flushes; host registration
        102 => i32::from(gpu().has_vmm(device)),
        103 => 1,                  // memory as a file descriptor
        106 => 32,                 // blocks a multiprocessor
        108 | 109 => L2_BYTES / 2, // persisting L2
        110 | 116 => 1,            // GPUDirect RDMA, with VMM too
        111 => SHARED_RESERVED,
        114 => 1, // timeline semaphores
        115 => i32::from(gpu().has_pools(device)),
        119 => POOL_HANDLE_TYPES,
        120 => 1,       // cluster launch
        121..=123 => 1, // deferred arrays; stream memory operations; NOR
        129 => 1,       // unified function pointers
        _ => 0,
    }
}

/// `cudaDeviceProp` as CUDA 13 lays it out.
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
    name[..NAME.len()].copy_from_slice(NAME.as_bytes());
    let total_global_mem = gpu().total_memory(device)? as usize;
    let int = |number| attribute(device, number);
    let bytes = |number| attribute(device, number) as usize;
    Ok(DeviceProp {
        name,
        uuid: uuid(device),
        luid: [0; 8],
        luid_device_node_mask: 0,
        total_global_mem,
        shared_mem_per_block: bytes(8),
        regs_per_block: int(12),
        warp_size: int(10),
        mem_pitch: bytes(11),
        max_threads_per_block: int(1),
        max_threads_dim: [int(2), int(3), int(4)],
        max_grid_size: [int(5), int(6), int(7)],
        total_const_mem: bytes(9),
        major: int(75),
        minor: int(76),
        texture_alignment: bytes(14),
        texture_pitch_alignment: bytes(51),
        multi_processor_count: int(16),
        integrated: int(18),
        can_map_host_memory: int(19),
        texture_and_surface_limits: [16384; 39],
        surface_alignment: bytes(30),
        concurrent_kernels: int(31),
        ecc_enabled: int(32),
        pci_bus_id: int(33),
        pci_device_id: int(34),
        pci_domain_id: int(50),
        tcc_driver: int(35),
        async_engine_count: int(40),
        unified_addressing: int(41),
        memory_bus_width: int(37),
        l2_cache_size: int(38),
        persisting_l2_cache_max_size: int(108),
        max_threads_per_multi_processor: int(39),
        stream_priorities_supported: int(78),
        global_l1_cache_supported: int(79),
        local_l1_cache_supported: int(80),
        shared_mem_per_multiprocessor: bytes(81),
        regs_per_multiprocessor: int(82),
        managed_memory: int(83),
        is_multi_gpu_board: int(84),
        multi_gpu_board_group_id: int(85),
        host_native_atomic_supported: int(86),
        pageable_memory_access: int(88),
        concurrent_managed_access: int(89),
        compute_preemption_supported: int(90),
        can_use_host_pointer_for_registered_mem: int(91),
        cooperative_launch: int(95),
        shared_mem_per_block_optin: bytes(97),
        pageable_memory_access_uses_host_page_tables: int(100),
        direct_managed_mem_access_from_host: int(101),
        max_blocks_per_multi_processor: int(106),
        access_policy_max_window_size: int(109),
        reserved_shared_mem_per_block: bytes(111),
        host_register_supported: int(99),
        sparse_cuda_array_supported: int(112),
        host_register_read_only_supported: int(113),
        timeline_semaphore_interop_supported: int(114),
        memory_pools_supported: int(115),
        gpu_direct_rdma_supported: int(116),
        gpu_direct_rdma_flush_writes_options: int(117) as u32,
        gpu_direct_rdma_writes_ordering: int(118),
        memory_pool_supported_handle_types: int(119) as u32,
        deferred_mapping_cuda_array_supported: int(121),
        ipc_event_supported: int(125),
        cluster_launch: int(120),
        unified_function_pointers: int(129),
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

    fn cudaFuncGetAttributes(out: Out<FuncAttributes>, _function: In<u8>) {
        out.put(FuncAttributes {
            max_threads_per_block: 1024,
            registers: 32,
            ptx_version: 90,
            binary_version: 90,
            max_dynamic_shared_bytes: SHARED_PER_BLOCK_OPTIN,
            ..FuncAttributes::default()
        })
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(out: Out<i32>, _function: In<u8>, _block: i32, _shared: usize) {
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

/// Writes `value` with its NUL into a buffer of `length` bytes, cut where it must be.
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
