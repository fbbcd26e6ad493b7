//! Spans: memory that the driver gives in one piece, from its pools or as plain allocations. They
//! never move. Each is a region of its space, and can go back to the driver once empty.

use crate::central::{Central, SupplyTraits};
use crate::driver::{Capabilities, DeviceId, Driver, DriverError, ErrorKind, Result};
use crate::lifetime::Lifetime;
use crate::profiler::{self, What};
use crate::request::{Eviction, Growth, Want};
use crate::runs::arena::{Region, RegionId, RunId, SpaceId, UNOWNED};
use crate::runs::rows::joined;
use crate::settings::Settings;
use crate::small::size_class::{PAGE, round_up};
use crate::supply::backing::{Backing, SPAN, Span};
use crate::supply::{Idle, MayRelease, Supply, Way};
use gruyere_record::gauges::SMALL_LIMIT;
use gruyere_record::{DeviceGauge, EventKind, Record, SegmentEntry, SegmentKind, clock};
use std::collections::HashSet;

/// A span is at most one part in this of the memory left on the device, unless a request is longer.
const LEFT_SPANS: u64 = 256;
/// While little is held, a span is at most this long (bytes), unless a request is longer.
const SMALL_HEAP_SPAN: u64 = 256 << 20;
/// Past that: one part in this of the memory held.
const SPAN_SHARE: u64 = 88;

pub(crate) struct Spans {
    name: &'static str,
    /// Takes all but short spans from the driver's pools.
    pooled: bool,
    large: Way,
}

impl Spans {
    /// Spans from the driver's pools.
    pub(crate) const POOLED: Self = Self { name: "pool", pooled: true, large: Way::Heap };
    pub(crate) const PLAIN: Self = Self { name: "fixed", pooled: false, large: Way::Heap };
    /// Plain allocations; each large block has one of its own.
    pub(crate) const DEDICATED: Self = Self { large: Way::Dedicated, ..Self::PLAIN };
    /// Every block is the driver's own (`supply/direct.rs`). Only memory that a graph uses must
    /// stay after its block is freed; it lies in plain spans.
    pub(crate) const DIRECT: Self = Self { name: "passthrough", large: Way::Driver, ..Self::PLAIN };

    /// Takes a span of at least `bytes` into `space`.
    ///
    /// # Errors
    /// The driver's error; out of memory, too, if the ceiling would be passed. Nothing has changed
    /// then.
    fn add_span(
        central: &mut Central,
        ctx: &Growth<'_>,
        space: SpaceId,
        bytes: u64,
        whole: bool,
    ) -> Result<()> {
        let too_large = DriverError::new("limit", ErrorKind::OutOfMemory, 0);
        let pages = round_up(bytes, PAGE).ok_or(too_large)?;
        let is_longer = whole && !central.arenas.whole_runs;
        let span = if is_longer { span_for(central, space, pages) } else { pages };
        // Memory of a graph or a named pool must go back without waiting for the device.
        let is_ordinary = central.spaces.is_ordinary(space);
        let span = if is_ordinary {
            span
        } else {
            central.backing.length_to_free(span).ok_or(too_large)?
        };
        if central.backing.held.checked_add(span).is_none_or(|held| held > central.limit) {
            return Err(too_large);
        }
        let span = central.backing.allocate_span(ctx.driver, ctx.lifetime, span)?;
        if !ctx.table.cover(span.address, span.bytes) {
            central.backing.return_unseen(ctx.driver, span.origin, span.taken);
            log::error!(
                "the driver returned address {:#x}, beyond 48 bits: this device cannot be managed",
                span.address
            );
            return Err(DriverError::new("address range", ErrorKind::Other, 0));
        }
        central.add_span(ctx.record, space, span, ctx.lifetime, ctx.capture);
        Ok(())
    }

    /// Returns a wholly free region, with all its uses done, to the driver. False: the driver
    /// refused, and the region stays.
    fn release_region(central: &mut Central, ctx: &Eviction<'_>, id: RegionId) -> bool {
        let region = central.arenas.region(id).clone();
        let (origin, taken) = region.span;
        if let Err(error) = central.backing.free_span(ctx.driver, origin, taken) {
            log::warn!(
                "the driver did not take the span {origin:#x} back: {error}; it stays in use"
            );
            return false;
        }
        central.remove_span(ctx.record, id);
        true
    }

