//! The real allocator: `c10::cuda::CUDACachingAllocator`, called through its virtual functions.
//!
//! torch exports the pointer to the allocator in use, and the whole class of another allocator with
//! the same interface, `CUDAPluggableAllocator`: its virtual table and each of its functions by
//! name. Where a function's address stands in that table is its slot in every allocator's table, so
//! no slot number is written down here, and a torch that has moved them still works.

use gruyere::driver::{DeviceId, DevicePtr, StreamHandle};
use gruyere_replay::allocator::{AllocError, Allocator};
use std::ffi::{CStr, c_void};

const LIBTORCH: &CStr = c"libtorch_cuda.so";
const LIBC10: &CStr = c"libc10_cuda.so";
const ALLOCATOR: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";
const TABLE: &CStr = c"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE";
const RAW_ALLOC: &CStr =
    c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator21raw_alloc_with_streamEmP11CUstream_st";
const RAW_DELETE: &CStr =
    c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator10raw_deleteEPv";
const RECORD_STREAM: &CStr =
    c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator12recordStreamERKN3c107DataPtrENS3_4cuda10CUDAStreamE";
const RAW_DELETER: &CStr =
    c"_ZNK5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator11raw_deleterEv";

/// Allocates on the current stream and answers an exception with an error code: torch exports it
/// for compiled models.
const GUARDED_ALLOC: &CStr = c"aoti_torch_cuda_caching_allocator_raw_alloc";
const SET_STREAM: &CStr = c"_ZN3c104cuda20setCurrentCUDAStreamENS0_10CUDAStreamE";

/// More virtual functions than the class has; the search stays inside the library's read-only data.
const MOST_SLOTS: usize = 96;

/// `c10::Device`: CUDA is 1, then the index.
const CUDA_DEVICE_0: u64 = 1;

// The real functions may throw: an exception that leaves one ends the process at our own C
// boundary.
type RawAlloc = unsafe extern "C-unwind" fn(*mut c_void, usize, usize) -> usize;
type RawDelete = unsafe extern "C-unwind" fn(*mut c_void, usize);
type RecordStream = unsafe extern "C-unwind" fn(*mut c_void, *const DataPtr, u64, i64);
type GuardedAlloc = unsafe extern "C-unwind" fn(u64, *mut usize) -> i32;
type SetStream = unsafe extern "C-unwind" fn(u64, i64);
type RawDeleter = unsafe extern "C-unwind" fn(*mut c_void) -> usize;

/// `c10::DataPtr` as libstdc++ lays it out: the data, a `unique_ptr` with a function pointer for
/// its deleter, the device.
#[repr(C)]
struct DataPtr {
    data: usize,
    deleter: usize,
    context: usize,
    device: u64,
}

/// The allocator that torch uses now.
pub struct CachingAllocator {
    this: *mut c_void,
    raw_alloc: RawAlloc,
    raw_delete: RawDelete,
    record_stream: RecordStream,
    guarded_alloc: GuardedAlloc,
    set_stream: SetStream,
    /// What `recordStream` knows the allocator's own pointers by.
    deleter: usize,
}

/// A symbol of a library that the process has loaded.
fn symbol(library: &CStr, name: &CStr) -> Result<usize, String> {
    // SAFETY: RTLD_NOLOAD only finds what is loaded; both strings are NUL-terminated.
    let address = unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if handle.is_null() {
            return Err(format!("{} is not loaded", library.to_string_lossy()));
        }
        libc::dlsym(handle, name.as_ptr())
    };
    if address.is_null() {
        return Err(format!("{} has no {}", library.to_string_lossy(), name.to_string_lossy()));
    }
    Ok(address as usize)
}

/// The slot of the exported function `name`, and the entry there of the object's own table.
fn method(this: *const c_void, name: &CStr) -> Result<usize, String> {
    let function = symbol(LIBTORCH, name)?;
    // The table proper follows the offset to the top and the type.
    let table = symbol(LIBTORCH, TABLE)? as *const usize;
    for slot in 0..MOST_SLOTS {
        // SAFETY: the tables of the library lie together in its read-only data, far more than
        // MOST_SLOTS words of it.
        if unsafe { table.add(2 + slot).read() } == function {
            // SAFETY: `this` is a C++ object with virtual functions, of a class with the same
            // interface: its first word is its table, which has the slot.
            return Ok(unsafe { this.cast::<*const usize>().read().add(slot).read() });
        }
    }
    Err(format!("{} is not in the table of its class", name.to_string_lossy()))
}

