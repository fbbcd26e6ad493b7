//! Finds libcuda: the one that the process already uses, never a second one, never the toolkit's
//! stub.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::super::{DriverError, ErrorKind};
use super::symbols::{REQUIRED, Symbols};

/// `cuInit` of the toolkit's stub (`CUDA_ERROR_STUB_LIBRARY`).
const STUB_LIBRARY: u32 = 34;

/// Why the driver cannot be used, and the attempts; its `Display` is for the user.
#[derive(Clone, Debug)]
pub struct LoadError {
    /// For code that acts on it; always [`ErrorKind::NoDriver`].
    pub error: DriverError,
    /// The attempts, in order, with their results.
    pub tried: Vec<String>,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA cannot be used in this process: {}", self.tried.join("; "))
    }
}

impl std::error::Error for LoadError {}

impl From<LoadError> for DriverError {
    fn from(error: LoadError) -> Self {
        error.error
    }
}

/// A libcuda whose `cuInit` succeeded. It stays loaded for good.
pub(super) struct Library {
    pub(super) symbols: Symbols,
    /// Of the stand-in GPU: the host's time there, in nanoseconds.
    pub(super) host_time: Option<extern "C" fn() -> u64>,
    /// Its file.
    pub(super) path: PathBuf,
}

/// Scopes of symbol lookups, in order: handles of `dlopen`, or `RTLD_DEFAULT`.
type Scopes = Vec<*mut c_void>;

impl Library {
    /// Searches the process, then the system.
    pub(super) fn find() -> Result<Self, LoadError> {
        let mut search = Search::default();
        // The library that the process already uses: preloaded or linked, then loaded by the CUDA
        // runtime (privately, so not in the global scope). An interposer may define some of the
        // functions only, with the rest behind it, so both are searched, in the dynamic linker's
        // order.
        let mut scopes = Scopes::new();
        if !symbol(libc::RTLD_DEFAULT, c"cuInit").is_null() {
            scopes.push(libc::RTLD_DEFAULT);
        }
        if let Ok(handle) = open(c"libcuda.so.1", libc::RTLD_NOLOAD) {
            scopes.push(handle);
        }
        if !scopes.is_empty()
            && let Some(found) = search.attempt("libcuda as loaded in this process", &scopes)
        {
            return found;
        }
        for name in [c"libcuda.so.1", c"libcuda.so"] {
            if let Some(found) = search.attempt_to_open(name) {
                return found;
            }
        }
        Err(search.nothing())
    }

    /// Loads the library at `path` and no other.
    pub(super) fn at(path: &Path) -> Result<Self, LoadError> {
        let mut search = Search::default();
        match CString::new(path.as_os_str().as_bytes()) {
            Ok(name) => {
                if let Some(found) = search.attempt_to_open(&name) {
                    return found;
                }
            }
            Err(_) => search.tried.push(format!("{}: not a path", path.display())),
        }
        Err(search.nothing())
    }
}

/// A search under way: the attempts so far.
struct Search {
    tried: Vec<String>,
    error: DriverError,
}

impl Default for Search {
    fn default() -> Self {
        Self { tried: Vec::new(), error: DriverError::new("dlopen", ErrorKind::NoDriver, 0) }
    }
}

impl Search {
    fn nothing(self) -> LoadError {
        LoadError { error: self.error, tried: self.tried }
    }

    fn attempt_to_open(&mut self, name: &CStr) -> Option<Result<Library, LoadError>> {
        match open(name, 0) {
            Ok(handle) => self.attempt(&name.to_string_lossy(), &[handle]),
            Err(reason) => {
                self.tried.push(reason);
                None
            }
        }
    }

