//! Allocation, from the hot path to the miss.
//!
//! [`Heap::serve`] is the hot path: one lock, and 0 for anything unusual.
//! [`Heap::malloc`] handles the rest: it resolves the stream, finds the capture, pool or backing
//! that serves the request, and notes the block in the history and the trace. A small block is a
//! slot of a slab, a large one a run of its own. Where nothing free fits, the request climbs the
//! ladder ([`Device::climb`]).

use crate::central::Central;
use crate::device::{Device, ShardCell, is_large};
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::heap::{ALL_SITES, HISTORY, Heap, POISON_FRESH, UNANNOUNCED, WATCH_CAPTURES};
use crate::hook_bits::{HOOK_CAPTURES, HOOK_RECORD_STREAM, ORDERED_CALLERS};
use crate::lifetime;
use crate::order::streams::{self, ALL_STREAMS, DEFAULT_STREAM, Resolved};
use crate::pools::capture::PoolId;
use crate::pools::route;
use crate::request::{Request, Want, is_absurd};
use crate::runs::arena::{Label, RunId, SpaceId, WATCHED};
use crate::runs::page_table::PageTable;
use crate::shared::Shared;
use crate::small::size_class::{ALIGNMENT, PAGE, SIZE_CLASSES, SLAB, class_of, round, round_up};
use crate::supply::Way;
use crate::sync::lock;
use crate::upkeep::phase::Occasion;
use gruyere_record::gauges::pool_of;
use gruyere_record::sites::SiteId;
use gruyere_record::{Block, BlockTag, Record, bucket_of, clock};
use once_cell::race::OnceBox;
use std::sync::atomic::Ordering;

