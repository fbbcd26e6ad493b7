//! A lane: the small blocks of the streams that share one lock.
//!
//! Streams are dealt over the lanes of a device, so that threads on different streams do not meet. A bin is the slabs of one (stream,
//! lifetime, size class) with a free slot. A lane never holds its lock while it asks the device's central part for memory:
//! [`Lane::allocate`] answers that it needs a slab, and the caller comes back with one.
#![deny(unsafe_code)]

use super::lifetime::LIFETIMES;
use super::pending::Pending;
use super::size_class::{CLASSES, SIZE_CLASSES, SMALL_MAX, Small, class_of, round, small, small_again};
use super::slab::{Freed, Slab, SlotState};
use super::streams::{EVERY, Streams};
use crate::heap::request::Request;
use crate::record::{Block, EventKind, LaneWriter};
use std::collections::{HashMap, HashSet, VecDeque};

/// Lanes a device for small blocks; one more of the record's lanes is the central part's.
pub const LANES: usize = crate::record::LANES - 1;
const _: () = assert!(LANES.is_power_of_two());
/// The record's pool of small blocks.
const SMALL: usize = 0;
const NO_SLAB: u32 = u32::MAX;

/// The slabs with free slots of one (lifetime, size class) of a stream.
#[derive(Clone, Copy)]
struct Bin {
    first: u32,
    /// An empty slab stays here, so that a lone block that comes and goes costs nothing more.
    empties: u32,
    /// Live blocks of this size class that lie in slabs of a larger one.
    borrowed: u32,
}

/// The bins of a stream. A row of classes is rounded up so that masked numbers need no check.
struct Bins {
    all: [Bin; LIFETIMES * ROW],
    /// Of each lifetime, a bit for each class whose bin has a slab to lend from: classes below [`HALF`], and the others.
    lending: [[u64; 2]; LIFETIMES],
}

const ROW: usize = CLASSES.next_power_of_two();

impl Bins {
    fn new() -> Self {
        Self {
            all: [Bin { first: NO_SLAB, empties: 0, borrowed: 0 }; LIFETIMES * ROW],
            lending: [[0; 2]; LIFETIMES],
        }
    }

    #[inline(always)]
    fn at(lifetime: u8, class: u8) -> usize {
        lifetime as usize % LIFETIMES * ROW + class as usize % ROW
    }

    /// The word and the bit of a class in [`Bins::lending`].
    #[inline(always)]
    fn bit_of(class: u8) -> (usize, u32) {
        let upper = u32::from(class >= HALF);
        (upper as usize, (u32::from(class) - upper * u32::from(HALF)) % u64::BITS)
    }

    /// The next class above `own` with a slab that lends to it one block more. About 20 instructions.
    #[inline(always)]
    fn lender(&self, lifetime: u8, own: u8) -> Option<u8> {
        let (word, bit) = Self::bit_of(own);
        let above = (self.lending[lifetime as usize % LIFETIMES][word] >> bit).trailing_zeros();
        let borrowed = self.all[Self::at(lifetime, own)].borrowed;
        let most = *MOST_BORROWED[own as usize % ROW].get(above as usize)?;
        (borrowed < u32::from(most)).then_some(own + above as u8)
    }
}

/// What the slabs of a lane come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabSums {
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of those that have a used slot.
    pub used_bytes: u64,
    /// All slots of those.
    pub used_slots: u64,
}

