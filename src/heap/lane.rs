//! A lane: the small blocks of the streams that share one lock.
//!
//! Streams are dealt over the lanes of a device, so that threads on different streams do not meet. A bin is the slabs of one (stream,
//! lifetime, size class) with a free slot. A lane never holds its lock while it asks the device's central part for memory:
//! [`Lane::allocate`] answers that it needs a slab, and the caller comes back with one.
#![deny(unsafe_code)]

use super::lifetime::LIFETIMES;
use super::size_class::CLASSES;
use super::slab::{Freed, Slab, SlotState};
use super::streams::Streams;
use crate::record::{BlockEntry, LaneWriter};
use std::collections::{HashMap, HashSet, VecDeque};

/// Lanes a device for small blocks; one more of the record's lanes is the central part's.
pub const LANES: usize = crate::record::LANES - 1;
const NO_SLAB: u32 = u32::MAX;

/// The slabs with free slots of one (lifetime, size class) of a stream.
#[derive(Clone, Copy)]
struct Bin {
    first: u32,
    /// An empty slab stays here, so that a lone block that comes and goes costs nothing more.
    empties: u32,
}

struct Bins([Bin; LIFETIMES * CLASSES]);

/// A block that its program has freed, and the streams that may still use it, each with the epoch to wait for.
struct PendingBlock {
    slab: u32,
    slot: u32,
    lifetime: u8,
    waits: Vec<(u32, u64)>,
}

/// What became of a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeOutcome {
    /// Done.
    Freed(Freed),
    /// Done, and this slab is not needed here any more.
    Surplus(Freed, u32),
    /// The block waits for other streams.
    Waits(Freed),
    /// No block starts there, or it is freed already.
    Unknown,
}

/// The small blocks of some streams. Its user holds the lock, and the record's writer that goes with it.
pub struct Lane {
    /// Streams are numbered `stride` apart in one lane.
    stride: u32,
    slabs: Vec<Option<Box<Slab>>>,
    unused: Vec<u32>,
    /// By stream number / stride.
    bins: Vec<Option<Box<Bins>>>,
    users: HashMap<u64, Vec<u32>>,
    /// Lifetimes of live blocks that differ from their slabs', by address ([`Lane::tag`]).
    tagged: HashMap<u64, u8>,
    pending: VecDeque<PendingBlock>,
}

impl Lane {
    /// An empty lane, for streams whose numbers differ by multiples of `stride`.
    pub fn new(stride: u32) -> Self {
        Self {
            stride,
            slabs: Vec::new(),
            unused: Vec::new(),
            bins: Vec::new(),
            users: HashMap::new(),
            tagged: HashMap::new(),
            pending: VecDeque::new(),
        }
    }

    #[inline]
    fn bin_mut(&mut self, stream: u32, lifetime: u8, class: u8) -> &mut Bin {
        let at = (stream / self.stride) as usize;
        if at >= self.bins.len() {
            self.bins.resize_with(at + 1, || None);
        }
        let bins = self.bins[at]
            .get_or_insert_with(|| Box::new(Bins([Bin { first: NO_SLAB, empties: 0 }; LIFETIMES * CLASSES])));
        &mut bins.0[(lifetime as usize % LIFETIMES) * CLASSES + class as usize % CLASSES]
    }

    /// A slot for the block that `entry` describes (its address is filled in), or `None`: the bin needs a slab.
    #[inline]
    pub fn allocate(&mut self, writer: &mut LaneWriter, class: u8, mut entry: BlockEntry) -> Option<u64> {
        let first = self.bin_mut(entry.stream, entry.lifetime, class).first;
        let slab = self.slabs.get_mut(first as usize)?.as_deref_mut()?;
        let slot = slab.take()?;
        entry.address = slab.address(slot);
        slab.describe(slot, entry.requested, writer.block_insert(&entry));
        if slab.used() == 1 || slab.is_full() {
            self.took(first, entry.stream, entry.lifetime, class);
        }
        Some(entry.address)
    }

