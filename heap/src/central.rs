//! What the streams of a device share, behind one lock: arenas, spans, capture pools, and the
//! blocks above 16 KiB.

mod addresses;
mod direct;
pub(crate) mod moves;
mod pools;
mod regions;

use crate::callers::watched_blocks::Watched;
use crate::driver::{DeviceId, DriverError};
use crate::order::pending::PendingFrees;
use crate::order::streams::{ALL_STREAMS, Streams};
use crate::order::waits::Order;
use crate::path::rungs::Ladder;
use crate::pools::Pools;
use crate::pools::capture::Captures;
use crate::profiler;
use crate::report::usage::Usage;
use crate::runs::arena::{Arenas, Run, RunId, RunState, SpaceId};
use crate::runs::page_table::Page;
use crate::runs::spaces::Spaces;
use crate::small::size_class::PAGE;
use crate::small::slab::Slab;
use crate::supply::backing::Backing;
use crate::supply::growth::Pace;
use crate::upkeep::phase::Watch;
use gruyere_record::size::Size;
use gruyere_record::{
    Block, BlockSlot, BlockTag, DeviceGauge, DeviceWriter, EventKind, ShardWriter, bucket_of,
    gauges::pool_of,
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The record's shard of small blocks among [`Central::writers`].
pub(crate) const SMALL: usize = 0;
/// What only a graph or a named pool can use grows by at most this part of what it holds more than
/// it needs: idle, it is lost to all others.
const OWN_SHARE: u64 = 8;

/// A block of `backing:passthrough`.
struct Direct {
    size: u64,
    requested: u64,
    lifetime: u8,
    slot: BlockSlot,
}

/// What is decided for a heap once and for all, because of where its memory comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Habits {
    /// Sizes lie apart ([`Spaces`]).
    pub sizes_apart: bool,
    /// Free runs serve whole or not at all ([`Arenas::whole_runs`]).
    pub whole_runs: bool,
    /// What is held is counted in pages ([`Usage`]).
    pub counts_pages: bool,
    /// Low-memory phases give idle memory back: nobody waits for that.
    pub gives_back_idle: bool,
}

/// Everything behind a device's central lock.
pub struct Central {
    pub(crate) device: DeviceId,
    /// Runs of all spaces.
    pub arenas: Arenas,
    /// What the driver gave: spans and chunks.
    pub backing: Backing,
    /// Who uses the spaces of the arenas, and how.
    pub pools: Pools,
    /// Which pool a CUDA graph has.
    pub captures: Captures,
    /// The record's shards of runs, and of blocks of pools and of `backing:passthrough`: of small
    /// ones (as torch calls them, up to 1 MiB), and of large ones.
    pub writers: [ShardWriter; 2],
    /// The record's gauges of the device.
    pub gauges: DeviceWriter,
    /// The ordinary spaces.
    pub spaces: Spaces,
    /// The other streams that use a live block.
    users: HashMap<RunId, Vec<u32>>,
    /// The blocks of cells in which more start than the page table can name, by address.
    pub(crate) overflow: BTreeMap<u64, RunId>,
    /// Large blocks that wait for streams.
    pub(crate) pending: PendingFrees<RunId>,
    /// Bytes that have begun to wait for streams since [`Central::fence_due`] was true.
    pub(crate) unfenced_bytes: u64,
    direct: HashMap<u64, Direct>,
    /// Physical memory of the device.
    pub(crate) total_memory: u64,
    /// The most that was ever reserved.
    pub peak_reserved: u64,
    /// Ceiling on reserved bytes.
    pub limit: u64,
    /// The headroom has been touched, because nothing else helped: it may be used until memory is
    /// given back.
    pub headroom_is_open: bool,
    /// Why the driver failed in the latest growth, where it was not out of memory.
    pub failure: Option<DriverError>,
    /// The latest growth failed because the driver had no more addresses, whatever memory there
    /// was.
    pub addresses_ran_out: bool,
    /// What may be held beyond the peak of live bytes before idle pages are moved.
    pub slack: Option<Size>,
    /// What streams have been made to wait for.
    pub order: Order,
    /// Bytes of large blocks freed so far.
    pub freed: u64,
    /// How it has grown of late.
    pub pace: Pace,
    /// Times that a malloc had to try the reclaim ladder.
    pub retries: u64,
    /// Out-of-memory answers.
    pub out_of_memories: u64,
    /// What was held, over time.
    pub usage: Usage,
    /// Low-memory phases.
    pub watch: Watch,
    /// What the rungs of the reclaim ladder did.
    pub ladder: Ladder,
    /// The blocks of another allocator, where this heap only keeps books.
    pub(crate) watched: Watched,
}

