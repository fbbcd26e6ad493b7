//! libcudart: streams, events, captures, errors and versions.

use crate::abi::{Out, Text};
use crate::context::runtime_device;
use crate::driver_device::{VERSION, error_texts, runtime_error_name};
use crate::driver_order::{capture_info, elapsed, exchange_mode, ready, stream_create};
use crate::entry::{last_error, runtime};
use crate::gpu::{failed, gpu, own};
use crate::lookup;
use std::ffi::c_char;

runtime! {
    fn cudaStreamCreate(out: Out<usize>) { stream_create(out, 0, runtime_device()) }
    fn cudaStreamCreateWithFlags(out: Out<usize>, flags: u32) {
        stream_create(out, flags, runtime_device())
    }
    fn cudaStreamCreateWithPriority(out: Out<usize>, flags: u32, _priority: i32) {
        stream_create(out, flags, runtime_device())
    }
    fn cudaStreamDestroy(stream: usize) {
        gpu().sim.stream_destroy(runtime_device(), stream).map_err(failed)
    }
    fn cudaStreamSynchronize_ptsz(stream: usize) {
        gpu().sim.stream_synchronize(runtime_device(), own(stream)).map_err(failed)
    }
    fn cudaStreamQuery_ptsz(stream: usize) {
        ready(gpu().sim.stream_query(runtime_device(), own(stream)).map_err(failed)?)
    }
    fn cudaStreamWaitEvent_ptsz(stream: usize, event: usize, _flags: u32) {
        gpu().sim.stream_wait_event(runtime_device(), own(stream), event).map_err(failed)
    }
    fn cudaStreamIsCapturing_ptsz(stream: usize, out: Out<u32>) {
        out.put(capture_info(runtime_device(), own(stream))?.0)
    }
    fn cudaEventRecord_ptsz(event: usize, stream: usize) {
        gpu().sim.event_record(runtime_device(), event, own(stream)).map_err(failed)
    }
    fn cudaEventRecordWithFlags_ptsz(event: usize, stream: usize, _flags: u32) {
        gpu().sim.event_record(runtime_device(), event, own(stream)).map_err(failed)
    }
    fn cudaStreamQuery(stream: usize) {
        ready(gpu().sim.stream_query(runtime_device(), stream).map_err(failed)?)
    }
    fn cudaStreamSynchronize(stream: usize) {
        gpu().sim.stream_synchronize(runtime_device(), stream).map_err(failed)
    }
    fn cudaStreamWaitEvent(stream: usize, event: usize, _flags: u32) {
        gpu().sim.stream_wait_event(runtime_device(), stream, event).map_err(failed)
    }
    fn cudaStreamGetPriority(_stream: usize, out: Out<i32>) { out.put(0) }
    fn cudaStreamGetId(stream: usize, out: Out<u64>) {
        out.put(gpu().sim.stream_id(runtime_device(), stream).map_err(failed)?)
    }
    fn cudaStreamIsCapturing(stream: usize, out: Out<u32>) {
        out.put(capture_info(runtime_device(), stream)?.0)
    }

    /// CUDA 13's signature.
    fn cudaStreamGetCaptureInfo(
        stream: usize, status: Out<u32>, id: Out<u64>, graph: Out<usize>, dependencies: Out<usize>,
        edges: Out<usize>,
        n: Out<usize>,
    ) {
        let (what, which) = capture_info(runtime_device(), stream)?;
        id.put_if_wanted(which);
        graph.put_if_wanted(0);
        dependencies.put_if_wanted(0);
        edges.put_if_wanted(0);
        n.put_if_wanted(0);
        status.put(what)
    }

    fn cudaThreadExchangeStreamCaptureMode(mode: Out<u32>) { exchange_mode(mode) }

    fn cudaEventCreate(out: Out<usize>) {
        out.put(gpu().sim.event_create(runtime_device()).map_err(failed)?)
    }
    fn cudaEventCreateWithFlags(out: Out<usize>, _flags: u32) {
        out.put(gpu().sim.event_create(runtime_device()).map_err(failed)?)
    }
    fn cudaEventDestroy(event: usize) { gpu().sim.event_destroy(0, event).map_err(failed) }
    fn cudaEventRecord(event: usize, stream: usize) {
        gpu().sim.event_record(runtime_device(), event, stream).map_err(failed)
    }
    fn cudaEventRecordWithFlags(event: usize, stream: usize, _flags: u32) {
        gpu().sim.event_record(runtime_device(), event, stream).map_err(failed)
    }
    fn cudaEventQuery(event: usize) { ready(gpu().sim.event_query(0, event).map_err(failed)?) }
    fn cudaEventSynchronize(event: usize) { gpu().sim.event_synchronize(0, event).map_err(failed) }
    fn cudaEventElapsedTime(out: Out<f32>, from: usize, to: usize) { elapsed(out, from, to) }

    fn cudaDriverGetVersion(out: Out<i32>) { out.put(VERSION) }
    fn cudaRuntimeGetVersion(out: Out<i32>) { out.put(VERSION) }

    /// Found 0, not found 1.
    fn cudaGetDriverEntryPointByVersion(
        name: Text, out: Out<usize>, version: u32, flags: u64, status: Out<u32>
    ) {
        let address = lookup::driver_symbol(name.get()?, version as i32, flags);
        status.put_if_wanted(u32::from(address.is_none()));
        out.put(address.unwrap_or(0))
    }

    fn cudaGetDriverEntryPoint(name: Text, out: Out<usize>, flags: u64, status: Out<u32>) {
        let address = lookup::driver_symbol(name.get()?, VERSION, flags);
        status.put_if_wanted(u32::from(address.is_none()));
        out.put(address.unwrap_or(0))
    }
}

// These report errors and so must not cause any: no entry(), no initialisation.

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> u32 {
    last_error(true)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> u32 {
    last_error(false)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(error: u32) -> *const c_char {
    runtime_error_name(error).as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(error: u32) -> *const c_char {
    error_texts(error).1.as_ptr()
}
