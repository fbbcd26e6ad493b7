//! Free memory as rows of neighbouring pieces, and how much of it can move.

use crate::runs::arena::{Arenas, RegionId};
use crate::small::size_class::PAGE;
use std::collections::BTreeMap;

/// Bytes of a free row on partly used pages: they can neither move nor go back.
pub(crate) fn partial_page_bytes(address: u64, bytes: u64) -> u64 {
    let end = (address + bytes) / PAGE * PAGE;
    bytes - end.saturating_sub(address.next_multiple_of(PAGE))
}

/// Joins neighbouring `pieces` (address and bytes, by address) to rows; a new row begins at an
/// address of which `begins` holds.
pub(crate) fn joined(
    pieces: impl IntoIterator<Item = (u64, u64)>,
    begins: impl Fn(u64) -> bool,
) -> Vec<(u64, u64)> {
    let mut rows: Vec<(u64, u64)> = Vec::new();
    for piece in pieces {
        match rows.last_mut() {
            Some((address, bytes)) if *address + *bytes == piece.0 && !begins(piece.0) => {
                *bytes += piece.1;
            }
            _ => rows.push(piece),
        }
    }
    rows
}

/// Free runs that cannot go back to the driver, and their bytes: all in a span that has a block;
/// what is not whole pages in a region whose pages come and go one by one.
pub(crate) fn bound(arenas: &Arenas) -> (u64, u64) {
    let (mut count, mut bytes) = (0, 0);
    let mut spans: BTreeMap<RegionId, (u64, u64)> = BTreeMap::new();
    for run in arenas.free_runs() {
        if arenas.is_stitched(run.region) {
            let partial = partial_page_bytes(run.address, run.bytes);
            count += u64::from(partial > 0);
            bytes += partial;
        } else {
            let span = spans.entry(run.region).or_default();
            *span = (span.0 + 1, span.1 + run.bytes);
        }
    }
    for (id, span) in spans {
        // A wholly free span can go.
        if span.1 < arenas.region(id).bytes {
            (count, bytes) = (count + span.0, bytes + span.1);
        }
    }
    (count, bytes)
}
