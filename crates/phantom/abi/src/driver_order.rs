//! libcuda: streams, events and captures.

use crate::abi::{Answer, Out, code};
use crate::context::{self, driver_device, stream_device};
use crate::entry::driver;
use crate::gpu::{failed, gpu, own};
use crate::graph;
use crate::numbers::*;
use gruyere_phantom::{CaptureMode, CaptureStatus, StreamKind};

/// `CU_STREAM_NON_BLOCKING` and `cudaStreamNonBlocking`.
const NON_BLOCKING: u32 = 1;

pub fn stream_create(out: Out<usize>, flags: u32, device: u32) -> Answer {
    let kind =
        if flags & NON_BLOCKING != 0 { StreamKind::NonBlocking } else { StreamKind::Blocking };
    out.put(gpu().sim.stream_create(device, kind).map_err(failed)?)
}

/// 0: done; NOT_READY otherwise.
pub fn ready(done: bool) -> Answer {
    if done { Ok(()) } else { Err(code::NOT_READY) }
}

/// A stream's capture: `CUstreamCaptureStatus` and the id.
pub fn capture_info(device: u32, stream: usize) -> Result<(u32, u64), u32> {
    Ok(match gpu().sim.capture_status(device, stream).map_err(failed)? {
        CaptureStatus::None => (CU_STREAM_CAPTURE_STATUS_NONE, 0),
        CaptureStatus::Active(id) => (CU_STREAM_CAPTURE_STATUS_ACTIVE, id),
        CaptureStatus::Invalidated => (CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0),
    })
}

/// Swaps this thread's capture mode with `*mode`.
pub fn exchange_mode(mode: Out<u32>) -> Answer {
    if mode.raw().is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: not null, and by the C contract the caller's mode, to be read and written.
    let wanted = unsafe { mode.raw().read() };
    mode.put(match gruyere_phantom::exchange_capture_mode(graph::capture_mode(wanted)?) {
        CaptureMode::Global => CU_STREAM_CAPTURE_MODE_GLOBAL,
        CaptureMode::ThreadLocal => CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CaptureMode::Relaxed => CU_STREAM_CAPTURE_MODE_RELAXED,
    })
}

