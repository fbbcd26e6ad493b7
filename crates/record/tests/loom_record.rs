//! The record's protocols under every interleaving and every outcome of their relaxed atomics:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release --test loom_record
//! ```
//! Bounded to two preemptions: each protocol is one write window against one read window, and a
//! failure of it needs a writer to come in once between two loads of the reader, and the reader to
//! come back once between two stores of the writer. More preemptions repeat that at many times the
//! run time (Musuvathi and Qadeer, "Iterative context bounding", PLDI 2007, found nearly all bugs
//! within two).
#![cfg(loom)]

use gruyere_record::block_map::{BlockCell, SlotRead};
use gruyere_record::ring::{Place, Ring, RingCell, RingHead};
use gruyere_record::seqlock::Sequence;
use gruyere_record::shard_ring::{ShardRingCell, ShardRingHead};
use gruyere_record::sync::{AtomicU64, Ordering};
use gruyere_record::{BlockEntry, BlockState, BlockTag, EventKind};
use loom::sync::Arc;
use loom::thread;

fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

/// A block whose words all follow from one number.
fn block(seed: u64) -> BlockEntry {
    BlockEntry {
        address: seed * 0x1000,
        size: seed * 512,
        requested: seed * 500,
        stream: seed as u32 + 1,
        step: seed as u32 + 2,
        device: seed as u8,
        lifetime: seed as u8 % 4,
        capture: seed as u8 + 3,
        ..BlockEntry::default()
    }
}

#[test]
fn a_seqlock_reader_gets_all_words_of_one_write_or_none() {
    explore(|| {
        let shared = Arc::new((Sequence::default(), AtomicU64::new(0), AtomicU64::new(0)));
        let theirs = shared.clone();
        let writer = thread::spawn(move || {
            for value in 1..=2 {
                theirs.0.write(|| {
                    theirs.1.store(value, Ordering::Relaxed);
                    theirs.2.store(value * 10, Ordering::Relaxed);
                });
            }
        });
        let read = || (shared.1.load(Ordering::Relaxed), shared.2.load(Ordering::Relaxed));
        if let Some((one, ten)) = shared.0.read(2, read) {
            assert_eq!(one * 10, ten, "torn");
        }
        writer.join().unwrap();
        assert_eq!(shared.0.read(1, read), Some((2, 20)));
    });
}

#[test]
fn a_block_is_read_whole_whatever_becomes_of_its_slot() {
    explore(|| {
        let cell = Arc::new(BlockCell::default());
        cell.insert(&block(1));
        let theirs = cell.clone();
        let writer = thread::spawn(move || {
            theirs.pending();
            theirs.remove(true);
            theirs.insert(&block(2));
        });
        match cell.read(2, None) {
            SlotRead::Taken(entry, BlockState::Pending) => assert_eq!(entry, block(1)),
            SlotRead::Taken(entry, _) => {
                assert!(entry == block(1) || entry == block(2), "{entry:?}")
            }
            SlotRead::Free | SlotRead::Torn => {}
        }
        writer.join().unwrap();
        assert_eq!(cell.read(1, None), SlotRead::Taken(block(2), BlockState::Live));
    });
}

struct TestRing {
    cells: Vec<RingCell>,
    head: RingHead,
}

impl TestRing {
    fn new() -> Arc<TestRing> {
        Arc::new(TestRing {
            cells: (0..2).map(|_| RingCell::default()).collect(),
            head: RingHead::default(),
        })
    }
    fn ring(&self) -> Ring {
        // SAFETY: two cells and a head, which `self` keeps; the tests keep `self` as long.
        unsafe { Ring::new(self.cells.as_ptr(), 2, &self.head) }
    }
    fn push(&self, seed: u64) {
        self.push_on(seed as u32, seed);
    }
    fn push_on(&self, stream: u32, seed: u64) {
        self.ring().push(
            EventKind::Malloc,
            seed as u8,
            1,
            stream,
            seed * 0x1000,
            seed * 512,
            seed * 7,
            |_| true,
        );
    }
    fn check(&self, position: u64) -> Option<u64> {
        let event = self.ring().read(position)?;
        let seed = u64::from(event.stream);
        let words = (event.address, event.size, event.time, event.device, event.position);
        assert_eq!(words, (seed * 0x1000, seed * 512, seed * 7, seed as u8, position), "torn");
        Some(seed)
    }
}