impl CachingAllocator {
    /// Finds the allocator in this process.
    pub fn find() -> Result<Self, String> {
        let place = symbol(LIBC10, ALLOCATOR)? as *const *mut c_void;
        // SAFETY: the variable is a std::atomic of a pointer, which is laid out as the pointer;
        // torch has set it long ago.
        let this = unsafe { place.read() };
        if this.is_null() {
            return Err("torch has no CUDA allocator yet".to_owned());
        }
        // SAFETY: each function has the type of its C++ declaration: the object comes first, a
        // reference is a pointer, and a CUDAStream (16 bytes, trivial) goes in two registers.
        unsafe {
            let raw_deleter = std::mem::transmute::<usize, RawDeleter>(method(this, RAW_DELETER)?);
            Ok(Self {
                this,
                raw_alloc: std::mem::transmute::<usize, RawAlloc>(method(this, RAW_ALLOC)?),
                raw_delete: std::mem::transmute::<usize, RawDelete>(method(this, RAW_DELETE)?),
                record_stream: std::mem::transmute::<usize, RecordStream>(method(
                    this,
                    RECORD_STREAM,
                )?),
                guarded_alloc: std::mem::transmute::<usize, GuardedAlloc>(symbol(
                    LIBTORCH,
                    GUARDED_ALLOC,
                )?),
                set_stream: std::mem::transmute::<usize, SetStream>(symbol(LIBC10, SET_STREAM)?),
                deleter: raw_deleter(this),
            })
        }
    }

    /// Allocates for a stream.
    pub fn malloc(&self, bytes: usize, stream: usize) -> usize {
        // SAFETY: as `find` says.
        unsafe { (self.raw_alloc)(self.this, bytes, stream) }
    }

    /// Frees.
    pub fn free(&self, address: usize) {
        // SAFETY: as `find` says; the address came from `malloc` and was not freed.
        unsafe { (self.raw_delete)(self.this, address) }
    }

    /// Notes that `stream` uses the block.
    pub fn record_stream(&self, address: usize, stream: usize) {
        let pointer = DataPtr {
            data: address,
            deleter: self.deleter,
            context: address,
            device: CUDA_DEVICE_0,
        };
        // SAFETY: as `find` says. A stream that torch did not make is named by its handle
        // (c10::cuda::CUDAStream::stream).
        unsafe { (self.record_stream)(self.this, &raw const pointer, CUDA_DEVICE_0, stream as i64) }
    }
}

/// As the engine of the replay sees it: running out of memory is an answer.
impl Allocator for CachingAllocator {
    fn name(&self) -> &str {
        "the real torch"
    }

    fn malloc(
        &mut self,
        size: u64,
        _: DeviceId,
        stream: StreamHandle,
    ) -> Result<DevicePtr, AllocError> {
        if size == 0 {
            return Ok(0);
        }
        let mut address = 0;
        // SAFETY: as `find` says; both functions are C's or take what C would.
        let code = unsafe {
            (self.set_stream)(CUDA_DEVICE_0, stream.0 as i64);
            (self.guarded_alloc)(size, &raw mut address)
        };
        if code == 0 { Ok(address as DevicePtr) } else { Err(AllocError::OutOfMemory) }
    }

    fn free(
        &mut self,
        address: DevicePtr,
        _: u64,
        _: DeviceId,
        _: StreamHandle,
    ) -> Result<(), AllocError> {
        if address != 0 {
            CachingAllocator::free(self, address as usize);
        }
        Ok(())
    }

    fn record_stream(
        &mut self,
        address: DevicePtr,
        stream: StreamHandle,
    ) -> Result<(), AllocError> {
        if address != 0 {
            CachingAllocator::record_stream(self, address as usize, stream.0);
        }
        Ok(())
    }

    fn release(&mut self) -> Result<(), AllocError> {
        Err(AllocError::Setup("the replay gives nothing back".to_owned()))
    }
}
