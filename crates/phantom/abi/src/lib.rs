//! The ABI face of the simulator: a library that replaces libcuda, NVML, the CUDA runtime, cuBLAS
//! and every other CUDA library that the real PyTorch wheel links. It keeps exact books of device
//! memory (through `gruyere-phantom`) and runs no kernel.
//!
//! # Use
//! Preload it into Python, with a folder on `LD_LIBRARY_PATH` in which `libcuda.so.1` and the names
//! of torch's CUDA libraries are links to it: `python_loader/gruyere/_stand_in.py` has the names,
//! makes the folder, and finds the library in the wheel. `PHANTOM_OWNER` must name a file locked by
//! the starting process (`owner.rs`; class `Owner` there makes one); otherwise the process ends at
//! its first use of CUDA, with one line. Loading alone has no effect.
//!
//! | variable | what | default |
//! |---|---|---|
//! | `PHANTOM_DEVICES` | number of devices | 1 |
//! | `PHANTOM_MEMORY` | memory of each (`80GiB`) | 80GiB |
//! | `PHANTOM_TAKEN` | memory of each held by others and by the process's own context (`500MiB`) | 0 |
//! | `PHANTOM_OWNER` | file locked by the starting process, with its line "PID STARTTIME" | |
//! | `PHANTOM_DRYRUN` | `1`: a dry run reads the program's calls. No line on stderr reports that this is no GPU, names do not end in " (stand-in)", and a real driver's device files are allowed | |
//! | `PHANTOM_DEV_FOLDER` | folder to search for a real driver's device files, beside /dev | |
//! | `PHANTOM_NAME` | their name, at most 244 bytes (255 with `PHANTOM_DRYRUN`), followed by " (stand-in)" | Phantom H100 |
//! | `PHANTOM_CAPABILITY` | their compute capability, which sets shared memory, threads, blocks and the L2 cache; clocks and bus stay those of an H100 | 9.0 |
//! | `PHANTOM_MULTIPROCESSORS` | multiprocessors of each | 132 |
//! | `PHANTOM_CUDNN` | cuDNN's version (`9.30.0`). torch refuses one below that of its build | 9.26.0 |
//! | `PHANTOM_WINDOW` | address space for device memory; valgrind needs it small | 16TiB |
//! | `PHANTOM_COPY_LIMIT` | larger copies and fills are skipped | 64KiB |
//! | `PHANTOM_CONTENTS` | `handles`: contents belong to the physical handle, at any size, are poison when new, and an access without a mapping or without access rights faults (takes host memory for all created memory); `addresses`: contents stay at their address | addresses |
//! | `PHANTOM_VALUES` | values that the host reads in place of kernels' results: `zeros`, or `random:SEED`, small values valid in every type (`values.rs`); every copy to the host is then done in full, at any size | the bytes there |
//! | `PHANTOM_KERNEL_NS` | a kernel's duration on the virtual clock, ns | 0 |
//! | `PHANTOM_COSTS` | calls charged to the host on that clock: `none`, `launches`, or `calls` (every driver call) | none; `calls` with `PHANTOM_PRICES` |
//! | `PHANTOM_PRICES` | prices of calls: `by-call`, `by-mapping`, `by-mapping-and-page`, `h200`, or a JSON file (`crates/phantom/src/prices.rs`) | by-call |
//! | `PHANTOM_WITHOUT` | missing features of the devices: `vmm`, `pools`, `stream_ids`, `context_events` (`cuCtxRecordEvent`), comma-separated | |
//! | `PHANTOM_GRANULARITY` | the unit of physical memory and of mappings: a power of two | 2MiB |
//! | `PHANTOM_ALIGNMENT` | alignment of reservations that ask for none, and no better if below 2 MiB: a power of two | 2MiB |
//! | `PHANTOM_CAPTURING_IDS` | result of `cuStreamGetId` on a capturing stream: `told`, `refused` (code 900), or `invalidate` (code 900, and the capture fails) | told |
//! | `PHANTOM_HANDLE_TYPES` | export of physical memory: `posix`, `fabric`, comma-separated, or `none`; with `refused`, the device reports them but refuses every export | posix |
//! | `PHANTOM_RDMA` | `gpuDirectRDMACapable`: `works`, `missing`, `refused` (reported, but `cuMemCreate` fails), or `without-access` (`cuMemSetAccess` fails) | works |
//! | `PHANTOM_INTEGRATED` | `on`: the devices share the host's memory | off |
//! | `PHANTOM_ORACLE` | `on`: check the order of all work and report faults on stderr (`phantom_owns`, `phantom_touch`, `phantom_hazards`) | off |
//! | `PHANTOM_CALL_LOG` | file for one line per call (`%p`: the process id) | |
//! | `PHANTOM_BOOKS` | file for the books as JSON, written at exit (`%p`: the process id) | |
//! | `PHANTOM_CONTEXTS` | file created with the process's first context (`%p`: the process id) | |
//! | `PHANTOM_EXIT` | `deinitialize`: after the exit handlers every call returns DEINITIALIZED, as in a real driver | |
//! | `PHANTOM_QUIET` | do not report functions that are not simulated on stderr | |
//!
//! # A missing function
//! Python binds every symbol when it loads a library, so the import error names a missing function
//! ("undefined symbol: cudaX"): add it to the file of its concept, or to `unsupported.rs`. A
//! function that exists but is not simulated names itself on stderr at its first call and is
//! counted in the books (`calls`). For libraries that load lazily, `ldd -r LIBRARY` under the same
//! preload lists the missing functions.
//!
//! # Rules
//! Nothing unwinds across the C interface; nothing in thread-local storage needs a destructor; in a
//! forked child every call returns NOT_INITIALIZED at once.

#![allow(non_snake_case, clippy::too_many_arguments)]

mod abi;
mod blas;
mod blas_workspaces;
mod books;
mod call_log;
mod contents;
mod context;
mod control;
mod cuda12;
mod cudnn;
mod cudnn_rnn;
mod cufft;
mod cusolver;
mod cusparse;
mod driver_device;
mod driver_memory;
mod driver_order;
mod driver_vmm;
mod entry;
mod exports;
mod fatbin;
mod gpu;
mod graph;
mod handle;
mod host;
mod host_memory;
mod ipc;
mod launch;
mod looks;
mod lookup;
mod nccl;
mod numbers;
mod nvml;
mod nvrtc;
mod owner;
mod process;
mod properties;
mod reads;
mod registrations;
mod runtime_memory;
mod runtime_order;
mod sharing;
mod torch_blocks;
mod unsupported;
mod values;
mod witness;
mod work;
mod workspaces;
