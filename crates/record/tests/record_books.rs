//! What a reader says is what the writer was told.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

use gruyere_record::reader::Cursor;
use gruyere_record::{
    BlockEntry, BlockSlot, BlockState, DeviceFacts, DeviceGauge, EventKind, Reader, Record,
    RecordOptions, SHARDS, SegmentEntry, SegmentKind, SegmentSlot, SiteId, clock,
};
use proptest::prelude::*;

fn devices(count: usize) -> Vec<DeviceFacts> {
    (0..count)
        .map(|n| DeviceFacts {
            name: format!("Phantom {n}"),
            uuid: [n as u8 + 1; 16],
            total_memory: 80 << 30,
        })
        .collect()
}

fn record(options: &RecordOptions, count: usize) -> &'static Record {
    Box::leak(Box::new(Record::create(options, &devices(count))))
}

fn options(directory: &std::path::Path) -> RecordOptions {
    RecordOptions {
        directory: directory.to_owned(),
        ring_events: 256,
        max_blocks: 1 << 16,
        ..RecordOptions::default()
    }
}

fn block(address: u64, size: u64, lifetime: u8) -> BlockEntry {
    let requested = size - size / 3;
    let site = SiteId::NONE;
    BlockEntry {
        address,
        size,
        requested,
        stream: 7,
        step: 11,
        device: 0,
        lifetime,
        capture: 2,
        is_sent: false,
        site,
    }
}

