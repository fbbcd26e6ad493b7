//! The state of a pool: which of its blocks are live, where, and how large.
//!
//! Inductor's graph trees share one pool among many CUDA graphs. A replay makes tensors of which
//! the allocator hears nothing, so before the next graph is captured the pool is made to be what it
//! was when the replayed graph had just been captured: torch calls it a checkpoint. A state holds
//! no memory. What a graph's pool has once had stays at its address as long as a graph uses the
//! pool, free or not ([`Reuse::Private`](super::Reuse::Private)), so the blocks of a state can be
//! had back; when the pool is over, its states are of no use, and say so.
//!
//! Of the pool's live blocks, those of the state are *kept*, the others are *freed*, and what the
//! state has beside them is *allocated* again where it was. Memory comes back to the stream that
//! had it, so stream order asks for nothing that a free and a malloc on that stream would not.

use crate::error::Error;
use crate::pools::capture::PoolId;
use crate::report::bytes::Bytes;
use std::fmt;

/// The slab of a small block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabPlace {
    /// Its first byte.
    pub base: u64,
    /// Its size class.
    pub class: u8,
}

/// A block of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateBlock {
    /// Where it starts.
    pub address: u64,
    /// Its length, a multiple of 512.
    pub bytes: u64,
    /// Bytes that the program asked for.
    pub requested: u64,
    /// The number of its stream.
    pub stream: u32,
    /// Its lifetime.
    pub lifetime: u8,
    /// `None`: it is a run.
    pub slab: Option<SlabPlace>,
}

impl StateBlock {
    /// Whether the two are one block: then nothing is to be done. A lifetime is only counted.
    pub fn is(&self, other: &Self) -> bool {
        Self { lifetime: other.lifetime, ..*self } == *other
    }
}

/// Which blocks of a graph's pool were live at one moment ([`crate::Heap::pool_state`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolState {
    pub(crate) device: u32,
    pub(crate) id: PoolId,
    /// Of the pool when it was taken.
    pub(crate) era: u64,
    /// By address.
    pub(crate) blocks: Vec<StateBlock>,
}

impl PoolState {
    /// Where its blocks start, in the order of their addresses, and their bytes.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.blocks.iter().map(|block| (block.address, block.bytes))
    }
}

/// What a restore has done: addresses, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were live, and are not any more.
    pub freed: Vec<u64>,
    /// Blocks that were live, and are.
    pub kept: Vec<u64>,
    /// Blocks that were not live, and are.
    pub allocated: Vec<u64>,
}

/// What keeps memory from being a block again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It is not the pool's, or not the stream's, any more: a bug of ours.
    Gone,
    /// Streams may still use it after the free of what lay there.
    Waits,
}

/// Why a state was not taken, or not restored. Nothing has been changed.
#[derive(Debug)]
pub enum StateError {
    /// No graph was ever captured into a pool of that id, or all that used it are gone, and its
    /// memory with them.
    NoSuchPool(PoolId),
    /// The graphs that used it are gone; its memory goes with its blocks.
    Released(PoolId),
    /// The pool was over since the state was taken, and its memory has gone to others.
    Over(PoolId),
    /// A block cannot be put back.
    InTheWay {
        /// Where the block was.
        address: u64,
        /// Its bytes.
        bytes: u64,
        /// Where in it something is in the way.
        at: u64,
        /// What is.
        obstacle: Obstacle,
    },
    /// The device.
    Heap(Error),
}

impl From<Error> for StateError {
    fn from(error: Error) -> Self {
        Self::Heap(error)
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => {
                "is not its stream's any more, which is a bug of Gruyère: please report it"
            }
            Self::Waits => {
                "may still be used by other streams (record_stream); wait for them first \
                 (torch.cuda.synchronize())"
            }
        })
    }
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchPool((first, second)) => write!(
                f,
                "could not find pool ({first}, {second}): no graph was captured into it, or all \
                 that were are destroyed; keep one of them as long as states of the pool are used"
            ),
            Self::Released((first, second)) => write!(
                f,
                "pool ({first}, {second}) is used by no graph any more, and its memory goes with \
                 its blocks; keep a graph of it as long as states of the pool are used"
            ),
            Self::Over((first, second)) => write!(
                f,
                "all graphs of pool ({first}, {second}) were destroyed since its state was taken, \
                 and its memory has gone to others; keep a graph of it as long as states of the \
                 pool are used"
            ),
            Self::InTheWay { address, bytes, at, obstacle } => write!(
                f,
                "the block of {} at {address:#x} cannot be put back, and nothing was changed: \
                 what is at {at:#x} {obstacle}",
                Bytes(*bytes)
            ),
            Self::Heap(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StateError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_block_the_place_the_reason_and_the_remedy() {
        let error = StateError::InTheWay {
            address: 0x4000,
            bytes: 4 << 20,
            at: 0x5000,
            obstacle: Obstacle::Waits,
        };
        let text = error.to_string();
        let start = "the block of 4.00 MiB at 0x4000 cannot be put back, and nothing was changed: \
                     what is at 0x5000 may still be used by other streams";
        assert!(text.starts_with(start) && text.ends_with("(torch.cuda.synchronize())"), "{text}");
        assert!(StateError::NoSuchPool((0, 7)).to_string().contains("pool (0, 7)"));
    }
}
