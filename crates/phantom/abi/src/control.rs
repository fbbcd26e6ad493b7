//! Control functions for tests: `phantom_*`, for ctypes. Codes are `CUresult`s, 0 for success.

use crate::abi::{Answer, Text, code};
use crate::context::stream_device;
use crate::gpu::{failed, gpu, try_gpu};
use crate::{books, graph, process, sharing};
use gruyere_phantom::{CallKind, Caller, DeviceBooks, Injection, Source};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

fn answer(body: impl FnOnce() -> Answer) -> u32 {
    catch_unwind(AssertUnwindSafe(body)).map_or(code::UNKNOWN, |answer| answer.err().unwrap_or(0))
}

/// A number from a device's books; 0 before initialisation.
fn of_device(device: u32, read: impl FnOnce(DeviceBooks) -> u64) -> u64 {
    try_gpu().filter(|gpu| device < gpu.device_count()).map_or(0, |gpu| read(gpu.sim.books(device)))
}

/// Initialises CUDA without a CUDA call.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_initialize() -> u32 {
    answer(|| {
        process::initialize();
        Ok(())
    })
}

/// 1 if all `bytes` at `address` on a device are known (`PHANTOM_VALUES`): copied from the host, or
/// written by it in place of a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_is_known(address: u64, bytes: u64) -> u32 {
    let values = try_gpu().and_then(|gpu| gpu.values.as_ref());
    values.is_some_and(|values| values.are_known(address, bytes)).into()
}

/// All `bytes` at `address` on a device are known (`PHANTOM_VALUES`): the caller has written them
/// there, in place of a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_written(address: u64, bytes: u64) {
    let Some(gpu) = try_gpu() else { return };
    if let Some(values) = &gpu.values
        && gpu.sim.is_backed(address, bytes)
    {
        values.written(address, bytes);
    }
}

/// The host reads integers of `width` bytes from `low` to `high`, less one, in the `bytes` at
/// `address` on a device (`PHANTOM_VALUES`): the result of an operator that computes indices.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_limit(address: u64, bytes: u64, width: u32, low: i64, high: i64) {
    let Some(gpu) = try_gpu() else { return };
    let Some(values) = &gpu.values else { return };
    if !gpu.sim.is_backed(address, bytes) || !matches!(width, 1 | 2 | 4 | 8) || low >= high {
        return;
    }
    let width = width as usize;
    let bytes = (bytes as usize).min(gpu.copy_limit) / width * width;
    // SAFETY: the range is backed, so it lies in our window, which is writable.
    let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) };
    values.limit(memory, address, gpu.window.0, width, low..high);
}

/// The host's clock, virtual nanoseconds.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_host_time() -> u64 {
    try_gpu().map_or(0, |gpu| gpu.sim.host_time().now)
}

/// Physical bytes held on `device` now.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_physical(device: u32) -> u64 {
    of_device(device, |books| books.physical)
}

/// The highest value since the last reset.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_physical_peak(device: u32) -> u64 {
    of_device(device, |books| books.physical_peak)
}

/// Physical bytes in plain allocations (`cuMemAlloc`, `cudaMalloc`).
#[unsafe(no_mangle)]
pub extern "C" fn phantom_plain(device: u32) -> u64 {
    of_device(device, |books| books.in_plain)
}

/// Physical bytes in pools.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_pools(device: u32) -> u64 {
    of_device(device, |books| books.in_pools)
}

/// Physical bytes in VMM handles.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_handles(device: u32) -> u64 {
    of_device(device, |books| books.in_handles)
}

/// Resets the peaks of every device to the current values.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_reset_peaks() {
    if let Some(gpu) = try_gpu() {
        (0..gpu.device_count()).for_each(|device| gpu.sim.reset_peak(device));
    }
}

/// Misuses refused so far.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_misuses() -> u64 {
    try_gpu().map_or(0, |gpu| gpu.sim.misuses().len() as u64)
}

/// Calls of forked children.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_forked_calls() -> u64 {
    process::forked_calls()
}

/// Leaves `bytes` of `device` to this process from now on, at most its configured memory: others
/// hold the rest.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_set_capacity(device: u32, bytes: u64) -> u32 {
    answer(|| {
        process::initialize();
        gpu().set_capacity(gpu().device(device as i32)?, bytes)
    })
}

/// The handle types (a mask of `CUmemAllocationHandleType`) of the memory mapped at `address`, plus
/// 256 if created for RDMA; -1: nothing is mapped there.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_created_as(address: u64) -> i32 {
    let mapped =
        try_gpu().and_then(|gpu| gpu.sim.backing(address, 1).first().map(|piece| piece.source));
    let Some(Source::Mapping(handle)) = mapped else { return -1 };
    sharing::of(handle)
        .map_or(-1, |created| created.handle_types as i32 | i32::from(created.rdma) << 8)
}

fn kind_named(name: &str) -> Option<CallKind> {
    CallKind::ALL.iter().copied().find(|kind| kind.name() == name)
}

