//! A stream-ordered pool: one range of addresses, chunks of physical memory mapped in it, best fit
//! over what is mapped, frees in stream order.
//!
//! Blocks may lie across chunks, and before the pool takes memory from the device it moves idle
//! chunks to where they are needed, as NVIDIA describes it ("Using the NVIDIA CUDA Stream-Ordered
//! Memory Allocator", part 1). Five programs of `bench --torch` hold 3.1% less to 3.1% more than in
//! the pools of an H200, and one whose streams overlap 20% less (docs/bench-torch.md).
//! It is conservative where the driver's behaviour is undocumented: freed memory goes to another
//! stream only once the free has completed on the device (no internal or event dependencies), with
//! what the stream freed beside it.

use std::collections::BTreeMap;

use crate::ranges::FreeRanges;
use crate::streams::StreamKey;

/// A pool grows and shrinks by multiples of this, bytes.
pub const POOL_CHUNK: u64 = 32 << 20;
/// Allocations are rounded up to this, bytes.
pub const POOL_ALIGNMENT: u64 = 512;
/// Allocations in multiples of this are aligned to it if there is room, bytes.
const LARGE_ALIGNMENT: u64 = crate::GRANULARITY;

/// Attributes of a pool, as in `CUmemPool_attribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolAttribute {
    /// 1: reuse on another stream once an event dependency orders it. Stored without effect.
    ReuseFollowEventDependencies,
    /// 1: reuse on another stream once the free is complete; 0: only after a host synchronisation.
    ReuseAllowOpportunistic,
    /// 1: the driver may insert waits. Stored without effect.
    ReuseAllowInternalDependencies,
    /// Bytes kept at a synchronisation.
    ReleaseThreshold,
    /// Physical bytes held. Read-only.
    ReservedCurrent,
    /// The highest value since the last reset. Only 0 can be set.
    ReservedHigh,
    /// Bytes handed out. Read-only.
    UsedCurrent,
    /// The highest value since the last reset. Only 0 can be set.
    UsedHigh,
}

/// Contiguous physical memory at an address of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) physical: u64,
}

#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) device: u32,
    /// Address space charged for the pool, bytes.
    pub(crate) address_space: u64,
    /// Upper bound of `reserved`, bytes.
    pub(crate) max_size: u64,
    /// Mask of the devices that may use its memory.
    pub(crate) access: u64,
    pub(crate) reserved: u64,
    pub(crate) used: u64,
    reserved_high: u64,
    used_high: u64,
    threshold: u64,
    follow_events: u64,
    opportunistic: u64,
    internal: u64,
    /// The pool's addresses, from its first growth on.
    pub(crate) arena: Option<(u64, u64)>,
    /// The number of the first physical byte of each chunk, by address.
    chunks: BTreeMap<u64, u64>,
    /// Addresses without memory.
    unmapped: FreeRanges,
    ready: FreeRanges,
    pending: BTreeMap<StreamKey, FreeRanges>,
    /// The blocks handed out: lengths by address.
    live: BTreeMap<u64, u64>,
}

impl Pool {
    pub(crate) fn new(device: u32, max_size: u64, address_space: u64) -> Self {
        Self {
            device,
            address_space,
            max_size,
            access: 1 << device,
            reserved: 0,
            used: 0,
            reserved_high: 0,
            used_high: 0,
            threshold: 0,
            follow_events: 1,
            opportunistic: 1,
            internal: 1,
            arena: None,
            chunks: BTreeMap::new(),
            unmapped: FreeRanges::default(),
            ready: FreeRanges::default(),
            pending: BTreeMap::new(),
            live: BTreeMap::new(),
        }
    }

    pub(crate) fn attribute(&self, attribute: PoolAttribute) -> u64 {
        match attribute {
            PoolAttribute::ReuseFollowEventDependencies => self.follow_events,
            PoolAttribute::ReuseAllowOpportunistic => self.opportunistic,
            PoolAttribute::ReuseAllowInternalDependencies => self.internal,
            PoolAttribute::ReleaseThreshold => self.threshold,
            PoolAttribute::ReservedCurrent => self.reserved,
            PoolAttribute::ReservedHigh => self.reserved_high,
            PoolAttribute::UsedCurrent => self.used,
            PoolAttribute::UsedHigh => self.used_high,
        }
    }