    /// `Some` ends the search: a usable library, or a genuine one that refuses. `None`: a stub or
    /// nothing, so the search goes on.
    fn attempt(
        &mut self,
        what: &str,
        scopes: &[*mut c_void],
    ) -> Option<Result<Library, LoadError>> {
        let find = |name: &CStr| {
            scopes
                .iter()
                .map(|scope| symbol(*scope, name))
                .find(|address| !address.is_null())
                .unwrap_or_default()
        };
        let path = path_of(find(c"cuInit")).unwrap_or_else(|| PathBuf::from(what));
        // SAFETY: the names are libcuda's, and a library that defines them in this process stands
        // in for it; the handles are never closed.
        let symbols = unsafe { Symbols::look_up(find) };
        // SAFETY: the stand-in's own function, of this signature; null is `None` of the same size.
        let host_time = unsafe {
            std::mem::transmute::<*mut c_void, Option<extern "C" fn() -> u64>>(find(
                c"phantom_host_time",
            ))
        };
        // SAFETY: cuInit takes no pointer and may be called any number of times. A missing one
        // returns an error.
        if let Err(error) = unsafe { symbols.cuInit(0) } {
            self.error = DriverError::new(error.call, ErrorKind::NoDriver, error.code);
            let reason = match error.code {
                STUB_LIBRARY => "is the CUDA toolkit's stub, not a driver",
                0 => "has no cuInit",
                100 => "sees no device (CUDA_ERROR_NO_DEVICE)",
                3 => {
                    "is not usable here: the process was forked after CUDA was used \
                     (CUDA_ERROR_NOT_INITIALIZED)"
                }
                803 => "does not match the kernel's driver (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)",
                804 => "is a compatibility library that this device does not support",
                _ => "failed to initialise",
            };
            self.tried.push(format!(
                "{} {reason} (cuInit returned {})",
                path.display(),
                error.code
            ));
            // A stub may hide the real library; any other refusal is the driver's last word.
            return match error.code {
                STUB_LIBRARY | 0 => None,
                _ => Some(Err(LoadError {
                    error: self.error,
                    tried: std::mem::take(&mut self.tried),
                })),
            };
        }
        let missing = symbols.missing(REQUIRED);
        if !missing.is_empty() {
            self.error = DriverError::new(missing[0], ErrorKind::NoDriver, 0);
            self.tried.push(format!(
                "{} lacks {}: a driver of CUDA 11.4 or newer is needed",
                path.display(),
                missing.join(", ")
            ));
            return Some(Err(LoadError {
                error: self.error,
                tried: std::mem::take(&mut self.tried),
            }));
        }
        Some(Ok(Library { symbols, host_time, path }))
    }
}

/// Whether this process's libcuda is the stand-in GPU, which keeps books of memory and computes
/// nothing. Checked by a function of its own: a file name can be anything.
pub(super) fn is_stand_in() -> bool {
    let own = c"phantom_physical";
    !symbol(libc::RTLD_DEFAULT, own).is_null()
        || open(c"libcuda.so.1", libc::RTLD_NOLOAD)
            .is_ok_and(|handle| !symbol(handle, own).is_null())
}

/// `dlopen`; an error is the linker's own text.
fn open(name: &CStr, flags: libc::c_int) -> Result<*mut c_void, String> {
    // SAFETY: `name` is NUL-terminated. Loading runs the library's initialisers, which is what a
    // CUDA program asks for.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | flags) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror's string belongs to this thread and stands until its next call of the dl
    // family.
    let reason = unsafe { libc::dlerror() };
    if reason.is_null() {
        return Err(format!("{} cannot be loaded", name.to_string_lossy()));
    }
    // SAFETY: as above; not null.
    Err(unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned())
}

/// `dlsym`; null where there is none.
fn symbol(scope: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: `scope` is RTLD_DEFAULT or a handle that is never closed; `name` is NUL-terminated.
    unsafe { libc::dlsym(scope, name.as_ptr()) }
}

/// The file around an address.
fn path_of(address: *mut c_void) -> Option<PathBuf> {
    // SAFETY: all-zero is a valid Dl_info.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr accepts any address and writes `info` only.
    let found = unsafe { libc::dladdr(address, &mut info) } != 0 && !info.dli_fname.is_null();
    found.then(|| {
        // SAFETY: dli_fname names a loaded object; it is copied at once.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()))
    })
}
