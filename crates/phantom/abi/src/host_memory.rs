//! Page-locked host memory, and managed memory, which lies on the host and counts on no device: a
//! real driver keeps of it there only what other memory leaves room for.

use crate::abi::code;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The ranges of such memory: start to bytes and kind.
#[derive(Default)]
pub struct HostMemory {
    ranges: Mutex<BTreeMap<usize, Range>>,
    managed_peak: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Range {
    bytes: usize,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// This library allocated it.
    Pinned,
    /// The program's own.
    Registered,
    Managed,
}

impl HostMemory {
    fn ranges(&self) -> MutexGuard<'_, BTreeMap<usize, Range>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kind of memory at `address`; `None`: neither page-locked nor managed.
    pub fn kind(&self, address: usize) -> Option<Kind> {
        let ranges = self.ranges();
        let (start, range) = ranges.range(..=address).next_back()?;
        (address - start < range.bytes.max(1)).then_some(range.kind)
    }

    /// Whether the range lies in managed memory.
    pub fn is_managed(&self, address: usize, bytes: usize) -> bool {
        let ranges = self.ranges();
        ranges.range(..=address).next_back().is_some_and(|(start, range)| {
            let within = address - start;
            range.kind == Kind::Managed && within <= range.bytes && bytes <= range.bytes - within
        })
    }

    /// Page-locked bytes.
    pub fn bytes(&self) -> usize {
        self.ranges().values().filter(|range| range.kind != Kind::Managed).map(|r| r.bytes).sum()
    }

    /// The most managed bytes so far.
    pub fn managed_peak(&self) -> usize {
        self.managed_peak.load(Ordering::Relaxed)
    }

    /// Fresh zero pages, of which only touched ones take memory: copies above the limit are
    /// skipped, so most never do.
    pub fn allocate(&self, bytes: usize) -> Result<usize, u32> {
        self.map(bytes, Kind::Pinned)
    }

    pub fn allocate_managed(&self, bytes: usize) -> Result<usize, u32> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let start = self.map(bytes, Kind::Managed)?;
        let ranges = self.ranges();
        let managed = ranges.values().filter(|range| range.kind == Kind::Managed);
        self.managed_peak.fetch_max(managed.map(|range| range.bytes).sum(), Ordering::Relaxed);
        Ok(start)
    }

    fn map(&self, bytes: usize, kind: Kind) -> Result<usize, u32> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh anonymous mapping wherever the kernel likes; its size is not zero.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes.max(1), protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(gruyere_phantom::error::code::OUT_OF_MEMORY);
        }
        self.ranges().insert(start as usize, Range { bytes, kind });
        Ok(start as usize)
    }

    pub fn free(&self, start: usize) -> Result<(), u32> {
        if start == 0 {
            return Ok(());
        }
        self.unmap(start, Kind::Pinned)
    }

    pub fn free_managed(&self, start: usize) -> Result<(), u32> {
        self.unmap(start, Kind::Managed)
    }

    fn unmap(&self, start: usize, kind: Kind) -> Result<(), u32> {
        let mut ranges = self.ranges();
        let range = ranges.get(&start).copied().filter(|range| range.kind == kind);
        let range = range.ok_or(code::INVALID_VALUE)?;
        ranges.remove(&start);
        // SAFETY: `map` mapped it with this size, and the entry that said so is gone.
        unsafe { libc::munmap(start as *mut libc::c_void, range.bytes.max(1)) };
        Ok(())
    }

    pub fn register(&self, start: usize, bytes: usize) -> Result<(), u32> {
        if start == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.ranges().insert(start, Range { bytes, kind: Kind::Registered });
        Ok(())
    }

    pub fn unregister(&self, start: usize) -> Result<(), u32> {
        let mut ranges = self.ranges();
        let range = ranges.get(&start).filter(|range| range.kind != Kind::Managed);
        range.ok_or(code::INVALID_VALUE)?;
        ranges.remove(&start);
        Ok(())
    }
}
