//! The real CUDA runtime behind the interposed functions: the one that the caller would have called
//! without us.
//!
//! Usually it is the next one in the global scope (`RTLD_NEXT`). It is missing there where the
//! runtime came in privately (Python loads extension modules and their dependencies so), and a
//! process may have several runtimes. So a search of the caller's own libraries follows: the object
//! around the return address, and its dependencies.

use super::super::objects;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A `cudaError_t`.
pub type CudaError = c_int;
/// `cudaStream_t`.
pub type Stream = usize;
/// `cudaErrorSharedObjectSymbolNotFound`: returned if the process has no such function.
pub(super) const SYMBOL_NOT_FOUND: CudaError = 302;

/// `struct cudaPitchedPtr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PitchedPtr {
    /// The memory.
    pub ptr: *mut c_void,
    /// Bytes from row to row.
    pub pitch: usize,
    /// Bytes of a row, as requested.
    pub xsize: usize,
    /// Rows.
    pub ysize: usize,
}

/// `struct cudaExtent`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Bytes of a row.
    pub width: usize,
    /// Rows of a slice.
    pub height: usize,
    /// Slices.
    pub depth: usize,
}

/// `struct cudaMemAccessDesc`, and the driver's `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// `cudaMemLocationType`: 1 is a device.
    location_kind: c_int,
    /// The device.
    location: c_int,
    /// 0: none; 1: read; 3: read and write.
    flags: c_int,
}

impl AccessDesc {
    /// The device that it lets in, if any.
    pub fn grants(&self) -> Option<i64> {
        (self.location_kind == 1 && self.flags != 0).then_some(i64::from(self.location))
    }
}

/// `struct cudaIpcMemHandle_st`, opaque.
#[repr(C)]
pub struct IpcMemHandle([u8; 64]);

/// `ncclUniqueId`, which goes by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// A caller's runtime, found function by function.
#[derive(Clone, Copy)]
pub struct Runtime {
    caller: *const c_void,
}

impl Runtime {
    /// The runtime of the code at `caller`, a return address.
    pub fn of(caller: *const c_void) -> Self {
        Self { caller }
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The functions that are looked for.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        enum Function { $($name),* }

        impl Function {
            fn symbol(self) -> &'static CStr {
                const NAMES: &[&str] = &[$(concat!(stringify!($name), "\0")),*];
                CStr::from_bytes_until_nul(NAMES[self as usize].as_bytes()).unwrap_or_default()
            }
        }

        #[allow(non_snake_case)]
        impl Runtime {$(
            #[doc = concat!("The real `", stringify!($name), "`; [`SYMBOL_NOT_FOUND`] where there \
                is none.")]
            ///
            /// # Safety
            /// As the CUDA runtime's function of this name.
            #[inline]
            pub unsafe fn $name(self, $($argument: $type),*) -> CudaError {
                type Signature = unsafe extern "C" fn($($type),*) -> CudaError;
                let address = self.find(Function::$name);
                if address == 0 {
                    return missing(Function::$name);
                }
                // SAFETY: the address is of the runtime's function of this name, whose signature
                // this is; the arguments are the caller's promise.
                unsafe { std::mem::transmute::<usize, Signature>(address)($($argument),*) }
            }
        )*}

        /// Whether the caller's runtime has a function: older ones lack some.
        #[allow(non_snake_case)]
        pub mod has {
            use super::{Function, Runtime};
            $(
                #[doc = concat!("Whether there is a `", stringify!($name), "`.")]
                #[inline]
                pub fn $name(runtime: Runtime) -> bool {
                    runtime.find(Function::$name) != 0
                }
            )*
        }
    };
}

