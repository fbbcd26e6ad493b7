//! A slab: a few pages cut into equal slots of one size class.
#![deny(unsafe_code)]

use super::size_class::{SIZE_CLASSES, SizeClass};
use crate::record::{BlockSlot, BlockTag, SegmentSlot};

/// Words of the bitmap: at most 4096 slots.
const WORDS: usize = 64;

/// Facts of one used slot.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Bytes asked for, with the flags below in the highest bits.
    requested: u32,
    block: BlockSlot,
}

/// Other streams use the block.
const SHARED: u32 = 1 << 31;
/// The block is freed and waits for them.
const PENDING: u32 = 1 << 30;
/// The slot is taken.
const TAKEN: u32 = 1 << 29;
const REQUESTED: u32 = TAKEN - 1;

/// What a slot's block was, when it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Bytes that the caller had asked for.
    pub requested: u64,
    /// Its place in the block map.
    pub block: BlockSlot,
}

/// What a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Nobody's.
    Free,
    /// The caller's; other streams use it or not.
    Live {
        /// Other streams use it.
        shared: bool,
    },
    /// Freed by the caller, waiting for other streams.
    Pending,
}

/// One slab.
pub struct Slab {
    /// First byte, a multiple of the page.
    pub base: u64,
    shape: &'static SizeClass,
    /// What the record says of its blocks.
    pub tag: BlockTag,
    /// Its size class.
    pub class: u8,
    /// Its lifetime.
    pub lifetime: u8,
    /// Its stream.
    pub stream: u32,
    /// The run of its arena that it is.
    pub run: u32,
    /// Where no block in it is live ([`Slab::is_idle`]): its stream's epoch of the last free in it.
    pub epoch: u64,
    /// Its place in the record's table.
    pub segment: SegmentSlot,
    /// Neighbours on the bin's list of slabs with free slots.
    pub previous: u32,
    /// See [`Slab::previous`].
    pub next: u32,
    /// Slots in use, pending ones counted.
    used: u32,
    /// Pending ones.
    waiting: u32,
    /// A bit for every word that has a free slot.
    summary: u64,
    /// A bit for every free slot.
    free: [u64; WORDS],
    slots: Box<[Slot]>,
}

