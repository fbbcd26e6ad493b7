//! Alerts, tags and checkpoints: what a program and the allocator exchange apart from requests.

use super::fork;
use super::process::{GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE, current, guarded};
use crate::heap::{ALERTS, Alert, Lifetime};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Alert kind: a request failed with out of memory.
pub const GRUYERE_ALERT_OUT_OF_MEMORY: u32 = 1;
/// Alert kind: a request fitted nowhere, and the allocator is reclaiming memory for it.
pub const GRUYERE_ALERT_RECLAIM: u32 = 2;
/// Alert kind: a threshold of `alert:` with the action `callback` is passed.
pub const GRUYERE_ALERT_THRESHOLD: u32 = 3;

/// An alert to the program, in bytes unless noted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GruyereAlert {
    /// The kind, `GRUYERE_ALERT_*`.
    pub kind: u32,
    /// The device.
    pub device: u32,
    /// Bytes requested; 0 for a threshold.
    pub asked: u64,
    /// Bytes held at that time.
    pub reserved: u64,
    /// Bytes live at that time.
    pub live: u64,
    /// Peak of live bytes.
    pub live_peak: u64,
    /// Alerts of this kind (for a threshold: of this threshold) on the device so far, this one
    /// included.
    pub count: u64,
    /// Alerts dropped from the full queue since the last one that `gruyere_next_alert` took.
    pub lost: u64,
    /// For a threshold: the value of its metric, in bytes, bytes per second, seconds, a count, or a
    /// share from 0 to 1.
    pub value: f64,
    /// For a threshold: its index in `alert:`, from 0 (`gruyere_alert_threshold`).
    pub threshold: u64,
}

impl GruyereAlert {
    fn new(alert: &Alert, lost: u64) -> Self {
        let Alert { kind, device, asked, reserved, live, live_peak, count, threshold, value } =
            *alert;
        let kind = kind as u32;
        let threshold = u64::from(threshold);
        Self { kind, device, asked, reserved, live, live_peak, count, lost, value, threshold }
    }
}

/// A callback for alerts; `context` is the pointer given to [`gruyere_on_alert`].
pub type GruyereAlertCallback =
    Option<extern "C" fn(alert: *const GruyereAlert, context: *mut c_void)>;

/// The context of a callback; its registrar promises that any thread may use it.
struct Context(*mut c_void);

// SAFETY: the pointer goes back to the registrar's own function only; the contract of
// gruyere_on_alert allows that call from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Calls `callback` with each alert and with `context` from now on; NULL ends the calls. A new
/// callback replaces the former one, which may still be running on other threads when this function
/// returns.
///
/// The library calls it on the thread whose request caused the alert, inside `gruyere_malloc`,
/// before that function throws or goes on (for a threshold: inside `gruyere_malloc` or
/// `gruyere_mark_step`). So the calls come from any thread of the program that allocates, several
/// at a time. The library holds no lock of its own during the call, and the callback may allocate
/// and free. But the thread may hold locks of torch's or of Python's interpreter, or a thread that
/// holds one may wait for it: the callback must not wait for any of these locks (in Python, take
/// alerts with `gruyere_next_alert`). It must not throw.
///
/// Returns 0, or -1 in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_on_alert(callback: GruyereAlertCallback, context: *mut c_void) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        let context = Context(context);
        ALERTS.listen(callback.map(|callback| -> crate::heap::Listener {
            Arc::new(move |alert: &Alert| {
                let Context(context) = &context;
                let alert = GruyereAlert::new(alert, 0);
                as_the_program(|| callback(&raw const alert, *context));
            })
        }));
        GRUYERE_OK
    })
}

/// Waits up to `milliseconds` for an alert, and takes the oldest one from the queue into `*alert`.
/// The library queues alerts from the first call on, and keeps the latest 256.
///
/// Returns 1 if there was an alert, 0 if not; -1 in a forked child; -2 if `alert` is NULL.
///
/// # Safety
/// `alert` is NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_next_alert(alert: *mut GruyereAlert, milliseconds: u32) -> c_int {
    if alert.is_null() {
        return GRUYERE_INVALID;
    }
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        match ALERTS.next(Duration::from_millis(u64::from(milliseconds))) {
            Some((found, lost)) => {
                // SAFETY: not NULL, and the caller's promise.
                unsafe { alert.write(GruyereAlert::new(&found, lost)) };
                1
            }
            None => 0,
        }
    })
}

/// Writes the text of the threshold at index `threshold` (from 0) of `alert:` to `text`, as a
/// NUL-terminated string truncated to `bytes` bytes.
///
/// Returns the length of the whole text; -1 if the library has not allocated in this process; -2 if
/// there is no such threshold, or `text` is NULL and `bytes` is not 0.
///
/// # Safety
/// `text` is valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_alert_threshold(
    threshold: u64,
    text: *mut c_char,
    bytes: usize,
) -> c_int {
    if text.is_null() && bytes > 0 {
        return GRUYERE_INVALID;
    }
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        let Some(heap) = current() else { return GRUYERE_UNAVAILABLE };
        let Some(rule) =
            usize::try_from(threshold).ok().and_then(|at| heap.settings().alert.get(at))
        else {
            return GRUYERE_INVALID;
        };
        let whole = rule.threshold.text();
        if bytes > 0 {
            let length = whole.len().min(bytes - 1);
            // SAFETY: `length` + 1 bytes are inside the caller's room, and `length` inside our
            // text; the two do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(whole.as_ptr(), text.cast::<u8>(), length);
                text.add(length).write(0);
            }
        }
        c_int::try_from(whole.len()).unwrap_or(c_int::MAX)
    })
}

/// Counts the live block that starts at `pointer` under another lifetime: 0 auto, 1 transient, 2
/// step, 3 persistent. The block does not move.
///
/// Returns 0; -1 if the library has not allocated in this process; -2 if there is no such lifetime,
/// or no live block of the library starts there.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_tag(pointer: *mut c_void, lifetime: u8) -> c_int {
    let Some(lifetime) = Lifetime::from_u8(lifetime) else { return GRUYERE_INVALID };
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || match current() {
        None => GRUYERE_UNAVAILABLE,
        Some(heap) if heap.tag(pointer as u64, lifetime) => GRUYERE_OK,
        Some(_) => GRUYERE_INVALID,
    })
}

/// Announces that the program uses little memory now: a checkpoint, the end of an epoch. Releases
/// the idle memory of each device whose live bytes are below three quarters of their peak, unless a
/// call has done so within the last 30 seconds. Synchronises those devices. Returns the number of
/// bytes released.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_checkpoint() -> u64 {
    if fork::is_forked_child() {
        return 0;
    }
    guarded(0, || current().map_or(0, |heap| heap.checkpoint(Instant::now())))
}

/// Runs `body`, a function of the program's, inside a call of the library's: its allocations and
/// frees count as the program's.
fn as_the_program(body: impl FnOnce()) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    let _outside = super::preload::inside::leave();
    body();
}
