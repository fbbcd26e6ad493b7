//! The writer's side of a process's record.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering as PrivateOrdering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::kept_copy::KeptCopy;
use crate::calls::{CallTimes, DriverCall};
use crate::facts::{Process, ProcessFacts, Uses};
use crate::gauges::{BlockCounts, DeviceArea, Shard, ShardSizes, pool_of_shard};
use crate::histogram::Buckets;
use crate::layout::{
    Degraded, Header, MAGIC, MAP_STEP, MIN_RING, Plan, RING_STEP, Section, Shared,
};
use crate::mapping::{Backing, LockKind, Mapping};
use crate::peaks::{Amounts, BlockStats, Books, Member};
use crate::ring::Ring;
use crate::segments::SegmentCell;
use crate::shard_ring::{self, ShardRingCell};
use crate::sites::{self, FrameId, NewSite, SiteReach};
use crate::slots::{BATCH, Slots};
use crate::sync::{AtomicU64 as Word, Ordering};
use crate::timeline::{CELLS, FIRST_CELLS, Sample, Timeline};
use crate::totals::{self, ShardTotals};
use crate::{
    BlockSlot, DeviceFacts, DeviceGauge, EventKind, LIFETIMES, RecordOptions, SHARDS, SegmentEntry,
    SegmentSlot, ShardWriter, SiteId, clock, sweep,
};

/// The writer's side of a process's record.
pub struct Record {
    detail: bool,
    ring: Ring,
    mapping: Mapping,
    plan: Plan,
    devices: u32,
    slots: Slots,
    /// Per device its peaks and its used shards; the mutex also guards the shards' ceilings.
    books: Vec<Mutex<Books>>,
    /// Free places of the segment table; the header counts fresh ones.
    free_segments: Mutex<Vec<u32>>,
    /// Cells before this position of the ring may be touched; all, once all cells are allocated.
    /// Only grows, under `ring_growth`.
    ring_reach: AtomicU64,
    ring_growth: Mutex<()>,
    /// The sites of blocks.
    sites: sites::Tables,
    closed: AtomicBool,
    /// At an out-of-memory.
    kept_copy: Mutex<Option<KeptCopy>>,
}

const _: () = assert!(SHARDS <= 64, "a bit each in `used_shards`");

/// Target for writes of a shard or device out of range; never read.
struct Nowhere;

impl Nowhere {
    fn leak<T>() -> *const T {
        let layout = std::alloc::Layout::new::<T>();
        // SAFETY: no type of the layout is empty.
        let place = unsafe { std::alloc::alloc_zeroed(layout) };
        if place.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        place.cast()
    }
}

/// The number of a device's shard among those of all devices.
fn shard_number(device: u8, shard: u8) -> u64 {
    u64::from(device) * SHARDS as u64 + u64::from(shard)
}

