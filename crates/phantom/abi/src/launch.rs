//! Kernels: registered, counted, never run.

use crate::abi::{Answer, In, Out, Text, code};
use crate::call_log::{by_value, large};
use crate::context::runtime_device;
use crate::entry::{driver, runtime};
use crate::fatbin;
use crate::gpu::{gpu, own};
use crate::numbers::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

by_value! { Dim3 }
large! { Dim3 TensorMap }

/// `CUtensorMap`: a descriptor for the tensor memory accelerator, which only kernels read.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct TensorMap {
    words: [u64; 16],
}

/// `dim3`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dim3 {
    x: u32,
    y: u32,
    z: u32,
}

/// A configuration, pushed by `<<<...>>>` and popped by the kernel's host stub.
#[derive(Clone, Copy)]
struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: usize,
}

const ONE: Dim3 = Dim3 { x: 1, y: 1, z: 1 };

thread_local! {
    static PUSHED: Cell<Configuration> =
        const { Cell::new(Configuration { grid: ONE, block: ONE, shared: 0, stream: 0 }) };
}

/// The start of `cudaLaunchConfig_t` and `CUlaunchConfig`, up to the stream.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchConfig {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DriverLaunchConfig {
    grid_block_shared: [u32; 7],
    stream: usize,
}

/// The host stub of torch's kernel that spins for its argument's number of cycles
/// (`torch.cuda._sleep`): the only kernel with a duration set by the program.
///
/// ```text
/// 0 --(torch's static constructors register the kernel)--> the address of its stub
/// ```
static SPIN: AtomicUsize = AtomicUsize::new(0);

// Registration runs thousands of times in static constructors, before anything else: no counters
// here, and no state but the above and the origins of kernels.

