//! Orders a record's events as the lines of a trace.
//!
//! Each shard of the heap has its own ring, and an event's time is the start of its call. Within a
//! ring, the order is right ([`Event::turn`]). Between rings, times give the order, and so do the
//! reads of the rings: an event absent from a read happened after it, whenever it began. So lines
//! are written up to the start of a read.
//!
//! That leaves calls on memory that moved from one shard to another between two reads. Of a free
//! and a malloc at the same address, the malloc may have begun first: then the missing free is
//! written before it, and skipped when it comes. Of two mallocs, the later to arrive may have begun
//! first: then the free in between has the wrong size, and the block that it leaves is written
//! again.
#![deny(unsafe_code)]

use std::collections::{HashMap, HashSet, VecDeque};

use gruyere::heap::ALIGNMENT;
use gruyere_record::ring::Event;
use gruyere_record::trace::{Lines, stream_name};
use gruyere_record::{BlockEntry, EventKind};

/// Statistics of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Events read.
    pub events: u64,
    /// Events already overwritten in the rings.
    pub lost: u64,
    /// Blocks added or removed by lost events, by the block map.
    pub mended: u64,
    /// Frees of blocks unknown to the trace.
    pub unknown_frees: u64,
    /// Blocks that were live at the start.
    pub at_start: u64,
}

/// A live block, without its address.
#[derive(Clone, Copy, Debug)]
struct Live {
    requested: u64,
    device: u32,
    stream: u32,
}

impl Live {
    /// Whether this free may be of this block: a free has the rounded size.
    fn is_freed_by(&self, free: &Event) -> bool {
        self.requested.checked_next_multiple_of(ALIGNMENT) == Some(free.size)
            && (self.device, self.stream) == (u32::from(free.device), free.stream)
    }
}

/// A block whose free was written before it arrived.
#[derive(Clone, Copy, Debug)]
struct Owed {
    block: Live,
    /// Time of the malloc that took its place.
    since: u64,
}

/// Converts events to lines.
#[derive(Debug)]
pub struct Follower {
    /// The lines.
    pub lines: Lines,
    /// Their statistics.
    pub counts: Counts,
    /// Ticks by which a free may be later than the malloc at its address, if events were lost.
    early: u64,
    waiting: Vec<Event>,
    /// Blocks whose frees were written before they arrived: by address, oldest first. There are
    /// several if several mallocs of an address began before the frees between them did.
    owed: HashMap<u64, VecDeque<Owed>>,
    /// The live blocks.
    live: HashMap<u64, Live>,
    step: Option<u64>,
}

impl Follower {
    /// A follower without any blocks. `early` is in ticks.
    pub fn new(early: u64) -> Follower {
        Follower {
            lines: Lines::default(),
            counts: Counts::default(),
            early,
            waiting: Vec::new(),
            owed: HashMap::new(),
            live: HashMap::new(),
            step: None,
        }
    }

    /// Sets the blocks that were live at the start, or came since; `since`: the events during the
    /// read of the map.
    pub fn begin(&mut self, blocks: &[BlockEntry], since: &[Event]) {
        let came = firsts(since, EventKind::Malloc);
        for block in blocks.iter().filter(|block| !came.contains(&block.address)) {
            self.enter(block);
            self.counts.at_start += 1;
        }
        self.lines.mark(&format!(
            "gruyere record: {} blocks were live at the start",
            self.counts.at_start
        ));
    }

    /// Adds events; [`Follower::apply`] writes their lines.
    pub fn add(&mut self, events: Vec<Event>) {
        self.counts.events += events.len() as u64;
        self.waiting.extend(events);
    }

    /// Counts lost events.
    pub fn lost(&mut self, count: u64) {
        self.counts.lost += count;
    }

    /// Writes the lines of all events whose turn was before `now`, the start of the last read; at
    /// the end of time, all of them.
    pub fn apply(&mut self, now: u64) {
        self.waiting.sort_by_key(|event| event.turn);
        let old = self.waiting.partition_point(|event| event.turn <= now);
        let events: Vec<Event> = self.waiting.drain(..old).collect();
        events.iter().for_each(|event| self.event(event));
    }

    fn event(&mut self, event: &Event) {
        let (address, device) = (event.address, u32::from(event.device));
        match event.kind {
            EventKind::Malloc => {
                if let Some(block) = self.live.get(&address).copied() {
                    self.owed
                        .entry(address)
                        .or_default()
                        .push_back(Owed { block, since: event.time });
                }
                self.begins(address, Live { requested: event.size, device, stream: event.stream });
            }
            EventKind::Free => self.free(event),
            EventKind::RecordStream => {
                self.lines.record_stream(address, stream_name(device, event.stream));
            }
            // Each device reports it.
            EventKind::Step if self.step != Some(event.size) => {
                self.step = Some(event.size);
                self.lines.mark("step");
            }
            _ => {}
        }
    }

