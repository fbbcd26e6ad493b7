//! The picture put together from the record: against the heap's own snapshot and the stand-in's
//! books, and out of any tables at all.

mod common;

use common::{BACKINGS, DEFAULT, GIB, MIB, Random, Rig};
use gruyere::driver::StreamHandle;
use gruyere::heap::snapshot::{BlockState as HeapState, Segment, Snapshot};
use gruyere::record::picture::{MOST_PAGES, Misfits, PAGE, Picture, Piece, PieceKind, RangeKind};
use gruyere::record::{BlockEntry, BlockState, Reader, SegmentEntry, SegmentKind};
use gruyere_phantom::{Config as GpuConfig, as_program};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn picture(rig: &Rig) -> Picture {
    Picture::read(&Reader::own(rig.heap.record()).unwrap(), 0).unwrap()
}

/// What holds for every picture, whatever it was made of.
fn check_whole(picture: &Picture) {
    let mut end = 0;
    let (mut piece_at, mut page_at) = (0, 0);
    for range in &picture.ranges {
        assert!(range.address >= end && range.bytes > 0, "ranges lie apart, by address");
        end = range.address + range.bytes;
        assert_eq!(
            (range.pieces.start, range.pages.start),
            (piece_at, page_at),
            "nothing between two ranges"
        );
        (piece_at, page_at) = (range.pieces.end, range.pages.end);
        let mut at = range.address;
        for piece in picture.pieces_of(range) {
            assert_eq!(piece.address, at, "pieces tile their range");
            assert!(piece.bytes > 0);
            assert!(piece.kind.is_block() || piece.requested == 0);
            at += piece.bytes;
        }
        assert_eq!(at, end, "pieces tile their range to its end");
        let mut at = range.address;
        for page in picture.pages_of(range) {
            assert_eq!(page.address, Some(at));
            assert!(u64::from(page.bytes) <= PAGE && page.bytes > 0);
            assert_eq!(
                page.live + page.pending + page.free + page.slab_free,
                page.bytes,
                "all of a page is told"
            );
            at += u64::from(page.bytes);
        }
        assert_eq!(at, end, "pages lie behind all of their range");
    }
    assert_eq!(piece_at, picture.pieces.len());
    assert!(picture.pages[page_at..].iter().all(|page| page.is_spare()), "the others are spare");
    assert!(picture.pages.len() <= MOST_PAGES);
    let sums = picture.sums;
    let parts = sums.live + sums.pending + sums.free_whole + sums.free_partial + sums.spare;
    assert_eq!(parts, sums.held, "{sums:?}");
    assert!(sums.free_whole_bound <= sums.free_whole);
    assert_eq!(sums.live_by_lifetime.iter().sum::<u64>(), sums.live);
    let places: BTreeSet<_> =
        picture.pages.iter().filter_map(|page| Some((page.chunk?, page.number))).collect();
    assert_eq!(
        places.len(),
        picture.pages.iter().filter(|page| page.chunk.is_some()).count(),
        "a page is once"
    );
    for piece in picture.pieces.iter().step_by(1 + picture.pieces.len() / 100) {
        assert_eq!(picture.piece_at(piece.address), Some(piece));
        assert_eq!(picture.piece_at(piece.end() - 1), Some(piece));
    }
}

type Told = Vec<(u64, u64, u64, HeapState)>;

/// Pieces with free neighbours joined.
fn joined(pieces: impl Iterator<Item = (u64, u64, u64, HeapState)>) -> Told {
    let mut found: Told = Vec::new();
    for piece in pieces {
        match found.last_mut() {
            Some(last) if last.3 == HeapState::Inactive && piece.3 == HeapState::Inactive => {
                last.1 += piece.1
            }
            _ => found.push(piece),
        }
    }
    found
}