impl Heap {
    /// Whether every request may take the hot path: no debugging, no capture, all hooks wired.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.special.load(Ordering::Acquire) == 0
    }

    /// The hot path of [`Heap::malloc`] while [`Heap::is_plain`], for sizes above 0. The caller has
    /// compared the size: `LARGE` as [`crate::device::is_large`] says. Returns 0 for anything
    /// unusual.
    #[inline(always)]
    pub fn serve<const LARGE: bool>(&self, size: u64, device: i32, stream: StreamHandle) -> u64 {
        let Some(device) = self.devices.get(device as usize).and_then(OnceBox::get) else {
            return 0;
        };
        let start = clock::now();
        // The default stream's mallocs need not be noted.
        let number = if stream.is_default() {
            Some(DEFAULT_STREAM)
        } else {
            self.noted_lasting(device, stream)
        };
        let Some(number) = number else { return 0 };
        let tags = lifetime::tags();
        if tags.is_routed() {
            return 0;
        }
        let request = Request::new(size, number, tags.lifetime(), start);
        let address = if LARGE {
            device.serve_large(&self.shared, request)
        } else {
            device.serve_small(&self.shared, request)
        };
        if address != 0 {
            sample_latency(self.shared.record, true, start);
            if LARGE && self.shared.sites.is_some() {
                self.note_site(device, size, address);
            }
        }
        address
    }

    /// The number of a stream other than the default one, if it is known to last and captures
    /// nothing; notes a malloc on it.
    #[inline(never)]
    fn noted_lasting(&self, device: &Device, stream: StreamHandle) -> Option<u32> {
        let number = device.streams.resolve_lasting(&*self.shared.questions, stream)?;
        if !lifetime::tags().is_routed() {
            device.note_malloc(&self.shared, number);
        }
        Some(number)
    }

    /// `size` bytes on `device` in the order of `stream`, at a multiple of 512 B. Size 0 returns 0.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] after the whole ladder; the driver's error; the error for an unknown
    /// device.
    pub fn malloc(&self, size: u64, device: i64, stream: StreamHandle) -> Result<u64, Error> {
        if size == 0 {
            return Ok(0);
        }
        let start = clock::now();
        let device = self.device(device)?;
        let shared = &self.shared;
        let found = device.named(shared, stream)?;
        let tags = lifetime::tags();
        // torch would serve no other from what the stream has freed.
        if !found.captures() && !tags.is_routed() {
            device.note_malloc(shared, found.number);
        }
        let request = Request::new(size, found.number, tags.lifetime(), start);
        let plain = self.special.load(Ordering::Acquire) & !UNANNOUNCED == 0;
        let address = if plain && !found.captures() && !tags.is_routed() {
            device.malloc(shared, request)?
        } else {
            self.malloc_special(device, request, stream, &found, None)?
        };
        sample_latency(shared.record, true, start);
        self.served(device, size, address);
        Ok(address)
    }

    /// As [`Heap::malloc`], from the memory of the graphs captured into pool `id`, while there are
    /// any: for blocks that a program allocates outside its graphs and its graphs use, which must
    /// stay in place as theirs do. A capturing stream gets the memory of its own capture.
    ///
    /// # Errors
    /// As [`Heap::malloc`].
    pub fn malloc_for_graphs(
        &self,
        size: u64,
        device: i64,
        stream: StreamHandle,
        id: PoolId,
    ) -> Result<u64, Error> {
        if size == 0 {
            return Ok(0);
        }
        let start = clock::now();
        let device = self.device(device)?;
        let found = device.named(&self.shared, stream)?;
        let lifetime = lifetime::tags().lifetime();
        let request = Request::new(size, found.number, lifetime, start);
        let address = self.malloc_special(device, request, stream, &found, Some(id))?;
        sample_latency(self.shared.record, true, start);
        self.served(device, size, address);
        Ok(address)
    }

    /// Notes the site of a new block of `size` bytes at `address`, where sites are wanted.
    pub(crate) fn served(&self, device: &Device, size: u64, address: u64) {
        let is_wanted = || is_large(size) || self.special.load(Ordering::Relaxed) & ALL_SITES != 0;
        if self.shared.sites.is_some() && is_wanted() {
            self.note_site(device, size, address);
        }
    }

    /// Notes the calling thread's site for the block at `address`; no other thread knows of the
    /// block yet.
    #[cold]
    #[inline(never)]
    fn note_site(&self, device: &Device, size: u64, address: u64) {
        let site = self.shared.site(size);
        if site != SiteId::NONE {
            device.set_site(address, self.shared.table.get(address), site);
        }
    }

    #[cold]
    fn malloc_special(
        &self,
        device: &Device,
        request: Request,
        stream: StreamHandle,
        found: &Resolved<'_>,
        graphs: Option<PoolId>,
    ) -> Result<u64, Error> {
        let shared = &self.shared;
        let special = self.special.load(Ordering::Acquire);
        if self.hooks() & (HOOK_RECORD_STREAM | HOOK_CAPTURES) != HOOK_RECORD_STREAM | HOOK_CAPTURES
            && self.hooks() & ORDERED_CALLERS == 0
        {
            self.warn_of_missing_hooks();
        }
        let watched = special & WATCH_CAPTURES != 0 && request.stream != streams::ALL_STREAMS;
        let capture = if watched || found.captures() {
            device.capture_of(shared, stream, found)?
        } else {
            None
        };
        if capture.is_none() {
            self.forget_failed_captures(device);
        }
        if shared.settings.debug.sync && capture.is_none() {
            device.synchronize(shared);
        }
        let address = match capture {
            // Whatever the backing: memory that a graph uses must stay after the block is freed.
            Some(capture) => device.malloc_captured(shared, request, capture)?,
            None => match (graphs, device.supply.way(request.size), route::pool_on(device.id)) {
                (Some(id), ..) => device.malloc_for_graphs(shared, request, id)?,
                (_, Way::Driver, _) => device.malloc_direct(shared, request)?,
                (_, _, Some(pool)) => device.malloc_pooled(shared, request, pool)?,
                (_, Way::Dedicated, None) => device.malloc_dedicated(shared, request)?,
                (_, Way::Heap, None) => device.malloc(shared, request)?,
            },
        };
        if shared.settings.debug.poison
            && capture.is_none()
            && request.stream != streams::ALL_STREAMS
        {
            let result =
                shared.driver.memset(device.id, address, POISON_FRESH, round(request.size), stream);
            if let Err(error) = result {
                log::warn!("debug:poison could not fill the block at {address:#x}: {error}");
            }
        }
        self.noted(device, &request, address, stream);
        Ok(address)
    }

    /// Adds a block to the history and the trace, if they are kept.
    pub(crate) fn noted(
        &self,
        device: &Device,
        request: &Request,
        address: u64,
        stream: StreamHandle,
    ) {
        if self.special.load(Ordering::Acquire) & HISTORY != 0 {
            self.note_malloc(device.id, address, request.size, stream);
        }
        if let Some(trace) = &self.trace {
            trace.malloc(address, request.size, device.id, request.stream);
        }
    }
}