impl SlabSums {
    fn add(&mut self, other: Self) {
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

/// A block that its program has freed, and the streams that may still use it, each with the epoch to wait for.
struct PendingBlock {
    slab: u32,
    slot: u32,
    lifetime: u8,
    waits: Pending,
}

/// What became of a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeOutcome {
    /// Done.
    Freed,
    /// Done, and this slab is not needed here any more.
    Surplus(u32),
    /// The block waits for other streams.
    Waits,
    /// No block starts there, or it is freed already.
    Unknown,
}

/// The small blocks of some streams. Its user holds the lock, and the record's writer that goes with it.
pub struct Lane {
    /// Streams are numbered `1 << shift` apart in one lane.
    shift: u32,
    /// Classes with few blocks borrow slots of larger ones.
    borrows: bool,
    slabs: Vec<Option<Box<Slab>>>,
    sums: SlabSums,
    unused: Vec<u32>,
    /// By stream number >> shift.
    bins: Vec<Option<Box<Bins>>>,
    users: HashMap<u64, Vec<u32>>,
    /// Lifetimes of live blocks that differ from their slabs', by address ([`Lane::tag`]).
    tagged: HashMap<u64, u8>,
    pending: VecDeque<PendingBlock>,
    /// [`Streams::strides`] when their waits were looked at last.
    looked_at: u64,
}

impl Lane {
    /// An empty lane, for streams whose numbers differ by multiples of `stride`, a power of two. `borrows`: whether classes with few blocks
    /// take slots of larger ones.
    pub fn new(stride: u32, borrows: bool) -> Self {
        Self {
            shift: stride.ilog2(),
            borrows,
            slabs: Vec::new(),
            sums: SlabSums::default(),
            unused: Vec::new(),
            bins: Vec::new(),
            users: HashMap::new(),
            tagged: HashMap::new(),
            pending: VecDeque::new(),
            looked_at: 0,
        }
    }

    fn bin_mut(&mut self, stream: u32, lifetime: u8, class: u8) -> &mut Bin {
        let at = (stream >> self.shift) as usize;
        if at >= self.bins.len() {
            self.bins.resize_with(at + 1, || None);
        }
        let bins = self.bins[at].get_or_insert_with(|| Box::new(Bins::new()));
        &mut bins.all[Bins::at(lifetime, class)]
    }

    /// A slot for `request`, which the record is told of; 0: the bin needs a slab. A class with few blocks has no slab of its own, which
    /// would lie idle for the most part, but borrows slots of a larger one. [`Lane::class_of_next_slab`] is the one to bring.
    #[inline(always)]
    pub fn allocate(&mut self, writer: &mut LaneWriter, request: Request, step: impl FnOnce() -> u32) -> u64 {
        let Request { size: requested, stream, lifetime, start } = request;
        let Some(Small { size, class: own, bucket }) = small(requested) else { return 0 };
        let lifetime = lifetime as u8;
        let bins = self.bins.get_mut((stream >> self.shift) as usize).and_then(Option::as_deref_mut);
        let Some(bins) = bins else { return 0 };
        let mut first = bins.all[Bins::at(lifetime, own)].first;
        if first == NO_SLAB {
            let Some(lender) = bins.lender(lifetime, own) else { return 0 };
            first = bins.all[Bins::at(lifetime, lender)].first;
            // The first slab of a list has a free slot: nothing fails from here on.
            bins.all[Bins::at(lifetime, own)].borrowed += 1;
        }
        let Some(slab) = self.slabs.get_mut(first as usize).and_then(Option::as_deref_mut) else { return 0 };
        let place = writer.place();
        let Some(slot) = slab.take(requested, own, place) else {
            writer.put_back(place);
            return 0;
        };
        let (tag, address) = (slab.tag, slab.address(slot));
        if slab.used() == 1 || slab.is_full() {
            self.took(first);
        }
        writer.malloc(SMALL, place, Block { tag, address, size, requested, bucket }, step, start);
        address
    }

    /// The class of the slab that lets `request` be served, where [`Lane::allocate`] did not.
    pub fn class_of_next_slab(&mut self, request: Request) -> u8 {
        let own = class_of(request.size) as u8;
        let borrowed = self.bin_mut(request.stream, request.lifetime as u8, own).borrowed;
        let lender = lender_of(own);
        let most =
            if self.borrows { MOST_BORROWED[own as usize % ROW][usize::from(lender - own)] } else { 0 };
        if borrowed < u32::from(most) { lender } else { own }
    }

