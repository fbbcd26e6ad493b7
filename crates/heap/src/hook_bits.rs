//! What loaders announce of the callers ([`crate::heap::Heap::announce_hooks`]).
#![deny(unsafe_code)]

/// The loader has wired record_stream.
pub const HOOK_RECORD_STREAM: u32 = 1;
/// The loader has wired the capture hooks (begin, end, release).
pub const HOOK_CAPTURES: u32 = 2;
/// The callers keep CUDA's own rules of order ([`crate::heap::Heap::announce_ordered_callers`]).
pub(crate) const ORDERED_CALLERS: u32 = 4;
