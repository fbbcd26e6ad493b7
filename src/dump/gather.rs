//! The state of this process, from the heap's own books, for a dump.
#![deny(unsafe_code)]

use super::state::{
    self, Block, BlockKind, Cause, DeviceState, Held, OutOfMemory, Rung, RungUse, Segment, State,
    lifetime_name,
};
use crate::heap::rungs::{self, Ladder};
use crate::heap::segment_stats::{Place, SegmentStats};
use crate::heap::snapshot::{self, BlockState, Holder, Snapshot};
use crate::heap::{Heap, Report};
use crate::record::clock::Moment;
use crate::record::conclusion::Conclusion;
use crate::record::device_gauge::RUNGS;
use crate::record::dump::origins::Origins;
use crate::record::facts::Process;
use crate::record::held::peak_ratio;
use crate::record::{Reader, SiteId};

/// Small blocks listed one by one; beyond them, those of a slab are listed as one. A dump of so
/// many has some tens of MiB.
pub const MOST_BLOCKS: usize = 1 << 18;
/// The heap's state now.
pub fn state(heap: &Heap, report: Option<&Report>) -> State {
    // Before the sites are read: this may add one.
    let here = report.map_or(SiteId::NONE, |_| heap.site_here());
    let reader = Reader::own(heap.record());
    let process = reader.as_ref().map_or_else(Process::current, Reader::process);
    let devices = heap.devices_in_use();
    let share = MOST_BLOCKS / devices.len().max(1);
    let mut origins = reader.as_ref().map(Origins::read).unwrap_or_default();
    let devices = devices
        .into_iter()
        .filter_map(|id| device(heap, reader.as_ref(), &mut origins, id, share))
        .collect();
    let here = origins.number(here);
    let set_at = report.map_or(SiteId::NONE, |report| super::limits::site(report.device));
    let limit_site = origins.number(set_at);
    let events =
        reader.as_ref().map(|reader| state::events(reader, state::MOST_EVENTS, &mut origins));
    let mut state = State {
        format: state::FORMAT.to_owned(),
        version: state::VERSION,
        gruyere: env!("CARGO_PKG_VERSION").to_owned(),
        time_nanoseconds: Moment::take().realtime,
        conclusion: None,
        process: process.into(),
        out_of_memory: report
            .map(|report| OutOfMemory { limit_site, ..out_of_memory(report, here) }),
        training: origins.training(),
        sites: origins.into_sites(),
        devices,
        events: events.unwrap_or_default(),
    };
    if let Some(report) = report {
        let conclusion = Conclusion::of(&state, &[]);
        if !state.sites.is_empty()
            && let Some(refused) = &mut state.out_of_memory
        {
            // As the exception will print it.
            let conclusion = conclusion.lines.clone();
            refused.message = Report { conclusion, ..report.clone() }.to_string();
        }
        state.conclusion = Some(conclusion);
    }
    state
}

fn out_of_memory(report: &Report, site: SiteId) -> OutOfMemory {
    let rung_use = |ladder: &Ladder, number: usize| {
        let rungs::Rung { calls, bytes, nanoseconds } = ladder.rungs[number];
        RungUse { calls, bytes, nanoseconds }
    };
    let rungs = RUNGS.iter().enumerate().map(|(number, rung)| Rung {
        name: rung.name.to_owned(),
        all: rung_use(&report.ladder, number),
        this_time: report.this_time.as_ref().map(|ladder| rung_use(ladder, number)),
    });
    OutOfMemory {
        message: report.to_string(),
        advice: report.advice(),
        device: report.device,
        count: report.count,
        asked_bytes: report.asked,
        lifetime: report.lifetime.name().to_owned(),
        stream: report.stream.0,
        stream_handle: report.stream.1,
        step: report.step,
        site,
        limit_site: SiteId::NONE,
        context: report.context,
        thread: thread_name(),
        pool: report.pool.as_ref().map(|pool| pool.name.clone()),
        capturing: report.capturing,
        cause: Cause {
            total_bytes: report.total,
            free_bytes: report.free,
            others_bytes: report.others(),
            limit_bytes: report.limit,
            reserved_bytes: report.reserved,
            live_bytes: report.live,
            pending_bytes: report.pending,
            captured_bytes: report.captured,
            pooled_bytes: report.pooled,
            partly_used_bytes: report.partly,
            largest_request_bytes: report.largest,
            orphaned_bytes: report.orphaned,
        },
        ladder: rungs.collect(),
    }
}

