//! A library's objects in programs: handles, which remember their stream, and objects without
//! content here.

use crate::abi::{Counter, Out};
use crate::call_log::{self, Argument};
use crate::entry::{Face, entry};
use crate::gpu::gpu;
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// The handle's stream, written by the program, which must lock a handle shared between threads.
pub struct Handle {
    stream: AtomicUsize,
}

/// The C caller's pointer to a handle.
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

/// Launches one kernel on `stream`; returns `failed`, the library's code, if the launch fails. The
/// call log has the function and the stream, not the library's other arguments.
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

/// Exports functions that create an object through their first argument. A library that computes
/// nothing ignores it: one object serves for all. `null` is the result for a NULL place.
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
