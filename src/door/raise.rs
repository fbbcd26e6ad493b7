//! Raises torch's own exceptions: `torch.OutOfMemoryError` from `gruyere_malloc`.
//!
//! torch takes a NULL from an allocator for an address, so an out-of-memory must be a C++
//! exception; and Python programs catch `torch.OutOfMemoryError`, so it must be
//! `c10::OutOfMemoryError`. This library has no C++ and does not link torch: it looks everything up
//! by `dlsym` when needed, as g++ would compile `throw c10::OutOfMemoryError(location, message)`
//! (Itanium C++ ABI, "Throwing an Exception").
//!
//! Frames between here and torch must be Rust ones or `extern "C-unwind"`, and hold no lock and
//! nothing with a destructor. None of them may be `catch_unwind`'s: it aborts the process on an
//! exception that is not Rust's.

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_char, c_void};

/// There is no torch in this process, or none whose exceptions we can raise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "nothing was raised"]
pub struct Unraisable {
    /// The message of the exception, handed back.
    pub message: String,
}

/// The exception's origin, as torch prints it.
const FUNCTION: &CStr = c"gruyere_malloc";
const FILE: &CStr = c"gruyere";

/// Raises `torch.OutOfMemoryError(message)`: unwinds into torch, which hands it to Python.
///
/// `message` should start with "CUDA out of memory. Tried to allocate": tools look for that. It is
/// dropped before the throw. Where torch has no such class (or the architecture's object layout has
/// not been tried) it is a `RuntimeError` with the same text. Returns only in a process without
/// torch.
pub fn raise_out_of_memory(message: String) -> Unraisable {
    let message = c_string(message);
    #[cfg(target_arch = "x86_64")]
    if let Some(exception) = cxx::out_of_memory(&message) {
        drop(message);
        // SAFETY: `exception` is fresh and thrown once; nothing with a destructor is live in this
        // frame.
        unsafe { exception.throw() }
    }
    raise_check_failure(message)
}

/// Raises `RuntimeError(message)`, for errors other than memory (a bad `GRUYERE_CONF`). Returns
/// only in a process without torch.
pub fn raise_runtime_error(message: String) -> Unraisable {
    raise_check_failure(c_string(message))
}

/// torch's own `TORCH_CHECK(false, message)`, present in every version.
fn raise_check_failure(message: CString) -> Unraisable {
    type TorchCheckFail =
        unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;
    let address = symbol(c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_");
    if address.is_null() {
        return Unraisable { message: message.to_string_lossy().into_owned() };
    }
    let text = Buffer::fill(&message);
    drop(message);
    // SAFETY: the symbol names this very function (its arguments are mangled into the name). The
    // strings are NUL-terminated, static or this thread's, and it copies them. Nothing with a
    // destructor is live in this frame.
    unsafe {
        let fail: TorchCheckFail = std::mem::transmute(address);
        fail(FUNCTION.as_ptr(), FILE.as_ptr(), 0, text)
    }
}

/// A buffer for the message without a destructor: a throw must not leave a `CString` behind.
struct Buffer(UnsafeCell<[u8; 4096]>);

impl Buffer {
    /// Copies the message (its beginning, if it is long) into this thread's buffer.
    fn fill(message: &CStr) -> *const c_char {
        thread_local!(static BUFFER: Buffer = const { Buffer(UnsafeCell::new([0; 4096])) });
        BUFFER.with(|buffer| {
            // SAFETY: this thread's own, and no reference to it outlives this block: only the
            // pointer leaves.
            let bytes = unsafe { &mut *buffer.0.get() };
            let length = message.count_bytes().min(bytes.len() - 1);
            bytes[..length].copy_from_slice(&message.to_bytes()[..length]);
            bytes[length] = 0;
            bytes.as_ptr().cast()
        })
    }
}

/// The message as a C string; a NUL inside (ours have none) would end it, so it becomes a space.
fn c_string(message: String) -> CString {
    CString::new(message)
        .or_else(|error| {
            let mut bytes = error.into_vec();
            bytes.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b' ');
            CString::new(bytes)
        })
        .unwrap_or_default()
}

/// Looks a symbol of torch or of its C++ runtime up: in the global scope (interposers come first,
/// as for torch itself), then in Python's privately loaded libraries. Never loads anything.
pub(super) fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: dlsym and dlopen read NUL-terminated strings. RTLD_NOLOAD handles are of libraries
    // that are loaded already; torch is never unloaded, and each handle's reference is leaked, so
    // it could not be.
    unsafe {
        let address = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        if !address.is_null() {
            return address;
        }
        for library in [c"libc10.so", c"libc10_cuda.so", c"libstdc++.so.6"] {
            let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
            if handle.is_null() {
                continue;
            }
            let address = libc::dlsym(handle, name.as_ptr());
            if !address.is_null() {
                return address;
            }
        }
    }
    std::ptr::null_mut()
}

/// Builds a `c10::OutOfMemoryError` by hand. Seen to work with the x86-64 wheels of torch 2.4.1 to
/// 2.15.0.
#[cfg(target_arch = "x86_64")]
mod cxx {
    use super::*;

    /// Room for a `c10::OutOfMemoryError`: 80 or 128 bytes, by version.
    const EXCEPTION_BYTES: usize = 256;

