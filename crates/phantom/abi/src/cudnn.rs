//! cuDNN: convolutions, batch normalisation, grid samplers and every operation of its graph
//! interface are empty launches. Recurrent networks are in `cudnn_rnn.rs`; CTC is not simulated.
//!
//! The size of cuDNN's workspaces is known only to its heuristics and depends on its version: here
//! they are empty, and each call that might want one is counted (`unknown_workspaces` in the
//! books).

use crate::abi::{Counter, In, Out};
use crate::entry::succeeds;
use crate::handle::{HandlePtr, kernels, launched, objects};
use crate::workspaces;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

// `cudnnStatus_t`.
pub const BAD_PARAM: u32 = 2000;
pub const NULL_POINTER: u32 = 2002;
pub const EXECUTION_FAILED: u32 = 5000;

/// The code of a written result, or of a NULL place.
pub fn done(answer: Result<(), u32>) -> u32 {
    answer.map_or(NULL_POINTER, |()| 0)
}

/// The version: `PHANTOM_CUDNN`, or torch 2.15.0's. torch refuses one below that of its build.
fn version() -> [i32; 3] {
    static VERSION: OnceLock<[i32; 3]> = OnceLock::new();
    let parse = |text: String| {
        let parts: Vec<i32> = text.split('.').map_while(|part| part.parse().ok()).collect();
        parts.get(..3)?.try_into().ok()
    };
    let found = || std::env::var("PHANTOM_CUDNN").ok().and_then(parse).unwrap_or([9, 26, 0]);
    *VERSION.get_or_init(found)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetVersion() -> usize {
    let [major, minor, patch] = version();
    (major * 10_000 + minor * 100 + patch) as usize
}

/// `libraryPropertyType`: the version's parts.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetProperty(part: u32, out: Out<i32>) -> u32 {
    match version().get(part as usize) {
        Some(&number) => done(out.put(number)),
        None => BAD_PARAM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetCudartVersion() -> usize {
    13_000
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnCreate(out: Out<HandlePtr>) -> u32 {
    static CALLS: Counter = Counter::new("cudnnCreate");
    CALLS.hit();
    if HandlePtr::create(out) == 0 { 0 } else { NULL_POINTER }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnDestroy(handle: HandlePtr) -> u32 {
    handle.destroy();
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnSetStream(handle: HandlePtr, stream: usize) -> u32 {
    handle.set_stream(stream);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetStream(handle: HandlePtr, out: Out<usize>) -> u32 {
    done(out.put(handle.stream()))
}

// The graph interface (cudnnBackend...): operations become a graph, a heuristic offers
// configurations of engines for it, and a plan made of one is executed.

/// The used part of `cudnnBackendDescriptorType_t`.
mod kind {
    pub const OPERATION_CONVOLUTION_FORWARD: u32 = 10;
    pub const OPERATION_CONVOLUTION_BACKWARD_FILTER: u32 = 11;
    pub const OPERATION_CONVOLUTION_BACKWARD_DATA: u32 = 12;
    pub const OPERATION_MATMUL: u32 = 19;
    pub const OPERATION_SDPA_FORWARD: u32 = 41;
    pub const OPERATION_SDPA_BACKWARD: u32 = 42;
}

/// `CUDNN_TYPE_BACKEND_DESCRIPTOR` and `CUDNN_TYPE_INT32`.
const DESCRIPTOR: u32 = 15;
const INT32: u32 = 23;

/// The used part of `cudnnBackendAttributeName_t`.
mod attribute {
    pub const HEURISTIC_RESULTS: u32 = 202;
    pub const CONFIGURATION_ENGINE: u32 = 300;
    pub const CONFIGURATION_WORKSPACE_SIZE: u32 = 303;
    pub const CONFIGURATION_SHARED_MEMORY_USED: u32 = 304;
    pub const PLAN_WORKSPACE_SIZE: u32 = 402;
    pub const GRAPH_ENGINE_COUNT: u32 = 802;
    pub const ENGINE_INDEX: u32 = 1301;
}

/// Purposes of a graph; the name is that of its unknown workspace in the books. Objects made of a
/// descriptor share its purpose.
const PURPOSES: [&str; 5] = [
    "cudnnBackendExecute",
    "cudnnConvolutionForward",
    "cudnnConvolutionBackwardFilter",
    "cudnnConvolutionBackwardData",
    "cudnn attention",
];

/// A descriptor of the graph interface: an index into [`PURPOSES`], written by its creator before
/// it is shared.
pub struct Descriptor {
    purpose: AtomicU8,
}

/// The C caller's pointer to a descriptor.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct DescriptorPtr(*const Descriptor);

impl DescriptorPtr {
    fn get(&self) -> Option<&Descriptor> {
        // SAFETY: by cuDNN's contract a non-null descriptor came from cudnnBackendCreateDescriptor
        // and was not destroyed.
        unsafe { self.0.as_ref() }
    }

    /// Takes on the purpose of `other`, unless it has one.
    fn does(self, other: Self) {
        if let (Some(this), Some(other)) = (self.get(), other.get())
            && this.purpose.load(Relaxed) == 0
        {
            this.purpose.store(other.purpose.load(Relaxed), Relaxed);
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendCreateDescriptor(kind: u32, out: Out<DescriptorPtr>) -> u32 {
    let purpose = match kind {
        kind::OPERATION_CONVOLUTION_FORWARD => 1,
        kind::OPERATION_CONVOLUTION_BACKWARD_FILTER => 2,
        kind::OPERATION_CONVOLUTION_BACKWARD_DATA => 3,
        // torch multiplies matrices by cuDNN in attention only.
        kind::OPERATION_MATMUL | kind::OPERATION_SDPA_FORWARD | kind::OPERATION_SDPA_BACKWARD => 4,
        _ => 0,
    };
    let descriptor = Box::new(Descriptor { purpose: AtomicU8::new(purpose) });
    done(out.put(DescriptorPtr(Box::into_raw(descriptor))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendDestroyDescriptor(descriptor: DescriptorPtr) -> u32 {
    if !descriptor.0.is_null() {
        // SAFETY: by cuDNN's contract it came from cudnnBackendCreateDescriptor and is destroyed
        // once.
        drop(unsafe { Box::from_raw(descriptor.0.cast_mut()) });
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendSetAttribute(
    descriptor: DescriptorPtr,
    _attribute: u32,
    element_type: u32,
    count: i64,
    elements: In<DescriptorPtr>,
) -> u32 {
    if element_type == DESCRIPTOR {
        for index in 0..count.max(0) as usize {
            let Ok(part) = elements.nth(index) else { return NULL_POINTER };
            descriptor.does(part);
        }
    }
    0
}

/// Offers one configuration for every graph, with engine 0 and no workspace. Notes, knobs and all
/// else are empty.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendGetAttribute(
    descriptor: DescriptorPtr,
    attribute: u32,
    element_type: u32,
    wanted: i64,
    count: Out<i64>,
    elements: Out<i64>,
) -> u32 {
    let there = match attribute {
        attribute::HEURISTIC_RESULTS | attribute::CONFIGURATION_ENGINE => {
            let mut part = DescriptorPtr(std::ptr::null());
            if wanted > 0 {
                // SAFETY: for these attributes the caller brings an array of as many descriptors.
                part = unsafe { *elements.cast::<DescriptorPtr>().raw() };
            }
            part.does(descriptor);
            1
        }
        attribute::CONFIGURATION_WORKSPACE_SIZE
        | attribute::CONFIGURATION_SHARED_MEMORY_USED
        | attribute::PLAN_WORKSPACE_SIZE
        | attribute::ENGINE_INDEX => {
            put_number(elements, element_type, 0);
            1
        }
        attribute::GRAPH_ENGINE_COUNT => {
            put_number(elements, element_type, 1);
            1
        }
        _ => 0,
    };
    count.put_if_wanted(there);
    0
}

/// Writes a number of 32 bits if the caller asks for that, else of 64.
fn put_number(elements: Out<i64>, element_type: u32, number: i32) {
    match element_type {
        INT32 => elements.cast::<i32>().put_if_wanted(number),
        _ => elements.put_if_wanted(i64::from(number)),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendExecute(
    handle: HandlePtr,
    plan: DescriptorPtr,
    _operands: DescriptorPtr,
) -> u32 {
    static CALLS: Counter = Counter::new("cudnnBackendExecute");
    let purpose = plan.get().map_or(0, |plan| plan.purpose.load(Relaxed));
    workspaces::unknown(PURPOSES[usize::from(purpose)]);
    launched(&CALLS, handle.stream(), EXECUTION_FAILED)
}

// The older interface.

objects! { NULL_POINTER =>
    cudnnCreateActivationDescriptor cudnnCreateConvolutionDescriptor cudnnCreateDropoutDescriptor
    cudnnCreateFilterDescriptor cudnnCreateRNNDataDescriptor
    cudnnCreateSpatialTransformerDescriptor
}

succeeds! {
    cudnnBackendFinalize cudnnDestroyActivationDescriptor cudnnDestroyConvolutionDescriptor
    cudnnDestroyDropoutDescriptor cudnnDestroyFilterDescriptor cudnnDestroyRNNDataDescriptor
    cudnnDestroySpatialTransformerDescriptor cudnnRestoreDropoutDescriptor
    cudnnSetActivationDescriptor cudnnSetConvolutionGroupCount cudnnSetConvolutionMathType
    cudnnSetConvolutionNdDescriptor cudnnSetDropoutDescriptor cudnnSetFilterNdDescriptor
    cudnnSetRNNDataDescriptor cudnnSetSpatialTransformerNdDescriptor cudnnSetTensorNdDescriptor
}

/// `cudnnConvolutionFwdAlgoPerf_t` and its like for the gradients.
#[repr(C)]
#[derive(Default)]
pub struct Algorithm {
    number: i32,
    status: u32,
    milliseconds: f32,
    workspace: usize,
    determinism: u32,
    math: u32,
    reserved: [i32; 3],
}

/// One algorithm, number 1: deterministic, without a workspace.
fn one_algorithm(wanted: i32, found: Out<i32>, results: Out<Algorithm>) -> u32 {
    if wanted > 0 {
        let one = Algorithm { number: 1, determinism: 1, ..Algorithm::default() };
        if results.put(one).is_err() {
            return NULL_POINTER;
        }
    }
    done(found.put(wanted.clamp(0, 1)))
}

macro_rules! algorithms {
    ($($get:ident $find:ident $size:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $get(
            _handle: HandlePtr, _a: usize, _b: usize, _convolution: usize, _c: usize, wanted: i32,
            found: Out<i32>, results: Out<Algorithm>,
        ) -> u32 {
            one_algorithm(wanted, found, results)
        }

        #[unsafe(no_mangle)]
        pub extern "C" fn $find(
            _handle: HandlePtr, _a: usize, _a_data: usize, _b: usize, _b_data: usize,
            _convolution: usize, _c: usize, _c_data: usize, wanted: i32, found: Out<i32>,
            results: Out<Algorithm>, _workspace: usize, _bytes: usize,
        ) -> u32 {
            one_algorithm(wanted, found, results)
        }

        #[unsafe(no_mangle)]
        pub extern "C" fn $size(
            _handle: HandlePtr, _a: usize, _b: usize, _convolution: usize, _c: usize,
            _algorithm: i32, bytes: Out<usize>,
        ) -> u32 {
            done(bytes.put(0))
        }
    )*};
}

algorithms! {
    cudnnGetConvolutionForwardAlgorithm_v7 cudnnFindConvolutionForwardAlgorithmEx
    cudnnGetConvolutionForwardWorkspaceSize
    cudnnGetConvolutionBackwardDataAlgorithm_v7 cudnnFindConvolutionBackwardDataAlgorithmEx
    cudnnGetConvolutionBackwardDataWorkspaceSize
    cudnnGetConvolutionBackwardFilterAlgorithm_v7 cudnnFindConvolutionBackwardFilterAlgorithmEx
    cudnnGetConvolutionBackwardFilterWorkspaceSize
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    _handle: HandlePtr,
    _mode: u32,
    _operations: u32,
    _x: usize,
    _z: usize,
    _y: usize,
    _scale: usize,
    _activation: usize,
    bytes: Out<usize>,
) -> u32 {
    done(bytes.put(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    _handle: HandlePtr,
    _mode: u32,
    _operations: u32,
    _x: usize,
    _y: usize,
    _dy: usize,
    _dz: usize,
    _dx: usize,
    _scale: usize,
    _activation: usize,
    bytes: Out<usize>,
) -> u32 {
    done(bytes.put(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    _handle: HandlePtr,
    _mode: u32,
    _operations: u32,
    _activation: usize,
    _x: usize,
    bytes: Out<usize>,
) -> u32 {
    done(bytes.put(0))
}

/// Exports functions that launch one kernel and might want a workspace.
macro_rules! kernels_with_workspace {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(handle: HandlePtr) -> u32 {
            static CALLS: Counter = Counter::new(stringify!($name));
            workspaces::unknown(stringify!($name));
            launched(&CALLS, handle.stream(), EXECUTION_FAILED)
        }
    )*};
}

kernels_with_workspace! {
    cudnnBatchNormalizationBackwardEx cudnnBatchNormalizationForwardTrainingEx
    cudnnConvolutionBackwardData cudnnConvolutionBackwardFilter
    cudnnConvolutionBiasActivationForward cudnnConvolutionForward
}

kernels! { EXECUTION_FAILED =>
    cudnnBatchNormalizationForwardInference cudnnSpatialTfGridGeneratorBackward
    cudnnSpatialTfGridGeneratorForward cudnnSpatialTfSamplerBackward cudnnSpatialTfSamplerForward
}
