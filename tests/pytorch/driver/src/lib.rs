//! Replays a trace through the real libc10_cuda of the Python that has loaded this library, and
//! through the model of it.
//!
//! Python calls the `torch_driver_*` functions by ctypes. The real allocator is reached the way
//! torch's own code reaches it: through its virtual functions ([`caching`]).

mod caching;
mod model;
mod pace;
mod stage;

use caching::CachingAllocator;
use gruyere_replay::engine::{Blind, End, replay};
use gruyere_replay::stage::{Charge, Setup, Stage};
use gruyere_replay::trace::{Op, Trace};
use pace::{Functions, Pass, Who};
use stage::AbiStage;
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

/// Replays the trace's mallocs, frees and record_streams through the allocator that torch uses now,
/// in order, without a pause. 0 for success, 1 where the allocator cannot be found (said on
/// stderr), 2 where it ran out of memory.
///
/// # Safety
/// `trace` came from [`torch_driver_open`]; `streams` points to as many CUDA streams as
/// [`torch_driver_streams`] says, the first being 0; `measured` may be written. torch is
/// initialised for CUDA.
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

/// One timed pass over the trace's mallocs, frees, record_streams and steps, which frees all it
/// allocates: through the allocator that torch uses now (`who` is 0), through `gruyere` (1), or
/// through nobody (2: the loop alone). 0 for success, else the reason is on stderr.
///
/// # Safety
/// `trace` and `streams` are as for [`torch_driver_replay`]; `gruyere` points to functions of those
/// types where `who` is 1; `pass` may be written. torch is initialised for CUDA where `who` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_driver_pass(
    trace: *const Trace,
    streams: *const usize,
    who: u32,
    gruyere: *const Functions,
    pass: *mut Pass,
) -> u32 {
    // SAFETY: the caller's promises.
    let (trace, pass) = unsafe { (&*trace, &mut *pass) };
    // SAFETY: the caller's promise.
    let streams = unsafe { std::slice::from_raw_parts(streams, trace.streams.len()) };
    let who = match who {
        0 => Who::Torch,
        // SAFETY: the caller's promise.
        1 => Who::Gruyere(unsafe { *gruyere }),
        _ => Who::Nobody,
    };
    match pace::pass(trace, streams, who) {
        Ok(known) => {
            *pass = known;
            0
        }
        Err(what) => {
            eprintln!("torch_driver: {what}");
            1
        }
    }
}

/// How a replay under the virtual clock ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Operations of the trace that were served: all of them, or those before the one that ran out
    /// of memory.
    pub reached: u64,
    /// The peak of physical bytes held.
    pub held_peak: u64,
    /// Host time of the replay, virtual nanoseconds.
    pub host: u64,
    /// When the device was done, virtual nanoseconds.
    pub device_end: u64,
}

impl Outcome {
    fn new(end: &End, trace: &Trace, held_peak: u64, (host, device_end): (u64, u64)) -> Self {
        let reached = match end {
            End::Completed => trace.ops.len(),
            End::OutOfMemory { op } => *op,
        };
        Self { reached: reached as u64, held_peak, host, device_end }
    }
}

/// How the device of a replay is set up: as the phantom's `PHANTOM_MEMORY`, `PHANTOM_KERNEL_NS` and
/// `PHANTOM_COSTS` say for the real allocator, and as this says for the model.
fn setup(capacity: u64, kernel_ns: u64, costs: u32) -> Setup {
    let charge = match costs {
        0 => Charge::Nothing,
        1 => Charge::Program,
        _ => Charge::DriverCalls,
    };
    Setup { kernel_ns, charge, ..Setup::instant(capacity) }
}

fn answer(result: Result<Outcome, String>, outcome: &mut Outcome) -> u32 {
    match result {
        Ok(known) => {
            *outcome = known;
            0
        }
        Err(what) => {
            eprintln!("torch_driver: {what}");
            1
        }
    }
}

/// Replays the whole trace, the program's kernels, events and waits included, through the allocator
/// that torch uses now. Mallocs and frees cost the host time where `charged`. 0 for success, else
/// the reason is on stderr.
///
/// # Safety
/// `trace` came from [`torch_driver_open`] and names one device; `outcome` may be written. torch is
/// initialised for CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_driver_run_real(
    trace: *const Trace,
    charged: bool,
    outcome: *mut Outcome,
) -> u32 {
    // SAFETY: the caller's promises.
    let (trace, outcome) = unsafe { (&*trace, &mut *outcome) };
    let run = || {
        let mut stage = AbiStage::new(trace, charged);
        let mut allocator = CachingAllocator::find()?;
        let (start, _) = stage.time();
        let end = replay(trace, &mut stage, &mut allocator, &mut Blind)
            .map_err(|error| error.to_string())?;
        let (now, device_end) = stage.time();
        Ok(Outcome::new(&end, trace, stage.held_peak(), (now - start, device_end)))
    };
    answer(run(), outcome)
}

/// Replays the whole trace through the model of torch's allocator on a device of `capacity` bytes
/// whose kernels take `kernel_ns`; `costs` is 0 for none, 1 for launches, 2 for driver calls too. 0
/// for success, else the reason is on stderr.
///
/// # Safety
/// `trace` came from [`torch_driver_open`]; `outcome` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_driver_run_model(
    trace: *const Trace,
    expandable: bool,
    capacity: u64,
    kernel_ns: u64,
    costs: u32,
    outcome: *mut Outcome,
) -> u32 {
    // SAFETY: the caller's promises.
    let (trace, outcome) = unsafe { (&*trace, &mut *outcome) };
    answer(model::run(trace, expandable, setup(capacity, kernel_ns, costs)), outcome)
}

/// The smallest device on which the model completes the trace's allocator calls, nothing taking
/// time. 0: see stderr.
///
/// # Safety
/// `trace` came from [`torch_driver_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_driver_model_fit(trace: *const Trace, expandable: bool) -> u64 {
    // SAFETY: the caller's promise.
    model::fit(unsafe { &*trace }, expandable).unwrap_or_else(|what| {
        eprintln!("torch_driver: {what}");
        0
    })
}
