//! Page-locked host memory.

use crate::abi::code;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The ranges of page-locked memory: start to bytes, and whether this library allocated it.
#[derive(Default)]
pub struct HostMemory {
    ranges: Mutex<BTreeMap<usize, Range>>,
}

#[derive(Clone, Copy)]
struct Range {
    bytes: usize,
    ours: bool,
}

impl HostMemory {
    fn ranges(&self) -> MutexGuard<'_, BTreeMap<usize, Range>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if `address` is in page-locked memory.
    pub fn contains(&self, address: usize) -> bool {
        self.ranges()
            .range(..=address)
            .next_back()
            .is_some_and(|(start, range)| address - start < range.bytes.max(1))
    }

    /// Page-locked bytes.
    pub fn bytes(&self) -> usize {
        self.ranges().values().map(|range| range.bytes).sum()
    }

    /// Fresh zero pages, of which only touched ones take memory: copies above the limit are
    /// skipped, so most never do.
    pub fn allocate(&self, bytes: usize) -> Result<usize, u32> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh anonymous mapping wherever the kernel likes; its size is not zero.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes.max(1), protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(gruyere_phantom::error::code::OUT_OF_MEMORY);
        }
        self.ranges().insert(start as usize, Range { bytes, ours: true });
        Ok(start as usize)
    }

    pub fn free(&self, start: usize) -> Result<(), u32> {
        if start == 0 {
            return Ok(());
        }
        let mut ranges = self.ranges();
        let range =
            ranges.get(&start).copied().filter(|range| range.ours).ok_or(code::INVALID_VALUE)?;
        ranges.remove(&start);
        // SAFETY: `allocate` mapped it with this size, and the entry that said so is gone.
        unsafe { libc::munmap(start as *mut libc::c_void, range.bytes.max(1)) };
        Ok(())
    }

    pub fn register(&self, start: usize, bytes: usize) -> Result<(), u32> {
        if start == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.ranges().insert(start, Range { bytes, ours: false });
        Ok(())
    }

    pub fn unregister(&self, start: usize) -> Result<(), u32> {
        self.ranges().remove(&start).map(|_| ()).ok_or(code::INVALID_VALUE)
    }
}
