//! A reader survives whatever is done to a record, and says what is wrong in words that help.

#[path = "../../../tests/common/skip.rs"]
mod skip;

use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use gruyere_record::calls::{CallTime, DriverCall};
use gruyere_record::claim::Claim;
use gruyere_record::mapping::{Mapping, file_name};
use gruyere_record::reader::Cursor;
use gruyere_record::sweep::{Owners, State, read, sweep};
use gruyere_record::{
    BlockEntry, DeviceFacts, DeviceGauge, EventKind, ReadError, Reader, Record, RecordOptions,
    SegmentEntry, SegmentKind, clock,
};
use proptest::prelude::*;

fn make(directory: &Path) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 64,
        max_blocks: 1024,
        ..RecordOptions::default()
    };
    let devices =
        [DeviceFacts { name: "Phantom".to_owned(), uuid: [1; 16], total_memory: 1 << 30 }];
    Box::leak(Box::new(Record::create(&options, &devices)))
}

/// A valid record's bytes.
fn valid() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let record = make(folder.path());
        let mut shard = record.shard(0, 0);
        for n in 0..700u64 {
            shard.block_insert(&BlockEntry {
                address: n * 512,
                size: 512,
                requested: 500,
                ..BlockEntry::default()
            });
            shard.event(EventKind::Malloc, 0, 0, n * 512, 512, clock::now());
            record.event(EventKind::Grow, 0, 0, 0, n * 512, 512, clock::now());
        }
        record.device(0).set(&[(DeviceGauge::Reserved, 1 << 20)]);
        for call in [DriverCall::Create, DriverCall::SetAccess, DriverCall::DeviceSynchronize] {
            let times = record.call_times(call).unwrap();
            (0..50).for_each(|n| times.note(n << 23, n << 10));
        }
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
    for calls in reader.driver_calls() {
        things +=
            calls.quantile(0.5).wrapping_add(calls.count()) as usize % 2 + calls.buckets().count();
    }
    let times = reader.driver_call_times();
    things += CallTime::by_kind(&times).len();
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
                any::<u64>(), Just(0), Just(1), Just(u64::MAX), Just(1 << 63), Just(4096),
                Just(4095), 0u64..1_000_000,
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
        (&other_version, "layout 99", "use the `gruyere`"),
        (&valid()[..20_000], "damaged", "delete it"),
    ];
    for (bytes, reason, remedy) in cases {
        let text = refused(bytes).to_string();
        for part in [file_name(1, 2, 3, 0).as_str(), reason, remedy] {
            assert!(text.contains(part), "no {part:?} in {text:?}");
        }
        // Where nobody named it, no other can be named either.
        let found = refused(bytes).in_folder();
        assert!(found.contains(reason) && found.contains("; "), "{found}");
        assert!(!found.contains("another file") && !found.contains("read another"), "{found}");
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
    let facts = gruyere_record::facts::Process::current();
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
    let states: Vec<State> = read(folder.path(), Owners::Mine, |_| true)
        .unwrap()
        .found
        .iter()
        .map(|found| found.state)
        .collect();
    assert_eq!(states.iter().filter(|&&state| state == State::Stale).count(), 4, "{states:?}");
    assert_eq!(sweep(folder.path(), Owners::Mine).removed, 4);
    assert!(!dead.exists() && !old.exists() && !foreign.exists() && !cut.exists());
    assert!(unready.exists() && strange.exists() && record.path().unwrap().exists());
    record.close();
}