    /// `c10::SourceLocation`, passed by value (24 bytes: in memory, on the stack).
    #[repr(C)]
    struct SourceLocation {
        function: *const c_char,
        file: *const c_char,
        line: u32,
    }

    /// A `std::string` of either ABI: 32 bytes (C++11) or one pointer (before).
    #[repr(C, align(8))]
    struct CxxString([usize; 4]);

    type AllocateException = unsafe extern "C-unwind" fn(usize) -> *mut c_void;
    type StringFromChars =
        unsafe extern "C-unwind" fn(*mut CxxString, *const c_char, *const c_void);
    type StringDestructor = unsafe extern "C-unwind" fn(*mut CxxString);
    type ErrorConstructor =
        unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut CxxString);
    type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !;

    /// The names of one ABI of `std::string`: its constructor and destructor, and the `c10::Error`
    /// that takes it.
    struct Abi {
        string: &'static CStr,
        destructor: &'static CStr,
        error: &'static CStr,
    }

    const ABIS: [Abi; 2] = [
        Abi {
            string: c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_",
            destructor: c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev",
            error:
                c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        },
        // PyPI wheels up to 2.6.
        Abi {
            string: c"_ZNSsC1EPKcRKSaIcE",
            destructor: c"_ZNSsD1Ev",
            error: c"_ZN3c105ErrorC1ENS_14SourceLocationESs",
        },
    ];

    /// An exception object before its throw. It has no destructor, so it may be live at the throw.
    #[derive(Clone, Copy)]
    pub(super) struct Exception {
        object: *mut c_void,
        type_info: *mut c_void,
        destructor: *mut c_void,
        throw: Throw,
    }

    impl Exception {
        /// Unwinds.
        ///
        /// # Safety
        /// Once for each exception, from frames that C++ may unwind.
        pub(super) unsafe fn throw(self) -> ! {
            // SAFETY: the object was allocated by the same runtime and constructed; the destructor
            // is its own.
            unsafe { (self.throw)(self.object, self.type_info, self.destructor) }
        }
    }

    /// Builds the exception; `None` where the process lacks a part of it.
    pub(super) fn out_of_memory(message: &CStr) -> Option<Exception> {
        let find = |name| Some(symbol(name)).filter(|address| !address.is_null());
        let allocate = find(c"__cxa_allocate_exception")?;
        let throw = find(c"__cxa_throw")?;
        let type_info = find(c"_ZTIN3c1016OutOfMemoryErrorE")?;
        let vtable = find(c"_ZTVN3c1016OutOfMemoryErrorE")?.cast::<*mut c_void>();
        let (string, destructor, error) = ABIS
            .iter()
            .find_map(|abi| Some((find(abi.string)?, find(abi.destructor)?, find(abi.error)?)))?;
        // SAFETY: each address is of the C++ function whose mangled name spells out the arguments
        // that its Rust type has; constructors and destructors take `this` first and return
        // nothing. A reference is a pointer, a std::string passed by value a pointer to the
        // caller's temporary, an allocator an empty object that is never read. The object has room
        // for any version's OutOfMemoryError, which derives from c10::Error, adds no member and
        // differs by its vtable pointer alone, the first word. A vtable symbol starts with two
        // words (offset and type) before the functions, of which the first is the complete
        // destructor.
        unsafe {
            let allocate: AllocateException = std::mem::transmute(allocate);
            let construct_string: StringFromChars = std::mem::transmute(string);
            let destroy_string: StringDestructor = std::mem::transmute(destructor);
            let construct_error: ErrorConstructor = std::mem::transmute(error);

            let object = allocate(EXCEPTION_BYTES);
            let mut text = CxxString([0; 4]);
            let allocator = 0usize;
            construct_string(&mut text, message.as_ptr(), (&raw const allocator).cast());
            let location =
                SourceLocation { function: FUNCTION.as_ptr(), file: FILE.as_ptr(), line: 0 };
            construct_error(object, location, &mut text);
            // The constructor took the text and left an empty string, which the caller must
            // destroy.
            destroy_string(&mut text);
            *object.cast::<*mut *mut c_void>() = vtable.add(2);
            Some(Exception {
                object,
                type_info,
                destructor: *vtable.add(2),
                throw: std::mem::transmute::<*mut c_void, Throw>(throw),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_torch_nothing_is_raised() {
        let message = String::from("CUDA out of memory.");
        assert_eq!(raise_out_of_memory(message.clone()), Unraisable { message });
        let message = String::from("GRUYERE_CONF");
        assert_eq!(raise_runtime_error(message.clone()), Unraisable { message });
    }

    #[test]
    fn messages_survive_a_nul_and_end_at_the_buffer() {
        assert_eq!(c_string("a\0b".into()).as_c_str(), c"a b");
        let long = CString::new(vec![b'x'; 10_000]).unwrap();
        // SAFETY: fill() gives a NUL-terminated string of this thread.
        let kept = unsafe { CStr::from_ptr(Buffer::fill(&long)) };
        assert_eq!(kept.count_bytes(), 4095);
        // SAFETY: as above.
        let short = unsafe { CStr::from_ptr(Buffer::fill(c"short")) };
        assert_eq!(short, c"short");
    }
}
