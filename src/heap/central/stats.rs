//! What the parts of the central heap hold.
#![deny(unsafe_code)]

use crate::heap::arena::Movable;
use crate::heap::backing::Kind;
use crate::heap::central::Central;
use crate::heap::size_class::PAGE;

impl Central {
    /// The largest request that what is held could satisfy, on any stream, once the work on what was freed is done.
    ///
    /// Where pages can move (`shares`: they may pass from stream to stream), whole free chunks of the ordinary spaces count, wherever they
    /// lie, and the longest free head and tail of the others: they can be mapped in one row. Or the largest free run of one owner, and the whole
    /// chunks and the longest head elsewhere, mapped behind it. A row between two free runs may hold more: the answer is a lower bound.
    pub(in crate::heap) fn largest_request(&self, shares: bool) -> u64 {
        let spaces: Vec<_> = self.spaces.iter().collect();
        let run = spaces.iter().map(|&space| self.arenas.largest_free(space)).max().unwrap_or(0);
        if self.backing.kind != Kind::Stitch || !shares {
            return run;
        }
        let loose = self.arenas.loose_runs(&spaces, &|_, _| Movable::Idle);
        let (mut whole, mut tail, mut head) = (0, 0, 0);
        let (mut beside, mut beside_head) = (0, 0);
        let last = loose.len().saturating_sub(1);
        for (at, loose) in loose.iter().enumerate() {
            // The longest run comes last.
            let is_longest = at == last;
            for part in self.backing.pages.parts(&loose.pages) {
                let bytes = u64::from(part.count()) * PAGE;
                let (is_whole, is_head) = (part.first == 0 && part.behind == 0, part.first == 0);
                whole += if is_whole { bytes } else { 0 };
                tail = tail.max(if part.behind == 0 && !is_whole { bytes } else { 0 });
                head = head.max(if is_head && !is_whole { bytes } else { 0 });
                if !is_longest {
                    beside += if is_whole { bytes } else { 0 };
                    beside_head = beside_head.max(if is_head && !is_whole { bytes } else { 0 });
                }
            }
        }
        let spare = self.backing.pages.spare();
        (run + beside + beside_head).max(whole + tail + head) + spare
    }

    /// The largest request that could be satisfied if as much is taken from the driver as the ceiling allows, where what is held
    /// satisfies one of `largest`.
    pub(in crate::heap) fn largest_growing(&self, largest: u64) -> u64 {
        let room = self.limit.saturating_sub(self.backing.reserved) / PAGE * PAGE;
        // New pages are mapped beside those that move; a span is a piece by itself.
        if self.backing.kind == Kind::Stitch { largest + room } else { largest.max(room) }
    }
}
