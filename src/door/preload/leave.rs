//! The end of a process: reports a program in which no call was seen, with the remedy.

use super::super::fork;
use super::super::process::{current, guarded};
use super::super::program::is_loaded;
use super::mode;
use crate::config::{Config, PreloadMode, logging};
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
