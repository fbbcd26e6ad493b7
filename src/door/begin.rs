//! The heap's beginning: from the configuration and the process's libcuda, at the first entry that
//! needs it.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::preload;
use super::process::{self, HEAP, INIT, Installed, Waits, current};
use super::{end, fork, oom, program, python};
use crate::config::{Blame, Config, logging};
use crate::driver::Driver;
use crate::driver::cuda::{CudaDriver, is_stand_in};
use crate::heap::Heap;
use crate::nvtx;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

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
                "gruyere {}, through {}{device}, settings: {}",
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

/// Whether the heap serves the program's own CUDA calls.
fn is_program_served() -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    return preload::mode() == preload::Mode::Manage;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// The door of the program's requests, for the log.
fn came_in(announced: u32) -> &'static str {
    match (is_program_served(), is_only_watched(), announced, process::is_native()) {
        (true, ..) => "LD_PRELOAD (the program's CUDA calls are served)",
        (_, true, ..) => "LD_PRELOAD (the program's CUDA calls are observed)",
        (_, _, 0, _) => "its C functions",
        (.., true) => "torch's allocator interface (door:native)",
        (.., false) => "torch's pluggable allocator (door:pluggable)",
    }
}

/// Whether the program's own CUDA calls are only observed.
pub(super) fn is_only_watched() -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    return preload::mode() == preload::Mode::Observe;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

fn publish(heap: Heap, config: Config) -> &'static Heap {
    fork::watch();
    end::close_at_exit();
    oom::write_pages_at_thresholds(&config);
    program::tell(&heap);
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

/// Why torch gets no memory in a process that is only observed, and the remedy.
pub(super) const ONLY_WATCHED: &str = "this process is only observed (preload:observe), so \
    torch must keep its own allocator: remove either preload:observe or what makes Gruyère torch's \
    allocator (python -m gruyere, GRUYERE_ENABLE, gruyere.enable)";
