//! Which streams capture: asked of those that may be asked now, remembered of the others.
//!
//! A capture must not be broken, so before anything is recorded behind all work of the device, or
//! waited for, every stream is asked that may be: the lasting ones and the calling thread's own. A
//! passing one may not, outside of its own calls; there counts what it did when a call named it
//! last. A capture inside a pool scope is over with it. One that nobody announced is taken to go on
//! until the stream is seen to capture nothing, or the program has synchronised the device, which
//! it could not while it went on.

use super::Streams;
use super::events::Reach;
use super::names::Resolved;
use super::stream::{IN_SCOPE, QUIET, Status, Stream, UNANNOUNCED, is_gone, is_quiet};
use crate::driver::{CaptureStatus, Driver, ErrorKind, Result};
use crate::sync::lock;
use std::sync::atomic::Ordering;

impl Streams {
    /// Whether a stream is capturing, announced or not, or may be, as far as can be told: then
    /// nothing may be waited for. Asks the driver about each stream that lasts.
    pub(crate) fn any_capturing(&self, driver: &dyn Driver) -> bool {
        self.capturing(driver).unwrap_or(true)
    }

    /// As [`Streams::any_capturing`].
    ///
    /// # Errors
    /// That of a stream which cannot say, for another reason than a capture, where no other stream
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

    /// Whether every known stream says that it captures nothing, or said so last; one that cannot
    /// say might. Asks the driver about each stream that lasts.
    pub(crate) fn none_captures(&self, driver: &dyn Driver) -> bool {
        !self.was_seen_to_capture(IN_SCOPE)
            && self
                .statuses(driver)
                .into_iter()
                .all(|status| matches!(status, Ok(CaptureStatus::None)))
    }

    /// The captures that known streams are in. Asks the driver about each stream that lasts; what
    /// others did before proves nothing.
    pub(crate) fn running_captures(&self, driver: &dyn Driver) -> Vec<u64> {
        let active = |status| match status {
            Ok(CaptureStatus::Active(id)) => Some(id),
            _ => None,
        };
        self.statuses(driver).into_iter().filter_map(active).collect()
    }

    /// What the streams that may be asked do about capture.
    fn statuses(&self, driver: &dyn Driver) -> Vec<Status> {
        // Under this lock no number becomes another stream's, and the end of a lasting one waits.
        let _fences = lock(&self.fences);
        let status = |number: u32| match self.reach(number, None) {
            Reach::Here(handle) => Some(driver.capture_status(self.device, handle)),
            _ => None,
        };
        (0..self.count()).filter_map(status).filter(|status| !status.is_err_and(is_gone)).collect()
    }

    /// Whether a stream that may not be asked now was seen to do this, or more, when a call named
    /// it last.
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

    /// Whether a call that names a stream of this status has something to do beside what it was
    /// made for.
    pub(super) fn is_due(&self, number: u32, status: Status) -> bool {
        let seen = self.get(number).map_or(QUIET, |stream| stream.seen.load(Ordering::Acquire));
        !is_quiet(status) || seen != QUIET || self.lost.contains(number)
    }

    /// Remembers what a stream does about capture; `in_scope`: a capture that was announced is
    /// open.
    ///
    /// An answer that failed for another reason than a capture tells nothing that lasts: the stream
    /// may capture in this call, and is remembered as it was.
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

    /// The program has synchronised the device, so no stream of it captures.
    pub(crate) fn forget_captures(&self) {
        for stream in (0..self.count()).filter_map(|number| self.get(number)) {
            stream.seen.store(QUIET, Ordering::Release);
        }
    }
}