/// Memory for `options`: tries the file, a memfd, and private memory, each with less detail before
/// the next.
fn map_record(options: &RecordOptions, devices: usize) -> (Mapping, Plan, u64) {
    let small = RecordOptions {
        ring_events: options.ring_events.min(MIN_RING),
        max_blocks: options.max_blocks.min(64 * MAP_STEP as u32),
        ..options.clone()
    };
    let full = Plan::new(options, devices);
    if options.enabled {
        // A process that ends by `_exit` leaves its record behind: hundreds of workers would fill a
        // small file system.
        sweep::tidy(&options.directory, options.kept);
        let less = Plan::new(
            &RecordOptions { ring_events: small.ring_events, ..options.clone() },
            devices,
        );
        let least = Plan::new(&small, devices);
        let (ring, map) = (Degraded::SMALL_RING, Degraded::SMALL_MAP);
        let plans = [(&full, 0), (&less, ring), (&least, ring | map)];
        let mut trouble = None;
        for (plan, degraded) in plans {
            match Mapping::file(&options.directory, plan.total_bytes, plan.fixed_bytes) {
                Ok(mapping) => return (mapping, plan.clone(), degraded),
                Err(error) => {
                    // Records of dead processes may be what fills the file system.
                    if error.raw_os_error() == Some(libc::ENOSPC)
                        && sweep::tidy(&options.directory, 0).removed > 0
                    {
                        let again =
                            Mapping::file(&options.directory, plan.total_bytes, plan.fixed_bytes);
                        if let Ok(mapping) = again {
                            return (mapping, plan.clone(), degraded);
                        }
                    }
                    trouble.get_or_insert(error);
                }
            }
        }
        let reason = trouble.map_or_else(String::new, |error| error.to_string());
        let directory = options.directory.display();
        for (plan, degraded) in plans {
            if let Ok(mapping) =
                Mapping::memfd(&options.directory, plan.total_bytes, plan.fixed_bytes)
            {
                log::warn!(
                    "record: no file in {directory} ({reason}): `gruyere ps` finds the process \
                     through /proc, but once it has ended, `gruyere post` will not; \
                     GRUYERE_RECORD_DIR names another folder"
                );
                return (mapping, plan.clone(), degraded | Degraded::MEMFD);
            }
        }
        log::warn!(
            "record: no file in {directory} ({reason}) and no memfd: no other process can read \
             this record; GRUYERE_RECORD_DIR names another folder"
        );
        if let Ok(mapping) = Mapping::private(full.total_bytes) {
            return (mapping, full, Degraded::PRIVATE);
        }
    }
    // Off, or short of address space: the minimum for the totals.
    let least =
        Plan::new(&RecordOptions { ring_events: 2, max_blocks: 0, ..options.clone() }, devices);
    match Mapping::private(least.total_bytes) {
        Ok(mapping) => {
            (mapping, least, Degraded::PRIVATE | Degraded::SMALL_RING | Degraded::SMALL_MAP)
        }
        // The kernel refuses some hundred KiB: the process can't go on anyway.
        Err(_) => std::alloc::handle_alloc_error(std::alloc::Layout::new::<Header>()),
    }
}

impl Record {
    /// Makes the record. Never fails: on any trouble it falls back to a memfd, then to private
    /// memory, and logs once.
    pub fn create(options: &RecordOptions, devices: &[DeviceFacts]) -> Record {
        let devices = &devices[..devices.len().min(256)];
        let (mapping, plan, degraded) = map_record(options, devices.len());
        let cells = mapping.base();
        // SAFETY: the plan's offsets lie in the mapping, which this record owns; the ring section
        // has a power of two of cells.
        let ring = unsafe {
            let head = cells.add(plan.offset(Section::RingHead) as usize).cast().as_ptr();
            let ring = cells.add(plan.offset(Section::Ring) as usize).cast().as_ptr();
            Ring::new(ring, plan.entries(Section::Ring), head)
        };
        let ring_cells = plan.entries(Section::Ring);
        let ring_reach = if ring_cells > RING_STEP { RING_STEP } else { u64::MAX };
        let (blocks, _, max_blocks) = plan.sections[Section::Blocks as usize];
        let record = Record {
            detail: options.enabled,
            ring,
            slots: Slots::new(max_blocks, blocks, size_of::<crate::block_map::BlockCell>() as u64),
            mapping,
            plan,
            devices: devices.len() as u32,
            books: devices.iter().map(|_| Mutex::new(Books::default())).collect(),
            free_segments: Mutex::new(Vec::new()),
            ring_reach: AtomicU64::new(ring_reach),
            ring_growth: Mutex::new(()),
            sites: sites::Tables::new(),
            closed: AtomicBool::new(false),
            kept_copy: Mutex::default(),
        };
        if options.enabled {
            record.publish(devices, degraded);
        }
        record
    }

    fn publish(&self, devices: &[DeviceFacts], degraded: u64) {
        let header = self.header();
        self.plan.write(header);
        let lock = self.mapping.lock_kind();
        header.lock_kind.store(lock as u32, Ordering::Relaxed);
        let unlocked = if lock == LockKind::None { Degraded::NO_LOCK } else { 0 };
        let ring_reach = self.plan.entries(Section::Ring).min(RING_STEP);
        header.health.ring_reach.store(ring_reach, Ordering::Relaxed);
        header.health.degraded.store(degraded | unlocked, Ordering::Relaxed);
        header.clock.start();
        self.at::<ProcessFacts>(Section::Process, 0).write(&Process::current());
        for (number, facts) in devices.iter().enumerate() {
            let area = self.area(number as u32);
            area.write_facts(facts);
            area.set(&[(DeviceGauge::TotalMemory, facts.total_memory)]);
        }
        header.magic.store(MAGIC, Ordering::Release);
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a header, allocated at the start; it is atomics.
        unsafe { self.mapping.base().cast::<Header>().as_ref() }
    }

