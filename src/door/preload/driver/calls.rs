//! The functions handed out in place of the driver's: each decides what serves the call.
#![allow(non_snake_case)]

use super::super::later::forbid_waits_before;
use super::super::leave::saw_a_call;
use super::super::runtime::{AccessDesc, effective};
use super::super::way::{Way, way};
use super::super::whose::is_ours_at_exit;
use super::context::handle;
use super::real::{self, AllocationProp, CuResult, DevicePtr, Function, Stream};
use super::{manage, observe};
use crate::driver::StreamHandle;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

/// Our replacement of a function of the driver's, if there is one.
pub fn of(function: Function) -> Option<*const c_void> {
    Some(match function {
        Function::cuMemAlloc_v2 => malloc as *const c_void,
        Function::cuMemFree_v2 => free as *const c_void,
        Function::cuMemAllocPitch_v2 => malloc_pitch as *const c_void,
        Function::cuMemGetInfo_v2 => mem_get_info as *const c_void,
        Function::cuMemAllocAsync => malloc_async::<false> as *const c_void,
        Function::cuMemAllocAsync_ptsz => malloc_async::<true> as *const c_void,
        Function::cuMemFreeAsync => free_async::<false> as *const c_void,
        Function::cuMemFreeAsync_ptsz => free_async::<true> as *const c_void,
        Function::cuMemAllocFromPoolAsync => malloc_from_pool_async::<false> as *const c_void,
        Function::cuMemAllocFromPoolAsync_ptsz => malloc_from_pool_async::<true> as *const c_void,
        Function::cuCtxSynchronize => ctx_synchronize as *const c_void,
        Function::cuStreamDestroy_v2 => stream_destroy as *const c_void,
        Function::cuStreamBeginCapture_v2 => begin_capture::<false> as *const c_void,
        Function::cuStreamBeginCapture_v2_ptsz => begin_capture::<true> as *const c_void,
        Function::cuStreamBeginCaptureToGraph => begin_capture_to_graph::<false> as *const c_void,
        Function::cuStreamBeginCaptureToGraph_ptsz => {
            begin_capture_to_graph::<true> as *const c_void
        }
        Function::cuStreamEndCapture => end_capture::<false> as *const c_void,
        Function::cuStreamEndCapture_ptsz => end_capture::<true> as *const c_void,
        Function::cuIpcGetMemHandle => ipc_get_mem_handle as *const c_void,
        Function::cuMemPoolSetAccess => pool_set_access as *const c_void,
        Function::cuDevicePrimaryCtxReset_v2 => primary_ctx_reset as *const c_void,
        Function::cuMemCreate => mem_create as *const c_void,
        Function::cuMemRelease => mem_release as *const c_void,
        Function::cuMemMap => mem_map as *const c_void,
        Function::cuMemUnmap => mem_unmap as *const c_void,
        Function::cuLaunchHostFunc => launch_host_func::<false> as *const c_void,
        Function::cuLaunchHostFunc_ptsz => launch_host_func::<true> as *const c_void,
        Function::cuLaunchHostFunc_v2 => launch_host_func_v2::<false> as *const c_void,
        Function::cuLaunchHostFunc_v2_ptsz => launch_host_func_v2::<true> as *const c_void,
        Function::cuStreamAddCallback => stream_add_callback::<false> as *const c_void,
        Function::cuStreamAddCallback_ptsz => stream_add_callback::<true> as *const c_void,
        Function::cuStreamWaitValue32 => stream_wait_value_32::<false> as *const c_void,
        Function::cuStreamWaitValue32_ptsz => stream_wait_value_32::<true> as *const c_void,
        Function::cuStreamWaitValue32_v2 => stream_wait_value_32_v2::<false> as *const c_void,
        Function::cuStreamWaitValue32_v2_ptsz => stream_wait_value_32_v2::<true> as *const c_void,
        Function::cuStreamWaitValue64 => stream_wait_value_64::<false> as *const c_void,
        Function::cuStreamWaitValue64_ptsz => stream_wait_value_64::<true> as *const c_void,
        Function::cuStreamWaitValue64_v2 => stream_wait_value_64_v2::<false> as *const c_void,
        Function::cuStreamWaitValue64_v2_ptsz => stream_wait_value_64_v2::<true> as *const c_void,
        Function::cuStreamBatchMemOp => stream_batch_mem_op::<false> as *const c_void,
        Function::cuStreamBatchMemOp_ptsz => stream_batch_mem_op::<true> as *const c_void,
        Function::cuStreamBatchMemOp_v2 => stream_batch_mem_op_v2::<false> as *const c_void,
        Function::cuStreamBatchMemOp_v2_ptsz => stream_batch_mem_op_v2::<true> as *const c_void,
        Function::cuGraphAddHostNode => graph_add_host_node as *const c_void,
        Function::cuGraphAddBatchMemOpNode => graph_add_batch_mem_op_node as *const c_void,
        _ => return None,
    })
}

