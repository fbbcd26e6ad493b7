//! The entrances: torch's hooks ([`torch`]), its own interface ([`native`]), any program's CUDA
//! calls ([`preload`]), the control API ([`control`]); and the one heap of the process behind them.

pub mod alert;
pub mod control;
pub mod fork;
pub mod history;
pub mod loader;
pub mod native;
mod oom;
pub mod pool;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub mod preload;
pub mod profiler;
pub mod python;
pub mod raise;
pub mod run_file;
mod summary;
pub mod torch;
pub mod torch_stats;

use crate::config::{Blame, Config, logging};
use crate::driver::Driver;
use crate::driver::cuda::{CudaDriver, is_stand_in};
use crate::heap::Heap;
use crate::nvtx;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A heap and its configuration, part of which concerns the doors only.
// The heap comes first, so that `current` has its address without an addition.
#[repr(C)]
struct Installed {
    heap: Heap,
    config: Config,
}

/// The heap of the process.
///
/// ```text
///   null   -> heap    the first entry that needs it (under INIT), or install()
///   heap   -> heap'   install() only: tests and the bench; the old heap is never freed, since a
///                     thread may still be in it
///   heap   -> null    the atfork handler, in a child: the hot paths need not ask whether they are
///                     in one
/// ```
static HEAP: AtomicPtr<Installed> = AtomicPtr::new(std::ptr::null_mut());

/// State from before the heap exists.
static INIT: Mutex<Beginning> = Mutex::new(Beginning {
    failure: None,
    announced: 0,
    tells_of_blocks: false,
    waits: Waits::Unknown,
});

struct Beginning {
    /// Why there is no heap; set once, and final: no second attempt.
    failure: Option<String>,
    /// The hooks that a loader announced, for the future heap.
    announced: u32,
    /// Whether the future heap reports blocks to torch's profiler.
    tells_of_blocks: bool,
    /// What a loader said about waits, for the future heap.
    waits: Waits,
}

/// What a loader said about waits of one stream for another.
enum Waits {
    Unknown,
    Allowed,
    Forbidden(String),
}

/// The heap; the first call makes it from `GRUYERE_CONF` and the process's libcuda.
///
/// # Errors
/// Why the heap cannot be made, in words for the user. Logged the first time.
#[inline]
pub fn heap() -> Result<&'static Heap, String> {
    match current() {
        Some(heap) => Ok(heap),
        None => make(),
    }
}

#[inline]
fn installed() -> Option<&'static Installed> {
    // SAFETY: null, or from Box::leak: valid for ever. Acquire pairs with the release of publish().
    unsafe { HEAP.load(Ordering::Acquire).as_ref() }
}

/// The heap, if made.
#[inline]
pub fn current() -> Option<&'static Heap> {
    installed().map(|installed| &installed.heap)
}

/// The heap's configuration, once the heap is made.
fn config() -> Option<&'static Config> {
    installed().map(|installed| &installed.config)
}

/// Drops the heap in a forked child. Async-signal-safe: two stores.
fn forget() {
    HEAP.store(std::ptr::null_mut(), Ordering::Relaxed);
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    preload::mode::fall_back();
}

#[cold]
fn make() -> Result<&'static Heap, String> {
    // Before the lock: a child forked meanwhile inherits it locked for good, and must not take it.
    fork::watch();
    if let Some(failure) = &INIT.lock().unwrap_or_else(PoisonError::into_inner).failure {
        return Err(failure.clone());
    }
    logging::init();
    // Without the lock: reading the configuration takes the loader's lock. A thread may hold that
    // one while its library allocates on loading, and wait for ours.
    let found = Config::from_env().map_err(|error| error.to_string()).and_then(|config| {
        if is_only_watched() {
            return Ok((config, None));
        }
        let driver = CudaDriver::load().map_err(|error| format!("gruyere: {error}"))?;
        let driver = driver.with_handle_type(config.handle_type);
        Ok((config, Some(driver)))
    });
    let device = if is_stand_in() {
        ", ON THE STAND-IN GPU, which keeps books of memory and computes nothing"
    } else {
        ""
    };
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(heap) = current() {
        return Ok(heap);
    }
    if let Some(reason) = &beginning.failure {
        return Err(reason.clone());
    }
    let made = found.and_then(|(config, driver)| {
        attach_profiler(&config);
        let settings = config.heap.clone();
        let heap = match driver {
            None => Heap::watcher(settings).map_err(|error| format!("gruyere: {error}")),
            Some(driver) => Heap::new(Arc::new(driver), settings)
                .map_err(|error| format!("gruyere: no usable CUDA device: {error}")),
        };
        Ok((heap?, config))
    });
    match made {
        Ok((mut heap, config)) => {
            // Before publication: nothing has been allocated yet.
            heap.announce_hooks(beginning.announced);
            heap.tell_of_blocks(beginning.tells_of_blocks);
            match &beginning.waits {
                Waits::Unknown => {}
                Waits::Allowed => heap.allow_waits(),
                Waits::Forbidden(why) => heap.forbid_waits(why),
            }
            ask_sites(&mut heap, &config);
            if is_program_served() {
                heap.dedicate_allocations();
                heap.announce_ordered_callers();
            }
            let conf = std::env::var("GRUYERE_CONF").unwrap_or_default();
            log::info!(
                "gruyere {}, by {}{device}, settings: {}",
                env!("CARGO_PKG_VERSION"),
                came_in(beginning.announced),
                if conf.trim().is_empty() { "all defaults" } else { conf.trim() }
            );
            Ok(publish(heap, config))
        }
        Err(reason) => {
            log::error!("{reason}");
            beginning.failure = Some(reason.clone());
            Err(reason)
        }
    }
}

