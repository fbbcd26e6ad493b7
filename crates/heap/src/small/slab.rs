//! A slab: memory cut into equal slots of one size class.

use crate::small::size_class::{SIZE_CLASSES, SMALL_MAX, SizeClass, round};
use gruyere_record::{BlockSlot, BlockTag, SegmentEntry, SegmentKind, SegmentSlot};

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Of a taken slot: bytes asked for, and the flags below in the highest bits. Of a free one:
    /// the next free slot, or [`NO_SLOT`].
    word: u32,
    /// Of a taken slot: its block's place in the record.
    block: BlockSlot,
}

/// Other streams use the block.
const SHARED: u32 = 1 << 31;
/// The block is freed and waits for those streams.
const PENDING: u32 = 1 << 30;
const TAKEN: u32 = 1 << 29;
const REQUESTED: u32 = TAKEN - 1;
/// No slot: the end of the list of free ones.
const NO_SLOT: u32 = TAKEN - 1;
const _: () = assert!(SMALL_MAX <= REQUESTED as u64);

/// A freed slot's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    /// Bytes that the caller asked for.
    pub(crate) requested: u64,
    /// Its place in the block map.
    pub(crate) block: BlockSlot,
}

impl Freed {
    #[inline(always)]
    fn of(Slot { word, block }: Slot) -> Self {
        Self { requested: u64::from(word & REQUESTED), block }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    Free,
    /// The caller has it; `shared`: other streams use it.
    Live {
        shared: bool,
    },
    /// Its block is freed and waits for other streams.
    Pending,
}

pub(crate) struct Slab {
    /// First byte, a multiple of [`SLAB`](crate::small::size_class::SLAB).
    pub(crate) base: u64,
    shape: &'static SizeClass,
    /// The record's tag of its blocks.
    pub(crate) tag: BlockTag,
    pub(crate) class: u8,
    pub(crate) lifetime: u8,
    pub(crate) stream: u32,
    /// Its run in the arena.
    pub(crate) run: u32,
    /// Its stream's epoch of the last free in it, if it has no live block ([`Slab::is_idle`]).
    pub(crate) epoch: u64,
    /// Its place in the record's table.
    pub(crate) segment: SegmentSlot,
    /// Neighbours on the bin's list of slabs with free slots.
    pub(crate) previous: u32,
    pub(crate) next: u32,
    /// Slots in use, pending ones included.
    used: u32,
    waiting: u32,
    /// The free slot to take next, the first of a list: the one freed last, which the caches still
    /// hold.
    free: u32,
    slots: Box<[Slot]>,
}

impl Slab {
    /// A slab of free slots; `tag` describes its blocks.
    pub(crate) fn new(base: u64, class: u8, tag: BlockTag, run: u32) -> Self {
        let shape = &SIZE_CLASSES[class as usize];
        let count = (shape.slab_bytes() / u64::from(shape.slot)) as u32;
        let next = |slot| if slot + 1 < count { slot + 1 } else { NO_SLOT };
        Self {
            base,
            shape,
            tag,
            class,
            lifetime: tag.lifetime(),
            stream: tag.stream(),
            run,
            epoch: 0,
            segment: SegmentSlot::NONE,
            previous: u32::MAX,
            next: u32::MAX,
            used: 0,
            waiting: 0,
            free: 0,
            slots: (0..count)
                .map(|slot| Slot { word: next(slot), block: BlockSlot::NONE })
                .collect(),
        }
    }

    /// Its entry in the record.
    pub(crate) fn segment_entry(&self) -> SegmentEntry {
        SegmentEntry {
            kind: SegmentKind::Slab,
            address: self.base,
            bytes: self.bytes(),
            slot: u64::from(self.shape.slot),
            stream: self.stream,
            device: self.tag.device(),
            lifetime: self.lifetime,
            capture: self.tag.capture(),
            ..SegmentEntry::default()
        }
    }

