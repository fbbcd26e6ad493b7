//! What the heap says of itself: the numbers of the C call and of the gauges.

use crate::pools::capture::PoolId;
use crate::report::usage::HeldStats;
use gruyere_record::held::Held;
use gruyere_record::missing_share;
use gruyere_record::peaks::BlockStats;

/// Numbers of one device. Bytes where not said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Physical memory of the device.
    pub total_memory: u64,
    /// The ceiling on what may be reserved.
    pub limit: u64,
    /// Physical memory held.
    pub reserved: u64,
    /// Its peak.
    pub reserved_peak: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live: u64,
    /// Their peak.
    pub live_peak: u64,
    /// Freed by the program, waiting for streams.
    pub pending: u64,
    /// Free runs of the arenas.
    pub arena_free: u64,
    /// The largest free run.
    pub largest_free: u64,
    /// Memory of slabs.
    pub slab_bytes: u64,
    /// Free slots in them.
    pub slab_free: u64,
    /// Held for CUDA graphs.
    pub captured: u64,
    /// Times the reclaim ladder was tried.
    pub retries: u64,
    /// Out-of-memory answers.
    pub out_of_memories: u64,
    /// Frees of what was no live block, on all devices.
    pub bad_frees: u64,
    /// Events recorded.
    pub events_recorded: u64,
    /// Events asked about.
    pub events_queried: u64,
    /// Live blocks as they were asked for.
    pub requested: u64,
    /// The largest request that what is held could satisfy, on any stream, once the work on what
    /// was freed is done.
    pub largest_request: u64,
    /// The largest request that could be satisfied if the ceiling is reached for it. By our books:
    /// what others on the device hold is not known here.
    pub largest_growing: u64,
    /// The size that 99 of 100 requests so far do not exceed, within 7%; 0 where the record is off.
    /// From [`Heap::stats`] only.
    pub request_p99: u64,
    /// Times that a low-memory phase gave memory back.
    pub low_phase_trims: u64,
    /// The memory that went back so.
    pub low_phase_bytes: u64,
    /// Free and unable to serve ([`Held::lost`]).
    pub lost: u64,
    /// The request by which that was told; 0: by pages.
    pub typical_request: u64,
}

impl Stats {
    /// What is held, and what of it serves nobody.
    pub fn held(&self) -> Held {
        let Stats { reserved: held, live, pending: waiting, lost, typical_request, .. } = *self;
        Held { held, live, waiting, found_lost: lost, typical_request }
    }

    /// 1 - largest satisfiable request / free bytes held.
    pub fn external_fragmentation(&self) -> f64 {
        missing_share(self.largest_request, self.held().free())
    }

    /// 1 - requested / live.
    pub fn internal_fragmentation(&self) -> f64 {
        missing_share(self.requested, self.live)
    }
}

/// What torch's `memory_stats` tells of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TorchStats {
    /// Numbers of blocks.
    pub blocks: BlockStats,
    /// Numbers of what is held.
    pub held: HeldStats,
    /// The ceiling on what may be reserved (bytes).
    pub limit: u64,
    /// Physical memory of the device (bytes).
    pub total_memory: u64,
}

/// What a capture pool of torch's holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapturePoolHeld {
    /// torch's id.
    pub id: PoolId,
    /// All bytes of the pool.
    pub bytes: u64,
    /// Bytes of slabs.
    pub small: u64,
}
