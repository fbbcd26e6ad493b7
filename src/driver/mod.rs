//! Gets and returns device memory: the trait is the heap's ([`gruyere_heap::driver`]), the CUDA
//! driver behind it is here.

pub mod cuda;

pub use gruyere_heap::driver::*;
