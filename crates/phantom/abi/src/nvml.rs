//! The part of NVML (libnvidia-ml) that torch and programs use: the devices, their memory, the
//! processes on them. All of it comes from the simulator: one machine, with this process alone on
//! it. Functions without a simulated counterpart (temperature, power, clocks, utilization) are not
//! exported; callers take that for an old driver.
//!
//! As on a GPU, NVML makes no context: it works before `cuInit`, and in a forked child. There the
//! books are a copy, possibly locked by another thread at the fork, so memory and processes are not
//! reported.

use crate::abi::{Counter, Out, Text};
use crate::context;
use crate::driver_device::VERSION;
use crate::gpu::{self, gpu};
use crate::numbers::CU_MEM_HANDLE_TYPE_FABRIC;
use crate::owner;
use crate::process::{Phase, phase};
use crate::properties::{pci_bus, put_text, uuid};
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering::*};

/// `nvmlReturn_t`.
const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const INSUFFICIENT_SIZE: u32 = 7;
const VERSION_MISMATCH: u32 = 25;
const UNKNOWN: u32 = 999;
/// `nvmlGpuP2PStatus_t`.
const P2P_OK: u32 = 0;
const P2P_NOT_SUPPORTED: u32 = 5;
/// `nvmlGpuFabricState_t`.
const FABRIC_NOT_SUPPORTED: u8 = 0;
const FABRIC_COMPLETED: u8 = 3;
/// The first driver with CUDA 13.
const DRIVER: &str = "580.65.06";
/// `gpuInstanceId` and `computeInstanceId` without MIG.
const NO_INSTANCE: u32 = u32::MAX;

/// Initialisations minus shutdowns.
static USERS: AtomicU32 = AtomicU32::new(0);

/// `nvmlDevice_t`: the device's number plus one, so that none is NULL.
type Device = usize;

fn called(calls: &'static Counter, early: bool, body: impl FnOnce() -> Result<(), u32>) -> u32 {
    calls.hit();
    if phase() == Phase::Gone || (!early && USERS.load(Relaxed) == 0) {
        return UNINITIALIZED;
    }
    let answer = catch_unwind(AssertUnwindSafe(body));
    answer.map_or(UNKNOWN, |answer| answer.err().unwrap_or(0))
}

/// Exports functions of NVML; `early`: those that work before `nvmlInit`.
macro_rules! nvml {
    ($early:literal: $($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*)
        => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> u32 {
            static CALLS: Counter = Counter::new(stringify!($name));
            called(&CALLS, $early, move || $body)
        }
    )*};
}

/// The device of a handle.
fn device(handle: Device) -> Result<u32, u32> {
    let number = handle.checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    known(u32::try_from(number).map_err(|_| INVALID_ARGUMENT)?, INVALID_ARGUMENT)
}

/// The device of that number; the code `otherwise` if there is none.
fn known(number: u32, otherwise: u32) -> Result<u32, u32> {
    if number < gpu().device_count() { Ok(number) } else { Err(otherwise) }
}

/// A device with readable books.
fn with_books(handle: Device) -> Result<u32, u32> {
    let device = device(handle)?;
    if phase() == Phase::ForkedChild { Err(UNKNOWN) } else { Ok(device) }
}

/// Translates a refusal of the CUDA face.
fn given<T>(result: Result<T, u32>) -> Result<T, u32> {
    result.map_err(|_| INVALID_ARGUMENT)
}

/// Writes nothing if the text does not fit.
fn whole_text(text: Out<u8>, length: u32, value: &str) -> Result<(), u32> {
    if value.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    given(put_text(text, i32::try_from(length).unwrap_or(i32::MAX), value))
}

/// The driver's UUID bytes in the format of `nvmlDeviceGetUUID`.
fn uuid_text(device: u32) -> String {
    let hex: String = uuid(device).iter().map(|byte| format!("{byte:02x}")).collect();
    let [a, b, c, d] = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20]];
    format!("GPU-{a}-{b}-{c}-{d}-{}", &hex[20..])
}

/// The device of a PCI address: `DOMAIN:BUS:DEVICE.FUNCTION`, in hex.
fn at_pci(text: &str) -> Option<u32> {
    let (rest, function) = text.rsplit_once('.')?;
    let mut parts = rest.split(':').map(|part| u32::from_str_radix(part, 16).ok());
    let place = [parts.next()??, parts.next()??, parts.next()??];
    if parts.next().is_some() || u32::from_str_radix(function, 16).ok()? != 0 {
        return None;
    }
    (0..gpu().device_count()).find(|&device| place == [0, pci_bus(device) as u32, 0])
}

fn initialize() -> Result<(), u32> {
    // A program that uses NVML alone never reaches CUDA's check.
    owner::check();
    gpu::start();
    USERS.fetch_add(1, Relaxed);
    Ok(())
}

