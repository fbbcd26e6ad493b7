//! A reader survives whatever is done to a record, and says what is wrong in words that help.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::OnceLock;

use gruyere::record::mapping::file_name;
use gruyere::record::reader::Cursor;
use gruyere::record::sweep::{State, list, sweep};
use gruyere::record::{
    BlockEntry, DeviceFacts, DeviceGauge, EventKind, ReadError, Reader, Record, RecordOptions, SegmentEntry,
    SegmentKind, clock,
};
use proptest::prelude::*;

fn make(directory: &Path) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 64,
        max_blocks: 1024,
        ..RecordOptions::default()
    };
    let devices = [DeviceFacts { name: "Phantom".to_owned(), uuid: [1; 16], total_memory: 1 << 30 }];
    Box::leak(Box::new(Record::create(&options, &devices)))
}

/// A valid record's bytes.
fn valid() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let record = make(folder.path());
        let mut lane = record.lane(0, 0);
        for n in 0..700u64 {
            lane.block_insert(&BlockEntry {
                address: n * 512,
                size: 512,
                requested: 500,
                ..BlockEntry::default()
            });
            lane.event(EventKind::Malloc, 0, 0, n * 512, 512, clock::now());
            record.event(EventKind::Grow, 0, 0, 0, n * 512, 512, clock::now());
        }
        record.device(0).set(&[(DeviceGauge::Reserved, 1 << 20)]);
        for n in 0..20 {
            use SegmentKind::{Chunk, Reservation, Slab, Span, View};
            let kind = [Span, Slab, Chunk, View, Reservation][n as usize % 5];
            let (address, bytes) = (n << 21, 2 << 20);
            record.segment_insert(&SegmentEntry {
                kind,
                address,
                bytes,
                slot: 0,
                stream: 0,
                device: 0,
                lifetime: 0,
                capture: 0,
                ..SegmentEntry::default()
            });
        }
        let bytes = std::fs::read(record.path().unwrap()).unwrap();
        record.close();
        bytes
    })
}

/// Reads all that can be read.
fn read_all(reader: &Reader) -> usize {
    let mut things = reader.process().command.len() + reader.device_snapshots().len();
    things += reader.blocks().entries.len() + reader.segments().entries.len();
    let mut cursor = Cursor::default();
    things += reader.events(&mut cursor).entries.len() + reader.events(&mut cursor).entries.len();
    let histograms = reader.histograms();
    for counts in [histograms.malloc_sizes, histograms.free_sizes, histograms.malloc_latency] {
        things += counts.to_hdr(1.0).value_at_quantile(0.99) as usize % 2;
    }
    let scale = reader.scale().map(|scale| scale.realtime(clock::now()));
    things
        + scale.is_some() as usize
        + reader.health().closed as usize
        + reader.event_facts().capacity as usize % 2
}

#[test]
fn the_untouched_bytes_are_read() {
    let reader = Reader::from_bytes(valid()).unwrap();
    assert_eq!((reader.blocks().entries.len(), reader.segments().entries.len()), (700, 20));
    assert_eq!(reader.device(0).unwrap().live, 700 * 512);
    assert!(read_all(&reader) > 700);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_damage_makes_a_reader_panic_or_leave_its_bytes(
        anywhere in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..200),
        words in proptest::collection::vec(
            (0usize..96, prop_oneof![
                any::<u64>(), Just(0), Just(1), Just(u64::MAX), Just(1 << 63), Just(4096), Just(4095), 0u64..1_000_000,
            ]),
            0..4,
        ),
        cut in prop_oneof![3 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)],
    ) {
        let mut bytes = valid().to_vec();
        let length = bytes.len();
        for (index, value) in anywhere {
            bytes[index.index(length)] = value;
        }
        // The header is where the offsets are.
        for (word, value) in words {
            // Not the magic: that is refused at once.
            bytes[8 + word * 8..16 + word * 8].copy_from_slice(&value.to_le_bytes());
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(length));
        }
        if let Ok(reader) = Reader::from_bytes(&bytes) {
            read_all(&reader);
        }
    }
}

fn refused(bytes: &[u8]) -> ReadError {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file_name(1, 2, 3, 0));
    std::fs::write(&path, bytes).unwrap();
    Reader::open(&path).map(|_| ()).unwrap_err()
}

