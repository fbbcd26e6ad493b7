//! What programs hold of a library: handles, which remember the stream that they are to use, and
//! objects that say nothing here.

use crate::abi::{Counter, Face, Out, entry};
use crate::call_log::{self, Argument};
use crate::gpu::gpu;
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// The stream that was set, written by the handle's user, who may not share it between threads
/// without a lock of his own.
pub struct Handle {
    stream: AtomicUsize,
}

/// A handle as the C caller holds it.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct HandlePtr(*const Handle);

impl HandlePtr {
    /// A new handle; the code of a NULL place.
    pub fn create(out: Out<Self>) -> u32 {
        out.put(Self(Box::into_raw(Box::new(Handle { stream: AtomicUsize::new(0) }))))
            .err()
            .unwrap_or(0)
    }

    pub fn destroy(self) {
        if !self.0.is_null() {
            // SAFETY: by the libraries' contracts the handle came from their create function and is
            // destroyed once.
            drop(unsafe { Box::from_raw(self.0.cast_mut()) });
        }
    }

    fn slot(&self) -> Option<&AtomicUsize> {
        // SAFETY: by the libraries' contracts a non-null handle came from their create function and
        // was not destroyed.
        unsafe { self.0.as_ref() }.map(|handle| &handle.stream)
    }

    pub fn set_stream(self, stream: usize) {
        if let Some(slot) = self.slot() {
            slot.store(stream, Relaxed);
        }
    }

    pub fn stream(self) -> usize {
        self.slot().map_or(0, |slot| slot.load(Relaxed))
    }
}

/// One kernel on `stream`; `failed` is what the library answers where the launch failed. The call
/// log has the function and the stream: the other arguments are the library's own.
pub fn launched(calls: &'static Counter, stream: usize, failed: u32) -> u32 {
    let line = call_log::begin(calls.name(), |line| Argument::passed(&stream, line));
    let code = match entry(calls, Face::Runtime, || gpu().launch(stream)) {
        0 => 0,
        _ => failed,
    };
    if let Some(line) = line {
        line.end(code, |_| {});
    }
    code
}

/// Exports functions that launch one kernel on the stream of the handle, their first argument.
macro_rules! kernels {
    ($failed:ident => $($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(handle: $crate::handle::HandlePtr) -> u32 {
            static CALLS: $crate::abi::Counter = $crate::abi::Counter::new(stringify!($name));
            $crate::handle::launched(&CALLS, handle.stream(), $failed)
        }
    )*};
}

/// Exports functions that make an object, through their first argument. It says nothing to a
/// library that computes nothing: one serves for all. `null` is the answer to a NULL place.
macro_rules! objects {
    ($null:ident => $($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(out: $crate::abi::Out<usize>) -> u32 {
            static OPAQUE: [u64; 64] = [0; 64];
            out.put(OPAQUE.as_ptr() as usize).map_or($null, |()| 0)
        }
    )*};
}

pub(crate) use {kernels, objects};
