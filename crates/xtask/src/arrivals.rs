//! Finds the new files in a folder that processes of this run made. Asks the kernel while the
//! process exists: afterwards, its parent is unknown.

use std::collections::BTreeSet;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Names of new files from this run.
pub struct Arrivals(Arc<Mutex<BTreeSet<OsString>>>);

impl Arrivals {
    /// Watches `folder` from now on, for as long as this process runs; calls `is_ours` at once for
    /// each new file.
    ///
    /// # Errors
    /// The kernel allows no more watches (`fs.inotify.max_user_instances`), or the folder does not
    /// exist.
    pub fn watch(
        folder: &Path,
        is_ours: impl Fn(&OsStr) -> bool + Send + 'static,
    ) -> io::Result<Arrivals> {
        let name = CString::new(folder.as_os_str().as_bytes())?;
        // SAFETY: a C string; the descriptor is new and ours alone.
        let mut events = unsafe {
            let fd = libc::inotify_init1(libc::IN_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let events = File::from(OwnedFd::from_raw_fd(fd));
            if libc::inotify_add_watch(fd, name.as_ptr(), libc::IN_CREATE | libc::IN_MOVED_TO) < 0 {
                return Err(io::Error::last_os_error());
            }
            events
        };
        let ours = Arc::new(Mutex::new(BTreeSet::new()));
        let found = ours.clone();
        std::thread::Builder::new().name("arrivals".to_owned()).spawn(move || {
            let mut bytes = [0; 1 << 14];
            while let Ok(count @ 1..) = events.read(&mut bytes) {
                for name in names(&bytes[..count]).filter(|name| is_ours(name)) {
                    found.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
                }
            }
        })?;
        Ok(Arrivals(ours))
    }

    /// Whether a file of this name arrived, from this run.
    pub fn has(&self, name: &OsStr) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(name)
    }
}

/// The names in inotify's events: each event has four numbers of four bytes, the last of them the
/// name's length, then the name, padded with zeros.
fn names(mut events: &[u8]) -> impl Iterator<Item = &OsStr> {
    const HEAD: usize = size_of::<libc::inotify_event>();
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(events.get(HEAD - 4..HEAD)?.try_into().ok()?) as usize;
        let name = events.get(HEAD..HEAD + length)?;
        events = &events[HEAD + length..];
        Some(OsStr::from_bytes(name.split(|&byte| byte == 0).next().unwrap_or_default()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_is_asked_about_and_what_was_there_is_not() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("before"), "").unwrap();
        let arrivals = Arrivals::watch(folder.path(), |name| name != "others").expect("inotify");
        for name in ["others", "ours-1", "ours-22", "ours-of-a-longer-name", "last"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !arrivals.has(OsStr::new("last")) {
            assert!(std::time::Instant::now() < end, "nothing came");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        for (name, is_ours) in
            [("ours-1", true), ("ours-22", true), ("ours-of-a-longer-name", true)]
                .into_iter()
                .chain([("others", false), ("before", false)])
        {
            assert_eq!(arrivals.has(OsStr::new(name)), is_ours, "{name}");
        }
        assert!(Arrivals::watch(Path::new("/no/such/folder"), |_| true).is_err());
    }
}