    /// An entry of a section. An index out of range is a bug here, not the caller's.
    fn at<T: Shared>(&self, section: Section, index: u64) -> &T {
        // SAFETY: `pointer` checks the place; the first sections are allocated at the start, the
        // growing ones before their indices are handed out; T is atomics.
        unsafe { &*self.pointer::<T>(section, index) }
    }

    fn pointer<T: Shared>(&self, section: Section, index: u64) -> *const T {
        let (offset, bytes, entries) = self.plan.sections[section as usize];
        assert!(index <= entries && bytes == size_of::<T>() as u64, "{} {index}", section.name());
        // SAFETY: inside the section or at its end, which the plan put inside the mapping.
        unsafe { self.mapping.base().add((offset + index * bytes) as usize).cast::<T>().as_ptr() }
    }

    fn area(&self, device: u32) -> &DeviceArea {
        self.at(Section::Devices, u64::from(device))
    }

    /// The writer of shard `shard` of `device`. The caller holds one lock around all its uses, and
    /// gets each shard once.
    pub fn shard(&'static self, device: u32, shard: u32) -> ShardWriter {
        let known = device < self.devices && (shard as usize) < SHARDS;
        debug_assert!(known, "shard {shard} of device {device}");
        if !known {
            // SAFETY: leaked, so valid for ever; zeros are a value. Without detail no block cell is
            // touched.
            return unsafe {
                ShardWriter::new(self, false, u8::MAX, u8::MAX, Nowhere::leak(), std::ptr::null())
            };
        }
        let place =
            self.pointer(Section::Shards, u64::from(device) * SHARDS as u64 + u64::from(shard));
        let blocks = self.pointer(Section::Blocks, 0);
        // SAFETY: checked places of the mapping, which lives as long as this 'static record; the
        // block section holds every slot that `take_slots` hands out.
        unsafe { ShardWriter::new(self, self.detail, device as u8, shard as u8, place, blocks) }
    }

    /// The writer of the device-wide gauges (under the device's lock).
    pub fn device(&'static self, device: u32) -> DeviceWriter {
        let known = device < self.devices;
        debug_assert!(known, "device {device}");
        let area: *const DeviceArea = if known { self.area(device) } else { Nowhere::leak() };
        // SAFETY: in the mapping, which lives as long as this 'static record, or leaked; atomics,
        // zeros are a value.
        DeviceWriter { area: unsafe { &*area }, record: self, device: known.then_some(device) }
    }

