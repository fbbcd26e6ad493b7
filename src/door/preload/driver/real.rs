//! The real driver behind the interposed functions: the libcuda in which the program looked them
//! up.
#![allow(non_snake_case)]

use super::super::runtime::AccessDesc;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A `CUresult`.
pub(super) type CuResult = c_uint;
/// A `CUdeviceptr`.
pub type DevicePtr = u64;
/// A `CUstream`.
pub type Stream = usize;
/// A `CUcontext`.
pub type Context = usize;

/// `CUDA_ERROR_INVALID_VALUE`.
pub(super) const INVALID_VALUE: CuResult = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: CuResult = 2;
/// `CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND`: returned if the driver has no such function.
const SYMBOL_NOT_FOUND: CuResult = 302;

/// `CUmemAllocationProp`, as far as it is read.
#[repr(C)]
pub struct AllocationProp {
    kind: c_uint,
    handle_types: c_uint,
    /// `CUmemLocationType`: 1 is a device.
    pub location_kind: c_uint,
    /// The device's ordinal.
    pub location: c_int,
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The driver's functions that are called.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Function { $($name),* }

        impl Function {
            /// All functions.
            pub const ALL: &[Function] = &[$(Function::$name),*];

            /// As libcuda exports it.
            pub fn symbol(self) -> &'static CStr {
                const NAMES: &[&str] = &[$(concat!(stringify!($name), "\0")),*];
                CStr::from_bytes_until_nul(NAMES[self as usize].as_bytes()).unwrap_or_default()
            }
        }

        $(
            #[doc = concat!("The real `", stringify!($name), "`; [`SYMBOL_NOT_FOUND`] where there \
                is none.")]
            ///
            /// # Safety
            /// As the CUDA driver's function of this name.
            pub unsafe fn $name($($argument: $type),*) -> CuResult {
                type Signature = unsafe extern "C" fn($($type),*) -> CuResult;
                let address = find(Function::$name);
                if address == 0 {
                    return SYMBOL_NOT_FOUND;
                }
                // SAFETY: the address is of the driver's function of this name, whose signature
                // this is; the arguments are the caller's promise.
                unsafe { std::mem::transmute::<usize, Signature>(address)($($argument),*) }
            }
        )*
    };
}

functions! {
    cuMemAlloc_v2(out: *mut DevicePtr, bytes: usize);
    cuMemFree_v2(address: DevicePtr);
    cuMemAllocPitch_v2(
        out: *mut DevicePtr, pitch: *mut usize, width: usize, height: usize, element: c_uint
    );
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAllocAsync(out: *mut DevicePtr, bytes: usize, stream: Stream);
    cuMemAllocAsync_ptsz(out: *mut DevicePtr, bytes: usize, stream: Stream);
    cuMemFreeAsync(address: DevicePtr, stream: Stream);
    cuMemFreeAsync_ptsz(address: DevicePtr, stream: Stream);
    cuMemAllocFromPoolAsync(out: *mut DevicePtr, bytes: usize, pool: *mut c_void, stream: Stream);
    cuMemAllocFromPoolAsync_ptsz(
        out: *mut DevicePtr, bytes: usize, pool: *mut c_void, stream: Stream
    );
    cuCtxSynchronize();
    cuStreamDestroy_v2(stream: Stream);
    cuStreamBeginCapture_v2(stream: Stream, mode: c_uint);
    cuStreamBeginCapture_v2_ptsz(stream: Stream, mode: c_uint);
    cuStreamBeginCaptureToGraph(
        stream: Stream, graph: *mut c_void, dependencies: *const c_void, data: *const c_void,
        count: usize, mode: c_uint
    );
    cuStreamBeginCaptureToGraph_ptsz(
        stream: Stream, graph: *mut c_void, dependencies: *const c_void, data: *const c_void,
        count: usize, mode: c_uint
    );
    cuStreamEndCapture(stream: Stream, graph: *mut *mut c_void);
    cuStreamEndCapture_ptsz(stream: Stream, graph: *mut *mut c_void);
    cuIpcGetMemHandle(handle: *mut c_void, address: DevicePtr);
    cuMemPoolSetAccess(pool: *mut c_void, list: *const AccessDesc, count: usize);
    cuDevicePrimaryCtxReset_v2(device: c_int);
    cuMemCreate(
        handle: *mut c_ulonglong, bytes: usize, properties: *const AllocationProp,
        flags: c_ulonglong
    );
    cuMemRelease(handle: c_ulonglong);
    cuMemMap(
        address: DevicePtr, bytes: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong
    );
    cuMemUnmap(address: DevicePtr, bytes: usize);
    cuLaunchHostFunc(stream: Stream, function: *const c_void, data: *mut c_void);
    cuLaunchHostFunc_ptsz(stream: Stream, function: *const c_void, data: *mut c_void);
    cuLaunchHostFunc_v2(stream: Stream, function: *const c_void, data: *mut c_void, mode: c_uint);
    cuLaunchHostFunc_v2_ptsz(
        stream: Stream, function: *const c_void, data: *mut c_void, mode: c_uint
    );
    cuStreamAddCallback(stream: Stream, function: *const c_void, data: *mut c_void, flags: c_uint);
    cuStreamAddCallback_ptsz(
        stream: Stream, function: *const c_void, data: *mut c_void, flags: c_uint
    );
    cuStreamWaitValue32(stream: Stream, address: DevicePtr, value: c_uint, flags: c_uint);
    cuStreamWaitValue32_ptsz(stream: Stream, address: DevicePtr, value: c_uint, flags: c_uint);
    cuStreamWaitValue32_v2(stream: Stream, address: DevicePtr, value: c_uint, flags: c_uint);
    cuStreamWaitValue32_v2_ptsz(stream: Stream, address: DevicePtr, value: c_uint, flags: c_uint);
    cuStreamWaitValue64(stream: Stream, address: DevicePtr, value: c_ulonglong, flags: c_uint);
    cuStreamWaitValue64_ptsz(stream: Stream, address: DevicePtr, value: c_ulonglong, flags: c_uint);
    cuStreamWaitValue64_v2(stream: Stream, address: DevicePtr, value: c_ulonglong, flags: c_uint);
    cuStreamWaitValue64_v2_ptsz(
        stream: Stream, address: DevicePtr, value: c_ulonglong, flags: c_uint
    );
    cuStreamBatchMemOp(stream: Stream, count: c_uint, operations: *mut c_void, flags: c_uint);
    cuStreamBatchMemOp_ptsz(stream: Stream, count: c_uint, operations: *mut c_void, flags: c_uint);
    cuStreamBatchMemOp_v2(stream: Stream, count: c_uint, operations: *mut c_void, flags: c_uint);
    cuStreamBatchMemOp_v2_ptsz(
        stream: Stream, count: c_uint, operations: *mut c_void, flags: c_uint
    );
    cuGraphAddHostNode(
        node: *mut *mut c_void, graph: *mut c_void, dependencies: *const *mut c_void, count: usize,
        parameters: *const c_void
    );
    cuGraphAddBatchMemOpNode(
        node: *mut *mut c_void, graph: *mut c_void, dependencies: *const *mut c_void, count: usize,
        parameters: *const c_void
    );
    // Not interposed: questions of our replacements.
    cuCtxGetCurrent(context: *mut Context);
    cuCtxGetDevice(device: *mut c_int);
    cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int);
    cuDevicePrimaryCtxRetain(context: *mut Context, device: c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGetMemPool(pool: *mut *mut c_void, device: c_int);
    cuDeviceGetDefaultMemPool(pool: *mut *mut c_void, device: c_int);
    cuStreamGetCtx(stream: Stream, context: *mut Context);
    cuStreamIsCapturing(stream: Stream, status: *mut c_uint);
    cuStreamSynchronize(stream: Stream);
}

