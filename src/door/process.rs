//! The one heap of the process, and what every door needs: a leaf, so that the doors know this file
//! and not each other.

use crate::config::Config;
use crate::heap::Heap;
use crate::record::facts;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// Success.
pub const GRUYERE_OK: c_int = 0;
/// The library cannot work in this process; the log says why.
pub const GRUYERE_UNAVAILABLE: c_int = -1;
/// Invalid argument.
pub const GRUYERE_INVALID: c_int = -2;
/// A file could not be written.
pub const GRUYERE_IO: c_int = -3;
/// An invariant is broken.
pub const GRUYERE_BROKEN: c_int = -4;

/// A heap and its configuration, part of which concerns the doors only.
// The heap comes first, so that `current` has its address without an addition.
#[repr(C)]
pub(super) struct Installed {
    pub(super) heap: Heap,
    pub(super) config: Config,
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
pub(super) static HEAP: AtomicPtr<Installed> = AtomicPtr::new(std::ptr::null_mut());

/// State from before the heap exists.
pub(super) static INIT: Mutex<Beginning> = Mutex::new(Beginning {
    failure: None,
    announced: 0,
    tells_of_blocks: false,
    waits: Waits::Unknown,
});

pub(super) struct Beginning {
    /// Why there is no heap; set once, and final: no second attempt.
    pub(super) failure: Option<String>,
    /// The hooks that a loader announced, for the future heap.
    pub(super) announced: u32,
    /// Whether the future heap reports blocks to torch's profiler.
    pub(super) tells_of_blocks: bool,
    /// A loader's declaration about waits, for the future heap.
    pub(super) waits: Waits,
}

/// A loader's declaration about waits of one stream for another.
pub(super) enum Waits {
    Unknown,
    Allowed,
    Forbidden(String),
}

#[inline]
pub(super) fn installed() -> Option<&'static Installed> {
    // SAFETY: null, or from Box::leak: valid for ever. Acquire pairs with the release of publish().
    unsafe { HEAP.load(Ordering::Acquire).as_ref() }
}

/// The heap, if it exists.
#[inline]
pub fn current() -> Option<&'static Heap> {
    installed().map(|installed| &installed.heap)
}

/// The heap's configuration, once the heap exists.
pub(super) fn config() -> Option<&'static Config> {
    installed().map(|installed| &installed.config)
}

/// Drops the heap in a forked child. Async-signal-safe: a store.
pub(super) fn forget() {
    HEAP.store(std::ptr::null_mut(), Ordering::Relaxed);
}

/// | state | means | next |
/// |---|---|---|
/// | false | no shim has asked for the table | true, for good |
/// | true | a shim has it | |
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Notes that a shim has the native door's table.
pub(super) fn take_native() {
    TAKEN.store(true, Ordering::Relaxed);
}

/// Whether a shim has the table: torch uses the native door.
pub(super) fn is_native() -> bool {
    TAKEN.load(Ordering::Relaxed)
}

/// Announces the wired hooks to the heap, or to the future one.
pub(super) fn announce(bits: u32) {
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    match current() {
        Some(heap) => heap.announce_hooks(bits),
        None => beginning.announced |= bits,
    }
}

/// Notes, for the heap or the future one, that no wait of one stream for another can close a cycle.
pub(super) fn allow_waits() {
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    match current() {
        Some(heap) => heap.allow_waits(),
        None if matches!(beginning.waits, Waits::Unknown) => beginning.waits = Waits::Allowed,
        None => {}
    }
}

/// Notes, for the heap or the future one, that such a wait may close a cycle from now on.
pub(super) fn forbid_waits(why: &str) {
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    match current() {
        Some(heap) => heap.forbid_waits(why),
        None => beginning.waits = Waits::Forbidden(why.to_owned()),
    }
}

/// Notes the process's rank, in the record or for the future one.
pub(super) fn announce_rank(rank: u64, world_size: u64) {
    // The lock: a record that is being made has what was told before, or is there.
    let _beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    facts::tell_rank(rank, world_size);
    if let Some(heap) = current() {
        heap.record().tell_rank(rank, world_size);
    }
}

/// Moves the requests of the heap, or of the future one, off the hot path while blocks are reported
/// to torch's profiler (`wanted`), or back onto it.
pub(super) fn tell_of_blocks(wanted: bool) {
    let mut beginning = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    beginning.tells_of_blocks = wanted;
    if let Some(heap) = current() {
        heap.tell_of_blocks(wanted);
    }
}

/// Runs `body`; logs a panic and returns `fallback`. No panic crosses the C ABI.
#[inline]
pub(super) fn guarded<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(_) => {
            log::error!("gruyere: internal error (a panic, above); please report it");
            fallback
        }
    }
}