nvml! { true:
    fn nvmlInit() { initialize() }

    fn nvmlInit_v2() { initialize() }

    fn nvmlInitWithFlags(_flags: u32) { initialize() }

    fn nvmlSystemGetCudaDriverVersion(out: Out<i32>) { given(out.put(VERSION)) }

    fn nvmlSystemGetCudaDriverVersion_v2(out: Out<i32>) { given(out.put(VERSION)) }
}

nvml! { false:
    fn nvmlShutdown() {
        let ended = USERS.fetch_update(Relaxed, Relaxed, |users| users.checked_sub(1));
        ended.map(|_| ()).map_err(|_| UNINITIALIZED)
    }

    fn nvmlSystemGetDriverVersion(text: Out<u8>, length: u32) { whole_text(text, length, DRIVER) }

    fn nvmlDeviceGetCount(out: Out<u32>) { given(out.put(gpu().device_count())) }

    fn nvmlDeviceGetCount_v2(out: Out<u32>) { given(out.put(gpu().device_count())) }

    fn nvmlDeviceGetHandleByIndex(index: u32, out: Out<Device>) { handle(index, out) }

    fn nvmlDeviceGetHandleByIndex_v2(index: u32, out: Out<Device>) { handle(index, out) }

    fn nvmlDeviceGetHandleByPciBusId(text: Text, out: Out<Device>) { handle_at(text, out) }

    fn nvmlDeviceGetHandleByPciBusId_v2(text: Text, out: Out<Device>) { handle_at(text, out) }

    fn nvmlDeviceGetHandleByUUID(text: Text, out: Out<Device>) {
        let said = given(text.get())?.to_str().map_err(|_| NOT_FOUND)?;
        let found = (0..gpu().device_count()).find(|&device| uuid_text(device) == said);
        handle(found.ok_or(NOT_FOUND)?, out)
    }

    fn nvmlDeviceGetIndex(handle: Device, out: Out<u32>) { given(out.put(device(handle)?)) }

    fn nvmlDeviceGetName(handle: Device, text: Out<u8>, length: u32) {
        device(handle)?;
        whole_text(text, length, &gpu().looks.name)
    }

    fn nvmlDeviceGetUUID(handle: Device, text: Out<u8>, length: u32) {
        whole_text(text, length, &uuid_text(device(handle)?))
    }

    fn nvmlDeviceGetCudaComputeCapability(handle: Device, major: Out<i32>, minor: Out<i32>) {
        device(handle)?;
        let (first, second) = gpu().looks.generation.capability;
        given(major.put(first))?;
        given(minor.put(second))
    }

    fn nvmlDeviceGetPciInfo_v3(handle: Device, out: Out<PciInfo>) {
        given(out.put(PciInfo::of(device(handle)?)))
    }

    fn nvmlDeviceGetMemoryInfo(handle: Device, out: Out<Memory>) {
        given(out.put(Memory::of(with_books(handle)?)?))
    }

    /// The caller's structure states its version.
    fn nvmlDeviceGetMemoryInfo_v2(handle: Device, out: Out<MemoryV2>) {
        let device = with_books(handle)?;
        version(out, &[versioned::<MemoryV2>(2)])?;
        let Memory { total, free, used } = Memory::of(device)?;
        given(out.put(MemoryV2 {
            version: versioned::<MemoryV2>(2), total, reserved: 0, free, used,
        }))
    }

    fn nvmlDeviceGetComputeRunningProcesses(
        handle: Device, count: Out<u32>, out: Out<Process>
    ) {
        processes(handle, count, |process| given(out.put(process)))
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        handle: Device, count: Out<u32>, out: Out<ProcessV2>
    ) {
        processes(handle, count, |process| given(out.put(process.without_mig())))
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        handle: Device, count: Out<u32>, out: Out<ProcessV2>
    ) {
        processes(handle, count, |process| given(out.put(process.without_mig())))
    }

    /// There is no NVLink: peers are connected by PCIe.
    fn nvmlDeviceGetNvLinkRemoteDeviceType(handle: Device, _link: u32, _out: Out<u32>) {
        device(handle).and(Err(NOT_SUPPORTED))
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(handle: Device, _link: u32, _out: Out<PciInfo>) {
        device(handle).and(Err(NOT_SUPPORTED))
    }

    fn nvmlDeviceGetP2PStatus(one: Device, other: Device, _capability: u32, out: Out<u32>) {
        let (one, other) = (device(one)?, device(other)?);
        let is_peer = gpu().can_access_peer(one, other).unwrap_or(false);
        given(out.put(if is_peer { P2P_OK } else { P2P_NOT_SUPPORTED }))
    }

    /// The device is in a fabric if it offers fabric handles.
    fn nvmlDeviceGetGpuFabricInfoV(handle: Device, out: Out<Fabric>) {
        device(handle)?;
        let asked = version(out, &[versioned::<Fabric>(2), versioned::<FabricV3>(3)])?;
        let has_fabric = gpu().handle_types.offered & CU_MEM_HANDLE_TYPE_FABRIC as u32 != 0;
        let told = Fabric {
            version: asked,
            cluster: [0; 16],
            status: 0,
            clique: 0,
            state: if has_fabric { FABRIC_COMPLETED } else { FABRIC_NOT_SUPPORTED },
            health_mask: 0,
        };
        if asked == versioned::<FabricV3>(3) {
            return given(out.cast().put(FabricV3 { told, health_summary: 0 }));
        }
        given(out.put(told))
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(error: u32) -> *const c_char {
    let text: &CStr = match error {
        0 => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        VERSION_MISMATCH => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

fn handle(index: u32, out: Out<Device>) -> Result<(), u32> {
    given(out.put(known(index, INVALID_ARGUMENT)? as usize + 1))
}

fn handle_at(text: Text, out: Out<Device>) -> Result<(), u32> {
    let said = given(text.get())?.to_str().map_err(|_| NOT_FOUND)?;
    handle(at_pci(said).ok_or(NOT_FOUND)?, out)
}

/// The first word of a versioned structure: its size, and the version above it.
const fn versioned<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | version << 24
}

/// The version of the caller's structure, one of `known`.
fn version<T>(place: Out<T>, known: &[u32]) -> Result<u32, u32> {
    let place = place.cast::<u32>().raw();
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: by the C contract of the functions that have it, the structure begins with its
    // version, which the caller has written.
    let asked = unsafe { place.read_unaligned() };
    if known.contains(&asked) { Ok(asked) } else { Err(VERSION_MISMATCH) }
}

/// The processes with a context on the device: this one or none. `count`: room on entry, number on
/// return.
fn processes(
    handle: Device,
    count: Out<u32>,
    put: impl FnOnce(Process) -> Result<(), u32>,
) -> Result<(), u32> {
    let device = with_books(handle)?;
    if count.raw().is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: by the C contract, a pointer to a number that the caller has written.
    let room = unsafe { count.raw().read_unaligned() };
    let found = u32::from(phase() == Phase::Running && context::is_active(device));
    count.put_if_wanted(found);
    if found == 0 {
        return Ok(());
    }
    if room < found {
        return Err(INSUFFICIENT_SIZE);
    }
    put(Process { pid: std::process::id(), used: gpu().sim.books(device).physical })
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

impl Memory {
    fn of(device: u32) -> Result<Self, u32> {
        let (free, total) = gpu().memory_info(device).map_err(|_| UNKNOWN)?;
        Ok(Self { total, free, used: total - free })
    }
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_v1_t`. Memory of others and of the context has no named process, so `used` is
/// the memory that this process requested.
#[repr(C)]
pub struct Process {
    pid: u32,
    used: u64,
}

impl Process {
    fn without_mig(self) -> ProcessV2 {
        ProcessV2 { process: self, instance: NO_INSTANCE, compute_instance: NO_INSTANCE }
    }
}

/// `nvmlProcessInfo_v2_t`.
#[repr(C)]
pub struct ProcessV2 {
    process: Process,
    instance: u32,
    compute_instance: u32,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    bus_id_legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
    subsystem_id: u32,
    bus_id: [u8; 32],
}

impl PciInfo {
    fn of(device: u32) -> Self {
        fn padded<const N: usize>(text: &str) -> [u8; N] {
            let mut bytes = [0; N];
            bytes[..text.len()].copy_from_slice(text.as_bytes());
            bytes
        }
        let bus = pci_bus(device) as u32;
        Self {
            bus_id_legacy: padded(&format!("0000:{bus:02X}:00.0")),
            domain: 0,
            bus,
            device: 0,
            device_id: 0,
            subsystem_id: 0,
            bus_id: padded(&format!("00000000:{bus:02X}:00.0")),
        }
    }
}

/// `nvmlGpuFabricInfo_v2_t`.
#[repr(C)]
pub struct Fabric {
    version: u32,
    cluster: [u8; 16],
    status: u32,
    clique: u32,
    state: u8,
    health_mask: u32,
}

/// `nvmlGpuFabricInfo_v3_t`.
#[repr(C)]
pub struct FabricV3 {
    told: Fabric,
    health_summary: u8,
}

// The sizes of the C structures.
const _: () = {
    assert!(size_of::<MemoryV2>() == 40 && size_of::<Process>() == 16);
    assert!(size_of::<ProcessV2>() == 24 && size_of::<PciInfo>() == 68);
    assert!(size_of::<Fabric>() == 36 && size_of::<FabricV3>() == 40);
};
