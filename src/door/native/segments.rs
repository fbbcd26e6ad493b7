//! The source of the segments of torch's MemPools: another allocator of torch's, given when the
//! pool was made, or the driver.
//!
//! A MemPool's memory is whole segments, as under torch's own allocator: memory that is registered
//! with NCCL or a network card, or belongs to another allocator, must never move nor be split. The
//! heap reports when a pool needs a segment; this module gets it, announces it and gives it back,
//! with no lock held.

use super::super::torch::{CudaStream, MempoolId};
use super::Failure;
use super::boxed::Boxed;
use super::trackers::{self, GruyereSegmentEvent};
use crate::driver::StreamHandle;
use crate::heap::{Error, Heap, PoolError, PoolId, PoolKey};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

/// Allocates `bytes` on `device` with the allocator `object`, for a request of the calling thread
/// on `stream`. Returns NULL if it cannot, and sets `*failed` to 1 if it threw. Must not unwind.
pub type GruyereGive = extern "C" fn(
    object: *mut c_void,
    bytes: u64,
    device: c_int,
    stream: CudaStream,
    failed: *mut c_int,
) -> *mut c_void;

/// Returns memory from [`GruyereGive`] to the allocator `object`, once. Must not unwind.
pub type GruyereTake = extern "C" fn(object: *mut c_void, block: *mut c_void);

/// The source of a pool's segments.
pub(super) enum Source {
    /// The driver's plain allocations.
    Driver,
    /// Another allocator, kept until its last segment is given back.
    Foreign { allocator: Boxed, give: GruyereGive, take: GruyereTake },
}

/// Length (bytes) of segments for small blocks, and of no other segment.
const SHORTEST: u64 = 2 << 20;

/// The allocator threw; the shim keeps the exception.
struct Threw;

/// The live segments, by device and address, each with the number of segments before it.
#[derive(Default)]
struct Order {
    next: i32,
    known: HashMap<(i32, u64), i32>,
}

static ORDER: Mutex<Option<Order>> = Mutex::new(None);

impl Order {
    fn add(&mut self, device: i32, address: u64) {
        self.known.insert((device, address), self.next);
        self.next = self.next.checked_add(1).unwrap_or(0);
    }
}

fn in_order<T>(body: impl FnOnce(&mut Order) -> T) -> T {
    body(ORDER.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// The number of segments before the one at `address`; -1: no segment of a MemPool is there.
pub(super) fn number_of(device: i32, address: u64) -> i32 {
    in_order(|order| order.known.get(&(device, address)).copied().unwrap_or(-1))
}

/// Runs `request` with the calling thread inside pool `key`.
pub(super) fn inside<T>(
    heap: &Heap,
    key: PoolKey,
    request: impl FnOnce() -> T,
) -> Result<T, PoolError> {
    heap.pool_enter(key)?;
    let answer = request();
    heap.pool_leave(key)?;
    Ok(answer)
}

/// A MemPool, as far as its segments go.
pub(super) struct Held<'a> {
    pub(super) heap: &'a Heap,
    pub(super) device: i32,
    pub(super) id: PoolId,
    pub(super) key: PoolKey,
    pub(super) source: &'a Source,
}

impl Held<'_> {
    /// Serves a block of `size` bytes from the pool; `ask` asks the heap for it. If no segment is
    /// available, `make_room` frees memory.
    pub(super) fn serve(
        &self,
        size: u64,
        stream: (CudaStream, StreamHandle),
        ask: impl Fn() -> Result<u64, Error>,
        make_room: impl Fn(),
    ) -> Result<u64, Failure> {
        let mut is_last = false;
        loop {
            let bytes = match inside(self.heap, self.key, &ask)? {
                Err(Error::NoSegment(bytes)) => bytes,
                other => return other.map_err(|error| Failure::of(error, stream.0)),
            };
            match self.get(bytes, stream.0) {
                Ok(Some(address)) => self.bring(size, address, bytes)?,
                Ok(None) if is_last => {
                    let refused = self.heap.pool_refusal(self.key, size, stream.1);
                    return Err(Failure::of(refused, stream.0));
                }
                // As torch: cached memory goes back, and the allocator is asked once more.
                Ok(None) => {
                    is_last = true;
                    make_room();
                }
                Err(Threw) => {
                    return Err(Failure::invalid("the allocator of a memory pool failed"));
                }
            }
        }
    }

    /// Gets a segment; `None`: none is available.
    fn get(&self, bytes: u64, stream: CudaStream) -> Result<Option<u64>, Threw> {
        if !self.heap.pool_has_room(self.key, bytes) {
            return Ok(None);
        }
        match self.source {
            Source::Driver => Ok(self.heap.plain_segment(self.key, bytes).ok()),
            Source::Foreign { allocator, give, .. } => {
                let mut failed = 0;
                let object = allocator.object();
                let block = give(object, bytes, self.device, stream, &raw mut failed);
                match block as u64 {
                    _ if failed != 0 => Err(Threw),
                    0 => Ok(None),
                    address => Ok(Some(address)),
                }
            }
        }
    }

    /// Hands a segment to the heap, for a block of `size` bytes.
    fn bring(&self, size: u64, address: u64, bytes: u64) -> Result<(), Failure> {
        self.announce(address, bytes);
        self.heap.pool_bring(self.key, size, address, bytes).map_err(|error| {
            self.put(address, bytes);
            error.into()
        })
    }

    /// Numbers and announces a segment before its first use.
    fn announce(&self, address: u64, bytes: u64) {
        in_order(|order| order.add(self.device, address));
        self.tell(false, address, bytes);
    }

    /// Gives back, each once, the segments that no work uses any more.
    pub(super) fn give_back(&self) {
        for (address, bytes) in self.heap.pool_take(self.key) {
            self.put(address, bytes);
        }
    }

    /// Announces the end of a segment, and returns it to its source.
    fn put(&self, address: u64, bytes: u64) {
        self.tell(true, address, bytes);
        in_order(|order| order.known.remove(&(self.device, address)));
        match self.source {
            Source::Driver => {
                if let Err(error) = self.heap.free_plain(self.key, address) {
                    log::warn!(
                        "the driver did not take the segment {address:#x} back: {error}; it stays \
                         in its pool"
                    );
                    self.announce(address, bytes);
                    let size = if bytes == SHORTEST { 1 } else { bytes };
                    if let Err(error) = self.heap.pool_bring(self.key, size, address, bytes) {
                        log::error!("the segment {address:#x} is lost: {error}");
                    }
                }
            }
            Source::Foreign { allocator, take, .. } => {
                take(allocator.object(), address as *mut c_void);
            }
        }
    }

    fn tell(&self, is_freed: bool, address: u64, bytes: u64) {
        trackers::tell(&GruyereSegmentEvent {
            is_freed: is_freed.into(),
            device: self.device,
            pool: MempoolId { first: self.id.0, second: self.id.1 },
            address,
            bytes,
        });
    }
}
