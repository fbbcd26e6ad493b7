//! `preload:driver`: the driver's calls of programs that link the CUDA runtime statically, or that
//! use the driver directly.
//!
//! Nothing here is exported under a name of CUDA's. libgruyere_driver.so (the `preload` package)
//! replaces `dlsym` and `cuGetProcAddress`, asks the [`table`] which function to hand out, and does
//! the same for references linked to libcuda by symbol. The functions handed out ([`calls`]) treat
//! a call as the runtime's do: serve it ([`manage`]), watch it ([`observe`]), or pass it through. A
//! driver call that an interposed runtime call makes passes through, and is not counted twice
//! ([`super::inside`]).

mod calls;
mod context;
mod manage;
mod observe;
mod real;
mod table;

pub(super) use context::forget as forget_context;
