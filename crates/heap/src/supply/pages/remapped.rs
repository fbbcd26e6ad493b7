//! The supply of `backing:stitch`: pages, mapped where a row is needed (`moves.rs` moves them).

use crate::central::{Central, SupplyTraits};
use crate::driver::{Capabilities, DeviceId, Driver, Result};
use crate::profiler::{self, What};
use crate::request::{Eviction, Growth, Want};
use crate::runs::arena::{Movable, SpaceId};
use crate::runs::rows::{joined, partial_page_bytes};
use crate::settings::Settings;
use crate::small::size_class::PAGE;
use crate::supply::backing::Backing;
use crate::supply::pages::chunks::Part;
use crate::supply::{Idle, MayRelease, Supply, Way};
use gruyere_record::Record;
use std::cmp::Reverse;

/// Retired views that stay mapped: work through those that retired last may still run.
const KEPT: usize = 1024;
/// The others are unmapped in batches of this many.
const BATCH: usize = 256;

pub(crate) struct Remapped;

fn bytes(part: &Part) -> u64 {
    u64::from(part.count()) * PAGE
}

fn is_whole(part: &Part) -> bool {
    part.first == 0 && part.behind == 0
}

impl Supply for Remapped {
    fn name(&self) -> &'static str {
        "stitch"
    }

    fn open(&self, device: DeviceId, _: &Settings, _: u64) -> Backing {
        Backing::new(device)
    }

    fn traits(&self, _: u64) -> SupplyTraits {
        SupplyTraits { counts_pages: true, gives_back_idle: true, ..SupplyTraits::default() }
    }

    fn way(&self, _: u64) -> Way {
        Way::Heap
    }

    fn extend(&self, central: &mut Central, ctx: &Growth<'_>, want: Want, _: bool) -> Result<()> {
        let _range = profiler::range(What::Growth, want.bytes);
        let done = central.stitch(ctx, want);
        central.backing.refresh_pages();
        central.publish_reserved();
        done
    }

    fn moves_pages(&self) -> bool {
        true
    }

    fn unmaps_before_growth(&self, central: &Central) -> Option<usize> {
        (central.backing.pages.retired() >= KEPT + BATCH).then_some(KEPT)
    }

    fn prefers_idle(&self, central: &Central, record: &Record, bytes: u64) -> bool {
        central.is_beyond_slack(record, bytes)
    }

    fn make_room(&self, central: &mut Central, ctx: &Growth<'_>, want: Want) -> bool {
        self.extend(central, &Growth { fresh: 0, ..*ctx }, want, false).is_ok()
    }

    fn tidy(
        &self,
        central: &mut Central,
        ctx: &Growth<'_>,
        may_release: MayRelease<'_>,
    ) -> Result<()> {
        if !central.has_crept(ctx.record) {
            return Ok(());
        }
        let Some(_guard) = may_release() else { return Ok(()) };
        let done = central.compact(ctx);
        central.backing.refresh_pages();
        central.publish_reserved();
        done
    }

    fn evict(&self, central: &mut Central, ctx: &Eviction<'_>) -> u64 {
        let spaces = central.open_spaces();
        central.evict_chunks(ctx, &spaces, u64::MAX);
        let bytes = central.backing.pages.release(ctx.driver, u64::MAX);
        central.backing.refresh_pages();
        central.publish_reserved();
        bytes
    }

    fn evict_idle(&self, central: &mut Central, ctx: &Eviction<'_>, most: u64) {
        let spaces: Vec<_> = central.spaces.iter().collect();
        let spare = central.backing.pages.spare();
        central.evict_chunks(ctx, &spaces, most.saturating_sub(spare));
        central.backing.pages.release(ctx.driver, most);
        central.backing.refresh_pages();
    }

    fn evict_space(&self, central: &mut Central, ctx: &Eviction<'_>, space: SpaceId) {
        central.evict_chunks(ctx, &[space], u64::MAX);
        central.free_addresses(ctx.driver, space);
        central.backing.refresh_pages();
    }

    fn release(&self, central: &mut Central, driver: &dyn Driver) {
        central.backing.pages.release(driver, u64::MAX);
        central.backing.refresh_pages();
    }

    fn recount(&self, central: &mut Central, _: &dyn Driver) {
        central.backing.refresh_pages();
    }

    fn evictable(&self, central: &Central) -> u64 {
        let spaces: Vec<_> = central.spaces.iter().collect();
        let movable = central.arenas.movable_runs(&spaces, &|_, _| Movable::Idle);
        let parts =
            movable.iter().flat_map(|movable| central.backing.pages.parts_back(&movable.pages));
        // Only whole handles go back; idle pages of other chunks stay and serve blocks to come.
        let whole: u64 = parts.filter(is_whole).map(|part| bytes(&part)).sum();
        whole + central.backing.pages.spare()
    }

    /// If pages may pass between streams, counts whole free chunks of the ordinary spaces,
    /// anywhere, and the longest free head and tail of the others: they can be mapped in one row.
    /// Or the largest free run of one owner, with the whole chunks and the longest head elsewhere
    /// mapped behind it. A row between two free runs may hold more: the answer is a lower bound.
    fn largest(&self, central: &Central, shares: bool) -> u64 {
        let run = central.largest_run();
        if !shares {
            return run;
        }
        let spaces: Vec<_> = central.spaces.iter().collect();
        let movable = central.arenas.movable_runs(&spaces, &|_, _| Movable::Idle);
        let (mut whole, mut tail, mut head) = (0, 0, 0);
        let (mut beside, mut beside_head) = (0, 0);
        let longest =
            movable.iter().max_by_key(|movable| (movable.bytes(), Reverse(movable.pages.start)));
        for movable in &movable {
            let is_longest = longest.is_some_and(|longest| longest.run == movable.run);
            for part in central.backing.pages.parts_back(&movable.pages) {
                let bytes = bytes(&part);
                let (is_whole, is_head) = (is_whole(&part), part.first == 0);
                whole += if is_whole { bytes } else { 0 };
                tail = tail.max(if part.behind == 0 && !is_whole { bytes } else { 0 });
                head = head.max(if is_head && !is_whole { bytes } else { 0 });
                if !is_longest {
                    beside += if is_whole { bytes } else { 0 };
                    beside_head = beside_head.max(if is_head && !is_whole { bytes } else { 0 });
                }
            }
        }
        let spare = central.backing.pages.spare();
        (run + beside + beside_head).max(whole + tail + head) + spare
    }

    /// New pages are mapped beside those that move.
    fn largest_growing(&self, central: &Central, largest: u64) -> u64 {
        largest + central.room_left()
    }

    /// Whole pages: they move, and spare chunks consist of them.
    fn idle(&self, central: &Central, free: Vec<(u64, u64)>, _: &dyn Fn() -> u64) -> Idle {
        let whole = |(address, bytes)| bytes - partial_page_bytes(address, bytes);
        let whole: u64 = joined(free, |_| false).into_iter().map(whole).sum();
        Idle { bytes: whole + central.backing.pages.spare(), typical_request: 0 }
    }

    fn leaves_pieces(&self, _: &Capabilities) -> bool {
        false
    }
}
