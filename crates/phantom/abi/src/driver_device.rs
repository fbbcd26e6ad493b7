//! libcuda: initialisation, devices, and errors by name.

use crate::abi::{Out, Text, code};
use crate::context::driver_device;
use crate::entry::{driver, driver_early};
use crate::gpu::gpu;
use crate::numbers::*;
use crate::properties::{self, attribute, pci_bus_id, put_text};
use crate::{lookup, process};
use std::ffi::{CStr, c_char};

/// CUDA 13.0: it runs what is built for any CUDA 13.
pub const VERSION: i32 = 13_000;

driver_early! {
    fn cuInit(_flags: u32) {
        process::initialize();
        if gpu().device_count() == 0 { Err(code::NO_DEVICE) } else { Ok(()) }
    }

    fn cuDriverGetVersion(out: Out<i32>) {
        out.put(VERSION)
    }

    /// Registers a listener of the driver's log, as torch after 2.11 does. The simulator writes no
    /// log and never calls it.
    fn cuLogsRegisterCallback(callback: usize, _data: usize, handle: Out<usize>) {
        if callback == 0 {
            return Err(code::INVALID_VALUE);
        }
        handle.put_if_wanted(callback);
        Ok(())
    }

    fn cuLogsUnregisterCallback(_handle: usize) {
        Ok(())
    }

    fn cuGetErrorName(error: u32, out: Out<*const c_char>) {
        out.put(error_texts(error).0.as_ptr())
    }

    fn cuGetErrorString(error: u32, out: Out<*const c_char>) {
        out.put(error_texts(error).1.as_ptr())
    }

    fn cuGetProcAddress(name: Text, out: Out<usize>, version: i32, flags: u64) {
        let address = lookup::driver_symbol(name.get()?, version, flags).ok_or(code::NOT_FOUND);
        out.put(address.unwrap_or(0))?;
        address.map(|_| ())
    }

    fn cuGetProcAddress_v2(
        name: Text, out: Out<usize>, version: i32, flags: u64, status: Out<u32>
    ) {
        let address = lookup::driver_symbol(name.get()?, version, flags);
        status.put_if_wanted(match address {
            Some(_) => CU_GET_PROC_ADDRESS_SUCCESS,
            None => CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
        });
        out.put(address.unwrap_or(0))?;
        address.map(|_| ()).ok_or(code::NOT_FOUND)
    }
}

driver! {
    fn cuDeviceGetCount(out: Out<i32>) {
        out.put(gpu().device_count() as i32)
    }

    fn cuDeviceGet(out: Out<i32>, ordinal: i32) {
        out.put(gpu().device(ordinal)? as i32)
    }

    fn cuDeviceGetName(text: Out<u8>, length: i32, device: i32) {
        gpu().device(device)?;
        put_text(text, length, &gpu().looks.name)
    }

    fn cuDeviceGetUuid(out: Out<[u8; 16]>, device: i32) {
        out.put(properties::uuid(gpu().device(device)?))
    }

    fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, device: i32) {
        out.put(properties::uuid(gpu().device(device)?))
    }

    fn cuDeviceTotalMem_v2(out: Out<usize>, device: i32) {
        out.put(gpu().total_memory(gpu().device(device)?)? as usize)
    }

    fn cuDeviceGetAttribute(out: Out<i32>, number: i32, device: i32) {
        out.put(attribute(gpu().device(device)?, number))
    }

    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, device: i32) {
        let device = gpu().device(device)?;
        major.put(attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR))?;
        minor.put(attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR))
    }

    fn cuDeviceGetPCIBusId(text: Out<u8>, length: i32, device: i32) {
        pci_bus_id(text, length, gpu().device(device)?)
    }

    fn cuDeviceCanAccessPeer(out: Out<i32>, device: i32, peer: i32) {
        let (device, peer) = (gpu().device(device)?, gpu().device(peer)?);
        out.put(i32::from(gpu().can_access_peer(device, peer)?))
    }

    /// The other attributes (performance rank, arrays) are 0.
    fn cuDeviceGetP2PAttribute(out: Out<i32>, number: i32, device: i32, peer: i32) {
        let (device, peer) = (gpu().device(device)?, gpu().device(peer)?);
        out.put(match number {
            CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
            | CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED => {
                i32::from(gpu().can_access_peer(device, peer)?)
            }
            _ => 0,
        })
    }

    fn cuDeviceGetDefaultMemPool(out: Out<usize>, device: i32) {
        out.put(gpu().default_pool(gpu().device(device)?)?)
    }

    fn cuDeviceGetMemPool(out: Out<usize>, device: i32) {
        out.put(gpu().current_pool(gpu().device(device)?)?)
    }

    fn cuDeviceSetMemPool(device: i32, pool: usize) {
        gpu().set_current_pool(gpu().device(device)?, pool)
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (f, t) = gpu().memory_info(driver_device()?)?;
        free.put_if_wanted(f as usize);
        total.put_if_wanted(t as usize);
        Ok(())
    }
}

/// The driver's name of an error, and its text.
pub fn error_texts(error: u32) -> (&'static CStr, &'static CStr) {
    match error {
        0 => (c"CUDA_SUCCESS", c"no error"),
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        3 => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        4 => (c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
        100 => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
        101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        201 => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        400 => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        500 => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        600 => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        700 => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        704 => (c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled"),
        719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        900 => (
            c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            c"operation not permitted when stream is capturing",
        ),
        901 => (
            c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            c"operation failed due to a previous error during capture",
        ),
        903 => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not initiated in this stream")
        }
        904 => (c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
        905 => (
            c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            c"dependency created on uncaptured work in another stream",
        ),
        907 => (
            c"CUDA_ERROR_CAPTURED_EVENT",
            c"operation not permitted on an event last recorded in a capturing stream",
        ),
        _ => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
    }
}

/// The runtime's name of an error.
pub fn runtime_error_name(error: u32) -> &'static CStr {
    match error {
        0 => c"cudaSuccess",
        1 => c"cudaErrorInvalidValue",
        2 => c"cudaErrorMemoryAllocation",
        3 => c"cudaErrorInitializationError",
        4 => c"cudaErrorCudartUnloading",
        100 => c"cudaErrorNoDevice",
        101 => c"cudaErrorInvalidDevice",
        201 => c"cudaErrorDeviceUninitialized",
        400 => c"cudaErrorInvalidResourceHandle",
        500 => c"cudaErrorSymbolNotFound",
        600 => c"cudaErrorNotReady",
        700 => c"cudaErrorIllegalAddress",
        704 => c"cudaErrorPeerAccessAlreadyEnabled",
        719 => c"cudaErrorLaunchFailure",
        801 => c"cudaErrorNotSupported",
        900 => c"cudaErrorStreamCaptureUnsupported",
        901 => c"cudaErrorStreamCaptureInvalidated",
        903 => c"cudaErrorStreamCaptureUnmatched",
        904 => c"cudaErrorStreamCaptureUnjoined",
        905 => c"cudaErrorStreamCaptureIsolation",
        907 => c"cudaErrorCapturedEvent",
        _ => c"cudaErrorUnknown",
    }
}