    fn free(&mut self, event: &Event) {
        let (address, live) = (event.address, self.live.get(&event.address).copied());
        let mut owed = self.owed.remove(&address).unwrap_or_default();
        // The oldest block that it fits. A free that fits only the live block is that block's, so
        // an owed block's malloc came after it. A free that fits no block has a size that we do not
        // understand.
        let fits = owed.iter().position(|owed| owed.block.is_freed_by(event));
        let is_of_live = fits.is_none() && live.is_some_and(|live| live.is_freed_by(event));
        let paid = owed.remove(fits.unwrap_or(0));
        if !owed.is_empty() {
            self.owed.insert(address, owed);
        }
        // Without losses, the owed free does come. With losses it may be lost, and this may be
        // another.
        let paid = paid.filter(|owed| {
            self.counts.lost == 0 || event.time.saturating_sub(owed.since) < self.early
        });
        if paid.is_some() && !is_of_live {
            return;
        }
        self.live.remove(&address);
        if !self.lines.free(address) {
            self.counts.unknown_frees += 1;
        }
        if let Some(owed) = paid {
            self.begins(address, owed.block);
        }
    }

    fn begins(&mut self, address: u64, block: Live) {
        let Live { requested, device, stream } = block;
        self.lines.malloc(address, requested, device, stream_name(device, stream));
        self.live.insert(address, block);
    }

    /// After lost events, replaces the trace's live blocks by the block map's; `since`: the events
    /// during the read of the map, which are still to be added.
    pub fn mend(&mut self, blocks: &[BlockEntry], since: &[Event]) {
        let touched: HashSet<u64> = since
            .iter()
            .filter(|event| super::is_of_block(event.kind))
            .map(|event| event.address)
            .collect();
        let is_new = |block: &&BlockEntry| {
            !touched.contains(&block.address)
                && self.live.get(&block.address).map(|live| live.requested) != Some(block.requested)
        };
        let new: Vec<BlockEntry> = blocks.iter().filter(is_new).copied().collect();
        let known: HashSet<u64> = blocks.iter().map(|block| block.address).collect();
        let gone = |address: &u64| !known.contains(address) && !touched.contains(address);
        let gone: Vec<u64> = self.lines.live().filter(gone).collect();
        self.lines.mark(&format!(
            "gruyere record: {} events lost until here; {} blocks came and {} went",
            self.counts.lost,
            new.len(),
            gone.len()
        ));
        self.counts.mended += (new.len() + gone.len()) as u64;
        for address in gone {
            self.lines.free(address);
            self.live.remove(&address);
        }
        new.iter().for_each(|block| self.enter(block));
        self.owed.clear();
    }

    fn enter(&mut self, block: &BlockEntry) {
        let BlockEntry { address, requested, stream, .. } = *block;
        self.begins(address, Live { requested, device: u32::from(block.device), stream });
    }
}