    #[inline]
    pub(crate) fn size_class(&self) -> &'static SizeClass {
        self.shape
    }

    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.shape.slab_bytes()
    }

    #[inline]
    pub(crate) fn count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Slots in use, pending ones included.
    #[inline]
    pub(crate) fn used(&self) -> u32 {
        self.used
    }

    /// Whether it has no live block: its slots are free or pending.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.used == self.waiting
    }

    /// Bytes of the free slots.
    pub(crate) fn free_bytes(&self) -> u64 {
        u64::from(self.count() - self.used) * u64::from(self.shape.slot)
    }

    /// Bytes that belong to no block, each block rounded up to 512. Looks at every slot.
    pub(crate) fn unused_bytes(&self) -> u64 {
        let used = (0..self.count()).filter(|&slot| self.state(slot) != SlotState::Free);
        self.bytes() - used.map(|slot| round(self.facts(slot).requested)).sum::<u64>()
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.free == NO_SLOT
    }

    /// Takes a free slot for a block of `requested` bytes, with its place in the record.
    #[inline(always)]
    pub(crate) fn take(&mut self, requested: u64, block: BlockSlot) -> Option<u32> {
        let slot = self.free;
        let facts = self.slots.get_mut(slot as usize)?;
        self.free = facts.word;
        *facts = Slot { word: requested as u32 | TAKEN, block };
        self.used += 1;
        Some(slot)
    }

    /// [`Slab::take`] for the free slot `slot`; false: it is not free. Walks the list of free
    /// slots.
    pub(crate) fn take_slot(&mut self, slot: u32, requested: u64, block: BlockSlot) -> bool {
        let (mut before, mut at) = (NO_SLOT, self.free);
        while at != slot {
            let Some(facts) = self.slots.get(at as usize) else { return false };
            (before, at) = (at, facts.word);
        }
        let Some(facts) = self.slots.get_mut(slot as usize) else { return false };
        let word = requested as u32 | TAKEN;
        let next = std::mem::replace(facts, Slot { word, block }).word;
        match self.slots.get_mut(before as usize) {
            Some(before) => before.word = next,
            None => self.free = next,
        }
        self.used += 1;
        true
    }

    #[inline]
    pub(crate) fn address(&self, slot: u32) -> u64 {
        self.base + u64::from(slot) * u64::from(self.size_class().slot)
    }

    /// The slot around `address`, which may be anything, and whether the slot starts there. Outside
    /// the slab any number, even beyond the last slot's.
    #[inline(always)]
    fn slot_near(&self, address: u64) -> (u32, bool) {
        let offset = address.wrapping_sub(self.base);
        let slot = self.shape.slot_of(offset);
        (slot, u64::from(slot) * u64::from(self.shape.slot) == offset)
    }

    /// The slot that starts at `address`, which may be anything.
    #[inline]
    pub(crate) fn slot_at(&self, address: u64) -> Option<u32> {
        let (slot, starts) = self.slot_near(address);
        (starts && slot < self.count()).then_some(slot)
    }

    /// The slot, and its facts, of the live block that starts at `address` (which may be anything)
    /// and that no other stream uses.
    #[inline(always)]
    pub(crate) fn plain_at(&self, address: u64) -> Option<(u32, Freed)> {
        let (slot, starts) = self.slot_near(address);
        // No slot beyond the last is in the list.
        let facts = *self.slots.get(slot as usize).filter(|_| starts)?;
        (facts.word & (TAKEN | PENDING | SHARED) == TAKEN).then(|| (slot, Freed::of(facts)))
    }

    /// Frees the slot of a live block; whether the slab was full before.
    #[inline(always)]
    pub(crate) fn free(&mut self, slot: u32) -> bool {
        let next = std::mem::replace(&mut self.free, slot);
        if let Some(facts) = self.slots.get_mut(slot as usize) {
            facts.word = next;
        }
        self.used -= 1;
        next == NO_SLOT
    }

    #[inline]
    pub(crate) fn state(&self, slot: u32) -> SlotState {
        let flags = self.slots.get(slot as usize).map_or(0, |facts| facts.word);
        if flags & TAKEN == 0 {
            SlotState::Free
        } else if flags & PENDING != 0 {
            SlotState::Pending
        } else {
            SlotState::Live { shared: flags & SHARED != 0 }
        }
    }

    /// Facts of a used slot.
    #[inline]
    pub(crate) fn facts(&self, slot: u32) -> Freed {
        Freed::of(
            self.slots
                .get(slot as usize)
                .copied()
                .unwrap_or(Slot { word: 0, block: BlockSlot::NONE }),
        )
    }

    /// The slots whose blocks are live.
    pub(crate) fn live_slots(&self) -> impl Iterator<Item = u32> {
        (0..self.count()).filter(|&slot| matches!(self.state(slot), SlotState::Live { .. }))
    }

    /// Notes that other streams use a live slot.
    pub(crate) fn set_shared(&mut self, slot: u32) {
        self.slots[slot as usize].word |= SHARED;
    }

    /// Makes a live slot pending.
    pub(crate) fn set_pending(&mut self, slot: u32) {
        self.slots[slot as usize].word |= PENDING;
        self.waiting += 1;
    }

    /// Frees a pending slot; whether the slab was full before.
    pub(crate) fn complete_free(&mut self, slot: u32) -> bool {
        self.waiting -= 1;
        self.used -= 1;
        let next = std::mem::replace(&mut self.free, slot);
        self.slots[slot as usize].word = next;
        next == NO_SLOT
    }

    /// Checks the counts against the slots.
    ///
    /// # Errors
    /// The first mismatch, in words.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let slots = self.count();
        let of = |wanted: fn(SlotState) -> bool| {
            (0..slots).filter(|&slot| wanted(self.state(slot))).count()
        };
        let (free, waiting) =
            (of(|state| state == SlotState::Free), of(|state| state == SlotState::Pending));
        if free as u32 + self.used != slots || waiting as u32 != self.waiting {
            return Err(format!(
                "slab {:#x}: {free} free and {} used of {slots} slots, {waiting} pending and {} \
                 counted",
                self.base, self.used, self.waiting
            ));
        }
        let (mut listed, mut slot) = (0, self.free);
        while slot != NO_SLOT {
            if slot >= slots || self.state(slot) != SlotState::Free || listed == free {
                return Err(format!(
                    "slab {:#x}: the list of free slots is broken at {slot}",
                    self.base
                ));
            }
            (listed, slot) = (listed + 1, self.slots[slot as usize].word);
        }
        if listed != free {
            return Err(format!("slab {:#x}: {listed} of {free} free slots are listed", self.base));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small::size_class::CLASSES;

    #[test]
    fn every_slot_is_given_once_and_comes_back() {
        for class in 0..CLASSES {
            let mut slab = Slab::new(1 << 30, class as u8, BlockTag::default(), 0);
            let count = slab.count();
            for expected in 0..count {
                let slot = slab.take(500, BlockSlot(expected));
                assert_eq!(slot, Some(expected));
                assert_eq!(slab.slot_at(slab.address(expected)), Some(expected));
                assert_eq!(slab.state(expected), SlotState::Live { shared: false });
            }
            assert!(slab.is_full() && slab.take(500, BlockSlot::NONE).is_none());
            let address = slab.address(count / 2);
            let facts = Freed { requested: 500, block: BlockSlot(count / 2) };
            assert_eq!(slab.plain_at(address), Some((count / 2, facts)));
            assert!(slab.free(count / 2), "it was full");
            assert_eq!((slab.plain_at(address), slab.state(count / 2)), (None, SlotState::Free));
            slab.validate().unwrap();
            assert_eq!(slab.take(1, BlockSlot::NONE), Some(count / 2));
            slab.set_pending(count / 2);
            assert_eq!((slab.plain_at(address), slab.is_idle()), (None, count == 1));
            slab.validate().unwrap();
            assert!(slab.complete_free(count / 2));
            assert_eq!(slab.plain_at(slab.address(0)).map(|found| found.0), Some(0));
            assert!(!slab.free(0));
            slab.validate().unwrap();
        }
    }

    #[test]
    fn the_very_slot_is_taken_wherever_it_is_on_the_list() {
        let mut slab = Slab::new(1 << 30, 20, BlockTag::default(), 0);
        let last = slab.count() - 1;
        for slot in [last, 0, 2] {
            assert!(slab.take_slot(slot, 500, BlockSlot(slot)));
            slab.validate().unwrap();
            assert_eq!(slab.plain_at(slab.address(slot)).map(|found| found.0), Some(slot));
            assert!(!slab.take_slot(slot, 500, BlockSlot::NONE), "it is taken");
        }
        assert!(
            !slab.take_slot(last + 1, 500, BlockSlot::NONE)
                && !slab.take_slot(NO_SLOT, 1, BlockSlot::NONE)
        );
        assert_eq!((slab.used(), slab.take(1, BlockSlot::NONE)), (3, Some(1)));
        while slab.take(1, BlockSlot::NONE).is_some() {}
        slab.free(5);
        assert!(slab.take_slot(5, 9, BlockSlot::NONE) && slab.is_full());
        slab.validate().unwrap();
    }

    #[test]
    fn an_address_that_starts_no_slot_is_refused() {
        let slab = Slab::new(1 << 30, 20, BlockTag::default(), 0);
        let class = slab.size_class();
        for address in [
            0,
            (1 << 30) - 1,
            (1 << 30) + 1,
            (1 << 30) + u64::from(class.slot) - 1,
            slab.base + slab.bytes(),
        ] {
            assert_eq!(slab.slot_at(address), None);
            assert_eq!(slab.plain_at(address), None);
        }
        assert_eq!(slab.slot_at(slab.base + u64::from(class.slot) * u64::from(slab.count())), None);
    }
}
