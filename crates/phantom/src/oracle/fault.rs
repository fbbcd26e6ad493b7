//! Faults that the oracle reports.

use std::fmt;

/// A stream's name in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamName {
    /// Its id, unique.
    pub id: u64,
    /// Its handle, which may belong to another stream before or later.
    pub handle: usize,
    /// Its device.
    pub device: u32,
}

impl fmt::Display for StreamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.handle {
            0 => write!(f, "the default stream of device {}", self.device),
            2 => write!(f, "the per-thread stream {} of device {}", self.id, self.device),
            handle => write!(f, "stream {} ({handle:#x}, device {})", self.id, self.device),
        }
    }
}

/// A promise that the allocator broke. Block ids come from the harness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The allocator handed out memory that former work may still use.
    OutOfOrder {
        /// The new block.
        block: u64,
        /// Start of the shared bytes in it.
        address: u64,
        /// The new block's stream.
        stream: StreamName,
        /// The previous block of the bytes; `None`: the pool handed them out in the order of `on`
        /// only.
        previous: Option<u64>,
        /// The stream with work not known to be done.
        on: StreamName,
    },
    /// Two live blocks share a physical byte.
    TwoLive {
        /// The new block.
        block: u64,
        /// Start of the shared bytes in it.
        address: u64,
        /// The existing block.
        other: u64,
        /// The other block's address: elsewhere if the memory is mapped twice.
        other_address: u64,
    },
    /// A block covers unbacked addresses.
    Unbacked {
        /// The block.
        block: u64,
        /// The first unbacked address.
        address: u64,
        /// Backed bytes of the block before that address.
        backed: u64,
        /// Bytes of the block.
        bytes: u64,
    },
    /// A block covers memory that its device may not access.
    NoAccess {
        /// The block.
        block: u64,
        /// The first such address.
        address: u64,
        /// The device.
        device: u32,
    },
    /// A call unmapped, freed or returned memory under a live block.
    TakenUnderLive {
        /// The call that took the memory.
        call: &'static str,
        /// The address.
        address: u64,
        /// The live block.
        block: u64,
    },
    /// A call unmapped, freed or returned memory that former work may still use.
    TakenUnderWork {
        /// The call that took the memory.
        call: &'static str,
        /// The address.
        address: u64,
        /// The last block there; `None`: the pool's own allocation.
        block: Option<u64>,
        /// The stream with work not known to be done.
        on: StreamName,
    },
    /// The allocator made a call that is forbidden while a stream captures.
    Capturing {
        /// The call.
        call: &'static str,
        /// The capturing stream.
        stream: StreamName,
        /// The capture.
        capture: u64,
    },
    /// The allocator reused or removed memory of a graph that may still be replayed.
    GraphMemory {
        /// The call, or the block that got the memory.
        by: Taker,
        /// The address.
        address: u64,
        /// The capture that owns the memory.
        capture: u64,
    },
    /// A program got memory that a kernel still uses, with no order between the kernel and the new
    /// use.
    HandedOutBusy {
        /// The new block.
        block: u64,
        /// Start of the busy bytes in it.
        address: u64,
        /// The stream of its first use; `None`: any stream, at once.
        stream: Option<StreamName>,
        /// The kernel's block.
        previous: u64,
        /// The kernel's stream.
        on: StreamName,
    },
    /// A kernel uses memory that another kernel still uses, and neither comes before the other.
    Race {
        /// The kernel's block, 0: none.
        block: u64,
        /// Start of the shared bytes.
        address: u64,
        /// The kernel's stream.
        stream: StreamName,
        /// The other kernel's block.
        previous: u64,
        /// The other kernel's stream.
        on: StreamName,
    },
    /// A kernel uses memory that is not inside one block of the program: freed, or never allocated.
    TouchedNobodys {
        /// The address.
        address: u64,
        /// Bytes.
        bytes: u64,
        /// The kernel's stream.
        stream: StreamName,
    },
    /// The harness reported a block for, or recorded, a stream that does not exist (any more): a
    /// fault of the harness.
    UnknownStream {
        /// The block's address.
        address: u64,
        /// The handle.
        handle: usize,
    },
    /// The harness freed, or recorded a stream on, a block unknown to the oracle: a fault of the
    /// harness.
    UnknownBlock {
        /// Its address.
        address: u64,
    },
}

/// The cause of a wrong use of a graph's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taker {
    /// A new block.
    Block(u64),
    /// A driver call.
    Call(&'static str),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Fault::OutOfOrder { block, address, stream, previous: Some(previous), on } => write!(
                f,
                "block {block} at {address:#x} for {stream} reuses memory of block {previous}, \
                 whose work on {on} is not ordered before it"
            ),
            Fault::OutOfOrder { block, address, stream, previous: None, on } => write!(
                f,
                "block {block} at {address:#x} for {stream} lies in memory that the pool handed \
                 out in the order of {on} only"
            ),
            Fault::TwoLive { block, address, other, other_address } => write!(
                f,
                "block {block} at {address:#x} shares physical memory with block {other} at \
                 {other_address:#x}, which is live"
            ),
            Fault::Unbacked { block, address, backed, bytes } => {
                write!(
                    f,
                    "block {block}: nothing backs {address:#x} ({backed} of its {bytes} bytes are \
                     backed)"
                )
            }
            Fault::NoAccess { block, address, device } => {
                write!(f, "block {block}: device {device} has no access to {address:#x}")
            }
            Fault::TakenUnderLive { call, address, block } => {
                write!(f, "{call} at {address:#x} takes memory of block {block}, which is live")
            }
            Fault::TakenUnderWork { call, address, block: Some(block), on } => {
                write!(
                    f,
                    "{call} at {address:#x} takes memory of block {block}, whose work on {on} is \
                     not known to be done"
                )
            }
            Fault::TakenUnderWork { call, address, block: None, on } => {
                write!(
                    f,
                    "{call} at {address:#x} takes memory that the pool handed out in the order of \
                     {on} only"
                )
            }
            Fault::Capturing { call, stream, capture } => {
                write!(f, "{call} by the allocator while {stream} is in capture {capture}")
            }
            Fault::GraphMemory { by: Taker::Block(block), address, capture } => write!(
                f,
                "block {block} at {address:#x} lies in memory of capture {capture}, whose graph \
                 may still be replayed"
            ),
            Fault::GraphMemory { by: Taker::Call(call), address, capture } => {
                write!(
                    f,
                    "{call} at {address:#x} takes memory of capture {capture}, whose graph may \
                     still be replayed"
                )
            }
            Fault::HandedOutBusy { block, address, stream, previous, on } => {
                write!(f, "block {block} at {address:#x} for ")?;
                match stream {
                    Some(stream) => write!(f, "{stream}")?,
                    None => f.write_str("every stream")?,
                }
                write!(
                    f,
                    " was handed out while a kernel on {on} still uses it as block {previous}"
                )
            }
            Fault::Race { block, address, stream, previous, on } => write!(
                f,
                "a kernel on {stream} uses block {block} at {address:#x} while one on {on}, not \
                 ordered before it, still uses it as block {previous}"
            ),
            Fault::TouchedNobodys { address, bytes, stream } => {
                write!(
                    f,
                    "a kernel on {stream} uses {address:#x}+{bytes}, which is in no live block"
                )
            }
            Fault::UnknownStream { address, handle } => {
                write!(f, "the block at {address:#x} is for {handle:#x}, which is no stream")
            }
            Fault::UnknownBlock { address } => write!(f, "no block is live at {address:#x}"),
        }
    }
}
