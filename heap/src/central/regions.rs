//! Spans that come and go: their regions, and what the record and the gauges say of them.

use super::Central;
use crate::pools::lifetime::Lifetime;
use crate::runs::arena::{RegionId, SpaceId, UNOWNED};
use crate::supply::backing::Span;
use gruyere_record::{DeviceGauge, EventKind, Record, SegmentEntry, SegmentKind, clock};

impl Central {
    /// A span that is held becomes free memory of `space`, of no stream's. `capture` as the record
    /// counts captures.
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

    /// A wholly free region whose span is held no more is forgotten.
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
