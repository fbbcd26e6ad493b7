//! The interposed functions: each decides what serves the call.
//!
//! A call passes through where the door is shut ([`mode`]) and where the thread is already in the
//! library ([`inside`]). Bodies get the caller's return address as their last argument
//! ([`shim`](super::shim)).

use super::later::forbid_waits_before;
use super::leave::saw_a_call;
use super::mode;
use super::runtime::{
    AccessDesc, CudaError, Extent, IpcMemHandle, PitchedPtr, Runtime, Stream, effective,
};
use super::shim::export;
use super::way::{Way, way};
use super::whose::is_ours_at_exit;
use super::{manage, observe};
use crate::driver::StreamHandle;
use std::ffi::{c_int, c_uint, c_void};

/// The caller's return address.
type Caller = *const c_void;

export! {
    cudaMalloc after 2 => malloc;
    cudaFree after 1 => free;
    cudaMallocAsync after 3 => malloc_async;
    cudaMallocAsync_ptsz after 3 => malloc_async_ptsz;
    cudaFreeAsync after 2 => free_async;
    cudaFreeAsync_ptsz after 2 => free_async_ptsz;
    cudaMallocFromPoolAsync after 4 => malloc_from_pool_async;
    cudaMallocFromPoolAsync_ptsz after 4 => malloc_from_pool_async_ptsz;
    cudaMallocPitch after 4 => malloc_pitch;
    cudaMalloc3D after extent => malloc_3d;
    cudaMemGetInfo after 2 => mem_get_info;
    cudaStreamDestroy after 1 => stream_destroy;
    cudaDeviceSynchronize after 0 => device_synchronize;
    cudaThreadSynchronize after 0 => thread_synchronize;
    cudaDeviceReset after 0 => device_reset;
    cudaDeviceEnablePeerAccess after 2 => enable_peer_access;
    cudaMemPoolSetAccess after 3 => pool_set_access;
    cudaThreadExit after 0 => thread_exit;
    cudaStreamBeginCapture after 2 => begin_capture;
    cudaStreamBeginCapture_ptsz after 2 => begin_capture_ptsz;
    cudaStreamBeginCaptureToGraph after 6 => begin_capture_to_graph;
    cudaStreamBeginCaptureToGraph_ptsz after 6 => begin_capture_to_graph_ptsz;
    cudaStreamEndCapture after 2 => end_capture;
    cudaStreamEndCapture_ptsz after 2 => end_capture_ptsz;
    cudaIpcGetMemHandle after 2 => ipc_get_mem_handle;
    cudaLaunchHostFunc after 3 => launch_host_func;
    cudaLaunchHostFunc_ptsz after 3 => launch_host_func_ptsz;
    cudaLaunchHostFunc_v2 after 4 => launch_host_func_v2;
    cudaLaunchHostFunc_v2_ptsz after 4 => launch_host_func_v2_ptsz;
    cudaStreamAddCallback after 4 => stream_add_callback;
    cudaStreamAddCallback_ptsz after 4 => stream_add_callback_ptsz;
    cudaGraphAddHostNode after 5 => graph_add_host_node;
}

// SAFETY of every body below: its shim alone calls it, with the arguments of the program, which
// keep the promises of the CUDA function of that name; they go to the real function, or to its
// replacement here, which asks for no more.

unsafe extern "C" fn malloc(out: *mut *mut c_void, bytes: usize, caller: Caller) -> CudaError {
    // SAFETY: as above.
    unsafe {
        if mode::watches_runtime_alone() {
            watched_malloc(out, bytes, caller)
        } else {
            other_malloc(out, bytes, caller)
        }
    }
}

/// `cudaMalloc` while watching the runtime alone. A function apart, so that it saves its own
/// registers only.
#[inline(never)]
unsafe fn watched_malloc(out: *mut *mut c_void, bytes: usize, caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    saw_a_call();
    // SAFETY: as above.
    unsafe {
        let error = runtime.cudaMalloc(out, bytes);
        observe::allocated(runtime, error, out, bytes, StreamHandle::ALL_STREAMS)
    }
}

#[inline(never)]
unsafe fn other_malloc(out: *mut *mut c_void, bytes: usize, caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    saw_a_call();
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::malloc(runtime, out, bytes),
            Way::Observe(_inside) => {
                let error = runtime.cudaMalloc(out, bytes);
                observe::allocated(runtime, error, out, bytes, StreamHandle::ALL_STREAMS)
            }
            _ => runtime.cudaMalloc(out, bytes),
        }
    }
}