/// Times one call in 64, chosen by the clock itself.
#[inline]
pub(crate) fn sample_latency(record: &Record, malloc: bool, start: u64) {
    if start >> 6 & 63 == 0 {
        note_latency(record, malloc, start);
    }
}

#[cold]
#[inline(never)]
fn note_latency(record: &Record, malloc: bool, start: u64) {
    record.latency(malloc, clock::now().wrapping_sub(start));
}

impl Device {
    /// An address for `request`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] after the whole ladder, with its cause; the driver's error.
    pub(crate) fn malloc(&self, shared: &Shared, request: Request) -> Result<u64, Error> {
        if is_large(request.size) {
            if request.stream == ALL_STREAMS {
                self.poll_parked(shared);
            }
            self.malloc_large(shared, request)
        } else {
            self.malloc_small(shared, request)
        }
    }

    /// The hot path of a small malloc: a slot of the first slab of its bin. 0: the bin has none,
    /// and [`Device::malloc`] finds memory.
    #[inline(always)]
    pub(crate) fn serve_small(&self, shared: &Shared, request: Request) -> u64 {
        self.shard(request.stream).take_slot(shared, request)
    }

    /// The hot path of a large malloc: a free run that fits. 0 as [`Device::serve_small`].
    #[inline(always)]
    pub(crate) fn serve_large(&self, shared: &Shared, request: Request) -> u64 {
        if is_absurd(request.size) {
            return 0;
        }
        let mut central = lock(&self.central);
        let address = central.serve(shared, request);
        if central.watch.is_due(central.arenas.changes()) {
            drop(central);
            self.watch(shared, Occasion::Due);
        }
        address
    }

    /// A slot of an existing slab, else of a new one.
    fn malloc_small(&self, shared: &Shared, request: Request) -> Result<u64, Error> {
        let waits = {
            let mut cell = self.shard(request.stream);
            let address = cell.take_slot(shared, request);
            if address != 0 {
                return Ok(address);
            }
            cell.shard.has_pending()
        };
        if waits {
            if let Some(_guard) = self.query_guard() {
                self.fence(shared, Some(request.stream));
                self.streams.poll_some(&*shared.driver);
            }
            self.complete_shard_frees(shared, request.stream);
            let address = self.serve_small(shared, request);
            if address != 0 {
                return Ok(address);
            }
        }
        let request = self.located(shared, request);
        let class = class_of(request.size) as u8;
        let bytes = SIZE_CLASSES[usize::from(class)].slab_bytes();
        loop {
            let slab = {
                let (mut central, run) = self.allocate_run(shared, request, None, bytes, SLAB)?;
                self.publish_growth(shared, &mut central);
                self.make_slab(shared, &mut central, run, class, &request, 0)
            };
            let Some(slab) = slab else { return Err(Error::Internal("a run vanished")) };
            let mut cell = self.shard(request.stream);
            self.add_slab(shared, Self::shard_number(request.stream), &mut cell.shard, slab);
            let address = cell.take_slot(shared, request);
            if address != 0 {
                return Ok(address);
            }
        }
    }

    /// A run as the block: a free one, else one from the ladder.
    fn malloc_large(&self, shared: &Shared, request: Request) -> Result<u64, Error> {
        let Request { size, stream, .. } = request;
        if is_absurd(size) {
            return Err(self.out_of_memory(shared, size, stream));
        }
        let mut central = lock(&self.central);
        let address = central.serve_watched(shared, request);
        let due = central.watch.is_due(central.arenas.changes());
        if address != 0 || due {
            drop(central);
            if due {
                self.watch(shared, Occasion::Due);
            }
            if address != 0 {
                return Ok(address);
            }
            central = lock(&self.central);
        }
        let (bytes, freed) = (round(size), central.freed);
        let space = central.spaces.expect(request.large(), freed);
        let want = Want { space, bytes, align: ALIGNMENT, stream };
        let (mut central, run) = self.climb(shared, central, request, want)?;
        central.note_born(run, &request);
        self.publish_growth(shared, &mut central);
        Ok(central.publish(&shared.table, run, &request, shared.step(), 0))
    }