functions! {
    cudaMalloc(out: *mut *mut c_void, bytes: usize);
    cudaFree(pointer: *mut c_void);
    cudaMallocAsync(out: *mut *mut c_void, bytes: usize, stream: Stream);
    cudaMallocAsync_ptsz(out: *mut *mut c_void, bytes: usize, stream: Stream);
    cudaFreeAsync(pointer: *mut c_void, stream: Stream);
    cudaFreeAsync_ptsz(pointer: *mut c_void, stream: Stream);
    cudaMallocFromPoolAsync(out: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: Stream);
    cudaMallocFromPoolAsync_ptsz(
        out: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: Stream
    );
    cudaMallocPitch(out: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize);
    cudaMalloc3D(out: *mut PitchedPtr, extent: Extent);
    cudaMemGetInfo(free: *mut usize, total: *mut usize);
    cudaStreamDestroy(stream: Stream);
    cudaStreamSynchronize(stream: Stream);
    cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint);
    cudaMemPoolSetAccess(pool: *mut c_void, list: *const AccessDesc, count: usize);
    cudaDeviceSynchronize();
    cudaDeviceReset();
    cudaThreadExit();
    cudaThreadSynchronize();
    cudaStreamBeginCapture(stream: Stream, mode: c_uint);
    cudaStreamBeginCapture_ptsz(stream: Stream, mode: c_uint);
    cudaStreamBeginCaptureToGraph(
        stream: Stream, graph: *mut c_void, dependencies: *const c_void, data: *const c_void,
        count: usize, mode: c_uint
    );
    cudaStreamBeginCaptureToGraph_ptsz(
        stream: Stream, graph: *mut c_void, dependencies: *const c_void, data: *const c_void,
        count: usize, mode: c_uint
    );
    cudaStreamEndCapture(stream: Stream, graph: *mut *mut c_void);
    cudaStreamEndCapture_ptsz(stream: Stream, graph: *mut *mut c_void);
    cudaStreamIsCapturing(stream: Stream, status: *mut c_uint);
    cudaIpcGetMemHandle(handle: *mut IpcMemHandle, pointer: *mut c_void);
    cudaLaunchHostFunc(stream: Stream, function: *const c_void, data: *mut c_void);
    cudaLaunchHostFunc_ptsz(stream: Stream, function: *const c_void, data: *mut c_void);
    cudaLaunchHostFunc_v2(
        stream: Stream, function: *const c_void, data: *mut c_void, mode: c_uint
    );
    cudaLaunchHostFunc_v2_ptsz(
        stream: Stream, function: *const c_void, data: *mut c_void, mode: c_uint
    );
    cudaStreamAddCallback(
        stream: Stream, function: *const c_void, data: *mut c_void, flags: c_uint
    );
    cudaStreamAddCallback_ptsz(
        stream: Stream, function: *const c_void, data: *mut c_void, flags: c_uint
    );
    cudaGraphAddHostNode(
        node: *mut *mut c_void, graph: *mut c_void, dependencies: *const *mut c_void, count: usize,
        parameters: *const c_void
    );
    ncclCommInitRank(out: *mut *mut c_void, ranks: c_int, id: UniqueId, rank: c_int);
    ncclCommInitRankConfig(
        out: *mut *mut c_void, ranks: c_int, id: UniqueId, rank: c_int, config: *mut c_void
    );
    ncclCommInitRankScalable(
        out: *mut *mut c_void, ranks: c_int, rank: c_int, count: c_int, ids: *mut c_void,
        config: *mut c_void
    );
    ncclCommInitAll(out: *mut *mut c_void, devices: c_int, list: *const c_int);
    cudaGetDevice(device: *mut c_int);
    cudaDeviceGetMemPool(pool: *mut *mut c_void, device: c_int);
    cudaDeviceGetDefaultMemPool(pool: *mut *mut c_void, device: c_int);
    cudaThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    cudaRuntimeGetVersion(version: *mut c_int);
}

macro_rules! twins {
    ($($name:ident, $twin:ident, $method:ident($($argument:ident: $type:ty),*);)*) => {
        impl Runtime {$(
            #[doc = concat!("The real `", stringify!($name), "` or its twin for per-thread default \
                streams, which `per_thread` names.")]
            ///
            /// # Safety
            /// As the CUDA runtime's function.
            #[allow(clippy::too_many_arguments)]
            #[inline(always)]
            pub unsafe fn $method(
                self, per_thread: bool, stream: Stream, $($argument: $type),*
            ) -> CudaError {
                // SAFETY: the caller's promise. Where a runtime lacks the twin, the plain function
                // with the handle that means the same is its equal.
                unsafe {
                    twins!(@call self, per_thread, stream, $name, $twin, ($($argument),*))
                }
            }
        )*}
    };
    (
        @call $self:ident, $per_thread:ident, $stream:ident, $name:ident, $twin:ident,
        ($a:ident, $b:ident)
    ) => {
        if $per_thread && $self.find(Function::$twin) != 0 { $self.$twin($a, $b, $stream) }
        else { $self.$name($a, $b, effective($per_thread, $stream)) }
    };
    (@call $self:ident, $per_thread:ident, $stream:ident, $name:ident, $twin:ident, ($a:ident)) => {
        if $per_thread && $self.find(Function::$twin) != 0 { $self.$twin($a, $stream) }
        else { $self.$name($a, effective($per_thread, $stream)) }
    };
    (
        @call $self:ident, $per_thread:ident, $stream:ident, $name:ident, $twin:ident,
        ($a:ident, $b:ident, $c:ident)
    ) => {
        if $per_thread && $self.find(Function::$twin) != 0 { $self.$twin($a, $b, $c, $stream) }
        else { $self.$name($a, $b, $c, effective($per_thread, $stream)) }
    };
}