    /// Returns false if the attribute cannot take the value.
    pub(crate) fn set_attribute(&mut self, attribute: PoolAttribute, value: u64) -> bool {
        let policy = match attribute {
            PoolAttribute::ReuseFollowEventDependencies => &mut self.follow_events,
            PoolAttribute::ReuseAllowOpportunistic => &mut self.opportunistic,
            PoolAttribute::ReuseAllowInternalDependencies => &mut self.internal,
            PoolAttribute::ReleaseThreshold => {
                self.threshold = value;
                return true;
            }
            PoolAttribute::ReservedHigh if value == 0 => {
                self.reserved_high = self.reserved;
                return true;
            }
            PoolAttribute::UsedHigh if value == 0 => {
                self.used_high = self.used;
                return true;
            }
            _ => return false,
        };
        *policy = u64::from(value != 0);
        value <= 1
    }

    /// Whether nothing is allocated from it.
    pub(crate) fn is_unused(&self) -> bool {
        self.live.is_empty()
    }

    /// An address for `bytes` (a multiple of [`POOL_ALIGNMENT`]) in the order of `stream` at the
    /// time `now`; `None`: the pool must grow.
    pub(crate) fn alloc(&mut self, bytes: u64, stream: StreamKey, now: u64) -> Option<u64> {
        if self.opportunistic != 0 {
            self.complete_frees(now);
        }
        let align =
            if bytes.is_multiple_of(LARGE_ALIGNMENT) { LARGE_ALIGNMENT } else { POOL_ALIGNMENT };
        self.alloc_aligned(bytes, align, stream).or_else(|| {
            if align == POOL_ALIGNMENT {
                None
            } else {
                self.alloc_aligned(bytes, POOL_ALIGNMENT, stream)
            }
        })
    }

    fn alloc_aligned(&mut self, bytes: u64, align: u64, stream: StreamKey) -> Option<u64> {
        let own = self.pending.get_mut(&stream);
        let own = own.and_then(|ranges| Some((ranges.best_fit(bytes, align)?, ranges)));
        let ready = self.ready.best_fit(bytes, align).map(|fit| (fit, &mut self.ready));
        let (fit, ranges) = match (own, ready) {
            (Some(own), Some(ready)) if ready.0.range.1 < own.0.range.1 => ready,
            (own, ready) => own.or(ready)?,
        };
        ranges.cut(fit, bytes);
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
        self.live.insert(fit.start, bytes);
        Some(fit.start)
    }

    /// The length of the block at `address`.
    pub(crate) fn length_of(&self, address: u64) -> Option<u64> {
        self.live.get(&address).copied()
    }

    /// The block that holds `address`: its first byte and its length.
    pub(crate) fn block_with(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.live.range(..=address).next_back()?;
        (address - start < bytes).then_some((start, bytes))
    }

    /// Number of blocks handed out.
    pub(crate) fn live(&self) -> usize {
        self.live.len()
    }

    /// Frees the block at `address` in the order of `stream`, whose work before the free ends at
    /// `time`.
    pub(crate) fn free(&mut self, address: u64, stream: StreamKey, time: u64, now: u64) {
        let Some(bytes) = self.live.remove(&address) else { return };
        self.used -= bytes;
        if time <= now && self.opportunistic != 0 {
            self.make_ready(address, bytes);
        } else {
            let ranges = self.pending.entry(stream).or_insert_with(FreeRanges::timed);
            ranges.insert(address, bytes, time);
        }
    }

    /// Shares every free that is complete at `now` with all streams.
    pub(crate) fn complete_frees(&mut self, now: u64) {
        let mut done = Vec::new();
        for ranges in self.pending.values_mut() {
            while let Some(range) = ranges.take_ready(now) {
                done.push(range);
            }
        }
        if !done.is_empty() {
            self.pending.retain(|_, ranges| !ranges.is_empty());
        }
        for (address, bytes) in done {
            self.make_ready(address, bytes);
        }
    }

    fn make_ready(&mut self, address: u64, bytes: u64) {
        self.ready.insert(address, bytes, 0);
    }

    /// Gives the pool its addresses.
    pub(crate) fn settle(&mut self, address: u64, bytes: u64) {
        self.arena = Some((address, bytes));
        self.unmapped.insert(address, bytes, 0);
    }

