//! A shard: the small blocks of the streams that share one lock.
//!
//! Streams are spread over the shards of a device, so that threads on different streams do not
//! meet. A bin is the slabs of one (stream, lifetime, size class) with a free slot. A shard's lock
//! is never held while the central part gives memory: [`Shard::allocate`] answers that it needs a
//! slab, and the caller comes back with one.

mod check;
use crate::lifetime::LIFETIMES;
use crate::order::pending::PendingFrees;
use crate::order::streams::{ALL_STREAMS, Streams};
use crate::request::Request;
use crate::small::size_class::{CLASSES, Small, round, small, small_again};
use crate::small::slab::{Freed, Slab, SlotState};
use gruyere_record::{Block, EventKind, ShardWriter};
use std::collections::{HashMap, HashSet};

/// Shards of a device for slabs of streams; the record has two more, for the central part.
pub(crate) const SHARDS: usize = gruyere_record::SHARDS - 2;
const _: () = assert!(SHARDS.is_power_of_two());

/// No slab: the end of a list.
const NO_SLAB: u32 = u32::MAX;

/// The slabs with free slots of one (lifetime, size class) of a stream.
#[derive(Clone, Copy)]
struct Bin {
    /// The first slab, or [`NO_SLAB`].
    first: u32,
    /// Empty slabs: one stays, so that a lone block that comes and goes costs nothing more.
    empties: u32,
}

/// The bins of a stream. A row of classes is rounded up so that masked numbers need no check.
struct Bins {
    /// By lifetime and class ([`Bins::at`]).
    all: [Bin; LIFETIMES * ROW],
}

const ROW: usize = CLASSES.next_power_of_two();

impl Bins {
    fn new() -> Self {
        Self { all: [Bin { first: NO_SLAB, empties: 0 }; LIFETIMES * ROW] }
    }

    #[inline(always)]
    fn at(lifetime: u8, class: u8) -> usize {
        lifetime as usize % LIFETIMES * ROW + class as usize % ROW
    }
}

/// Sums over the slabs of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlabSums {
    /// Bytes of all slabs.
    pub(crate) bytes: u64,
    /// Bytes of the slabs with a used slot.
    pub(crate) used_bytes: u64,
    /// Slots of the slabs with a used slot, free ones included.
    pub(crate) used_slots: u64,
}

impl SlabSums {
    /// Adds the sums of another shard, or of a slab.
    pub(crate) fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.used_bytes += other.used_bytes;
        self.used_slots += other.used_slots;
    }
}

impl std::iter::Sum for SlabSums {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, other| {
            sum.add(other);
            sum
        })
    }
}

/// A slot with a freed block, and the lifetime that the block was counted under.
struct PendingSlot {
    slab: u32,
    slot: u32,
    lifetime: u8,
}

/// The outcome of a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FreeOutcome {
    Freed,
    /// The block is freed, and the shard does not need this slab any more.
    Surplus(u32),
    /// The block waits for other streams.
    Waits,
    /// No live block starts there.
    Unknown,
}

/// The small blocks of some streams. Its user holds the lock, and the record's writer that goes
/// with it.
pub(crate) struct Shard {
    /// Streams are numbered `1 << shift` apart in one shard.
    shift: u32,
    slabs: Vec<Option<Box<Slab>>>,
    sums: SlabSums,
    unused: Vec<u32>,
    /// By the stream's number >> shift.
    bins: Vec<Option<Box<Bins>>>,
    /// Lifetimes of live blocks that differ from their slabs', by address ([`Shard::tag`]).
    tagged: HashMap<u64, u8>,
    /// The other streams that use a live block, by its address.
    users: HashMap<u64, Vec<u32>>,
    /// Blocks that wait for streams.
    pending: PendingFrees<PendingSlot>,
}

impl Shard {
    /// An empty shard, for streams whose numbers differ by multiples of `stride`, a power of two.
    pub(crate) fn new(stride: u32) -> Self {
        Self {
            shift: stride.ilog2(),
            slabs: Vec::new(),
            sums: SlabSums::default(),
            unused: Vec::new(),
            bins: Vec::new(),
            tagged: HashMap::new(),
            users: HashMap::new(),
            pending: PendingFrees::default(),
        }
    }

