//! Callers that keep CUDA's own rules of order: `cudaMalloc` and its kin, which come in through the
//! LD_PRELOAD door.
//!
//! torch's hooks say on which streams a block is used, and free it as soon as the host is done with
//! it. A CUDA program says less and promises more:
//! - what `cudaMalloc` gives may be used on any stream at once, and `cudaFree` must not let its
//!   memory go before all work on the device is past it. Such blocks belong
//!   to [`crate::order::streams::ALL_STREAMS`]: all streams together. A free waits for an event
//!   behind all work of the context, or for a synchronisation, which the program's own may be
//!   ([`super::Heap::synchronized`]); the free itself never waits. One event serves any number of
//!   frees, and is recorded when somebody needs memory.
//! - `cudaFreeAsync` names a stream, and the program vouches that all uses come before that point
//!   of it, whichever stream the block is of.

use std::collections::HashMap;

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedBlock {
    /// The device that it is on.
    pub device: u32,
    /// Its bytes, rounded up to 512.
    pub bytes: u64,
    /// Bytes that were asked for.
    pub requested: u64,
}

/// A moment before a synchronisation: what was freed until then.
#[derive(Debug, Default)]
#[must_use = "to be handed to Heap::synchronized once the device is"]
pub struct SyncPoint(pub(super) HashMap<u32, u64>);
