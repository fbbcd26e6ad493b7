//! A stream-ordered pool: chunks of physical memory, best fit inside them, frees in stream order.
//!
//! Conservative where the driver's behaviour is undocumented: no packing across chunks, no
//! remapping, and freed memory goes to another stream only once the free has completed on the
//! device (no internal or event dependencies).

use std::collections::{BTreeMap, BTreeSet};

use crate::ranges::{Fit, FreeRanges};
use crate::streams::StreamKey;

/// A pool grows and shrinks by multiples of this, bytes.
pub const POOL_CHUNK: u64 = 32 << 20;
/// Allocations are rounded up to this, bytes.
pub const POOL_ALIGNMENT: u64 = 512;
/// Allocations in multiples of this are aligned to it if a chunk has room, bytes.
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

#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
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
    chunks: BTreeMap<u64, Chunk>,
    /// Chunks with nothing in use and no pending free.
    idle: BTreeSet<u64>,
    ready: FreeRanges,
    pending: BTreeMap<StreamKey, FreeRanges>,
    live: usize,
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
            chunks: BTreeMap::new(),
            idle: BTreeSet::new(),
            ready: FreeRanges::default(),
            pending: BTreeMap::new(),
            live: 0,
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
        self.live == 0
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
        let own = self.pending.get(&stream).and_then(|ranges| ranges.best_fit(bytes, align));
        let ready = self.ready.best_fit(bytes, align);
        let fit = match (own, ready) {
            (Some(own), Some(ready)) if ready.range.1 < own.range.1 => self.cut_ready(ready, bytes),
            (Some(own), _) => self.cut_pending(own, bytes, stream),
            (None, Some(ready)) => self.cut_ready(ready, bytes),
            (None, None) => return None,
        };
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
        self.live += 1;
        Some(fit.start)
    }

    fn cut_ready(&mut self, fit: Fit, bytes: u64) -> Fit {
        if let Some((base, _)) = self.chunk_of(fit.start) {
            self.idle.remove(&base);
        }
        self.ready.cut(fit, bytes);
        fit
    }

    fn cut_pending(&mut self, fit: Fit, bytes: u64, stream: StreamKey) -> Fit {
        if let Some(ranges) = self.pending.get_mut(&stream) {
            ranges.cut(fit, bytes);
        }
        fit
    }

    /// Frees `bytes` at `address` in the order of `stream`, whose work before the free ends at
    /// `time`.
    pub(crate) fn free(
        &mut self,
        address: u64,
        bytes: u64,
        stream: StreamKey,
        time: u64,
        now: u64,
    ) {
        self.used -= bytes;
        self.live -= 1;
        if time <= now && self.opportunistic != 0 {
            self.make_ready(address, bytes);
        } else if let Some((base, chunk)) = self.chunk_of(address) {
            let bounds = (base, base + chunk.bytes);
            self.pending
                .entry(stream)
                .or_insert_with(FreeRanges::timed)
                .insert(address, bytes, time, bounds);
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
        let Some((base, chunk)) = self.chunk_of(address) else { return };
        if self.ready.insert(address, bytes, 0, (base, base + chunk.bytes)) == (base, chunk.bytes) {
            self.idle.insert(base);
        }
    }

    /// The chunk that holds `address`, with its first address.
    pub(crate) fn chunk_of(&self, address: u64) -> Option<(u64, Chunk)> {
        let (&base, &chunk) = self.chunks.range(..=address).next_back()?;
        (address - base < chunk.bytes).then_some((base, chunk))
    }

    pub(crate) fn grow(&mut self, address: u64, chunk: Chunk) {
        self.chunks.insert(address, chunk);
        self.reserved += chunk.bytes;
        self.reserved_high = self.reserved_high.max(self.reserved);
        self.make_ready(address, chunk.bytes);
    }

    /// Removes an idle chunk, highest address first, if at least `keep` bytes stay reserved.
    pub(crate) fn shrink(&mut self, keep: u64) -> Option<(u64, Chunk)> {
        let room = self.reserved.checked_sub(keep)?;
        let base = self.idle.iter().rev().copied().find(|base| self.chunks[base].bytes <= room)?;
        let chunk = self.chunks.remove(&base)?;
        self.idle.remove(&base);
        self.ready.take_exact(base, chunk.bytes);
        self.reserved -= chunk.bytes;
        Some((base, chunk))
    }

    /// The release threshold, if more than that is reserved.
    pub(crate) fn above_threshold(&self) -> Option<u64> {
        (self.reserved > self.threshold).then_some(self.threshold)
    }

    /// Every chunk, by address, for the destruction of the pool.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = (u64, Chunk)> + '_ {
        self.chunks.iter().map(|(&address, &chunk)| (address, chunk))
    }

    /// Free bytes that any stream may use now, and the largest range of them.
    pub(crate) fn ready_bytes(&self) -> (u64, u64) {
        (self.ready.iter().map(|(_, bytes)| bytes).sum(), self.ready.largest())
    }
}