#[test]
fn every_refusal_names_the_file_the_reason_and_the_remedy() {
    let mut other_version = valid().to_vec();
    other_version[8] = 99;
    let mut no_magic = valid().to_vec();
    no_magic[..8].fill(0);
    let cases: [(&[u8], &str, &str); 6] = [
        (b"", "unfinished", "--sweep"),
        (b"not a record at all", "no magic", "name another"),
        (&[7; 8192], "no magic", "name another"),
        (&no_magic, "unfinished", "--sweep"),
        (&other_version, "version 99", "use the `gruyere`"),
        (&valid()[..20_000], "damaged", "delete it"),
    ];
    for (bytes, reason, remedy) in cases {
        let text = refused(bytes).to_string();
        for part in [file_name(1, 2, 3, 0).as_str(), reason, remedy] {
            assert!(text.contains(part), "no {part:?} in {text:?}");
        }
    }
    let missing = Reader::open(Path::new("/nowhere/at/all")).map(|_| ()).unwrap_err();
    assert!(missing.is_missing() && missing.to_string().contains("gruyere ps"), "{missing}");
    let folder = Reader::open(Path::new("/tmp")).map(|_| ()).unwrap_err().to_string();
    assert!(folder.contains("not a regular file"), "{folder}");
}

#[test]
fn links_are_refused_by_reader_and_writer() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target");
    let facts = gruyere::record::facts::Process::current();
    let first = folder.path().join(file_name(facts.pid_namespace, facts.pid, facts.start_time, 0));
    std::fs::write(&target, "precious").unwrap();
    symlink(&target, &first).unwrap();
    let record = make(folder.path());
    assert_ne!(record.path(), Some(first.as_path()), "the planted name is passed over");
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    let link = folder.path().join("link");
    symlink(record.path().unwrap(), &link).unwrap();
    let error = Reader::open(&link).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("links are refused"), "{error}");
    record.close();
    assert!(std::fs::symlink_metadata(&first).is_ok(), "what was planted is not ours to remove");
}

#[test]
fn the_file_is_its_owners_only() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir().unwrap();
    let record = make(folder.path());
    assert_eq!(std::fs::metadata(record.path().unwrap()).unwrap().mode() & 0o7777, 0o600);
    record.close();
}

#[test]
fn a_sweep_takes_the_dead_and_leaves_the_live_the_unready_and_the_strange() {
    let folder = tempfile::tempdir().unwrap();
    let record = make(folder.path());
    let at = |name: &str| folder.path().join(name);
    let dead = at(&file_name(1, 2, 3, 0));
    std::fs::write(&dead, valid()).unwrap();
    let unready = at(&file_name(1, 2, 4, 0));
    std::fs::write(&unready, []).unwrap();
    let old = at(&file_name(1, 2, 5, 0));
    std::fs::write(&old, []).unwrap();
    let hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    std::fs::File::options().write(true).open(&old).unwrap().set_modified(hour_ago).unwrap();
    let mut other_version = valid().to_vec();
    other_version[8] = 99;
    let (foreign, cut) = (at(&file_name(1, 2, 6, 0)), at(&file_name(1, 2, 7, 0)));
    std::fs::write(&foreign, other_version).unwrap();
    std::fs::write(&cut, &valid()[..20_000]).unwrap();
    let strange = at("gruyere-notes.txt");
    std::fs::write(&strange, "mine").unwrap();
    let states: Vec<State> = list(folder.path()).unwrap().iter().map(|found| found.state).collect();
    assert_eq!(states.iter().filter(|&&state| state == State::Stale).count(), 4, "{states:?}");
    assert_eq!(sweep(folder.path()).removed, 4);
    assert!(!dead.exists() && !old.exists() && !foreign.exists() && !cut.exists());
    assert!(unready.exists() && strange.exists() && record.path().unwrap().exists());
    record.close();
}

#[test]
fn a_file_system_without_room_for_more_costs_entries_only() {
    let folder = tempfile::tempdir().unwrap();
    let record = make(folder.path());
    // The map's first chunk, then nothing: as a tmpfs that filled up.
    record.mapping().limit_room(512 * 40);
    let mut lane = record.lane(0, 0);
    for n in 0..1000u64 {
        lane.block_insert(&BlockEntry {
            address: n * 512,
            size: 512,
            requested: 500,
            ..BlockEntry::default()
        });
        lane.event(EventKind::Malloc, 0, 0, n * 512, 512, clock::now());
    }
    let reader = Reader::own(record).unwrap();
    let health = reader.health();
    assert_eq!((reader.blocks().entries.len(), health.blocks_unrecorded), (512, 488));
    assert!(health.no_room >= 2);
    let events = reader.events(&mut Cursor::default());
    assert_eq!((events.entries.len(), events.lost), (64, 936), "without a trail, the shared ring serves");
    assert_eq!(record.live(0), (1000 * 512, 1000 * 512));
    record.close();
}
