//! One device: its capabilities and its primary context, each found when first needed.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use once_cell::sync::OnceCell;

use super::super::Capabilities;
use super::super::Result;
use super::HandleTypes;
use super::creation::{Creation, HandleType, Offer};
use super::symbols::{POOLS, Symbols, VMM};

/// A device of the driver.
pub(super) struct Device {
    pub(super) handle: sys::CUdevice,
    /// A `CUcontext`, kept as a number because threads share it.
    context: OnceCell<usize>,
    capabilities: OnceCell<Capabilities>,
    creation: OnceCell<Creation>,
}

impl Device {
    pub(super) fn new(symbols: &Symbols, ordinal: c_int) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: writes one CUdevice.
        unsafe { symbols.cuDeviceGet(&mut handle, ordinal) }?;
        Ok(Self {
            handle,
            context: OnceCell::new(),
            capabilities: OnceCell::new(),
            creation: OnceCell::new(),
        })
    }

    /// The primary context, retained at the first call and never released: frees go on until the
    /// process ends.
    pub(super) fn context(&self, symbols: &Symbols) -> Result<sys::CUcontext> {
        let retain = || -> Result<usize> {
            let mut context = std::ptr::null_mut();
            // SAFETY: writes one CUcontext.
            unsafe { symbols.cuDevicePrimaryCtxRetain(&mut context, self.handle) }?;
            Ok(context as usize)
        };
        Ok(*self.context.get_or_try_init(retain)? as sys::CUcontext)
    }

    /// The device's capabilities. Needs no context.
    pub(super) fn capabilities(&self, symbols: &Symbols) -> Result<&Capabilities> {
        self.capabilities.get_or_try_init(|| self.probe(symbols))
    }

    /// The properties of physical memory created here, tried out at the first call, with the
    /// device's context current.
    pub(super) fn creation(&self, symbols: &Symbols, wish: HandleType) -> Result<Creation> {
        let choose = || {
            let can = self.capabilities(symbols)?;
            let offer = Offer {
                device: self.handle,
                granularity: can.granularity,
                posix: self.handle_types(symbols).pages_as_files,
                rdma: can.gpu_direct_rdma,
            };
            offer.choose(symbols, wish)
        };
        self.creation.get_or_try_init(choose).copied()
    }

    fn probe(&self, symbols: &Symbols) -> Result<Capabilities> {
        let mut total_memory = 0;
        // SAFETY: writes one usize.
        unsafe { symbols.cuDeviceTotalMem_v2(&mut total_memory, self.handle) }?;
        let gpu_direct_rdma = self
            .flag(symbols, Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        // A device that claims VMM without a granularity has none that we could use.
        let granularity = if symbols.missing(VMM).is_empty()
            && self
                .flag(symbols, Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        {
            self.granularity(symbols, gpu_direct_rdma)
                .or_else(|_| self.granularity(symbols, false))
                .unwrap_or(0)
        } else {
            0
        };
        Ok(Capabilities {
            vmm: granularity != 0,
            pools: symbols.missing(POOLS).is_empty()
                && self.flag(symbols, Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
            stream_ids: symbols.missing(&["cuStreamGetId"]).is_empty(),
            context_events: symbols.missing(&["cuCtxRecordEvent"]).is_empty(),
            gpu_direct_rdma,
            granularity,
            total_memory: total_memory as u64,
            host_memory: self
                .flag(symbols, Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)
                .then(available_host_memory)
                .flatten(),
            name: self.name(symbols)?,
            uuid: self.uuid(symbols),
            compute_capability: (
                self.number(symbols, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                self.number(symbols, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
        })
    }

    /// A numeric attribute; 0 where the driver does not know it.
    fn number(&self, symbols: &Symbols, attribute: Attribute) -> u32 {
        let mut value = 0;
        // SAFETY: writes one int.
        match unsafe { symbols.cuDeviceGetAttribute(&mut value, attribute, self.handle) } {
            Ok(()) => u32::try_from(value).unwrap_or(0),
            Err(_) => 0,
        }
    }

    /// The ways to export the device's memory to other processes.
    pub(super) fn handle_types(&self, symbols: &Symbols) -> HandleTypes {
        let posix = Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        let pools = Attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES;
        HandleTypes {
            pages_as_files: self.flag(symbols, posix),
            pools: self.number(symbols, pools),
        }
    }

    fn flag(&self, symbols: &Symbols, attribute: Attribute) -> bool {
        self.number(symbols, attribute) != 0
    }

    fn granularity(&self, symbols: &Symbols, rdma: bool) -> Result<u64> {
        let handle_type = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
        let properties = physical_properties(self.handle, Creation { handle_type, rdma });
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut granularity = 0;
        // SAFETY: reads `properties`, writes one usize.
        unsafe { symbols.cuMemGetAllocationGranularity(&mut granularity, &properties, option) }?;
        Ok(granularity as u64)
    }

    fn name(&self, symbols: &Symbols) -> Result<String> {
        let mut buffer = [0u8; 256];
        let length = buffer.len() as c_int - 1;
        // SAFETY: writes at most `length` bytes; the last byte of the buffer stays 0.
        unsafe {
            symbols.cuDeviceGetName(buffer.as_mut_ptr().cast::<c_char>(), length, self.handle)
        }?;
        Ok(CStr::from_bytes_until_nul(&buffer)
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default())
    }

    /// The UUID; zeros if the driver cannot report it: it is for reports only.
    fn uuid(&self, symbols: &Symbols) -> [u8; 16] {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        match unsafe { symbols.cuDeviceGetUuid_v2(&mut uuid, self.handle) } {
            Ok(()) => uuid.bytes.map(|byte| byte as u8),
            Err(_) => [0; 16],
        }
    }
}

/// The kernel's estimate of the memory that programs can take without swapping (`MemAvailable` in
/// /proc/meminfo), bytes.
fn available_host_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// `device` as a location of memory.
pub(super) fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Read and write access for `device`.
pub(super) fn access(device: sys::CUdevice) -> sys::CUmemAccessDesc {
    sys::CUmemAccessDesc {
        location: location(device),
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}

/// The properties for `cuMemCreate`.
pub(super) fn physical_properties(
    device: sys::CUdevice,
    creation: Creation,
) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: creation.handle_type,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(creation.rdma),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// The properties for `cuMemPoolCreate`.
pub(super) fn pool_properties(device: sys::CUdevice, max_size: usize) -> sys::CUmemPoolProps {
    sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(device),
        win32SecurityAttributes: std::ptr::null_mut(),
        maxSize: max_size,
        reserved: [0; 56],
    }
}
