//! Gauges: counters of a shard, facts and gauges of a device.

use crate::histogram::Buckets;
use crate::layout::Shared;
use crate::seqlock::Sequence;
use crate::shard_ring::ShardRingHead;
use crate::sync::{AtomicU64, Ordering, bump};
use crate::totals::ShardTotals;
use crate::{DEVICE_GAUGES, DeviceGauge, LIFETIMES, SHARDS};

/// torch calls blocks up to this size small.
pub const SMALL_LIMIT: u64 = 1 << 20;
/// Blocks up to this size (bytes) lie in slabs.
pub const IN_SLABS: u64 = 16 << 10;

/// Blocks that came, or that went: the sequence's count of writes is their number. Bytes only grow.
#[repr(C)]
#[derive(Debug, Default)]
struct Flow {
    sequence: Sequence,
    bytes: AtomicU64,
    requested: AtomicU64,
}

impl Flow {
    /// Counts a block. Four instructions.
    #[inline(always)]
    fn count(&self, size: u64, requested: u64) {
        self.sequence.write(|| {
            bump(&self.bytes, size);
            bump(&self.requested, requested);
        });
    }

    fn read(&self) -> (u64, u64, u64) {
        (
            self.sequence.writes(),
            self.bytes.load(Ordering::Relaxed),
            self.requested.load(Ordering::Relaxed),
        )
    }
}

/// Blocks of one lifetime in one shard, on one cache line. Live is came less went. One line, so
/// that a reader gets it whole in one transfer and a busy writer seldom makes it retry.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct BlockGauges {
    came: Flow,
    went: Flow,
    /// Correction of the number in the sequence of `came`, wrapping: blocks that came under one
    /// lifetime and belong to another.
    moved: AtomicU64,
    _room: AtomicU64,
}

/// Blocks freed by the program and waiting for streams; as [`BlockGauges`].
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct PendingGauges {
    sequence: Sequence,
    begun: AtomicU64,
    begun_bytes: AtomicU64,
    ended: AtomicU64,
    ended_bytes: AtomicU64,
    _room: [AtomicU64; 3],
}

/// One shard's area: totals, the head of its event ring, gauges by lifetime. Its blocks are of one
/// pool: large in the last shard, small in all others. The writer is the holder of the shard's heap
/// lock. In one piece, so that the hot path needs one pointer to it.
#[repr(C, align(64))]
pub struct Shard {
    /// Live bytes.
    pub totals: ShardTotals,
    /// Head of the shard's event ring.
    pub ring: ShardRingHead,
    blocks: [BlockGauges; LIFETIMES],
    pending: [PendingGauges; LIFETIMES],
    /// 1: the shard's [`ShardSizes`] are allocated. Set once by its writer, when the first block
    /// comes or goes.
    pub has_sizes: AtomicU64,
    _room: [AtomicU64; 7],
}

/// One shard's histograms of sizes, of mallocs and of frees, written by the shard's writer. Apart
/// from the shard, since most shards are never used.
#[repr(C, align(64))]
pub struct ShardSizes(pub [Buckets; 2]);

/// A device's part of the record, 2 KiB: facts, totals, gauges.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct DeviceArea {
    /// Bytes of the name.
    name_bytes: AtomicU64,
    name: [AtomicU64; 32],
    uuid: [AtomicU64; 2],
    total_memory: AtomicU64,
    /// The highest live bytes ever over all shards ([`crate::totals`]). Written under the device's
    /// mutex.
    pub live_peak: AtomicU64,
    /// For peaks by pool.
    _peaks: [AtomicU64; 3],
    sequence: Sequence,
    gauges: [AtomicU64; 63],
    /// Allocated cells of the device's timeline, from the first on; 0: none. Only grows, under the
    /// device's lock.
    pub timeline_cells: AtomicU64,
    _room: [AtomicU64; 23],
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<BlockGauges>() == 64 && size_of::<PendingGauges>() == 64);
    assert!(size_of::<Shard>() == 128 + 512 + 64 && size_of::<ShardSizes>() == 8192);
    assert!(size_of::<DeviceArea>() == 1024);
    assert!(DEVICE_GAUGES <= 63);
};