unsafe extern "C" fn free(pointer: *mut c_void, caller: Caller) -> CudaError {
    // SAFETY: as above.
    unsafe {
        if mode::watches_runtime_alone() {
            watched_free(pointer, caller)
        } else {
            other_free(pointer, caller)
        }
    }
}

/// As [`watched_malloc`].
#[inline(never)]
unsafe fn watched_free(pointer: *mut c_void, caller: Caller) -> CudaError {
    observe::freeing(pointer, StreamHandle::ALL_STREAMS);
    // SAFETY: as above.
    unsafe { Runtime::of(caller).cudaFree(pointer) }
}

#[inline(never)]
unsafe fn other_free(pointer: *mut c_void, caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::free(runtime, pointer),
            Way::Observe(_inside) => {
                observe::freeing(pointer, StreamHandle::ALL_STREAMS);
                runtime.cudaFree(pointer)
            }
            Way::Leaving(_inside) if is_ours_at_exit(pointer as u64) => 0,
            _ => runtime.cudaFree(pointer),
        }
    }
}

unsafe extern "C" fn malloc_async(
    out: *mut *mut c_void,
    bytes: usize,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    // SAFETY: as above.
    unsafe { any_malloc_async::<false>(out, bytes, stream, caller) }
}

unsafe extern "C" fn malloc_async_ptsz(
    out: *mut *mut c_void,
    bytes: usize,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    // SAFETY: as above.
    unsafe { any_malloc_async::<true>(out, bytes, stream, caller) }
}

#[inline(always)]
unsafe fn any_malloc_async<const PER_THREAD: bool>(
    out: *mut *mut c_void,
    bytes: usize,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    // SAFETY: as above.
    unsafe {
        if mode::watches_runtime_alone() {
            watched_malloc_async::<PER_THREAD>(out, bytes, stream, caller)
        } else {
            other_malloc_async::<PER_THREAD>(out, bytes, stream, caller)
        }
    }
}

/// As [`watched_malloc`].
#[inline(never)]
unsafe fn watched_malloc_async<const PER_THREAD: bool>(
    out: *mut *mut c_void,
    bytes: usize,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    saw_a_call();
    // SAFETY: as above.
    unsafe {
        let error = runtime.malloc_async(PER_THREAD, stream, out, bytes);
        observe::allocated(runtime, error, out, bytes, observe::on(stream, PER_THREAD))
    }
}

#[inline(never)]
unsafe fn other_malloc_async<const PER_THREAD: bool>(
    out: *mut *mut c_void,
    bytes: usize,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    saw_a_call();
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::malloc_async(runtime, out, bytes, stream, PER_THREAD),
            Way::Observe(_inside) => {
                let error = runtime.malloc_async(PER_THREAD, stream, out, bytes);
                observe::allocated(runtime, error, out, bytes, observe::on(stream, PER_THREAD))
            }
            _ => runtime.malloc_async(PER_THREAD, stream, out, bytes),
        }
    }
}

unsafe extern "C" fn free_async(pointer: *mut c_void, stream: Stream, caller: Caller) -> CudaError {
    // SAFETY: as above.
    unsafe { any_free_async::<false>(pointer, stream, caller) }
}

unsafe extern "C" fn free_async_ptsz(
    pointer: *mut c_void,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    // SAFETY: as above.
    unsafe { any_free_async::<true>(pointer, stream, caller) }
}

#[inline(always)]
unsafe fn any_free_async<const PER_THREAD: bool>(
    pointer: *mut c_void,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    // SAFETY: as above.
    unsafe {
        if mode::watches_runtime_alone() {
            watched_free_async::<PER_THREAD>(pointer, stream, caller)
        } else {
            other_free_async::<PER_THREAD>(pointer, stream, caller)
        }
    }
}

/// As [`watched_malloc`].
#[inline(never)]
unsafe fn watched_free_async<const PER_THREAD: bool>(
    pointer: *mut c_void,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    observe::freeing(pointer, observe::on(stream, PER_THREAD));
    // SAFETY: as above.
    unsafe { Runtime::of(caller).free_async(PER_THREAD, stream, pointer) }
}

#[inline(never)]
unsafe fn other_free_async<const PER_THREAD: bool>(
    pointer: *mut c_void,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::free_async(runtime, pointer, stream, PER_THREAD),
            Way::Observe(_inside) => {
                observe::freeing(pointer, observe::on(stream, PER_THREAD));
                runtime.free_async(PER_THREAD, stream, pointer)
            }
            Way::Leaving(_inside) if is_ours_at_exit(pointer as u64) => 0,
            _ => runtime.free_async(PER_THREAD, stream, pointer),
        }
    }
}