/// The handle is the address of the registered wrapper.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(wrapper: usize) -> usize {
    fatbin::register(wrapper);
    wrapper
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd() {}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(wrapper: usize) {
    fatbin::unregister(wrapper);
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFunction(wrapper: usize, stub: usize, _device: usize, name: Text) {
    fatbin::register_function(wrapper, stub);
    if name.get().is_ok_and(|name| name.to_bytes().ends_with(b"11spin_kernelEl")) {
        SPIN.store(stub, Relaxed);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterVar() {}

/// 1: the module needs no further initialisation.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaInitModule() -> u8 {
    1
}

/// 0: go on with the launch.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: usize,
) -> u32 {
    PUSHED.set(Configuration { grid, block, shared, stream });
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaPopCallConfiguration(
    grid: Out<Dim3>,
    block: Out<Dim3>,
    shared: Out<usize>,
    stream: Out<usize>,
) -> u32 {
    let pushed = PUSHED.get();
    grid.put_if_wanted(pushed.grid);
    block.put_if_wanted(pushed.block);
    shared.put_if_wanted(pushed.shared);
    stream.put_if_wanted(pushed.stream);
    0
}

/// The kernel's handle is the address of its host stub.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaGetKernel(kernel: Out<usize>, stub: usize) -> u32 {
    kernel.put(stub).err().unwrap_or(0)
}

/// Launches one kernel on the stream, which never runs.
fn launched(stream: usize) -> Answer {
    gpu().launch(stream)
}

/// As the runtime: a thread without a context gets the primary one.
fn launched_by_runtime(stream: usize) -> Answer {
    runtime_device();
    launched(stream)
}

/// As above; a spinning kernel takes a nanosecond per cycle.
fn launched_with(function: usize, arguments: In<In<u64>>, stream: usize) -> Answer {
    if function == 0 || function != SPIN.load(Relaxed) {
        return launched_by_runtime(stream);
    }
    runtime_device();
    gpu().launch_of_length(stream, arguments.get()?.get()?)
}

runtime! {
    fn __cudaLaunchKernel(
        kernel: usize, _grid: Dim3, _block: Dim3, args: In<In<u64>>, _shared: usize, stream: usize
    ) {
        launched_with(kernel, args, stream)
    }

    fn cudaLaunchKernel(
        function: usize, _grid: Dim3, _block: Dim3, args: In<In<u64>>, _shared: usize,
        stream: usize
    ) {
        launched_with(function, args, stream)
    }

    fn cudaLaunchKernel_ptsz(
        _function: usize, _grid: Dim3, _block: Dim3, _args: usize, _shared: usize, stream: usize
    ) {
        launched_by_runtime(own(stream))
    }

    fn cudaLaunchKernelExC_ptsz(config: In<LaunchConfig>, _function: usize, _args: usize) {
        launched_by_runtime(own(config.get()?.stream))
    }

    fn cudaLaunchCooperativeKernel(
        _f: usize, _grid: Dim3, _block: Dim3, _args: usize, _shared: usize, stream: usize
    ) {
        launched_by_runtime(stream)
    }

    fn cudaLaunchKernelExC(config: In<LaunchConfig>, _function: usize, _args: usize) {
        launched_by_runtime(config.get()?.stream)
    }

    /// Calls the function at once: everything before it on the stream is done, since nothing takes
    /// time here.
    fn cudaLaunchHostFunc(stream: usize, function: Option<extern "C" fn(usize)>, data: usize) {
        gpu().host_function(stream, move || if let Some(function) = function { function(data) })
    }

    fn cudaLaunchHostFunc_ptsz(stream: usize, function: Option<extern "C" fn(usize)>, data: usize) {
        gpu()
            .host_function(own(stream), move || if let Some(function) = function { function(data) })
    }

    fn cudaStreamAddCallback(
        stream: usize, function: Option<extern "C" fn(usize, u32, usize)>, data: usize, _flags: u32,
    ) {
        gpu()
            .host_function(
                stream, move || if let Some(function) = function { function(stream, 0, data) }
            )
    }

    fn cudaFuncSetAttribute(_function: usize, _attribute: i32, _value: i32) {
        Ok(())
    }

    /// Separate memory for each symbol would need the fat binary's table; one page of zeros serves,
    /// since no kernel reads it.
    fn cudaGetSymbolAddress(out: Out<usize>, _symbol: usize) {
        static PLACE: [u64; 512] = [0; 512];
        out.put(PLACE.as_ptr() as usize)
    }

    fn cudaMemcpyToSymbol(
        _symbol: usize, _source: usize, _bytes: usize, _offset: usize, _kind: i32
    ) {
        Ok(())
    }
}

driver! {
    fn cuLaunchKernel(
        _function: usize, _gx: u32, _gy: u32, _gz: u32, _bx: u32, _by: u32, _bz: u32, _shared: u32,
        stream: usize,
        _args: usize, _extra: usize,
    ) {
        launched(stream)
    }

    fn cuLaunchKernel_ptsz(
        _function: usize, _gx: u32, _gy: u32, _gz: u32, _bx: u32, _by: u32, _bz: u32, _shared: u32,
        stream: usize,
        _args: usize, _extra: usize,
    ) {
        launched(own(stream))
    }

    fn cuLaunchCooperativeKernel(
        _function: usize, _gx: u32, _gy: u32, _gz: u32, _bx: u32, _by: u32, _bz: u32, _shared: u32,
        stream: usize,
        _args: usize,
    ) {
        launched(stream)
    }

    fn cuLaunchKernelEx(
        config: In<DriverLaunchConfig>, _function: usize, _args: usize, _extra: usize
    ) {
        launched(config.get()?.stream)
    }

    fn cuLaunchHostFunc(stream: usize, function: Option<extern "C" fn(usize)>, data: usize) {
        gpu().host_function(stream, move || if let Some(function) = function { function(data) })
    }

    fn cuStreamAddCallback(
        stream: usize, function: Option<extern "C" fn(usize, u32, usize)>, data: usize, _flags: u32,
    ) {
        gpu()
            .host_function(
                stream, move || if let Some(function) = function { function(stream, 0, data) }
            )
    }

    fn cuModuleLoad(out: Out<usize>, _path: usize) { out.put(1) }
    fn cuModuleLoadData(out: Out<usize>, _image: usize) { out.put(1) }
    fn cuModuleLoadDataEx(
        out: Out<usize>, _image: usize, _n: u32, _options: usize, _values: usize
    ) { out.put(1) }
    fn cuModuleUnload(_module: usize) { Ok(()) }
    fn cuModuleGetFunction(out: Out<usize>, _module: usize, _name: usize) { out.put(1) }
    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, _module: usize, _name: usize) {
        static PLACE: [u64; 512] = [0; 512];
        address.put_if_wanted(PLACE.as_ptr() as u64);
        bytes.put_if_wanted(size_of_val(&PLACE));
        Ok(())
    }
    fn cuFuncGetAttribute(out: Out<i32>, attribute: i32, _function: usize) {
        out.put(match attribute {
            CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            CU_FUNC_ATTRIBUTE_NUM_REGS => 32,
            CU_FUNC_ATTRIBUTE_PTX_VERSION | CU_FUNC_ATTRIBUTE_BINARY_VERSION => {
                gpu().looks.generation.number()
            }
            _ => 0,
        })
    }
    fn cuFuncSetAttribute(_function: usize, _attribute: i32, _value: i32) { Ok(()) }
    fn cuFuncSetCacheConfig(_function: usize, _config: i32) { Ok(()) }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        out: Out<i32>, _function: usize, _block: i32, _shared: usize
    ) {
        out.put(2)
    }

    /// The kernels of Hopper's attention make some for each launch.
    fn cuTensorMapEncodeTiled(
        map: Out<TensorMap>, _element: u32, rank: u32, address: u64, _lengths: usize,
        _strides: usize, _box: usize, _element_strides: usize, _interleave: u32, _swizzle: u32,
        _promotion: u32, _fill: u32
    ) {
        if !(1..=5).contains(&rank) || !address.is_multiple_of(16) {
            return Err(code::INVALID_VALUE);
        }
        let mut words = [0; 16];
        words[0] = address;
        map.put(TensorMap { words })
    }
}