#[test]
fn facts_gauges_blocks_segments_events_and_histograms_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&options(folder.path()), 2);
    let path = record.path().expect("a file").to_owned();
    let (mut shard, mut other) = (record.shard(1, 3), record.shard(1, 4));
    let mut large = record.shard(1, SHARDS as u32 - 1);
    let kept = block(0x7f00_0000_0000, 4 << 20, 3);
    let kept = BlockEntry { device: 1, ..kept };
    let waiting = BlockEntry { device: 1, ..block(0x7f00_4000_0000, 512, 1) };
    let gone = BlockEntry { device: 1, ..block(0x7f00_5000_0000, 1 << 20, 2) };
    large.block_insert(&kept);
    let waits = shard.block_insert(&waiting);
    let goes = other.block_insert(&gone);
    shard.block_pending(waits, waiting.size, waiting.requested, waiting.lifetime);
    other.block_remove(goes, gone.size, gone.requested, gone.lifetime, false);
    shard.event(EventKind::Malloc, 3, 7, kept.address, kept.size, clock::now());
    other.event(EventKind::Free, 2, 7, gone.address, gone.size, clock::now());
    record.event(EventKind::Grow, 1, 0, 9, 0x7f00_0000_0000, 32 << 20, clock::now());
    let mut device = record.device(1);
    device.set(&[(DeviceGauge::Reserved, 64 << 20), (DeviceGauge::Limit, 79 << 30)]);
    device.add(DeviceGauge::DriverCalls, 5);
    device.add(DeviceGauge::DriverCalls, 2);
    record.latency(true, 1000);
    record.latency(false, 100);
    let slab = SegmentEntry {
        kind: SegmentKind::Slab,
        address: 0x7f00_0000_0000,
        bytes: 2 << 20,
        slot: 4096,
        stream: 7,
        device: 1,
        lifetime: 3,
        capture: 0,
        ..SegmentEntry::default()
    };
    let first = record.segment_insert(&slab);
    let second = record.segment_insert(&SegmentEntry { kind: SegmentKind::Span, slot: 0, ..slab });
    record.segment_remove(second);
    assert_ne!(first, SegmentSlot::NONE);
    let chunk = SegmentEntry {
        kind: SegmentKind::Chunk,
        bytes: 256 << 20,
        chunk: 5,
        device: 1,
        ..SegmentEntry::default()
    };
    record.segment_insert(&chunk);
    let view = SegmentEntry {
        kind: SegmentKind::View,
        address: 0x7f10_0000_0000,
        pages: 1 << 127 | 6,
        ..chunk
    };
    let moved = SegmentEntry { address: 0x7f20_0000_0000, pages: 0, ..view };
    record.segment_insert(&view);
    let slot = record.segment_insert(&moved);
    record.segment_pages(slot, 1 << 64 | 1);
    let moved = SegmentEntry { pages: 1 << 64 | 1, ..moved };
    assert!(!moved.is_retired() && SegmentEntry { pages: 0, ..moved }.is_retired());
    let space = SegmentEntry {
        kind: SegmentKind::Reservation,
        address: 0x7f00_0000_0000,
        bytes: 1 << 40,
        ..slab
    };
    record.segment_insert(&space);

    for reader in [Reader::open(&path).unwrap(), Reader::own(record).unwrap()] {
        assert_eq!(reader.is_live(), Some(true));
        let process = reader.process();
        assert_eq!(process.pid, u64::from(std::process::id()));
        assert!(process.command.contains("record_books"), "{}", process.command);
        assert_eq!(process.version, env!("CARGO_PKG_VERSION"));
        assert_eq!(reader.devices(), 2);
        let snapshot = reader.device(1).unwrap();
        assert_eq!((snapshot.facts.name.as_str(), snapshot.facts.uuid), ("Phantom 1", [2; 16]));
        assert_eq!(snapshot.facts.total_memory, 80 << 30);
        assert_eq!(snapshot.live, kept.size);
        assert_eq!(snapshot.live_peak, kept.size + waiting.size + gone.size);
        assert_eq!((snapshot.torn_shards, snapshot.torn_gauges), (0, false));
        assert_eq!(snapshot.gauge(DeviceGauge::Reserved), 64 << 20);
        assert_eq!(snapshot.gauge(DeviceGauge::DriverCalls), 7);
        assert_eq!(snapshot.gauge(DeviceGauge::TotalMemory), 80 << 30);
        let total = snapshot.total();
        assert_eq!((total.mallocs, total.frees, total.live_blocks()), (3, 2, 1));
        assert_eq!((total.live_bytes(), total.live_requested()), (kept.size, kept.requested));
        assert_eq!((total.pending_blocks(), total.pending_bytes()), (1, waiting.size));
        assert_eq!(snapshot.blocks[1][3].mallocs, 1, "over a MiB is large");
        assert_eq!(snapshot.blocks[0][2].mallocs, 1, "a MiB is small");
        assert_eq!(reader.device(0).unwrap().total().mallocs, 0);
        let mut blocks = reader.blocks();
        blocks.entries.sort_by_key(|(entry, _)| entry.address);
        assert_eq!(blocks.entries, [(kept, BlockState::Live), (waiting, BlockState::Pending)]);
        assert_eq!(blocks.torn, 0);
        let segments = reader.segments().entries;
        assert_eq!(segments.len(), 5);
        for told in [slab, chunk, view, moved, space] {
            assert!(segments.contains(&told), "{told:?}");
        }
        let mut cursor = Cursor::default();
        let events = reader.events(&mut cursor);
        let kinds: Vec<EventKind> = events.entries.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [EventKind::Malloc, EventKind::Free, EventKind::Grow]);
        assert_eq!(
            (events.entries[2].size, events.entries[2].stream, events.lost),
            (32 << 20, 9, 0)
        );
        assert_eq!((events.entries[0].address, events.entries[0].device), (kept.address, 1));
        assert_eq!(reader.events(&mut cursor).entries, []);
        let histograms = reader.histograms();
        assert_eq!((histograms.malloc_sizes.total(), histograms.free_sizes.total()), (3, 2));
        assert_eq!((histograms.malloc_latency.total(), histograms.free_latency.total()), (1, 1));
    }
    assert_eq!(record.live(1), (kept.size, kept.size + waiting.size + gone.size));
    record.reset_peaks(1);
    assert_eq!(
        record.live(1).1,
        kept.size + waiting.size + gone.size,
        "that of the process's life stays"
    );
    assert_eq!(record.block_stats(1).allocated_bytes[0].peak, kept.size);
    assert_eq!(record.block_stats(1).active_bytes[0].peak, kept.size + waiting.size);
    shard.block_remove(waits, waiting.size, waiting.requested, waiting.lifetime, true);
    let snapshot = Reader::own(record).unwrap().device(1).unwrap();
    assert_eq!((snapshot.total().pending_blocks(), snapshot.live), (0, kept.size));
    record.close();
    assert!(!path.exists(), "a clean exit leaves no file");
}

