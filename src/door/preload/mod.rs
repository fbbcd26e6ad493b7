//! The LD_PRELOAD door: the CUDA runtime's calls of any program, served by the heap or only
//! watched.
//!
//! libgruyere.so exports the runtime's allocation functions. Preloaded, it is what the program's
//! references are bound to; each call is served ([`manage`]), or goes through and is written down
//! ([`observe`]), or just goes through ([`mode`]). The real functions are those that the caller
//! would have had without us ([`runtime`]).
//!
//! What keeps it from doing harm:
//! - Nothing happens before the program's own first call, and nothing of CUDA is loaded or
//!   initialised before it would have been.
//! - Every free asks the heap whose the pointer is, before anybody acts on it.
//! - A thread that is inside the library goes straight through ([`inside`]): the library's own use
//!   of CUDA, and what that calls back.
//! - A forked child of a process with a heap goes straight through, as it has no usable CUDA; so
//!   does a call before the library's initialiser has run, and a malloc after its exit handler.
//!   Frees of ours after it succeed and do nothing.
//! - A library that is loaded with RTLD_DEEPBIND binds to the runtime itself and is not seen. If it
//!   frees a pointer of ours, the runtime refuses it, as it does any that it does not know.

mod current;
mod driver;
mod entry;
mod failure;
pub mod inside;
mod later;
mod leave;
mod manage;
pub mod mode;
mod nccl;
mod observe;
pub mod runtime;
pub(crate) mod shim;
mod way;
mod whose;

pub use mode::{Mode, mode};
