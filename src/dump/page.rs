//! The page about an out-of-memory or a passed threshold: decides when to write one, and never
//! fails the program.

use super::gather;
use super::state::State;
use crate::file;
use crate::heap::{Heap, Report};
use crate::record::conclusion::Conclusion;
use crate::record::page::{self, About, MOST_BYTES};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Pages that a process writes.
pub const MOST_PAGES: u32 = 8;
/// Of them at thresholds: the out-of-memory that follows must have one too.
const MOST_OF_THRESHOLDS: u32 = 4;
/// Between two pages: a search for the fitting batch runs out of memory on purpose.
pub const PAUSE: Duration = Duration::from_secs(60);
/// Time allowed for a page: the program waits.
const PATIENCE: Duration = Duration::from_secs(3);

/// Why a page is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    OutOfMemory,
    Threshold,
}

/// The pages so far.
#[derive(Debug)]
struct Written {
    all: u32,
    of_thresholds: u32,
    last: Option<Last>,
}

/// The last page.
#[derive(Debug)]
struct Last {
    at: Instant,
    reason: Reason,
    /// Its path, once written.
    path: Option<PathBuf>,
}

/// The place of the next page.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    New,
    /// In place of the last one.
    Of(PathBuf),
}

impl Written {
    const NOTHING: Self = Self { all: 0, of_thresholds: 0, last: None };

    /// Reserves and counts a place for one more page; `None`: no page. The page of an
    /// out-of-memory takes the last one's place within [`PAUSE`], and where there is no room for
    /// more: the out-of-memory that ends the program is the last.
    fn place(&mut self, reason: Reason, now: Instant) -> Option<Place> {
        let is_alert = reason == Reason::Threshold;
        let is_room =
            self.all < MOST_PAGES && !(is_alert && self.of_thresholds == MOST_OF_THRESHOLDS);
        let is_soon = |last: &Last| now.saturating_duration_since(last.at) < PAUSE;
        if let Some(last) = self.last.as_mut().filter(|last| is_soon(last) || !is_room) {
            if is_alert {
                return None;
            }
            // An alert's page that was not written leaves its place to a new one.
            let was_alert = last.reason == Reason::Threshold;
            last.reason = reason;
            if !was_alert || last.path.is_some() {
                return last.path.clone().map(Place::Of);
            }
        }
        if !is_room {
            return None;
        }
        self.last = Some(Last { at: now, reason, path: None });
        self.all += 1;
        self.of_thresholds += u32::from(is_alert);
        Some(Place::New)
    }

    /// Notes the path of the last page.
    fn is_at(&mut self, path: &Path) {
        if let Some(last) = self.last.as_mut() {
            last.path = Some(path.to_owned());
        }
    }
}

static WRITTEN: Mutex<Written> = Mutex::new(Written::NOTHING);

fn written() -> MutexGuard<'static, Written> {
    WRITTEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the page of an out-of-memory beside its dump, or in place of an earlier page, and returns
/// its path. `None`: another thread writes one, or the write failed, which is logged.
pub fn of_out_of_memory(
    state: &State,
    report: &Report,
    folder: &Path,
    name: &str,
) -> Option<String> {
    let place = written().place(Reason::OutOfMemory, Instant::now())?;
    let said = format!("Out of memory number {} on this device.", report.count);
    let path = match place {
        // The folder may have changed meanwhile.
        Place::Of(path) if path.parent() == Some(folder) => path,
        _ => folder.join(format!("{name}.html")),
    };
    let told = write(state, Some(report.device), said, &path)?;
    written().is_at(&path);
    Some(told)
}

/// Writes a page to `folder` where a device passes `threshold` of `alert:`.
pub fn of_threshold(heap: &Heap, device: u32, threshold: &str, folder: &Path) {
    if written().place(Reason::Threshold, Instant::now()).is_none() {
        return;
    }
    if let Err(error) = file::make_folders(folder) {
        log::warn!("alert: no page could be written to {}: {error}", folder.display());
        return;
    }
    // The run so far.
    heap.sample();
    let mut state = gather::state(heap, None);
    state.conclusion = Some(Conclusion::of(&state, &[]));
    let name = format!("gruyere-alert-{}-gpu{device}-{}", std::process::id(), file::random_name());
    let said = format!("The threshold {threshold} of `alert:` is passed.");
    let path = folder.join(format!("{name}.html"));
    if let Some(told) = write(&state, Some(device), said, &path) {
        written().is_at(&path);
        log::warn!("alert: {threshold} is passed on device {device}; the page: {told}");
    }
}