#[test]
fn events_that_the_rings_could_not_keep_are_counted_as_lost() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&options(folder.path()), 1);
    let mut shard = record.shard(0, 0);
    for n in 0..1000u64 {
        shard.event(EventKind::Malloc, 0, 0, n, 512, clock::now());
        record.event(EventKind::Trim, 0, 0, 0, n, 512, clock::now());
    }
    let reader = Reader::own(record).unwrap();
    let mut cursor = Cursor::default();
    let events = reader.events(&mut cursor);
    assert_eq!(events.entries.len() as u64 + events.lost, 2000);
    let latest = |kind| {
        events.entries.iter().filter(move |event| event.kind == kind).map(|event| event.address)
    };
    assert!(latest(EventKind::Trim).eq(1000 - 256..1000), "the shared ring keeps its 256 latest");
    assert!(
        latest(EventKind::Malloc).eq(1000 - 63..1000),
        "an event ring of 64 cells keeps its 63 latest"
    );
    let facts = reader.event_facts();
    assert_eq!((facts.written, facts.dropped, facts.capacity), (2000, 0, 256 + 63));
    shard.event(EventKind::Free, 0, 0, 5, 512, clock::now());
    let events = reader.events(&mut cursor);
    assert_eq!((events.entries.len(), events.lost), (1, 0), "a follower gets what came after");
    record.close();
}

#[test]
fn a_refused_request_of_any_size_is_told_as_a_large_one() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&options(folder.path()), 1);
    for asked in [1 << 30, 1 << 48, 1 << 50, 1 << 62, u64::MAX] {
        record.event(EventKind::OutOfMemory, 0, 0, 0, 0, asked, clock::now());
    }
    let reader = Reader::own(record).unwrap();
    let events = reader.events(&mut Cursor::default()).entries;
    let sizes: Vec<u64> = events.iter().map(|event| event.size).collect();
    let most = gruyere_record::ring::MAX_EVENT_SIZE;
    assert_eq!(sizes, [1 << 30, most, most, most, most]);
    record.close();
}

#[test]
fn a_record_that_is_off_keeps_exact_totals_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&RecordOptions { enabled: false, ..options(folder.path()) }, 1);
    let (mut one, mut two) = (record.shard(0, 0), record.shard(0, 1));
    let slot = one.block_insert(&block(0x1000, 1024, 0));
    assert_eq!(slot, BlockSlot::NONE);
    let later = two.block_insert(&block(0x2000, 2048, 0));
    one.block_remove(slot, 1024, 1000, 0, false);
    two.block_pending(later, 2048, 2000, 0);
    two.block_remove(later, 2048, 2000, 0, true);
    one.event(EventKind::Malloc, 0, 0, 0, 0, 0);
    record.event(EventKind::Grow, 0, 0, 0, 0, 0, 0);
    record.latency(true, 5);
    record.device(0).set(&[(DeviceGauge::Reserved, 1)]);
    let segment = SegmentEntry {
        kind: SegmentKind::Span,
        address: 0,
        bytes: 1,
        slot: 0,
        stream: 0,
        device: 0,
        lifetime: 0,
        capture: 0,
        ..SegmentEntry::default()
    };
    record.segment_remove(record.segment_insert(&segment));
    assert_eq!(record.live(0), (0, 3072));
    assert!(record.path().is_none() && Reader::own(record).is_none());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    record.close();
}

/// Counts the warnings of a full map.
struct Warnings(AtomicU64);