    /// Adds a segment (rare; takes an inner lock).
    pub fn segment_insert(&self, entry: &SegmentEntry) -> SegmentSlot {
        if !self.detail {
            return SegmentSlot::NONE;
        }
        let mut free = self.free_segments.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = free.pop().or_else(|| {
            // A fresh chunk.
            let (offset, bytes, max) = self.plan.sections[Section::Segments as usize];
            let health = &self.header().health;
            let reach = health.segments_reach.load(Ordering::Relaxed);
            if reach + MAP_STEP > max {
                return None;
            }
            if self.mapping.ensure(offset + reach * bytes, MAP_STEP * bytes).is_err() {
                health.no_room.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            free.extend((reach as u32 + 1..(reach + MAP_STEP) as u32).rev());
            health.segments_reach.store(reach + MAP_STEP, Ordering::Release);
            Some(reach as u32)
        });
        match slot {
            Some(slot) => {
                self.at::<SegmentCell>(Section::Segments, u64::from(slot)).insert(entry);
                SegmentSlot(slot)
            }
            None => {
                self.header().health.segments_unrecorded.fetch_add(1, Ordering::Relaxed);
                SegmentSlot::NONE
            }
        }
    }

    /// Removes a segment.
    pub fn segment_remove(&self, slot: SegmentSlot) {
        if slot == SegmentSlot::NONE {
            return;
        }
        let mut free = self.free_segments.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = self.at::<SegmentCell>(Section::Segments, u64::from(slot.0));
        if cell.is_taken() {
            cell.remove();
            free.push(slot.0);
        }
    }

    /// Sets the pages of a view. Only for its owner, under the lock around all uses of the slot.
    pub fn segment_pages(&self, slot: SegmentSlot, pages: u128) {
        if slot != SegmentSlot::NONE {
            self.at::<SegmentCell>(Section::Segments, u64::from(slot.0)).set_pages(pages);
        }
    }

    /// The number of a frame of a Python stack; each frame is kept once. Rare: takes an inner lock.
    pub fn frame(&self, file: &str, function: &str, line: u32) -> FrameId {
        if !self.detail {
            return FrameId::default();
        }
        self.sites.frame(self, file, function, line)
    }

    /// Notes that a notebook runs a cell, whose code has this file name, as `In[number]`. Rare, as
    /// above.
    pub fn cell(&self, file: &str, number: u32) {
        self.frame(file, &format!("In[{number}]"), 0);
    }

    /// The number of a site; each site is kept once. Rare, as above.
    pub fn site(&self, site: &NewSite<'_>) -> SiteId {
        if !self.detail {
            return SiteId::NONE;
        }
        self.sites.site(self, site)
    }

    /// See [`ShardWriter::set_site`]. `life` is the slot's state; only its holder calls.
    pub(crate) fn set_block_site(&self, slot: BlockSlot, life: u32, site: SiteId) {
        let is_there = u64::from(slot.0) < self.header().sites.block_sites.load(Ordering::Relaxed)
            || self.sites.reach_block(self, slot.0);
        if is_there {
            // Release: a reader that sees the word finds the site.
            self.at::<Word>(Section::BlockSites, u64::from(slot.0))
                .store(sites::block_word(life, site), Ordering::Release);
        }
    }

    /// Adds an event to the ring. `time` is in [`clock::now`]'s ticks.
    #[inline]
    #[allow(clippy::too_many_arguments)]
    pub fn event(
        &self,
        kind: EventKind,
        device: u8,
        lifetime: u8,
        stream: u32,
        address: u64,
        size: u64,
        time: u64,
    ) {
        if !self.detail {
            return;
        }
        let has_room = |position| {
            position < self.ring_reach.load(PrivateOrdering::Acquire) || self.grow_ring(position)
        };
        self.ring.push(kind, device, lifetime, stream, address, size, time, has_room);
        // Rare events keep the clock's facts fresh. Kinds are constants at the calls, so the hot
        // ones pay nothing.
        if kind as u8 > EventKind::RecordStream as u8 {
            self.header().clock.refresh(time);
        }
    }

    /// Allocates cells of the ring up to `position`. False: no memory for them.
    #[cold]
    #[inline(never)]
    fn grow_ring(&self, position: u64) -> bool {
        let _growth = self.ring_growth.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = self.plan.entries(Section::Ring);
        let (health, index) = (&self.header().health, position % entries);
        let reach = health.ring_reach.load(Ordering::Relaxed);
        if index < reach {
            return true;
        }
        // Memory may come later; but not every event should ask for it.
        if index % RING_STEP != 0 && health.no_room.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let end = (index + 1).next_multiple_of(RING_STEP).min(entries);
        if !self.allocate(Section::Ring, reach, end - reach) {
            return false;
        }
        health.ring_reach.store(end, Ordering::Release);
        self.ring_reach
            .store(if end == entries { u64::MAX } else { end }, PrivateOrdering::Release);
        true
    }

    /// Live bytes and their peak on `device`, over all shards (exact).
    pub fn live(&self, device: u32) -> (u64, u64) {
        if device >= self.devices {
            return (0, 0);
        }
        let live = totals::live(totals::BYTES, self.totals(device));
        (live, self.area(device).live_peak.load(Ordering::Relaxed).max(live))
    }

    /// Live bytes of `device` as requested, over all shards (exact).
    pub fn live_requested(&self, device: u32) -> u64 {
        if device >= self.devices {
            return 0;
        }
        totals::live(totals::REQUESTED, self.totals(device))
    }

    /// All counters of the blocks of `device`, by pool. All 0 for an unknown device.
    pub fn block_stats(&self, device: u32) -> BlockStats {
        let Some(mut books) = self.books(device) else { return BlockStats::default() };
        let used = books.used;
        books.reconcile_all(&self.area(device).live_peak, self.members(device, used));
        books.stats(&self.block_counts(device))
    }

    /// Restarts the peaks of [`Record::block_stats`] at the current values. (The peak of
    /// [`Record::live`] and those among the [`DeviceGauge`]s cover the whole life of the process.)
    pub fn reset_peaks(&self, device: u32) {
        if let Some(mut books) = self.books(device) {
            let used = books.used;
            books.reset_peaks(&self.area(device).live_peak, self.members(device, used));
        }
    }

    /// Restarts the accumulated counts of [`Record::block_stats`] at 0.
    pub fn reset_accumulated(&self, device: u32) {
        if let Some(mut books) = self.books(device) {
            books.reset_accumulated(&self.block_counts(device));
        }
    }

    fn books(&self, device: u32) -> Option<MutexGuard<'_, Books>> {
        Some(self.books.get(device as usize)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The counters of a device's small and large blocks.
    fn block_counts(&self, device: u32) -> [BlockCounts; 2] {
        /// A writer holds a seqlock for a dozen instructions, unless the kernel preempts it.
        const ATTEMPTS: u32 = 1000;
        let mut sums = [BlockCounts::default(); 2];
        for (number, shard) in self.shards(device).iter().enumerate() {
            for lifetime in 0..LIFETIMES {
                sums[pool_of_shard(number)].add(shard.read(lifetime, ATTEMPTS).0);
            }
        }
        sums
    }

    /// Latency of one call in clock ticks (sampled by the caller).
    #[inline]
    pub fn latency(&self, malloc: bool, ticks: u64) {
        if self.detail {
            self.at::<Buckets>(Section::Latency, u64::from(!malloc)).count_shared(ticks);
        }
    }

    /// The counters for the times of `call`. `None`: the record is off, or has no room for them.
    pub fn call_times(&'static self, call: DriverCall) -> Option<&'static CallTimes> {
        let number = u64::from(call as u8);
        if !self.detail || !call.is_recorded() || !self.allocate(Section::Calls, number, 1) {
            return None;
        }
        self.header().calls.fetch_or(1 << number, Ordering::Release);
        Some(self.at(Section::Calls, number))
    }

    /// The path of the file in /dev/shm, if there is one.
    pub fn path(&self) -> Option<&Path> {
        match self.mapping.backing() {
            Backing::File(path) => Some(path),
            Backing::Memfd | Backing::Private => None,
        }
    }

    /// Keeps the record as it is at an out-of-memory, in place of one kept before: much live memory
    /// is freed before the exception reaches the end of the program. The one before stays if this
    /// refusal comes of the same failure, while its exception frees memory; and if copies have
    /// taken too much of the time, which the copy then tells.
    ///
    /// # Errors
    /// The system's error for lack of memory; then the one before stays.
    pub fn keep_moment(&self) -> io::Result<()> {
        if !self.detail || !self.mapping.is_creator() {
            return Ok(());
        }
        let mut kept_copy = self.kept_copy.lock().unwrap_or_else(PoisonError::into_inner);
        let devices = 0..self.devices;
        let live = devices.clone().fold(0, |sum: u64, of| sum.saturating_add(self.live(of).0));
        let steps =
            devices.fold(0, |sum: u64, of| sum.wrapping_add(self.area(of).own(DeviceGauge::Step)));
        let at = Instant::now();
        let mut cost = Duration::ZERO;
        if let Some(kept) = &*kept_copy {
            if kept.has_failure_of(at, live, steps) {
                return Ok(());
            }
            if kept.was_costly(at) {
                return self.tell_later(&kept.file);
            }
            cost = kept.cost_at(at);
        }
        let file = self.mapping.moment()?;
        let cost = cost.saturating_add(at.elapsed());
        *kept_copy = file.map(|file| KeptCopy { file, at, cost, live, steps });
        Ok(())
    }

    /// Notes in a copy that requests were refused after it, of which it has nothing.
    fn tell_later(&self, copy: &File) -> io::Result<()> {
        let degraded = &self.header().health.degraded;
        let told = degraded.load(Ordering::Relaxed) | Degraded::LATER_REFUSED;
        let at = ptr::from_ref(degraded).addr() - self.mapping.base().addr().get();
        copy.write_all_at(&told.to_ne_bytes(), at as u64)
    }

    /// Leaves a copy of the record for after the process's end, as it was at the kept out-of-memory
    /// ([`Record::keep_moment`]) or as it is now, as if the process had been killed at that moment:
    /// see [`Mapping::copy`]. Where a copy can't be written, the record itself stays, as it will be
    /// at the process's end. Returns the path of what stays ([`sweep::is_copy`] tells which);
    /// `None`: there is no file, or this is a forked child.
    pub fn leave_copy(&self) -> Option<PathBuf> {
        if !self.detail || !self.mapping.is_creator() {
            return None;
        }
        let copy = match &*self.kept_copy.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(kept) => self.mapping.copy_moment(&kept.file),
            None => self.mapping.copy(),
        };
        copy.unwrap_or_else(|error| {
            // `close` leaves the file then.
            self.closed.store(true, PrivateOrdering::Release);
            let path = self.path()?;
            log::warn!(
                "`gruyere post` will show what is live at the end of the program, not what was \
                 live at the out-of-memory: no copy of {} can be written ({error}); \
                 GRUYERE_RECORD_DIR names another folder",
                path.display()
            );
            Some(path.to_owned())
        })
    }

    /// Notes the process's rank and the number of ranks, each where the record has none.
    pub fn tell_rank(&self, rank: u64, world_size: u64) {
        if self.detail && self.mapping.is_creator() {
            self.at::<ProcessFacts>(Section::Process, 0).tell_rank(rank, world_size);
        }
    }

    /// Notes what the program is made of by now.
    pub fn tell_uses(&self, uses: Uses) {
        if self.detail && self.mapping.is_creator() {
            self.at::<ProcessFacts>(Section::Process, 0).tell_uses(uses);
        }
    }

    /// A clean exit: unlinks the file. Called at most once, never in a forked child.
    pub fn close(&self) {
        if self.mapping.is_creator()
            && !self.closed.swap(true, PrivateOrdering::AcqRel)
            && self.detail
        {
            self.header().health.closed.store(1, Ordering::Release);
            self.mapping.unlink();
        }
    }

    /// The record's memory, for readers in this process and for tests.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// The areas of a device's shards.
    fn shards(&self, device: u32) -> &[Shard] {
        let first = self.pointer::<Shard>(Section::Shards, u64::from(device) * SHARDS as u64);
        // SAFETY: the section has SHARDS of them for each device, allocated at the start; `device`
        // is known to the callers, and `pointer` checks the first.
        unsafe { std::slice::from_raw_parts(first, SHARDS) }
    }

    /// The totals of the used shards of `device`: a shard's first block passes its ceiling, which
    /// is 0, and makes it join.
    fn totals(&self, device: u32) -> impl Iterator<Item = &ShardTotals> {
        let used = self.books(device).map_or(0, |books| books.used);
        self.members(device, used).map(|(_, totals)| totals)
    }

    /// The shards of `device` whose bits are set in `used`.
    fn members(&self, device: u32, used: u64) -> impl Iterator<Item = Member<'_>> + Clone {
        let (shards, mut left) = (self.shards(device), used);
        std::iter::from_fn(move || {
            let number = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            shards.get(number).map(|shard| (pool_of_shard(number) == 1, &shard.totals))
        })
    }

    /// Shard `shard` of `device` passed a ceiling: reconciles it.
    pub(crate) fn reconcile(&self, device: u8, shard: u8) {
        let books = self.join(device, shard);
        if let (Some(mut books), device) = (books, u32::from(device)) {
            let (used, mine) = (books.used, &self.shards(device)[usize::from(shard)].totals);
            books.reconcile(&self.area(device).live_peak, self.members(device, used), mine);
        }
    }

    /// Counts shard `shard` of `device` from now on; returns the device's books. `None` for an
    /// unknown shard.
    pub(crate) fn join(&self, device: u8, shard: u8) -> Option<MutexGuard<'_, Books>> {
        let mut books = self.books(u32::from(device))?;
        books.used |= 1u64.checked_shl(u32::from(shard))?;
        Some(books)
    }

