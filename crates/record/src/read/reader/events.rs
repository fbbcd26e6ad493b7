//! Events, for readers at any pace.

use super::Reader;
use crate::EventKind;
use crate::gauges::Shard;
use crate::layout::Section;
use crate::ring::{Event, Place, Ring, RingCell, RingHead};
use crate::shard_ring::ShardRingCell;
use crate::source::Source;
use crate::sync::Ordering;

/// A follower's place in the events; the default is the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    ring: Place,
    /// Per shard's event ring, the next position, and the latest time of an event before it.
    shard_rings: Vec<(u64, u64)>,
}

impl Cursor {
    /// Events of the shared ring begun but unwritten at the last look: neither read nor lost, the
    /// next look decides. None if the process has ended.
    pub fn late(&self) -> u64 {
        self.ring.late()
    }

    /// Stops waiting for them; returns their number.
    pub fn give_up(&mut self) -> u64 {
        self.ring.give_up()
    }
}

/// Events, and the number lost among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// In the order of [`Event::turn`]: the events of a block are in the order in which they
    /// happened.
    pub entries: Vec<Event>,
    /// Overwritten before they were read, dropped, or left half-written by a process that has
    /// ended.
    pub lost: u64,
}

/// Counts of a process's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventFacts {
    /// Events ever written.
    pub written: u64,
    /// Dropped, because two writers met on a slot of the shared ring a lap apart.
    pub dropped: u64,
    /// The most that the rings can hold.
    pub capacity: u64,
}