    #[inline(always)]
    fn bin_mut(&mut self, stream: u32, lifetime: u8, class: u8) -> &mut Bin {
        let at = (stream >> self.shift) as usize;
        if at >= self.bins.len() {
            self.bins.resize_with(at + 1, || None);
        }
        let bins = self.bins[at].get_or_insert_with(|| Box::new(Bins::new()));
        &mut bins.all[Bins::at(lifetime, class)]
    }

    /// A slot for `request`, noted in the record; 0: the bin needs a slab.
    #[inline(always)]
    pub(crate) fn allocate(
        &mut self,
        writer: &mut ShardWriter,
        request: Request,
        step: impl FnOnce() -> u32,
    ) -> u64 {
        let Request { size: requested, stream, lifetime, start, .. } = request;
        let Some(Small { size, class, bucket }) = small(requested) else { return 0 };
        let lifetime = lifetime as u8;
        let bins = self.bins.get((stream >> self.shift) as usize).and_then(Option::as_deref);
        let Some(bins) = bins else { return 0 };
        // An empty bin has no slab's number.
        let first = bins.all[Bins::at(lifetime, class)].first;
        let Some(slab) = self.slabs.get_mut(first as usize).and_then(Option::as_deref_mut) else {
            return 0;
        };
        let place = writer.place();
        let Some(slot) = slab.take(requested, place) else {
            writer.put_back(place);
            return 0;
        };
        let (tag, address) = (slab.tag, slab.address(slot));
        if slab.used() == 1 || slab.is_full() {
            self.took(first);
        }
        writer.malloc(place, Block { tag, address, size, requested, bucket }, step, start);
        address
    }

    /// [`Shard::allocate`] for the free slot of slab `id` that starts at `address`; the slab's
    /// stream and lifetime count, not the request's. False, and nothing done: no free slot starts
    /// there.
    pub(crate) fn allocate_at(
        &mut self,
        writer: &mut ShardWriter,
        id: u32,
        address: u64,
        request: Request,
        step: u32,
    ) -> bool {
        let Some(Some(slab)) = self.slabs.get_mut(id as usize) else { return false };
        let Some(slot) = slab.slot_at(address) else { return false };
        let place = writer.place();
        if !slab.take_slot(slot, request.size, place) {
            writer.put_back(place);
            return false;
        }
        let (tag, Small { size, bucket, .. }) = (slab.tag, small_again(request.size));
        if slab.used() == 1 || slab.is_full() {
            self.took(id);
        }
        let block = Block { tag, address, size, requested: request.size, bucket };
        writer.malloc(place, block, || step, request.start);
        true
    }

    /// The rare part of taking a slot: the slab was empty, or is full now.
    #[cold]
    #[inline(never)]
    fn took(&mut self, id: u32) {
        let Some(slab) = self.slabs[id as usize].as_deref() else { return };
        let (stream, lifetime, class) = (slab.stream, slab.lifetime, slab.class);
        let (was_empty, full) = (slab.used() == 1, slab.is_full());
        let (bytes, slots) = (slab.bytes(), slab.count());
        if was_empty {
            self.sums.used_bytes += bytes;
            self.sums.used_slots += u64::from(slots);
            self.bin_mut(stream, lifetime, class).empties -= 1;
        }
        if full {
            self.unlink(id);
        }
    }

