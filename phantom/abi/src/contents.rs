//! What mapped memory contains, where a test asks for it (`PHANTOM_CONTENTS=handles`).
//!
//! Contents belong to the physical handle (CUDA programming guide, virtual memory management): they
//! are the same through each of its mappings, and gone with the last of handle and mappings. So a
//! handle is a file in memory here, and a mapping a shared mapping of it; the host's own rules are
//! the driver's then. New memory is full of [`POISON`], and where nothing is mapped the host faults
//! too.
//!
//! ```text
//!   reservation   no access -- cuMemMap -->  the handle's file  -- cuMemUnmap -->  no access
//!                 -- cuMemAddressFree -->  as before it was reserved
//!   handle        a file full of poison  -- cuMemRelease -->  closed: lives on in its mappings
//! ```
//!
//! On, all that is created takes the host's memory, since it is written once: for programs that are
//! small, on a device that is (`PHANTOM_MEMORY`). Off, memory is what lies at an address, whatever
//! is mapped there; that costs nothing, and full-size models stay cheap.

use crate::abi::{Answer, code};
use gruyere_phantom::error;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::{Mutex, PoisonError};

/// What every byte of new physical memory is.
const POISON: u8 = 0xdb;

/// The files behind handles that have not been released.
#[derive(Default)]
pub struct Contents {
    files: Mutex<HashMap<u64, File>>,
}

/// A new file in memory of `bytes`, full of poison.
fn poisoned(bytes: usize) -> std::io::Result<File> {
    // SAFETY: a NUL-terminated name, and no flag but the usual one.
    let descriptor = unsafe { libc::memfd_create(c"phantom handle".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    let mut file = unsafe { File::from_raw_fd(descriptor) };
    let chunk = vec![POISON; bytes.min(1 << 20)];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(chunk.len());
        file.write_all(&chunk[..length])?;
        left -= length;
    }
    Ok(file)
}

/// Puts a mapping in the place of whatever is there.
fn replace(address: u64, bytes: usize, protection: i32, file: Option<&File>) -> Answer {
    let (flags, descriptor) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1),
    };
    // SAFETY: the range lies in the window for device memory, and the simulator has just agreed
    // that the caller may do this to it.
    let mapped = unsafe {
        libc::mmap(
            address as *mut libc::c_void,
            bytes,
            protection,
            flags | libc::MAP_FIXED,
            descriptor,
            0,
        )
    };
    if mapped == libc::MAP_FAILED { Err(error::code::OUT_OF_MEMORY) } else { Ok(()) }
}

impl Contents {
    fn with<T>(&self, then: impl FnOnce(&mut HashMap<u64, File>) -> T) -> T {
        then(&mut self.files.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// `cuMemAddressReserve` gave the range: nothing is mapped there.
    pub fn reserved(&self, address: u64, bytes: usize) -> Answer {
        replace(address, bytes, libc::PROT_NONE, None)
    }

    /// `cuMemAddressFree` took it back: any memory may come there.
    pub fn freed(&self, address: u64, bytes: usize) -> Answer {
        replace(address, bytes, libc::PROT_READ | libc::PROT_WRITE, None)
    }

    /// `cuMemCreate` made the handle.
    pub fn created(&self, handle: u64, bytes: usize) -> Answer {
        let file = poisoned(bytes).map_err(|_| error::code::OUT_OF_MEMORY)?;
        self.with(|files| files.insert(handle, file));
        Ok(())
    }

    /// `cuMemRelease` gave the handle up.
    pub fn released(&self, handle: u64) {
        self.with(|files| files.remove(&handle));
    }

    /// `cuMemMap` mapped the whole of the handle.
    pub fn mapped(&self, address: u64, bytes: usize, handle: u64) -> Answer {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        self.with(|files| {
            replace(
                address,
                bytes,
                protection,
                Some(files.get(&handle).ok_or(code::INVALID_VALUE)?),
            )
        })
    }

    /// `cuMemUnmap` unmapped the range.
    pub fn unmapped(&self, address: u64, bytes: usize) -> Answer {
        replace(address, bytes, libc::PROT_NONE, None)
    }
}