    /// A block of class `own` in a slab of a larger one is freed.
    #[inline(always)]
    fn return_borrowed(&mut self, stream: u32, lifetime: u8, own: u8) {
        if let Some(Some(bins)) = self.bins.get_mut((stream >> self.shift) as usize) {
            bins.all[Bins::at(lifetime, own)].borrowed -= 1;
        }
    }

    /// The rare part of taking a slot: the slab was empty before, or is full now.
    #[cold]
    #[inline(never)]
    fn took(&mut self, id: u32) {
        let Some(slab) = self.slabs[id as usize].as_deref() else { return };
        let (stream, lifetime, class) = (slab.stream, slab.lifetime, slab.class);
        let (was_empty, full, size_class) = (slab.used() == 1, slab.is_full(), slab.size_class());
        if was_empty {
            self.sums.used_bytes += size_class.slab_bytes();
            self.sums.used_slots += u64::from(size_class.slots);
            self.bin_mut(stream, lifetime, class).empties -= 1;
        }
        if full {
            self.unlink(id);
        }
    }

    /// Adds a slab of free slots to its bin; its number.
    pub fn add_slab(&mut self, slab: Slab) -> u32 {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.slabs.push(None);
            self.slabs.len() as u32 - 1
        });
        self.bin_mut(slab.stream, slab.lifetime, slab.class).empties += 1;
        self.sums.bytes += slab.size_class().slab_bytes();
        self.slabs[id as usize] = Some(Box::new(slab));
        self.link(id);
        id
    }

    /// Puts a slab on its bin's list, before the first if it lies lower, else behind it: allocation drifts to low
    /// addresses and lets the high slabs run empty.
    fn link(&mut self, id: u32) {
        let Some(slab) = self.slabs[id as usize].as_deref() else { return };
        let (base, stream, lifetime, class) = (slab.base, slab.stream, slab.lifetime, slab.class);
        let first = self.bin_mut(stream, lifetime, class).first;
        let (previous, next) = match self.slabs.get(first as usize).and_then(Option::as_deref) {
            None => (NO_SLAB, NO_SLAB),
            Some(head) if head.base < base => (first, head.next),
            Some(_) => (NO_SLAB, first),
        };
        if previous == NO_SLAB {
            self.set_first(stream, lifetime, class, id);
        }
        self.set_links(id, previous, next);
        self.with(previous, |slab| slab.next = id);
        self.with(next, |slab| slab.previous = id);
    }

    /// The first slab on the list of a bin is `id`, or there is none any more.
    fn set_first(&mut self, stream: u32, lifetime: u8, class: u8, id: u32) {
        self.bin_mut(stream, lifetime, class).first = id;
        let lends = self.borrows && id != NO_SLAB;
        if let Some(Some(bins)) = self.bins.get_mut((stream >> self.shift) as usize) {
            let (word, bit) = Bins::bit_of(class);
            let word = &mut bins.lending[lifetime as usize % LIFETIMES][word];
            *word = *word & !(1 << bit) | u64::from(lends) << bit;
        }
    }

    fn unlink(&mut self, id: u32) {
        let Some(slab) = self.slabs[id as usize].as_deref() else { return };
        let (stream, lifetime, class, previous, next) =
            (slab.stream, slab.lifetime, slab.class, slab.previous, slab.next);
        if previous == NO_SLAB {
            self.set_first(stream, lifetime, class, next);
        }
        self.with(previous, |slab| slab.next = next);
        self.with(next, |slab| slab.previous = previous);
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

    /// Frees the block at `address` in slab `id` (both may be anything) at `time`, and tells the record.
    #[inline(always)]
    pub fn free(
        &mut self,
        writer: &mut LaneWriter,
        id: u32,
        address: u64,
        time: u64,
        streams: &Streams,
    ) -> FreeOutcome {
        let slab = self.slabs.get_mut(id as usize).and_then(Option::as_deref_mut);
        let Some(slab) = slab else { return FreeOutcome::Unknown };
        let Some((slot, Freed { requested, block, class })) = slab.plain_at(address) else {
            return self.free_other(writer, id, address, time, streams);
        };
        // Before the slot is given back: what the record needs is at hand, and need not be kept through that.
        let (tag, Small { size, bucket, .. }) = (slab.tag, small_again(requested));
        writer.free(SMALL, block, Block { tag, address, size, requested, bucket }, time);
        let was_full = slab.free(slot);
        let last = was_full || slab.is_idle();
        if class != slab.class {
            let (stream, lifetime) = (slab.stream, slab.lifetime);
            self.return_borrowed(stream, lifetime, class);
        }
        if last {
            return self.freed_last(id, was_full, streams);
        }
        FreeOutcome::Freed
    }

    /// The rare part of freeing a slot: the slab was full before, or nothing in it is live now.
    #[cold]
    #[inline(never)]
    fn freed_last(&mut self, id: u32, was_full: bool, streams: &Streams) -> FreeOutcome {
        let Some(Some(slab)) = self.slabs.get_mut(id as usize) else { return FreeOutcome::Unknown };
        if slab.is_idle() {
            // While blocks are live, its free slots are for its own stream only, and nobody asks for the epoch. The one that is open
            // now stands for the earlier frees too.
            slab.epoch = streams.note_free(slab.stream);
        }
        self.released(id, was_full)
    }

    /// A slot was freed of a slab that was full before, or may be empty now.
    fn released(&mut self, id: u32, was_full: bool) -> FreeOutcome {
        if was_full {
            self.link(id);
        }
        let Some(Some(slab)) = self.slabs.get(id as usize) else { return FreeOutcome::Unknown };
        let (stream, lifetime, class) = (slab.stream, slab.lifetime, slab.class);
        if slab.used() == 0 {
            let size_class = slab.size_class();
            self.sums.used_bytes -= size_class.slab_bytes();
            self.sums.used_slots -= u64::from(size_class.slots);
            let bin = self.bin_mut(stream, lifetime, class);
            bin.empties += 1;
            if bin.empties > 1 {
                return FreeOutcome::Surplus(id);
            }
        }
        FreeOutcome::Freed
    }

    /// A block that other streams use, or none.
    #[cold]
    #[inline(never)]
    fn free_other(
        &mut self,
        writer: &mut LaneWriter,
        id: u32,
        address: u64,
        time: u64,
        streams: &Streams,
    ) -> FreeOutcome {
        let Some(Some(slab)) = self.slabs.get_mut(id as usize) else { return FreeOutcome::Unknown };
        let Some(slot) = slab.slot_at(address) else { return FreeOutcome::Unknown };
        let SlotState::Live { .. } = slab.state(slot) else { return FreeOutcome::Unknown };
        let (stream, of_slab, own) = (slab.stream, slab.lifetime, slab.facts(slot).class);
        if own != slab.class {
            self.return_borrowed(stream, of_slab, own);
        }
        let Some(Some(slab)) = self.slabs.get_mut(id as usize) else { return FreeOutcome::Unknown };
        let users = self.users.remove(&address).unwrap_or_default();
        let tagged = self.tagged.remove(&address);
        let (lifetime, has_users) = (tagged.unwrap_or(of_slab), !users.is_empty());
        let waits = Pending::behind(users, streams);
        if stream != EVERY {
            slab.epoch = streams.note_free(stream);
        }
        if !has_users {
            // Only tagged: it goes at once, by way of the slot's waiting.
            let Freed { requested, block, .. } = slab.facts(slot);
            let size = round(requested);
            slab.set_pending(slot);
            let was_full = slab.settle(slot);
            writer.block_remove(block, size, requested, lifetime, false);
            writer.event(EventKind::Free, lifetime, slab.stream, address, size, time);
            return self.released(id, was_full);
        }
        Self::set_pending(slab, writer, slot, lifetime, time);
        self.pending.push_back(PendingBlock { slab: id, slot, lifetime, waits });
        FreeOutcome::Waits
    }

    /// As [`Lane::free`], of a block that is not reused before stream `user` is past this moment. `None`: none that is not also used by other
    /// streams starts there.
    pub fn free_behind(
        &mut self,
        writer: &mut LaneWriter,
        id: u32,
        address: u64,
        time: u64,
        streams: &Streams,
        user: u32,
    ) -> Option<FreeOutcome> {
        let slab = self.slabs.get_mut(id as usize).and_then(Option::as_deref_mut)?;
        let (slot, Freed { class, .. }) = slab.plain_at(address)?;
        let (stream, lifetime) = (slab.stream, slab.lifetime);
        if stream == user && user != EVERY {
            return Some(self.free(writer, id, address, time, streams));
        }
        if stream != EVERY {
            slab.epoch = streams.note_free(stream);
        }
        Self::set_pending(slab, writer, slot, lifetime, time);
        if class != slab.class {
            self.return_borrowed(stream, lifetime, class);
        }
        let waits = Pending::One((user, streams.note_wait(user)));
        self.pending.push_back(PendingBlock { slab: id, slot, lifetime, waits });
        Some(FreeOutcome::Waits)
    }

    /// The program is done with a live block that cannot be reused yet.
    fn set_pending(slab: &mut Slab, writer: &mut LaneWriter, slot: u32, lifetime: u8, time: u64) {
        let Freed { requested, block, .. } = slab.facts(slot);
        let size = round(requested);
        slab.set_pending(slot);
        writer.block_pending(block, size, requested, lifetime);
        writer.event(EventKind::Free, lifetime, slab.stream, slab.address(slot), size, time);
    }

    /// Frees the block at `address` for its program only: nothing ever uses its slot again.
    pub fn freeze(&mut self, writer: &mut LaneWriter, id: u32, address: u64, time: u64) -> FreeOutcome {
        let Some(Some(slab)) = self.slabs.get_mut(id as usize) else { return FreeOutcome::Unknown };
        let Some(slot) = slab.slot_at(address) else { return FreeOutcome::Unknown };
        let SlotState::Live { .. } = slab.state(slot) else { return FreeOutcome::Unknown };
        let lifetime = self.tagged.remove(&address).unwrap_or(slab.lifetime);
        Self::set_pending(slab, writer, slot, lifetime, time);
        FreeOutcome::Waits
    }

    /// Bytes asked for of the live block at `address`, and `None` where no live block starts there.
    pub fn requested(&self, id: u32, address: u64) -> Option<u64> {
        let slab = self.slabs.get(id as usize)?.as_deref()?;
        let slot = slab.slot_at(address)?;
        matches!(slab.state(slot), SlotState::Live { .. }).then(|| slab.facts(slot).requested)
    }

    /// Counts the live block at `address` under another lifetime; it stays where it is. `None`: no live block starts there.
    pub fn tag(&mut self, writer: &mut LaneWriter, id: u32, address: u64, lifetime: u8) -> Option<()> {
        let slab = self.slabs.get_mut(id as usize)?.as_deref_mut()?;
        let slot = slab.slot_at(address)?;
        let SlotState::Live { .. } = slab.state(slot) else { return None };
        let from = self.tagged.get(&address).copied().unwrap_or(slab.lifetime);
        if from != lifetime {
            let facts = slab.facts(slot);
            writer.block_retag(facts.block, round(facts.requested), facts.requested, from, lifetime);
            // Its free leaves the straight path, and finds the tag there.
            slab.set_shared(slot);
            self.tagged.insert(address, lifetime);
        }
        Some(())
    }

    /// Notes that `user` uses the block at `address` too. `None`: no live block starts there.
    pub fn record_stream(&mut self, id: u32, address: u64, user: u32) -> Option<()> {
        let slab = self.slabs.get_mut(id as usize)?.as_deref_mut()?;
        let slot = slab.slot_at(address)?;
        let SlotState::Live { .. } = slab.state(slot) else { return None };
        if user != slab.stream || user == EVERY {
            slab.set_shared(slot);
            let users = self.users.entry(address).or_default();
            if !users.contains(&user) {
                users.push(user);
            }
        }
        Some(())
    }

    /// Whether other streams use the live block at `address`, so that its free will wait for them.
    pub fn is_used_elsewhere(&self, address: u64) -> bool {
        self.users.contains_key(&address)
    }

    /// Whether blocks wait for other streams.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Whether a wait that is over would not be seen by [`Lane::settle`]: there must be none.
    pub fn overlooks_waits(&self, streams: &Streams) -> bool {
        self.looked_at == streams.strides() && self.pending.iter().any(|block| block.waits.is_over(streams))
    }

    /// Frees the blocks whose waits are over; returns the surplus slabs.
    pub fn settle(&mut self, writer: &mut LaneWriter, streams: &Streams) -> Vec<u32> {
        let mut surplus = Vec::new();
        // A wait that was not over then, or began since, is not over before some stream gets further.
        let strides = streams.strides();
        if std::mem::replace(&mut self.looked_at, strides) == strides {
            return surplus;
        }
        for _ in 0..self.pending.len() {
            let Some(block) = self.pending.pop_front() else { break };
            if !block.waits.is_over(streams) {
                self.pending.push_back(block);
                continue;
            }
            let Some(Some(slab)) = self.slabs.get_mut(block.slab as usize) else { continue };
            let (facts, lifetime) = (slab.facts(block.slot), block.lifetime);
            writer.block_remove(facts.block, round(facts.requested), facts.requested, lifetime, true);
            let was_full = slab.settle(block.slot);
            if let FreeOutcome::Surplus(id) = self.released(block.slab, was_full) {
                surplus.push(id);
            }
        }
        surplus
    }

    /// Takes an empty slab out of the lane; `None` where it was used again meanwhile.
    pub fn remove_slab(&mut self, id: u32) -> Option<Slab> {
        let slab = self.slabs.get(id as usize)?.as_deref()?;
        if slab.used() != 0 {
            return None;
        }
        let (stream, lifetime, class) = (slab.stream, slab.lifetime, slab.class);
        self.unlink(id);
        self.bin_mut(stream, lifetime, class).empties -= 1;
        let slab = self.slabs[id as usize].take()?;
        self.sums.bytes -= slab.size_class().slab_bytes();
        self.unused.push(id);
        Some(*slab)
    }

    /// Whether a slab is empty. Costs no walk.
    pub fn has_empty_slabs(&self) -> bool {
        self.sums.used_bytes != self.sums.bytes
    }

    /// The numbers of all empty slabs.
    pub fn empty_slabs(&self) -> Vec<u32> {
        if !self.has_empty_slabs() {
            return Vec::new();
        }
        self.slabs().filter(|(_, slab)| slab.used() == 0).map(|(id, _)| id).collect()
    }

    /// What they come to, without a walk.
    pub fn slab_sums(&self) -> SlabSums {
        self.sums
    }

    /// All slabs.
    pub fn slabs(&self) -> impl Iterator<Item = (u32, &Slab)> {
        self.slabs.iter().enumerate().filter_map(|(id, slab)| slab.as_deref().map(|slab| (id as u32, slab)))
    }

    /// A slab.
    pub fn slab(&self, id: u32) -> Option<&Slab> {
        self.slabs.get(id as usize)?.as_deref()
    }

    /// Bytes of blocks that wait for other streams.
    pub fn pending_bytes(&self) -> u64 {
        self.pending
            .iter()
            .filter_map(|block| {
                Some(round(self.slabs[block.slab as usize].as_deref()?.facts(block.slot).requested))
            })
            .sum()
    }

    /// Adds every stream that owns a slab here, uses a block or is waited for.
    pub fn streams_referred(&self, referred: &mut HashSet<u32>) {
        referred.extend(self.slabs().map(|(_, slab)| slab.stream));
        referred.extend(self.users.values().flatten());
        referred.extend(self.pending.iter().flat_map(|block| block.waits.as_slice()).map(|wait| wait.0));
    }

    /// Walks every slab and bin.
    ///
    /// # Errors
    /// The first broken invariant, in words.
    pub fn validate(&self) -> Result<(), String> {
        let mut listed = 0;
        for (group, bins) in self.bins.iter().enumerate() {
            for (at, bin) in bins.iter().flat_map(|bins| bins.all.iter().enumerate()) {
                let (mut id, mut previous, mut empties) = (bin.first, NO_SLAB, 0);
                while id != NO_SLAB {
                    let slab = self.slabs.get(id as usize).and_then(Option::as_deref);
                    let Some(slab) = slab else {
                        return Err(format!("a bin lists slab {id}, which is not there"));
                    };
                    let home = Bins::at(slab.lifetime, slab.class);
                    if home != at
                        || (slab.stream >> self.shift) as usize != group
                        || slab.previous != previous
                        || slab.is_full()
                    {
                        return Err(format!("slab {:#x} is on the wrong list", slab.base));
                    }
                    empties += u32::from(slab.used() == 0);
                    listed += 1;
                    (previous, id) = (id, slab.next);
                }
                if empties != bin.empties {
                    return Err(format!("a bin has {empties} empty slabs and counts {}", bin.empties));
                }
            }
        }
        let mut borrowed = HashMap::new();
        for (_, slab) in self.slabs() {
            slab.validate()?;
            for slot in 0..slab.size_class().slots {
                let SlotState::Live { .. } = slab.state(slot) else { continue };
                let own = class_of(slab.facts(slot).requested) as u8;
                if own != slab.facts(slot).class {
                    return Err(format!("slab {:#x} has a block of class {own} under another", slab.base));
                }
                if own != slab.class {
                    *borrowed
                        .entry((slab.stream >> self.shift, Bins::at(slab.lifetime, own)))
                        .or_insert(0) += 1;
                }
            }
        }
        for (group, bins) in self.bins.iter().enumerate() {
            for (lifetime, class) in
                (0..LIFETIMES as u8).flat_map(|l| (0..CLASSES as u8).map(move |c| (l, c)))
            {
                let Some(bins) = bins else { continue };
                let (word, bit) = Bins::bit_of(class);
                let lends = bins.lending[usize::from(lifetime)][word] >> bit & 1 == 1;
                let listed = bins.all[Bins::at(lifetime, class)].first != NO_SLAB;
                if lends != (listed && self.borrows) {
                    return Err(format!("class {class} has a slab: {listed}; lends: {lends}"));
                }
            }
            for (at, bin) in bins.iter().flat_map(|bins| bins.all.iter().enumerate()) {
                let counted = borrowed.get(&(group as u32, at)).copied().unwrap_or(0);
                if counted != bin.borrowed {
                    return Err(format!("a bin has borrowed {counted} slots and counts {}", bin.borrowed));
                }
            }
        }
        let sums_of = |slab: &Slab| {
            let (bytes, slots) = (slab.size_class().slab_bytes(), slab.size_class().slots);
            let used = u64::from(slab.used() > 0);
            SlabSums { bytes, used_bytes: used * bytes, used_slots: used * u64::from(slots) }
        };
        let sums = self.slabs().map(|(_, slab)| sums_of(slab)).sum();
        if self.sums != sums {
            return Err(format!("the slabs come to {sums:?}, and {:?} is counted", self.sums));
        }
        if listed != self.slabs().filter(|(_, slab)| !slab.is_full()).count() {
            return Err(format!("{listed} slabs are listed, but others have free slots too"));
        }
        Ok(())
    }
}

