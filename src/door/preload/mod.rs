//! The LD_PRELOAD door: the heap serves any program's calls of the CUDA runtime, or watches them.
//!
//! libgruyere.so exports the runtime's allocation functions. Preloaded, it binds the program's
//! references to them; a call is served ([`manage`]), made and recorded ([`observe`]), or only
//! passed through ([`mode`]). The real functions are those that the caller would have had without
//! us ([`runtime`]).
//!
//! What keeps it from doing harm:
//! - Nothing happens before the program's own first call, and nothing of CUDA is loaded or
//!   initialised before it would have been.
//! - Every free first asks the heap whether the pointer is ours.
//! - A thread inside the library passes through ([`inside`]): the library's own use of CUDA, and
//!   callbacks from it.
//! - A forked child of a process with a heap passes through, as it has no usable CUDA; so does a
//!   call before the library's initialiser has run, and a malloc after its exit handler. Frees of
//!   ours after it succeed and do nothing.
//! - A library loaded with RTLD_DEEPBIND binds to the runtime itself and is not seen. If it frees a
//!   pointer of ours, the runtime refuses it, like any unknown pointer.

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

/// The library's initialiser.
extern "C" fn initialize() {
    // A panic here would end programs that do not use us.
    super::process::guarded((), || {
        if mode::note_preloading() {
            leave::watch();
        }
    });
    mode::note_loaded();
}

#[used]
#[unsafe(link_section = ".init_array")]
static INITIALIZE: extern "C" fn() = initialize;
