//! The data behind torch's own statistics functions: statistics by pool with peaks and resets, and
//! the memory layout.
//!
//! Any thread may call every function; torch calls none of them, so in a forked child each returns
//! its failure value. The Python package wires them (`gruyere._torch.stats`).

use super::begin::heap;
use super::fork;
use super::process::{GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE, current, guarded};
use crate::heap::snapshot::{Segment, Snapshot};
use crate::heap::{CapturePoolHeld, Error, Heap, PoolId};
use crate::record::peaks::Stat;
use std::ffi::c_int;

/// A statistic over time.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereStat {
    /// Current value.
    pub current: u64,
    /// Highest value since the last `gruyere_reset_peaks`.
    pub peak: u64,
    /// Sum of all increases since the last `gruyere_reset_accumulated`.
    pub allocated: u64,
    /// Sum of all decreases since then.
    pub freed: u64,
}

impl From<Stat> for GruyereStat {
    fn from(stat: Stat) -> Self {
        let Stat { current, peak, allocated, freed } = stat;
        Self { current, peak, allocated, freed }
    }
}

/// The version of [`GruyereTorchStats`] that this header describes.
pub const GRUYERE_TORCH_STATS_VERSION: u32 = 1;

/// The statistics of `torch.cuda.memory_stats`. The arrays are by pool: all, small (blocks of up to
/// 1 MiB), large. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereTorchStats {
    /// In: size of the caller's struct in bytes. Out: number of bytes written.
    pub size: u32,
    /// Out: version of the struct in the library.
    pub version: u32,
    /// Live blocks.
    pub allocation: [GruyereStat; 3],
    /// Pieces of memory allocated from the driver: pages, spans or blocks, depending on the
    /// backing. Pages of slabs count as small; spans may serve both, and count as large.
    pub segment: [GruyereStat; 3],
    /// Live blocks, and freed blocks that wait for streams.
    pub active: [GruyereStat; 3],
    /// Free pieces that cannot go back to the driver, since a used piece shares their page or span.
    /// Computed at each call of `gruyere_torch_stats`: a peak is the highest value that a call has
    /// found.
    pub inactive_split: [GruyereStat; 3],
    /// Bytes of `allocation`, each block rounded up to 512.
    pub allocated_bytes: [GruyereStat; 3],
    /// Bytes of `segment`.
    pub reserved_bytes: [GruyereStat; 3],
    /// Bytes of `active`, each block rounded up to 512.
    pub active_bytes: [GruyereStat; 3],
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: [GruyereStat; 3],
    /// Bytes of `active`, as requested.
    pub requested_bytes: [GruyereStat; 3],
    /// Times that requests climbed the reclaim ladder, since the last `gruyere_reset_accumulated`.
    pub num_alloc_retries: u64,
    /// Requests that failed with out of memory, since then.
    pub num_ooms: u64,
    /// Synchronisations of the whole device to reclaim memory, since then.
    pub num_sync_all_streams: u64,
    /// Pieces of memory allocated from the driver, since then.
    pub num_device_alloc: u64,
    /// Pieces returned to the driver, since then.
    pub num_device_free: u64,
    /// Ceiling on held memory, in bytes.
    pub limit: u64,
    /// Physical memory of the device, in bytes.
    pub total_memory: u64,
}

/// Writes the statistics of `torch.cuda.memory_stats` for `device` to `*stats`, at most
/// `stats->size` bytes of them. Set `size` before the call.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device, `stats`
/// is NULL, or `size` is less than 8.
///
/// # Safety
/// `stats` is NULL or valid for writes of `stats->size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_torch_stats(
    device: c_int,
    stats: *mut GruyereTorchStats,
) -> c_int {
    if stats.is_null() {
        return GRUYERE_INVALID;
    }
    // SAFETY: the caller's promise; read as a plain word, since an older caller's struct may be
    // shorter than ours.
    let room = unsafe { stats.cast::<u32>().read() } as usize;
    if room < 8 {
        return GRUYERE_INVALID;
    }
    with_heap(|heap| {
        let numbers = heap.torch_stats(i64::from(device))?;
        let (blocks, held) = (&numbers.blocks, &numbers.held);
        let written = room.min(size_of::<GruyereTorchStats>());
        let answer = GruyereTorchStats {
            size: written as u32,
            version: GRUYERE_TORCH_STATS_VERSION,
            allocation: blocks.allocation.map(Into::into),
            segment: held.segment.map(Into::into),
            active: blocks.active.map(Into::into),
            inactive_split: held.inactive_split.map(Into::into),
            allocated_bytes: blocks.allocated_bytes.map(Into::into),
            reserved_bytes: held.reserved_bytes.map(Into::into),
            active_bytes: blocks.active_bytes.map(Into::into),
            inactive_split_bytes: held.inactive_split_bytes.map(Into::into),
            requested_bytes: blocks.requested_bytes.map(Into::into),
            num_alloc_retries: held.retries,
            num_ooms: held.out_of_memories,
            num_sync_all_streams: held.synchronisations,
            num_device_alloc: held.segment[0].allocated,
            num_device_free: held.segment[0].freed,
            limit: numbers.limit,
            total_memory: numbers.total_memory,
        };
        // SAFETY: `written` bytes are inside what the caller has room for, and inside `answer`; the
        // two do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const answer).cast::<u8>(),
                stats.cast::<u8>(),
                written,
            )
        };
        Ok(())
    })
}

