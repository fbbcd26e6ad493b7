//! What the streams of a device share, behind one lock: arenas, spans, capture pools, and the
//! blocks above 16 KiB.

use crate::callers::watched_blocks::Watched;
use crate::driver::{DeviceId, DriverError};
use crate::order::pending::PendingFrees;
use crate::order::waits::Order;
use crate::pools::Pools;
use crate::pools::capture::Captures;
use crate::profiler;
use crate::report::rungs::Ladder;
use crate::report::usage::Usage;
use crate::runs::arena::{Arenas, RunId};
use crate::runs::spaces::Spaces;
use crate::small::size_class::PAGE;
use crate::supply::backing::Backing;
use crate::supply::pages::growth::Pace;
use crate::upkeep::phase::Watch;
use gruyere_record::size::Size;
use gruyere_record::{BlockSlot, DeviceGauge, DeviceWriter, ShardWriter};
use std::collections::{BTreeMap, HashMap};

/// The record's shard of small blocks among [`Central::writers`].
pub(crate) const SMALL: usize = 0;

/// What is decided for a heap once and for all, because of where its memory comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Habits {
    pub(crate) sizes_apart: bool,
    /// Free runs serve whole or not at all ([`Arenas::whole_runs`]).
    pub(crate) whole_runs: bool,
    /// What is held is counted in pages ([`Usage`]).
    pub(crate) counts_pages: bool,
    /// Low-memory phases give idle memory back: nobody waits for that.
    pub(crate) gives_back_idle: bool,
}

/// Everything behind a device's central lock.
pub(crate) struct Central {
    pub(crate) device: DeviceId,
    pub(crate) arenas: Arenas,
    /// What the driver gave: spans and chunks.
    pub(crate) backing: Backing,
    /// Who uses the spaces of the arenas, and how.
    pub(crate) pools: Pools,
    /// Which pool a CUDA graph has.
    pub(crate) captures: Captures,
    /// The record's shards of runs, and of blocks of pools and of `backing:passthrough`: of small
    /// ones (as torch calls them, up to 1 MiB), and of large ones.
    pub(crate) writers: [ShardWriter; 2],
    /// The record's gauges of the device.
    pub(crate) gauges: DeviceWriter,
    pub(crate) spaces: Spaces,
    /// The other streams that use a live block.
    pub(crate) users: HashMap<RunId, Vec<u32>>,
    /// The blocks of cells in which more start than the page table can name, by address.
    pub(crate) overflow: BTreeMap<u64, RunId>,
    /// Large blocks that wait for streams.
    pub(crate) pending: PendingFrees<RunId>,
    /// Bytes that have begun to wait for streams since [`Central::fence_due`] was true.
    pub(crate) unfenced_bytes: u64,
    pub(crate) direct: HashMap<u64, Direct>,
    /// Physical memory of the device.
    pub(crate) total_memory: u64,
    /// The most that was ever reserved.
    pub(crate) peak_reserved: u64,
    /// Ceiling on reserved bytes.
    pub(crate) limit: u64,
    /// The headroom has been touched, because nothing else helped: it may be used until memory is
    /// given back.
    pub(crate) headroom_is_open: bool,
    /// Why the driver failed in the latest growth, where it was not out of memory.
    pub(crate) failure: Option<DriverError>,
    /// The latest growth failed because the driver had no more addresses, whatever memory there
    /// was.
    pub(crate) addresses_ran_out: bool,
    /// What may be held beyond the peak of live bytes before idle pages are moved.
    pub(crate) slack: Option<Size>,
    /// What streams have been made to wait for.
    pub(crate) order: Order,
    /// Bytes of large blocks freed so far.
    pub(crate) freed: u64,
    /// How it has grown of late.
    pub(crate) pace: Pace,
    /// Times that a malloc had to try the reclaim ladder.
    pub(crate) retries: u64,
    pub(crate) out_of_memories: u64,
    /// What was held, over time.
    pub(crate) usage: Usage,
    pub(crate) watch: Watch,
    /// What the rungs of the reclaim ladder did.
    pub(crate) ladder: Ladder,
    /// The blocks of another allocator, where this heap only keeps books.
    pub(crate) watched: Watched,
}

impl Central {
    /// The central part of a device that holds nothing yet.
    pub(crate) fn new(
        device: DeviceId,
        backing: Backing,
        writers: [ShardWriter; 2],
        gauges: DeviceWriter,
        (total_memory, limit): (u64, u64),
        habits: Habits,
    ) -> Self {
        let mut arenas = Arenas::default();
        arenas.whole_runs = habits.whole_runs;
        let spaces = Spaces::new(&mut arenas, habits.sizes_apart);
        let usage = Usage::new(habits.counts_pages);
        Self {
            device,
            arenas,
            backing,
            pools: Pools::new(&spaces),
            captures: Captures::default(),
            writers,
            gauges,
            spaces,
            users: HashMap::new(),
            overflow: BTreeMap::new(),
            pending: PendingFrees::default(),
            unfenced_bytes: 0,
            direct: HashMap::new(),
            total_memory,
            peak_reserved: 0,
            limit,
            headroom_is_open: false,
            failure: None,
            addresses_ran_out: false,
            slack: None,
            order: Order::default(),
            freed: 0,
            pace: Pace::new(false),
            retries: 0,
            out_of_memories: 0,
            usage,
            watch: Watch::new(false),
            ladder: Ladder::default(),
            watched: Watched::default(),
        }
    }

    /// The largest free run of the ordinary spaces (bytes).
    pub(crate) fn largest_run(&self) -> u64 {
        self.spaces.iter().map(|space| self.arenas.largest_free(space)).max().unwrap_or(0)
    }

    /// What may still be taken from the driver under the ceiling (bytes, whole pages).
    pub(crate) fn room_left(&self) -> u64 {
        self.limit.saturating_sub(self.backing.reserved) / PAGE * PAGE
    }

    /// Tells the record what is held.
    pub(crate) fn publish_reserved(&mut self) {
        let reserved = self.backing.reserved;
        profiler::reserved(self.device, reserved);
        self.peak_reserved = self.peak_reserved.max(reserved);
        self.usage.hold(reserved, self.backing.pieces);
        self.gauges.set(&[
            (DeviceGauge::Reserved, reserved),
            (DeviceGauge::ReservedPeak, self.peak_reserved),
            (DeviceGauge::DriverCalls, self.backing.calls),
            (DeviceGauge::DriverErrors, self.backing.errors),
        ]);
        self.gauges.sample(self.arenas.sample_busy_peak());
    }
}

pub(crate) struct Direct {
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) lifetime: u8,
    pub(crate) slot: BlockSlot,
}
