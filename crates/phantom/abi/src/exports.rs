//! Files through which processes share physical memory.
//!
//! Where contents are kept (`PHANTOM_CONTENTS=handles`) the file is the memory, so what one process
//! writes another reads, as on a GPU. Elsewhere the file only has the memory's length.

use crate::abi::code;
use crate::contents::Contents;
use std::fs::File;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, RawFd};

/// The name of such files, by which an import knows them.
const NAME: &std::ffi::CStr = c"phantom memory";

/// Opens a file for the memory of `handle`.
pub fn file(contents: Option<&Contents>, handle: u64, bytes: u64) -> Result<RawFd, u32> {
    let file = match contents {
        Some(contents) => contents.file(handle)?,
        None => memory_file()
            .and_then(|file| file.set_len(bytes).map(|()| file))
            .map_err(|_| code::UNKNOWN)?,
    };
    Ok(file.into_raw_fd())
}

/// A new, empty memory file.
pub fn memory_file() -> std::io::Result<File> {
    // SAFETY: a NUL-terminated name, and no flag but the usual one.
    let descriptor = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: just opened, and owned here alone.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// A file of our own for what the caller's number names; an error if that is no exported memory.
pub fn reopened(number: usize) -> Result<File, u32> {
    let number = RawFd::try_from(number).map_err(|_| code::INVALID_VALUE)?;
    let place = std::fs::read_link(format!("/proc/self/fd/{number}"));
    let is_memory = place.is_ok_and(|place| {
        place.to_string_lossy().starts_with(&format!("/memfd:{}", NAME.to_string_lossy()))
    });
    if !is_memory {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: it is open, and the caller keeps it so during the call.
    let theirs = unsafe { BorrowedFd::borrow_raw(number) };
    theirs.try_clone_to_owned().map(File::from).map_err(|_| code::UNKNOWN)
}

/// The bytes of the memory behind a file.
pub fn length(file: &File) -> Result<u64, u32> {
    file.metadata().map(|facts| facts.len()).map_err(|_| code::INVALID_VALUE)
}
