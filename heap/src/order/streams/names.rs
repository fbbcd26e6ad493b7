//! Which stream has which number: what is remembered of handles.

use super::stream::{PER_THREAD, Status, Stream, is_quiet};
use crate::driver::StreamHandle;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Entries of the handle cache; a power of two.
const CACHE: usize = 4096;

/// Where a handle is in the cache. Handles are addresses of objects, so what tells them apart may
/// be anywhere in the middle (Fibonacci hashing).
#[inline(always)]
pub(super) const fn cached_at(handle: usize) -> usize {
    ((handle as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - CACHE.trailing_zeros()))
        as usize
}

/// What a handle was found to name, in a call in which the program names it. The stream is there,
/// and its number its own, until this is dropped.
pub(crate) struct Resolved<'a> {
    pub(crate) number: u32,
    /// What the stream said when it was asked whether it captures. `None`: it was not, as it
    /// cannot.
    pub(crate) status: Option<Status>,
    /// Whether something else is to be done while the stream can be reached
    /// ([`super::super::device::Device::attend`]).
    pub(crate) due: bool,
    /// Told when the call is over.
    pub(super) call: Option<&'a Stream>,
}

impl<'a> Resolved<'a> {
    /// A stream that is reached at any time.
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
    /// The number under which a handle was seen last, if nothing has taken its place.
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

/// Which stream has which number.
#[derive(Default)]
pub(super) struct Numbers {
    /// Numbers of the streams that handles name now, by handle.
    pub(super) by_handle: HashMap<usize, u32>,
    /// The per-thread streams, by the thread's token.
    pub(super) by_thread: HashMap<u64, u32>,
    /// Handles of streams that were announced and have not ended.
    pub(super) lasting: HashSet<usize>,
    /// Below the count, and nobody's.
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

    /// Notes the number of a stream; the one that the handle named before, if another did.
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