/// The heap tells a row of pages in parts, by the size of what lies in each; the record as a whole.
fn by_heap(snapshot: &Snapshot) -> Vec<Told> {
    let is_one_row = |before: &Segment, next: &Segment| {
        let touches = before.address + before.bytes == next.address;
        touches && next.stitched && (before.pool, &before.holder) == (next.pool, &next.holder)
    };
    let rows = snapshot.segments.chunk_by(is_one_row);
    rows.map(|row| {
        let blocks = row.iter().flat_map(|segment| &segment.blocks);
        joined(blocks.map(|block| (block.address, block.bytes, block.requested, block.state)))
    })
    .collect()
}

fn by_record(picture: &Picture) -> Vec<Told> {
    let told = |piece: &Piece| {
        let state = match piece.kind {
            PieceKind::Live => HeapState::Allocated,
            PieceKind::Pending => HeapState::PendingFree,
            _ => HeapState::Inactive,
        };
        (piece.address, piece.bytes, piece.requested, state)
    };
    picture.ranges.iter().map(|range| joined(picture.pieces_of(range).iter().map(told))).collect()
}

/// Blocks that lie next to each other without a segment are one range for the record, and a segment
/// each for the heap.
fn flat(told: Vec<Told>) -> Told {
    told.into_iter().flatten().collect()
}

/// The picture against the heap's own look and the driver's books. `conf` begins with the backing.
fn compare(rig: &Rig, conf: &str) -> Picture {
    rig.check();
    let backing = conf.split(',').next().unwrap();
    let picture = picture(rig);
    check_whole(&picture);
    assert_eq!(picture.misfits, Misfits::default());
    let snapshot = rig.heap.snapshot(0).unwrap();
    match backing {
        "backing:passthrough" => assert_eq!(flat(by_record(&picture)), flat(by_heap(&snapshot))),
        _ => assert_eq!(by_record(&picture), by_heap(&snapshot), "{backing}"),
    }
    assert_eq!(picture.sums.spare, snapshot.unmapped);
    let device = Reader::own(rig.heap.record()).unwrap().device(0).unwrap();
    assert_eq!(picture.sums.live, device.live);
    assert_eq!(picture.sums.live_requested, device.total().live_requested());
    assert_eq!(picture.sums.pending, device.total().pending_bytes());
    let stats = rig.heap.stats(0).unwrap();
    // The gauges are written with the statistics.
    let by_map = self::picture(rig).held();
    assert_eq!(by_map, stats.held(), "{backing}: what is lost, by the map");
    assert_eq!((stats.typical_request == 0), backing == "backing:stitch", "{backing}");
    let reserved = stats.reserved;
    match backing {
        "backing:stitch" => {
            assert_eq!(picture.sums.held, rig.gpu.books(0).in_handles);
            assert!(picture.ranges.iter().all(|range| range.kind == RangeKind::Stitched));
        }
        // The driver's pools take memory in steps of their own.
        "backing:pool" => assert!(picture.sums.held <= reserved),
        _ => assert_eq!(picture.sums.held, reserved),
    }
    picture
}

/// A random program: blocks of all sizes come and go on three streams, are used by others, pages
/// move.
struct Program {
    rig: Rig,
    streams: Vec<StreamHandle>,
    blocks: Vec<u64>,
    random: Random,
}

impl Program {
    fn new(conf: &str, seed: u64) -> Self {
        let rig = Rig::over(GpuConfig::new(GIB), conf);
        rig.heap.announce_hooks(3);
        let streams = vec![DEFAULT, rig.stream(), rig.stream()];
        Self { rig, streams, blocks: Vec::new(), random: Random(seed) }
    }

    fn stream(&mut self) -> StreamHandle {
        let at = self.random.below(self.streams.len() as u64) as usize;
        self.streams[at]
    }