impl log::Log for Warnings {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().contains("no room for further blocks") {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

static WARNINGS: Warnings = Warnings(AtomicU64::new(0));

#[test]
fn a_full_map_costs_entries_and_a_line_of_the_log_and_nothing_else() {
    log::set_logger(&WARNINGS).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let folder = tempfile::tempdir().unwrap();
    let record = record(&RecordOptions { max_blocks: 512, ..options(folder.path()) }, 1);
    let mut shard = record.shard(0, 0);
    let slots: Vec<BlockSlot> =
        (0..600).map(|n| shard.block_insert(&block(n * 512, 512, 0))).collect();
    assert_eq!(slots.iter().filter(|&&slot| slot == BlockSlot::NONE).count(), 88);
    let reader = Reader::own(record).unwrap();
    assert_eq!((reader.blocks().entries.len(), reader.health().blocks_unrecorded), (512, 88));
    assert_eq!(WARNINGS.0.load(Ordering::Relaxed), 1, "once for all of them");
    assert_eq!(
        reader.device(0).unwrap().total().live_blocks(),
        600,
        "gauges count them all the same"
    );
    for slot in slots {
        shard.block_remove(slot, 512, 342, 0, false);
    }
    assert_eq!(record.live(0), (0, 600 * 512));
    assert_eq!(reader.blocks().entries.len(), 0);
    assert_ne!(shard.block_insert(&block(0, 512, 0)), BlockSlot::NONE, "freed slots serve again");
    record.close();
}

#[test]
fn slots_do_not_leak_from_shard_to_shard() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&RecordOptions { max_blocks: 8192, ..options(folder.path()) }, 1);
    let (mut producer, mut consumer) = (record.shard(0, 0), record.shard(0, 1));
    // Each block comes through one shard and goes through another: 200,000 of them through a map of
    // 8,192.
    for round in 0..200u64 {
        let slots: Vec<BlockSlot> = (0..1000)
            .map(|n| producer.block_insert(&block((round * 1000 + n) * 512, 512, 0)))
            .collect();
        assert!(slots.iter().all(|&slot| slot != BlockSlot::NONE), "round {round}");
        slots.into_iter().for_each(|slot| consumer.block_remove(slot, 512, 342, 0, false));
    }
    assert_eq!(record.live(0), (0, 1000 * 512));
    assert_eq!(Reader::own(record).unwrap().health().blocks_unrecorded, 0);
    record.close();
}

#[test]
fn shards_on_threads_add_up() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&options(folder.path()), 1);
    std::thread::scope(|scope| {
        for number in 0..4 {
            scope.spawn(move || {
                let mut shard = record.shard(0, number);
                let keep: Vec<BlockSlot> = (0..20_000u64)
                    .filter_map(|n| {
                        let size = 512 * (1 + n % 9);
                        let slot = shard.block_insert(&block(n * 4096, size, number as u8));
                        if n % 20 == 0 {
                            return Some(slot);
                        }
                        shard.block_remove(slot, size, size - size / 3, number as u8, false);
                        None
                    })
                    .collect();
                assert_eq!(keep.len(), 1000);
            });
        }
    });
    let kept: u64 = (0..20_000).filter(|n| n % 20 == 0).map(|n| 512 * (1 + n % 9)).sum();
    let (live, peak) = record.live(0);
    assert_eq!(live, 4 * kept);
    assert!(peak >= live && peak <= live + 4 * 512 * 9, "{peak}");
    let reader = Reader::own(record).unwrap();
    let snapshot = reader.device(0).unwrap();
    assert_eq!((snapshot.total().mallocs, snapshot.total().live_blocks()), (80_000, 4000));
    assert_eq!(
        (0..4).map(|n| snapshot.sum(|_, lifetime| lifetime == n).live_blocks()).collect::<Vec<_>>(),
        [1000; 4]
    );
    assert_eq!(reader.blocks().entries.len(), 4000);
    record.close();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn the_map_and_the_gauges_follow_any_sequence_of_calls(
        calls in proptest::collection::vec(
            (0u32..SHARDS as u32, 1u64..4096, 0u8..4, 0u8..6), 1..600
        ),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let record = record(&options(folder.path()), 1);
        let mut shards: Vec<_> = (0..SHARDS as u32).map(|shard| record.shard(0, shard)).collect();
        let mut books: HashMap<u64, (BlockSlot, BlockEntry, BlockState)> = HashMap::new();
        let (mut live, mut peak) = (0, 0);
        for (number, (shard, size, lifetime, what)) in calls.into_iter().enumerate() {
            let shard = &mut shards[shard as usize];
            let chosen =
                books.keys().copied().min_by_key(|address| address.wrapping_mul(size) % 1009);
            match (what, chosen) {
                (3, Some(address)) if books[&address].2 == BlockState::Live => {
                    let (slot, entry, state) = books.get_mut(&address).unwrap();
                    shard.block_pending(*slot, entry.size, entry.requested, entry.lifetime);
                    *state = BlockState::Pending;
                    live -= entry.size;
                }
                (4..=5, Some(address)) => {
                    let (slot, entry, state) = books.remove(&address).unwrap();
                    let pending = state == BlockState::Pending;
                    shard.block_remove(slot, entry.size, entry.requested, entry.lifetime, pending);
                    live -= if pending { 0 } else { entry.size };
                }
                _ => {
                    let entry = block(number as u64 * (1 << 22), size * 512, lifetime);
                    live += entry.size;
                    books
                        .insert(
                            entry.address, (shard.block_insert(&entry), entry, BlockState::Live)
                        );
                }
            }
            peak = peak.max(live);
            prop_assert_eq!(record.live(0), (live, peak));
        }
        let reader = Reader::own(record).unwrap();
        let mut blocks = reader.blocks().entries;
        blocks.sort_by_key(|(entry, _)| entry.address);
        let mut expected: Vec<_> =
            books.values().map(|&(_, entry, state)| (entry, state)).collect();
        expected.sort_by_key(|(entry, _)| entry.address);
        prop_assert_eq!(blocks, expected);
        let total = reader.device(0).unwrap().total();
        let pending = books.values().filter(|book| book.2 == BlockState::Pending);
        prop_assert_eq!(total.live_bytes(), live);
        prop_assert_eq!(total.pending_bytes(), pending.map(|book| book.1.size).sum::<u64>());
        record.close();
    }
}

