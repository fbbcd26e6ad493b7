//! Which streams capture: asked of streams that may be asked now, remembered of the others.
//!
//! Nothing may break a capture. So before an event is recorded behind all work of the device, or a
//! thread waits for that work, the allocator asks every stream that it may: the lasting ones and
//! the calling thread's own. It may ask a passing stream only in that stream's own calls; elsewhere
//! counts what the stream did when a call named it last. A capture inside a pool scope ends with
//! the scope. An unannounced one is taken to go on until the stream is seen to capture nothing, or
//! the program has synchronised the device, which it could not do during the capture.

use super::Streams;
use super::events::Reach;
use super::names::Resolved;
use super::stream::{IN_SCOPE, QUIET, Status, Stream, UNANNOUNCED, is_gone, is_quiet};
use crate::driver::{CaptureStatus, Driver, ErrorKind, Result};
use crate::sync::lock;
use std::sync::atomic::Ordering;

impl Streams {
    /// Whether a stream captures or may capture, announced or not; if so, nothing may be waited
    /// for. Asks the driver about each lasting stream.
    pub(crate) fn any_capturing(&self, driver: &dyn Driver) -> bool {
        self.capturing(driver).unwrap_or(true)
    }

    /// [`Streams::any_capturing`], with the driver's errors.
    ///
    /// # Errors
    /// The driver's error for a stream that cannot say, other than a capture's, if no other stream
    /// captures.
    pub(crate) fn capturing(&self, driver: &dyn Driver) -> Result<bool> {
        if self.was_seen_to_capture(UNANNOUNCED) {
            return Ok(true);
        }
        let mut untold = None;
        for status in self.statuses(driver).into_iter().filter(|&status| !is_quiet(status)) {
            match status {
                Err(error) if error.kind != ErrorKind::Capturing => untold = Some(error),
                _ => return Ok(true),
            }
        }
        untold.map_or(Ok(false), Err)
    }

    /// Whether every known stream captures nothing, by its answer now or its last one; a stream
    /// that cannot say may capture. Asks the driver about each lasting stream.
    pub(crate) fn none_captures(&self, driver: &dyn Driver) -> bool {
        !self.was_seen_to_capture(IN_SCOPE)
            && self
                .statuses(driver)
                .into_iter()
                .all(|status| matches!(status, Ok(CaptureStatus::None)))
    }

    /// The captures that known streams are in. Asks the driver about each lasting stream; earlier
    /// answers of the others prove nothing.
    pub(crate) fn running_captures(&self, driver: &dyn Driver) -> Vec<u64> {
        let active = |status| match status {
            Ok(CaptureStatus::Active(id)) => Some(id),
            _ => None,
        };
        self.statuses(driver).into_iter().filter_map(active).collect()
    }

    /// The capture status of each stream that may be asked.
    fn statuses(&self, driver: &dyn Driver) -> Vec<Status> {
        // Under this lock no number passes to another stream, and the end of a lasting stream
        // waits.
        let _fences = lock(&self.fences);
        let status = |number: u32| match self.reach(number, None) {
            Reach::Here(handle) => Some(driver.capture_status(self.device, handle)),
            _ => None,
        };
        (0..self.count()).filter_map(status).filter(|status| !status.is_err_and(is_gone)).collect()
    }

    /// Whether a stream that may not be asked now did this, or more, when a call named it last.
    fn was_seen_to_capture(&self, least: u8) -> bool {
        self.capturing.load(Ordering::Acquire) > 0
            && (0..self.count()).any(|number| {
                let seen = |stream: &Stream| {
                    stream.seen.load(Ordering::Acquire) >= least && !stream.is_dead()
                };
                self.get(number).is_some_and(seen)
                    && !matches!(self.reach(number, None), Reach::Here(_))
            })
    }

    /// Whether a call that names a stream of this status has work to do besides its own.
    pub(super) fn is_due(&self, number: u32, status: Status) -> bool {
        let seen = self.get(number).map_or(QUIET, |stream| stream.seen.load(Ordering::Acquire));
        !is_quiet(status) || seen != QUIET || self.lost.contains(number)
    }

    /// Remembers what a stream does about capture; `in_scope`: an announced capture is open.
    ///
    /// An answer that failed for another reason than a capture says nothing that lasts: the stream
    /// may capture in this call, and the memory of it stays.
    pub(crate) fn note_capture(&self, found: &Resolved<'_>, in_scope: bool) {
        let Some(stream) = self.get(found.number) else { return };
        if matches!(
            found.status,
            Some(Err(error)) if !is_quiet(Err(error)) && error.kind != ErrorKind::Capturing
        ) {
            return;
        }
        let seen = match (found.captures(), in_scope) {
            (false, _) => QUIET,
            (true, true) => IN_SCOPE,
            (true, false) => UNANNOUNCED,
        };
        if seen != QUIET {
            self.capturing.store(1, Ordering::Release);
        }
        stream.seen.store(seen, Ordering::Release);
    }

    /// The program has synchronised the device, so none of its streams captures.
    pub(crate) fn forget_captures(&self) {
        for stream in (0..self.count()).filter_map(|number| self.get(number)) {
            stream.seen.store(QUIET, Ordering::Release);
        }
    }
}
