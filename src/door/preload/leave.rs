//! The end of a process: reports a program in which no call was seen, with the remedy.

use super::super::fork;
use super::super::process::{current, guarded};
use super::mode;
use crate::config::{Config, PreloadMode, logging};
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether an allocation was seen. States: false -> true, at the first.
static SEEN: AtomicBool = AtomicBool::new(false);

/// Notes an allocation.
#[inline]
pub fn saw_a_call() {
    // A load first: all threads share the word.
    if !SEEN.load(Ordering::Relaxed) {
        SEEN.store(true, Ordering::Relaxed);
    }
}

/// Registers the check at the end of the process.
pub fn watch() {
    extern "C" fn at_exit() {
        guarded((), tell);
    }
    // SAFETY: the handler is a function of this library, which is never unloaded (`-z nodelete`).
    // Without memory for it there is no message.
    unsafe { libc::atexit(at_exit) };
}

fn tell() {
    // A forked child that ends by exit would repeat the message. A program that uses the library by
    // its own functions (gruyere.h, `python -m gruyere`) has its heap without an interposed call.
    if SEEN.load(Ordering::Relaxed)
        || current().is_some()
        || fork::is_forked_child()
        || !mode::was_preloaded_here()
    {
        return;
    }
    let Ok(config) = Config::from_env() else { return };
    if config.preload.mode == PreloadMode::Off || !is_loaded("libcuda.so") || mode::is_second_copy()
    {
        return;
    }
    logging::init();
    let remedy = if config.preload.driver && is_loaded("libgruyere_driver.so") {
        "libgruyere_driver.so is preloaded, so the program has allocated nothing itself, or there \
         is no device (check with `gruyere doctor`), or another library or a loader of the \
         program's own bypasses it (one before it in LD_PRELOAD, RTLD_DEEPBIND)"
    } else if config.preload.driver {
        "libgruyere_driver.so is not preloaded: `gruyere run` preloads it"
    } else {
        "Its CUDA runtime is linked statically (nvcc's default, JAX, TensorFlow), or is called \
         past the dynamic linker (RTLD_DEEPBIND, dlsym, a library that is preloaded before): \
         GRUYERE_CONF=preload:driver, with `gruyere run`, intercepts its driver calls"
    };
    log::warn!("this program loaded the CUDA driver, but Gruyère saw no allocation. {remedy}");
}

/// Whether the process has loaded a library, in any version.
fn is_loaded(library: &str) -> bool {
    struct Search<'a> {
        library: &'a str,
        found: bool,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's own structure, and the search passed below, which nothing else
        // refers to meanwhile.
        let (name, search) = unsafe { ((*info).dlpi_name, &mut *data.cast::<Search<'_>>()) };
        // SAFETY: where it is not null, the loader's string.
        search.found |=
            !name.is_null() && is_file_of(search.library, unsafe { CStr::from_ptr(name) });
        c_int::from(search.found)
    }
    let mut search = Search { library, found: false };
    // SAFETY: `visit` is called back with the pointer passed here, before this returns.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

fn is_file_of(library: &str, path: &CStr) -> bool {
    let name = path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    name.strip_prefix(library.as_bytes())
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_known_by_its_file_name() {
        for name in [c"libcuda.so.1", c"/usr/lib/libcuda.so.535.104.05", c"/x/libcuda.so"] {
            assert!(is_file_of("libcuda.so", name), "{name:?}");
        }
        for name in [c"libcudart.so.12", c"/libcuda.so.1/other.so", c"", c"libcuda.sort"] {
            assert!(!is_file_of("libcuda.so", name), "{name:?}");
        }
    }
}
