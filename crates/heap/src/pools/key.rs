//! The key of a named pool, its figures ([`PoolStats`]) and its errors ([`PoolError`]).
//!
//! A named pool is memory that its program returns whole: a space of its own in its device's
//! arenas, with slabs of its own, all behind the central lock. Its blocks come from the threads
//! that have entered it (`route`); the program frees them as any block. Stream order inside is as
//! elsewhere: memory that an event has proved finished serves every stream of the pool. The pool
//! keeps what it holds: no pages move out of it, and the reclaim ladder takes only idle memory
//! above its reserve.

use crate::driver::DriverError;
use crate::error::Error;
use crate::pools::{FIRST_NAMED, PoolNumber};
use gruyere_record::counted;
use gruyere_record::size::Bytes;
use std::fmt;

/// Pools that one thread may be in at a time.
pub(crate) const ROUTE_DEPTH: usize = 16;
/// The longest name of a pool (bytes).
pub(crate) const MAX_NAME: usize = 128;

/// The program's key for a pool: its device and its number there, never used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolKey(pub u64);

impl PoolKey {
    /// The key of the `count`th named pool of `device`, from 1 on.
    pub const fn new(device: u32, count: u32) -> Self {
        Self((device as u64) << 32 | count as u64)
    }

    /// The key of named pool `number` of `device`.
    pub(crate) const fn of(device: u32, number: PoolNumber) -> Self {
        Self::new(device, number - FIRST_NAMED)
    }

    /// The device's ordinal.
    pub const fn device(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(crate) const fn number(self) -> PoolNumber {
        // Past all numbers if the key is not one of ours.
        FIRST_NAMED.saturating_add(self.0 as u32)
    }
}

/// A live block of a pool, named by the release that it prevents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Where it starts.
    pub address: u64,
    /// Bytes that the program asked for.
    pub requested: u64,
    /// The step of its allocation; `None`: the record is off, or had no room for it.
    pub step: Option<u32>,
    /// The number of its stream.
    pub stream: u32,
}

/// The figures of one pool, in bytes unless noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Memory that it keeps even if idle.
    pub reserve: u64,
    /// Ceiling on its live bytes; `None`: none of its own.
    pub limit: Option<u64>,
    /// Memory that it holds.
    pub held: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// Number of live blocks.
    pub live_blocks: u64,
    /// Blocks freed by the program that wait for streams.
    pub pending: u64,
}

/// The reason why a call about a pool failed.
#[derive(Debug)]
pub enum PoolError {
    /// No pool has that key.
    NoSuchPool(PoolKey),
    /// Not a valid name.
    Name(String),
    /// The reserve is larger than the limit.
    ReserveOverLimit {
        /// Bytes asked to be mapped.
        reserve: u64,
        /// Bytes that may be live.
        limit: u64,
    },
    /// `backing:passthrough` keeps no memory.
    Passthrough,
    /// The memory to be reserved could not be had.
    Reserve {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that the device had free, if the driver could say.
        free: Option<u64>,
        /// Bytes of headroom that stay free.
        headroom: u64,
        /// The answer of the driver, or of the ceiling.
        error: DriverError,
    },
    /// Blocks are live in it.
    Live {
        /// Number of live blocks.
        count: u64,
        /// Their bytes, each rounded up to 512.
        bytes: u64,
        /// The largest of them.
        largest: Vec<LiveBlock>,
    },
    /// A thread is allocating from it at this moment.
    Busy,
    /// Its memory comes from outside: only its maker can take it back.
    Outside(PoolKey),
    /// Its memory comes from the heap, not from outside: it holds some already, has a reserve, or
    /// was never opened to the outside.
    Begun(PoolKey),
    /// A segment brought to it cannot be managed; its address.
    Segment(u64),
    /// The allocator cannot find out whether work still uses its memory: a CUDA graph is being
    /// captured, or the device did not answer.
    Unquiet,
    /// The driver did not take all of it back.
    Kept {
        /// Bytes that the device still holds.
        bytes: u64,
    },
    /// The thread is in as many pools as it may be.
    TooDeep,
    /// It is not the pool that the thread entered last.
    NotInnermost(PoolKey),
    /// An error of the device.
    Heap(Error),
}