// SAFETY of every body below: the program alone calls it, and its arguments keep the promises of
// the CUDA function of that name; they go to the real function, or to its replacement here, which
// asks for no more.

unsafe extern "C" fn malloc(out: *mut DevicePtr, bytes: usize) -> CuResult {
    saw_a_call();
    // SAFETY: as above.
    let real = || unsafe { real::cuMemAlloc_v2(out, bytes) };
    match way() {
        // SAFETY: as above.
        Way::Manage(_inside) => unsafe { manage::malloc(out, bytes, real) },
        // SAFETY: as above.
        Way::Observe(_inside) => unsafe {
            observe::allocated(real(), out, bytes, StreamHandle::ALL_STREAMS)
        },
        Way::Leaving(_) | Way::Through => real(),
    }
}

unsafe extern "C" fn malloc_pitch(
    out: *mut DevicePtr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CuResult {
    saw_a_call();
    // SAFETY: as above.
    let real = || unsafe { real::cuMemAllocPitch_v2(out, pitch, width, height, element) };
    match way() {
        // SAFETY: as above.
        Way::Manage(_inside) => unsafe {
            manage::malloc_pitch(out, pitch, width, height, element, real)
        },
        Way::Observe(_inside) => {
            let code = real();
            // SAFETY: as above: the real function has written the pitch where it succeeded.
            let bytes = if code == 0 { unsafe { *pitch }.saturating_mul(height) } else { 0 };
            // SAFETY: as above.
            unsafe { observe::allocated(code, out, bytes, StreamHandle::ALL_STREAMS) }
        }
        Way::Leaving(_) | Way::Through => real(),
    }
}

unsafe extern "C" fn free(address: DevicePtr) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe { real::cuMemFree_v2(address) };
    match way() {
        Way::Manage(_inside) => manage::free(address, real),
        Way::Observe(_inside) => {
            observe::freeing(address, StreamHandle::ALL_STREAMS);
            real()
        }
        Way::Leaving(_inside) if is_ours_at_exit(address) => 0,
        Way::Leaving(_) | Way::Through => real(),
    }
}

unsafe extern "C" fn malloc_async<const PER_THREAD: bool>(
    out: *mut DevicePtr,
    bytes: usize,
    stream: Stream,
) -> CuResult {
    saw_a_call();
    // SAFETY: as above.
    let real = || unsafe {
        if PER_THREAD {
            real::cuMemAllocAsync_ptsz(out, bytes, stream)
        } else {
            real::cuMemAllocAsync(out, bytes, stream)
        }
    };
    let on = effective(PER_THREAD, stream);
    match way() {
        // SAFETY: as above.
        Way::Manage(_inside) => unsafe { manage::malloc_async(out, bytes, None, on, real) },
        // SAFETY: as above.
        Way::Observe(_inside) => unsafe { observe::allocated(real(), out, bytes, handle(on)) },
        Way::Leaving(_) | Way::Through => real(),
    }
}

unsafe extern "C" fn malloc_from_pool_async<const PER_THREAD: bool>(
    out: *mut DevicePtr,
    bytes: usize,
    pool: *mut c_void,
    stream: Stream,
) -> CuResult {
    saw_a_call();
    // SAFETY: as above.
    let real = || unsafe {
        if PER_THREAD {
            real::cuMemAllocFromPoolAsync_ptsz(out, bytes, pool, stream)
        } else {
            real::cuMemAllocFromPoolAsync(out, bytes, pool, stream)
        }
    };
    let on = effective(PER_THREAD, stream);
    match way() {
        // SAFETY: as above.
        Way::Manage(_inside) => unsafe { manage::malloc_async(out, bytes, Some(pool), on, real) },
        // SAFETY: as above.
        Way::Observe(_inside) => unsafe { observe::allocated(real(), out, bytes, handle(on)) },
        Way::Leaving(_) | Way::Through => real(),
    }
}