/// Resets the peaks of [`gruyere_torch_stats`] to the current values. The peaks of `gruyere_stats`
/// cover the whole life of the process.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_reset_peaks(device: c_int) -> c_int {
    with_heap(|heap| heap.reset_peaks(i64::from(device)))
}

/// Resets the accumulated values of [`gruyere_torch_stats`] (`allocated`, `freed` and the `num_`
/// fields) to 0.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_reset_accumulated(device: c_int) -> c_int {
    with_heap(|heap| heap.reset_accumulated(i64::from(device)))
}

fn with_heap(ask: impl FnOnce(&'static Heap) -> Result<(), Error>) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || match heap().map(ask) {
        Err(_) => GRUYERE_UNAVAILABLE,
        Ok(Err(_)) => GRUYERE_INVALID,
        Ok(Ok(())) => GRUYERE_OK,
    })
}

/// The memory of a capture pool.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyerePool {
    /// First number of torch's id.
    pub first: u64,
    /// Second number of torch's id.
    pub second: u64,
    /// Bytes held.
    pub bytes: u64,
    /// Of these, bytes of slabs (for blocks of up to 16 KiB).
    pub small: u64,
}

impl From<&CapturePoolHeld> for GruyerePool {
    fn from(held: &CapturePoolHeld) -> Self {
        let CapturePoolHeld { id: (first, second), bytes, small } = *held;
        Self { first, second, bytes, small }
    }
}

/// The version of [`GruyereSnapshot`] that this header describes.
pub const GRUYERE_SNAPSHOT_VERSION: u32 = 1;

/// A contiguous range of held memory: a span, a row of mapped pages, or a block allocated from the
/// driver. [`GruyereBlock`]s tile it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereSegment {
    /// Start address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// torch's id of the capture pool that the segment belongs to; 0 and 0 if none.
    pub pool_first: u64,
    /// See `pool_first`.
    pub pool_second: u64,
    /// Index of the first block in the snapshot's blocks.
    pub first_block: u64,
    /// Number of blocks.
    pub block_count: u64,
    /// 1 if the segment serves blocks of up to 1 MiB and none larger; free memory does not matter.
    pub small: u32,
    /// 1 if the segment grows and shrinks page by page.
    pub stitched: u32,
}

/// A piece of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereBlock {
    /// Start address.
    pub address: u64,
    /// Length in bytes, a multiple of 512.
    pub bytes: u64,
    /// Bytes requested by the program; 0 if the block is free.
    pub requested: u64,
    /// Handle of the block's stream; for free memory, of the stream that owns it, or 0.
    pub stream: u64,
    /// 0: free; 1: live; 2: freed by the program, waiting for streams.
    pub state: u32,
    /// Padding; always 0.
    pub room: u32,
}

/// The memory layout of a device. Later versions append fields to each struct: step through the
/// arrays by the sizes given here.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereSnapshot {
    /// Size of this struct in bytes.
    pub size: u32,
    /// Version of this struct.
    pub version: u32,
    /// Size of a segment in bytes.
    pub segment_size: u32,
    /// Size of a block in bytes.
    pub block_size: u32,
    /// Segments, ordered by address.
    pub segments: *const GruyereSegment,
    /// Number of segments.
    pub segment_count: u64,
    /// Blocks, ordered by segment, then by address.
    pub blocks: *const GruyereBlock,
    /// Number of blocks.
    pub block_count: u64,
    /// Capture pools.
    pub pools: *const GruyerePool,
    /// Number of capture pools.
    pub pool_count: u64,
    /// Held bytes that are mapped nowhere, and so are in no segment.
    pub unmapped: u64,
}

