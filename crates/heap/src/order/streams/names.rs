//! Numbers of streams, by handle.

use super::stream::{PER_THREAD, Status, Stream, is_quiet};
use crate::driver::StreamHandle;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Entries of the handle cache; a power of two.
const CACHE: usize = 4096;

/// The place of a handle in the cache. Handles are addresses of objects, so the bits that differ
/// may be anywhere in the middle (Fibonacci hashing).
#[inline(always)]
pub(super) const fn cached_at(handle: usize) -> usize {
    ((handle as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - CACHE.trailing_zeros()))
        as usize
}

/// The stream that a handle names, in a call in which the program names it. Until this is dropped
/// the stream is there and keeps its number.
pub(crate) struct Resolved<'a> {
    pub(crate) number: u32,
    /// The capture status that the stream gave. `None`: it cannot capture, so was not asked.
    pub(crate) status: Option<Status>,
    /// Whether other work is due while the stream can be reached
    /// ([`crate::device::Device`]).
    pub(crate) due: bool,
    /// The stream to leave when the call is over.
    pub(super) call: Option<&'a Stream>,
}

impl<'a> Resolved<'a> {
    /// A stream that can be reached at any time.
    pub(super) fn lasting(number: u32, status: Option<Status>) -> Self {
        Self { number, status, due: false, call: None }
    }

    /// Whether the stream captures, or cannot say that it does not.
    #[inline(always)]
    pub(crate) fn captures(&self) -> bool {
        self.status.is_some_and(|status| !is_quiet(status))
    }
}

impl Drop for Resolved<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.call {
            stream.leave();
        }
    }
}

/// From handles to numbers, direct mapped. A pair is published number first; a reader checks the
/// stream's handle.
pub(super) struct Cache(Box<[(AtomicUsize, AtomicU32)]>);

impl Default for Cache {
    fn default() -> Self {
        Self((0..CACHE).map(|_| (AtomicUsize::new(0), AtomicU32::new(0))).collect())
    }
}

impl Cache {
    /// The number under which a handle was seen last, if the entry still holds it.
    #[inline]
    pub(super) fn get(&self, handle: StreamHandle) -> Option<u32> {
        let (cached, number) = &self.0[cached_at(handle.0)];
        (cached.load(Ordering::Acquire) == handle.0)
            .then(|| number.load(Ordering::Acquire).wrapping_sub(1))
    }

    pub(super) fn put(&self, handle: StreamHandle, found: u32) {
        let (cached, number) = &self.0[cached_at(handle.0)];
        number.store(found + 1, Ordering::Release);
        cached.store(handle.0, Ordering::Release);
    }
}

#[derive(Default)]
pub(super) struct Numbers {
    /// Numbers of the streams that handles name now.
    pub(super) by_handle: HashMap<usize, u32>,
    /// Numbers of per-thread streams, by the thread's token.
    pub(super) by_thread: HashMap<u64, u32>,
    /// Handles of announced streams that have not ended.
    pub(super) lasting: HashSet<usize>,
    /// Numbers below the count that no stream has.
    pub(super) unused: Vec<u32>,
}

impl Numbers {
    pub(super) fn find(&self, handle: StreamHandle, identity: u64) -> Option<u32> {
        if handle == PER_THREAD {
            self.by_thread.get(&identity)
        } else {
            self.by_handle.get(&handle.0)
        }
        .copied()
    }

    /// Notes the number of a stream; returns the number that the handle had before.
    pub(super) fn insert(
        &mut self,
        handle: StreamHandle,
        identity: u64,
        number: u32,
    ) -> Option<u32> {
        if handle == PER_THREAD {
            self.by_thread.insert(identity, number)
        } else {
            self.by_handle.insert(handle.0, number)
        }
    }
}