    /// Where chunks are missing for a block of `bytes`, together with what is ready before them,
    /// and how many bytes of them: behind the last chunk; with no addresses left there, in the
    /// smallest gap.
    pub(crate) fn room_for(&self, bytes: u64) -> Option<(u64, u64)> {
        let end = self.chunks.last_key_value().map(|(&last, _)| last + POOL_CHUNK);
        let end = end.or(self.arena.map(|(first, _)| first))?;
        let needed = bytes.checked_next_multiple_of(POOL_CHUNK)?;
        let missing = |at| {
            let before = self.ready.ending_at(at).unwrap_or(0).min(bytes);
            (bytes - before).next_multiple_of(POOL_CHUNK)
        };
        if self.unmapped.length_at(end).is_some_and(|length| missing(end) <= length) {
            return Some((end, missing(end)));
        }
        let fit = self.unmapped.best_fit(needed, POOL_CHUNK)?;
        Some((fit.start, missing(fit.start)))
    }

    /// Maps chunks of `physical` memory at an address of [`Pool::room_for`].
    pub(crate) fn map(&mut self, address: u64, bytes: u64, physical: u64) {
        self.unmapped.take(address, bytes);
        for offset in (0..bytes).step_by(POOL_CHUNK as usize) {
            self.chunks.insert(address + offset, physical + offset);
        }
        self.reserved += bytes;
        self.reserved_high = self.reserved_high.max(self.reserved);
        self.make_ready(address, bytes);
    }

    /// The idle chunks of each ready range, shortest range first: the first address and one past
    /// the last.
    fn idle(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ready.longer_than(POOL_CHUNK).filter_map(|(start, length)| {
            let first = start.next_multiple_of(POOL_CHUNK);
            let end = (start + length) / POOL_CHUNK * POOL_CHUNK;
            (first < end).then_some((first, end))
        })
    }

    /// Removes an idle chunk, highest address first, if at least `keep` bytes stay reserved.
    pub(crate) fn shrink(&mut self, keep: u64) -> Option<Piece> {
        if self.reserved.checked_sub(keep)? < POOL_CHUNK {
            return None;
        }
        let end = self.idle().map(|(_, end)| end).max()?;
        self.unmap(end - POOL_CHUNK)
    }

    /// Bytes of the idle chunks that can move to the address `to`: all but those before it, which
    /// are of use where they are.
    pub(crate) fn movable(&self, to: u64) -> u64 {
        self.idle().filter(|&(_, end)| end != to).map(|(first, end)| end - first).sum()
    }

    /// Removes a chunk that can move to the address `to`.
    pub(crate) fn take_movable(&mut self, to: u64) -> Option<Piece> {
        let (first, _) = self.idle().find(|&(_, end)| end != to)?;
        self.unmap(first)
    }

    fn unmap(&mut self, address: u64) -> Option<Piece> {
        let physical = self.chunks.remove(&address)?;
        self.ready.take(address, POOL_CHUNK);
        self.unmapped.insert(address, POOL_CHUNK, 0);
        self.reserved -= POOL_CHUNK;
        Some(Piece { address, bytes: POOL_CHUNK, physical })
    }

    /// The physical memory of a mapped range, piece by piece.
    pub(crate) fn pieces(&self, address: u64, bytes: u64) -> Vec<Piece> {
        let end = address + bytes;
        let mut pieces: Vec<Piece> = Vec::new();
        let first = address / POOL_CHUNK * POOL_CHUNK;
        for (&chunk, &physical) in self.chunks.range(first..end) {
            let (from, to) = (chunk.max(address), (chunk + POOL_CHUNK).min(end));
            let here = Piece { address: from, bytes: to - from, physical: physical + from - chunk };
            match pieces.last_mut() {
                Some(last) if last.physical + last.bytes == here.physical => {
                    last.bytes += here.bytes;
                }
                _ => pieces.push(here),
            }
        }
        pieces
    }

    /// The release threshold, if more than that is reserved.
    pub(crate) fn above_threshold(&self) -> Option<u64> {
        (self.reserved > self.threshold).then_some(self.threshold)
    }

    /// Every chunk, by address, for the destruction of the pool.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = Piece> + '_ {
        self.chunks.iter().map(|(&address, &physical)| Piece {
            address,
            bytes: POOL_CHUNK,
            physical,
        })
    }

    /// Free bytes that any stream may use now, and the largest range of them.
    pub(crate) fn ready_bytes(&self) -> (u64, u64) {
        (self.ready.iter().map(|(_, bytes)| bytes).sum(), self.ready.largest())
    }
}