    fn act(&mut self) {
        let stream = self.stream();
        match self.random.below(20) {
            0..=5 => {
                let size = 1 + self.random.below(200 << 10);
                self.blocks.extend(self.rig.heap.malloc(size, 0, stream));
            }
            6..=10 => {
                let most = [3 * MIB, 40 * MIB][self.random.below(2) as usize];
                let size = 1 + self.random.below(most);
                self.blocks.extend(self.rig.heap.malloc(size, 0, stream));
                as_program(|| self.rig.gpu.launch(0, stream.0, 2, 200_000)).unwrap();
            }
            11..=17 if !self.blocks.is_empty() => {
                let at = self.random.below(self.blocks.len() as u64) as usize;
                let block = self.blocks.swap_remove(at);
                if self.random.below(3) == 0 {
                    self.rig.heap.record_stream(block, stream);
                }
                assert!(self.rig.heap.free(block));
            }
            18 => self.rig.heap.mark_step(),
            19 if self.random.below(8) == 0 => {
                self.rig.heap.trim();
            }
            _ => {}
        }
    }
}

#[test]
fn for_every_backing_the_picture_is_what_the_heap_itself_tells_of_its_memory() {
    let (mut stale_aliases, mut pending, mut steps, mut kinds) =
        (0, 0, BTreeSet::new(), BTreeSet::new());
    for backing in BACKINGS {
        for seed in 0..4 {
            // A ceiling that makes pages move.
            let conf = format!("record:on,{backing},limit:300MiB,slack:0.5%,waits:oom");
            let mut program = Program::new(&conf, seed);
            for turn in 0..500 {
                program.act();
                if turn % 10 == 9 {
                    let picture = compare(&program.rig, backing);
                    stale_aliases += picture.stale_aliases.len();
                    pending += picture.sums.pending_blocks;
                    steps.extend(picture.pieces.iter().map(|piece| piece.step));
                    kinds.extend(picture.pieces.iter().map(|piece| piece.kind.name()));
                }
            }
            let blocks = std::mem::take(&mut program.blocks);
            blocks.into_iter().for_each(|block| assert!(program.rig.heap.free(block)));
            program.rig.heap.trim();
            let picture = compare(&program.rig, backing);
            assert_eq!(picture.sums.held, 0, "all is given back");
        }
    }
    assert!(
        stale_aliases > 0 && pending > 0 && steps.len() > 3,
        "{stale_aliases} {pending} {steps:?}"
    );
    assert_eq!(kinds.len(), PieceKind::ALL.len(), "every kind of piece was seen: {kinds:?}");
}

