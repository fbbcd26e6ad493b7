//! The page that an out-of-memory or a passed threshold leaves behind: when there is one, and that
//! it fails nobody.

use super::gather;
use super::state::State;
use crate::file;
use crate::heap::Heap;
use crate::heap::report::oom::Report;
use crate::record::conclusion::Conclusion;
use crate::record::dump::page::{self, About, MOST_BYTES};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Pages that a process writes.
pub const MOST_PAGES: u32 = 8;
/// Of them at thresholds: the out-of-memory that comes after them is told too.
const MOST_OF_THRESHOLDS: u32 = 4;
/// Between two pages of one kind: whoever looks for the batch that fits runs out on purpose.
pub const PAUSE: Duration = Duration::from_secs(60);
/// How long a page may take: the program waits.
const PATIENCE: Duration = Duration::from_secs(3);

/// Why a page is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    OutOfMemory,
    Threshold,
}

/// What was written so far.
#[derive(Debug)]
struct Written {
    all: u32,
    of_thresholds: u32,
    last_out_of_memory: Option<Instant>,
    last_threshold: Option<Instant>,
}

impl Written {
    const NOTHING: Self =
        Self { all: 0, of_thresholds: 0, last_out_of_memory: None, last_threshold: None };

    /// Whether there may be one more; counts it.
    fn may_write(&mut self, reason: Reason, now: Instant) -> bool {
        let (last, is_room) = match reason {
            Reason::OutOfMemory => (&mut self.last_out_of_memory, true),
            Reason::Threshold => {
                (&mut self.last_threshold, self.of_thresholds < MOST_OF_THRESHOLDS)
            }
        };
        let is_soon = last.is_some_and(|last| now.saturating_duration_since(last) < PAUSE);
        if is_soon || !is_room || self.all >= MOST_PAGES {
            return false;
        }
        *last = Some(now);
        self.all += 1;
        self.of_thresholds += u32::from(reason == Reason::Threshold);
        true
    }
}

static WRITTEN: Mutex<Written> = Mutex::new(Written::NOTHING);

fn may_write(reason: Reason) -> bool {
    WRITTEN.lock().unwrap_or_else(PoisonError::into_inner).may_write(reason, Instant::now())
}

/// Writes the page of an out-of-memory beside its dump; where it is. `None`: there was one within
/// the minute, there were [`MOST_PAGES`], or it can't be written, which the log tells.
pub fn of_out_of_memory(
    state: &State,
    report: &Report,
    folder: &Path,
    name: &str,
) -> Option<String> {
    if !may_write(Reason::OutOfMemory) {
        return None;
    }
    let said = format!("Out of memory, number {} on this device.", report.count);
    write(state, Some(report.device), said, folder, name)
}

/// Writes a page to `folder` where `threshold` of `alert:` is passed on a device.
pub fn of_threshold(heap: &Heap, device: u32, threshold: &str, folder: &Path) {
    if !may_write(Reason::Threshold) {
        return;
    }
    if let Err(error) = file::make_folders(folder) {
        log::warn!("alert: no page is written: {}: {error}", folder.display());
        return;
    }
    // How the run went, up to now.
    heap.sample();
    let mut state = gather::state(heap, None);
    state.conclusion = Some(Conclusion::of(&state, &[]));
    let name = format!("gruyere-alert-{}-gpu{device}-{}", std::process::id(), file::random_name());
    let said = format!("The alert {threshold} of `alert:` is passed.");
    if let Some(path) = write(&state, Some(device), said, folder, &name) {
        log::warn!("alert: {threshold} is passed on device {device}; the page: {path}");
    }
}

fn write(
    state: &State,
    device: Option<u32>,
    said: String,
    folder: &Path,
    name: &str,
) -> Option<String> {
    let path = folder.join(format!("{name}.html"));
    let about = About { said, device, deadline: Some(Instant::now() + PATIENCE) };
    let written = catch_unwind(AssertUnwindSafe(|| {
        file::replace(&path, MOST_BYTES, file::PRIVATE, |out| page::write(out, state, &about))
    }));
    match written {
        Ok(Ok(())) => {
            let whole = std::path::absolute(&path).unwrap_or(path);
            Some(whole.display().to_string())
        }
        Ok(Err(error)) => {
            log::warn!("no page is written to {}: {error}", path.display());
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
    fn there_is_one_page_a_minute_and_eight_a_process() {
        let mut written = Written::NOTHING;
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut may = |seconds| written.may_write(Reason::OutOfMemory, at(seconds));
        assert_eq!([0, 1, 59, 60, 61].map(&mut may), [true, false, false, true, false]);
        let later = (2..100).filter(|&minutes| may(60 * minutes)).count();
        assert_eq!(later as u32, MOST_PAGES - 2);
    }

    #[test]
    fn a_page_that_can_not_be_written_or_made_is_left_out_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let page = |state: &State, folder: &Path| {
            write(state, None, String::new(), folder, "page").map(|path| path.ends_with(".html"))
        };
        let device = super::super::state::DeviceState::default();
        let state = State { devices: vec![device], ..State::default() };
        assert_eq!(page(&state, folder.path()), Some(true));
        std::fs::remove_file(folder.path().join("page.html")).unwrap();
        // No such folder, a file in its place, a state that there is no page of.
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
        let alerts = (0..20).filter(|&n| written.may_write(Reason::Threshold, at(n))).count();
        assert_eq!(alerts as u32, MOST_OF_THRESHOLDS);
        assert!(written.may_write(Reason::OutOfMemory, at(19)));
    }
}
