//! libgruyere_driver.so: brings a program's calls of the CUDA driver to libgruyere.so. Only ever in
//! `LD_PRELOAD`, before libgruyere.so, and only where `preload:driver` asks for it.
//!
//! A program that links the CUDA runtime statically (nvcc's default) calls no `cudaMalloc` that the
//! dynamic linker knows. It opens `libcuda.so.1`, asks `dlsym` for `cuGetProcAddress_v2`, and that
//! function for everything else. So this library replaces both ([`dlsym`](shim) and
//! [`entry_point`]), and exports the symbols that programs link to libcuda ([`trampoline`]).
//! libgruyere.so does the work: it exports a [`table`] with the replacement of each function of the
//! driver.
//!
//! Libraries that hook both `dlsym` and `cuGetProcAddress` have died of infinite recursion: they
//! looked the driver up through themselves, or the driver, or a library that it loads, looked
//! functions up through them. The rules against that:
//!
//! - a name that is not ours leaves by a jump, with the caller's registers, stack and return
//!   address: glibc's `dlsym` identifies its caller by the return address, and `RTLD_NEXT` and
//!   `RTLD_DEFAULT` depend on it. Nothing is allocated, locked or called before that jump;
//! - nothing here calls the exported `dlsym`: our own lookups go to the real one by its address
//!   ([`real`]);
//! - the real `dlsym` always serves `RTLD_NEXT`: a library behind us looks the driver up that way,
//!   and a result that leads back to us would close a circle;
//! - the driver's own lookups, libgruyere.so's, and those of an object for its own functions get
//!   the real function ([`lookup`]).
//!
//! No panic can happen here: no arithmetic overflows, every index is checked, no call may unwind.

mod entry_point;
mod lookup;
mod names;
mod objects;
mod real;
mod shim;
mod table;
mod trampoline;