// SAFETY: repr(C), atomics throughout.
unsafe impl Shared for Shard {}
// SAFETY: as above.
unsafe impl Shared for ShardSizes {}
// SAFETY: as above.
unsafe impl Shared for DeviceArea {}

/// Counters of one [`BlockGauges`] and its [`PendingGauges`], or of a sum of them. They only grow;
/// `saturating_sub`, because different shards are read at different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Blocks ever handed out.
    pub mallocs: u64,
    /// Their bytes, rounded.
    pub malloc_bytes: u64,
    /// Their bytes as asked for.
    pub malloc_requested: u64,
    /// Blocks freed by the program.
    pub frees: u64,
    /// Their bytes, rounded.
    pub free_bytes: u64,
    /// Their bytes as asked for.
    pub free_requested: u64,
    /// Freed blocks that ever had to wait for streams.
    pub pending_begun: u64,
    /// Their bytes.
    pub pending_begun_bytes: u64,
    /// Blocks whose wait is over.
    pub pending_ended: u64,
    /// Their bytes.
    pub pending_ended_bytes: u64,
}

impl BlockCounts {
    /// Blocks live.
    pub fn live_blocks(&self) -> u64 {
        self.mallocs.wrapping_sub(self.frees)
    }
    /// Bytes live, rounded.
    pub fn live_bytes(&self) -> u64 {
        self.malloc_bytes.wrapping_sub(self.free_bytes)
    }
    /// Bytes live as asked for.
    pub fn live_requested(&self) -> u64 {
        self.malloc_requested.wrapping_sub(self.free_requested)
    }
    /// Freed blocks waiting for streams.
    pub fn pending_blocks(&self) -> u64 {
        self.pending_begun.wrapping_sub(self.pending_ended)
    }
    /// Their bytes.
    pub fn pending_bytes(&self) -> u64 {
        self.pending_begun_bytes.wrapping_sub(self.pending_ended_bytes)
    }
    fn words(&mut self) -> [&mut u64; 10] {
        [
            &mut self.mallocs,
            &mut self.malloc_bytes,
            &mut self.malloc_requested,
            &mut self.frees,
            &mut self.free_bytes,
            &mut self.free_requested,
            &mut self.pending_begun,
            &mut self.pending_begun_bytes,
            &mut self.pending_ended,
            &mut self.pending_ended_bytes,
        ]
    }
    /// Adds another's counters to these.
    pub fn add(&mut self, mut other: BlockCounts) {
        for (mine, theirs) in self.words().into_iter().zip(other.words()) {
            *mine = mine.wrapping_add(*theirs);
        }
    }
}

/// The pool of a block of `size` bytes: 0 small, 1 large.
#[inline(always)]
pub fn pool_of(size: u64) -> usize {
    usize::from(size > SMALL_LIMIT)
}

/// The pool of shard `number`: 0 small, 1 large.
pub fn pool_of_shard(number: usize) -> usize {
    usize::from(number == SHARDS - 1)
}

#[inline(always)]
fn cell(lifetime: u8) -> usize {
    usize::from(lifetime) % LIFETIMES
}

impl Shard {
    /// A block became live.
    #[inline(always)]
    pub fn malloc(&self, size: u64, requested: u64, lifetime: u8) {
        self.blocks[cell(lifetime)].came.count(size, requested);
    }

    /// Moves a live block to another lifetime. Sums over lifetimes stay; one lifetime's counters
    /// may fall.
    pub fn retag(&self, size: u64, requested: u64, from: u8, to: u8) {
        let BlockGauges { came, moved, .. } = &self.blocks[cell(from)];
        came.sequence.write(|| {
            bump(&came.bytes, size.wrapping_neg());
            bump(&came.requested, requested.wrapping_neg());
            // The sequence counts this as a block that came.
            bump(moved, 2u64.wrapping_neg());
        });
        self.blocks[cell(to)].came.count(size, requested);
    }

    /// The program freed a block; as [`Shard::malloc`].
    #[inline(always)]
    pub fn free(&self, size: u64, requested: u64, lifetime: u8) {
        self.blocks[cell(lifetime)].went.count(size, requested);
    }

    /// A freed block begins to wait.
    pub fn pending(&self, size: u64, lifetime: u8) {
        let gauges = &self.pending[cell(lifetime)];
        gauges.sequence.write(|| {
            bump(&gauges.begun, 1);
            bump(&gauges.begun_bytes, size);
        });
    }

