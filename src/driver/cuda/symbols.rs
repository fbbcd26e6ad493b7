//! The driver's entry points that we call, looked up once.
//!
//! The types and signatures are cudarc's: the compiler checks each one below against cudarc's
//! binding (but for `newer`). cudarc's own functions are not called, because they are unsafe inside
//! a user's Python:
//!
//! - they panic on a missing library or symbol, and an old driver lacks some;
//! - they open `libcuda.so` before `libcuda.so.1`. The first may be the toolkit's stub, in which
//!   every call fails, and opening it beside the real one gives the process two drivers. There is
//!   no way to hand cudarc the library that is loaded already (which a preloaded interposer or
//!   stand-in may be);
//! - they return the enum `CUresult`, and a newer driver may return a code that an older binding's
//!   enum lacks, which is undefined behaviour. Here a result is a plain `u32`.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys;

use super::super::{DriverError, ErrorKind, Result};

macro_rules! symbols {
    (of_cudarc { $($bound:ident($($bound_argument:ident: $bound_type:ty),*);)* }
     newer { $($newer:ident($($newer_argument:ident: $newer_type:ty),*);)* }) => {
        symbols! {
            all: $($bound($($bound_argument: $bound_type),*);)* $(
                $newer($($newer_argument: $newer_type),*);
            )*
        }

        // The signatures are those of cudarc's bindings, or this does not compile.
        $(const _: unsafe fn($($bound_type),*) -> sys::CUresult = sys::$bound;)*
    };
    (all: $($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The driver's functions, each under its own name. A missing one returns `NotSupported`.
        pub(super) struct Symbols {
            $($name: Option<unsafe extern "C" fn($($type),*) -> u32>,)*
        }

        impl Symbols {
            /// Looks every symbol up.
            ///
            /// # Safety
            /// `find` returns, for a symbol's name, null or the address of the driver's function of
            /// that name (or of one with the same signature) that stays loaded for good.
            pub(super) unsafe fn look_up(find: impl Fn(&CStr) -> *mut c_void) -> Self {
                Self {
                    $($name: {
                        let address = find(
                            CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes())
                                .unwrap_or(c""),
                        );
                        // SAFETY: the caller vouches for the function behind the name; its
                        // signature is checked against cudarc's below. A null pointer is `None` of
                        // the same size.
                        unsafe {
                            std::mem::transmute::<*mut c_void,
                            Option<unsafe extern "C" fn($($type),*) -> u32>>(address)
                        }
                    },)*
                }
            }

            /// The names among `wanted` that the driver lacks.
            pub(super) fn missing(&self, wanted: &[&'static str]) -> Vec<&'static str> {
                let present = [$((stringify!($name), self.$name.is_some()),)*];
                wanted
                    .iter()
                    .copied()
                    .filter(|name| !present.iter().any(|(known, there)| known == name && *there))
                    .collect()
            }

            $(
                /// Calls the driver.
                ///
                /// # Safety
                /// As the driver's documentation of the function says; pointers must be valid for
                /// its reads and writes.
                #[inline]
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                    let Some(function) = self.$name else {
                        return Err(DriverError::new(stringify!($name), ErrorKind::NotSupported, 0));
                    };
                    // SAFETY: the caller's promise.
                    match unsafe { function($($argument),*) } {
                        0 => Ok(()),
                        code => Err(DriverError::from_code(stringify!($name), code)),
                    }
                }
            )*
        }
    };
}

symbols! {
    of_cudarc {
        cuInit(flags: c_uint);
        cuDriverGetVersion(version: *mut c_int);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
        cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
        cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: sys::CUdevice);
        cuDeviceGetAttribute(
            value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice
        );
        cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
        cuDeviceCanAccessPeer(can: *mut c_int, device: sys::CUdevice, peer: sys::CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);

        cuCtxGetCurrent(context: *mut sys::CUcontext);
        cuCtxPushCurrent_v2(context: sys::CUcontext);
        cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
        cuCtxSynchronize();
        cuThreadExchangeStreamCaptureMode(mode: *mut sys::CUstreamCaptureMode);

        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize);
        cuMemFree_v2(address: sys::CUdeviceptr);
        cuMemsetD8Async(
            address: sys::CUdeviceptr, value: c_uchar, bytes: usize, stream: sys::CUstream
        );

        cuMemPoolCreate(pool: *mut sys::CUmemoryPool, properties: *const sys::CUmemPoolProps);
        cuMemPoolDestroy(pool: sys::CUmemoryPool);
        cuMemPoolGetAttribute(
            pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute, value: *mut c_void
        );
        cuMemPoolSetAttribute(
            pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute, value: *mut c_void
        );
        cuMemPoolTrimTo(pool: sys::CUmemoryPool, keep: usize);
        cuMemPoolSetAccess(
            pool: sys::CUmemoryPool, access: *const sys::CUmemAccessDesc, count: usize
        );
        cuMemAllocFromPoolAsync(
            address: *mut sys::CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool,
            stream: sys::CUstream
        );
        cuMemFreeAsync(address: sys::CUdeviceptr, stream: sys::CUstream);

        cuMemGetAllocationGranularity(
            granularity: *mut usize,
            properties: *const sys::CUmemAllocationProp,
            option: sys::CUmemAllocationGranularity_flags
        );
        cuMemAddressReserve(
            address: *mut sys::CUdeviceptr,
            bytes: usize,
            alignment: usize,
            wish: sys::CUdeviceptr,
            flags: c_ulonglong
        );
        cuMemAddressFree(address: sys::CUdeviceptr, bytes: usize);
        cuMemCreate(
            handle: *mut sys::CUmemGenericAllocationHandle,
            bytes: usize,
            properties: *const sys::CUmemAllocationProp,
            flags: c_ulonglong
        );
        cuMemRelease(handle: sys::CUmemGenericAllocationHandle);
        cuMemExportToShareableHandle(
            exported: *mut c_void,
            handle: sys::CUmemGenericAllocationHandle,
            kind: sys::CUmemAllocationHandleType,
            flags: c_ulonglong
        );
        cuMemImportFromShareableHandle(
            handle: *mut sys::CUmemGenericAllocationHandle,
            exported: *mut c_void,
            kind: sys::CUmemAllocationHandleType
        );
        cuIpcGetMemHandle(handle: *mut sys::CUipcMemHandle, address: sys::CUdeviceptr);
        cuIpcOpenMemHandle_v2(
            address: *mut sys::CUdeviceptr,
            handle: sys::CUipcMemHandle,
            flags: c_uint
        );
        cuIpcCloseMemHandle(address: sys::CUdeviceptr);
        cuMemMap(
            address: sys::CUdeviceptr,
            bytes: usize,
            offset: usize,
            handle: sys::CUmemGenericAllocationHandle,
            flags: c_ulonglong
        );
        cuMemSetAccess(
            address: sys::CUdeviceptr, bytes: usize, access: *const sys::CUmemAccessDesc,
            count: usize
        );
        cuMemUnmap(address: sys::CUdeviceptr, bytes: usize);

        cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
        cuEventDestroy_v2(event: sys::CUevent);
        cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
        cuEventQuery(event: sys::CUevent);
        cuEventSynchronize(event: sys::CUevent);
        cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
        cuStreamDestroy_v2(stream: sys::CUstream);
        cuStreamSynchronize(stream: sys::CUstream);
        cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
        cuStreamGetId(stream: sys::CUstream, id: *mut c_ulonglong);
        cuStreamGetCaptureInfo_v2(
            stream: sys::CUstream,
            status: *mut sys::CUstreamCaptureStatus,
            id: *mut sys::cuuint64_t,
            graph: *mut sys::CUgraph,
            dependencies: *mut *const sys::CUgraphNode,
            dependency_count: *mut usize
        );
    }
    // What the bindings of the CUDA version that we build against do not have yet, as later ones
    // bind it.
    newer {
        cuCtxRecordEvent(context: sys::CUcontext, event: sys::CUevent);
    }
}

/// Required symbols: every driver since CUDA 11.4 has them.
pub(super) const REQUIRED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDeviceCanAccessPeer",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemsetD8Async",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamGetCaptureInfo_v2",
];

/// The symbols of stream-ordered pools.
pub(super) const POOLS: &[&str] = &[
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolGetAttribute",
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuMemPoolSetAccess",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
];

/// The symbols of virtual memory management.
pub(super) const VMM: &[&str] = &[
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
];
