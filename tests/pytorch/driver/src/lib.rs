//! Replays a trace through the real libc10_cuda of the Python that has loaded this library, and through the model of it.
//!
//! Python calls the `torch_driver_*` functions by ctypes. The real allocator is reached the way torch's own code reaches it:
//! through its virtual functions ([`caching`]).

mod caching;
mod model;

use caching::CachingAllocator;
use gruyere_replay::trace::{Op, Trace};
use std::ffi::{CStr, c_char};
use std::path::Path;
use std::time::Instant;

/// What a replay measured.
#[repr(C)]
pub struct Measured {
    /// Mallocs and frees, those of 0 bytes left out.
    pub operations: u64,
    /// Host time of the whole loop, nanoseconds.
    pub nanoseconds: u64,
    /// The sum of what was live, each block rounded up to 512 bytes, at its highest.
    pub peak_live: u64,
}

/// Reads a trace. NULL where it cannot be read: the reason is on stderr.
///
/// # Safety
/// `path` is a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_driver_open(path: *const c_char) -> *mut Trace {
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned();
    match Trace::open(Path::new(&path)) {
        Ok(trace) => Box::into_raw(Box::new(trace)),
        Err(error) => {
            eprintln!("{error}");
            std::ptr::null_mut()
        }
    }
}

/// The number of streams, the default one included.
///
/// # Safety
/// `trace` came from [`torch_driver_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_driver_streams(trace: *const Trace) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { &*trace }.streams.len() as u32
}

/// Replays the trace's mallocs, frees and record_streams through the allocator that torch uses now, in order, without a pause.
/// 0 for success, 1 where the allocator cannot be found (said on stderr), 2 where it ran out of memory.
///
/// # Safety
/// `trace` came from [`torch_driver_open`]; `streams` points to as many CUDA streams as [`torch_driver_streams`] says, the first
/// being 0; `measured` may be written. torch is initialised for CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_driver_replay(
    trace: *const Trace,
    streams: *const usize,
    measured: *mut Measured,
) -> u32 {
    // SAFETY: the caller's promises.
    let (trace, measured) = unsafe { (&*trace, &mut *measured) };
    // SAFETY: the caller's promise.
    let streams = unsafe { std::slice::from_raw_parts(streams, trace.streams.len()) };
    let allocator = match CachingAllocator::find() {
        Ok(allocator) => allocator,
        Err(what) => {
            eprintln!("torch_driver: {what}");
            return 1;
        }
    };
    let mut addresses = vec![0_usize; trace.blocks()];
    let mut operations = 0;
    let start = Instant::now();
    for &op in &trace.ops {
        match op {
            Op::Alloc { size: 0, .. } => {}
            Op::Alloc { size, block, stream, .. } => {
                let address = allocator.malloc(size as usize, streams[stream as usize]);
                if address == 0 {
                    return 2;
                }
                addresses[block as usize] = address;
                operations += 1;
            }
            Op::Free { block } => {
                let address = addresses[block as usize];
                if address != 0 {
                    allocator.free(address);
                    operations += 1;
                }
            }
            Op::RecordStream { block, stream } => {
                let address = addresses[block as usize];
                if address != 0 {
                    allocator.record_stream(address, streams[stream as usize]);
                }
            }
            _ => {}
        }
    }
    measured.nanoseconds = start.elapsed().as_nanos() as u64;
    measured.operations = operations;
    measured.peak_live = trace.peak_live;
    0
}

/// The peak of physical bytes that the project's model of torch's allocator reaches on the trace, with room to spare.
/// 0 where the model fails: the reason is on stderr.
///
/// # Safety
/// `trace` came from [`torch_driver_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_driver_model_peak(
    trace: *const Trace,
    expandable: bool,
    capacity: u64,
) -> u64 {
    // SAFETY: the caller's promise.
    match model::peak(unsafe { &*trace }, expandable, capacity) {
        Ok(peak) => peak,
        Err(what) => {
            eprintln!("torch_driver: the model: {what}");
            0
        }
    }
}