    /// A block alone in its span, at the span's start.
    ///
    /// # Errors
    /// As [`Device::malloc`].
    #[cold]
    pub(crate) fn malloc_dedicated(&self, shared: &Shared, request: Request) -> Result<u64, Error> {
        let Some(bytes) = round_up(request.size, PAGE).filter(|_| !is_absurd(request.size)) else {
            return Err(self.out_of_memory(shared, request.size, request.stream));
        };
        let (mut central, run) = self.allocate_run(shared, request, None, bytes, PAGE)?;
        Ok(central.publish(&shared.table, run, &request, shared.step(), 0))
    }
}

impl ShardCell {
    /// A slot of a slab in this shard. 0: none is free.
    #[inline(always)]
    fn take_slot(&mut self, shared: &Shared, request: Request) -> u64 {
        self.shard.allocate(&mut self.writer, request, || shared.step())
    }
}

impl Central {
    /// The hot path of a large malloc: takes a free run that fits and describes it in the
    /// page table and the record. Returns its address, or 0 if nothing fits, or the block is
    /// watched ([`Central::serve_watched`]).
    #[inline(always)]
    pub(crate) fn serve(&mut self, shared: &Shared, request: Request) -> u64 {
        let space = self.spaces.of_large(request.lifetime, round(request.size));
        self.serve_from::<false>(shared, request, space)
    }

    /// As [`Central::serve`], also for a block that is watched.
    fn serve_watched(&mut self, shared: &Shared, request: Request) -> u64 {
        let space = self.spaces.expect(request.large(), self.freed);
        self.serve_from::<true>(shared, request, space)
    }

    #[inline(always)]
    fn serve_from<const IS_WATCHED: bool>(
        &mut self,
        shared: &Shared,
        request: Request,
        space: SpaceId,
    ) -> u64 {
        let Request { size: requested, stream, lifetime, start, .. } = request;
        let size = round(requested);
        let writer = &mut self.writers[pool_of(size)];
        let slot = writer.place();
        let label = Label { slack: (size - requested) as u32, lifetime: lifetime as u8, slot };
        let Some((id, address)) = self.arenas.allocate_block(space, size, stream, label) else {
            writer.put_back(slot);
            return 0;
        };
        let tag = BlockTag::new(self.device as u8, lifetime as u8, 0, stream);
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        writer.malloc(slot, block, || shared.step(), start);
        self.usage.block_taken(size);
        self.name(&shared.table, id, address);
        if IS_WATCHED {
            self.note_born(id, &request);
        }
        address
    }

    fn note_born(&mut self, id: RunId, request: &Request) {
        if self.spaces.note_born(id, request.large(), self.freed)
            && let Some(run) = self.arenas.run_mut(id)
        {
            run.traits |= WATCHED;
        }
    }

    /// Describes a run just taken as the block of `request`, in the page table and the record.
    /// Returns its address. `capture`: the tag under which the record counts it.
    pub(crate) fn publish(
        &mut self,
        table: &PageTable,
        id: RunId,
        request: &Request,
        step: u32,
        capture: u8,
    ) -> u64 {
        let Request { size: requested, lifetime, start, .. } = *request;
        let Some(run) = self.arenas.run_mut(id) else { return 0 };
        let (address, size) = (run.address, run.bytes);
        let tag = BlockTag::new(self.device as u8, lifetime as u8, capture, run.stream);
        let writer = &mut self.writers[pool_of(size)];
        let slot = writer.place();
        run.label(Label { slack: (size - requested) as u32, lifetime: lifetime as u8, slot });
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        writer.malloc(slot, block, || step, start);
        self.usage.block_taken(size);
        self.name(table, id, address);
        address
    }

    /// Notes in the page table that block `id` starts at `address`.
    #[inline(always)]
    fn name(&mut self, table: &PageTable, id: RunId, address: u64) {
        if let Some(page) = table.page(address)
            && !page.add_block(self.device, id)
        {
            self.name_among_many(table, id, address);
        }
    }
}
