//! Contexts: one primary context per device, and a stack of current ones per thread.

use crate::abi::{Out, code};
use crate::books;
use crate::entry::{driver, runtime};
use crate::gpu::{failed, gpu};
use crate::owner;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*};

/// A `CUcontext`. 0: none.
pub type Context = usize;

/// Contexts look like pointers: BASE + device * STEP is a device's primary context, and its other
/// contexts lie whole ROUNDs above.
const BASE: usize = 0x6000_0000;
const STEP: usize = 0x100;
const ROUND: usize = 0x1_0000;

/// Maximal depth of a thread's stack.
const DEPTH: usize = 16;

/// A thread's stack of current contexts. Without a destructor, so it works until the thread ends.
#[derive(Clone, Copy)]
struct Stack {
    depth: usize,
    contexts: [Context; DEPTH],
}

thread_local! {
    static STACK: Cell<Stack> = const { Cell::new(Stack { depth: 0, contexts: [0; DEPTH] }) };
}

/// Retain counts of the primary contexts. 64 devices are enough.
static RETAINED: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];

/// By device: the runtime has used its primary context, which is active from then on without a
/// retain.
static IN_RUNTIME: [AtomicBool; 64] = [const { AtomicBool::new(false) }; 64];

/// Contexts created by `cuCtxCreate` so far.
static CREATED: AtomicUsize = AtomicUsize::new(0);

/// The primary context of `device`.
pub fn primary(device: u32) -> Context {
    BASE + device as usize * STEP
}

/// The device of a context; refuses anything else.
pub fn device_of(context: Context) -> Result<u32, u32> {
    let offset = context.checked_sub(BASE).ok_or(code::INVALID_CONTEXT)?;
    if offset % STEP != 0 {
        return Err(code::INVALID_CONTEXT);
    }
    let device = (offset % ROUND / STEP) as i32;
    gpu().device(device).map_err(|_| code::INVALID_CONTEXT)
}

fn current() -> Context {
    let stack = STACK.get();
    stack.depth.checked_sub(1).map_or(0, |top| stack.contexts[top])
}

/// Replaces the top of the thread's stack by `context` (0: none).
fn set(context: Context) {
    let mut stack = STACK.get();
    match (context, stack.depth) {
        (0, 0) => {}
        (0, _) => stack.depth -= 1,
        (_, 0) => {
            stack.contexts[0] = context;
            stack.depth = 1;
        }
        (_, depth) => stack.contexts[depth - 1] = context,
    }
    STACK.set(stack);
}

/// The device of the thread's current context, for driver calls.
pub fn driver_device() -> Result<u32, u32> {
    device_of(current())
}

/// The device of this thread's runtime calls: that of the current context. Without one, device 0's
/// primary context becomes current, as in the runtime.
pub fn runtime_device() -> u32 {
    driver_device().unwrap_or_else(|_| {
        use_primary(0);
        0
    })
}

/// On the creation of a context: checks the owner again, since a forked or waiting process may have
/// outlived its starter.
fn made() {
    owner::check();
    books::note_context();
}

/// The runtime makes a primary context current and thereby active.
fn use_primary(device: u32) {
    set(primary(device));
    if !IN_RUNTIME[device as usize].swap(true, Relaxed) {
        made();
    }
}

/// Whether the device's primary context is in use.
pub fn is_active(device: u32) -> bool {
    RETAINED[device as usize].load(Relaxed) > 0 || IN_RUNTIME[device as usize].load(Relaxed)
}

/// The device for a call on a stream: the current one, or any if none is current and the stream's
/// handle determines the device.
pub fn stream_device(stream: usize) -> Result<u32, u32> {
    match driver_device() {
        Ok(device) => Ok(device),
        Err(_) if stream > 2 => Ok(0),
        Err(code) => Err(code),
    }
}

