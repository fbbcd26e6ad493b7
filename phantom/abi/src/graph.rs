//! Graphs: what captures become. A template and its executables share one simulated graph, which goes with the last of them.

use crate::abi::{Answer, Out, code, runtime};
use crate::context::runtime_device;
use crate::driver_order::capture_mode;
use crate::gpu::{failed, gpu};
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Handles look like the pointers that they are. Bit 7 tells an executable from a template.
const BASE: usize = 0x2000_0000;
const STEP: usize = 0x100;
const EXECUTABLE: usize = 0x80;

/// How many handles there are of each simulated graph.
static HANDLES: LazyLock<Mutex<HashMap<u64, u32>>> = LazyLock::new(Mutex::default);

fn template(id: u64) -> usize {
    BASE + id as usize * STEP
}

fn id_of(handle: usize) -> Result<u64, u32> {
    let offset = handle.checked_sub(BASE).ok_or(code::INVALID_VALUE)?;
    Ok((offset / STEP) as u64)
}

pub fn begin(device: u32, stream: usize, mode: u32) -> Answer {
    gpu().sim.begin_capture(device, stream, capture_mode(mode)?, None).map(|_| ()).map_err(failed)
}

pub fn end(device: u32, stream: usize, out: Out<usize>) -> Answer {
    match gpu().sim.end_capture(device, stream) {
        Ok(id) => {
            HANDLES.lock().unwrap_or_else(PoisonError::into_inner).insert(id, 1);
            out.put(template(id))
        }
        Err(error) => {
            out.put_if_wanted(0);
            Err(failed(error))
        }
    }
}

pub fn instantiate(out: Out<usize>, handle: usize) -> Answer {
    let id = id_of(handle)?;
    *HANDLES.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&id).ok_or(code::INVALID_VALUE)? += 1;
    out.put(template(id) | EXECUTABLE)
}

pub fn launch(handle: usize, device: u32, stream: usize) -> Answer {
    gpu().sim.replay(device, id_of(handle)?, stream).map_err(failed)
}

fn drop_handle(handle: usize) -> Answer {
    let id = id_of(handle)?;
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    let count = handles.get_mut(&id).ok_or(code::INVALID_VALUE)?;
    *count -= 1;
    if *count == 0 {
        handles.remove(&id);
        gpu().sim.graph_destroy(0, id).map_err(failed)?;
    }
    Ok(())
}

pub fn destroy_template(handle: usize) -> Answer {
    drop_handle(handle)
}

pub fn destroy_executable(handle: usize) -> Answer {
    drop_handle(handle)
}

runtime! {
    fn cudaStreamBeginCapture(stream: usize, mode: u32) {
        begin(runtime_device(), stream, mode)
    }

    fn cudaStreamEndCapture(stream: usize, out: Out<usize>) {
        end(runtime_device(), stream, out)
    }

    fn cudaGraphInstantiateWithFlags(out: Out<usize>, handle: usize, _flags: u64) {
        instantiate(out, handle)
    }

    fn cudaGraphInstantiate(out: Out<usize>, handle: usize, _flags: u64) {
        instantiate(out, handle)
    }

    fn cudaGraphLaunch(handle: usize, stream: usize) {
        launch(handle, runtime_device(), stream)
    }

    fn cudaGraphDestroy(handle: usize) {
        destroy_template(handle)
    }

    fn cudaGraphExecDestroy(handle: usize) {
        destroy_executable(handle)
    }

    /// The number of kernels; there are no nodes to hand out.
    fn cudaGraphGetNodes(handle: usize, nodes: Out<usize>, n: Out<usize>) {
        let (kernels, _) = gpu().sim.graph_work(id_of(handle)?).ok_or(code::INVALID_VALUE)?;
        n.put(if nodes.raw().is_null() { kernels as usize } else { 0 })
    }

    fn cudaGraphNodeGetDependencies(_node: usize, _dependencies: usize, _edges: usize, n: Out<usize>) {
        n.put(0)
    }

    fn cudaGraphDebugDotPrint(_handle: usize, _path: usize, _flags: u32) {
        Err(code::NOT_SUPPORTED)
    }
}