unsafe extern "C" fn malloc_from_pool_async(
    out: *mut *mut c_void,
    bytes: usize,
    pool: *mut c_void,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    // SAFETY: as above.
    unsafe { any_malloc_from_pool_async(out, bytes, pool, stream, false, caller) }
}

unsafe extern "C" fn malloc_from_pool_async_ptsz(
    out: *mut *mut c_void,
    bytes: usize,
    pool: *mut c_void,
    stream: Stream,
    caller: Caller,
) -> CudaError {
    // SAFETY: as above.
    unsafe { any_malloc_from_pool_async(out, bytes, pool, stream, true, caller) }
}

#[inline]
unsafe fn any_malloc_from_pool_async(
    out: *mut *mut c_void,
    bytes: usize,
    pool: *mut c_void,
    stream: Stream,
    per_thread: bool,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    saw_a_call();
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => {
                manage::malloc_from_pool_async(runtime, out, bytes, pool, stream, per_thread)
            }
            Way::Observe(_inside) => {
                let error = runtime.malloc_from_pool_async(per_thread, stream, out, bytes, pool);
                observe::allocated(runtime, error, out, bytes, observe::on(stream, per_thread))
            }
            _ => runtime.malloc_from_pool_async(per_thread, stream, out, bytes, pool),
        }
    }
}

unsafe extern "C" fn malloc_pitch(
    out: *mut *mut c_void,
    pitch: *mut usize,
    width: usize,
    height: usize,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    saw_a_call();
    // SAFETY: as above; a success has written the pitch.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::malloc_pitch(runtime, out, pitch, width, height),
            Way::Observe(_inside) => {
                let error = runtime.cudaMallocPitch(out, pitch, width, height);
                let bytes = if error == 0 { (*pitch).saturating_mul(height) } else { 0 };
                observe::allocated(runtime, error, out, bytes, StreamHandle::ALL_STREAMS)
            }
            _ => runtime.cudaMallocPitch(out, pitch, width, height),
        }
    }
}

unsafe extern "C" fn malloc_3d(
    out: *mut PitchedPtr,
    extent: *const Extent,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    saw_a_call();
    // SAFETY: as above; `extent` is the caller's argument, which lies in its frame until we return.
    unsafe {
        let extent = *extent;
        match way() {
            Way::Manage(_inside) => manage::malloc_3d(runtime, out, extent),
            Way::Observe(_inside) => {
                let error = runtime.cudaMalloc3D(out, extent);
                if error != 0 {
                    return error;
                }
                let bytes = (*out).pitch.saturating_mul(extent.height).saturating_mul(extent.depth);
                observe::allocated(
                    runtime,
                    error,
                    &raw const (*out).ptr,
                    bytes,
                    StreamHandle::ALL_STREAMS,
                )
            }
            _ => runtime.cudaMalloc3D(out, extent),
        }
    }
}

unsafe extern "C" fn mem_get_info(
    free: *mut usize,
    total: *mut usize,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::mem_get_info(runtime, free, total),
            _ => runtime.cudaMemGetInfo(free, total),
        }
    }
}

unsafe extern "C" fn stream_destroy(stream: Stream, caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::stream_destroy(runtime, stream),
            _ => runtime.cudaStreamDestroy(stream),
        }
    }
}

unsafe extern "C" fn device_synchronize(caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    synchronize(runtime, || unsafe { runtime.cudaDeviceSynchronize() })
}

unsafe extern "C" fn thread_synchronize(caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    synchronize(runtime, || unsafe { runtime.cudaThreadSynchronize() })
}

#[inline]
fn synchronize(runtime: Runtime, real: impl FnOnce() -> CudaError) -> CudaError {
    match way() {
        Way::Manage(_inside) => manage::device_synchronize(runtime, real),
        _ => real(),
    }
}

unsafe extern "C" fn device_reset(caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    reset(runtime, || unsafe { runtime.cudaDeviceReset() })
}

unsafe extern "C" fn thread_exit(caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    reset(runtime, || unsafe { runtime.cudaThreadExit() })
}

fn reset(runtime: Runtime, real: impl FnOnce() -> CudaError) -> CudaError {
    match way() {
        Way::Manage(_inside) => manage::device_reset(runtime, real),
        Way::Observe(_inside) => {
            observe::resetting(runtime);
            real()
        }
        _ => real(),
    }
}

unsafe extern "C" fn enable_peer_access(peer: c_int, flags: c_uint, caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    let real = || unsafe { runtime.cudaDeviceEnablePeerAccess(peer, flags) };
    match way() {
        Way::Manage(_inside) => manage::enable_peer_access(runtime, peer, real),
        _ => real(),
    }
}