impl Central {
    /// The central part of a device that holds nothing yet.
    pub fn new(
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

    /// How much more than it needs `space` may grow by at most (bytes, whole pages).
    pub(crate) fn longest_step(&self, space: SpaceId) -> u64 {
        if self.spaces.is_ordinary(space) {
            return u64::MAX;
        }
        self.arenas.held_bytes(space) / OWN_SHARE / PAGE * PAGE
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
    pub fn publish_reserved(&mut self) {
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

    /// Frees the large block that starts at `address` in `page`, and tells the record; it is not
    /// reused before its users and stream `also` are past this moment. `None`: no large block
    /// starts there.
    #[inline(always)]
    pub fn free_large(
        &mut self,
        page: Page<'_>,
        streams: &Streams,
        address: u64,
        time: u64,
        also: Option<u32>,
    ) -> Option<()> {
        let arenas = &self.arenas;
        let (id, run) = match page.remove_block(|id| block_at(arenas, id, address)) {
            Some(found) => found,
            None => {
                let id = self.remove_from_overflow(page, address)?;
                (id, self.arenas.run(id)?)
            }
        };
        let (size, requested) = (run.bytes, run.requested());
        let Run { stream, lifetime, slot, shared, region, .. } = *run;
        self.freed += size;
        let also = also.filter(|&user| user != stream || user == ALL_STREAMS);
        let (waits, apart) = (shared || also.is_some(), self.pools.has_apart());
        if waits || apart {
            let frozen = apart && self.note_free_apart(self.arenas.region(region).space, size);
            if waits || frozen {
                self.free_pending(streams, id, also, frozen);
                let writer = &mut self.writers[pool_of(size)];
                writer.block_pending(slot, size, requested, lifetime);
                writer.event(EventKind::Free, lifetime, stream, address, size, time);
                return Some(());
            }
        }
        let tag = BlockTag::new(self.device as u8, lifetime, 0, stream);
        // Before the run is merged: what the record needs is at hand, and need not be kept through
        // that.
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        self.usage.block_given(size);
        self.writers[pool_of(size)].free(slot, block, time);
        self.arenas.release_block(id, streams)?;
        Some(())
    }

    /// Makes the block wait for its users and `also`; for ever, if it is `frozen`.
    #[cold]
    fn free_pending(&mut self, streams: &Streams, id: RunId, also: Option<u32>, frozen: bool) {
        let Some(run) = self.arenas.run_mut(id) else { return };
        run.state = RunState::Pending;
        let Run { bytes, stream, shared, .. } = *run;
        // All streams together have no work of their own that it could lie behind.
        let own = (stream, if stream == ALL_STREAMS { 0 } else { streams.note_free(stream) });
        let users = if shared { self.users.remove(&id).unwrap_or_default() } else { Vec::new() };
        if !frozen {
            self.pending.push(id, own, users, also, |user| streams.note_wait(user));
            self.unfenced_bytes += bytes;
        }
    }

    /// Notes that `user` uses the large block at `address` too. `None`: no such block.
    pub fn record_stream(
        &mut self,
        address: u64,
        blocks: [Option<RunId>; 2],
        user: u32,
    ) -> Option<()> {
        let (id, run) = self.find(address, blocks)?;
        if run.stream != user || user == ALL_STREAMS {
            self.arenas.run_mut(id)?.shared = true;
            let users = self.users.entry(id).or_default();
            if !users.contains(&user) {
                users.push(user);
            }
        }
        Some(())
    }

    /// Adds every stream that owns a run, uses a block or is waited for.
    pub fn streams_referred(&self, referred: &mut HashSet<u32>) {
        referred.extend(self.arenas.streams());
        referred.extend(self.users.values().flatten().copied().chain(self.pending.streams()));
        for (_, shard) in self.pools.shards() {
            shard.streams_referred(referred);
        }
    }

    /// A slab that is in no shard any more goes back to its arena.
    pub fn release_slab(&mut self, slab: &Slab) {
        if let Some(run) = self.arenas.run_mut(slab.run) {
            run.is_slab = false;
            self.usage.slab_given(run.bytes);
        }
        self.arenas.release(slab.run, slab.stream, slab.epoch);
    }

    /// As [`Central::release_slab`]; their bytes.
    pub fn release_slabs(&mut self, slabs: &[Slab]) -> u64 {
        slabs.iter().for_each(|slab| self.release_slab(slab));
        slabs.iter().map(|slab| slab.bytes()).sum()
    }
}

/// The large block of that number, if it starts at `address`.
#[inline(always)]
pub(crate) fn block_at(arenas: &Arenas, id: RunId, address: u64) -> Option<(RunId, &Run)> {
    let run = arenas.run(id)?;
    (run.address == address && run.state == RunState::Live && !run.is_slab).then_some((id, run))
}

/// Whether a request is so large that its pages go beyond the page table's addresses.
#[inline]
pub fn is_absurd(size: u64) -> bool {
    size > (1 << 48) - PAGE
}
