//! Contents of mapped memory, on a test's request (`PHANTOM_CONTENTS=handles`).
//!
//! Contents belong to the physical handle (CUDA programming guide, virtual memory management): they
//! are the same through each of its mappings, and last as long as the handle or a mapping. So a
//! handle is a memory file here, and a mapping a shared mapping of it; the host's rules then equal
//! the driver's. New memory is full of [`POISON`], and an access to unmapped memory faults on the
//! host too.
//!
//! ```text
//!   reservation   no access -- cuMemMap -->  the handle's file  -- cuMemUnmap -->  no access
//!                 -- cuMemAddressFree -->  as before it was reserved
//!   handle        a file full of poison  -- cuMemRelease -->  closed: lives on in its mappings
//! ```
//!
//! If on, all created memory takes host memory, since poison is written to it: for small programs
//! on a small device (`PHANTOM_MEMORY`). If off, contents belong to the address, whatever is mapped
//! there; that costs nothing, and full-size models stay cheap.

use crate::abi::{Answer, code};
use crate::exports;
use gruyere_phantom::error;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};

/// Every byte of new physical memory.
const POISON: u8 = 0xdb;

/// The files of unreleased handles.
#[derive(Default)]
pub struct Contents {
    files: Mutex<HashMap<u64, File>>,
}

/// A new memory file of `bytes`, full of poison.
fn poisoned(bytes: usize) -> std::io::Result<File> {
    let mut file = exports::memory_file()?;
    let chunk = vec![POISON; bytes.min(1 << 20)];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(chunk.len());
        file.write_all(&chunk[..length])?;
        left -= length;
    }
    Ok(file)
}

/// Replaces the mapping of a range.
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

    /// After `cuMemAddressReserve`: nothing is mapped in the range.
    pub fn reserved(&self, address: u64, bytes: usize) -> Answer {
        replace(address, bytes, libc::PROT_NONE, None)
    }

    /// After `cuMemAddressFree`: any memory may use the range.
    pub fn freed(&self, address: u64, bytes: usize) -> Answer {
        replace(address, bytes, libc::PROT_READ | libc::PROT_WRITE, None)
    }

    /// After `cuMemCreate`.
    pub fn created(&self, handle: u64, bytes: usize) -> Answer {
        let file = poisoned(bytes).map_err(|_| error::code::OUT_OF_MEMORY)?;
        self.with(|files| files.insert(handle, file));
        Ok(())
    }

    /// After `cuMemImportFromShareableHandle`: another process's file.
    pub fn imported(&self, handle: u64, file: File) {
        self.with(|files| files.insert(handle, file));
    }

    /// The memory of an unreleased handle, as a file for another process.
    pub fn file(&self, handle: u64) -> Result<File, u32> {
        self.with(|files| {
            let file = files.get(&handle).ok_or(code::INVALID_VALUE)?;
            file.try_clone().map_err(|_| code::UNKNOWN)
        })
    }

    /// After `cuMemRelease`.
    pub fn released(&self, handle: u64) {
        self.with(|files| files.remove(&handle));
    }

    /// After `cuMemMap` of the whole handle.
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

    /// After `cuMemUnmap`.
    pub fn unmapped(&self, address: u64, bytes: usize) -> Answer {
        replace(address, bytes, libc::PROT_NONE, None)
    }
}