/// Slots that are lent to smaller classes (bytes): a class borrows from the next of them, and from what lies between.
const LENDERS: [u64; 4] = [4 << 10, 32 << 10, 256 << 10, SMALL_MAX];

/// The largest class that lends to a class; itself for a lender.
static LENDER_OF: [u8; CLASSES] = {
    let mut table = [0; CLASSES];
    let (mut class, mut lender) = (0, 0);
    while class < CLASSES {
        while (SIZE_CLASSES[class].slot as u64) > LENDERS[lender] {
            lender += 1;
        }
        let mut last = class;
        while last + 1 < CLASSES && (SIZE_CLASSES[last].slot as u64) < LENDERS[lender] {
            last += 1;
        }
        table[class] = last as u8;
        class += 1;
    }
    table
};

fn lender_of(class: u8) -> u8 {
    LENDER_OF[class as usize % CLASSES]
}

/// A class, from which on the bits of [`Bins::lending`] are in the second word: no class borrows across it.
const HALF: u8 = {
    let mut class = 0;
    while SIZE_CLASSES[class].slot as u64 <= LENDERS[1] {
        class += 1;
    }
    assert!(class <= 64 && CLASSES - class <= 64);
    class as u8
};

/// The most classes that a class is below its lender.
const REACH: usize = {
    let (mut class, mut reach) = (0, 0);
    while class < CLASSES {
        let above = LENDER_OF[class] as usize - class;
        reach = if above > reach { above } else { reach };
        assert!((class < HALF as usize) == ((LENDER_OF[class] as usize) < HALF as usize));
        class += 1;
    }
    reach
};