impl From<Error> for PoolError {
    fn from(error: Error) -> Self {
        Self::Heap(error)
    }
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchPool(key) => {
                write!(f, "there is no pool {:#x}: it was never created, or is destroyed", key.0)
            }
            Self::Name(name) => {
                write!(
                    f,
                    "a pool cannot be named {name:?}: a name has 1 to {MAX_NAME} bytes of UTF-8"
                )
            }
            Self::ReserveOverLimit { reserve, limit } => write!(
                f,
                "the reserve of {} is larger than the limit of {}: raise the limit or reserve less",
                Bytes(*reserve),
                Bytes(*limit)
            ),
            Self::Passthrough => write!(
                f,
                "backing:passthrough hands every call to the driver and keeps no pools: use \
                 backing:auto"
            ),
            Self::Reserve { bytes, free, headroom, error } => {
                let free = free
                    .map_or_else(|| "an unknown amount".to_owned(), |free| Bytes(free).to_string());
                write!(
                    f,
                    "{} could not be reserved ({error}): the device has {free} free, of which {} \
                     of headroom stay; reserve less, free memory first, or lower headroom: in \
                     GRUYERE_CONF",
                    Bytes(*bytes),
                    Bytes(*headroom)
                )
            }
            Self::Live { count, bytes, largest } => {
                let (blocks, are) =
                    (counted(*count, "block"), if *count == 1 { "is" } else { "are" });
                write!(f, "{blocks} of {} {are} live in it", Bytes(*bytes))?;
                for (at, block) in largest.iter().enumerate() {
                    write!(f, "{} {}", if at == 0 { ":" } else { "," }, Bytes(block.requested))?;
                    if let Some(step) = block.step {
                        write!(f, " of step {step}")?;
                    }
                }
                if (largest.len() as u64) < *count {
                    write!(f, ", ...")?;
                }
                write!(
                    f,
                    "; free first what was allocated inside the pool (in Python: drop every tensor \
                     of it)"
                )
            }
            Self::Busy => {
                write!(f, "another thread is allocating from it; let it finish and leave first")
            }
            Self::Outside(key) => write!(
                f,
                "the memory of pool {:#x} comes from another allocator, which alone can take it \
                 back",
                key.0
            ),
            Self::Begun(key) => write!(
                f,
                "pool {:#x} gets its memory from Gruyère: set another source before the first \
                 request",
                key.0
            ),
            Self::Segment(address) => write!(
                f,
                "the pool's allocator returned memory at {address:#x}, which cannot be used: an \
                 address must be a multiple of 512 below 2^48"
            ),
            Self::Unquiet => write!(
                f,
                "its memory may still be in use: a CUDA graph is being captured, or the device \
                 could not be synchronised; try again afterwards"
            ),
            Self::Kept { bytes } => {
                write!(f, "the driver did not take {} of it back; try again later", Bytes(*bytes))
            }
            Self::TooDeep => {
                write!(f, "a thread can be in {} pools at most; leave one first", ROUTE_DEPTH)
            }
            Self::NotInnermost(key) => {
                write!(f, "pool {:#x} is not the pool that this thread entered last", key.0)
            }
            Self::Heap(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PoolError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_says_its_device_and_number() {
        let key = PoolKey::of(63, 2 * FIRST_NAMED - 1);
        assert_eq!((key.device(), key.number()), (63, 2 * FIRST_NAMED - 1));
        assert_eq!(PoolKey::of(1, FIRST_NAMED + 2), PoolKey::new(1, 2));
        assert_eq!(PoolKey(u64::MAX).number(), u32::MAX, "a number that no pool has");
    }

    #[test]
    fn a_refusal_for_one_block_counts_one() {
        let error = PoolError::Live { count: 1, bytes: 1 << 20, largest: Vec::new() };
        assert!(error.to_string().starts_with("1 block of 1.00 MiB is live in it"), "{error}");
    }

    #[test]
    fn a_refusal_names_count_bytes_sizes_and_steps() {
        let block = |requested, step| LiveBlock { address: 0, requested, step, stream: 0 };
        let error = PoolError::Live {
            count: 3,
            bytes: 7 << 20,
            largest: vec![block(4 << 20, Some(12)), block(2 << 20, None)],
        };
        let text = error.to_string();
        assert!(
            text.starts_with(
                "3 blocks of 7.00 MiB are live in it: 4.00 MiB of step 12, 2.00 MiB, ...;"
            ),
            "{text}"
        );
    }
}