    /// See [`Books::begin_wait`].
    pub(crate) fn begin_wait(&self, device: u8, shard: u8, large: bool, amounts: Amounts) {
        if let Some(mut books) = self.join(device, shard) {
            let mine = &self.shards(u32::from(device))[usize::from(shard)].totals;
            books.begin_wait(mine, large, amounts);
        }
    }

    /// See [`Books::end_wait`].
    pub(crate) fn end_wait(&self, device: u8, large: bool, amounts: Amounts) {
        if let Some(mut books) = self.books(u32::from(device)) {
            books.end_wait(large, amounts);
        }
    }

    /// Makes `count` entries of a section from `first` on safe to touch.
    fn allocate(&self, section: Section, first: u64, count: u64) -> bool {
        let (offset, bytes, _) = self.plan.sections[section as usize];
        self.ensure(offset + first * bytes, count * bytes)
    }

    /// Makes `bytes` from `offset` on safe to touch; counts a lack of room.
    fn ensure(&self, offset: u64, bytes: u64) -> bool {
        let is_done = self.mapping.ensure(offset, bytes).is_ok();
        if !is_done {
            self.header().health.no_room.fetch_add(1, Ordering::Relaxed);
        }
        is_done
    }

    /// The first cell of a shard's event ring, and their highest number.
    fn shard_ring(&self, device: u8, shard: u8) -> (u64, u64) {
        let cells = self.plan.entries(Section::ShardRings)
            / (u64::from(self.devices) * SHARDS as u64).max(1);
        (shard_number(device, shard) * cells, cells)
    }