    /// Its wait is over.
    pub fn pending_over(&self, size: u64, lifetime: u8) {
        let gauges = &self.pending[cell(lifetime)];
        gauges.sequence.write(|| {
            bump(&gauges.ended, 1);
            bump(&gauges.ended_bytes, size);
        });
    }

    /// The counters of `lifetime`, and whether they are whole. If not (the writer was killed
    /// half-way, or never paused in `attempts`), they may be of different moments.
    pub fn read(&self, lifetime: usize, attempts: u32) -> (BlockCounts, bool) {
        let cell = lifetime % LIFETIMES;
        let (blocks, pending) = (&self.blocks[cell], &self.pending[cell]);
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let count = || {
            let (came, malloc_bytes, malloc_requested) = blocks.came.read();
            let mallocs = came.wrapping_add(get(&blocks.moved));
            let (frees, free_bytes, free_requested) = blocks.went.read();
            BlockCounts {
                mallocs,
                malloc_bytes,
                malloc_requested,
                frees,
                free_bytes,
                free_requested,
                ..BlockCounts::default()
            }
        };
        let wait = || BlockCounts {
            pending_begun: get(&pending.begun),
            pending_begun_bytes: get(&pending.begun_bytes),
            pending_ended: get(&pending.ended),
            pending_ended_bytes: get(&pending.ended_bytes),
            ..BlockCounts::default()
        };
        // Came and went are of one moment.
        let counted = blocks.came.sequence.read_with(&blocks.went.sequence, attempts, count);
        let waiting = pending.sequence.read(attempts, wait);
        let whole = counted.is_some() && waiting.is_some();
        let mut counts = counted.unwrap_or_else(count);
        counts.add(waiting.unwrap_or_else(wait));
        (counts, whole)
    }
}

/// Facts of a device, for a reader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFactsRead {
    /// The driver's name of it.
    pub name: String,
    /// The driver's identity of it.
    pub uuid: [u8; 16],
    /// Physical bytes.
    pub total_memory: u64,
}

impl DeviceArea {
    /// Writes the facts, before the record is published.
    pub fn write_facts(&self, facts: &crate::DeviceFacts) {
        crate::facts::store_text(&self.name_bytes, &self.name, &facts.name);
        let (low, high) = facts.uuid.split_at(8);
        for (word, bytes) in self.uuid.iter().zip([low, high]) {
            word.store(
                bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)),
                Ordering::Relaxed,
            );
        }
        self.total_memory.store(facts.total_memory, Ordering::Relaxed);
    }

    /// Reads the facts.
    pub fn read_facts(&self) -> DeviceFactsRead {
        let mut uuid = [0; 16];
        for (bytes, word) in uuid.chunks_mut(8).zip(&self.uuid) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        DeviceFactsRead {
            name: crate::facts::load_text(&self.name_bytes, &self.name),
            uuid,
            total_memory: self.total_memory.load(Ordering::Relaxed),
        }
    }

    /// Sets gauges, which readers see together.
    #[inline]
    pub fn set(&self, values: &[(DeviceGauge, u64)]) {
        self.sequence.write(|| {
            for &(gauge, value) in values {
                self.gauges[gauge as usize].store(value, Ordering::Relaxed);
            }
        });
    }

    /// Adds to a gauge.
    pub fn add(&self, gauge: DeviceGauge, n: u64) {
        self.sequence.write(|| bump(&self.gauges[gauge as usize], n));
    }

    /// A gauge, for its writer.
    pub fn own(&self, gauge: DeviceGauge) -> u64 {
        self.gauges[gauge as usize].load(Ordering::Relaxed)
    }

    /// All gauges at one moment; `None` when torn.
    pub fn read(&self, attempts: u32) -> Option<[u64; DEVICE_GAUGES]> {
        self.sequence
            .read(attempts, || std::array::from_fn(|i| self.gauges[i].load(Ordering::Relaxed)))
    }

    /// All gauges, maybe of different moments: the last values of a torn record.
    pub fn read_torn(&self) -> [u64; DEVICE_GAUGES] {
        std::array::from_fn(|i| self.gauges[i].load(Ordering::Relaxed))
    }
}