impl Reader<'_> {
    /// Cells of the ring that may be touched.
    fn ring_reach(&self) -> u64 {
        self.header().map_or(0, |header| header.health.ring_reach.load(Ordering::Acquire))
    }

    fn ring(&self) -> Option<Ring> {
        let head = self.many::<RingHead>(Section::RingHead).first()?;
        let cells = self.many::<RingCell>(Section::Ring);
        // SAFETY: a power of two of cells, at least two, checked when it was opened; they live as
        // long as `self`, and so do the callers' uses of the ring.
        Some(unsafe { Ring::new(cells.as_ptr(), cells.len() as u64, head) })
    }

    /// The events after those `cursor` has seen, in the order of [`Event::turn`]; moves the cursor
    /// behind them. [`Events::lost`] counts events overwritten or dropped meanwhile; events being
    /// written come with a later look ([`Cursor::late`]).
    pub fn events(&self, cursor: &mut Cursor) -> Events {
        let mut events = self.ring_events(&mut cursor.ring);
        let shards = self.many::<Shard>(Section::Shards);
        cursor.shard_rings.resize(shards.len(), (0, 0));
        let cells = self.many::<ShardRingCell>(Section::ShardRings);
        let each = cells.len().checked_div(shards.len()).unwrap_or(0);
        for (number, (shard, (since, turn))) in
            shards.iter().zip(&mut cursor.shard_rings).enumerate()
        {
            if shard.ring.cells() > 0 {
                let cells = cells.get(number * each..(number + 1) * each).unwrap_or(&[]);
                let (mut read, lost, end) = shard.ring.read_since(cells, *since);
                for event in &mut read {
                    *turn = event.time.max(*turn);
                    event.turn = *turn;
                }
                events.entries.extend(read);
                events.lost = events.lost.saturating_add(lost);
                *since = end;
            }
        }
        // Stable: events of one ring keep their order.
        events.entries.sort_by_key(|event| event.turn);
        events
    }

    /// The shared ring's part of [`Reader::events`].
    fn ring_events(&self, place: &mut Place) -> Events {
        let Some(ring) = self.ring() else { return Events::default() };
        let (mut entries, mut lost) = ring.follow(place, || self.ring_reach());
        let is_over = || matches!(self.source, Source::Copy(_)) || self.is_live() == Some(false);
        if place.late() > 0 && is_over() {
            // Again: everything written before the end is there now, and nothing else comes.
            let (rest, more) = ring.follow(place, || self.ring_reach());
            entries.extend(rest);
            lost = lost.saturating_add(more).saturating_add(place.give_up());
        }
        Events { entries, lost }
    }

    /// The events of the shared ring after those `cursor` has seen, except mallocs, frees and uses
    /// of blocks by streams; moves the cursor behind them. A reader can follow these at any pace,
    /// since it does not read the events of blocks. A shard without an event ring of its own writes
    /// into the same ring; [`Events::lost`] counts those too.
    pub fn rare_events(&self, cursor: &mut Cursor) -> Events {
        let mut events = self.ring_events(&mut cursor.ring);
        events.entries.retain(|event| event.kind as u8 > EventKind::RecordStream as u8);
        events
    }

    /// Number of events ever written, dropped by writers that met on a slot, and held at most by
    /// the rings.
    pub fn event_facts(&self) -> EventFacts {
        let (position, capacity, dropped) = self
            .ring()
            .map_or((0, 0, 0), |ring| (ring.position(), ring.capacity(), ring.conflicts()));
        let mut facts = EventFacts { written: position, dropped, capacity };
        let shards = self.many::<Shard>(Section::Shards);
        let each = self.sections[Section::ShardRings as usize]
            .1
            .checked_div(shards.len() as u64)
            .unwrap_or(0);
        for shard in shards.iter().filter(|shard| shard.ring.cells() > 0) {
            facts.written = facts.written.wrapping_add(shard.ring.position());
            facts.capacity += each.saturating_sub(1);
        }
        facts
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{DeviceFacts, Record, RecordOptions};

    fn record(folder: &Path) -> &'static Record {
        let facts =
            DeviceFacts { name: "Phantom".to_owned(), uuid: [1; 16], total_memory: 80 << 30 };
        let options = RecordOptions {
            directory: folder.to_owned(),
            ring_events: 512,
            max_blocks: 1 << 10,
            ..RecordOptions::default()
        };
        Box::leak(Box::new(Record::create(&options, &[facts])))
    }

    /// Adds an event to the shared ring like [`Record::event`]; `meanwhile` runs between taking its
    /// position and writing, and returns whether to write.
    fn push(reader: &Reader<'_>, time: u64, meanwhile: impl FnOnce() -> bool) {
        reader.ring().unwrap().push(EventKind::Grow, 0, 0, 0, time, 512, time, |_| meanwhile());
    }

    /// The addresses, the losses, and the number late.
    fn look(reader: &Reader<'_>, cursor: &mut Cursor) -> (Vec<u64>, u64, u64) {
        let events = reader.events(cursor);
        (events.entries.iter().map(|event| event.address).collect(), events.lost, cursor.late())
    }

    #[test]
    fn an_event_whose_position_is_taken_and_not_written_is_late_and_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let record = record(folder.path());
        let reader = Reader::own(record).unwrap();
        let (mut cursor, mut rare) = (Cursor::default(), Cursor::default());
        record.event(EventKind::Grow, 0, 0, 0, 10, 512, 10);
        push(&reader, 5, || {
            assert_eq!(look(&reader, &mut cursor), (vec![10], 0, 1));
            record.event(EventKind::Grow, 0, 0, 0, 20, 512, 20);
            for _ in 0..100 {
                look(&reader, &mut rare);
            }
            assert_eq!(
                look(&reader, &mut cursor),
                (vec![20], 0, 1),
                "what comes after it need not wait for it"
            );
            true
        });
        let late = reader.events(&mut cursor);
        assert_eq!((late.entries.len(), late.lost, cursor.late()), (1, 0, 0));
        assert_eq!(
            (late.entries[0].time, late.entries[0].turn),
            (5, 10),
            "in its turn: after what was before it"
        );
        assert_eq!(look(&reader, &mut cursor), (vec![], 0, 0));
        let late = reader.rare_events(&mut rare);
        assert_eq!(
            (late.entries.len(), late.lost, rare.late()),
            (1, 0, 0),
            "however many looks it took"
        );
        record.close();
    }

    #[test]
    fn an_event_that_was_dropped_or_overtaken_is_lost_and_not_late() {
        let folder = tempfile::tempdir().unwrap();
        let record = record(folder.path());
        let reader = Reader::own(record).unwrap();
        let mut cursor = Cursor::default();
        push(&reader, 1, || {
            assert_eq!(look(&reader, &mut cursor), (vec![], 0, 1));
            false
        });
        assert_eq!(look(&reader, &mut cursor), (vec![], 1, 0), "dropped");
        push(&reader, 2, || false);
        assert_eq!(look(&reader, &mut cursor), (vec![], 1, 0), "dropped before the look");
        push(&reader, 3, || {
            // One of them is dropped, and never comes: which one is clear when the other is there.
            push(&reader, 4, || false);
            assert_eq!(look(&reader, &mut cursor), (vec![], 0, 2));
            true
        });
        assert_eq!(look(&reader, &mut cursor), (vec![3], 1, 0));
        push(&reader, 5, || {
            assert_eq!(look(&reader, &mut cursor), (vec![], 0, 1));
            (0..512).for_each(|n| record.event(EventKind::Grow, 0, 0, 0, n, 512, n));
            assert_eq!(look(&reader, &mut cursor), ((0..512).collect(), 1, 0), "overtaken");
            true
        });
        assert_eq!(look(&reader, &mut cursor), (vec![], 0, 0));
        record.close();
    }

    #[test]
    fn a_cell_for_which_there_is_no_memory_yet_is_not_touched_and_its_event_is_late() {
        let folder = tempfile::tempdir().unwrap();
        let record = record(folder.path());
        let reader = Reader::own(record).unwrap();
        (0..4).for_each(|n| record.event(EventKind::Grow, 0, 0, 0, n, 512, n));
        let (ring, mut place) = (reader.ring().unwrap(), Place::default());
        let mut look = |reach| {
            let (events, lost) = ring.follow(&mut place, || reach);
            (events.iter().map(|event| event.position).collect::<Vec<_>>(), lost, place.late())
        };
        // As if the reach were behind the events: a cell beyond it is not read, new or late.
        assert_eq!(look(1), (vec![0], 0, 3));
        assert_eq!(look(1), (vec![], 0, 3));
        assert_eq!(look(3), (vec![1, 2], 0, 1));
        assert_eq!(look(512), (vec![3], 0, 0));
        record.close();
    }

    #[test]
    fn what_a_process_left_half_written_is_lost_once_it_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let record = record(folder.path());
        let reader = Reader::own(record).unwrap();
        record.event(EventKind::Grow, 0, 0, 0, 1, 512, 1);
        push(&reader, 2, || {
            let copy = Reader::from_bytes(&std::fs::read(record.path().unwrap()).unwrap()).unwrap();
            assert_eq!(
                look(&copy, &mut Cursor::default()),
                (vec![1], 1, 0),
                "a copy does not change"
            );
            let mut cursor = Cursor::default();
            look(&reader, &mut cursor);
            assert_eq!((cursor.give_up(), cursor.late()), (1, 0));
            true
        });
        record.close();
    }

    #[test]
    fn a_cursor_remembers_no_more_late_events_than_there_are_threads() {
        fn take(reader: &Reader<'_>, cursor: &mut Cursor, count: u64) -> bool {
            match count {
                0 => assert_eq!(look(reader, cursor), (vec![], 300 - 256, 256)),
                _ => push(reader, count, || take(reader, cursor, count - 1)),
            }
            true
        }
        let folder = tempfile::tempdir().unwrap();
        let record = record(folder.path());
        let reader = Reader::own(record).unwrap();
        let mut cursor = Cursor::default();
        take(&reader, &mut cursor, 300);
        let events = reader.events(&mut cursor);
        assert_eq!((events.entries.len(), events.lost, cursor.late()), (256, 0, 0));
        record.close();
    }
}
