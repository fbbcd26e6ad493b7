//! Writes files: dumps, runs, traces, and the command's output.
//!
//! Any user may write to a folder such as /tmp: a guessable name may already exist, as a link to a
//! file of value. So a file written whole is written beside its name, under a new random one
//! (`O_EXCL`), and takes its name when complete; it replaces only a regular file of this user.
//! Links are followed only if this user or root made them ([`place`]). The exceptions to replacing
//! are a pipe, a terminal and /dev/null, never a disk. Nothing is written beyond the process's
//! limit on files (`ulimit -f`): that would raise a signal, which ends a training, not an error.
#![deny(unsafe_code)]

use std::fs::{File, Metadata, Permissions};
use std::io::{self, BufWriter, IsTerminal as _, Write};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

use crate::open::effective_user;

mod place;
mod system;

pub use place::random_name;
use place::{Place, Target};
use system::block;
pub use system::limit;

/// Mode of files for their owner only: they may hold command lines or paths.
pub const PRIVATE: u32 = 0o600;
/// Mode of files for all readers.
pub const PUBLIC: u32 = 0o644;

/// Writes `path`: afterwards it is complete or unchanged. It never exceeds `most` bytes, and has
/// `mode` whatever the umask.
///
/// # Errors
/// The system's error; the existing file is another user's, a folder, or a device unfit for
/// writing; a link on the way is another user's. `path` is then unchanged.
pub fn replace(
    path: &Path,
    most: u64,
    mode: u32,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let bounded =
        |file| BufWriter::with_capacity(1 << 16, Bounded { file, left: most.min(limit()) });
    let place = Place::of(path)?;
    // A link's target decides whether it is written to; the link itself is replaced.
    if let Some(target) = place.target()?
        && !target.about.is_file()
    {
        let mut out = bounded(open_special(&target)?);
        write(&mut out)?;
        return out.flush();
    }
    if let Some(there) = place.look()? {
        expect_ours(&there)?;
    }
    let beside = place.beside()?;
    if mode != PRIVATE {
        // Whatever the umask; it is private from the start.
        beside.file().set_permissions(Permissions::from_mode(mode))?;
    }
    let mut out = bounded(beside.file().try_clone()?);
    write(&mut out)?;
    out.flush()?;
    drop(out);
    beside.take_name()
}

/// Makes the folder `path` and its parents, if missing.
///
/// # Errors
/// The system's error; a link on the way is another user's.
pub fn make_folders(path: &Path) -> io::Result<()> {
    place::make_folders(path)
}

