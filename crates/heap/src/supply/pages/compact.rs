//! Compaction: between two steps, idle chunks become one row again.
//!
//! A move serves one request and leaves a hole where its pages lay. Free memory ends up in many
//! short rows, into which fewer requests fit; so moves bring more moves, and in the end growth.
//! Between two steps most memory is free, and in one row all of it serves again (`upkeep/tidying`
//! says when, also without steps). That takes a call or two for each chunk. It comes once moves and
//! growth since the last compaction have mapped as many chunks, so it at most doubles their cost
//! (the ski-rental rule).
//! docs/decisions/moving-pages.md has the figures.

use crate::central::Central;
use crate::driver::Result;
use crate::request::{Growth, Want};
use crate::runs::arena::{Movable, MovablePages, Plan, SpaceId, UNOWNED};
use crate::runs::spaces::Spaces;
use crate::small::size_class::PAGE;
use crate::supply::pages::gather::{Gathered, parts_of};
use gruyere_record::Record;
use std::collections::BTreeMap;

/// A compaction maps at least one part in this of the memory held: less would win little.
const LEAST: u64 = 3;

impl Central {
    /// Whether held memory has crept up so far that a compaction may be worth its calls.
    pub(crate) fn has_crept(&self, record: &Record) -> bool {
        let (_, peak) = record.live(self.device);
        let (held, slack) = (self.backing.pages.held(), self.slack_above(peak));
        self.creep.is_due(held, peak, slack, self.arenas.changes())
    }

    /// Maps the idle chunks of one owner (a stream, or none) in an ordinary space into one row: of
    /// the owner with most free memory there, if those chunks are many and as many have been
    /// mapped since the last time. They stay that owner's.
    ///
    /// # Errors
    /// The driver's error. Every page is then where it was.
    pub(crate) fn compact(&mut self, ctx: &Growth<'_>) -> Result<()> {
        let plan = self.spaces.iter().find_map(|space| self.plan_compaction(ctx, space));
        let Some((want, row, found)) = plan else {
            self.creep.note_fruitless_look(self.arenas.changes());
            return Ok(());
        };
        let ctx = Growth { lifetime: Spaces::lifetime_of(want.space), ..*ctx };
        let mapped = self.grow_by(&ctx, want, row, 0, found);
        // Also where the driver refused: not again at each step.
        self.creep.note_compaction();
        mapped
    }

    fn plan_compaction(&self, ctx: &Growth<'_>, space: SpaceId) -> Option<(Want, Plan, Gathered)> {
        // A row has one epoch: memory that passes on only behind a stream's next malloc would hold
        // back what may pass on now.
        let may_move = |stream, _| {
            if ctx.streams.is_unripe(stream) { Movable::No } else { Movable::Used }
        };
        let mut idle = self.arenas.movable_runs(&[space], &may_move);
        let owner = |pages: &MovablePages| pages.used.map_or(UNOWNED, |(stream, _)| stream);
        let mut free = BTreeMap::<u32, u64>::new();
        for pages in &idle {
            *free.entry(owner(pages)).or_default() += pages.bytes();
        }
        let (stream, _) = free.into_iter().max_by_key(|&(_, bytes)| bytes)?;
        idle.retain(|pages| owner(pages) == stream);
        let found = Gathered::whole(&parts_of(&self.backing.pages, &idle));
        let bytes = found.pages * PAGE;
        if bytes < self.backing.pages.held() / LEAST || !self.creep.pays(found.pieces.len()) {
            return None;
        }
        // No address space is reserved for a row that no request needs.
        let row = self.arenas.plan_alone(space, bytes, (0, 0))?;
        Some((Want { space, bytes, align: PAGE, stream }, row, found))
    }
}
