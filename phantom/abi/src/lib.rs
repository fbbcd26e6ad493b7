//! The ABI face of the stand-in GPU: a library that stands in for libcuda, NVML, the CUDA runtime,
//! cuBLAS and whatever else the real PyTorch wheel links, keeps exact books of device memory
//! (through `gruyere-phantom`), and launches nothing.
//!
//! # Use
//! Preload it into Python, with a folder on `LD_LIBRARY_PATH` in which `libcuda.so.1` and the names
//! of the CUDA libraries that torch is linked with are links to it:
//! `python_loader/gruyere/_stand_in.py` has the names, makes the folder, and finds the library in
//! the wheel. `PHANTOM_OWNER` must name a file that the starter holds a lock on (`owner.rs`; class
//! `Owner` there makes one): without, the process ends at its first use of CUDA, with one line.
//! Loaded alone, the library says and does nothing.
//!
//! | variable | what | default |
//! |---|---|---|
//! | `PHANTOM_DEVICES` | number of devices | 1 |
//! | `PHANTOM_MEMORY` | memory of each (`80GiB`) | 80GiB |
//! | `PHANTOM_TAKEN` | what others and the process's own context hold of each (`500MiB`) | 0 |
//! | `PHANTOM_OWNER` | file that who started this holds a lock on, with a line "PID STARTTIME" of it | |
//! | `PHANTOM_DRYRUN` | `1`: a dry run reads what the program does. No line on stderr says that this is no GPU, names do not end in " (stand-in)", and a real driver's device files are no obstacle | |
//! | `PHANTOM_DEV_FOLDER` | folder in which a real driver's device files are looked for beside /dev | |
//! | `PHANTOM_NAME` | their name, at most 244 bytes (255 with `PHANTOM_DRYRUN`), to which " (stand-in)" is added | Phantom H100 |
//! | `PHANTOM_CAPABILITY` | their compute capability, and with it shared memory, threads, blocks and the L2 cache; clocks and bus stay an H100's | 9.0 |
//! | `PHANTOM_MULTIPROCESSORS` | multiprocessors of each | 132 |
//! | `PHANTOM_WINDOW` | address space for device memory; valgrind needs it small | 16TiB |
//! | `PHANTOM_COPY_LIMIT` | copies and fills above this size are skipped | 64KiB |
//! | `PHANTOM_CONTENTS` | `handles`: what is in mapped memory belongs to its physical handle, at any size, is poison when new, and faults where nothing is mapped or access was not set (takes the host's memory for all that is created); `addresses`: it stays at its address | addresses |
//! | `PHANTOM_VALUES` | what the host reads where a kernel would have written: `zeros`, or `random:SEED`, small values that are valid in every type (`values.rs`); every copy to the host is then done in full, at any size | what lies there |
//! | `PHANTOM_KERNEL_NS` | how long a kernel runs on the virtual clock, ns | 0 |
//! | `PHANTOM_COSTS` | what costs the host time on it: `none`, `launches`, or `calls` (every driver call) | none; `calls` with `PHANTOM_PRICES` |
//! | `PHANTOM_PRICES` | what calls cost: `by-call`, `by-mapping`, `by-mapping-and-page`, or a JSON file (`phantom/src/prices.rs`) | by-call |
//! | `PHANTOM_WITHOUT` | what the devices lack: `vmm`, `pools`, `stream_ids`, `context_events` (`cuCtxRecordEvent`), comma-separated | |
//! | `PHANTOM_GRANULARITY` | the unit of physical memory and of mappings: a power of two | 2MiB |
//! | `PHANTOM_ALIGNMENT` | what reservations are aligned to that ask for no alignment, and no better where it is below 2 MiB: a power of two | 2MiB |
//! | `PHANTOM_CAPTURING_IDS` | what `cuStreamGetId` does on a capturing stream: `told`, `refused` (code 900), or `invalidate` (and the capture fails) | told |
//! | `PHANTOM_HANDLE_TYPES` | how physical memory may leave the process: `posix`, `fabric`, comma-separated, or `none`; `refused` beside them: said to be there, and every export is refused | posix |
//! | `PHANTOM_RDMA` | `gpuDirectRDMACapable`: `works`, `missing`, `refused` (said to be there, and `cuMemCreate` refuses), or `without-access` (`cuMemSetAccess` does) | works |
//! | `PHANTOM_INTEGRATED` | `on`: the devices share the host's memory | off |
//! | `PHANTOM_ORACLE` | `on`: judge the order of all work and name what is wrong on stderr (`phantom_owns`, `phantom_touch`, `phantom_hazards`) | off |
//! | `PHANTOM_CALL_LOG` | file for a line a call (`%p`: the process id) | |
//! | `PHANTOM_BOOKS` | file for the books as JSON, written at exit (`%p`: the process id) | |
//! | `PHANTOM_CONTEXTS` | file that is made with the process's first context (`%p`: the process id) | |
//! | `PHANTOM_EXIT` | `deinitialize`: after the exit handlers every call answers DEINITIALIZED, as a real driver's | |
//! | `PHANTOM_QUIET` | do not name functions that are not simulated on stderr | |
//!
//! # A missing function
//! Python binds everything when it loads a library, so one that is not there at all is named by the
//! import's own error ("undefined symbol: cudaX"): add it to the file of its concept, or to
//! `unsupported.rs`. One that is there but not simulated names itself on stderr at its first call
//! and is counted in the books (`calls`). For libraries that load lazily, `ldd -r LIBRARY` under
//! the same preload lists what is missing.
//!
//! # Rules
//! Nothing unwinds across the C interface; nothing in thread-local storage needs a destructor; in a
//! forked child every call answers NOT_INITIALIZED at once.

#![allow(non_snake_case, clippy::too_many_arguments)]

mod abi;
mod blas;
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
mod fatbin;
mod gpu;
mod graph;
mod handle;
mod host;
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
mod runtime_memory;
mod runtime_order;
mod sharing;
mod unsupported;
mod values;
mod witness;
mod workspaces;
