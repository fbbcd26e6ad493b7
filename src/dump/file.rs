//! Files that are there whole or not at all.
#![deny(unsafe_code)]

use crate::record::trace;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes `path` by way of a file of another name beside it, which is renamed when it is complete, and removed when it fails. It never grows beyond `most` bytes, nor
/// beyond the process's limit on files: that would be a signal, not an error.
///
/// # Errors
/// The system's; `path` is as it was then.
pub fn replace(
    path: &Path,
    most: u64,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    // A pipe or a device is written to, and never replaced.
    if std::fs::metadata(path).is_ok_and(|file| !file.is_file()) {
        let file = OpenOptions::new().write(true).custom_flags(libc::O_CLOEXEC).open(path)?;
        let mut out = BufWriter::with_capacity(1 << 16, Bounded { file, left: most.min(trace::limit()) });
        write(&mut out)?;
        return out.flush();
    }
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut other = std::ffi::OsString::from(".");
    other.push(name);
    other.push(format!(".{}.tmp", std::process::id()));
    let other = path.with_file_name(other);
    let result = (|| {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&other)?;
        let mut out = BufWriter::with_capacity(1 << 16, Bounded { file, left: most.min(trace::limit()) });
        write(&mut out)?;
        out.flush()?;
        drop(out);
        std::fs::rename(&other, path)
    })();
    if result.is_err() {
        let _ = std::fs::remove_file(&other);
    }
    result
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

    #[test]
    fn a_file_is_there_whole_or_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dump.txt");
        replace(&path, 1 << 30, |out| out.write_all(b"first")).unwrap();
        let failed = replace(&path, 1 << 30, |out| {
            out.write_all(&vec![b'x'; 1 << 20])?;
            Err(io::Error::other("no"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no");
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left behind");
        assert!(replace(&folder.path().join("no/such.txt"), 1 << 30, |_| Ok(())).is_err());
        let mut bounded = Bounded { file: File::create(&path).unwrap(), left: 4 };
        assert_eq!(bounded.write(b"12345").unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