/// Bytes that the file system holds for a record, and what a second reading through a mapping adds
/// to them.
fn held(record: &Record) -> u64 {
    let path = record.path().unwrap();
    let bytes = || std::fs::metadata(path).unwrap().blocks() * 512;
    let before = bytes();
    // All that can be read, through a mapping of our own: a load from a page that nobody has
    // allocated would allocate it.
    let reader = Reader::open(path).unwrap();
    let mut cursor = Cursor::default();
    reader.device_snapshots();
    reader.histograms();
    reader.events(&mut cursor);
    reader.rare_events(&mut Cursor::default());
    reader.blocks();
    reader.segments();
    (0..reader.devices()).for_each(|device| drop(reader.timeline(device)));
    assert_eq!(bytes(), before, "a reader makes no record larger");
    before
}

#[test]
fn a_record_takes_what_it_uses_and_no_more() {
    // Where records lie: a file system that allocates by the page.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = RecordOptions { directory: folder.path().to_owned(), ..RecordOptions::default() };
    let record = record(&options, 8);
    let fresh = held(record);
    assert!(fresh < 400 << 10, "{fresh} bytes for eight devices that nobody has used");
    let (mut small, mut large) = (record.shard(0, 0), record.shard(0, SHARDS as u32 - 1));
    let mut device = record.device(0);
    let mut work = |count: u64| {
        for n in 0..count {
            let entry = BlockEntry { device: 0, ..block(n << 21, 512, 0) };
            let slot = small.block_insert(&entry);
            small.event(EventKind::Malloc, 0, 7, entry.address, entry.size, n);
            small.block_remove(slot, entry.size, entry.requested, 0, false);
            large.event(EventKind::Free, 0, 7, entry.address, entry.size, n);
            record.event(EventKind::Grow, 0, 0, 7, entry.address, entry.size, n);
            if n % 8 == 0 {
                device.sample(n);
            }
        }
    };
    work(100);
    let young = held(record) - fresh;
    assert!(young < 100 << 10, "{young} bytes more for a hundred blocks");
    work(100_000);
    let old = held(record) - fresh;
    // The ring, two event rings of 16,384 events, histograms, and some of the map.
    assert!((3 << 20..4 << 20).contains(&old), "{old} bytes more once all rings have gone round");
    record.close();
}

#[test]
fn calls_that_waited_for_their_lock_come_in_the_order_in_which_they_happened() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&options(folder.path()), 1);
    let (mut shard, mut other) = (record.shard(0, 0), record.shard(0, 1));
    shard.event(EventKind::Malloc, 0, 0, 512, 512, 10);
    shard.event(EventKind::Free, 0, 0, 512, 512, 30);
    // It began before that free, and got the block after it.
    shard.event(EventKind::Malloc, 0, 0, 512, 512, 20);
    other.event(EventKind::Malloc, 0, 0, 1024, 512, 25);
    let reader = Reader::own(record).unwrap();
    let mut cursor = Cursor::default();
    let mut look = || {
        let events = reader.events(&mut cursor).entries;
        events.iter().map(|event| (event.kind, event.time, event.turn)).collect::<Vec<_>>()
    };
    use EventKind::{Free, Malloc};
    assert_eq!(look(), [(Malloc, 10, 10), (Malloc, 25, 25), (Free, 30, 30), (Malloc, 20, 30)]);
    // From look to look, too.
    shard.event(EventKind::Malloc, 0, 0, 2048, 512, 28);
    other.event(EventKind::Free, 0, 0, 1024, 512, 29);
    assert_eq!(look(), [(Free, 29, 29), (Malloc, 28, 30)]);
    record.close();
}