unsafe extern "C" fn pool_set_access(
    pool: *mut c_void,
    list: *const AccessDesc,
    count: usize,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::pool_set_access(runtime, pool, list, count),
            _ => runtime.cudaMemPoolSetAccess(pool, list, count),
        }
    }
}

unsafe extern "C" fn begin_capture(stream: Stream, mode: c_uint, caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    capture(runtime, stream, || unsafe { runtime.cudaStreamBeginCapture(stream, mode) })
}

unsafe extern "C" fn begin_capture_ptsz(stream: Stream, mode: c_uint, caller: Caller) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    capture(runtime, effective(true, stream), || unsafe {
        runtime.cudaStreamBeginCapture_ptsz(stream, mode)
    })
}

unsafe extern "C" fn begin_capture_to_graph(
    stream: Stream,
    graph: *mut c_void,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: c_uint,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    capture(runtime, stream, || unsafe {
        runtime.cudaStreamBeginCaptureToGraph(stream, graph, dependencies, data, count, mode)
    })
}

unsafe extern "C" fn begin_capture_to_graph_ptsz(
    stream: Stream,
    graph: *mut c_void,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: c_uint,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    capture(runtime, effective(true, stream), || unsafe {
        runtime.cudaStreamBeginCaptureToGraph_ptsz(stream, graph, dependencies, data, count, mode)
    })
}

fn capture(runtime: Runtime, stream: Stream, real: impl FnOnce() -> CudaError) -> CudaError {
    match way() {
        Way::Manage(_inside) => manage::begin_capture(runtime, stream, real),
        _ => real(),
    }
}

unsafe extern "C" fn end_capture(
    stream: Stream,
    graph: *mut *mut c_void,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    capture_end(runtime, stream, || unsafe { runtime.cudaStreamEndCapture(stream, graph) })
}

unsafe extern "C" fn end_capture_ptsz(
    stream: Stream,
    graph: *mut *mut c_void,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    capture_end(runtime, effective(true, stream), || unsafe {
        runtime.cudaStreamEndCapture_ptsz(stream, graph)
    })
}

fn capture_end(runtime: Runtime, stream: Stream, real: impl FnOnce() -> CudaError) -> CudaError {
    match way() {
        Way::Manage(_inside) => manage::end_capture(runtime, stream, real),
        _ => real(),
    }
}

unsafe extern "C" fn ipc_get_mem_handle(
    handle: *mut IpcMemHandle,
    pointer: *mut c_void,
    caller: Caller,
) -> CudaError {
    let runtime = Runtime::of(caller);
    // SAFETY: as above.
    unsafe {
        match way() {
            Way::Manage(_inside) => manage::ipc_get_mem_handle(runtime, handle, pointer),
            _ => runtime.cudaIpcGetMemHandle(handle, pointer),
        }
    }
}

// Calls that the host may hold up: the heap is notified, then the real call runs.

/// A function with its name in the log.
macro_rules! told {
    ($($body:ident = $name:ident, $call:literal($($argument:ident: $type:ty),*);)*) => {$(
        unsafe extern "C" fn $body($($argument: $type,)* caller: Caller) -> CudaError {
            forbid_waits_before($call);
            // SAFETY: as above.
            unsafe { Runtime::of(caller).$name($($argument),*) }
        }
    )*};
}

told! {
    launch_host_func = cudaLaunchHostFunc, "cudaLaunchHostFunc"(
        stream: Stream, function: *const c_void, data: *mut c_void
    );
    launch_host_func_ptsz = cudaLaunchHostFunc_ptsz, "cudaLaunchHostFunc"(
        stream: Stream, function: *const c_void, data: *mut c_void
    );
    launch_host_func_v2 = cudaLaunchHostFunc_v2, "cudaLaunchHostFunc"(
        stream: Stream, function: *const c_void, data: *mut c_void, mode: c_uint
    );
    launch_host_func_v2_ptsz = cudaLaunchHostFunc_v2_ptsz, "cudaLaunchHostFunc"(
        stream: Stream, function: *const c_void, data: *mut c_void, mode: c_uint
    );
    stream_add_callback = cudaStreamAddCallback, "cudaStreamAddCallback"(
        stream: Stream, function: *const c_void, data: *mut c_void, flags: c_uint
    );
    stream_add_callback_ptsz = cudaStreamAddCallback_ptsz, "cudaStreamAddCallback"(
        stream: Stream, function: *const c_void, data: *mut c_void, flags: c_uint
    );
    graph_add_host_node = cudaGraphAddHostNode, "cudaGraphAddHostNode"(
        node: *mut *mut c_void, graph: *mut c_void, dependencies: *const *mut c_void, count: usize,
        parameters: *const c_void
    );
}
