//! What every exported function is written with: error codes, pointers of the C caller, the count
//! of its calls.
//!
//! The driver and the runtime share the numbers of all errors used here, so one set of codes serves
//! both.

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::*};

/// The error codes that this library returns besides the simulator's (both `CUresult` and
/// `cudaError_t`).
pub mod code {
    pub const INVALID_VALUE: u32 = 1;
    pub const NOT_INITIALIZED: u32 = 3;
    pub const DEINITIALIZED: u32 = 4;
    pub const NO_DEVICE: u32 = 100;
    pub const INVALID_DEVICE: u32 = 101;
    pub const INVALID_CONTEXT: u32 = 201;
    pub const NOT_FOUND: u32 = 500;
    pub const NOT_READY: u32 = 600;
    pub const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
    pub const NOT_SUPPORTED: u32 = 801;
    pub const UNKNOWN: u32 = 999;
}

/// The result of an exported function's body: nothing, or an error code.
pub type Answer = Result<(), u32>;

/// The number of calls of one exported function, linked into a list of all called functions.
///
/// ```text
/// linked: false --(the first caller, by swap)--> true; then that caller alone pushes it on HEAD
/// and writes `next`
/// HEAD:   null --(push by compare-exchange, never popped)--> the newest counter
/// ```
pub struct Counter {
    name: &'static str,
    calls: AtomicU64,
    linked: AtomicBool,
    next: AtomicPtr<Counter>,
}

static HEAD: AtomicPtr<Counter> = AtomicPtr::new(ptr::null_mut());

impl Counter {
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            calls: AtomicU64::new(0),
            linked: AtomicBool::new(false),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The function's name.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Counts a call; true for the first one.
    pub fn hit(&'static self) -> bool {
        self.calls.fetch_add(1, Relaxed);
        if self.linked.load(Relaxed) || self.linked.swap(true, AcqRel) {
            return false;
        }
        let me = ptr::from_ref(self).cast_mut();
        let mut head = HEAD.load(Acquire);
        loop {
            self.next.store(head, Relaxed);
            match HEAD.compare_exchange(head, me, AcqRel, Acquire) {
                Ok(_) => return true,
                Err(now) => head = now,
            }
        }
    }
}

/// Every function called so far, with its count.
pub fn call_counts() -> Vec<(&'static str, u64)> {
    let mut counts = Vec::new();
    let mut at = HEAD.load(Acquire);
    // SAFETY: only 'static counters are pushed, and none is ever popped or written through HEAD.
    while let Some(counter) = unsafe { at.as_ref() } {
        counts.push((counter.name, counter.calls.load(Relaxed)));
        at = counter.next.load(Acquire);
    }
    counts.sort_unstable();
    counts
}

/// A result whose type depends on another argument.
#[repr(C)]
pub struct SomeResult([u8; 0]);

/// The C caller's pointer to a result.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// A pointer to a result of our own.
    pub fn to(place: &mut T) -> Self {
        Self(place)
    }

    /// Writes the result; refuses NULL.
    pub fn put(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        self.put_if_wanted(value);
        Ok(())
    }

    /// Writes the result unless the caller passed NULL.
    pub fn put_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: by the C contract of every function that takes one, a non-null result pointer
            // points to a writable T.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// The same place, as the type that the attribute's number implies.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The bare pointer.
    pub fn raw(self) -> *mut T {
        self.0
    }
}

/// The C caller's pointer to one or more values to read.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// Reads the value; refuses NULL.
    pub fn get(self) -> Result<T, u32> {
        self.nth(0)
    }

    /// Reads the value at `index`; refuses NULL.
    pub fn nth(self, index: usize) -> Result<T, u32> {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: by the C contract of every function that takes one, a non-null argument points to
        // as many readable Ts as the function's count says, and callers of `nth` stay below that
        // count.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

/// The C caller's string.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    /// The string; refuses NULL.
    pub fn get(&self) -> Result<&CStr, u32> {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: by the C contract, a non-null string argument is NUL-terminated and lives until
        // the call returns, as `self` does.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}