/// Fails the `nth` call of a kind from now on (by the driver's name: "cuMemCreate"; NULL: any kind)
/// with code `with`, and all later ones too if `from_then_on` is not 0.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_fail(call: Text, nth: u64, with: u32, from_then_on: i32) -> u32 {
    answer(|| {
        process::initialize();
        let kind = match call.get() {
            Err(_) => None,
            Ok(name) => Some(name.to_str().ok().and_then(kind_named).ok_or(code::INVALID_VALUE)?),
        };
        gpu().sim.inject(Injection { kind, nth, code: with, from_then_on: from_then_on != 0 });
        Ok(())
    })
}

/// Disarms the faults of [`phantom_fail`].
#[unsafe(no_mangle)]
pub extern "C" fn phantom_clear_failures() {
    if let Some(gpu) = try_gpu() {
        gpu.sim.clear_injections();
    }
}

/// The number of simulated calls of a kind, by the driver's name, for all callers.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_calls(call: Text) -> u64 {
    let kind = call.get().ok().and_then(|name| name.to_str().ok()).and_then(kind_named);
    let (Some(gpu), Some(kind)) = (try_gpu(), kind) else { return 0 };
    [Caller::Allocator, Caller::Program].iter().map(|&caller| gpu.sim.counts(caller).of(kind)).sum()
}

/// Launches `count` kernels of `PHANTOM_KERNEL_NS` on `stream`, as the program would.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_launch(stream: usize, count: u64) -> u32 {
    answer(|| gruyere_phantom::as_program(|| gpu().launch_many(stream, count)))
}

/// `stream` for [`phantom_owns`]: any, as for memory of `cudaMalloc`.
const EVERY_STREAM: usize = usize::MAX;

/// With `PHANTOM_ORACLE=on`: the program got `bytes` at `address`, usable in the order of `stream`,
/// or (all bits set) by any stream at once. Call after the allocation returns.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_owns(address: u64, bytes: u64, stream: usize) {
    if let Some(gpu) = try_gpu() {
        gpu.sim.owns(address, bytes, (stream != EVERY_STREAM).then_some(stream));
    }
}

/// The program frees the block at `address`. Call before the call that frees it.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_disowns(address: u64) {
    if let Some(gpu) = try_gpu() {
        gpu.sim.disowns(address);
    }
}

/// Bytes of the program's blocks.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_owned() -> u64 {
    try_gpu().map_or(0, |gpu| gpu.sim.owned().1)
}

/// Launches a kernel of `PHANTOM_KERNEL_NS` on `stream` that reads and writes `bytes` at `address`,
/// as the program would.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_touch(stream: usize, address: u64, bytes: u64) -> u32 {
    answer(|| gruyere_phantom::as_program(|| gpu().touch(stream, address, bytes)))
}

/// The number of the oracle's findings so far, each named on stderr. All bits set if the oracle is
/// off (`PHANTOM_ORACLE`).
#[unsafe(no_mangle)]
pub extern "C" fn phantom_hazards() -> u64 {
    match try_gpu() {
        Some(gpu) if gpu.sim.has_oracle() => gpu.sim.fault_count(),
        _ => u64::MAX,
    }
}

/// The program's host works for `ns` nanoseconds of the virtual clock.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_host_spend(ns: u64) {
    if let Some(gpu) = try_gpu() {
        gpu.sim.host_spend(ns);
    }
}

/// The host's virtual clock, nanoseconds.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_host_now() -> u64 {
    try_gpu().map_or(0, |gpu| gpu.sim.host_time().now)
}

/// The end of all work of all devices, virtual nanoseconds.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_device_end() -> u64 {
    try_gpu().map_or(0, |gpu| gpu.sim.host_time().device_end)
}

/// Begins a capture on `stream` (mode 0 global, 1 of this thread, 2 relaxed), as the program would.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_begin_capture(stream: usize, mode: u32) -> u32 {
    answer(|| {
        gruyere_phantom::as_program(|| {
            graph::begin(stream_device(stream).unwrap_or(0), stream, mode)
        })
    })
}

/// Ends the capture begun on `stream` and drops its graph. Returns the capture's error if it had
/// failed.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_end_capture(stream: usize) -> u32 {
    answer(|| {
        gruyere_phantom::as_program(|| {
            let device = stream_device(stream).unwrap_or(0);
            let graph = gpu().sim.end_capture(device, stream).map_err(failed)?;
            gpu().sim.graph_destroy(device, graph).map_err(failed)
        })
    })
}

/// Writes the books now, to `path` or (NULL) to the file of `PHANTOM_BOOKS`.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_write_books(path: Text) -> u32 {
    answer(|| {
        let path = match path.get() {
            Ok(name) => Path::new(OsStr::from_bytes(name.to_bytes())).to_owned(),
            Err(_) => books::file().ok_or(code::NOT_FOUND)?,
        };
        books::write_to(&path).map_err(|_| code::UNKNOWN)
    })
}
