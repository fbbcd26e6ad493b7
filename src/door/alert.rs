//! Alerts, tags and checkpoints: what a program and the allocator exchange beside the requests.

use super::fork;
use super::process::{GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE};
use super::process::{current, guarded};
use crate::heap::{ALERTS, Alert, Lifetime};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The kind of an alert: a request was answered with out of memory.
pub const GRUYERE_ALERT_OUT_OF_MEMORY: u32 = 1;
/// The kind of an alert: a request fitted nowhere, and memory is being reclaimed for it.
pub const GRUYERE_ALERT_RECLAIM: u32 = 2;
/// The kind of an alert: a threshold of `alert:` with the action `callback` is passed.
pub const GRUYERE_ALERT_THRESHOLD: u32 = 3;

/// Something that a program may want to hear of. Bytes where not said otherwise.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GruyereAlert {
    /// What happened.
    pub kind: u32,
    /// The device.
    pub device: u32,
    /// What was asked for; 0 of a threshold.
    pub asked: u64,
    /// Held then.
    pub reserved: u64,
    /// Live then.
    pub live: u64,
    /// The most that was ever live.
    pub live_peak: u64,
    /// How many of this kind (of a threshold: of this one) there were on the device, this one
    /// included.
    pub count: u64,
    /// Alerts that nobody took in time, since the last one that was taken (`gruyere_next_alert`).
    pub lost: u64,
    /// Of a threshold: the value of its metric: bytes, bytes a second, seconds, a count, or a share
    /// from 0 to 1.
    pub value: f64,
    /// Of a threshold: its place in `alert:`, from 0 (`gruyere_alert_threshold`).
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

/// Who is called with an alert, and with what was given for it.
pub type GruyereAlertCallback =
    Option<extern "C" fn(alert: *const GruyereAlert, context: *mut c_void)>;

/// The context of a callback, which its registrar says may be used from any thread.
struct Context(*mut c_void);

// SAFETY: the pointer goes back to the registrar's own function only; the contract of
// gruyere_on_alert allows that call from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Calls `callback` with each alert and with `context`; NULL: nobody. It takes the place of the one
/// before, which may still be running on other threads when this returns.
///
/// It is called on the thread whose request caused the alert, inside `gruyere_malloc`, before that
/// throws or goes on (of a threshold: inside `gruyere_malloc` or `gruyere_mark_step`); so from any
/// thread of the program that allocates, several at a time. No lock of the allocator is held, and
/// it may allocate and free; but the thread may hold locks of torch's or of Python's interpreter,
/// or be waited for by one that does: it must not wait for any of these (for Python, take alerts
/// with `gruyere_next_alert`). It must not throw.
///
/// 0; -1: this is a forked child.
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

/// Waits up to `milliseconds` for an alert, and writes the oldest that nobody has taken to
/// `*alert`. Alerts are kept from the first call on, the latest 256.
///
/// 1: there was one; 0: there was none; -1: this is a forked child; -2: `alert` is NULL.
///
/// # Safety
/// `alert` is NULL or may be written.
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

/// Writes the text of a threshold of `alert:`, the one at place `threshold` from 0, to `text`, with
/// a NUL: as much as fits in `bytes`.
///
/// The length of the whole text; -1: nothing has been allocated here; -2: there is no such
/// threshold, or `text` is NULL and `bytes` is not 0.
///
/// # Safety
/// `bytes` bytes at `text` may be written.
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
/// step, 3 persistent. The block stays where it is.
///
/// 0; -1: nothing has been allocated here; -2: no such lifetime, or no live block of ours starts
/// there.
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

/// The program says that memory is low: a checkpoint, the end of an epoch. Gives idle memory back
/// on devices where less than three quarters of the peak is live and that this call has not trimmed
/// within 30 seconds; the bytes given. Synchronises those devices.
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