fn write(state: &State, device: Option<u32>, said: String, path: &Path) -> Option<String> {
    let deadline = Some(Instant::now() + PATIENCE);
    let about = About { said, device, deadline, ..About::default() };
    let written = catch_unwind(AssertUnwindSafe(|| {
        file::replace(path, MOST_BYTES, file::PRIVATE, |out| page::write(out, state, &about))
    }));
    match written {
        Ok(Ok(())) => {
            let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            Some(whole.display().to_string())
        }
        Ok(Err(error)) => {
            log::warn!("no page could be written to {}: {error}", path.display());
            None
        }
        Err(_) => {
            log::error!("gruyere: internal error in the page (above); please report it");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_page_a_minute_and_eight_a_process_and_the_last_out_of_memory_has_one() {
        let mut written = Written::NOTHING;
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut new = 0;
        for seconds in 0..1000 {
            let path = match written.place(Reason::OutOfMemory, at(seconds)) {
                Some(Place::New) => {
                    assert_eq!(seconds % 60, 0);
                    new += 1;
                    PathBuf::from(format!("{new}.html"))
                }
                Some(Place::Of(path)) => {
                    assert_eq!(path, Path::new(&format!("{new}.html")));
                    path
                }
                None => panic!("no page after {seconds} s"),
            };
            written.is_at(&path);
        }
        assert_eq!(new, MOST_PAGES);
    }

    #[test]
    fn while_one_thread_writes_a_page_the_others_write_none() {
        let (mut written, now) = (Written::NOTHING, Instant::now());
        assert_eq!(written.place(Reason::OutOfMemory, now), Some(Place::New));
        assert_eq!(written.place(Reason::OutOfMemory, now), None);
    }

    #[test]
    fn a_page_that_can_not_be_written_or_made_is_left_out_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let page = |state: &State, folder: &Path| {
            let path = folder.join("page.html");
            write(state, None, String::new(), &path).map(|path| path.ends_with(".html"))
        };
        let device = super::super::state::DeviceState::default();
        let state = State { devices: vec![device], ..State::default() };
        assert_eq!(page(&state, folder.path()), Some(true));
        std::fs::remove_file(folder.path().join("page.html")).unwrap();
        // No such folder, a file in its place, a state without a page.
        for folder in [&*folder.path().join("none"), Path::new("/dev/full")] {
            assert_eq!(page(&state, folder), None);
        }
        assert_eq!(page(&State::default(), folder.path()), None);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn alerts_leave_room_for_the_out_of_memory_that_comes_after_them() {
        let mut written = Written::NOTHING;
        let began = Instant::now();
        let at = |minutes: u64| began + 60 * minutes as u32 * Duration::from_secs(1);
        let alerts = (0..20).filter(|&n| written.place(Reason::Threshold, at(n)).is_some());
        assert_eq!(alerts.count() as u32, MOST_OF_THRESHOLDS);
        assert_eq!(written.place(Reason::OutOfMemory, at(19)), Some(Place::New));
    }

    #[test]
    fn within_a_minute_an_out_of_memory_takes_the_place_of_an_alert_and_neither_follows_it() {
        let mut written = Written::NOTHING;
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let path = Path::new("alert.html");
        assert_eq!(written.place(Reason::Threshold, at(0)), Some(Place::New));
        written.is_at(path);
        assert_eq!(written.place(Reason::Threshold, at(10)), None);
        let place = written.place(Reason::OutOfMemory, at(20));
        assert_eq!(place, Some(Place::Of(path.to_owned())));
        assert_eq!(written.all, 1);
        assert_eq!(written.place(Reason::Threshold, at(59)), None);
        assert_eq!(written.place(Reason::Threshold, at(60)), Some(Place::New));
        // The alert's page failed.
        assert_eq!(written.place(Reason::OutOfMemory, at(70)), Some(Place::New));
    }
}
