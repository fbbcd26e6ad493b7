//! The calling thread's state: its current context and its capture mode, changed for a call and
//! restored afterwards.

use cudarc::driver::sys;

use super::super::Result;
use super::symbols::Symbols;

/// Keeps the thread in a device's primary context until dropped.
///
/// `cuCtxGetCurrent` reads thread-local memory, so a thread already in the right context (as
/// torch's are) pays no more than that; any other thread, also one without a context, pays a push
/// now and a pop at the end.
pub(super) struct Entered<'a> {
    symbols: &'a Symbols,
    pushed: bool,
    /// The capture mode to restore.
    mode: Option<u32>,
}

impl<'a> Entered<'a> {
    /// Makes `context` current.
    ///
    /// `context` must be a retained primary context, of `symbols`' driver.
    pub(super) fn new(symbols: &'a Symbols, context: sys::CUcontext) -> Result<Self> {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one pointer to `current`.
        unsafe { symbols.cuCtxGetCurrent(&mut current) }?;
        let pushed = current != context;
        if pushed {
            // SAFETY: a retained primary context is valid until released, and we never release it.
            unsafe { symbols.cuCtxPushCurrent_v2(context) }?;
        }
        Ok(Self { symbols, pushed, mode: None })
    }

    /// As [`Entered::new`], and exempts this thread's calls from the captures of other threads.
    ///
    /// While any stream captures in the global mode (torch's default), the driver refuses calls
    /// that might be unsafe for the capture (`cuMemAlloc`, `cuEventQuery`, synchronisations) from
    /// every thread, and invalidates the capture. Our calls depend on nothing captured, so they run
    /// in the relaxed mode.
    pub(super) fn relaxed(symbols: &'a Symbols, context: sys::CUcontext) -> Result<Self> {
        let mut entered = Self::new(symbols, context)?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: `mode` is read and written as the driver's 32-bit enum; a u32 holds any value
        // that comes back.
        if unsafe { symbols.cuThreadExchangeStreamCaptureMode((&raw mut mode).cast()) }.is_ok() {
            entered.mode = Some(mode);
        }
        Ok(entered)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: the value is the driver's own. Nothing can be done about a failure: the
            // driver is gone then.
            let _ =
                unsafe { self.symbols.cuThreadExchangeStreamCaptureMode((&raw mut mode).cast()) };
        }
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: undoes our push; the calls in between push and pop nothing.
            let _ = unsafe { self.symbols.cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