    /// Returns empty regions of the open spaces; their bytes. Without `may_wait` it keeps regions
    /// whose return may wait for the device; the driver's pools never wait.
    fn release_empty_regions(central: &mut Central, ctx: &Eviction<'_>, may_wait: bool) -> u64 {
        let mut bytes = 0;
        for space in central.open_spaces() {
            for id in central.arenas.empty_regions(space, ctx.completed) {
                let Region { bytes: size, span: (_, taken), .. } = *central.arenas.region(id);
                let kept = central.spare_of(space) < size
                    || !may_wait && central.backing.waits_to_free(taken);
                bytes += if !kept && Self::release_region(central, ctx, id) { size } else { 0 };
            }
        }
        bytes
    }
}

/// The length of a new span of `space` for `pages` bytes.
///
/// Blocks cannot cross spans, so few and long spans leave the fewest gaps at their ends; but the
/// unused part of a long span is held for nothing. A sixteenth of the memory held, up to 256 MiB,
/// then about a hundredth, came out best on the traces. With little of the device left, long spans
/// are what a program dies of, and with sizes apart a span is as long as it must be
/// (docs/decisions/near-capacity.md). A span for a graph or a named pool is only a little longer
/// than it must be.
fn span_for(central: &Central, space: SpaceId, pages: u64) -> u64 {
    if central.spaces.are_apart() {
        return pages;
    }
    let held = central.backing.held;
    let left = central.limit.min(central.total_memory).saturating_sub(held);
    let most = left / LEFT_SPANS;
    if !central.spaces.is_ordinary(space) {
        return pages.saturating_add(central.longest_step(space).min(most / PAGE * PAGE));
    }
    let share = (held / 16).min(SMALL_HEAP_SPAN).max(held / SPAN_SHARE).min(most);
    let step = if most < SPAN { PAGE } else { SPAN };
    pages.max(share).checked_next_multiple_of(step).unwrap_or(pages)
}