#[test]
fn a_file_system_without_room_for_more_costs_entries_only() {
    let folder = tempfile::tempdir().unwrap();
    let record = make(folder.path());
    // The shard's histograms and the map's first chunk, then nothing: as a tmpfs that filled up.
    record.mapping().limit_room(8192 + 512 * 40);
    let mut shard = record.shard(0, 0);
    for n in 0..1000u64 {
        shard.block_insert(&BlockEntry {
            address: n * 512,
            size: 512,
            requested: 500,
            ..BlockEntry::default()
        });
        shard.event(EventKind::Malloc, 0, 0, n * 512, 512, clock::now());
    }
    let reader = Reader::own(record).unwrap();
    let health = reader.health();
    assert_eq!((reader.blocks().entries.len(), health.blocks_unrecorded), (512, 488));
    assert!(health.no_room >= 2);
    let events = reader.events(&mut Cursor::default());
    assert_eq!(
        (events.entries.len(), events.lost),
        (64, 936),
        "without an event ring, the shared ring serves"
    );
    assert_eq!(record.live(0), (1000 * 512, 1000 * 512));
    record.close();
}

#[test]
fn every_page_of_a_record_is_there_before_it_is_touched() {
    // On a disk too, where a page that is allocated but not there can still raise SIGBUS.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (fixed, more) = (3 * 4096, 8 * 4096);
    let mapping = Mapping::file(folder.path(), 64 * 4096, fixed).unwrap();
    mapping.ensure(more + 100, 2 * 4096).unwrap();
    let mut there = [0u8; 64];
    // SAFETY: `there` has a byte for each page of the mapping.
    let told = unsafe {
        libc::mincore(mapping.base().as_ptr().cast(), mapping.length(), there.as_mut_ptr().cast())
    };
    assert_eq!(told, 0, "{}", std::io::Error::last_os_error());
    let there: Vec<usize> = (0..there.len()).filter(|&page| there[page] & 1 == 1).collect();
    assert!([0, 1, 2, 8, 9, 10].iter().all(|page| there.contains(page)), "{there:?}");
    mapping.unlink();
}

/// A record of this process under another name, with the lock of a living one: its file and its
/// path. The lock goes with the file.
fn copy_of_a_living_one(folder: &Path, number: u64) -> (std::fs::File, PathBuf) {
    let path = folder.join(file_name(1, number, 3, 0));
    std::fs::write(&path, valid()).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    // SAFETY: zeros are a value of this C struct; a plain call on a descriptor.
    let locked = unsafe {
        let mut whole: libc::flock = std::mem::zeroed();
        whole.l_type = libc::F_WRLCK as libc::c_short;
        libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &whole)
    };
    assert_eq!(locked, 0, "{}", std::io::Error::last_os_error());
    (file, path)
}

#[test]
fn a_record_that_is_cut_while_it_is_read_ends_nobody_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (file, path) = copy_of_a_living_one(folder.path(), 2);
    let reader = Reader::open(&path).unwrap();
    assert!(read_all(&reader) > 700);
    reader.expect_sound().unwrap();
    file.set_len(4096).unwrap();
    read_all(&reader);
    let error = reader.expect_sound().unwrap_err().to_string();
    assert!(error.contains("cut while it was read") && error.contains("-1-2-3-0"), "{error}");
    // And over and over, at any moment of a reading.
    let (stop, cuts) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                file.write_all_at(valid(), 0).unwrap();
                file.set_len(4096).unwrap();
            }
        });
        // 200 readings, and on until one met a cut, which a busy machine's scheduler may put off.
        for reading in 0..100_000 {
            if reading >= 200 && cuts.load(Ordering::Relaxed) > 0 {
                break;
            }
            // Opened in vain where it is cut just then.
            if let Ok(reader) = Reader::open(&path) {
                read_all(&reader);
                cuts.fetch_add(u32::from(reader.expect_sound().is_err()), Ordering::Relaxed);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(cuts.into_inner() > 0, "no reading met a cut");
}

#[test]
fn a_record_in_which_nothing_comes_to_rest_is_given_up_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let (file, path) = copy_of_a_living_one(folder.path(), 2);
    // The shards' section: its offset, bytes an entry, entries.
    let word = |at: usize| u64::from_le_bytes(valid()[at..at + 8].try_into().unwrap());
    let entry = 64 + 2 * 32;
    let (offset, bytes) = (word(entry), word(entry + 8) * word(entry + 16));
    file.write_all_at(&vec![0xff; bytes as usize], offset).unwrap();
    let reader = Reader::open(&path).unwrap();
    reader.device_snapshots();
    let error = reader.expect_sound().unwrap_err().to_string();
    assert!(error.contains("never come to rest") && error.contains("delete it"), "{error}");
    reader.look_again();
    reader.expect_sound().unwrap();
}

