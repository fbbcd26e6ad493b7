//! libgruyere_driver.so: brings a program's calls of the CUDA driver to libgruyere.so. Only ever in
//! `LD_PRELOAD`, before libgruyere.so, and only where `preload:driver` asks for it.
//!
//! A program that links the CUDA runtime statically (nvcc's default) calls no `cudaMalloc` that the
//! dynamic linker knows. It opens `libcuda.so.1`, asks `dlsym` for `cuGetProcAddress_v2`, and that
//! function for everything else. So both are stood in for here ([`dlsym`](shim) and
//! [`entry_point`]), and what is linked to libcuda by symbol is met by symbol ([`trampoline`]).
//! What the functions do is libgruyere.so's business: it exports a [`table`] that says, for a
//! function of the driver, what to hand out in its place.
//!
//! Libraries that hook `dlsym` and `cuGetProcAddress` both have died of infinite recursion: they
//! looked the driver up through themselves, or were asked by the driver, or by a library that the
//! driver loads. The rules here, against that:
//!
//! - what is no name of ours leaves by a jump, with the caller's registers, stack and return
//!   address: glibc's `dlsym` finds out by the return address who asks, and `RTLD_NEXT` and
//!   `RTLD_DEFAULT` depend on it. Nothing is allocated, locked or called before that jump;
//! - nothing here calls the exported `dlsym`: lookups of our own go to the real one by its address
//!   ([`real`]);
//! - `RTLD_NEXT` is always answered by the real `dlsym`: it is how a library behind us asks for the
//!   driver, and an answer that leads back to us would close a circle;
//! - the driver's own lookups, libgruyere.so's, and those of an object for its own functions get
//!   the real function ([`lookup`]).
//!
//! No panic can happen here: there is no arithmetic that overflows, no index that is not checked,
//! no call that may unwind.

mod entry_point;
mod lookup;
mod names;
mod objects;
mod real;
mod shim;
mod table;
mod trampoline;