#[test]
fn a_shard_ring_that_grows_loses_no_event_and_keeps_the_latest() {
    let folder = tempfile::tempdir().unwrap();
    let options = RecordOptions { ring_events: 1 << 16, ..options(folder.path()) };
    let record = record(&options, 1);
    let mut shard = record.shard(0, 0);
    let reader = Reader::open(record.path().unwrap()).unwrap();
    let (mut cursor, mut next, mut written) = (Cursor::default(), 0, 0u64);
    // At and around each length that it has, and past the last.
    for end in [
        1, 255, 256, 257, 511, 512, 513, 1023, 1025, 5000, 8192, 8193, 16_383, 16_384, 16_385,
        40_000,
    ] {
        while written < end {
            shard.event(EventKind::Malloc, 0, 7, written << 9, 512, written);
            written += 1;
        }
        let events = reader.events(&mut cursor);
        let first = end.saturating_sub(16_383).max(next);
        assert_eq!(
            (events.entries.len() as u64, events.lost),
            (end - first, first - next),
            "at {end}"
        );
        for (event, position) in events.entries.iter().zip(first..) {
            assert_eq!(
                (event.position, event.address, event.time),
                (position, position << 9, position)
            );
        }
        next = end;
        let all = reader.events(&mut Cursor::default());
        assert_eq!(all.entries.len() as u64, end.min(16_383), "from the beginning, at {end}");
    }
    record.close();
}

#[test]
fn a_copy_that_is_left_says_what_was_live_then_and_counts_as_killed() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&options(folder.path()), 1);
    let path = record.path().expect("a file").to_owned();
    let mut shard = record.shard(0, 0);
    let entry = BlockEntry { capture: 0, ..block(0x7f00_0000_0000, 4 << 20, 0) };
    let slot = shard.block_insert(&entry);
    let copy = record.leave_copy().expect("a file");
    // What comes later is not in it.
    shard.block_remove(slot, entry.size, entry.requested, 0, false);
    record.close();
    assert!(!path.exists() && copy.exists());
    let reader = Reader::open(&copy).unwrap();
    assert_eq!(reader.is_live(), Some(false));
    let blocks: Vec<BlockEntry> =
        reader.blocks().entries.into_iter().map(|(block, _)| block).collect();
    assert_eq!(blocks, [entry]);
    // Holes stay holes.
    let (taken, length) = (copy.metadata().unwrap().blocks() * 512, copy.metadata().unwrap().len());
    assert!(taken < length / 2, "{taken} of {length} bytes");
}

#[test]
fn a_copy_that_is_left_after_an_out_of_memory_says_what_was_live_when_the_request_was_refused() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(&options(folder.path()), 1);
    let mut shard = record.shard(0, 0);
    let entry = BlockEntry { capture: 0, ..block(0x7f00_0000_0000, 4 << 20, 0) };
    let slot = shard.block_insert(&entry);
    record.keep_moment().unwrap();
    // The exception frees it on its way.
    shard.block_remove(slot, entry.size, entry.requested, 0, false);
    let sizes = |copy: &std::path::Path| -> Vec<u64> {
        let blocks = Reader::open(copy).unwrap().blocks().entries;
        blocks.into_iter().map(|(block, _)| block.size).collect()
    };
    let copy = record.leave_copy().expect("a file");
    assert_eq!(sizes(&copy), [entry.size]);
    // Another thread is refused while the exception frees the heap: the copy stays the first's.
    record.keep_moment().unwrap();
    let copy = record.leave_copy().expect("a file");
    assert_eq!(sizes(&copy), [entry.size]);
    // The program went on to another step, where it was refused again.
    record.device(0).set(&[(DeviceGauge::Step, 1)]);
    std::thread::sleep(std::time::Duration::from_secs(1));
    record.keep_moment().unwrap();
    let copy = record.leave_copy().expect("a file");
    assert!(sizes(&copy).is_empty());
    record.close();
}