twins! {
    cudaMallocAsync, cudaMallocAsync_ptsz, malloc_async(out: *mut *mut c_void, bytes: usize);
    cudaFreeAsync, cudaFreeAsync_ptsz, free_async(pointer: *mut c_void);
    cudaMallocFromPoolAsync, cudaMallocFromPoolAsync_ptsz,
        malloc_from_pool_async(out: *mut *mut c_void, bytes: usize, pool: *mut c_void);
}

/// The stream that a caller means: in code compiled for per-thread default streams, 0 is the
/// thread's own (handle 2).
#[inline]
pub fn effective(per_thread: bool, stream: Stream) -> Stream {
    if per_thread && stream == 0 { 2 } else { stream }
}

#[cold]
fn missing(function: Function) -> CudaError {
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| {
        crate::config::logging::init();
        log::error!(
            "{}: this process has no CUDA runtime that defines it; the call returns error \
             {SYMBOL_NOT_FOUND}. Load libcudart before the first call",
            function.symbol().to_string_lossy()
        );
    });
    SYMBOL_NOT_FOUND
}

/// Addresses that were found, by caller and function.
///
/// ```text
/// key:  0 -> BUSY   the thread that claims the slot (compare-exchange)
///       BUSY -> key the same thread, after it has written `address` (release; readers acquire)
///       key         for good
/// ```
/// A found address stays right: found libraries are kept loaded. (If a caller's library is unloaded
/// and another, with another runtime, is loaded in its place, it gets the first one's runtime. No
/// program has been seen to do that.)
struct Found {
    key: AtomicUsize,
    address: AtomicUsize,
}

const BUSY: usize = 1;
/// A power of two. Programs have a few dozen call sites.
const SLOTS: usize = 512;
/// Slots tried for a key; a key without a slot is looked up each time.
const PROBES: usize = 8;

static FOUND: [Found; SLOTS] =
    [const { Found { key: AtomicUsize::new(0), address: AtomicUsize::new(0) } }; SLOTS];

impl Runtime {
    /// The address of the real function, 0 where there is none.
    #[inline]
    fn find(self, function: Function) -> usize {
        // Code lies below 2^48 on both architectures. The function counts from 1, so that no key is
        // 0 or BUSY.
        let key = self.caller as usize ^ ((function as usize + 1) << 48);
        let hash = (key as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
        let first = &FOUND[hash as usize % SLOTS];
        if first.key.load(Ordering::Acquire) == key {
            return first.address.load(Ordering::Relaxed);
        }
        self.find_slowly(function, key, hash as usize)
    }

    #[cold]
    #[inline(never)]
    fn find_slowly(self, function: Function, key: usize, hash: usize) -> usize {
        let slots = (0..PROBES).map(|step| &FOUND[(hash + step) % SLOTS]);
        for slot in slots.clone() {
            if slot.key.load(Ordering::Acquire) == key {
                return slot.address.load(Ordering::Relaxed);
            }
        }
        let address = search(self.caller, function.symbol()) as usize;
        if address != 0 {
            for slot in slots {
                if slot.key.compare_exchange(0, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
                {
                    slot.address.store(address, Ordering::Relaxed);
                    slot.key.store(key, Ordering::Release);
                    break;
                }
            }
        }
        address
    }
}

/// The function that the caller would have called, null where there is none.
fn search(caller: *const c_void, symbol: &CStr) -> *mut c_void {
    // SAFETY: dlsym reads a NUL-terminated name. RTLD_NEXT is relative to the library of the call,
    // which is ours.
    let next = not_ours(unsafe { libc::dlsym(libc::RTLD_NEXT, symbol.as_ptr()) });
    let own = in_tree_of(caller, symbol);
    if next.is_null() {
        return if own.is_null() { in_any_runtime(symbol) } else { own };
    }
    // References carry the runtime's version, and ours satisfies them all: a caller linked with
    // another major version than the next runtime's would have skipped that one.
    match (runtime_version(next), runtime_version(own)) {
        (Some(one), Some(other)) if one != other => own,
        _ => next,
    }
}

/// The loaded object around an address.
fn object_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and fills `info` where it answers other than 0; zeroed it is
    // valid too.
    let (found, info) = unsafe { (libc::dladdr(address, info.as_mut_ptr()), info.assume_init()) };
    (found != 0 && !info.dli_fname.is_null()).then_some(info)
}

/// `address`, or null where it lies in this very library.
fn not_ours(address: *mut c_void) -> *mut c_void {
    let ours = object_of(search as *const c_void).map(|info| info.dli_fbase);
    let its = object_of(address).map(|info| info.dli_fbase);
    if its.is_some() && its == ours { ptr::null_mut() } else { address }
}

/// Whether the program's references to an exported symbol are bound to this library.
pub fn is_bound_to_us(symbol: &CStr) -> bool {
    // SAFETY: dlsym reads a NUL-terminated name.
    let first = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
    !first.is_null() && not_ours(first).is_null()
}

/// The file that the program's references to `symbol` are bound into.
pub fn file_of(symbol: &CStr) -> Option<&'static Path> {
    // SAFETY: dlsym reads a NUL-terminated name.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
    let object = (!address.is_null()).then(|| object_of(address))??;
    // SAFETY: the name of a loaded object, which stands as long as it is loaded: libraries of the
    // global scope are.
    let name = unsafe { CStr::from_ptr(object.dli_fname) };
    Some(Path::new(OsStr::from_bytes(name.to_bytes())))
}