impl Supply for Spans {
    fn name(&self) -> &'static str {
        self.name
    }

    fn open(&self, device: DeviceId, settings: &Settings, total_memory: u64) -> Backing {
        let backing = Backing::new(device);
        if self.pooled { backing.with_pools(settings, total_memory) } else { backing }
    }

    fn traits(&self, room: u64) -> SupplyTraits {
        if self.large == Way::Driver {
            return SupplyTraits::default();
        }
        SupplyTraits {
            // So small a device, even if empty, has no room for spans of a whole step.
            sizes_apart: room / LEFT_SPANS < SPAN,
            whole_runs: self.large == Way::Dedicated,
            // cuMemFree waits for the device: a plain allocation stays held until memory is needed.
            gives_back_idle: self.pooled,
            counts_pages: false,
        }
    }

    fn way(&self, size: u64) -> Way {
        match self.large {
            Way::Dedicated if size < SMALL_LIMIT => Way::Heap,
            way => way,
        }
    }

    fn may_keep(&self) -> std::result::Result<(), &'static str> {
        match self.large {
            Way::Driver => Err("backing:passthrough, which keeps no memory"),
            Way::Heap | Way::Dedicated => Ok(()),
        }
    }

    fn extend(
        &self,
        central: &mut Central,
        ctx: &Growth<'_>,
        want: Want,
        whole_span: bool,
    ) -> Result<()> {
        let _range = profiler::range(What::Growth, want.bytes);
        Self::add_span(central, ctx, want.space, want.bytes, whole_span)
    }

    /// By a span, or by the bare need if a span is too long.
    fn grow(
        &self,
        central: &mut Central,
        ctx: &Growth<'_>,
        want: Want,
        may_release: MayRelease<'_>,
    ) -> Result<Option<RunId>> {
        if ctx.fresh < want.bytes {
            return Ok(None);
        }
        for whole_span in [true, false] {
            // A new peak is the moment to return empty regions: in the steady state there are none.
            if central.backing.reserved + want.bytes > central.peak_reserved
                && let Some(_guard) = may_release()
                && Self::release_empty_regions(central, &ctx.eviction(), false) > 0
            {
                self.release(central, ctx.driver);
                central.publish_reserved();
            }
            match self.extend(central, ctx, want, whole_span) {
                Ok(()) => return Ok(want.fit_or_join(&mut central.arenas)),
                Err(error) if error.is_out_of_memory() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn evict(&self, central: &mut Central, ctx: &Eviction<'_>) -> u64 {
        Self::release_empty_regions(central, ctx, true)
    }

    fn evict_idle(&self, central: &mut Central, ctx: &Eviction<'_>, most: u64) {
        let mut given = 0;
        for space in central.spaces.iter() {
            for id in central.arenas.empty_regions(space, ctx.completed) {
                let Region { bytes, span: (_, taken), .. } = *central.arenas.region(id);
                let is_kept =
                    central.spare_of(space) < bytes || central.backing.waits_to_free(taken);
                if given + bytes <= most && !is_kept && Self::release_region(central, ctx, id) {
                    given += bytes;
                }
            }
        }
        if given > 0 {
            self.release(central, ctx.driver);
        }
    }

    fn evict_space(&self, central: &mut Central, ctx: &Eviction<'_>, space: SpaceId) {
        for region in central.arenas.empty_regions(space, ctx.completed) {
            Self::release_region(central, ctx, region);
        }
    }

    fn release(&self, central: &mut Central, driver: &dyn Driver) {
        central.backing.trim(driver);
    }

    fn recount(&self, central: &mut Central, driver: &dyn Driver) {
        central.backing.refresh(driver);
    }

    fn evictable(&self, central: &Central) -> u64 {
        let spaces = central.spaces.iter();
        let empty = spaces.flat_map(|space| central.arenas.empty_regions(space, &|_| u64::MAX));
        empty.map(|region| central.arenas.region(region).bytes).sum()
    }

    fn largest(&self, central: &Central, _: bool) -> u64 {
        central.largest_run()
    }

    /// A span is a piece by itself.
    fn largest_growing(&self, central: &Central, largest: u64) -> u64 {
        largest.max(central.room_left())
    }

    /// Memory stays in place, so this counts what a typical request fits into. Empty slabs go back
    /// to their arena and join free memory beside them.
    fn idle(&self, central: &Central, free: Vec<(u64, u64)>, typical: &dyn Fn() -> u64) -> Idle {
        let typical_request = typical().max(1);
        let spans: HashSet<u64> =
            central.arenas.regions().map(|(_, region)| region.address).collect();
        let rows = joined(free, |address| spans.contains(&address));
        let serves = rows.into_iter().filter(|row| row.1 >= typical_request);
        Idle { bytes: serves.map(|row| row.1).sum(), typical_request }
    }

    fn leaves_pieces(&self, device: &Capabilities) -> bool {
        device.vmm
    }
}

impl Central {
    /// Makes a span free, unowned memory of `space`. `capture`: the tag under which the record
    /// counts it.
    pub(crate) fn add_span(
        &mut self,
        record: &Record,
        space: SpaceId,
        span: Span,
        lifetime: Lifetime,
        capture: u8,
    ) {
        let Span { address, bytes, origin, taken } = span;
        let region = self.arenas.add_region(space, address, bytes, (origin, taken), UNOWNED);
        let (device, lifetime) = (self.device as u8, lifetime as u8);
        let slot = record.segment_insert(&SegmentEntry {
            kind: SegmentKind::Span,
            address,
            bytes,
            slot: 0,
            stream: UNOWNED,
            device,
            lifetime,
            capture,
            ..SegmentEntry::default()
        });
        self.arenas.set_region_slot(region, slot);
        self.gauges.add(DeviceGauge::Grows, 1);
        self.publish_reserved();
        record.event(EventKind::Grow, device, lifetime, UNOWNED, address, bytes, clock::now());
    }

    /// Forgets a wholly free region whose span has gone back.
    pub(crate) fn remove_span(&mut self, record: &Record, id: RegionId) {
        let region = self.arenas.remove_region(id);
        record.segment_remove(region.slot);
        self.gauges.add(DeviceGauge::Releases, 1);
        self.publish_reserved();
        let device = self.device as u8;
        let kind = EventKind::Release;
        record.event(kind, device, 0, UNOWNED, region.address, region.bytes, clock::now());
    }
}
