//! Compaction: between two steps, idle chunks become one row again.
//!
//! A move serves one request and leaves a hole where its pages lay. Free memory ends up in many
//! short rows, into which fewer requests fit; so moves bring more moves, and in the end growth.
//! Between two steps most memory is free, and in one row all of it serves again. That takes a call
//! or two for each chunk. It comes once the moves since the last compaction have mapped as many
//! chunks, so it at most doubles the cost of moves (the ski-rental rule).
//! docs/decisions/moving-pages.md has the figures.

use crate::central::Central;
use crate::driver::Result;
use crate::request::{Growth, Want};
use crate::runs::arena::{Movable, MovablePages, SpaceId, UNOWNED};
use crate::small::size_class::PAGE;
use crate::supply::pages::gather::{Gathered, parts_of};
use gruyere_record::Record;
use std::collections::BTreeMap;

/// Held memory has crept up once it exceeds the peak of live bytes by this many times the slack.
const CREPT: u64 = 2;
/// A compaction maps at least one part in this of the memory held: less would win little.
const LEAST: u64 = 3;

impl Central {
    /// Whether pages have moved and held memory is so far above the peak of live bytes that a
    /// compaction may be worth its calls.
    pub(crate) fn has_crept(&self, record: &Record) -> bool {
        let (_, peak) = record.live(self.device);
        let bound = peak + CREPT * self.slack_above(peak);
        self.moved_chunks > 0 && self.backing.pages.held() > bound
    }

    /// In each ordinary space, maps the idle chunks of the owner with most free memory (a stream,
    /// or none) into one row, if they are many and moves have mapped as many. They stay that
    /// owner's.
    ///
    /// # Errors
    /// The driver's error. Every page is then where it was.
    pub(crate) fn compact(&mut self, ctx: &Growth<'_>) -> Result<()> {
        for space in self.spaces.iter() {
            self.compact_space(ctx, space)?;
        }
        Ok(())
    }

    fn compact_space(&mut self, ctx: &Growth<'_>, space: SpaceId) -> Result<()> {
        // They stay with their owner, which may use them at once: no event has to show anything.
        let mut idle = self.arenas.movable_runs(&[space], &|_, _| Movable::Used);
        let owner = |pages: &MovablePages| pages.used.map_or(UNOWNED, |(stream, _)| stream);
        let mut free = BTreeMap::<u32, u64>::new();
        for pages in &idle {
            *free.entry(owner(pages)).or_default() += pages.bytes();
        }
        let Some((stream, _)) = free.into_iter().max_by_key(|&(_, bytes)| bytes) else {
            return Ok(());
        };
        idle.retain(|pages| owner(pages) == stream);
        let found = Gathered::whole(&parts_of(&self.backing.pages, &idle));
        let bytes = found.pages * PAGE;
        let is_little = bytes < self.backing.pages.held() / LEAST;
        if is_little || self.moved_chunks < found.pieces.len() as u64 {
            return Ok(());
        }
        let Some(row) = self.plan_alone(ctx, space, bytes) else { return Ok(()) };
        let want = Want { space, bytes, align: PAGE, stream };
        let mapped = self.grow_by(ctx, want, row, 0, found);
        // Also where the driver refused: not again at each step.
        self.moved_chunks = 0;
        mapped
    }
}