/// Searches the object of `caller` and its dependencies.
fn in_tree_of(caller: *const c_void, symbol: &CStr) -> *mut c_void {
    match object_of(caller) {
        Some(object) => in_loaded(object.dli_fname, symbol),
        None => ptr::null_mut(),
    }
}

/// Searches a loaded library and its dependencies; loads nothing.
fn in_loaded(file: *const c_char, symbol: &CStr) -> *mut c_void {
    // SAFETY: `file` is the name of a loaded object, as the loader keeps it. The reference that the
    // handle holds is leaked, so that what is found stays loaded.
    unsafe {
        let handle = libc::dlopen(file, libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if handle.is_null() {
            return ptr::null_mut();
        }
        not_ours(libc::dlsym(handle, symbol.as_ptr()))
    }
}

/// The part of a runtime's file name after `libcudart.so.`, up to the first dot: its major version.
fn version_in(path: &CStr) -> Option<&[u8]> {
    let path = path.to_bytes();
    let name = path.rsplit(|&byte| byte == b'/').next()?;
    name.strip_prefix(b"libcudart.so.")?.split(|&byte| byte == b'.').next()
}

fn runtime_version(function: *mut c_void) -> Option<&'static [u8]> {
    let object = (!function.is_null()).then(|| object_of(function))??;
    // SAFETY: the name of a loaded object; the search that found the function keeps it loaded.
    version_in(unsafe { CStr::from_ptr(object.dli_fname) })
}

/// Searches every libcudart of the process, however loaded.
fn in_any_runtime(symbol: &CStr) -> *mut c_void {
    let mut files = Vec::new();
    objects::any(&mut |file| {
        if version_in(file).is_some() {
            files.push(file.to_owned());
        }
        false
    });
    let found = files.iter().map(|file| in_loaded(file.as_ptr(), symbol));
    found.into_iter().find(|address| !address.is_null()).unwrap_or(ptr::null_mut())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_s_version_is_in_its_file_name() {
        assert_eq!(version_in(c"/usr/lib/libcudart.so.12"), Some(&b"12"[..]));
        assert_eq!(version_in(c"libcudart.so.11.8.89"), Some(&b"11"[..]));
        assert_eq!(version_in(c"/usr/lib/libcudart.so"), None);
        assert_eq!(version_in(c"/libcudart.so.12/libphantom_cuda.so"), None);
        assert_eq!(version_in(c""), None);
    }

    #[test]
    fn a_process_without_a_runtime_gets_an_error_and_no_jump_into_nothing() {
        let runtime = Runtime::of(a_runtime_s_version_is_in_its_file_name as *const c_void);
        let mut device = -1;
        // SAFETY: there is no such function, so nothing is called.
        assert_eq!(unsafe { runtime.cudaGetDevice(&mut device) }, SYMBOL_NOT_FOUND);
        assert_eq!(device, -1);
    }

    #[test]
    fn the_zero_stream_of_per_thread_callers_is_the_thread_s() {
        assert_eq!([effective(true, 0), effective(true, 1), effective(true, 77)], [2, 1, 77]);
        assert_eq!([effective(false, 0), effective(false, 2)], [0, 2]);
    }

    #[test]
    fn symbols_are_the_functions_names() {
        assert_eq!(Function::cudaMalloc.symbol(), c"cudaMalloc");
        assert_eq!(Function::cudaRuntimeGetVersion.symbol(), c"cudaRuntimeGetVersion");
    }
}