/// Opens a pipe or a device for writing, which is never replaced.
fn open_special(target: &Target) -> io::Result<File> {
    expect_writable(&target.about)?;
    // A pipe without a reader gives an error, not an endless wait; a terminal does not become this
    // process's controlling one.
    let file = target.open(OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
    // The opened file, not the one there a moment ago.
    let opened = file.metadata()?;
    if opened.is_file() {
        return Err(io::Error::other(
            "it was a pipe or a device a moment ago, and is a file now; try again",
        ));
    }
    expect_writable(&opened)?;
    let is_device = opened.file_type().is_char_device();
    if is_device && !is_sink(&opened) && !file.is_terminal() {
        return Err(unfit(NEITHER));
    }
    // A device may be the system's (/dev/null). A pipe or a terminal of another user would give
    // away our output, or block us by not reading.
    if !(is_device && opened.uid() == 0) {
        expect_ours(&opened)?;
    }
    block(&file)?;
    Ok(file)
}

/// Checks that a special file may be opened at all: opening some devices already does harm.
fn expect_writable(there: &Metadata) -> io::Result<()> {
    let kind = there.file_type();
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if kind.is_block_device() {
        return Err(unfit("a disk or another block device"));
    }
    if kind.is_char_device() && libc::major(there.rdev()) == MEMORY && !is_sink(there) {
        return Err(unfit(NEITHER));
    }
    Ok(())
}

const NEITHER: &str = "a device that is neither a terminal nor /dev/null";
/// Linux's number of the memory devices: /dev/mem, and /dev/null too.
const MEMORY: u32 = 1;

/// Whether a device accepts any output and keeps nothing: /dev/null, /dev/zero, /dev/full.
fn is_sink(there: &Metadata) -> bool {
    let number = there.rdev();
    libc::major(number) == MEMORY && [3, 5, 7].contains(&libc::minor(number))
}

fn unfit(what: &str) -> io::Error {
    let reason = format!("it is {what}, which is not written to; name a file");
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

/// Opens `path` for writing over the time of a run, under its own name, so that it can be read
/// meanwhile and after a crash: a new file or a regular one of this user, not a link. Does not
/// empty it: the caller may want its lock first.
///
/// # Errors
/// The system's error; the existing file is of another kind or user; a link on the way is another
/// user's.
pub fn open_lasting(path: &Path) -> io::Result<File> {
    let expect_regular = |there: &Metadata| match there.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    };
    let place = Place::of(path)?;
    if let Some(there) = place.look()? {
        expect_regular(&there)?;
    }
    let file = place.open(OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::NOCTTY)?;
    let there = file.metadata()?;
    expect_regular(&there)?;
    expect_ours(&there)?;
    Ok(file)
}

fn expect_ours(there: &Metadata) -> io::Result<()> {
    let (owner, user) = (there.uid(), effective_user());
    if owner == user {
        return Ok(());
    }
    let reason = format!("it belongs to user {owner}, and this is user {user}; name another file");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
}

struct Bounded {
    file: File,
    left: u64,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                "longer than it may be (a dump: 256 MiB; else `ulimit -f`)",
            ));
        }
        let written = self.file.write(bytes)?;
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skip;
    use std::fs::OpenOptions;
    use std::os::unix::fs::{OpenOptionsExt as _, chown, symlink};

    fn put(path: &Path, text: &[u8]) -> io::Result<()> {
        replace(path, 1 << 30, PRIVATE, |out| out.write_all(text))
    }

    #[test]
    fn a_file_is_there_whole_or_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dump.txt");
        put(&path, b"first").unwrap();
        let failed = replace(&path, 1 << 30, PRIVATE, |out| {
            out.write_all(&vec![b'x'; 1 << 20])?;
            Err(io::Error::other("no"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no");
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "nothing else is left behind"
        );
        assert!(put(&folder.path().join("no/such.txt"), b"").is_err());
        let mut bounded = Bounded { file: File::create(&path).unwrap(), left: 4 };
        assert_eq!(bounded.write(b"12345").unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn a_mode_is_what_was_asked_for_whatever_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "open to all").unwrap();
        for mode in [PRIVATE, PUBLIC] {
            replace(&path, 1 << 30, mode, |out| out.write_all(b"x")).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, mode);
        }
    }

    #[test]
    fn a_link_is_replaced_and_what_it_leads_to_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (dear, link) = (folder.path().join("dear"), folder.path().join("link"));
        std::fs::write(&dear, "dear").unwrap();
        symlink(&dear, &link).unwrap();
        put(&link, b"dump").unwrap();
        assert_eq!(std::fs::read(&dear).unwrap(), b"dear");
        assert_eq!(std::fs::read(&link).unwrap(), b"dump");
        assert!(std::fs::symlink_metadata(&link).unwrap().is_file());
        symlink(&dear, folder.path().join("other")).unwrap();
        assert!(open_lasting(&folder.path().join("other")).is_err());
    }

    #[test]
    fn another_users_file_is_neither_replaced_nor_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("theirs");
        std::fs::write(&path, "theirs").unwrap();
        if chown(&path, Some(65534), None).is_err() {
            return skip::refused("only root can give a file away");
        }
        for result in [put(&path, b"ours"), open_lasting(&path).map(drop)] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("user 65534") && error.contains("name another"), "{error}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_an_error_and_no_wait() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(put(&path, b"dump").unwrap_err().raw_os_error(), Some(libc::ENXIO));
        put(Path::new("/dev/null"), &[0; 1 << 20]).unwrap();
        // Another user's pipe would give away our output, or block us.
        if chown(&path, Some(65534), None).is_ok() {
            let reader =
                OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
            let error = put(&path, b"dump").unwrap_err().to_string();
            assert!(error.contains("user 65534"), "{error}");
            drop(reader);
        }
        assert!(put(folder.path(), b"").is_err());
    }

    const OTHER: u32 = 65534;

    /// Gives a link to another user; `false`, with a message, if only root may.
    fn give(link: &Path) -> bool {
        let given = std::os::unix::fs::lchown(link, Some(OTHER), None).is_ok();
        if !given {
            println!("skipped: only root can give a link away");
        }
        given
    }

    fn expect_refused(path: &Path) {
        for result in [put(path, b"ours"), open_lasting(path).map(drop)] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("belongs to user 65534"), "{}: {error}", path.display());
        }
    }

    #[test]
    fn another_users_link_is_not_followed_whatever_it_leads_to() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let (inside, pipe) = (at("inside"), at("pipe"));
        std::fs::create_dir(&inside).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let reader =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&pipe).unwrap();
        for (name, to) in [("null", Path::new("/dev/null")), ("fifo", &pipe), ("dir", &inside)] {
            symlink(to, at(name)).unwrap();
            symlink(name, at(&format!("{name}-by-ours"))).unwrap();
            if name != "dir" {
                // Links of the user's own are followed.
                put(&at(&format!("{name}-by-ours")), b"x").unwrap();
            }
            if !give(&at(name)) {
                return;
            }
        }
        for name in ["null", "fifo"] {
            let error = put(&at(name), b"ours").unwrap_err().to_string();
            assert!(error.contains("is a link that belongs to user 65534"), "{error}");
            let error = put(&at(&format!("{name}-by-ours")), b"ours").unwrap_err().to_string();
            assert!(error.contains("is a link that belongs to user 65534"), "{error}");
        }
        // Nor on the way.
        expect_refused(&at("dir/dump.txt"));
        expect_refused(&at("dir-by-ours/dump.txt"));
        assert!(make_folders(&at("dir/new")).is_err());
        assert_eq!(std::fs::read_dir(&inside).unwrap().count(), 0, "nothing came through");
        drop(reader);
    }

    #[test]
    fn a_block_device_is_never_opened_nor_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let (node, link) = (folder.path().join("disk"), folder.path().join("link"));
        // A number without a driver: opening it would give another error.
        let made = std::process::Command::new("mknod").arg(&node).args(["b", "240", "77"]).output();
        if !made.is_ok_and(|made| made.status.success()) {
            return println!("skipped: no device may be made here (mknod: not root, or refused)");
        }
        symlink(&node, &link).unwrap();
        for path in [&node, &link] {
            let error = put(path, b"dump").unwrap_err().to_string();
            assert!(error.contains("block device") && error.contains("name a file"), "{error}");
            assert!(open_lasting(path).is_err());
        }
        assert!(std::fs::symlink_metadata(&node).unwrap().file_type().is_block_device());
    }

    #[test]
    fn of_other_devices_only_terminals_and_those_that_keep_nothing_are_written_to() {
        put(Path::new("/dev/zero"), b"dump").unwrap();
        assert_eq!(
            put(Path::new("/dev/full"), b"dump").unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
        let error = put(Path::new("/dev/random"), b"dump").unwrap_err().to_string();
        assert!(error.contains("neither a terminal") && error.contains("name a file"), "{error}");
        let error = put(Path::new("/dev/ptmx"), b"dump").map_err(|error| error.to_string());
        // The terminal's end used by its programs: a terminal too.
        assert_eq!(error, Ok(()));
    }

    #[test]
    fn a_descriptor_of_ones_own_is_written_to_by_its_name() {
        use std::io::Read as _;
        use std::os::fd::AsRawFd as _;
        let (mut reader, writer) = io::pipe().unwrap();
        let number = writer.as_raw_fd();
        for path in [format!("/dev/fd/{number}"), format!("/proc/self/fd/{number}")] {
            put(Path::new(&path), b"dump").unwrap();
            let mut got = [0; 4];
            reader.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"dump");
        }
    }

    #[test]
    fn folders_are_made_through_links_of_ones_own_and_links_in_circles_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("real")).unwrap();
        symlink("./real/../real", at("link")).unwrap();
        make_folders(&at("link/a/b")).unwrap();
        make_folders(&at("link/a/b")).unwrap();
        put(&at("link/a/b/dump"), b"dump").unwrap();
        assert_eq!(std::fs::read(at("real/a/b/dump")).unwrap(), b"dump");
        symlink("circle", at("circle")).unwrap();
        let error = put(&at("circle/dump"), b"").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        assert!(put(&at("circle"), b"").is_err());
        // A dangling link is replaced, like a link to a file.
        symlink("nowhere/at/all", at("broken")).unwrap();
        put(&at("broken"), b"dump").unwrap();
        assert!(std::fs::symlink_metadata(at("broken")).unwrap().is_file());
    }

    #[test]
    fn what_is_swapped_for_a_link_on_the_way_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (inside, moved) = (folder.path().join("inside"), folder.path().join("moved"));
        let dear = folder.path().join("dear");
        std::fs::create_dir(&inside).unwrap();
        std::fs::create_dir(&dear).unwrap();
        replace(&inside.join("dump"), 1 << 20, PRIVATE, |out| {
            std::fs::rename(&inside, &moved)?;
            symlink(&dear, &inside)?;
            out.write_all(b"dump")
        })
        .unwrap();
        assert_eq!(std::fs::read(moved.join("dump")).unwrap(), b"dump");
        assert_eq!(std::fs::read_dir(&dear).unwrap().count(), 0);
    }
}