    /// The first allocated cells of a shard's event ring, and their number.
    pub(crate) fn shard_ring_cells(
        &self,
        device: u8,
        shard: u8,
    ) -> Option<(*const ShardRingCell, u64)> {
        let (first, most) = self.shard_ring(device, shard);
        let cells = most.min(shard_ring::FIRST_CELLS);
        let is_there = cells > 0 && self.allocate(Section::ShardRings, first, cells);
        is_there.then(|| (self.pointer(Section::ShardRings, first), cells))
    }

    /// Doubles the event ring of a shard from `cells`. False: at its longest, or no room.
    pub(crate) fn grow_shard_ring(&self, device: u8, shard: u8, cells: u64) -> bool {
        let (first, most) = self.shard_ring(device, shard);
        2 * cells <= most && self.allocate(Section::ShardRings, first + cells, cells)
    }

    /// A shard's histograms of sizes, allocated; without room, histograms that are never read.
    pub(crate) fn shard_sizes(&self, device: u8, shard: u8) -> *const ShardSizes {
        let number = shard_number(device, shard);
        let is_known = u32::from(device) < self.devices && usize::from(shard) < SHARDS;
        if !is_known || !self.allocate(Section::Sizes, number, 1) {
            return Nowhere::leak();
        }
        self.shards(u32::from(device))[usize::from(shard)].has_sizes.store(1, Ordering::Release);
        self.pointer(Section::Sizes, number)
    }