impl Slab {
    /// A slab of free slots, whose blocks are as `tag` says.
    pub fn new(base: u64, class: u8, tag: BlockTag, run: u32) -> Self {
        let shape = &SIZE_CLASSES[class as usize];
        let count = shape.slots;
        let mut free = [0u64; WORDS];
        let mut summary = 0;
        for (i, word) in free.iter_mut().enumerate() {
            let left = count.saturating_sub(i as u32 * 64);
            *word = if left >= 64 { u64::MAX } else { (1u64 << left) - 1 };
            summary |= u64::from(*word != 0) << i;
        }
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
            summary,
            free,
            slots: vec![Slot { requested: 0, block: BlockSlot::NONE }; count as usize].into(),
        }
    }

    /// Its size class.
    #[inline]
    pub fn size_class(&self) -> &'static SizeClass {
        self.shape
    }

    /// Slots in use, those that wait included.
    #[inline]
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Whether no block in it is live: its slots are free, or pending.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.used == self.waiting
    }

    /// Bytes of the free slots.
    pub fn free_bytes(&self) -> u64 {
        u64::from(self.size_class().slots - self.used) * u64::from(self.size_class().slot)
    }

    /// Whether no slot is free.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.summary == 0
    }

    /// Takes the free slot of the lowest address.
    #[inline(always)]
    pub fn take(&mut self) -> Option<u32> {
        if self.summary == 0 {
            return None;
        }
        let word = self.summary.trailing_zeros();
        let bits = &mut self.free[word as usize & (WORDS - 1)];
        let slot = word * 64 + bits.trailing_zeros();
        *bits &= *bits - 1;
        if *bits == 0 {
            self.summary &= self.summary - 1;
        }
        self.used += 1;
        Some(slot)
    }

    /// Notes what the caller asked for, and the block's place in the record.
    #[inline]
    pub fn describe(&mut self, slot: u32, requested: u64, block: BlockSlot) {
        if let Some(facts) = self.slots.get_mut(slot as usize) {
            *facts = Slot { requested: requested as u32 | TAKEN, block };
        }
    }

    /// The address of a slot.
    #[inline]
    pub fn address(&self, slot: u32) -> u64 {
        self.base + u64::from(slot) * u64::from(self.size_class().slot)
    }

    /// The slot that starts at `address`, which may be anything.
    #[inline]
    pub fn slot_at(&self, address: u64) -> Option<u32> {
        // An address outside of the slab may come out at any slot, and does not start it.
        let offset = address.wrapping_sub(self.base);
        let slot = self.shape.slot_of(offset);
        (u64::from(slot) * u64::from(self.shape.slot) == offset && slot < self.shape.slots).then_some(slot)
    }

    /// The live block, used by no other stream, that starts at `address` (which may be anything): its slot and facts.
    #[inline(always)]
    pub fn plain_block_at(&self, address: u64) -> Option<(u32, Freed)> {
        let slot = self.slot_at(address)?;
        let facts = self.slots.get(slot as usize)?;
        let plain = facts.requested & (TAKEN | PENDING | SHARED) == TAKEN;
        plain.then(|| (slot, Freed { requested: u64::from(facts.requested & REQUESTED), block: facts.block }))
    }

    /// What a slot is.
    #[inline]
    pub fn state(&self, slot: u32) -> SlotState {
        let flags = self.slots.get(slot as usize).map_or(0, |facts| facts.requested);
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
    pub fn facts(&self, slot: u32) -> Freed {
        let facts =
            self.slots.get(slot as usize).copied().unwrap_or(Slot { requested: 0, block: BlockSlot::NONE });
        Freed { requested: u64::from(facts.requested & REQUESTED), block: facts.block }
    }

    /// Notes that other streams use a live slot.
    pub fn set_shared(&mut self, slot: u32) {
        self.slots[slot as usize].requested |= SHARED;
    }

    /// Makes a live slot wait.
    pub fn set_pending(&mut self, slot: u32) {
        self.slots[slot as usize].requested |= PENDING;
        self.waiting += 1;
    }

    /// Frees a pending slot. True if the slab was full before.
    pub fn settle(&mut self, slot: u32) -> bool {
        self.waiting -= 1;
        self.release(slot)
    }

    /// Frees a live slot. True if the slab was full before.
    #[inline]
    pub fn release(&mut self, slot: u32) -> bool {
        let was_full = self.summary == 0;
        if let Some(facts) = self.slots.get_mut(slot as usize) {
            facts.requested = 0;
        }
        let word = slot as usize / 64 % WORDS;
        self.free[word] |= 1 << (slot % 64);
        self.summary |= 1 << word;
        self.used -= 1;
        was_full
    }

    /// Checks the counts against the bitmap.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validate(&self) -> Result<(), String> {
        let slots = self.size_class().slots;
        let free: u32 = self.free.iter().map(|word| word.count_ones()).sum();
        if free + self.used != slots {
            return Err(format!(
                "slab {:#x}: {free} free and {} used of {slots} slots",
                self.base, self.used
            ));
        }
        for slot in 0..slots {
            let free = self.free[slot as usize / 64] >> (slot % 64) & 1 != 0;
            if free != (self.state(slot) == SlotState::Free) {
                return Err(format!("slab {:#x}: the bitmap and the facts of slot {slot} differ", self.base));
            }
        }
        for (i, word) in self.free.iter().enumerate() {
            if (*word != 0) != (self.summary >> i & 1 != 0) {
                return Err(format!("slab {:#x}: the summary of word {i} is wrong", self.base));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::size_class::CLASSES;

    #[test]
    fn every_slot_is_given_once_and_comes_back() {
        for class in 0..CLASSES {
            let mut slab = Slab::new(1 << 30, class as u8, BlockTag::default(), 0);
            let count = slab.size_class().slots;
            for expected in 0..count {
                let slot = slab.take();
                assert_eq!(slot, Some(expected));
                slab.describe(expected, 500, BlockSlot(expected));
                assert_eq!(slab.slot_at(slab.address(expected)), Some(expected));
                let facts = Freed { requested: 500, block: BlockSlot(expected) };
                assert_eq!(slab.plain_block_at(slab.address(expected)), Some((expected, facts)));
                assert_eq!(slab.state(expected), SlotState::Live { shared: false });
            }
            assert!(slab.is_full() && slab.take().is_none());
            assert!(slab.release(count / 2));
            assert_eq!(slab.state(count / 2), SlotState::Free);
            assert_eq!(slab.plain_block_at(slab.address(count / 2)), None);
            slab.validate().unwrap();
            assert_eq!(slab.take(), Some(count / 2));
            slab.describe(count / 2, 1, BlockSlot::NONE);
            slab.validate().unwrap();
        }
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
            slab.base + class.slab_bytes(),
        ] {
            assert_eq!(slab.slot_at(address), None);
        }
        assert_eq!(slab.slot_at(slab.base + u64::from(class.slot) * u64::from(class.slots)), None);
    }
}
