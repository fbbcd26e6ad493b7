//! Gruyère: a CUDA memory allocator with almost no holes.
//!
//! One shared library that PyTorch loads through `torch.cuda.memory.CUDAPluggableAllocator`.
//! Callers come in through [`door`], [`heap`] decides where a block goes, [`driver`] is how device
//! memory comes and goes, [`dump`] is what an out-of-memory leaves behind, and [`record`] is what
//! other processes can read of it all.

pub mod config;
pub mod door;
pub mod driver;
pub mod dump;
pub mod nvtx;

pub use gruyere_heap as heap;
pub use gruyere_record as record;
pub use gruyere_record::{file, watch};
