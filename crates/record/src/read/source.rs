//! A reader's bytes: a live record's shared memory, or a dead record's bytes copied from the file.
//!
//! A dead record is read with `pread` into private memory: no change to the file, even during the
//! read, can raise SIGBUS. A live one (its lock is held) must be mapped, since only loads from the
//! mapping are atomic; the mapping is guarded ([`crate::guard`]).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use crate::guard::Guarded;
use crate::layout::Shared;
use crate::mapping::Mapping;

/// The bytes of a reader.
#[derive(Debug)]
pub enum Source<'a> {
    /// The file, shared with its writer, read-only.
    Shared(Guarded),
    /// A private copy.
    Copy(Mapping),
    /// This process's own record.
    Own(&'a Mapping),
}

/// The most data bytes copied (holes don't count): our records are far smaller.
const MOST_DATA: u64 = 8 << 30;

impl Source<'_> {
    /// The live file.
    pub fn shared(file: &File, length: u64) -> io::Result<Source<'static>> {
        Ok(Source::Shared(Guarded::new(file, usize::try_from(length).map_err(io::Error::other)?)?))
    }

    /// A copy of the file's data; holes stay untouched zeros.
    pub fn copy(file: &File, length: u64) -> io::Result<Source<'static>> {
        let copy = Mapping::private(length.max(1))?;
        let fd = file.as_raw_fd();
        let (mut at, mut copied) = (0u64, 0u64);
        while at < length {
            // SAFETY: plain calls on a descriptor.
            let (data, hole) = unsafe {
                let data = libc::lseek(fd, at as libc::off_t, libc::SEEK_DATA);
                if data < 0 {
                    match io::Error::last_os_error().raw_os_error() {
                        // No data from here on.
                        Some(libc::ENXIO) => break,
                        // A file system without knowledge of holes.
                        _ => (at, length),
                    }
                } else {
                    let hole = libc::lseek(fd, data, libc::SEEK_HOLE);
                    (data as u64, if hole <= data { length } else { hole as u64 })
                }
            };
            let end = hole.min(length);
            at = data.min(end);
            copied += end - at;
            if copied > MOST_DATA {
                return Err(io::Error::other("more data than any record holds"));
            }
            while at < end {
                // SAFETY: `at..end` lies in the copy's `length` bytes.
                let got = unsafe {
                    let to = copy.base().add(at as usize).as_ptr().cast();
                    libc::pread(fd, to, (end - at) as usize, at as libc::off_t)
                };
                match got {
                    // Cut meanwhile: the rest stays zeros.
                    0 => return Ok(Source::Copy(copy)),
                    1.. => at += got as u64,
                    _ => {
                        let error = io::Error::last_os_error();
                        if error.raw_os_error() != Some(libc::EINTR) {
                            return Err(error);
                        }
                    }
                }
            }
            at = end;
        }
        Ok(Source::Copy(copy))
    }

    /// A copy of `bytes`.
    pub fn bytes(bytes: &[u8]) -> io::Result<Source<'static>> {
        let copy = Mapping::private(bytes.len().max(1) as u64)?;
        // SAFETY: the copy has as many bytes, and is unknown to other code.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy.base().as_ptr(), bytes.len()) };
        Ok(Source::Copy(copy))
    }

    fn range(&self) -> (NonNull<u8>, u64) {
        match self {
            Source::Shared(mapping) => (mapping.base(), mapping.length() as u64),
            Source::Copy(mapping) => (mapping.base(), mapping.length() as u64),
            Source::Own(mapping) => (mapping.base(), mapping.length() as u64),
        }
    }

    /// Number of bytes.
    pub fn length(&self) -> u64 {
        self.range().1
    }

    /// `count` values from `offset` on; `None` if not wholly inside or not aligned.
    pub fn many<T: Shared>(&self, offset: u64, count: u64) -> Option<&[T]> {
        let (base, length) = self.range();
        let end = count.checked_mul(size_of::<T>() as u64)?.checked_add(offset)?;
        let place = base.as_ptr().wrapping_add(usize::try_from(offset).ok()?);
        if end > length || !(place as usize).is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: inside the mapping and aligned, both checked; T is atomics with every bit pattern
        // valid, so a writer in another process breaks no assumption of the compiler.
        Some(unsafe { std::slice::from_raw_parts(place.cast(), usize::try_from(count).ok()?) })
    }

    /// The value at `offset`.
    pub fn one<T: Shared>(&self, offset: u64) -> Option<&T> {
        self.many(offset, 1)?.first()
    }
}