    /// The rare part of taking a slot: the slab was empty before, or is full now.
    fn took(&mut self, id: u32, stream: u32, lifetime: u8, class: u8) {
        let Some(slab) = self.slabs[id as usize].as_deref() else { return };
        let (was_empty, full) = (slab.used() == 1, slab.is_full());
        if was_empty {
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
            self.bin_mut(stream, lifetime, class).first = id;
        }
        self.set_links(id, previous, next);
        self.with(previous, |slab| slab.next = id);
        self.with(next, |slab| slab.previous = id);
    }

    fn unlink(&mut self, id: u32) {
        let Some(slab) = self.slabs[id as usize].as_deref() else { return };
        let (stream, lifetime, class, previous, next) =
            (slab.stream, slab.lifetime, slab.class, slab.previous, slab.next);
        if previous == NO_SLAB {
            self.bin_mut(stream, lifetime, class).first = next;
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

    /// Frees the block at `address` in slab `id`; both may be anything.
    #[inline]
    pub fn free(&mut self, writer: &mut LaneWriter, id: u32, address: u64, streams: &Streams) -> FreeOutcome {
        let Some(slab) = self.slabs.get_mut(id as usize).and_then(Option::as_deref_mut) else {
            return FreeOutcome::Unknown;
        };
        let Some(slot) = slab.slot_at(address) else { return FreeOutcome::Unknown };
        match slab.state(slot) {
            SlotState::Live { shared: false } => {}
            SlotState::Live { shared: true } => return self.free_shared(writer, id, slot, address, streams),
            _ => return FreeOutcome::Unknown,
        }
        let facts = slab.facts(slot);
        slab.epoch = streams.note_free(slab.stream);
        let lifetime = slab.lifetime;
        writer.block_remove(facts.block, round(facts.requested), facts.requested, lifetime, false);
        self.release_slot(id, slot, facts)
    }

    #[inline]
    fn release_slot(&mut self, id: u32, slot: u32, facts: Freed) -> FreeOutcome {
        let Some(slab) = self.slabs[id as usize].as_deref_mut() else { return FreeOutcome::Unknown };
        let was_full = slab.release(slot);
        if was_full || slab.used() == 0 {
            return self.released(id, was_full, facts);
        }
        FreeOutcome::Freed(facts)
    }

    /// The rare part of freeing a slot: the slab was full before, or is empty now.
    fn released(&mut self, id: u32, was_full: bool, facts: Freed) -> FreeOutcome {
        if was_full {
            self.link(id);
        }
        let Some(slab) = self.slabs[id as usize].as_deref() else { return FreeOutcome::Unknown };
        let (used, stream, lifetime, class) = (slab.used(), slab.stream, slab.lifetime, slab.class);
        if used == 0 {
            let bin = self.bin_mut(stream, lifetime, class);
            bin.empties += 1;
            if bin.empties > 1 {
                return FreeOutcome::Surplus(facts, id);
            }
        }
        FreeOutcome::Freed(facts)
    }

    fn free_shared(
        &mut self,
        writer: &mut LaneWriter,
        id: u32,
        slot: u32,
        address: u64,
        streams: &Streams,
    ) -> FreeOutcome {
        let users = self.users.remove(&address).unwrap_or_default();
        let tag = self.tagged.remove(&address);
        let Some(slab) = self.slabs[id as usize].as_deref_mut() else { return FreeOutcome::Unknown };
        let facts = slab.facts(slot);
        let lifetime = tag.unwrap_or(slab.lifetime);
        slab.epoch = streams.note_free(slab.stream);
        if users.is_empty() {
            // Only tagged.
            writer.block_remove(facts.block, round(facts.requested), facts.requested, lifetime, false);
            return self.release_slot(id, slot, facts);
        }
        slab.set_pending(slot);
        let waits = users.into_iter().map(|user| (user, streams.note_free(user))).collect();
        writer.block_pending(facts.block, round(facts.requested), facts.requested, lifetime);
        self.pending.push_back(PendingBlock { slab: id, slot, lifetime, waits });
        FreeOutcome::Waits(facts)
    }

    /// Frees the block at `address` for its program only: nothing ever uses its slot again.
    pub fn freeze(&mut self, writer: &mut LaneWriter, id: u32, address: u64) -> FreeOutcome {
        let Some(slab) = self.slabs.get_mut(id as usize).and_then(Option::as_deref_mut) else {
            return FreeOutcome::Unknown;
        };
        let Some(slot) = slab.slot_at(address) else { return FreeOutcome::Unknown };
        let SlotState::Live { .. } = slab.state(slot) else { return FreeOutcome::Unknown };
        let facts = slab.facts(slot);
        slab.set_pending(slot);
        let lifetime = self.tagged.remove(&address).unwrap_or(slab.lifetime);
        writer.block_pending(facts.block, round(facts.requested), facts.requested, lifetime);
        FreeOutcome::Waits(facts)
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
        if user != slab.stream {
            slab.set_shared(slot);
            let users = self.users.entry(address).or_default();
            if !users.contains(&user) {
                users.push(user);
            }
        }
        Some(())
    }

    /// Whether blocks wait for other streams.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Frees the blocks whose waits are over; returns the surplus slabs.
    pub fn settle(&mut self, writer: &mut LaneWriter, streams: &Streams) -> Vec<u32> {
        let mut surplus = Vec::new();
        for _ in 0..self.pending.len() {
            let Some(block) = self.pending.pop_front() else { break };
            if block.waits.iter().any(|&(user, epoch)| streams.completed(user) < epoch) {
                self.pending.push_back(block);
                continue;
            }
            let Some(slab) = self.slabs[block.slab as usize].as_deref() else { continue };
            let (facts, lifetime) = (slab.facts(block.slot), block.lifetime);
            writer.block_remove(facts.block, round(facts.requested), facts.requested, lifetime, true);
            if let FreeOutcome::Surplus(_, id) = self.release_slot(block.slab, block.slot, facts) {
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
        self.unused.push(id);
        Some(*slab)
    }

    /// The numbers of all empty slabs.
    pub fn empty_slabs(&self) -> Vec<u32> {
        self.slabs().filter(|(_, slab)| slab.used() == 0).map(|(id, _)| id).collect()
    }

    /// All slabs.
    pub fn slabs(&self) -> impl Iterator<Item = (u32, &Slab)> {
        self.slabs.iter().enumerate().filter_map(|(id, slab)| slab.as_deref().map(|slab| (id as u32, slab)))
    }

    /// A slab, to note its place in the record.
    pub fn slab_mut(&mut self, id: u32) -> Option<&mut Slab> {
        self.slabs.get_mut(id as usize)?.as_deref_mut()
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
        referred.extend(self.pending.iter().flat_map(|block| &block.waits).map(|wait| wait.0));
    }

    /// Walks every slab and bin.
    ///
    /// # Errors
    /// The first broken invariant, in words.
    pub fn validate(&self) -> Result<(), String> {
        let mut listed = 0;
        for (group, bins) in self.bins.iter().enumerate() {
            for (at, bin) in bins.iter().flat_map(|bins| bins.0.iter().enumerate()) {
                let (mut id, mut previous, mut empties) = (bin.first, NO_SLAB, 0);
                while id != NO_SLAB {
                    let slab = self.slabs.get(id as usize).and_then(Option::as_deref);
                    let Some(slab) = slab else {
                        return Err(format!("a bin lists slab {id}, which is not there"));
                    };
                    let home = slab.lifetime as usize * CLASSES + slab.class as usize;
                    if home != at
                        || (slab.stream / self.stride) as usize != group
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
        for (_, slab) in self.slabs() {
            slab.validate()?;
        }
        if listed != self.slabs().filter(|(_, slab)| !slab.is_full()).count() {
            return Err(format!("{listed} slabs are listed, but others have free slots too"));
        }
        Ok(())
    }
}

/// Live bytes of a request: rounded up to the alignment.
#[inline]
pub fn round(requested: u64) -> u64 {
    super::size_class::round_up(requested, super::size_class::ALIGNMENT).unwrap_or(u64::MAX)
}
