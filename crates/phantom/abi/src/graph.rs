//! Graphs, the results of captures. A template and its executables share the simulated graphs,
//! which go with the last of them.

use crate::abi::{Answer, Out, code};
use crate::context::{runtime_device, stream_device};
use crate::entry::{driver, runtime};
use crate::gpu::{failed, gpu, own};
use crate::numbers::*;
use gruyere_phantom::CaptureMode;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// Handles look like pointers. Bit 7 distinguishes an executable from a template.
const BASE: usize = 0x2000_0000;
const STEP: usize = 0x100;
const EXECUTABLE: usize = 0x80;

/// A template with its executables.
#[derive(Default)]
struct Graph {
    /// Number of its handles.
    handles: u32,
    /// The captures in it, in order.
    captured: Vec<u64>,
}

#[derive(Default)]
struct Graphs {
    made: usize,
    by_number: HashMap<usize, Graph>,
    /// Streams that capture into an existing graph.
    into: HashMap<usize, usize>,
}

static GRAPHS: LazyLock<Mutex<Graphs>> = LazyLock::new(Mutex::default);

fn graphs() -> MutexGuard<'static, Graphs> {
    GRAPHS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Graphs {
    /// A new template of these captures.
    fn add(&mut self, captured: Vec<u64>) -> usize {
        self.made += 1;
        self.by_number.insert(self.made, Graph { handles: 1, captured });
        self.made
    }

    fn get(&mut self, handle: usize) -> Result<&mut Graph, u32> {
        self.by_number.get_mut(&number_of(handle)?).ok_or(code::INVALID_VALUE)
    }
}

fn template(number: usize) -> usize {
    BASE + number * STEP
}

fn number_of(handle: usize) -> Result<usize, u32> {
    Ok(handle.checked_sub(BASE).ok_or(code::INVALID_VALUE)? / STEP)
}

pub fn capture_mode(mode: u32) -> Result<CaptureMode, u32> {
    match mode {
        CU_STREAM_CAPTURE_MODE_GLOBAL => Ok(CaptureMode::Global),
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL => Ok(CaptureMode::ThreadLocal),
        CU_STREAM_CAPTURE_MODE_RELAXED => Ok(CaptureMode::Relaxed),
        _ => Err(code::INVALID_VALUE),
    }
}

pub fn begin(device: u32, stream: usize, mode: u32) -> Answer {
    gpu().sim.begin_capture(device, stream, capture_mode(mode)?, None).map(|_| ()).map_err(failed)
}

/// Begins a capture to the end of an existing graph.
fn begin_into(device: u32, stream: usize, graph: usize, mode: u32) -> Answer {
    let number = number_of(graph)?;
    graphs().get(graph)?;
    begin(device, stream, mode)?;
    graphs().into.insert(stream, number);
    Ok(())
}

pub fn end(device: u32, stream: usize, out: Out<usize>) -> Answer {
    let captured = gpu().sim.end_capture(device, stream);
    let mut graphs = graphs();
    let into = graphs.into.remove(&stream);
    match captured {
        Ok(id) => {
            let number = match into {
                Some(number) => {
                    graphs.by_number.entry(number).or_default().captured.push(id);
                    number
                }
                None => graphs.add(vec![id]),
            };
            out.put(template(number))
        }
        Err(error) => {
            out.put_if_wanted(0);
            Err(failed(error))
        }
    }
}

fn create(out: Out<usize>) -> Answer {
    let number = graphs().add(Vec::new());
    out.put(template(number))
}

pub fn instantiate(out: Out<usize>, handle: usize) -> Answer {
    graphs().get(handle)?.handles += 1;
    out.put(template(number_of(handle)?) | EXECUTABLE)
}

pub fn launch(handle: usize, device: u32, stream: usize) -> Answer {
    let captured = graphs().get(handle)?.captured.clone();
    captured.into_iter().try_for_each(|id| gpu().sim.replay(device, id, stream).map_err(failed))
}

fn drop_handle(handle: usize) -> Answer {
    let mut graphs = graphs();
    let graph = graphs.get(handle)?;
    graph.handles -= 1;
    if graph.handles == 0 {
        let gone = std::mem::take(&mut graph.captured);
        graphs.by_number.remove(&number_of(handle)?);
        gone.into_iter().try_for_each(|id| gpu().sim.graph_destroy(0, id).map_err(failed))?;
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

    /// Ignores the dependencies of the first nodes.
    fn cudaStreamBeginCaptureToGraph(
        stream: usize, graph: usize, _dependencies: usize, _edges: usize, _n: usize, mode: u32,
    ) {
        begin_into(runtime_device(), stream, graph, mode)
    }

    fn cudaGraphCreate(out: Out<usize>, _flags: u32) {
        create(out)
    }

    fn cudaStreamBeginCapture_ptsz(stream: usize, mode: u32) {
        begin(runtime_device(), own(stream), mode)
    }

    fn cudaStreamEndCapture_ptsz(stream: usize, out: Out<usize>) {
        end(runtime_device(), own(stream), out)
    }

    fn cudaGraphLaunch_ptsz(handle: usize, stream: usize) {
        launch(handle, runtime_device(), own(stream))
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

    /// Reports the number of kernels; there are no node handles.
    fn cudaGraphGetNodes(handle: usize, nodes: Out<usize>, n: Out<usize>) {
        let captured = graphs().get(handle)?.captured.clone();
        let kernels: u64 = captured.iter().filter_map(|&id| gpu().sim.graph_work(id)).map(
            |(kernels, _)| kernels
        ).sum();
        n.put(if nodes.raw().is_null() { kernels as usize } else { 0 })
    }

    fn cudaGraphNodeGetDependencies(
        _node: usize, _dependencies: usize, _edges: usize, n: Out<usize>
    ) {
        n.put(0)
    }

    fn cudaGraphDebugDotPrint(_handle: usize, _path: usize, _flags: u32) {
        Err(code::NOT_SUPPORTED)
    }
}

driver! {
    fn cuStreamBeginCaptureToGraph(
        stream: usize, graph: usize, _dependencies: usize, _edges: usize, _n: usize, mode: u32,
    ) {
        begin_into(stream_device(stream)?, stream, graph, mode)
    }

    fn cuGraphCreate(out: Out<usize>, _flags: u32) {
        create(out)
    }
}
