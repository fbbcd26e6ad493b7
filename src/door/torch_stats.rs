//! Numbers that make torch's own functions tell the truth: statistics by pool with peaks and
//! resets, and the memory layout.
//!
//! Any thread may call every function; torch calls none of them, so in a forked child each returns
//! its failure value. The Python package wires them (`gruyere._torch_stats`).

use super::begin::heap;
use super::fork;
use super::process::{current, guarded};
use crate::heap::snapshot::{Segment, Snapshot};
use crate::heap::{CapturePoolHeld, Error, Heap, PoolId};
use crate::record::peaks::Stat;
use std::ffi::c_int;

use super::process::{GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE};

/// One number over time.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereStat {
    /// Now.
    pub current: u64,
    /// The highest since the last `gruyere_reset_peaks`.
    pub peak: u64,
    /// All that came since the last `gruyere_reset_accumulated`.
    pub allocated: u64,
    /// All that went since then.
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

/// What `torch.cuda.memory_stats` tells. The arrays are by pool: all, blocks of up to 1 MiB, larger
/// ones. Later versions add fields at the end only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereTorchStats {
    /// In: the bytes that the caller has room for. Out: the bytes that were written.
    pub size: u32,
    /// Out: the version that the library has.
    pub version: u32,
    /// Blocks in the program's hands.
    pub allocation: [GruyereStat; 3],
    /// Pieces of memory that the driver gave: pages, spans, or blocks, by the backing. Pages of
    /// slabs are small; spans may serve both, and are large.
    pub segment: [GruyereStat; 3],
    /// Blocks in the program's hands, or freed and waiting for streams.
    pub active: [GruyereStat; 3],
    /// Free pieces that cannot be given back, since a used one shares their page or span. Known
    /// when somebody looks: a peak is the highest that was seen by a call of this function.
    pub inactive_split: [GruyereStat; 3],
    /// Bytes of `allocation`, each block rounded up to 512.
    pub allocated_bytes: [GruyereStat; 3],
    /// Bytes of `segment`.
    pub reserved_bytes: [GruyereStat; 3],
    /// Bytes of `active`, rounded.
    pub active_bytes: [GruyereStat; 3],
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: [GruyereStat; 3],
    /// Bytes of `active` as asked for.
    pub requested_bytes: [GruyereStat; 3],
    /// Times that the reclaim ladder was climbed, since the last `gruyere_reset_accumulated`.
    pub num_alloc_retries: u64,
    /// Out-of-memory answers since then.
    pub num_ooms: u64,
    /// Times since then that the whole device was synchronised to get memory back.
    pub num_sync_all_streams: u64,
    /// Pieces of memory taken from the driver since then.
    pub num_device_alloc: u64,
    /// Pieces given back since then.
    pub num_device_free: u64,
    /// The ceiling on what may be reserved, in bytes.
    pub limit: u64,
    /// Physical memory of the device, in bytes.
    pub total_memory: u64,
}

/// Writes what `torch.cuda.memory_stats` tells of `device` to `*stats`, whose `size` the caller has
/// set; as much as fits.
///
/// 0; -1: the library cannot work here; -2: no such device, or `size` is less than 8.
///
/// # Safety
/// `stats` is NULL, or `stats->size` bytes there may be written.
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

/// The peaks of [`gruyere_torch_stats`] begin again at what there is now; those of `gruyere_stats`
/// are of the whole life of the process.
///
/// 0; -1: the library cannot work here; -2: no such device.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_reset_peaks(device: c_int) -> c_int {
    with_heap(|heap| heap.reset_peaks(i64::from(device)))
}

/// What [`gruyere_torch_stats`] accumulates (`allocated`, `freed` and the `num_` fields) begins
/// again at 0.
///
/// 0; -1: the library cannot work here; -2: no such device.
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

/// What a capture pool holds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyerePool {
    /// torch's id of it, the first number.
    pub first: u64,
    /// The second.
    pub second: u64,
    /// Bytes.
    pub bytes: u64,
    /// Of these, in slabs: for small blocks, up to 16 KiB.
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

/// A contiguous range of memory held: a span, a row of mapped pages, a block that the driver gave.
/// [`GruyereBlock`]s tile it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereSegment {
    /// First byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// torch's id of the capture pool that it belongs to, or 0 and 0.
    pub pool_first: u64,
    /// See `pool_first`.
    pub pool_second: u64,
    /// Its first block, an index into the snapshot's blocks.
    pub first_block: u64,
    /// The number of its blocks.
    pub block_count: u64,
    /// 1: it serves blocks of up to 1 MiB, and no larger one; what is free in it does not count.
    pub small: u32,
    /// 1: it grows and shrinks page by page.
    pub stitched: u32,
}

/// A piece of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GruyereBlock {
    /// First byte.
    pub address: u64,
    /// Length in bytes, a multiple of 512.
    pub bytes: u64,
    /// Bytes that the program asked for; 0 where it is nobody's.
    pub requested: u64,
    /// The stream's handle; of free memory, that of the stream whose it is, or 0.
    pub stream: u64,
    /// 0: free; 1: the program's; 2: freed by the program, and waiting for streams.
    pub state: u32,
    /// Always 0.
    pub room: u32,
}

/// What lies where on a device. Later versions add fields at the end of each struct only: step
/// through the arrays by the sizes given here.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereSnapshot {
    /// Bytes of this struct.
    pub size: u32,
    /// Its version.
    pub version: u32,
    /// Bytes of a segment.
    pub segment_size: u32,
    /// Bytes of a block.
    pub block_size: u32,
    /// By address.
    pub segments: *const GruyereSegment,
    /// How many.
    pub segment_count: u64,
    /// By segment, then by address.
    pub blocks: *const GruyereBlock,
    /// How many.
    pub block_count: u64,
    /// Capture pools.
    pub pools: *const GruyerePool,
    /// How many.
    pub pool_count: u64,
    /// Bytes held that are mapped nowhere, so in no segment.
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

/// What lies where on `device` now, to be given to [`gruyere_snapshot_free`] once. Lanes are looked
/// at one after the other, so beside threads that allocate meanwhile its parts are some
/// microseconds apart.
///
/// NULL: nothing has been allocated in this process, or there is no such device.
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

/// Frees a snapshot and all that it points to. NULL is fine.
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

/// Writes what each capture pool of `device` holds to `pools`, at most `room` of them, and how many
/// there are to `*count`. Cheap, where [`gruyere_snapshot`] looks at every block.
///
/// 0; -1: the library cannot work here; -2: no such device, or a NULL.
///
/// # Safety
/// `pools` is NULL, or has room for `room` of them; `count` is NULL or may be written.
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