unsafe extern "C" fn free_async<const PER_THREAD: bool>(
    address: DevicePtr,
    stream: Stream,
) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe {
        if PER_THREAD {
            real::cuMemFreeAsync_ptsz(address, stream)
        } else {
            real::cuMemFreeAsync(address, stream)
        }
    };
    let on = effective(PER_THREAD, stream);
    match way() {
        Way::Manage(_inside) => manage::free_async(address, on, real),
        Way::Observe(_inside) => {
            observe::freeing(address, handle(on));
            real()
        }
        Way::Leaving(_inside) if is_ours_at_exit(address) => 0,
        Way::Leaving(_) | Way::Through => real(),
    }
}

unsafe extern "C" fn mem_get_info(free: *mut usize, total: *mut usize) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe { real::cuMemGetInfo_v2(free, total) };
    match way() {
        // SAFETY: as above.
        Way::Manage(_inside) => unsafe { manage::mem_get_info(free, total, real) },
        _ => real(),
    }
}

unsafe extern "C" fn ctx_synchronize() -> CuResult {
    // SAFETY: it takes nothing.
    let real = || unsafe { real::cuCtxSynchronize() };
    match way() {
        Way::Manage(_inside) => manage::ctx_synchronize(real),
        _ => real(),
    }
}

unsafe extern "C" fn stream_destroy(stream: Stream) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe { real::cuStreamDestroy_v2(stream) };
    match way() {
        Way::Manage(_inside) => manage::stream_destroy(stream, real),
        _ => real(),
    }
}

unsafe extern "C" fn begin_capture<const PER_THREAD: bool>(
    stream: Stream,
    mode: c_uint,
) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe {
        if PER_THREAD {
            real::cuStreamBeginCapture_v2_ptsz(stream, mode)
        } else {
            real::cuStreamBeginCapture_v2(stream, mode)
        }
    };
    match way() {
        Way::Manage(_inside) => manage::begin_capture(effective(PER_THREAD, stream), real),
        _ => real(),
    }
}

unsafe extern "C" fn begin_capture_to_graph<const PER_THREAD: bool>(
    stream: Stream,
    graph: *mut c_void,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: c_uint,
) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe {
        if PER_THREAD {
            real::cuStreamBeginCaptureToGraph_ptsz(stream, graph, dependencies, data, count, mode)
        } else {
            real::cuStreamBeginCaptureToGraph(stream, graph, dependencies, data, count, mode)
        }
    };
    match way() {
        Way::Manage(_inside) => manage::begin_capture(effective(PER_THREAD, stream), real),
        _ => real(),
    }
}

unsafe extern "C" fn end_capture<const PER_THREAD: bool>(
    stream: Stream,
    graph: *mut *mut c_void,
) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe {
        if PER_THREAD {
            real::cuStreamEndCapture_ptsz(stream, graph)
        } else {
            real::cuStreamEndCapture(stream, graph)
        }
    };
    match way() {
        Way::Manage(_inside) => manage::end_capture(effective(PER_THREAD, stream), real),
        _ => real(),
    }
}

unsafe extern "C" fn ipc_get_mem_handle(out: *mut c_void, address: DevicePtr) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe { real::cuIpcGetMemHandle(out, address) };
    match way() {
        Way::Manage(_inside) => manage::ipc_get_mem_handle(address, real),
        _ => real(),
    }
}

unsafe extern "C" fn pool_set_access(
    pool: *mut c_void,
    list: *const AccessDesc,
    count: usize,
) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe { real::cuMemPoolSetAccess(pool, list, count) };
    match way() {
        // SAFETY: as above.
        Way::Manage(_inside) => unsafe { manage::pool_set_access(pool, list, count, real) },
        _ => real(),
    }
}

unsafe extern "C" fn primary_ctx_reset(device: c_int) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe { real::cuDevicePrimaryCtxReset_v2(device) };
    match way() {
        Way::Manage(_inside) => manage::primary_ctx_reset(device, real),
        Way::Observe(_inside) => {
            observe::resetting(device);
            real()
        }
        Way::Leaving(_) | Way::Through => real(),
    }
}

// Pages that the program maps itself are only observed, and make the heap give up what it has idle.