/// Owns the memory behind [`GruyereSnapshot`], its first field.
#[repr(C)]
struct Held {
    face: GruyereSnapshot,
    segments: Vec<GruyereSegment>,
    blocks: Vec<GruyereBlock>,
    pools: Vec<GruyerePool>,
}

fn hold(snapshot: &Snapshot, pool_of: impl Fn(&Segment) -> PoolId) -> Box<Held> {
    let pools: Vec<GruyerePool> = snapshot.pools.iter().map(Into::into).collect();
    let (mut segments, mut blocks) = (Vec::new(), Vec::new());
    for segment in &snapshot.segments {
        let (pool_first, pool_second) = pool_of(segment);
        segments.push(GruyereSegment {
            address: segment.address,
            bytes: segment.bytes,
            pool_first,
            pool_second,
            first_block: blocks.len() as u64,
            block_count: segment.blocks.len() as u64,
            small: segment.is_small().into(),
            stitched: segment.stitched.into(),
        });
        blocks.extend(segment.blocks.iter().map(|block| GruyereBlock {
            address: block.address,
            bytes: block.bytes,
            requested: block.requested,
            stream: block.stream,
            state: block.state as u32,
            room: 0,
        }));
    }
    let face = GruyereSnapshot {
        size: size_of::<GruyereSnapshot>() as u32,
        version: GRUYERE_SNAPSHOT_VERSION,
        segment_size: size_of::<GruyereSegment>() as u32,
        block_size: size_of::<GruyereBlock>() as u32,
        segments: segments.as_ptr(),
        segment_count: segments.len() as u64,
        blocks: blocks.as_ptr(),
        block_count: blocks.len() as u64,
        pools: pools.as_ptr(),
        pool_count: pools.len() as u64,
        unmapped: snapshot.unmapped,
    };
    // Moving a vector leaves its buffer in place.
    Box::new(Held { face, segments, blocks, pools })
}

/// Returns the current memory layout of `device`; free it with [`gruyere_snapshot_free`]. The
/// library reads one shard after the other: if other threads allocate meanwhile, the parts are some
/// microseconds apart.
///
/// Returns NULL if the library has not allocated in this process, or there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_snapshot(device: c_int) -> *mut GruyereSnapshot {
    snapshot(device, |segment| segment.pool)
}

/// As [`gruyere_snapshot`]; `pool_of` maps a segment to the pool to report for it.
pub(super) fn snapshot(
    device: c_int,
    pool_of: impl Fn(&Segment) -> PoolId,
) -> *mut GruyereSnapshot {
    if fork::is_forked_child() {
        return std::ptr::null_mut();
    }
    guarded(std::ptr::null_mut(), || {
        let Some(heap) = current() else { return std::ptr::null_mut() };
        let found = heap.snapshot(i64::from(device)).map(|snapshot| hold(&snapshot, pool_of));
        found.map_or(std::ptr::null_mut(), |held| Box::into_raw(held).cast())
    })
}

/// Frees a snapshot and everything it points to. NULL is allowed.
///
/// # Safety
/// `snapshot` is NULL, or from [`gruyere_snapshot`] and not freed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_snapshot_free(snapshot: *mut GruyereSnapshot) {
    if !snapshot.is_null() {
        // SAFETY: the caller's promise; `gruyere_snapshot` made it from a box of `Held`, whose
        // first field the struct is.
        let held = unsafe { Box::from_raw(snapshot.cast::<Held>()) };
        guarded((), || drop(held));
    }
}

/// Writes the memory of each capture pool of `device` to `pools`, at most `room` of them, and the
/// number of all capture pools to `*count`. Cheap, unlike [`gruyere_snapshot`], which walks every
/// block.
///
/// Returns 0; -1 if the library cannot work in this process; -2 if there is no such device, or
/// `pools` or `count` is NULL.
///
/// # Safety
/// `pools` is NULL or valid for writes of `room` pools; `count` is NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_capture_pools(
    device: c_int,
    pools: *mut GruyerePool,
    room: u32,
    count: *mut u32,
) -> c_int {
    if pools.is_null() || count.is_null() {
        return GRUYERE_INVALID;
    }
    with_heap(|heap| {
        let found = heap.capture_pools(i64::from(device))?;
        for (at, held) in found.iter().take(room as usize).enumerate() {
            // SAFETY: the caller has room for `room` of them, and `at` is less.
            unsafe { pools.add(at).write(held.into()) };
        }
        // SAFETY: the caller's promise; it is not NULL.
        unsafe { count.write(u32::try_from(found.len()).unwrap_or(u32::MAX)) };
        Ok(())
    })
}
