//! torch's profiler, for the pluggable door: reports each malloc, free and out-of-memory as torch's
//! own allocator does. (At the native door the shim reports them.)
//!
//! It costs nothing otherwise: requests leave the hot path only while memory is profiled
//! ([`crate::heap::Heap::tell_of_blocks`]). torch's functions check themselves whether the calling
//! thread is profiled.

use super::fork;
use super::process::{GRUYERE_OK, GRUYERE_UNAVAILABLE, current, guarded};
use super::raise::symbol;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

/// `c10::Device`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i8,
    index: i8,
}

/// `c10::DeviceType::CUDA`.
const CUDA: i8 = 1;

type ReportUsage = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, Device);
type ReportRefusal = unsafe extern "C-unwind" fn(i64, usize, usize, Device);

/// torch's functions that report to the calling thread's profiler, if it has one.
struct Profiler {
    usage: ReportUsage,
    refusal: ReportRefusal,
}

/// torch's profiler; `None`: there is no torch in this process.
fn profiler() -> Option<&'static Profiler> {
    static FOUND: OnceLock<Option<Profiler>> = OnceLock::new();
    let find = || {
        let usage = symbol(c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
        let refusal = symbol(c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE");
        if usage.is_null() || refusal.is_null() {
            return None;
        }
        // SAFETY: each address is of the C++ function whose mangled name spells out the arguments
        // that its Rust type has. c10::Device is two bytes that are passed as C passes them.
        unsafe {
            Some(Profiler {
                usage: std::mem::transmute::<*mut c_void, ReportUsage>(usage),
                refusal: std::mem::transmute::<*mut c_void, ReportRefusal>(refusal),
            })
        }
    };
    FOUND.get_or_init(find).as_ref()
}

/// Turns reports to torch's profiler on (`wanted` is not 0) or off. While they are on, the library
/// reports each malloc, free and out-of-memory, as torch's own allocator does, and each takes some
/// microseconds: turn them on only while memory is profiled. Does not touch CUDA.
///
/// Returns 0, or -1 if the process has no torch, or the library cannot work in it.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_tell_profiler(wanted: c_int) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        if wanted != 0 && profiler().is_none() {
            return GRUYERE_UNAVAILABLE;
        }
        super::process::tell_of_blocks(wanted != 0);
        GRUYERE_OK
    })
}

/// A block that was allocated, or is about to be freed.
#[derive(Clone, Copy)]
pub(super) struct Told {
    bytes: u64,
    device: u32,
}

/// The report of the live block at `address`; `None` while memory is not profiled.
#[inline]
pub(super) fn block(address: u64) -> Option<Told> {
    let heap = current().filter(|heap| heap.tells_of_blocks())?;
    let block = guarded(None, || heap.owns(address))?;
    Some(Told { bytes: block.bytes, device: block.device })
}

/// Reports a new block.
///
/// Nothing with a destructor may be live in the frames below, and none of them may be
/// `catch_unwind`'s: torch's function may throw.
pub(super) fn came(address: u64, Told { bytes, device }: Told) {
    report(address, bytes as i64, device);
}

/// Reports a freed block; as [`came`].
pub(super) fn went(address: u64, Told { bytes, device }: Told) {
    report(address, -(bytes as i64), device);
}

fn report(address: u64, bytes: i64, device: u32) {
    let Some((allocated, reserved)) = guarded(None, || totals(device)) else { return };
    if let Some(profiler) = profiler() {
        // SAFETY: no lock of ours is held; it keeps the address as a number.
        unsafe {
            (profiler.usage)(address as *mut c_void, bytes, allocated, reserved, of(device));
        }
    }
}

/// Reports a refused request of `size` bytes; as [`came`].
pub(super) fn refused(size: u64, device: u32) {
    if !current().is_some_and(|heap| heap.tells_of_blocks()) {
        return;
    }
    let Some((allocated, reserved)) = guarded(None, || totals(device)) else { return };
    if let Some(profiler) = profiler() {
        // SAFETY: no lock of ours is held.
        unsafe { (profiler.refusal)(size as i64, allocated, reserved, of(device)) }
    }
}

fn of(device: u32) -> Device {
    Device { kind: CUDA, index: device as i8 }
}

/// A device's bytes allocated and reserved, as torch's statistics report them.
fn totals(device: u32) -> Option<(usize, usize)> {
    let numbers = current()?.torch_stats(i64::from(device)).ok()?;
    let allocated = numbers.blocks.allocated_bytes[0].current;
    Some((allocated as usize, numbers.held.reserved_bytes[0].current as usize))
}