driver! {
    fn cuDevicePrimaryCtxRetain(out: Out<Context>, device: i32) {
        let device = gpu().device(device)?;
        out.put(primary(device))?;
        made();
        RETAINED[device as usize].fetch_add(1, Relaxed);
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        let device = gpu().device(device)?;
        RETAINED[device as usize]
            .fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1))
            .map_err(|_| code::INVALID_CONTEXT)?;
        // The last release ends the context, and its memory with it. Whose memory is another
        // context's is not on the books: where there was one, all of it stays.
        if is_active(device) || CREATED.load(Relaxed) > 0 { Ok(()) } else { gpu().reset(device) }
    }

    fn cuDevicePrimaryCtxReset_v2(device: i32) {
        gpu().reset(gpu().device(device)?)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, _flags: u32) {
        gpu().device(device).map(|_| ())
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let device = gpu().device(device)?;
        flags.put_if_wanted(0);
        active.put(i32::from(is_active(device)))
    }

    fn cuCtxCreate_v2(out: Out<Context>, _flags: u32, device: i32) {
        create(out, device)
    }

    fn cuCtxCreate_v3(out: Out<Context>, _affinity: usize, _n: i32, _flags: u32, device: i32) {
        create(out, device)
    }

    fn cuCtxCreate_v4(out: Out<Context>, _parameters: usize, _flags: u32, device: i32) {
        create(out, device)
    }

    fn cuCtxDestroy_v2(context: Context) {
        device_of(context)?;
        if current() == context {
            set(0);
        }
        Ok(())
    }

    fn cuCtxGetCurrent(out: Out<Context>) {
        out.put(current())
    }

    fn cuCtxSetCurrent(context: Context) {
        if context != 0 {
            device_of(context)?;
        }
        set(context);
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: Context) {
        device_of(context)?;
        push(context)
    }

    fn cuCtxPopCurrent_v2(out: Out<Context>) {
        let mut stack = STACK.get();
        let top = stack.depth.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
        out.put_if_wanted(stack.contexts[top]);
        stack.depth = top;
        STACK.set(stack);
        Ok(())
    }

    fn cuCtxGetDevice(out: Out<i32>) {
        out.put(driver_device()? as i32)
    }

    fn cuCtxGetDevice_v2(out: Out<i32>, context: Context) {
        let device = if context == 0 { driver_device()? } else { device_of(context)? };
        out.put(device as i32)
    }

    fn cuCtxGetFlags(out: Out<u32>) {
        driver_device()?;
        out.put(0)
    }

    fn cuCtxGetId(context: Context, out: Out<u64>) {
        let context = if context == 0 { current() } else { context };
        device_of(context)?;
        out.put((context - BASE) as u64 + 1)
    }

    fn cuCtxGetApiVersion(context: Context, out: Out<u32>) {
        if context != 0 {
            device_of(context)?;
        }
        out.put(3020)
    }

    fn cuCtxGetLimit(out: Out<usize>, _limit: i32) {
        driver_device()?;
        out.put(1024)
    }

    fn cuCtxSetLimit(_limit: i32, _value: usize) {
        driver_device().map(|_| ())
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        driver_device()?;
        least.put_if_wanted(0);
        greatest.put_if_wanted(-5);
        Ok(())
    }

    fn cuCtxSynchronize() {
        gpu().device_synchronize(driver_device()?)
    }

    fn cuCtxSynchronize_v2(context: Context) {
        gpu().device_synchronize(device_of(context)?)
    }

    /// Records everything enqueued on any stream of the context. Drivers before 12.5 lack the
    /// function; with `PHANTOM_WITHOUT` it returns "not supported".
    fn cuCtxRecordEvent(context: Context, event: usize) {
        let device = if context == 0 { driver_device()? } else { device_of(context)? };
        gpu().sim.context_event_record(device, event).map_err(failed)
    }

    fn cuCtxEnablePeerAccess(context: Context, _flags: u32) {
        let (device, peer) = (driver_device()?, device_of(context)?);
        gpu().enable_peer(device, peer)
    }

    fn cuCtxDisablePeerAccess(context: Context) {
        device_of(context).map(|_| ())
    }
}

fn push(context: Context) -> Result<(), u32> {
    let mut stack = STACK.get();
    *stack.contexts.get_mut(stack.depth).ok_or(code::INVALID_CONTEXT)? = context;
    stack.depth += 1;
    STACK.set(stack);
    Ok(())
}

fn create(out: Out<Context>, device: i32) -> Result<(), u32> {
    let device = gpu().device(device)?;
    let context = primary(device) + ROUND * (1 + CREATED.fetch_add(1, Relaxed));
    out.put(context)?;
    made();
    push(context)
}

runtime! {
    fn cudaGetDevice(out: Out<i32>) {
        out.put(driver_device().unwrap_or(0) as i32)
    }

    fn cudaSetDevice(device: i32) {
        use_primary(gpu().device(device)?);
        Ok(())
    }

    fn cudaGetDeviceCount(out: Out<i32>) {
        out.put(gpu().device_count() as i32)?;
        if gpu().device_count() == 0 { Err(code::NO_DEVICE) } else { Ok(()) }
    }

    fn cudaDeviceSynchronize() {
        gpu().device_synchronize(runtime_device())
    }

    fn cudaDeviceReset() {
        gpu().reset(runtime_device())
    }

    fn cudaDeviceCanAccessPeer(out: Out<i32>, device: i32, peer: i32) {
        let (device, peer) = (gpu().device(device)?, gpu().device(peer)?);
        out.put(i32::from(gpu().can_access_peer(device, peer)?))
    }

    fn cudaDeviceEnablePeerAccess(peer: i32, _flags: u32) {
        let (device, peer) = (runtime_device(), gpu().device(peer)?);
        gpu().enable_peer(device, peer)
    }

    fn cudaDeviceGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        least.put_if_wanted(0);
        greatest.put_if_wanted(-5);
        Ok(())
    }

    fn cudaSetDeviceFlags(_flags: u32) {
        Ok(())
    }

    fn cudaInitDevice(device: i32, _device_flags: u32, _flags: u32) {
        gpu().device(device).map(|_| ())
    }

    fn cudaProfilerStart() { Ok(()) }
    fn cudaProfilerStop() { Ok(()) }

}