    /// The timeline of `device`, with room for a sample, and the number of its cells that may be
    /// touched. `None` without room for any.
    fn timeline(&self, device: u32) -> Option<(&Timeline, usize)> {
        let allocated = &self.area(device).timeline_cells;
        let mut cells = allocated.load(Ordering::Relaxed) as usize;
        let is_full =
            cells == 0 || self.at::<Timeline>(Section::Timelines, device.into()).taken() >= cells;
        if is_full && cells < CELLS {
            let more = if cells == 0 { FIRST_CELLS } else { 2 * cells };
            let (offset, bytes, _) = self.plan.sections[Section::Timelines as usize];
            let begin = offset + u64::from(device) * bytes;
            let there = if cells == 0 { 0 } else { Timeline::bytes(cells) };
            // Without room, the present cells suffice: they become coarser sooner.
            if self.ensure(begin + there, Timeline::bytes(more) - there) {
                cells = more;
                allocated.store(cells as u64, Ordering::Release);
            }
        }
        (cells > 0).then(|| (self.at(Section::Timelines, device.into()), cells))
    }

    pub(crate) fn take_slots(&self, batch: &mut [u32; BATCH]) -> usize {
        let header = self.header();
        header.clock.refresh(clock::now());
        self.slots.take(batch, &self.mapping, &header.health)
    }