/// How many blocks a class may have in slots of the class so many above it: as long as the slots take no more than half of what a slab of its
/// own would. 0 for itself, and beyond its lender.
static MOST_BORROWED: [[u16; REACH + 1]; ROW] = {
    let mut table = [[0; REACH + 1]; ROW];
    let mut own = 0;
    while own < CLASSES {
        let mut above = 1;
        while own + above <= LENDER_OF[own] as usize {
            table[own][above] =
                (SIZE_CLASSES[own].slab_bytes() / 2 / SIZE_CLASSES[own + above].slot as u64) as u16;
            above += 1;
        }
        own += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_borrows_from_its_lender_and_what_lies_between_up_to_half_a_slab_of_its_own() {
        for own in 0..CLASSES {
            let lender = usize::from(lender_of(own as u8));
            assert!(lender >= own && lender - own <= REACH);
            for (above, &most) in MOST_BORROWED[own].iter().enumerate() {
                let taken = |blocks: u16| u64::from(SIZE_CLASSES[own + above].slot) * u64::from(blocks);
                if above == 0 || own + above > lender {
                    assert_eq!(most, 0, "class {own} from the one {above} above");
                } else {
                    let half = SIZE_CLASSES[own].slab_bytes() / 2;
                    assert!(taken(most) <= half && taken(most + 1) > half, "class {own}, {above} above");
                }
            }
        }
    }

    #[test]
    fn every_class_has_a_bit_of_its_own_and_the_next_slab_above_lends() {
        let mut bits = HashSet::new();
        for class in 0..CLASSES as u8 {
            assert!(bits.insert(Bins::bit_of(class)));
            let mut bins = Bins::new();
            let lender = lender_of(class);
            assert_eq!(bins.lender(0, class), None);
            for listed in (class + 1..=lender).rev() {
                let (word, bit) = Bins::bit_of(listed);
                bins.lending[0][word] |= 1 << bit;
                let most = MOST_BORROWED[class as usize][usize::from(listed - class)];
                assert_eq!(bins.lender(0, class), (most > 0).then_some(listed));
                bins.all[Bins::at(0, class)].borrowed = u32::from(most);
                assert_eq!(bins.lender(0, class), None, "no more than {most}");
                bins.all[Bins::at(0, class)].borrowed = 0;
            }
            let (word, bit) = Bins::bit_of(lender + 1);
            if usize::from(lender) + 1 < CLASSES {
                let mut beyond = Bins::new();
                beyond.lending[0][word] |= 1 << bit;
                assert_eq!(beyond.lender(0, class), None, "nothing beyond the lender");
            }
        }
    }
}