#[test]
fn another_users_record_is_not_opened_unless_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let (_file, path) = copy_of_a_living_one(folder.path(), 2);
    let (mine, _mine) = (make(folder.path()), ());
    if std::os::unix::fs::chown(&path, Some(65534), Some(65534)).is_err() {
        return skip::refused("only root can give a file away");
    }
    let error = Reader::open(&path).map(|_| ()).unwrap_err();
    assert!(error.is_foreign());
    let text = error.to_string();
    assert!(text.contains("user 65534") && text.contains("--all-users"), "{text}");
    let listing = read(folder.path(), Owners::Mine, |_| true).unwrap();
    assert_eq!((listing.found.len(), listing.foreign), (1, 1));
    assert_eq!(listing.found[0].claim, Claim::Seen);
    let all = read(folder.path(), Owners::Any, |_| true).unwrap();
    assert_eq!((all.found.len(), all.foreign), (2, 0));
    // Its process facts are of another boot's pid namespace or of this process: another user's
    // either way.
    let theirs = all.found.iter().find(|found| found.path == path).unwrap();
    assert!(theirs.claim.is_false(), "{:?}", theirs.claim);
    mine.close();
}

#[test]
fn a_new_process_leaves_the_newest_of_its_users_abandoned_records_and_every_living_one() {
    let folder = tempfile::tempdir().unwrap();
    let (_file, living) = copy_of_a_living_one(folder.path(), 1);
    let now = std::time::SystemTime::now();
    let minutes = |number: u64| std::time::Duration::from_secs(60 * number);
    let modify = |path: &std::path::Path, at| {
        std::fs::File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
    };
    let dead = |number: u64| folder.path().join(file_name(1, 100 + number, 3, 0));
    let day_ago = now - minutes(24 * 60);
    // Where the header has the writer's clock.
    let last_sign = Reader::open(&living).unwrap().last_sign();
    let nanoseconds = last_sign.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let places = valid()[..4096].windows(8).enumerate();
    let of_clock: Vec<usize> =
        places.filter(|(_, of)| *of == nanoseconds.to_le_bytes()).map(|(place, _)| place).collect();
    assert!(!of_clock.is_empty());
    for number in 0..20 {
        // The last sign of life that the header tells of. The file's own time says when the record
        // last grew: the other way round here, as of a training of days beside short workers.
        let mut bytes = valid().to_vec();
        let last_sign = now - minutes(20 - number);
        let since = last_sign.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
        for place in &of_clock {
            bytes[*place..place + 8].copy_from_slice(&since.to_le_bytes());
        }
        std::fs::write(dead(number), bytes).unwrap();
        modify(&dead(number), day_ago - minutes(number));
    }
    // A server at rest gave no sign, but a process that started found it alive.
    let at_rest = 3;
    modify(&dead(at_rest), now - minutes(2));
    modify(&living, day_ago);
    let unready = folder.path().join(file_name(1, 2, 4, 0));
    std::fs::write(&unready, []).unwrap();
    let foreign = dead(0);
    let is_foreign = std::os::unix::fs::chown(&foreign, Some(65534), Some(65534)).is_ok();
    let record = make(folder.path());
    let left: Vec<u64> = (1..20).filter(|&number| dead(number).exists()).collect();
    let expected: Vec<u64> = [at_rest].into_iter().chain(13..20).collect();
    assert_eq!(left, expected, "eight, those seen alive last");
    assert!(living.metadata().unwrap().modified().unwrap() >= now, "found alive now");
    assert!(living.exists() && unready.exists() && record.path().unwrap().exists());
    assert_eq!(foreign.exists(), is_foreign, "another user's is left alone");
    record.close();
}
