//! The state of another process, living or dead, from its record.
#![deny(unsafe_code)]

use super::live::{LiveBlock, LiveSums};
use super::origins::Origins;
use super::state::{self, Block, BlockKind, DeviceState, Held, Segment, State, Sum, lifetime_name};
use crate::clock::Moment;
use crate::picture::{Picture, Piece, PieceKind, RangeKind};
use crate::reader::DeviceSnapshot;
use crate::{DeviceGauge, Reader, SiteId};

/// The record's state now, with at most `most_events` of the last events.
pub fn state(reader: &Reader<'_>, most_events: usize) -> State {
    let mut origins = Origins::of_sites(reader.sites());
    let devices = (0..reader.devices()).filter_map(|number| {
        let (recorded, picture) = (reader.device(number)?, Picture::read(reader, number)?);
        let timeline = state::timeline(&reader.timeline(number).entries);
        let unrecorded = unrecorded(reader, &recorded, &picture);
        let mut told = device(&recorded, &picture, &mut origins);
        if unrecorded.blocks > 0 || reader.health().segments_unrecorded > 0 {
            hold_what_the_gauge_says(&mut told.held, recorded.gauge(DeviceGauge::Reserved));
        }
        Some(DeviceState { timeline, unrecorded, ..told })
    });
    let devices = devices.collect();
    let events = state::events(reader, most_events, &mut origins);
    let process = reader.process();
    State {
        format: state::FORMAT.to_owned(),
        version: state::VERSION,
        gruyere: process.version.clone(),
        time_nanoseconds: Moment::take().realtime,
        conclusion: None,
        process: process.into(),
        out_of_memory: None,
        training: origins.training(),
        sites: origins.into_sites(),
        devices,
        events,
    }
}

/// A device, from its gauges and its picture. Sums are the picture's: the gauges are of another
/// moment.
pub fn device(recorded: &DeviceSnapshot, picture: &Picture, origins: &mut Origins) -> DeviceState {
    let gauges =
        DeviceGauge::ALL.iter().map(|&gauge| (gauge.name().to_owned(), recorded.gauge(gauge)));
    let mut live_sums = LiveSums::default();
    let live_pieces = || picture.pieces.iter().filter(|piece| piece.kind == PieceKind::Live);
    for piece in live_pieces() {
        let &Piece { address, bytes, requested, stream, step, lifetime, .. } = piece;
        let step = Some(step);
        live_sums.add(LiveBlock { requested, address, bytes, lifetime, stream, step });
    }
    let sums = &picture.sums;
    let captured = free_in(picture, |range| range.capture != 0);
    let [slabs, gaps, whole] = free_in(picture, |range| range.capture == 0);
    let mut live = live_sums.live(picture.step);
    live.all =
        Sum { blocks: sums.live_blocks, bytes: sums.live, requested_bytes: sums.live_requested };
    DeviceState {
        device: recorded.device,
        name: recorded.facts.name.clone(),
        total_bytes: recorded.facts.total_memory,
        limit_bytes: recorded.gauge(DeviceGauge::Limit),
        live_peak_bytes: recorded.live_peak,
        reserved_peak_bytes: recorded.gauge(DeviceGauge::ReservedPeak),
        step: picture.step.into(),
        shares: picture.held().shares(recorded.peak_ratio()),
        held: Held {
            reserved_bytes: sums.held,
            live_bytes: sums.live,
            pending_bytes: sums.pending,
            slab_free_bytes: slabs,
            between_bytes: gaps,
            whole_pages_bytes: whole,
            captured_free_bytes: captured.iter().sum(),
            unmapped_bytes: sums.spare,
            ..Held::default()
        },
        live,
        gauges: gauges.collect(),
        timeline: Vec::new(),
        segments: picture.ranges.iter().map(|range| segment(picture, range, origins)).collect(),
        merged_blocks: 0,
        torn: picture.misfits.total(),
        unrecorded: Sum::default(),
        sent: live_pieces().filter(|piece| piece.is_sent).map(|piece| piece.address).collect(),
    }
}

/// The pages that a picture lacks because the record had no room for them are part of the rest.
fn hold_what_the_gauge_says(held: &mut Held, reserved: u64) {
    let lacks = reserved.saturating_sub(held.reserved_bytes);
    held.reserved_bytes = held.reserved_bytes.saturating_add(lacks);
    held.rest_bytes = held.rest_bytes.saturating_add(lacks);
}

/// The live blocks that `picture` lacks because the record had no room for them. The gauges count
/// every block, but are of another moment than the picture, so a difference counts only if the
/// block map was ever full.
pub fn unrecorded(reader: &Reader<'_>, recorded: &DeviceSnapshot, picture: &Picture) -> Sum {
    let most = reader.health().blocks_unrecorded;
    let (total, sums) = (recorded.total(), &picture.sums);
    match total.live_blocks().saturating_sub(sums.live_blocks).min(most) {
        0 => Sum::default(),
        blocks => Sum {
            blocks,
            bytes: recorded.live.saturating_sub(sums.live),
            requested_bytes: total.live_requested().saturating_sub(sums.live_requested),
        },
    }
}

/// Free bytes of some ranges: in slabs with blocks, beside blocks on their pages, in whole pages.
fn free_in(picture: &Picture, chosen: impl Fn(&crate::picture::Range) -> bool) -> [u64; 3] {
    let pages = picture
        .ranges
        .iter()
        .filter(|range| chosen(range))
        .flat_map(|range| picture.pages_of(range));
    pages.fold([0; 3], |[slabs, gaps, whole], page| {
        let free = u64::from(page.free);
        let [gap, idle] = if page.is_free() { [0, free] } else { [free, 0] };
        [slabs + u64::from(page.slab_free), gaps + gap, whole + idle]
    })
}

fn segment(picture: &Picture, range: &crate::picture::Range, origins: &mut Origins) -> Segment {
    let pieces = picture.pieces_of(range);
    let mut blocks: Vec<Block> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let stream = u64::from(piece.stream);
        let kind = match piece.kind {
            PieceKind::Live => BlockKind::Live,
            PieceKind::Pending => BlockKind::Pending,
            _ => BlockKind::Free,
        };
        match (kind, blocks.last_mut()) {
            (BlockKind::Live | BlockKind::Pending, _) => {
                let Piece { bytes, requested, lifetime, step, site, .. } = *piece;
                let site = origins.number(site);
                blocks.push(Block(bytes, kind, requested, lifetime, stream, Some(step), site));
            }
            (_, Some(Block(bytes, BlockKind::Free, ..))) => *bytes += piece.bytes,
            _ => blocks.push(Block(piece.bytes, BlockKind::Free, 0, 0, 0, None, SiteId::NONE)),
        }
    }
    let holder = match (range.capture, range.kind) {
        (0, RangeKind::Alone) => "direct".to_owned(),
        (0, _) => lifetime_name(range.lifetime),
        _ => "captured".to_owned(),
    };
    Segment {
        address: range.address,
        bytes: range.bytes,
        holder,
        // The record has the pools' places, not torch's ids.
        pool_id: (0, range.capture.into()),
        stitched: range.kind == RangeKind::Stitched,
        small: range.kind != RangeKind::Alone && pieces.iter().all(|piece| piece.slot != 0),
        blocks,
    }
}
