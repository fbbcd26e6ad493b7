//! What the interposed calls of this process do, from the configuration and from how the library
//! was loaded.

use super::runtime;
use crate::config::{Config, Preload, PreloadMode, logging};
use std::ffi::{CStr, OsStr, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};

/// The treatment of an interposed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// The call passes through.
    Off = 1,
    /// The heap serves it.
    Manage = 2,
    /// It passes through and is recorded.
    Observe = 3,
    /// The process is ending: mallocs pass through, frees of the heap's blocks are swallowed.
    Leaving = 4,
}

/// The [`Mode`], 0 while undecided, 5 for Observe without the driver's calls.
///
/// ```text
/// 0              -> Off | Manage | Observe | 5   decide(), at the first call
/// Manage         -> Off                          fall_back(): there can be no heap here; or in a
///                                                forked child, whose parent had one
/// Manage         -> Leaving                      leave(), the exit handler
/// Observe, 5     -> Off                          fall_back(), leave(), a forked child
/// ```
/// Relaxed: nothing else depends on it; the heap is published on its own.
static MODE: AtomicU8 = AtomicU8::new(UNDECIDED);
const UNDECIDED: u8 = 0;
const RUNTIME_ALONE: u8 = 5;

/// The process that loaded the library by LD_PRELOAD, 0 where there is none (or the initialiser has
/// not run). States: 0 -> pid, once, in the initialiser; a forked child keeps its parent's.
static PRELOADED_IN: AtomicI32 = AtomicI32::new(0);

/// Whether the library's initialiser has run. States: false -> true, once. Before that calls pass
/// through: Rust's own initialisers may not have run either.
static LOADED: AtomicBool = AtomicBool::new(false);

/// The mode in force.
#[inline]
pub fn mode() -> Mode {
    match MODE.load(Ordering::Relaxed) {
        1 => Mode::Off,
        2 => Mode::Manage,
        3 => Mode::Observe,
        4 => Mode::Leaving,
        RUNTIME_ALONE => Mode::Observe,
        _ => decide(),
    }
}

/// Whether the runtime's calls are watched and the driver's are not: then a watched call contains
/// no second watched call, and need not mark itself as under way.
#[inline(always)]
pub fn watches_runtime_alone() -> bool {
    MODE.load(Ordering::Relaxed) == RUNTIME_ALONE
}

#[cold]
#[inline(never)]
fn decide() -> Mode {
    if !LOADED.load(Ordering::Acquire) {
        return Mode::Off;
    }
    let preload = match Config::from_env() {
        Ok(config) => config.preload,
        Err(error) => {
            logging::init();
            log::error!("{error}. The program's CUDA calls pass through unchanged");
            Preload { mode: PreloadMode::Off, driver: false }
        }
    };
    // A runtime inside the program may define the runtime's names itself; the driver's calls come
    // here all the same.
    let reached = || reached() || preload.driver && PRELOADED_IN.load(Ordering::Relaxed) != 0;
    let mode = match preload.mode {
        PreloadMode::Auto if PRELOADED_IN.load(Ordering::Relaxed) == 0 => Mode::Off,
        PreloadMode::Auto | PreloadMode::Manage if reached() => Mode::Manage,
        PreloadMode::Observe if reached() => Mode::Observe,
        _ => Mode::Off,
    };
    // Threads that decide at once decide alike; only a change made meanwhile (an exit) must stay.
    let state = if mode == Mode::Observe && !preload.driver { RUNTIME_ALONE } else { mode as u8 };
    match MODE.compare_exchange(UNDECIDED, state, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => mode,
        Err(_) => self::mode(),
    }
}

/// Whether the program's calls come here at all: not after a dlopen of the library, nor behind the
/// runtime. A second copy of the library in the process is behind the first.
fn reached() -> bool {
    runtime::is_bound_to_us(c"cudaMalloc")
}

/// Whether calls may be served or watched, now or after the library's initialiser.
pub fn may_open() -> bool {
    !LOADED.load(Ordering::Acquire) || mode() != Mode::Off
}

/// Lets calls pass through: there can be no heap in this process, or it is a forked child whose
/// parent had one. Async-signal-safe: one store.
pub fn fall_back() {
    MODE.store(Mode::Off as u8, Ordering::Relaxed);
}

/// Notes the end of the process; later calls come from static destructors and other exit handlers.
pub fn leave() {
    let _ = MODE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |mode| match mode {
        mode if mode == Mode::Manage as u8 => Some(Mode::Leaving as u8),
        mode if mode == Mode::Observe as u8 || mode == RUNTIME_ALONE => Some(Mode::Off as u8),
        _ => None,
    });
}

/// Whether LD_PRELOAD put the library into this very process (not only into its parent).
pub fn was_preloaded_here() -> bool {
    // SAFETY: getpid has no preconditions.
    PRELOADED_IN.load(Ordering::Relaxed) == unsafe { libc::getpid() }
}

/// Notes whether LD_PRELOAD put the library into this process, and says so. Part of the library's
/// initialiser.
pub(super) fn note_preloading() -> bool {
    let preloaded = is_preloaded();
    if preloaded {
        // SAFETY: getpid has no preconditions.
        PRELOADED_IN.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    }
    preloaded
}

/// The library's initialiser has run.
pub(super) fn note_loaded() {
    LOADED.store(true, Ordering::Release);
}

/// Whether LD_PRELOAD or /etc/ld.so.preload names a file of this library's name. (The program may
/// change the variable later; the initialiser runs before it.)
fn is_preloaded() -> bool {
    let Some(own) = own_name() else { return false };
    let variable = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    names(variable.as_bytes(), own)
        || std::fs::read("/etc/ld.so.preload").is_ok_and(|list| names(&list, own))
}

/// Whether the program's calls go to another copy of this library.
pub fn is_second_copy() -> bool {
    let bound_to = runtime::file_of(c"cudaMalloc");
    !reached() && bound_to.is_some_and(|path| path.file_name() == own_name())
}

/// Whether a list of the dynamic linker's (files, separated by spaces, colons or lines) names a
/// file called `own`.
fn names(list: &[u8], own: &OsStr) -> bool {
    let mut files = list.split(|byte| byte.is_ascii_whitespace() || *byte == b':');
    files.any(|file| Path::new(OsStr::from_bytes(file)).file_name() == Some(own))
}

/// The file name of this library.
fn own_name() -> Option<&'static OsStr> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address is of this library; dladdr fills `info` where it returns anything but 0,
    // and zeroed it is valid too.
    let (found, info): (c_int, _) =
        unsafe { (libc::dladdr(own_name as *const _, info.as_mut_ptr()), info.assume_init()) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's string, which lives as long as the library: for ever.
    let path: &'static CStr = unsafe { CStr::from_ptr(info.dli_fname) };
    Path::new(OsStr::from_bytes(path.to_bytes())).file_name()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_linker_are_parted_by_spaces_colons_and_lines() {
        let own = OsStr::new("libgruyere.so");
        for list in [
            "libgruyere.so",
            "/a/libgruyere.so",
            "x.so:/a/libgruyere.so",
            "/a/libgruyere.so x.so",
            "x.so\n/a/libgruyere.so\n",
        ] {
            assert!(names(list.as_bytes(), own), "{list:?}");
        }
        for list in ["", " ", "libgruyere.so.1", "/libgruyere.so/x.so", "libgruyere_driver.so"] {
            assert!(!names(list.as_bytes(), own), "{list:?}");
        }
    }

    #[test]
    fn a_program_that_links_the_library_in_is_left_alone() {
        assert_eq!(mode(), Mode::Off);
        assert!(!was_preloaded_here());
    }
}