/// Attaches the profiler to the heap where `config` asks for it.
fn attach_profiler(config: &Config) {
    if config.nvtx {
        nvtx::attach();
    }
}

/// Lets the heap ask for the sites of requests where `config` asks for them.
fn ask_sites(heap: &mut Heap, config: &Config) {
    let blame = match config.blame {
        Blame::Auto if python::is_begun() => Blame::Large,
        Blame::Auto => Blame::Off,
        other => other,
    };
    // Without Python there is no site to ask for.
    if blame != Blame::Off
        && config.heap.record
        && let Some(program) = python::Program::find()
    {
        heap.ask_sites(Box::new(program), blame == Blame::All);
    }
}

/// Runs `body`, a function of the program's, inside a call of the library's: its allocations and
/// frees count as the program's.
fn as_the_program(body: impl FnOnce()) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    let _outside = preload::inside::leave();
    body();
}

/// Whether the heap serves the program's own CUDA calls.
fn is_program_served() -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    return preload::mode() == preload::Mode::Manage;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// The door of the program's requests, for the log.
fn came_in(announced: u32) -> &'static str {
    match (is_program_served(), is_only_watched(), announced, native::is_taken()) {
        (true, ..) => "LD_PRELOAD (the program's CUDA calls are served)",
        (_, true, ..) => "LD_PRELOAD (the program's CUDA calls are watched)",
        (_, _, 0, _) => "its C functions",
        (.., true) => "torch's allocator interface (door:native)",
        (.., false) => "torch's pluggable allocator (door:pluggable)",
    }
}

/// Whether the program's own CUDA calls are only watched.
fn is_only_watched() -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    return preload::mode() == preload::Mode::Observe;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// Why torch gets no memory in a process that is only watched, and the remedy.
const ONLY_WATCHED: &str = "this process is only watched (preload:observe), so torch must keep its \
     own allocator: leave out what makes gruyere torch's allocator (python -m gruyere, \
     GRUYERE_ENABLE, gruyere.enable), or preload:observe";

/// Announces the wired hooks to the heap, or to the future one.
fn announce(bits: u32) {
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    match current() {
        Some(heap) => heap.announce_hooks(bits),
        None => beginning.announced |= bits,
    }
}

/// Notes, for the heap or the future one, that no wait of one stream for another can close a cycle.
fn allow_waits() {
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    match current() {
        Some(heap) => heap.allow_waits(),
        None if matches!(beginning.waits, Waits::Unknown) => beginning.waits = Waits::Allowed,
        None => {}
    }
}

/// Notes, for the heap or the future one, that such a wait may close a cycle from now on.
fn forbid_waits(why: &str) {
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    match current() {
        Some(heap) => heap.forbid_waits(why),
        None => beginning.waits = Waits::Forbidden(why.to_owned()),
    }
}

/// Takes the requests of the heap, or of the future one, off the hot path while torch's profiler is
/// told of blocks, or back to it.
fn tell_of_blocks(wanted: bool) {
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    beginning.tells_of_blocks = wanted;
    if let Some(heap) = current() {
        heap.tell_of_blocks(wanted);
    }
}

fn publish(heap: Heap, config: Config) -> &'static Heap {
    fork::watch();
    close_at_exit();
    oom::write_pages_at_thresholds(&config);
    let installed = Box::leak(Box::new(Installed { heap, config }));
    HEAP.store(installed, Ordering::Release);
    &installed.heap
}

/// Replaces the process's heap with one over `driver`, configured by `conf` (as `GRUYERE_CONF`),
/// and shuts the old one down: no thread may be using it or its blocks. For tests and the bench.
///
/// # Errors
/// `conf` is wrong, or the driver cannot be used: why.
pub fn install(driver: Arc<dyn Driver>, conf: &str) -> Result<&'static Heap, String> {
    let _init = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    logging::init();
    let config = Config::parse(conf).map_err(|error| error.to_string())?;
    attach_profiler(&config);
    let mut heap = Heap::new(driver, config.heap.clone()).map_err(|error| error.to_string())?;
    ask_sites(&mut heap, &config);
    if let Some(old) = current() {
        old.shut_down();
    }
    Ok(publish(heap, config))
}

/// Removes the record's file at a normal exit. Nothing else is torn down: static destructors and
/// Python's last objects may still free blocks.
fn close_at_exit() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    extern "C" fn close() {
        if !fork::is_forked_child() {
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            preload::mode::leave();
            guarded((), || {
                if let Some(heap) = current() {
                    run_file::at_exit(heap);
                    summary::at_exit(heap);
                    heap.record().close();
                    heap.flush_trace();
                }
            });
        }
    }
    ONCE.call_once(|| {
        // SAFETY: the handler is a function of this library, which is never unloaded
        // (`-z nodelete`).
        let code = unsafe { libc::atexit(close) };
        if code != 0 {
            log::warn!(
                "atexit failed: the record will be left in /dev/shm at exit, for `gruyere ps \
                 --sweep`"
            );
        }
    });
}

/// Runs `body`; logs a panic and returns `fallback`. No panic crosses the C ABI.
#[inline]
fn guarded<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(_) => {
            log::error!("gruyere: internal error (a panic, above); please report it");
            fallback
        }
    }
}
