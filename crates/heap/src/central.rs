//! What the streams of a device share, behind one lock: arenas, spans, pools, and the blocks above
//! 16 KiB.

use crate::callers::watched_blocks::Watched;
use crate::driver::DeviceId;
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
use crate::supply::pages::creep::Creep;
use crate::supply::pages::growth::Pace;
use crate::supply::pages::move_time::MoveTime;
use crate::upkeep::phase::Watch;
use gruyere_record::size::Size;
use gruyere_record::{BlockSlot, DeviceGauge, DeviceWriter, ShardWriter};
use std::collections::{BTreeMap, HashMap};

/// The index in [`Central::writers`] of the record's shard of small blocks.
pub(crate) const SMALL: usize = 0;

/// Traits of a heap that follow from its supply and never change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SupplyTraits {
    pub(crate) sizes_apart: bool,
    /// Free runs serve whole or not at all ([`Arenas::whole_runs`]).
    pub(crate) whole_runs: bool,
    /// [`Usage`] counts what is held in pages.
    pub(crate) counts_pages: bool,
    /// Low-memory phases give idle memory back: that blocks no thread.
    pub(crate) gives_back_idle: bool,
}

/// The state behind a device's central lock.
pub(crate) struct Central {
    pub(crate) device: DeviceId,
    pub(crate) arenas: Arenas,
    /// What the driver gave: spans and chunks.
    pub(crate) backing: Backing,
    /// The users of the arenas' spaces, and their rules.
    pub(crate) pools: Pools,
    /// The pool of each CUDA graph.
    pub(crate) captures: Captures,
    /// The record's shards of runs, and of blocks of pools and of `backing:passthrough`: of small
    /// ones (as torch calls them, up to 1 MiB), and of large ones.
    pub(crate) writers: [ShardWriter; 2],
    pub(crate) gauges: DeviceWriter,
    pub(crate) spaces: Spaces,
    /// The other streams that use a live block.
    pub(crate) users: HashMap<RunId, Vec<u32>>,
    /// Blocks in cells where more start than the page table can name, by address.
    pub(crate) overflow: BTreeMap<u64, RunId>,
    /// Large blocks that wait for streams.
    pub(crate) pending: PendingFrees<RunId>,
    /// The value of `freed` at which events are due behind the frees since the last ones.
    pub(crate) fence_at: u64,
    pub(crate) direct: HashMap<u64, Direct>,
    /// Physical memory of the device.
    pub(crate) total_memory: u64,
    /// The highest that reserved bytes have been.
    pub(crate) peak_reserved: u64,
    /// Ceiling on reserved bytes.
    pub(crate) limit: u64,
    /// Growth has used the headroom, because nothing else helped: it stays open until the heap
    /// gives memory back.
    pub(crate) headroom_is_open: bool,
    /// The latest growth failed because the driver had no more addresses, whatever memory there
    /// was.
    pub(crate) addresses_ran_out: bool,
    /// Bytes that may be held beyond the peak of live bytes before idle pages move.
    pub(crate) slack: Option<Size>,
    /// The waits that the allocator has added to streams.
    pub(crate) order: Order,
    /// How long streams were expected to stand idle, uncovered by other work, in the waits added so
    /// far to hold less ([`crate::order::streams::Streams::host_clock`]).
    pub(crate) idled: u64,
    /// Bytes of large blocks freed so far.
    pub(crate) freed: u64,
    /// Bytes of the rows that were asked for beyond the slack so far, retries included.
    pub(crate) lacked: u64,
    /// The recent pace of growth.
    pub(crate) pace: Pace,
    pub(crate) creep: Creep,
    /// What moves may still take of the program's time.
    pub(crate) move_time: MoveTime,
    /// Mallocs that had to try the reclaim ladder.
    pub(crate) retries: u64,
    pub(crate) out_of_memories: u64,
    /// Held memory over time.
    pub(crate) usage: Usage,
    pub(crate) watch: Watch,
    /// What the rungs of the reclaim ladder did.
    pub(crate) ladder: Ladder,
    /// The blocks of another allocator, where this heap only keeps books.
    pub(crate) watched: Watched,
}

impl Central {
    pub(crate) fn new(
        device: DeviceId,
        backing: Backing,
        writers: [ShardWriter; 2],
        gauges: DeviceWriter,
        (total_memory, limit): (u64, u64),
        traits: SupplyTraits,
    ) -> Self {
        let mut arenas = Arenas::default();
        arenas.whole_runs = traits.whole_runs;
        let spaces = Spaces::new(&mut arenas, traits.sizes_apart);
        let usage = Usage::new(traits.counts_pages);
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
            fence_at: 0,
            direct: HashMap::new(),
            total_memory,
            peak_reserved: 0,
            limit,
            headroom_is_open: false,
            addresses_ran_out: false,
            slack: None,
            order: Order::default(),
            idled: 0,
            freed: 0,
            lacked: 0,
            pace: Pace::new(false),
            creep: Creep::default(),
            move_time: MoveTime::default(),
            retries: 0,
            out_of_memories: 0,
            usage,
            watch: Watch::new(false),
            ladder: Ladder::default(),
            watched: Watched::default(),
        }
    }

    /// The largest free run of the ordinary spaces, bytes.
    pub(crate) fn largest_run(&self) -> u64 {
        self.spaces.iter().map(|space| self.arenas.largest_free(space)).max().unwrap_or(0)
    }

    /// What the ceiling still lets the heap take from the driver, bytes in whole pages.
    pub(crate) fn room_left(&self) -> u64 {
        self.limit.saturating_sub(self.backing.reserved) / PAGE * PAGE
    }

    /// Writes what is held to the record, and reports it to the profiler.
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
