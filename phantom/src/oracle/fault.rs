//! What the oracle reports.

use std::fmt;

/// A stream, as a report names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamName {
    /// Its id, unique.
    pub id: u64,
    /// Its handle, which may have been another stream's before or since.
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

/// A promise that the allocator broke. Block ids are the harness's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Memory was handed out while former work may still use it.
    OutOfOrder {
        /// The new block.
        block: u64,
        /// Where the shared bytes begin in it.
        address: u64,
        /// The stream that it is for.
        stream: StreamName,
        /// The block that had the bytes before; `None`: the pool handed them out in the order of
        /// `on` only.
        previous: Option<u64>,
        /// The stream whose work is not known to be done.
        on: StreamName,
    },
    /// Two live blocks share a physical byte.
    TwoLive {
        /// The new block.
        block: u64,
        /// Where the shared bytes begin in it.
        address: u64,
        /// The block that was there.
        other: u64,
        /// Where that one begins: another place where the memory is mapped twice.
        other_address: u64,
    },
    /// A block lies over addresses that nothing backs.
    Unbacked {
        /// The block.
        block: u64,
        /// The first address that nothing backs.
        address: u64,
        /// Bytes of the block that are backed before it.
        backed: u64,
        /// Bytes of the block.
        bytes: u64,
    },
    /// A block lies over memory that its device may not read.
    NoAccess {
        /// The block.
        block: u64,
        /// The first such address.
        address: u64,
        /// The device.
        device: u32,
    },
    /// Memory was unmapped, freed or given back while a block in it was live.
    TakenUnderLive {
        /// The call that took it.
        call: &'static str,
        /// Where it took from.
        address: u64,
        /// The live block.
        block: u64,
    },
    /// Memory was unmapped, freed or given back while former work may still use it.
    TakenUnderWork {
        /// The call that took it.
        call: &'static str,
        /// Where it took from.
        address: u64,
        /// The block that was used last; `None`: the pool's own hand-out.
        block: Option<u64>,
        /// The stream whose work is not known to be done.
        on: StreamName,
    },
    /// The allocator called what must not be called while a stream captures.
    Capturing {
        /// The call.
        call: &'static str,
        /// The stream that captures.
        stream: StreamName,
        /// The capture.
        capture: u64,
    },
    /// Memory of a graph that may still be replayed was handed to others, or taken.
    GraphMemory {
        /// The call, or the block that it was handed to.
        by: Taker,
        /// Where.
        address: u64,
        /// The capture whose memory it is.
        capture: u64,
    },
    /// A program got memory on which a kernel still runs that does not come before its use.
    HandedOutBusy {
        /// The new block.
        block: u64,
        /// Where the busy bytes begin in it.
        address: u64,
        /// The stream that it may be used on first; `None`: all of them, at once.
        stream: Option<StreamName>,
        /// The block that the kernel uses.
        previous: u64,
        /// The kernel's stream.
        on: StreamName,
    },
    /// A kernel uses memory that another one still uses, and neither comes before the other.
    Race {
        /// The block that it means, 0: none.
        block: u64,
        /// Where the shared bytes begin.
        address: u64,
        /// The kernel's stream.
        stream: StreamName,
        /// The block that the other one means.
        previous: u64,
        /// The other one's stream.
        on: StreamName,
    },
    /// A kernel uses memory that is not all in one block of the program's: freed, or never given.
    TouchedNobodys {
        /// Where.
        address: u64,
        /// How much.
        bytes: u64,
        /// The kernel's stream.
        stream: StreamName,
    },
    /// A block was handed out for a stream, or a stream recorded, that does not exist (any more): a
    /// fault of the harness.
    UnknownStream {
        /// The block's address.
        address: u64,
        /// The handle.
        handle: usize,
    },
    /// A block was freed, or a stream recorded on it, that the oracle does not know: a fault of the
    /// harness.
    UnknownBlock {
        /// Its address.
        address: u64,
    },
}

/// Who took memory that was not theirs.
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
