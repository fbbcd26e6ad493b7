//! Gruyère: a CUDA memory allocator with almost no holes.
//!
//! One shared library, which PyTorch loads through `torch.cuda.memory.CUDAPluggableAllocator`.
//! Callers enter through [`door`], [`heap`] places blocks, [`driver`] gets and returns device
//! memory, [`dump`] reports an out-of-memory, and [`record`] is what other processes can read.

pub mod config;
pub mod door;
pub mod driver;
pub mod dump;
mod log_pace;
pub mod nvtx;

pub use gruyere_heap as heap;
pub use gruyere_record as record;
pub use gruyere_record::{file, watch};
