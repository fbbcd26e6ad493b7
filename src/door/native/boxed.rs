//! Objects of torch's that the library keeps: a pointer that only the shim can read, and the
//! function that drops it.

use super::super::torch::CudaStream;
use std::cell::Cell;
use std::ffi::{c_int, c_void};

/// An object of torch's that the library keeps.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GruyereBoxed {
    /// The object; NULL for none.
    pub object: *mut c_void,
    /// Drops the object. Called once, on any thread, with no lock of the library held.
    pub drop: extern "C" fn(*mut c_void),
}

/// [`GruyereBoxed`], owned: dropped once, with its last owner.
#[derive(Debug)]
pub(super) struct Boxed(GruyereBoxed);

// SAFETY: the shim promises that its objects may be used and dropped on any thread.
unsafe impl Send for Boxed {}
// SAFETY: as above; the library itself never dereferences them.
unsafe impl Sync for Boxed {}

impl Boxed {
    pub(super) fn new(boxed: GruyereBoxed) -> Option<Self> {
        (!boxed.object.is_null()).then_some(Self(boxed))
    }

    pub(super) fn object(&self) -> *mut c_void {
        self.0.object
    }
}

impl Drop for Boxed {
    fn drop(&mut self) {
        (self.0.drop)(self.0.object);
    }
}

/// Decides whether a request of the calling thread on `stream` goes to the filter's pool. Returns 1
/// if it does, 0 if not, -1 on failure. Must not unwind.
pub type GruyereFilter = extern "C" fn(filter: *mut c_void, stream: CudaStream) -> c_int;

thread_local! {
    /// The depth of filter calls on this thread.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// A pool's filter.
#[derive(Debug)]
pub(super) struct Filter {
    boxed: Boxed,
    ask: GruyereFilter,
}

impl Filter {
    pub(super) fn new(boxed: Boxed, ask: GruyereFilter) -> Self {
        Self { boxed, ask }
    }

    /// Whether a request goes to the filter's pool; `None`: the filter failed. Call with no lock
    /// held: it calls the driver, and may call torch.
    pub(super) fn matches(&self, stream: CudaStream) -> Option<bool> {
        let step =
            |by: i32| INSIDE.try_with(|inside| inside.set(inside.get().wrapping_add_signed(by)));
        let _ = step(1);
        let answer = (self.ask)(self.boxed.object(), stream);
        let _ = step(-1);
        match answer {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    /// Whether the calling thread is inside a filter.
    pub(super) fn is_inside() -> bool {
        INSIDE.try_with(|inside| inside.get() > 0).unwrap_or(true)
    }
}