driver! {
    fn cuStreamCreate(out: Out<usize>, flags: u32) { stream_create(out, flags, driver_device()?) }

    fn cuStreamCreateWithPriority(out: Out<usize>, flags: u32, _priority: i32) {
        stream_create(out, flags, driver_device()?)
    }

    fn cuStreamDestroy_v2(stream: usize) {
        gpu().sim.stream_destroy(stream_device(stream)?, stream).map_err(failed)
    }

    fn cuStreamQuery(stream: usize) {
        ready(gpu().sim.stream_query(stream_device(stream)?, stream).map_err(failed)?)
    }

    fn cuStreamSynchronize(stream: usize) {
        gpu().sim.stream_synchronize(stream_device(stream)?, stream).map_err(failed)
    }

    fn cuStreamSynchronize_ptsz(stream: usize) {
        gpu().sim.stream_synchronize(stream_device(own(stream))?, own(stream)).map_err(failed)
    }

    fn cuStreamQuery_ptsz(stream: usize) {
        ready(gpu().sim.stream_query(stream_device(own(stream))?, own(stream)).map_err(failed)?)
    }

    fn cuStreamWaitEvent_ptsz(stream: usize, event: usize, _flags: u32) {
        gpu().sim.stream_wait_event(stream_device(own(stream))?, own(stream), event).map_err(failed)
    }

    fn cuEventRecord_ptsz(event: usize, stream: usize) {
        gpu().sim.event_record(stream_device(own(stream))?, event, own(stream)).map_err(failed)
    }

    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) {
        gpu().sim.stream_wait_event(stream_device(stream)?, stream, event).map_err(failed)
    }

    fn cuStreamGetId(stream: usize, out: Out<u64>) {
        out.put(gpu().sim.stream_id(stream_device(stream)?, stream).map_err(failed)?)
    }

    fn cuStreamGetCtx(stream: usize, out: Out<usize>) {
        let device = gpu().sim.stream_device(stream_device(stream)?, stream).map_err(failed)?;
        out.put(context::primary(device))
    }

    fn cuStreamGetDevice(stream: usize, out: Out<i32>) {
        out.put(gpu().sim.stream_device(stream_device(stream)?, stream).map_err(failed)? as i32)
    }

    fn cuStreamGetFlags(stream: usize, out: Out<u32>) {
        stream_device(stream)?;
        out.put(0)
    }

    fn cuStreamGetPriority(stream: usize, out: Out<i32>) {
        stream_device(stream)?;
        out.put(0)
    }

    fn cuStreamIsCapturing(stream: usize, out: Out<u32>) {
        out.put(capture_info(stream_device(stream)?, stream)?.0)
    }

    fn cuStreamGetCaptureInfo(stream: usize, status: Out<u32>, id: Out<u64>) {
        put_capture_info(stream, status, id)
    }

    /// Reports no graph and no dependencies: NULL and 0.
    fn cuStreamGetCaptureInfo_v2(
        stream: usize, status: Out<u32>, id: Out<u64>, graph: Out<usize>, dependencies: Out<usize>,
        n: Out<usize>,
    ) {
        graph.put_if_wanted(0);
        dependencies.put_if_wanted(0);
        n.put_if_wanted(0);
        put_capture_info(stream, status, id)
    }

    fn cuStreamGetCaptureInfo_v3(
        stream: usize, status: Out<u32>, id: Out<u64>, graph: Out<usize>, dependencies: Out<usize>,
        edges: Out<usize>,
        n: Out<usize>,
    ) {
        graph.put_if_wanted(0);
        dependencies.put_if_wanted(0);
        edges.put_if_wanted(0);
        n.put_if_wanted(0);
        put_capture_info(stream, status, id)
    }

    fn cuStreamBeginCapture_v2(stream: usize, mode: u32) {
        graph::begin(stream_device(stream)?, stream, mode)
    }

    fn cuStreamEndCapture(stream: usize, out: Out<usize>) {
        graph::end(stream_device(stream)?, stream, out)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        exchange_mode(mode)
    }

    fn cuEventCreate(out: Out<usize>, _flags: u32) {
        out.put(gpu().sim.event_create(driver_device()?).map_err(failed)?)
    }

    fn cuEventDestroy_v2(event: usize) {
        gpu().sim.event_destroy(0, event).map_err(failed)
    }

    fn cuEventRecord(event: usize, stream: usize) {
        gpu().sim.event_record(stream_device(stream)?, event, stream).map_err(failed)
    }

    fn cuEventRecordWithFlags(event: usize, stream: usize, _flags: u32) {
        gpu().sim.event_record(stream_device(stream)?, event, stream).map_err(failed)
    }

    fn cuEventQuery(event: usize) {
        ready(gpu().sim.event_query(0, event).map_err(failed)?)
    }

    fn cuEventSynchronize(event: usize) {
        gpu().sim.event_synchronize(0, event).map_err(failed)
    }

    fn cuEventElapsedTime(out: Out<f32>, from: usize, to: usize) {
        elapsed(out, from, to)
    }

    fn cuEventElapsedTime_v2(out: Out<f32>, from: usize, to: usize) {
        elapsed(out, from, to)
    }

    fn cuGraphDestroy(handle: usize) { graph::destroy_template(handle) }
    fn cuGraphExecDestroy(handle: usize) { graph::destroy_executable(handle) }
    fn cuGraphInstantiateWithFlags(out: Out<usize>, template: usize, _flags: u64) {
        graph::instantiate(out, template)
    }
    fn cuGraphLaunch(handle: usize, stream: usize) {
        graph::launch(handle, stream_device(stream)?, stream)
    }
}

/// Elapsed time on the virtual clock. Kernels take no time unless `PHANTOM_KERNEL_NS` or the kernel
/// itself sets one (`launch.rs`).
pub fn elapsed(out: Out<f32>, from: usize, to: usize) -> Answer {
    let nanoseconds = gpu().sim.event_elapsed(0, from, to).map_err(failed)?;
    out.put(nanoseconds.ok_or(code::NOT_READY)? as f32 / 1e6)
}

fn put_capture_info(stream: usize, status: Out<u32>, id: Out<u64>) -> Answer {
    let (what, which) = capture_info(stream_device(stream)?, stream)?;
    id.put_if_wanted(which);
    status.put(what)
}
