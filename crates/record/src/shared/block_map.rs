//! A slot of the block map: the facts of one block, and the protocol for its readers.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, pause};
use crate::{BlockEntry, BlockState, BlockTag, SiteId, layout::Shared, sites::site_of_life};

/// One slot, 40 bytes.
///
/// The writer is the holder of the shard whose free list (or live block) has the slot; slots pass
/// between shards only under the map's mutex.
#[repr(C)]
#[derive(Debug, Default)]
pub struct BlockCell {
    /// Life count in the high 30 bits, state in the low two. It only grows, so an unchanged value
    /// shows a reader that no other life of the slot came between:
    ///
    /// ```text
    /// state (low bits)   who changes it              to
    /// 0 free             insert, after the words     1 live      (+1)
    /// 1 live             pending                     2 pending   (+1)
    /// 1 live             remove                      0 free, next life (+3)
    /// 2 pending          remove                      0 free, next life (+2)
    /// ```
    /// The words below are written only while the state is free, except for `tag`: in state 1
    /// [`BlockCell::retag`] may change its lifetime, and [`BlockCell::mark_sent`] sets its bit; a
    /// reader gets the old one or the new. The
    /// count repeats after 2^30 lives of one slot; a reader would have to sleep through exactly
    /// that many, inside one entry.
    state: AtomicU32,
    step: AtomicU32,
    /// A [`BlockTag`].
    tag: AtomicU64,
    address: AtomicU64,
    size: AtomicU64,
    requested: AtomicU64,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<BlockCell>() == 40 && align_of::<BlockCell>() == 8);

// SAFETY: repr(C), nothing but atomics and unread room; every bit pattern is a value.
unsafe impl Shared for BlockCell {}

/// Result of reading a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotRead<T> {
    /// No block.
    Free,
    /// A block, read whole.
    Taken(T, BlockState),
    /// It changed at every look.
    Torn,
}

impl BlockCell {
    #[inline(always)]
    fn advance(&self, by: u32) {
        // Release: a reader that sees the new state sees the words written before. Only the slot's
        // holder comes here, so a plain read and write suffice (one `add` on x86-64).
        self.state.store(self.state.load(Ordering::Relaxed).wrapping_add(by), Ordering::Release);
    }

    /// Makes a free slot a live block.
    pub fn insert(&self, entry: &BlockEntry) {
        self.fill(entry.tag(), entry.address, entry.size, entry.requested, entry.step);
    }

    /// As [`BlockCell::insert`], in six instructions.
    #[inline(always)]
    pub fn fill(&self, tag: BlockTag, address: u64, size: u64, requested: u64, step: u32) {
        // Orders the free state (the last remove) before the words, for a reader that sees any of
        // them.
        fence(Ordering::Release);
        self.step.store(step, Ordering::Relaxed);
        self.tag.store(tag.0, Ordering::Relaxed);
        self.address.store(address, Ordering::Relaxed);
        self.size.store(size, Ordering::Relaxed);
        self.requested.store(requested, Ordering::Relaxed);
        self.advance(1);
    }

    /// The step of the block's insertion.
    pub fn step(&self) -> u32 {
        self.step.load(Ordering::Relaxed)
    }

    /// Changes a live block's lifetime.
    pub fn retag(&self, lifetime: u8) {
        let tag = BlockTag(self.tag.load(Ordering::Relaxed));
        self.tag.store(tag.retagged(lifetime).0, Ordering::Relaxed);
    }

    /// Notes that a live block was sent to other processes; until its end.
    pub fn mark_sent(&self) {
        let tag = BlockTag(self.tag.load(Ordering::Relaxed));
        self.tag.store(tag.sent().0, Ordering::Relaxed);
    }

    /// Makes a live block wait for streams.
    #[inline(always)]
    pub fn pending(&self) {
        self.advance(1);
    }

    /// Ends a live (`was_pending` false) or a pending block.
    #[inline(always)]
    pub fn remove(&self, was_pending: bool) {
        self.advance(if was_pending { 2 } else { 3 });
    }

    /// The slot's life, for the word beside it ([`crate::sites`]). Only for its holder.
    pub(crate) fn life(&self) -> u32 {
        self.state.load(Ordering::Relaxed)
    }

    /// The block in this slot, read whole or not at all; `beside`: the word of its site, if it has
    /// one.
    pub fn read(&self, attempts: u32, beside: Option<&AtomicU64>) -> SlotRead<BlockEntry> {
        for _ in 0..attempts {
            let before = self.state.load(Ordering::Acquire);
            let state = match before & 3 {
                1 => BlockState::Live,
                2 => BlockState::Pending,
                0 => return SlotRead::Free,
                // Written by none of ours: a damaged file.
                _ => return SlotRead::Torn,
            };
            let tag = BlockTag(self.tag.load(Ordering::Relaxed));
            // Acquire: the site was published before the word that names it.
            let site = beside.map(|word| site_of_life(word.load(Ordering::Acquire), before));
            let entry = BlockEntry {
                site: site.unwrap_or(SiteId::NONE),
                address: self.address.load(Ordering::Relaxed),
                size: self.size.load(Ordering::Relaxed),
                requested: self.requested.load(Ordering::Relaxed),
                stream: tag.stream(),
                step: self.step.load(Ordering::Relaxed),
                device: tag.device(),
                lifetime: tag.lifetime(),
                capture: tag.capture(),
                is_sent: tag.is_sent(),
            };
            // Orders the words' loads before the second look at the state.
            fence(Ordering::Acquire);
            if self.state.load(Ordering::Relaxed) == before {
                return SlotRead::Taken(entry, state);
            }
            pause();
        }
        SlotRead::Torn
    }
}