    /// Adds a slab of free slots to its bin; returns its number.
    pub(crate) fn add_slab(&mut self, slab: Slab) -> u32 {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.slabs.push(None);
            self.slabs.len() as u32 - 1
        });
        self.bin_mut(slab.stream, slab.lifetime, slab.class).empties += 1;
        self.sums.bytes += slab.bytes();
        self.slabs[id as usize] = Some(Box::new(slab));
        self.link(id);
        id
    }

    /// Puts a slab on its bin's list, first if it lies lower than the first, else second:
    /// allocation drifts to low addresses and lets the high slabs run empty.
    fn link(&mut self, id: u32) {
        let Some(slab) = self.slabs[id as usize].as_deref() else { return };
        let (base, stream, lifetime, class) = (slab.base, slab.stream, slab.lifetime, slab.class);
        let first = self.bin_mut(stream, lifetime, class).first;
        let (previous, next) = match self.slabs.get(first as usize).and_then(Option::as_deref) {
            None => (NO_SLAB, NO_SLAB),
            Some(head) if head.base < base => (first, head.next),
            Some(_) => (NO_SLAB, first),
        };
        self.set_links(id, previous, next);
        if previous == NO_SLAB {
            self.bin_mut(stream, lifetime, class).first = id;
        } else {
            self.with(previous, |slab| slab.next = id);
        }
        if next != NO_SLAB {
            self.with(next, |slab| slab.previous = id);
        }
    }

    fn unlink(&mut self, id: u32) {
        let Some(slab) = self.slabs[id as usize].as_deref() else { return };
        let (stream, lifetime, class, previous, next) =
            (slab.stream, slab.lifetime, slab.class, slab.previous, slab.next);
        if previous == NO_SLAB {
            self.bin_mut(stream, lifetime, class).first = next;
        } else {
            self.with(previous, |slab| slab.next = next);
        }
        if next != NO_SLAB {
            self.with(next, |slab| slab.previous = previous);
        }
        self.set_links(id, NO_SLAB, NO_SLAB);
    }

    fn set_links(&mut self, id: u32, previous: u32, next: u32) {
        self.with(id, |slab| (slab.previous, slab.next) = (previous, next));
    }

    fn with(&mut self, id: u32, change: impl FnOnce(&mut Slab)) {
        if let Some(slab) = self.slabs.get_mut(id as usize).and_then(Option::as_deref_mut) {
            change(slab);
        }
    }

    /// Frees the block at `address` in slab `id` at `time`, and notes it in the record. `address`
    /// and `id` may be anything.
    #[inline(always)]
    pub(crate) fn free(
        &mut self,
        writer: &mut ShardWriter,
        id: u32,
        address: u64,
        time: u64,
        streams: &Streams,
    ) -> FreeOutcome {
        let slab = self.slabs.get_mut(id as usize).and_then(Option::as_deref_mut);
        let Some(slab) = slab else { return FreeOutcome::Unknown };
        let Some((slot, Freed { requested, block })) = slab.plain_at(address) else {
            return self.free_other(writer, id, address, time, streams, None);
        };
        // Before the slot is given back: what the record needs is at hand now, and need not be
        // kept.
        let (tag, Small { size, bucket, .. }) = (slab.tag, small_again(requested));
        writer.free(block, Block { tag, address, size, requested, bucket }, time);
        let was_full = slab.free(slot);
        let last = was_full || slab.is_idle();
        if last {
            return self.freed_last(id, was_full, streams);
        }
        FreeOutcome::Freed
    }

    /// The rare part of freeing a slot: the slab was full, or has no live block now.
    #[cold]
    #[inline(never)]
    fn freed_last(&mut self, id: u32, was_full: bool, streams: &Streams) -> FreeOutcome {
        let Some(Some(slab)) = self.slabs.get_mut(id as usize) else { return FreeOutcome::Unknown };
        if slab.is_idle() {
            // While blocks are live, its free slots are for its own stream only, and no reader
            // needs the epoch. The epoch that is open now covers the earlier frees too.
            slab.epoch = streams.note_free(slab.stream);
        }
        self.released(id, was_full)
    }

    /// Relinks a slab after the free of a slot: it was full before, or may be empty now.
    fn released(&mut self, id: u32, was_full: bool) -> FreeOutcome {
        if was_full {
            self.link(id);
        }
        let Some(Some(slab)) = self.slabs.get(id as usize) else { return FreeOutcome::Unknown };
        let (stream, lifetime, class) = (slab.stream, slab.lifetime, slab.class);
        if slab.used() == 0 {
            self.sums.used_bytes -= slab.bytes();
            self.sums.used_slots -= u64::from(slab.count());
            let bin = self.bin_mut(stream, lifetime, class);
            bin.empties += 1;
            if bin.empties > 1 {
                return FreeOutcome::Surplus(id);
            }
        }
        FreeOutcome::Freed
    }

    /// Frees a block that other streams use, or that is tagged, or none. `also` must pass this
    /// moment too.
    #[cold]
    #[inline(never)]
    fn free_other(
        &mut self,
        writer: &mut ShardWriter,
        id: u32,
        address: u64,
        time: u64,
        streams: &Streams,
        also: Option<u32>,
    ) -> FreeOutcome {
        let Some(Some(slab)) = self.slabs.get_mut(id as usize) else { return FreeOutcome::Unknown };
        let Some(slot) = slab.slot_at(address) else { return FreeOutcome::Unknown };
        let SlotState::Live { shared } = slab.state(slot) else { return FreeOutcome::Unknown };
        let (stream, of_slab) = (slab.stream, slab.lifetime);
        let users =
            if shared { self.users.remove(&address).unwrap_or_default() } else { Vec::new() };
        // In most cases none is tagged, and a look would cost as much as the users did.
        let tagged = if self.tagged.is_empty() { None } else { self.tagged.remove(&address) };
        let lifetime = tagged.unwrap_or(of_slab);
        if stream != ALL_STREAMS {
            slab.epoch = streams.note_free(stream);
        }
        if also.is_none() && users.is_empty() {
            // Only tagged: it goes at once, by way of the slot's waiting.
            let Freed { requested, block, .. } = slab.facts(slot);
            let size = round(requested);
            slab.set_pending(slot);
            let was_full = slab.complete_free(slot);
            writer.block_remove(block, size, requested, lifetime, false);
            writer.event(EventKind::Free, lifetime, slab.stream, address, size, time);
            return self.released(id, was_full);
        }
        Self::set_pending(slab, writer, slot, lifetime, time);
        let (block, own) = (PendingSlot { slab: id, slot, lifetime }, (stream, slab.epoch));
        self.pending.push(block, own, users, also, |user| streams.note_wait(user));
        FreeOutcome::Waits
    }

    /// [`Shard::free`] for a block whose slot waits until stream `user` is past this moment.
    pub(crate) fn free_behind(
        &mut self,
        writer: &mut ShardWriter,
        id: u32,
        address: u64,
        time: u64,
        streams: &Streams,
        user: u32,
    ) -> FreeOutcome {
        let stream = self.slab(id).map(|slab| slab.stream);
        if stream == Some(user) && user != ALL_STREAMS {
            return self.free(writer, id, address, time, streams);
        }
        self.free_other(writer, id, address, time, streams, Some(user))
    }

    /// Makes a live block pending: the program is done with it, but it cannot be reused yet.
    fn set_pending(slab: &mut Slab, writer: &mut ShardWriter, slot: u32, lifetime: u8, time: u64) {
        let Freed { requested, block, .. } = slab.facts(slot);
        let size = round(requested);
        slab.set_pending(slot);
        writer.block_pending(block, size, requested, lifetime);
        writer.event(EventKind::Free, lifetime, slab.stream, slab.address(slot), size, time);
    }

    /// Frees the block at `address` for its program only: nothing uses its slot again.
    pub(crate) fn freeze(
        &mut self,
        writer: &mut ShardWriter,
        id: u32,
        address: u64,
        time: u64,
    ) -> FreeOutcome {
        let Some(Some(slab)) = self.slabs.get_mut(id as usize) else { return FreeOutcome::Unknown };
        let Some(slot) = slab.slot_at(address) else { return FreeOutcome::Unknown };
        let SlotState::Live { .. } = slab.state(slot) else { return FreeOutcome::Unknown };
        let lifetime = self.tagged.remove(&address).unwrap_or(slab.lifetime);
        Self::set_pending(slab, writer, slot, lifetime, time);
        FreeOutcome::Waits
    }

    /// Bytes asked for of the live block at `address`; `None`: no live block starts there.
    pub(crate) fn requested(&self, id: u32, address: u64) -> Option<u64> {
        let slab = self.slabs.get(id as usize)?.as_deref()?;
        let slot = slab.slot_at(address)?;
        matches!(slab.state(slot), SlotState::Live { .. }).then(|| slab.facts(slot).requested)
    }

    /// Counts the live block at `address` under another lifetime; it stays in place. `None`: no
    /// live block starts there.
    pub(crate) fn tag(
        &mut self,
        writer: &mut ShardWriter,
        id: u32,
        address: u64,
        lifetime: u8,
    ) -> Option<()> {
        let slab = self.slabs.get_mut(id as usize)?.as_deref_mut()?;
        let slot = slab.slot_at(address)?;
        let SlotState::Live { .. } = slab.state(slot) else { return None };
        let from = self.tagged.get(&address).copied().unwrap_or(slab.lifetime);
        if from != lifetime {
            let facts = slab.facts(slot);
            writer.block_retag(
                facts.block,
                round(facts.requested),
                facts.requested,
                from,
                lifetime,
            );
            // Its free then leaves the straight path, and finds the tag there.
            slab.set_shared(slot);
            self.tagged.insert(address, lifetime);
        }
        Some(())
    }

    /// Notes that `user` uses the block at `address` too. `None`: no live block starts there.
    pub(crate) fn record_stream(&mut self, id: u32, address: u64, user: u32) -> Option<()> {
        let slab = self.slabs.get_mut(id as usize)?.as_deref_mut()?;
        let slot = slab.slot_at(address)?;
        let SlotState::Live { .. } = slab.state(slot) else { return None };
        if user != slab.stream || user == ALL_STREAMS {
            slab.set_shared(slot);
            let users = self.users.entry(address).or_default();
            if !users.contains(&user) {
                users.push(user);
            }
        }
        Some(())
    }

    /// Whether other streams use the live block at `address`: its free then waits for them.
    pub(crate) fn is_used_elsewhere(&self, address: u64) -> bool {
        self.users.contains_key(&address)
    }

    /// Whether blocks wait for other streams.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Whether a wait is over that [`Shard::complete_frees`] would not see; a bug if so.
    pub(crate) fn overlooks_waits(&self, streams: &Streams) -> bool {
        self.pending.overlooks(streams.strides(), |stream| streams.completed(stream))
    }

    /// Frees the blocks whose waits are over; returns the surplus slabs.
    pub(crate) fn complete_frees(
        &mut self,
        writer: &mut ShardWriter,
        streams: &Streams,
    ) -> Vec<u32> {
        let mut surplus = Vec::new();
        if !self.pending.is_due(streams.strides()) {
            return surplus;
        }
        let mut pending = std::mem::take(&mut self.pending);
        pending.complete_where(|free| {
            let is_over = free.is_over(|stream| streams.completed(stream));
            if is_over {
                surplus.extend(self.complete_slot(writer, &free.block));
            }
            is_over
        });
        self.pending = pending;
        surplus
    }

    /// Frees a slot that has waited; returns the slab if it is surplus now.
    fn complete_slot(&mut self, writer: &mut ShardWriter, at: &PendingSlot) -> Option<u32> {
        let slab = self.slabs.get_mut(at.slab as usize)?.as_deref_mut()?;
        let Freed { block, requested, .. } = slab.facts(at.slot);
        writer.block_remove(block, round(requested), requested, at.lifetime, true);
        let was_full = slab.complete_free(at.slot);
        match self.released(at.slab, was_full) {
            FreeOutcome::Surplus(id) => Some(id),
            _ => None,
        }
    }

    /// Takes an empty slab out of the shard; `None`: it is in use again.
    pub(crate) fn remove_slab(&mut self, id: u32) -> Option<Slab> {
        let slab = self.slabs.get(id as usize)?.as_deref()?;
        if slab.used() != 0 {
            return None;
        }
        let (stream, lifetime, class, bytes) =
            (slab.stream, slab.lifetime, slab.class, slab.bytes());
        self.unlink(id);
        self.bin_mut(stream, lifetime, class).empties -= 1;
        let slab = self.slabs[id as usize].take()?;
        self.sums.bytes -= bytes;
        self.unused.push(id);
        Some(*slab)
    }

    /// Whether a slab is empty, without a walk.
    pub(crate) fn has_empty_slabs(&self) -> bool {
        self.sums.used_bytes != self.sums.bytes
    }

    /// The numbers of all empty slabs.
    pub(crate) fn empty_slabs(&self) -> Vec<u32> {
        if !self.has_empty_slabs() {
            return Vec::new();
        }
        self.slabs().filter(|(_, slab)| slab.used() == 0).map(|(id, _)| id).collect()
    }

    /// Sums over the slabs, without a walk.
    pub(crate) fn slab_sums(&self) -> SlabSums {
        self.sums
    }

    pub(crate) fn slabs(&self) -> impl Iterator<Item = (u32, &Slab)> {
        self.slabs
            .iter()
            .enumerate()
            .filter_map(|(id, slab)| slab.as_deref().map(|slab| (id as u32, slab)))
    }

    pub(crate) fn slab(&self, id: u32) -> Option<&Slab> {
        self.slabs.get(id as usize)?.as_deref()
    }

    /// Bytes of blocks that wait for other streams.
    pub(crate) fn pending_bytes(&self) -> u64 {
        let bytes = |at: &PendingSlot| Some(round(self.slab(at.slab)?.facts(at.slot).requested));
        self.pending.blocks().filter_map(bytes).sum()
    }

    /// Adds every stream that owns a slab here, uses a block, or has a free waiting for it.
    pub(crate) fn streams_referred(&self, referred: &mut HashSet<u32>) {
        referred.extend(self.slabs().map(|(_, slab)| slab.stream));
        referred.extend(self.users.values().flatten().copied().chain(self.pending.streams()));
    }
}
