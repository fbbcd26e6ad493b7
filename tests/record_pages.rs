//! With `backing:stitch`, the record tells where every page is: what a reader finds there is what
//! the driver has mapped and holds.

mod common;

use common::{MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::heap::Heap;
use gruyere::record::{DeviceGauge, Reader, SegmentEntry, SegmentKind};
use gruyere_phantom::{CallKind, Config as GpuConfig, Injection, Source, as_program};
use std::collections::{BTreeMap, BTreeSet};

const PAGE: u64 = 2 * MIB;

fn rig(memory: u64) -> Rig {
    let rig = Rig::over(GpuConfig::new(memory), "record:on,backing:stitch,headroom:0,slack:0.5%");
    rig.heap.announce_hooks(3);
    rig
}

fn segments(heap: &Heap) -> Vec<SegmentEntry> {
    let table = Reader::own(heap.record()).unwrap().segments();
    assert_eq!(table.torn, 0);
    table.entries
}

fn of(entries: &[SegmentEntry], kind: SegmentKind) -> impl Iterator<Item = &SegmentEntry> {
    entries.iter().filter(move |entry| entry.kind == kind)
}

/// The record against the driver's books, and against itself. How many views are retired.
fn compare(rig: &Rig) -> usize {
    rig.check();
    let entries = segments(&rig.heap);
    let chunks: BTreeMap<u32, u64> =
        of(&entries, SegmentKind::Chunk).map(|chunk| (chunk.chunk, chunk.bytes)).collect();
    assert_eq!(
        chunks.len(),
        of(&entries, SegmentKind::Chunk).count(),
        "a number of a chunk is one chunk's"
    );
    assert_eq!(chunks.values().sum::<u64>(), rig.gpu.books(0).in_handles, "physical bytes");
    let mut told: Vec<(u64, u64, u32)> = of(&entries, SegmentKind::View)
        .map(|view| (view.address, view.bytes, view.chunk))
        .collect();
    told.sort_unstable();
    let mappings = rig.gpu.all_backings().into_iter();
    // Chunks have numbers of ours and handles of the driver's, one for one.
    let mut handles: BTreeMap<u64, u32> = BTreeMap::new();
    let mut there = Vec::new();
    for (at, mapping) in mappings.enumerate() {
        let Source::Mapping(handle) = mapping.source else { panic!("{mapping:?}") };
        let chunk = *handles.entry(handle).or_insert_with(|| told[at].2);
        there.push((mapping.address, mapping.bytes, chunk));
    }
    assert_eq!(told, there, "mappings: address, bytes, chunk");
    let numbers: BTreeSet<u32> = handles.values().copied().collect();
    assert_eq!(numbers.len(), handles.len(), "a chunk is one handle");
    let mut owned: BTreeMap<u32, u128> = BTreeMap::new();
    for view in of(&entries, SegmentKind::View) {
        assert_eq!(view.bytes, chunks[&view.chunk], "a view is of a whole chunk that there is");
        let pages = u64::from(128 - view.pages.leading_zeros());
        assert!(pages * PAGE <= view.bytes, "no page is beyond the chunk");
        let known = owned.entry(view.chunk).or_default();
        assert_eq!(*known & view.pages, 0, "a page belongs in one view");
        *known |= view.pages;
        let reserved = |range: &&SegmentEntry| {
            range.address <= view.address
                && view.address + view.bytes <= range.address + range.bytes
        };
        assert_eq!(of(&entries, SegmentKind::Reservation).filter(reserved).count(), 1);
    }
    let reserved: u64 = of(&entries, SegmentKind::Reservation).map(|range| range.bytes).sum();
    assert_eq!(reserved, rig.gpu.address_books().reserved, "address space");
    let blocks = Reader::own(rig.heap.record()).unwrap().blocks();
    for (block, _) in &blocks.entries {
        for page in block.address / PAGE..(block.address + block.size).div_ceil(PAGE) {
            let has_it = |view: &&SegmentEntry| {
                let offset =
                    (page * PAGE).checked_sub(view.address).filter(|offset| *offset < view.bytes);
                offset.is_some_and(|offset| view.pages >> (offset / PAGE) & 1 == 1)
            };
            assert_eq!(of(&entries, SegmentKind::View).filter(has_it).count(), 1, "{block:?}");
        }
    }
    of(&entries, SegmentKind::View).filter(|view| view.is_retired()).count()
}

/// Blocks come and go in sizes that grow from round to round, so that free pages must move to where
/// a longer run is needed.
fn churn(rig: &Rig, streams: &[StreamHandle], mut look: impl FnMut(usize)) {
    let mut blocks: Vec<u64> = Vec::new();
    for round in 0..12u64 {
        for n in 0..24u64 {
            let stream = streams[(n % streams.len() as u64) as usize];
            let bytes = (2 + 3 * round + n % 5) * MIB + 512 * n;
            if let Ok(address) = rig.heap.malloc(bytes, 0, stream) {
                blocks.push(address);
                as_program(|| rig.gpu.launch(0, stream.0, 3, 20_000)).unwrap();
            }
            if n % 3 == 0 {
                blocks.extend(rig.heap.malloc(700 << 10, 0, stream));
            }
        }
        let mut number = 0;
        blocks.retain(|&address| {
            number += 1;
            number % 4 == 0 || !rig.heap.free(address)
        });
        as_program(|| rig.gpu.host_spend(3_000_000));
        rig.heap.mark_step();
        look(compare(rig));
    }
    blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
}

/// The retired views, by address.
fn retired(rig: &Rig) -> BTreeSet<u64> {
    let entries = segments(&rig.heap);
    of(&entries, SegmentKind::View).filter(|view| view.is_retired()).map(|v| v.address).collect()
}

#[test]
fn old_mappings_stay_up_to_a_bound_and_the_oldest_go_first() {
    // As in supply/pages/remapped.rs.
    const KEPT: usize = 1024;
    const BATCH: usize = 256;
    let rig = rig(16 << 30);
    let stream = rig.stream();
    // In a program that marks steps no look compacts: views of memory that a stream still owns
    // would wait for an event behind younger ones that wait for none.
    rig.heap.mark_step();
    let (mut kept, mut batches) = (Vec::new(), 0);
    // Of each retired view: the round in which it was first seen.
    let mut since: BTreeMap<u64, u64> = BTreeMap::new();
    for round in 0..400u64 {
        // Whole pages, so that moves strand nothing.
        let bytes = [8 * MIB, 12 * MIB, 18 * MIB][(round % 3) as usize];
        let blocks = (0..24).map(|_| rig.heap.malloc(bytes, 0, stream).unwrap());
        let blocks: Vec<u64> = blocks.collect();
        as_program(|| rig.gpu.launch(0, stream.0, 3, 20_000)).unwrap();
        kept.drain(..).for_each(|address| assert!(rig.heap.free(address)));
        for (n, address) in blocks.into_iter().enumerate() {
            match n % 4 {
                0 => kept.push(address),
                _ => assert!(rig.heap.free(address)),
            }
        }
        as_program(|| rig.gpu.host_spend(3_000_000));
        let now = retired(&rig);
        // A batch goes before a growth, which retires some more.
        assert!(now.len() <= KEPT + 2 * BATCH, "{} in round {round}", now.len());
        let mut youngest_gone = None;
        since.retain(|address, &mut since| {
            let stays = now.contains(address);
            youngest_gone = youngest_gone.max((!stays).then_some(since));
            stays
        });
        if let Some(youngest) = youngest_gone {
            batches += 1;
            assert!(now.len() >= KEPT && since.values().all(|&since| since >= youngest));
        }
        now.into_iter().for_each(|address| {
            since.entry(address).or_insert(round);
        });
    }
    assert!(batches > 2, "{batches} batches");
    compare(&rig);
}

#[test]
fn after_every_run_of_moves_the_segments_are_the_drivers_mappings_and_its_physical_memory() {
    let rig = rig(16 << 30);
    let streams = [rig.stream(), rig.stream()];
    let mut retired = 0;
    churn(&rig, &streams, |views| retired += views);
    assert!(retired > 0, "pages moved, and their old views were told of as retired");
    rig.heap.trim();
    assert_eq!(compare(&rig), 0);
    let entries = segments(&rig.heap);
    assert_eq!(of(&entries, SegmentKind::View).count(), 0, "all is unmapped");
    assert_eq!(of(&entries, SegmentKind::Chunk).count(), 0, "all is given back");
}

#[test]
fn a_move_that_fails_half_way_leaves_the_segments_as_the_driver_has_it() {
    let errors = |rig: &Rig| {
        let snapshot = &Reader::own(rig.heap.record()).unwrap().device_snapshots()[0];
        snapshot.gauge(DeviceGauge::DriverErrors)
    };
    for kind in [CallKind::Map, CallKind::SetAccess, CallKind::Unmap, CallKind::Create] {
        let mut struck = 0;
        for after in [1, 3, 10, 40] {
            let rig = rig(2 << 30);
            let streams = [rig.stream(), rig.stream()];
            rig.gpu.inject(Injection {
                kind: Some(kind),
                nth: after,
                code: 2,
                from_then_on: false,
            });
            churn(&rig, &streams, |_| {});
            compare(&rig);
            // What has moved is unmapped now, or refused to be.
            rig.heap.trim();
            compare(&rig);
            churn(&rig, &streams, |_| {});
            compare(&rig);
            struck += errors(&rig);
        }
        assert!(struck > 0, "{kind:?}");
    }
}

#[test]
fn a_table_without_room_is_counted_and_costs_nothing_else() {
    // The table has as many slots as the block map: 1,024.
    let conf = "record:on,record_blocks:1024,backing:stitch,headroom:0,slack:0.5%";
    let rig = Rig::over(GpuConfig::new(16 << 30), conf);
    rig.heap.announce_hooks(3);
    let stream = rig.stream();
    // Chunks of single pages in the end, and a view of each.
    let mut blocks: Vec<u64> = Vec::new();
    for n in 0..900u64 {
        blocks.push(rig.heap.malloc(3 * MIB + 512, 0, stream).unwrap());
        if n % 3 == 1 {
            assert!(rig.heap.free(blocks.swap_remove((n / 2) as usize % blocks.len())));
        }
    }
    rig.check();
    let health = Reader::own(rig.heap.record()).unwrap().health();
    let held: u64 = of(&segments(&rig.heap), SegmentKind::Chunk).map(|chunk| chunk.bytes).sum();
    assert!(health.segments_unrecorded > 0 && held < rig.gpu.books(0).in_handles);
    blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
    rig.heap.trim();
    assert_eq!(rig.gpu.books(0).in_handles, 0);
    rig.check();
}