/// The system's name: threads of C++ have no name for Rust.
fn thread_name() -> String {
    let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
    name.trim_end().to_owned()
}

fn device(
    heap: &Heap,
    reader: Option<&Reader<'_>>,
    origins: &mut Origins,
    id: u32,
    share: usize,
) -> Option<DeviceState> {
    let (snapshot, segment_stats) = heap.segment_stats(id.into(), share).ok()??;
    let stats = heap.stats(id.into()).unwrap_or_default();
    let recorded = reader.and_then(|reader| reader.device(id));
    let gauges = recorded.iter().flat_map(|device| {
        crate::record::DeviceGauge::ALL
            .iter()
            .map(|&gauge| (gauge.name().to_owned(), device.gauge(gauge)))
    });
    let step = heap.step();
    Some(DeviceState {
        device: id,
        name: heap.device_name(id),
        total_bytes: stats.total_memory,
        limit_bytes: stats.limit,
        live_peak_bytes: stats.live_peak,
        reserved_peak_bytes: stats.reserved_peak,
        step: step.into(),
        shares: stats.held().shares(peak_ratio(stats.reserved_peak, stats.live_peak)),
        held: held(&segment_stats),
        live: segment_stats.live.live(step),
        gauges: gauges.collect(),
        merged_blocks: snapshot.merged,
        timeline: reader
            .map(|reader| state::timeline(&reader.timeline(id).entries))
            .unwrap_or_default(),
        segments: segments(snapshot, id, origins),
        torn: 0,
        unrecorded: state::Sum::default(),
        sent: origins.sent(id),
    })
}

fn held(segment_stats: &SegmentStats) -> Held {
    Held {
        reserved_bytes: segment_stats.reserved,
        live_bytes: segment_stats.live.all.bytes,
        pending_bytes: segment_stats.pending.bytes,
        slab_free_bytes: segment_stats.bytes_in(Place::Slab),
        between_bytes: segment_stats.bytes_in(Place::Between),
        whole_pages_bytes: segment_stats.bytes_in(Place::Idle),
        captured_free_bytes: segment_stats.bytes_in(Place::Capture),
        pooled_free_bytes: segment_stats.bytes_in(Place::Pool),
        unmapped_bytes: segment_stats.bytes_in(Place::Unmapped),
        orphaned_bytes: segment_stats.bytes_in(Place::Orphan),
        rest_bytes: segment_stats.rest,
    }
}

fn segments(snapshot: Snapshot, device: u32, origins: &mut Origins) -> Vec<Segment> {
    let mut block = |block: &snapshot::Block| {
        let kind = match block.state {
            BlockState::Inactive => BlockKind::Free,
            BlockState::Allocated => BlockKind::Live,
            BlockState::PendingFree => BlockKind::Pending,
        };
        let site = match kind {
            BlockKind::Free => SiteId::NONE,
            _ => origins.of(device, block.address),
        };
        let &snapshot::Block { bytes, requested, lifetime, stream, step, .. } = block;
        Block(bytes, kind, requested, lifetime, stream, step, site)
    };
    let holder = |holder: &Holder| match holder {
        Holder::Ordinary(number) => lifetime_name(*number),
        Holder::Capture => "captured".to_owned(),
        Holder::Pool(name) => format!("pool {name}"),
        Holder::Orphan => "orphaned".to_owned(),
        Holder::Direct => "direct".to_owned(),
    };
    let mut segment = |segment: snapshot::Segment| Segment {
        address: segment.address,
        bytes: segment.bytes,
        holder: holder(&segment.holder),
        pool_id: segment.pool,
        stitched: segment.stitched,
        small: segment.is_small(),
        blocks: segment.blocks.iter().map(&mut block).collect(),
    };
    snapshot.segments.into_iter().map(&mut segment).collect()
}