#[test]
fn while_the_heap_works_every_look_is_whole_and_what_does_not_fit_is_counted() {
    let conf = "record:on,backing:stitch,limit:400MiB,headroom:0,slack:0.5%";
    let program = Program::new(conf, 9);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (rig, done) = (&program.rig, &done);
        scope.spawn(move || {
            let mut looks = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) || looks == 0 {
                check_whole(&picture(rig));
                looks += 1;
            }
        });
        let streams = &program.streams;
        let workers: Vec<_> = (0..3u64)
            .map(|worker| {
                scope.spawn(move || {
                    let mut kept = Vec::new();
                    for n in 0..1500u64 {
                        let size =
                            if n % 5 == 0 { (1 + n % 23) * MIB } else { 512 * (1 + n * 7 % 300) };
                        kept.extend(rig.heap.malloc(size, 0, streams[worker as usize]));
                        if kept.len() > 40 {
                            assert!(rig.heap.free(kept.swap_remove((n * 31 % 40) as usize)));
                        }
                    }
                    kept.into_iter().for_each(|block| assert!(rig.heap.free(block)));
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    compare(&program.rig, "backing:stitch");
}

#[test]
fn an_arrangement_made_by_hand_is_told_piece_by_piece() {
    let page = |n: u64| (1 << 30) + n * PAGE;
    let segment = |kind, address, bytes, chunk, pages| SegmentEntry {
        kind,
        address,
        bytes,
        chunk,
        pages,
        lifetime: 2,
        ..SegmentEntry::default()
    };
    let slab = SegmentEntry {
        slot: 600 << 10,
        stream: 4,
        ..segment(SegmentKind::Slab, page(1), PAGE, 0, 0)
    };
    let segments = [
        segment(SegmentKind::Reservation, page(0), 64 * PAGE, 0, 0),
        segment(SegmentKind::Chunk, 0, 4 * PAGE, 7, 0),
        // Page 3 is spare, the others are here; the second mapping is retired.
        segment(SegmentKind::View, page(0), 4 * PAGE, 7, 0b0111),
        segment(SegmentKind::View, page(20), 4 * PAGE, 7, 0),
        slab,
    ];
    let block = |address, size, requested| BlockEntry {
        address,
        size,
        requested,
        stream: 4,
        step: 3,
        lifetime: 1,
        ..BlockEntry::default()
    };
    let blocks = [
        (block(page(0), 512, 100), BlockState::Live),
        (block(page(1) + (600 << 10), 590 << 10, 590 << 10), BlockState::Pending),
    ];
    let picture = Picture::of(0, &segments, &blocks);
    check_whole(&picture);
    assert_eq!(picture.misfits, Misfits::default());
    let told: Vec<_> =
        picture.pieces.iter().map(|piece| (piece.kind, piece.address, piece.bytes)).collect();
    let k = 1 << 10;
    let expected = [
        (PieceKind::Live, page(0), 512),
        (PieceKind::FreeRun, page(0) + 512, PAGE - 512),
        (PieceKind::FreeSlots, page(1), 600 * k),
        (PieceKind::Pending, page(1) + 600 * k, 590 * k),
        (PieceKind::SlotRest, page(1) + 1190 * k, 10 * k),
        (PieceKind::FreeSlots, page(1) + 1200 * k, 600 * k),
        (PieceKind::SlabTail, page(1) + 1800 * k, 248 * k),
        (PieceKind::FreeRun, page(2), PAGE),
    ];
    assert_eq!(told, expected);
    let sums = picture.sums;
    assert_eq!((sums.held, sums.live, sums.live_requested), (4 * PAGE, 512, 100));
    assert_eq!((sums.pending, sums.free_whole, sums.spare), (590 * k, PAGE, PAGE));
    assert_eq!(
        (sums.gaps, sums.free_slots, sums.slot_rests, sums.slab_tails),
        (PAGE - 512, 1200 * k, 10 * k, 248 * k)
    );
    assert_eq!((sums.retired, sums.stale_aliases, sums.movable()), (4 * PAGE, PAGE, 2 * PAGE));
    assert_eq!(
        (sums.full_pages, sums.partial_pages, sums.free_pages, sums.spare_pages),
        (0, 2, 1, 1)
    );
    assert_eq!((sums.largest_run, picture.largest_runs(9)[0].address), (PAGE, page(2)));
    assert_eq!(picture.largest_live(9).len(), 1);
    assert_eq!(picture.piece_at(page(3)), None, "nothing is mapped there");
    assert_eq!(picture.range_at(page(0) - 1), None);
    assert_eq!(Picture::of(1, &segments, &blocks), Picture { device: 1, ..Picture::default() });
}

#[test]
fn whole_pages_of_a_span_in_use_and_of_a_capture_count_as_bound() {
    let span = |address, capture| SegmentEntry {
        address,
        bytes: 8 * PAGE,
        capture,
        ..SegmentEntry::default()
    };
    let segments = [span(PAGE, 0), span(20 * PAGE, 0), span(40 * PAGE, 3)];
    let block = BlockEntry { address: PAGE, size: PAGE, requested: 1, ..BlockEntry::default() };
    let picture = Picture::of(0, &segments, &[(block, BlockState::Live)]);
    check_whole(&picture);
    assert_eq!((picture.sums.free_whole, picture.sums.free_whole_bound), (23 * PAGE, 15 * PAGE));
    assert_eq!(picture.sums.movable(), 8 * PAGE, "the empty ordinary span can go back");
}

/// Addresses near each other, so that things meet; now and then anything at all.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => (0u64..40).prop_map(|page| page * PAGE),
        6 => (0u64..40 * PAGE / 512).prop_map(|at| at * 512),
        1 => any::<u64>(),
        1 => Just(u64::MAX - PAGE),
    ]
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => (0u64..9).prop_map(|pages| pages * PAGE),
        6 => (0u64..9000).prop_map(|at| at * 512),
        1 => any::<u64>(),
        1 => Just(1u64 << 62),
        1 => Just(128 * PAGE),
    ]
}

