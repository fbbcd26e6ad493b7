//! How files are written: dumps, runs, traces, and what the command writes.
//!
//! A folder such as /tmp is everybody's: a name that can be guessed may be there already, as a link
//! to a file that is dear to somebody. So what is written whole is written beside its name, under a
//! random one that was not there (`O_EXCL`), and takes its name's place when it is complete; it
//! replaces a regular file of this user only. And nothing is written beyond the process's limit on
//! files (`ulimit -f`): that would be a signal, which ends a training, not an error.
#![deny(unsafe_code)]

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{
    FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::Path;

use crate::open::effective_user;

mod system;

use system::block;
pub use system::limit;

/// For its owner: what may hold command lines or paths.
pub const PRIVATE: u32 = 0o600;
/// Readable by all.
pub const PUBLIC: u32 = 0o644;

/// Writes `path`, which is there whole or as it was. It never grows beyond `most` bytes, and has
/// `mode` whatever the umask.
///
/// # Errors
/// The system's; what is there is another user's, or a folder. `path` is as it was then.
pub fn replace(
    path: &Path,
    most: u64,
    mode: u32,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let bounded =
        |file| BufWriter::with_capacity(1 << 16, Bounded { file, left: most.min(limit()) });
    // What a link leads to decides whether it is written to; what is replaced is the link.
    if let Ok(there) = std::fs::metadata(path)
        && !there.is_file()
    {
        let mut out = bounded(open_special(path, there.is_dir())?);
        write(&mut out)?;
        return out.flush();
    }
    if let Ok(there) = std::fs::symlink_metadata(path) {
        expect_ours(&there)?;
    }
    if path.file_name().is_none() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no name of a file"));
    }
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = tempfile::Builder::new()
        .prefix(".gruyere-")
        .suffix(".tmp")
        .rand_bytes(12)
        .tempfile_in(folder)?;
    if mode != PRIVATE {
        // Whatever the umask; private it is from the start.
        beside.as_file().set_permissions(Permissions::from_mode(mode))?;
    }
    let mut out = bounded(beside.as_file().try_clone()?);
    write(&mut out)?;
    out.flush()?;
    drop(out);
    beside.persist(path)?;
    Ok(())
}

/// Opens `path`, which is a pipe or a device, to be written to: it is never replaced.
fn open_special(path: &Path, is_folder: bool) -> io::Result<File> {
    if is_folder {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    // A pipe that nobody reads is an error, not a wait for ever.
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    // What was opened, not what was there a moment ago: a link may lead elsewhere by now.
    let opened = file.metadata()?;
    if opened.is_file() {
        return Err(io::Error::other(
            "it was a pipe or a device a moment ago, and is a file now; try again",
        ));
    }
    // A device may be the system's (/dev/null). A pipe or a terminal of another user would hand
    // over what we write, or hold us up by not reading.
    if !(opened.file_type().is_char_device() && opened.uid() == 0) {
        expect_ours(&opened)?;
    }
    block(&file)?;
    Ok(file)
}

/// Opens `path` to be written over the time of a run, under its own name, so that it can be read
/// meanwhile and after a crash: a new file or a regular one of this user, not a link. It is not
/// emptied: the caller may want its lock first.
///
/// # Errors
/// The system's; what is there is something else.
pub fn open_lasting(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(PRIVATE).custom_flags(flags);
    let file = options.open(path)?;
    let there = file.metadata()?;
    if !there.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
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
    use std::os::unix::fs::{chown, symlink};

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
        // A pipe of another user's would hand him what we write, or hold us up.
        if chown(&path, Some(65534), None).is_ok() {
            let reader =
                OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
            let error = put(&path, b"dump").unwrap_err().to_string();
            assert!(error.contains("user 65534"), "{error}");
            drop(reader);
        }
        assert!(put(folder.path(), b"").is_err());
    }
}