    pub(crate) fn give_slots(&self, slots: &[u32]) {
        self.header().clock.refresh(clock::now());
        self.slots.give(slots);
    }

    pub(crate) fn unrecorded(&self) {
        let health = &self.header().health;
        // Said once: from then on, what readers list is a part of what is live.
        if health.blocks_unrecorded.fetch_add(1, Ordering::Relaxed) == 0 {
            let remedy = match health.no_room.load(Ordering::Relaxed) {
                0 => "raise record_blocks",
                _ => "free space in its folder, or name another with GRUYERE_RECORD_DIR",
            };
            log::warn!(
                "record: no room for further blocks; the program is served as before, but `gruyere \
                 post`, `snapshot` and `map` miss them: {remedy}"
            );
        }
    }
}

impl sites::Room for Record {
    fn allocate(&self, section: Section, first: u64, count: u64) -> bool {
        Record::allocate(self, section, first, count)
    }

    fn entries(&self, section: Section) -> u64 {
        self.plan.entries(section)
    }

    fn at<T: Shared>(&self, section: Section, index: u64) -> &T {
        Record::at(self, section, index)
    }

    fn reach(&self) -> &SiteReach {
        &self.header().sites
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.close();
    }
}

/// Writer of the device-wide gauges.
pub struct DeviceWriter {
    area: &'static DeviceArea,
    record: &'static Record,
    /// `None`: an unknown device.
    device: Option<u32>,
}

impl DeviceWriter {
    /// Publishes a set of gauges in one turn of the seqlock.
    // Inlined across crates: for a few gauges, constant at the call, only a few stores remain.
    #[inline]
    pub fn set(&mut self, values: &[(DeviceGauge, u64)]) {
        if self.record.detail {
            self.area.set(values);
        }
    }

    /// Notes the current values on the timeline, with `in_use_high`: the highest bytes of blocks
    /// above 16 KiB and slabs since the last sample.
    pub fn sample(&mut self, in_use_high: u64) {
        self.note(in_use_high, Timeline::add);
    }

    /// The same at the end of the step in the gauge.
    pub fn end_step(&mut self, in_use_high: u64) {
        self.note(in_use_high, Timeline::end_step);
    }

    fn note(&mut self, in_use_high: u64, note: fn(&Timeline, Sample, usize)) {
        let Some(device) = self.device.filter(|_| self.record.detail) else { return };
        let (live, _) = self.record.live(device);
        let [step, reserved_high, largest_low, pending_high] = [
            DeviceGauge::Step,
            DeviceGauge::Reserved,
            DeviceGauge::LargestRequest,
            DeviceGauge::Pending,
        ]
        .map(|gauge| self.area.own(gauge));
        let (live_low, live_high) = (live, live);
        let ticks = clock::now();
        let sample = Sample {
            ticks,
            step,
            live_low,
            live_high,
            in_use_high,
            reserved_high,
            largest_low,
            pending_high,
        };
        if let Some((timeline, cells)) = self.record.timeline(device) {
            note(timeline, sample, cells);
        }
        self.record.header().clock.refresh(ticks);
    }

    /// Adds to a counter.
    pub fn add(&mut self, gauge: DeviceGauge, n: u64) {
        if self.record.detail {
            self.area.add(gauge, n);
        }
    }
}
