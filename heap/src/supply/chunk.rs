//! Chunks: the physical handles of which stitched pages are parts.

/// The longest chunk (bytes). Creating one has a fixed cost, which few chunks pay; a page table
/// entry of the view at the other end of a chunk takes address space only.
pub const LONGEST_CHUNK: u64 = 64 << 20;

/// A chunk's number.
pub type ChunkId = u32;
