//! The calling thread's context, as the driver's functions see it: they act on the current context,
//! and only a device's primary one is served.

use super::real::{self, Context, Stream};
use crate::driver::StreamHandle;
use crate::heap::MAX_DEVICES;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// 0 and 1 are the legacy default stream, 2 is the calling thread's.
const LAST_DEFAULT_STREAM: Stream = 2;

/// The primary contexts, by device; 0: not known.
///
/// ```text
/// 0 -> context   primary(), of any thread; all find the same
/// context -> 0   forget(), before a reset
/// ```
static PRIMARY: [AtomicUsize; MAX_DEVICES as usize] =
    [const { AtomicUsize::new(0) }; MAX_DEVICES as usize];

/// A stream's handle in the heap.
#[inline]
pub fn handle(stream: Stream) -> StreamHandle {
    StreamHandle(stream)
}

/// Whether `stream` is a default stream, which can be neither created nor destroyed.
pub fn is_default_stream(stream: Stream) -> bool {
    stream <= LAST_DEFAULT_STREAM
}

/// The device of the current context, primary or not. No side effect.
pub fn device() -> Option<i64> {
    let mut device = -1;
    // SAFETY: writes one int.
    (unsafe { real::cuCtxGetDevice(&mut device) } == 0).then_some(i64::from(device))
}

/// The device whose primary context is current.
pub fn served_device() -> Option<i64> {
    let mut context = 0;
    // SAFETY: writes one context.
    if unsafe { real::cuCtxGetCurrent(&mut context) } != 0 || context == 0 {
        return None;
    }
    // Nearly always the context of the last call: then the second question is saved.
    if let Some(device) = PRIMARY.iter().position(|known| known.load(Ordering::Relaxed) == context)
    {
        return Some(device as i64);
    }
    let device = device()?;
    (primary(device) == Some(context)).then_some(device)
}

/// The device of the memory for `stream`; `None`: the stream belongs to no primary context, or the
/// driver does not know it.
pub fn device_of_stream(stream: Stream) -> Option<i64> {
    if is_default_stream(stream) {
        return served_device();
    }
    let mut context = 0;
    // SAFETY: the stream is the caller's, who promises that it is one; writes one context.
    if unsafe { real::cuStreamGetCtx(stream, &mut context) } != 0 {
        return None;
    }
    // The current device first: nearly always right.
    let current = device();
    let others = (0..devices()).map(i64::from);
    current.into_iter().chain(others).find(|&device| primary(device) == Some(context))
}

/// Whether `stream` captures, or the driver cannot report it.
pub fn may_capture(stream: Stream) -> bool {
    let mut status = 0;
    // SAFETY: the stream is the caller's; writes one status.
    unsafe { real::cuStreamIsCapturing(stream, &mut status) != 0 || status != 0 }
}

/// Whether `pool` is the default pool of `device`.
pub fn is_default_pool(pool: *mut c_void, device: i64) -> bool {
    let mut default = ptr::null_mut();
    // SAFETY: writes one pool.
    unsafe {
        real::cuDeviceGetDefaultMemPool(&mut default, device as c_int) == 0 && default == pool
    }
}

/// Whether `cuMemAllocAsync` allocates from the default pool of `device`; the program may have set
/// its own pool instead.
pub fn default_pool_is_current(device: i64) -> bool {
    let mut current = ptr::null_mut();
    // SAFETY: writes one pool.
    unsafe {
        real::cuDeviceGetMemPool(&mut current, device as c_int) == 0
            && is_default_pool(current, device)
    }
}

/// Forgets the primary context of a device before a reset.
pub fn forget(device: i64) {
    if let Some(known) = PRIMARY.get(device as usize) {
        known.store(0, Ordering::Relaxed);
    }
}

fn devices() -> u32 {
    let mut count = 0;
    // SAFETY: writes one int.
    let code = unsafe { real::cuDeviceGetCount(&mut count) };
    if code == 0 { u32::try_from(count).unwrap_or(0).min(MAX_DEVICES) } else { 0 }
}

/// The primary context of `device` if active: a comparison creates none.
fn primary(device: i64) -> Option<Context> {
    let known = PRIMARY.get(usize::try_from(device).ok()?)?;
    match known.load(Ordering::Relaxed) {
        0 => {}
        context => return Some(context),
    }
    let (mut flags, mut active, mut context) = (0, 0, 0);
    // SAFETY: each writes what its type says. The reference is never given back: the heap's driver
    // keeps one as well.
    unsafe {
        let asked = real::cuDevicePrimaryCtxGetState(device as c_int, &mut flags, &mut active) == 0;
        if !asked
            || active == 0
            || real::cuDevicePrimaryCtxRetain(&mut context, device as c_int) != 0
        {
            return None;
        }
    }
    known.store(context, Ordering::Relaxed);
    Some(context)
}