unsafe extern "C" fn mem_create(
    out: *mut c_ulonglong,
    bytes: usize,
    properties: *const AllocationProp,
    flags: c_ulonglong,
) -> CuResult {
    // SAFETY: as above.
    let real = || unsafe { real::cuMemCreate(out, bytes, properties, flags) };
    match way() {
        Way::Manage(_inside) => manage::with_room(real),
        Way::Observe(_inside) => {
            let code = real();
            if code == 0 {
                saw_a_call();
                // SAFETY: as above: the real function has read the properties and written the
                // handle.
                unsafe { observe::created(*out, &*properties) };
            }
            code
        }
        Way::Leaving(_) | Way::Through => real(),
    }
}

unsafe extern "C" fn mem_release(pages: c_ulonglong) -> CuResult {
    if let Way::Observe(_inside) = way() {
        observe::releasing(pages);
    }
    // SAFETY: as above.
    unsafe { real::cuMemRelease(pages) }
}

unsafe extern "C" fn mem_map(
    address: DevicePtr,
    bytes: usize,
    offset: usize,
    pages: c_ulonglong,
    flags: c_ulonglong,
) -> CuResult {
    // SAFETY: as above.
    let code = unsafe { real::cuMemMap(address, bytes, offset, pages, flags) };
    if code == 0
        && let Way::Observe(_inside) = way()
    {
        observe::mapped(address, bytes, pages);
    }
    code
}

unsafe extern "C" fn mem_unmap(address: DevicePtr, bytes: usize) -> CuResult {
    if let Way::Observe(_inside) = way() {
        observe::unmapping(address, bytes);
    }
    // SAFETY: as above.
    unsafe { real::cuMemUnmap(address, bytes) }
}

// Calls that the host may hold up: the heap is notified, then the real call runs.

/// A call on a stream that takes two more arguments and perhaps flags; each has a twin for
/// per-thread default streams.
macro_rules! told {
    ($($body:ident($($argument:ident: $type:ty),*) = $name:ident, $twin:ident;)*) => {$(
        unsafe extern "C" fn $body<const PER_THREAD: bool>($($argument: $type),*) -> CuResult {
            forbid_waits_before(stringify!($name));
            // SAFETY: as above.
            unsafe {
                if PER_THREAD { real::$twin($($argument),*) } else { real::$name($($argument),*) }
            }
        }
    )*};
}

told! {
    launch_host_func(stream: Stream, function: *const c_void, data: *mut c_void)
        = cuLaunchHostFunc, cuLaunchHostFunc_ptsz;
    launch_host_func_v2(
        stream: Stream, function: *const c_void, data: *mut c_void, mode: c_uint
    ) = cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz;
    stream_add_callback(
        stream: Stream, function: *const c_void, data: *mut c_void, flags: c_uint
    ) = cuStreamAddCallback, cuStreamAddCallback_ptsz;
    stream_wait_value_32(stream: Stream, address: DevicePtr, value: c_uint, flags: c_uint)
        = cuStreamWaitValue32, cuStreamWaitValue32_ptsz;
    stream_wait_value_32_v2(stream: Stream, address: DevicePtr, value: c_uint, flags: c_uint)
        = cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz;
    stream_wait_value_64(stream: Stream, address: DevicePtr, value: c_ulonglong, flags: c_uint)
        = cuStreamWaitValue64, cuStreamWaitValue64_ptsz;
    stream_wait_value_64_v2(stream: Stream, address: DevicePtr, value: c_ulonglong, flags: c_uint)
        = cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz;
    stream_batch_mem_op(stream: Stream, count: c_uint, operations: *mut c_void, flags: c_uint)
        = cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz;
    stream_batch_mem_op_v2(stream: Stream, count: c_uint, operations: *mut c_void, flags: c_uint)
        = cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz;
}

unsafe extern "C" fn graph_add_host_node(
    node: *mut *mut c_void,
    graph: *mut c_void,
    dependencies: *const *mut c_void,
    count: usize,
    parameters: *const c_void,
) -> CuResult {
    forbid_waits_before("cuGraphAddHostNode");
    // SAFETY: as above.
    unsafe { real::cuGraphAddHostNode(node, graph, dependencies, count, parameters) }
}

unsafe extern "C" fn graph_add_batch_mem_op_node(
    node: *mut *mut c_void,
    graph: *mut c_void,
    dependencies: *const *mut c_void,
    count: usize,
    parameters: *const c_void,
) -> CuResult {
    forbid_waits_before("cuGraphAddBatchMemOpNode");
    // SAFETY: as above.
    unsafe { real::cuGraphAddBatchMemOpNode(node, graph, dependencies, count, parameters) }
}