#[test]
fn two_producers_a_lap_apart_never_mix_in_one_entry() {
    explore(|| {
        let ring = TestRing::new();
        let theirs = ring.clone();
        // Three events in two cells: positions 0 and 2 meet in one of them.
        let producer = thread::spawn(move || {
            theirs.push(1);
            theirs.push(2);
        });
        ring.push(3);
        producer.join().unwrap();
        let (events, lost, end) = ring.ring().read_since(0, || 2);
        assert_eq!((events.len() as u64 + lost, end), (3, 3));
        let seeds: Vec<u64> = (0..3).filter_map(|position| ring.check(position)).collect();
        // A producer that comes to the cell last may be the one of the earlier position, which is
        // outside the last lap then.
        assert!(seeds.len() >= events.len());
        // The other cell has one producer.
        assert!(!events.is_empty());
    });
}

#[test]
fn a_ring_reader_accepts_only_whole_events() {
    explore(|| {
        let ring = TestRing::new();
        ring.push(1);
        let theirs = ring.clone();
        let producer = thread::spawn(move || (2..=3).for_each(|seed| theirs.push(seed)));
        for position in 0..3 {
            if let Some(seed) = ring.check(position) {
                assert_eq!(seed, position + 1);
            }
        }
        producer.join().unwrap();
        let (events, lost, _) = ring.ring().read_since(0, || 2);
        assert_eq!((events.len(), lost), (2, 1), "the two latest are there, the first is lost");
    });
}

#[test]
fn a_ring_reader_accepts_only_whole_events_of_the_default_stream() {
    explore(|| {
        let ring = TestRing::new();
        let theirs = ring.clone();
        // In the first lap, on stream 0, a cell's tag is the same before and after.
        let producer = thread::spawn(move || theirs.push_on(0, 5));
        let read = || {
            ring.ring().read(0).map(|event| (event.address, event.size, event.time, event.device))
        };
        let whole = (5 * 0x1000, 5 * 512, 5 * 7, 5);
        assert!(read().is_none_or(|words| words == whole), "torn");
        producer.join().unwrap();
        assert_eq!(read(), Some(whole));
    });
}

#[test]
fn a_follower_of_a_ring_gets_each_event_once_however_late_it_is_written() {
    explore(|| {
        let ring = TestRing::new();
        let theirs = ring.clone();
        let producer = thread::spawn(move || theirs.push(1));
        let mine = ring.clone();
        let other = thread::spawn(move || mine.push_on(0, 2));
        let mut place = Place::default();
        let mut addresses = Vec::new();
        let mut look = |place: &mut Place| {
            let (events, lost) = ring.ring().follow(place, || 2);
            assert_eq!(lost, 0, "the ring has room for both");
            addresses.extend(events.iter().map(|event| event.address));
        };
        look(&mut place);
        producer.join().unwrap();
        other.join().unwrap();
        look(&mut place);
        assert_eq!((place.late(), place.position()), (0, 2));
        addresses.sort_unstable();
        assert_eq!(addresses, [0x1000, 0x2000]);
    });
}

#[test]
fn a_follower_of_a_ring_counts_what_was_dropped_as_lost_and_nothing_else() {
    explore(|| {
        let ring = TestRing::new();
        let theirs = ring.clone();
        let producer = thread::spawn(move || {
            theirs.ring().push(EventKind::Malloc, 0, 0, 1, 0x1000, 512, 7, |_| false);
        });
        let mine = ring.clone();
        let other = thread::spawn(move || mine.push(2));
        let mut place = Place::default();
        let (mut addresses, mut all_lost) = (Vec::new(), 0);
        let mut look = |place: &mut Place| {
            let (events, lost) = ring.ring().follow(place, || 2);
            addresses.extend(events.iter().map(|event| event.address));
            all_lost += lost;
        };
        look(&mut place);
        producer.join().unwrap();
        other.join().unwrap();
        look(&mut place);
        assert_eq!((place.late(), place.position()), (0, 2));
        assert_eq!((addresses, all_lost), (vec![0x2000], 1));
    });
}