fn segment() -> impl Strategy<Value = SegmentEntry> {
    let kind = prop_oneof![
        Just(SegmentKind::Span),
        Just(SegmentKind::Slab),
        Just(SegmentKind::Chunk),
        Just(SegmentKind::View),
        Just(SegmentKind::Reservation),
    ];
    let slot = prop_oneof![Just(0u64), (1u64..5000).prop_map(|units| units * 512), any::<u64>()];
    let pages = prop_oneof![Just(0u128), Just(u128::MAX), any::<u128>(), (0u128..256)];
    (
        kind,
        address(),
        length(),
        slot,
        0u32..5,
        pages,
        any::<(u8, u8)>(),
        prop_oneof![9 => Just(0u8), 1 => Just(1u8)],
    )
        .prop_map(|(kind, address, bytes, slot, chunk, pages, (lifetime, capture), device)| {
            SegmentEntry {
                kind,
                address,
                bytes,
                slot,
                stream: chunk,
                device,
                lifetime,
                capture,
                chunk,
                pages,
                ..SegmentEntry::default()
            }
        })
}

fn block() -> impl Strategy<Value = (BlockEntry, BlockState)> {
    let state = prop_oneof![Just(BlockState::Live), Just(BlockState::Pending)];
    (address(), length(), any::<(u64, u8, u8, u32)>(), state).prop_map(
        |(address, size, (requested, lifetime, capture, step), state)| {
            let entry = BlockEntry {
                address,
                size,
                requested,
                stream: step % 7,
                step,
                device: 0,
                lifetime,
                capture,
                ..BlockEntry::default()
            };
            (entry, state)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn out_of_any_tables_at_all_comes_a_whole_picture(
        segments in proptest::collection::vec(segment(), 0..40),
        blocks in proptest::collection::vec(block(), 0..60),
    ) {
        check_whole(&Picture::of(0, &segments, &blocks));
    }

    #[test]
    fn the_largest_are_the_largest(
        sizes in proptest::collection::vec(1u64..40, 0..300), most in 0usize..80
    ) {
        let mut at = PAGE;
        let mut blocks = Vec::new();
        for size in &sizes {
            let entry = BlockEntry { address: at, size: size * 512, ..BlockEntry::default() };
            blocks.push((entry, BlockState::Live));
            at += size * 512;
        }
        let told: Vec<_> = Picture::of(0, &[], &blocks).largest_live(most).iter().map(
            |piece| piece.bytes
        ).collect();
        let mut expected: Vec<u64> = sizes.iter().map(|size| size * 512).collect();
        expected.sort_unstable_by(|one, other| other.cmp(one));
        expected.truncate(most);
        prop_assert_eq!(told, expected);
    }
}

/// Entries of a table whose lengths and numbers are hostile cost no more than they are many.
#[test]
fn hostile_lengths_cost_no_memory() {
    let mut segments = Vec::new();
    for n in 0..2000u64 {
        for kind in
            [SegmentKind::Span, SegmentKind::View, SegmentKind::Chunk, SegmentKind::Reservation]
        {
            let (address, bytes) = (n << 44, [1 << 43, 128 * PAGE][(n % 2) as usize]);
            let pages = 0x5555_5555_5555_5555_5555_5555_5555_5555;
            let chunk = n as u32;
            segments.push(SegmentEntry {
                kind,
                address,
                bytes,
                chunk,
                pages,
                ..SegmentEntry::default()
            });
        }
    }
    let picture = Picture::of(0, &segments, &[]);
    check_whole(&picture);
    assert!(picture.misfits.segments > 0);
    let by_chunk: BTreeMap<u32, usize> =
        picture.pages.iter().fold(BTreeMap::new(), |mut sums, page| {
            *sums.entry(page.chunk.unwrap_or(u32::MAX)).or_default() += 1;
            sums
        });
    assert!(by_chunk.iter().all(|(&chunk, &pages)| chunk == u32::MAX || pages <= 128));
}