const COUNT: usize = Function::cuStreamSynchronize as usize + 1;

/// Addresses of the driver's functions.
///
/// ```text
/// 0 -> address   found(), with the address that a program looked up, or find(): the first stands,
///                for good
/// ```
static ADDRESSES: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];

/// An address in the libcuda in which programs looked their functions up. 0 -> address, at the
/// first lookup.
static LIBRARY: AtomicUsize = AtomicUsize::new(0);

/// Notes that a program has looked `function` up, and that the driver's lies at `address`.
pub fn found(function: Function, address: *mut c_void) {
    keep(&ADDRESSES[function as usize], address as usize);
    keep(&LIBRARY, address as usize);
}

fn keep(place: &AtomicUsize, address: usize) {
    let _ = place.compare_exchange(0, address, Ordering::Release, Ordering::Relaxed);
}

fn find(function: Function) -> usize {
    match ADDRESSES[function as usize].load(Ordering::Acquire) {
        0 => find_slowly(function),
        address => address,
    }
}

#[cold]
fn find_slowly(function: Function) -> usize {
    let Some(path) =
        object_of(LIBRARY.load(Ordering::Acquire) as *const c_void).map(|object| object.dli_fname)
    else {
        return 0;
    };
    // SAFETY: the name of a loaded object, which is found again and not loaded; the handle is kept.
    // Lookups of this library itself are never replaced.
    let address = unsafe {
        let handle = libc::dlopen(path, libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if handle.is_null() {
            return 0;
        }
        libc::dlsym(handle, function.symbol().as_ptr()) as usize
    };
    if address != 0 {
        keep(&ADDRESSES[function as usize], address);
    }
    address
}

/// The loaded object around an address.
fn object_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and fills `info` where it answers other than 0; zeroed it is
    // valid too.
    let (found, info) = unsafe { (libc::dladdr(address, info.as_mut_ptr()), info.assume_init()) };
    (found != 0 && !info.dli_fname.is_null()).then_some(info)
}

/// Whether two addresses lie in one loaded object.
pub fn same_object(one: *const c_void, other: *const c_void) -> bool {
    match (object_of(one), object_of(other)) {
        (Some(one), Some(other)) => one.dli_fbase == other.dli_fbase,
        _ => false,
    }
}

/// Whether an address lies in the CUDA toolkit's stub of libcuda, where every call fails.
pub fn is_in_stub(address: *const c_void) -> bool {
    object_of(address).is_some_and(|object| {
        // SAFETY: the name of a loaded object, NUL-terminated; read at once.
        let path = unsafe { CStr::from_ptr(object.dli_fname.cast::<c_char>()) };
        path.to_bytes().windows(7).any(|part| part == b"/stubs/")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_the_functions_names() {
        assert_eq!(Function::ALL.len(), COUNT);
        assert_eq!(Function::cuMemAlloc_v2.symbol(), c"cuMemAlloc_v2");
        assert_eq!(Function::cuStreamSynchronize.symbol(), c"cuStreamSynchronize");
        assert!(
            Function::ALL.iter().enumerate().all(|(index, function)| *function as usize == index)
        );
    }

    #[test]
    fn a_process_without_a_driver_gets_an_error_and_no_jump_into_nothing() {
        // SAFETY: there is no such function, so nothing is called.
        assert_eq!(unsafe { cuMemFree_v2(0) }, SYMBOL_NOT_FOUND);
    }
}