/// The addresses whose first event is of this kind.
fn firsts(events: &[Event], kind: EventKind) -> HashSet<u64> {
    let mut firsts: HashMap<u64, EventKind> = HashMap::new();
    for event in events.iter().filter(|event| super::is_of_block(event.kind)) {
        firsts.entry(event.address).or_insert(event.kind);
    }
    firsts.into_iter().filter(|first| first.1 == kind).map(|first| first.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, address: u64, size: u64, time: u64) -> Event {
        Event {
            position: 0,
            kind,
            device: 0,
            lifetime: 0,
            stream: 0,
            address,
            size,
            time,
            turn: time,
        }
    }

    fn block(address: u64, requested: u64) -> BlockEntry {
        BlockEntry { address, requested, size: requested, ..BlockEntry::default() }
    }

    const M: EventKind = EventKind::Malloc;
    const F: EventKind = EventKind::Free;

    #[test]
    fn lines_wait_until_no_older_event_can_come() {
        let mut follower = Follower::new(10);
        follower.add(vec![event(M, 1, 7, 50)]);
        follower.apply(49);
        assert_eq!(follower.lines.take(), "");
        follower.add(vec![
            event(M, 2, 8, 40),
            event(EventKind::Step, 0, 1, 60),
            event(EventKind::Step, 0, 1, 61),
        ]);
        follower.apply(100);
        assert_eq!(follower.lines.take(), "a 1 8 0 0\na 2 7 0 0\nm step\n");
    }

    #[test]
    fn what_was_not_there_at_a_look_happened_after_it() {
        let mut follower = Follower::new(10);
        follower.add(vec![event(M, 1, 600, 2), event(F, 1, 1024, 3)]);
        follower.apply(5);
        // It began first of all, and waited.
        follower.add(vec![event(M, 1, 7, 1)]);
        follower.apply(u64::MAX);
        assert_eq!(follower.lines.take(), "a 1 600 0 0\nf 1\na 2 7 0 0\n");
        assert_eq!(follower.counts, Counts { events: 3, ..Counts::default() });
    }

    #[test]
    fn a_ring_s_events_stay_as_they_are_whenever_their_calls_began() {
        let mut follower = Follower::new(10);
        let late = Event { turn: 6, ..event(M, 1, 7, 1) };
        follower.add(vec![event(M, 1, 600, 2), event(F, 1, 1024, 6), late]);
        follower.apply(u64::MAX);
        assert_eq!(follower.lines.take(), "a 1 600 0 0\nf 1\na 2 7 0 0\n");
    }

    #[test]
    fn a_malloc_that_began_before_the_free_of_the_block_that_was_there_comes_after_it() {
        let mut follower = Follower::new(10);
        follower.add(vec![
            event(M, 1, 7, 1),
            event(M, 1, 8, 5),
            event(F, 1, 7, 6),
            event(F, 1, 8, 9),
        ]);
        follower.apply(u64::MAX);
        assert_eq!(follower.lines.take(), "a 1 7 0 0\nf 1\na 2 8 0 0\nf 2\n");
        assert_eq!(follower.counts, Counts { events: 4, ..Counts::default() });
    }

    #[test]
    fn of_several_mallocs_of_an_address_that_began_early_each_has_its_free() {
        let mut follower = Follower::new(10);
        // In truth each free came before the next malloc, which had begun long before and waited
        // for its lock.
        let mallocs = [(1, 1), (2, 2), (3, 3)].map(|(size, time)| event(M, 1, size, time));
        let frees = [(1, 7), (2, 8), (3, 9)].map(|(size, time)| event(F, 1, size, time));
        follower.add([mallocs, frees].concat());
        follower.apply(u64::MAX);
        assert_eq!(follower.lines.take(), "a 1 1 0 0\nf 1\na 2 2 0 0\nf 2\na 3 3 0 0\nf 3\n");
        assert_eq!(follower.counts, Counts { events: 6, ..Counts::default() });
    }

    #[test]
    fn of_two_mallocs_of_an_address_the_first_to_begin_may_be_the_last_to_come() {
        // In truth 7 bytes came and went, and then 600 came there, on another shard, whose call had
        // begun first and waited.
        let mallocs = [event(M, 1, 600, 1), event(M, 1, 7, 2)];
        let mut follower = Follower::new(10);
        follower.add([&mallocs[..], &[event(F, 1, 512, 3)]].concat());
        follower.apply(u64::MAX);
        assert_eq!(
            follower.lines.take(),
            "a 1 600 0 0\nf 1\na 2 7 0 0\nf 2\na 3 600 0 0\n",
            "600 bytes are live"
        );
        follower.add(vec![event(F, 1, 1024, 9)]);
        follower.apply(u64::MAX);
        assert_eq!(follower.lines.take(), "f 3\n");
        assert_eq!(follower.counts, Counts { events: 4, ..Counts::default() });
        // Three of them: each free belongs to the block that it fits.
        let mut follower = Follower::new(10);
        follower.add(
            [&mallocs[..], &[event(M, 1, 2000, 3), event(F, 1, 512, 4), event(F, 1, 2048, 5)]]
                .concat(),
        );
        follower.apply(u64::MAX);
        assert!(follower.lines.take().ends_with("\nf 3\na 4 600 0 0\n"));
        assert_eq!(follower.counts, Counts { events: 5, ..Counts::default() });
    }

    #[test]
    fn the_start_has_each_live_block_once() {
        let mut follower = Follower::new(10);
        // 1 was there, 2 came during the read of the map, 3 went, 4 went and came again.
        let since =
            vec![event(M, 2, 20, 1), event(F, 3, 30, 2), event(F, 4, 40, 3), event(M, 4, 44, 4)];
        follower.begin(&[block(1, 10), block(2, 20), block(4, 44)], &since);
        follower.add(since);
        follower.apply(u64::MAX);
        let text = follower.lines.take();
        assert_eq!(follower.counts.at_start, 2);
        assert!(text.starts_with("a 1 10 0 0\na 2 44 0 0\nm gruyere record: 2 blocks"), "{text}");
        assert!(text.ends_with("a 3 20 0 0\nf 2\na 4 44 0 0\n"), "{text}");
        assert_eq!(follower.counts.unknown_frees, 1);
    }

    #[test]
    fn after_a_loss_the_live_blocks_are_those_of_the_map() {
        let mut follower = Follower::new(10);
        follower.add(vec![event(M, 1, 10, 1), event(M, 2, 20, 2), event(M, 3, 30, 3)]);
        follower.apply(u64::MAX);
        follower.lines.take();
        follower.lost(5);
        // 1 stays, 2 went and another came there, 3 went, 4 came; 5 comes right now.
        let since = vec![event(M, 5, 50, 9)];
        follower.mend(&[block(1, 10), block(2, 21), block(4, 40), block(5, 50)], &since);
        follower.add(since);
        follower.apply(u64::MAX);
        let text = follower.lines.take();
        assert_eq!(
            text,
            "m gruyere record: 5 events lost until here; 2 blocks came and 1 went\nf 3\nf 2\na 4 \
             21 0 0\na 5 40 0 0\na 6 50 0 0\n"
        );
        assert_eq!((follower.counts.lost, follower.counts.mended), (5, 3));
    }
}
