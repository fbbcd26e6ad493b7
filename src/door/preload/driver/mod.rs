//! `preload:driver`: the driver's calls of programs that link the CUDA runtime statically, or that
//! use the driver themselves.
//!
//! Nothing here is exported by a name of CUDA's. libgruyere_driver.so (the `preload` package)
//! stands in for `dlsym` and `cuGetProcAddress`, asks the [`table`] what to hand out, and sends
//! what is linked to libcuda by symbol the same way. The functions that are handed out ([`calls`])
//! do as those of the runtime do: they are served ([`manage`]), watched ([`observe`]), or go
//! straight through. A call of the driver that an interposed call of the runtime makes goes
//! straight through, and is not counted twice ([`super::inside`]).

mod calls;
mod context;
mod manage;
mod observe;
mod real;
mod table;

pub(super) use context::forget as forget_context;