#[test]
fn a_shard_ring_reader_accepts_only_whole_events() {
    explore(|| {
        let shard_ring = Arc::new((
            ShardRingHead::default(),
            (0..2).map(|_| ShardRingCell::default()).collect::<Vec<ShardRingCell>>(),
        ));
        fn push(shard_ring: &(ShardRingHead, Vec<ShardRingCell>), seed: u64) {
            let cell = &shard_ring.1[shard_ring.0.next() as usize % 2];
            let tag = BlockTag::new(seed as u8, 1, 0, seed as u32);
            shard_ring.0.push(cell, EventKind::Free, tag, seed * 0x1000, seed * 512, seed * 7);
        }
        shard_ring.0.open(2);
        // The first before the race, so that two preemptions suffice to come between a reader's two
        // looks at the head.
        push(&shard_ring, 1);
        let theirs = shard_ring.clone();
        let writer = thread::spawn(move || (2..=3).for_each(|seed| push(&theirs, seed)));
        for position in 0..3 {
            if let Some(event) = shard_ring.0.read(&shard_ring.1, position) {
                let seed = position + 1;
                let words =
                    (u64::from(event.stream), event.address, event.size, event.time, event.device);
                assert_eq!(words, (seed, seed * 0x1000, seed * 512, seed * 7, seed as u8), "torn");
            }
        }
        writer.join().unwrap();
        let (events, lost, end) = shard_ring.0.read_since(&shard_ring.1, 0);
        assert_eq!(
            (events.len(), lost, end),
            (1, 2, 3),
            "an event ring of two cells holds one that can be read"
        );
        assert_eq!(events[0].address, 3 * 0x1000);
    });
}

#[test]
fn a_reader_beside_a_shard_ring_that_grows_accepts_only_whole_events() {
    explore(|| {
        let shard_ring = Arc::new((
            ShardRingHead::default(),
            (0..4).map(|_| ShardRingCell::default()).collect::<Vec<ShardRingCell>>(),
        ));
        fn push(shard_ring: &(ShardRingHead, Vec<ShardRingCell>), seed: u64, mask: u64) {
            let cell = &shard_ring.1[(shard_ring.0.next() & mask) as usize];
            let tag = BlockTag::new(seed as u8, 1, 0, seed as u32);
            shard_ring.0.push(cell, EventKind::Free, tag, seed * 0x1000, seed * 512, seed * 7);
        }
        shard_ring.0.open(2);
        push(&shard_ring, 1, 1);
        push(&shard_ring, 2, 1);
        let theirs = shard_ring.clone();
        let writer = thread::spawn(move || {
            // As a shard does at the end of the first lap.
            theirs.0.open(4);
            push(&theirs, 3, 3);
            push(&theirs, 4, 3);
        });
        let (events, lost, end) = shard_ring.0.read_since(&shard_ring.1, 0);
        assert_eq!(events.len() as u64 + lost, end);
        for event in events {
            let seed = event.position + 1;
            let words =
                (u64::from(event.stream), event.address, event.size, event.time, event.device);
            assert_eq!(
                words,
                (seed, seed * 0x1000, seed * 512, seed * 7, seed as u8),
                "torn, or another's cell"
            );
        }
        writer.join().unwrap();
        let (events, lost, end) = shard_ring.0.read_since(&shard_ring.1, 0);
        assert_eq!(
            (events.len(), lost, end),
            (3, 1, 4),
            "an event ring of four cells holds three that can be read"
        );
    });
}
