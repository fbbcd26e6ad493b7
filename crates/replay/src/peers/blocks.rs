//! Blocks, their neighbours, and the two sorted sets a pool keeps of them.

use gruyere::driver::StreamHandle;
use std::collections::BTreeSet;

/// Index of a block in [`Blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockId(pub u32);

/// The two pools of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PoolKind {
    /// Requests of up to 1 MiB.
    Small = 0,
    /// All others.
    Large = 1,
}

/// A piece of a segment; the blocks of a segment tile it and are linked in order of address.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub address: u64,
    pub size: u64,
    pub stream: StreamHandle,
    pub pool: PoolKind,
    pub allocated: bool,
    /// False for unbacked address space of an expandable segment.
    pub mapped: bool,
    /// Index of its expandable segment.
    pub segment: Option<u32>,
    pub prev: Option<BlockId>,
    pub next: Option<BlockId>,
    /// Recorded streams, without the allocation's own; emptied when the free records an event on
    /// each.
    pub uses: Vec<StreamHandle>,
    /// Events that must complete before the block is free.
    pub events: u32,
}

impl Block {
    pub fn new(address: u64, size: u64, stream: StreamHandle, pool: PoolKind) -> Self {
        Self {
            address,
            size,
            stream,
            pool,
            allocated: false,
            mapped: true,
            segment: None,
            prev: None,
            next: None,
            uses: Vec::new(),
            events: 0,
        }
    }

    /// Whether the block is free with no pending event. Mapped or not.
    pub fn is_idle(&self) -> bool {
        !self.allocated && self.events == 0 && self.uses.is_empty()
    }

    pub fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }
}

/// All blocks of a device. Indices are reused.
#[derive(Default)]
pub(super) struct Blocks {
    blocks: Vec<Block>,
    vacant: Vec<BlockId>,
}

impl Blocks {
    pub fn insert(&mut self, block: Block) -> BlockId {
        if let Some(id) = self.vacant.pop() {
            self[id] = block;
            return id;
        }
        self.blocks.push(block);
        BlockId(self.blocks.len() as u32 - 1)
    }

    /// Frees the index for the next insertion.
    pub fn remove(&mut self, id: BlockId) {
        self.vacant.push(id);
    }

    /// Indices in use, unordered.
    pub fn in_use(&self) -> impl Iterator<Item = BlockId> + '_ {
        let vacant: std::collections::HashSet<u32> = self.vacant.iter().map(|id| id.0).collect();
        (0..self.blocks.len() as u32).filter(move |id| !vacant.contains(id)).map(BlockId)
    }

    /// Links `block` between `before` and `after`, which must be each other's neighbours.
    pub fn splice(&mut self, block: BlockId, before: Option<BlockId>, after: Option<BlockId>) {
        if let Some(before) = before {
            self[before].next = Some(block);
        }
        if let Some(after) = after {
            self[after].prev = Some(block);
        }
        self[block].prev = before;
        self[block].next = after;
    }
}

impl std::ops::Index<BlockId> for Blocks {
    type Output = Block;
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.0 as usize]
    }
}

impl std::ops::IndexMut<BlockId> for Blocks {
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.0 as usize]
    }
}

/// Key of a free block: best fit within a stream, lowest address among equals.
type FreeKey = (StreamHandle, u64, u64, BlockId);
/// Key of unmapped address space.
type UnmappedKey = (StreamHandle, u64, BlockId);

/// One pool of a device: its free blocks and its unmapped address space.
#[derive(Default)]
pub(super) struct Pool {
    pub free: BTreeSet<FreeKey>,
    pub unmapped: BTreeSet<UnmappedKey>,
}

impl Pool {
    pub fn insert(&mut self, id: BlockId, block: &Block) {
        let fresh = if block.mapped {
            self.free.insert((block.stream, block.size, block.address, id))
        } else {
            self.unmapped.insert((block.stream, block.address, id))
        };
        debug_assert!(fresh);
    }

    pub fn remove(&mut self, id: BlockId, block: &Block) {
        let found = if block.mapped {
            self.free.remove(&(block.stream, block.size, block.address, id))
        } else {
            self.unmapped.remove(&(block.stream, block.address, id))
        };
        debug_assert!(found);
    }

    /// Free blocks of `stream` that hold `size` bytes, best fit first.
    pub fn fitting(&self, stream: StreamHandle, size: u64) -> impl Iterator<Item = BlockId> + '_ {
        self.free
            .range((stream, size, 0, BlockId(0))..)
            .take_while(move |key| key.0 == stream)
            .map(|key| key.3)
    }

    /// Unmapped address space of `stream`, lowest first.
    pub fn unmapped_of(&self, stream: StreamHandle) -> impl Iterator<Item = BlockId> + '_ {
        self.unmapped
            .range((stream, 0, BlockId(0))..)
            .take_while(move |key| key.0 == stream)
            .map(|key| key.2)
    }
}
