//! The sums and ranges as JSON (docs/map.md). Addresses are hexadecimal text: JSON readers may not
//! keep such numbers exact.

use std::cmp::Reverse;
use std::collections::HashMap;

use gruyere_record::picture::{Picture, Piece, PieceKind, Range};
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sites::{SiteId, Sites};
use gruyere_record::{DeviceGauge, LIFETIME_NAMES, LIFETIMES, Reader};
use serde_json::{Map, Value, json};

use super::gaps::Missing;
use super::strokes::{Ink, of_range};
use crate::{shares, sites};

/// The most blocks and free runs in a list, largest first.
const LISTED: usize = 20;

fn address(address: u64) -> String {
    format!("{address:#x}")
}

fn lifetime(number: u8) -> &'static str {
    LIFETIME_NAMES[usize::from(number) % LIFETIMES]
}

/// Identity of the record's process.
pub fn process(reader: &Reader<'_>) -> Value {
    let process = reader.process();
    json!({
        "pid": process.pid,
        "rank": process.rank,
        "local_rank": process.local_rank,
        "world_size": process.world_size,
        "host": process.host,
        "command": process.command,
        "version": process.version,
        "live": reader.is_live(),
    })
}

/// The sums, by name.
pub fn sums(picture: &Picture) -> Value {
    let sums = &picture.sums;
    let lifetimes: Map<String, Value> = LIFETIME_NAMES
        .iter()
        .zip(sums.live_by_lifetime)
        .map(|(name, bytes)| ((*name).to_owned(), bytes.into()))
        .collect();
    json!({
        "held_bytes": sums.held,
        "live_bytes": sums.live,
        "live_requested_bytes": sums.live_requested,
        "live_blocks": sums.live_blocks,
        "live_bytes_by_lifetime": lifetimes,
        "pending_bytes": sums.pending,
        "pending_blocks": sums.pending_blocks,
        "free_whole_bytes": sums.free_whole,
        "free_whole_bound_bytes": sums.free_whole_bound,
        "free_partial_bytes": sums.free_partial,
        "gap_bytes": sums.gaps,
        "free_slot_bytes": sums.free_slots,
        "slot_rest_bytes": sums.slot_rests,
        "slab_tail_bytes": sums.slab_tails,
        "spare_bytes": sums.spare,
        "movable_bytes": sums.movable(),
        "largest_free_run_bytes": sums.largest_run,
        "pages": {
            "full": sums.full_pages,
            "partly_used": sums.partial_pages,
            "free": sums.free_pages,
            "spare": sums.spare_pages,
        },
        "address_space": {
            "reserved_bytes": sums.reserved_address,
            "shadow_bytes": sums.stale_aliases,
            "retired_bytes": sums.retired,
        },
    })
}

/// Counts of entries that do not fit together, by name.
fn misfits(picture: &Picture) -> Value {
    picture
        .misfits
        .parts()
        .iter()
        .map(|(name, count)| ((*name).to_owned(), json!(count)))
        .collect::<Map<_, _>>()
        .into()
}

/// A site's number; `null` if unknown.
fn site(id: SiteId) -> Option<u32> {
    (id != SiteId::NONE).then_some(id.0)
}

fn block(piece: &Piece) -> Value {
    json!({
        "site": site(piece.site),
        "address": address(piece.address),
        "bytes": piece.bytes,
        "requested_bytes": piece.requested,
        "lifetime": lifetime(piece.lifetime),
        "stream": piece.stream,
        "step": piece.step,
        "capture": piece.capture,
        "sent": piece.is_sent,
    })
}

fn range(picture: &Picture, range: &Range) -> Value {
    let mut inks = [0u64; Ink::ALL.len()];
    for stroke in of_range(picture, range) {
        inks[stroke.ink as usize] += stroke.bytes;
    }
    let of = |ink: Ink| inks[ink as usize];
    let blocks = picture.pieces_of(range).iter().filter(|piece| piece.kind.is_block()).count();
    json!({
        "address": address(range.address),
        "bytes": range.bytes,
        "kind": range.kind.name(),
        "lifetime": lifetime(range.lifetime),
        "capture": range.capture,
        "blocks": blocks,
        "live_bytes": of(Ink::Live),
        "pending_bytes": of(Ink::Pending),
        "free_whole_bytes": of(Ink::Whole) + of(Ink::Bound),
        "free_partial_bytes": Ink::ALL
            .iter()
            .filter(|ink| ink.is_unusable())
            .map(|&ink| of(ink))
            .sum::<u64>(),
    })
}

/// The sites of live blocks with their bytes, largest first.
fn sites_in_use(picture: &Picture, sites: &Sites) -> Vec<Value> {
    let mut of_site: HashMap<SiteId, (u64, u64)> = HashMap::new();
    for piece in picture.pieces.iter().filter(|piece| piece.kind == PieceKind::Live) {
        let (bytes, blocks) = of_site.entry(piece.site).or_default();
        (*bytes, *blocks) = (*bytes + piece.bytes, *blocks + 1);
    }
    let mut order: Vec<(SiteId, (u64, u64))> = of_site.into_iter().collect();
    order.sort_by_key(|&(id, (bytes, _))| (Reverse(bytes), id));
    let told = |(id, (bytes, blocks))| {
        let mut value = sites::value(sites, id);
        if value.is_null() {
            value = json!({
                "id": site(id), "name": sites.place(id).to_string(), "module": null,
                "phase": "unknown", "line": null, "frames": [], "forward": null,
            });
        }
        value["live_bytes"] = json!(bytes);
        value["live_blocks"] = json!(blocks);
        value
    };
    order.into_iter().map(told).collect()
}

/// The whole picture as JSON.
pub fn value(reader: &Reader<'_>, picture: &Picture) -> Value {
    let device = reader.device(picture.device);
    let missing = Missing::of(reader, picture);
    let sites = reader.sites();
    let gauge = |gauge| device.as_ref().map(|device| device.gauge(gauge));
    let value = json!({
        "process": process(reader),
        "device": picture.device,
        "name": device.as_ref().map(|device| device.facts.name.clone()),
        "step": picture.step,
        "reserved_bytes": gauge(DeviceGauge::Reserved),
        "limit_bytes": gauge(DeviceGauge::Limit),
        "sums": sums(picture),
        "did_not_fit": misfits(picture),
        "not_in_the_record": {
            "blocks": missing.blocks, "bytes": missing.bytes, "segments": missing.segments
        },
        "ranges": picture.ranges.iter().map(|one| range(picture, one)).collect::<Vec<_>>(),
        "largest_free_runs": picture
            .largest_runs(LISTED)
            .iter()
            .map(|run| json!({ "address": address(run.address), "bytes": run.bytes }))
            .collect::<Vec<_>>(),
        "largest_live_blocks": picture.largest_live(LISTED).iter().map(block).collect::<Vec<_>>(),
        // Empty unless the user asked for sites: else every block's would be unknown.
        "sites": if sites.is_empty() { Vec::new() } else { sites_in_use(picture, &sites) },
    });
    let ratio = device.as_ref().and_then(DeviceSnapshot::peak_ratio);
    shares::with(value, &picture.held().shares(ratio))
}
