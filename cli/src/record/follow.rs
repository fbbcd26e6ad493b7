//! Events of a record in the order in which they are lines of a trace.
//!
//! Each lane of the heap has a ring of its own, and an event's time is that of the call's beginning. So lines are written some time after their events, when
//! no older ones can come any more; and of a free and a malloc at one address on two threads, the malloc may have begun first: then the free
//! that is missing is written before it, and passed over when it comes.
#![deny(unsafe_code)]

use std::collections::{HashMap, HashSet, VecDeque};

use gruyere::record::ring::Event;
use gruyere::record::trace::{Lines, stream_name};
use gruyere::record::{BlockEntry, EventKind};

/// What happened to a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Events read.
    pub events: u64,
    /// Events that the rings did not have any more.
    pub lost: u64,
    /// Blocks that came or went by lost events, by the block map.
    pub mended: u64,
    /// Frees of blocks that the trace does not know.
    pub unknown_frees: u64,
    /// Blocks that were live at the start.
    pub at_start: u64,
}

/// Turns events into lines.
#[derive(Debug)]
pub struct Follower {
    /// The lines.
    pub lines: Lines,
    /// What happened to them.
    pub tally: Tally,
    /// Ticks after which no older event comes any more.
    delay: u64,
    /// Ticks by which a free may be later than the malloc at its address, where events were lost.
    early: u64,
    waiting: Vec<Event>,
    /// Frees that were written before they came: when, by address, the oldest first. Several, where several mallocs of one address began before
    /// the frees between them did.
    owed: HashMap<u64, VecDeque<u64>>,
    /// What the live blocks were asked for.
    sizes: HashMap<u64, u64>,
    step: Option<u64>,
}

impl Follower {
    /// Nothing is known yet. Both times are in ticks.
    pub fn new(delay: u64, early: u64) -> Follower {
        Follower {
            lines: Lines::default(),
            tally: Tally::default(),
            delay,
            early,
            waiting: Vec::new(),
            owed: HashMap::new(),
            sizes: HashMap::new(),
            step: None,
        }
    }

    /// The blocks that were live at the start, or came since; `since`: the events that came while they were looked at.
    pub fn begin(&mut self, blocks: &[BlockEntry], since: &[Event]) {
        let came = firsts(since, EventKind::Malloc);
        for block in blocks.iter().filter(|block| !came.contains(&block.address)) {
            self.enter(block);
            self.tally.at_start += 1;
        }
        self.lines.mark(&format!("gruyere record: {} blocks were live at the start", self.tally.at_start));
    }

    /// Adds events; their lines come with [`Follower::apply`].
    pub fn add(&mut self, events: Vec<Event>) {
        self.tally.events += events.len() as u64;
        self.waiting.extend(events);
    }

    /// Events were lost.
    pub fn lost(&mut self, count: u64) {
        self.tally.lost += count;
    }

    /// Writes the lines of what is old enough at `now`; of everything, at the end of time.
    pub fn apply(&mut self, now: u64) {
        self.waiting.sort_by_key(|event| event.time);
        let old = self.waiting.partition_point(|event| event.time.saturating_add(self.delay) <= now);
        let events: Vec<Event> =
            self.waiting.drain(..if now == u64::MAX { self.waiting.len() } else { old }).collect();
        events.iter().for_each(|event| self.event(event));
    }

    fn event(&mut self, event: &Event) {
        let (address, device) = (event.address, u32::from(event.device));
        match event.kind {
            EventKind::Malloc => {
                if self.lines.is_live(address) {
                    self.owed.entry(address).or_default().push_back(event.time);
                }
                self.lines.malloc(address, event.size, device, stream_name(device, event.stream));
                self.sizes.insert(address, event.size);
            }
            EventKind::Free => {
                let owed = self.owed.get_mut(&address).and_then(VecDeque::pop_front);
                // Where nothing was lost, the free that is owed does come. Else it may have been lost, and this is another.
                if owed.is_some_and(|since| {
                    self.tally.lost == 0 || event.time.saturating_sub(since) < self.early
                }) {
                    return;
                }
                self.sizes.remove(&address);
                if !self.lines.free(address) {
                    self.tally.unknown_frees += 1;
                }
            }
            EventKind::RecordStream => {
                self.lines.record_stream(address, stream_name(device, event.stream));
            }
            // Each device tells of it.
            EventKind::Step if self.step != Some(event.size) => {
                self.step = Some(event.size);
                self.lines.mark("step");
            }
            _ => {}
        }
    }

    /// Makes the live blocks of the trace those of the block map, after events were lost; `since`: the events that came while the map was looked
    /// at, which are still to be added.
    pub fn mend(&mut self, blocks: &[BlockEntry], since: &[Event]) {
        let touched: HashSet<u64> =
            since.iter().filter(|event| super::is_of_block(event.kind)).map(|event| event.address).collect();
        let is_new = |block: &&BlockEntry| {
            !touched.contains(&block.address) && self.sizes.get(&block.address) != Some(&block.requested)
        };
        let new: Vec<BlockEntry> = blocks.iter().filter(is_new).copied().collect();
        let known: HashSet<u64> = blocks.iter().map(|block| block.address).collect();
        let gone = |address: &u64| !known.contains(address) && !touched.contains(address);
        let gone: Vec<u64> = self.lines.live().filter(gone).collect();
        self.lines.mark(&format!(
            "gruyere record: {} events lost until here; {} blocks came and {} went",
            self.tally.lost,
            new.len(),
            gone.len()
        ));
        self.tally.mended += (new.len() + gone.len()) as u64;
        for address in gone {
            self.lines.free(address);
            self.sizes.remove(&address);
        }
        new.iter().for_each(|block| self.enter(block));
        self.owed.clear();
    }

    fn enter(&mut self, block: &BlockEntry) {
        let device = u32::from(block.device);
        self.lines.malloc(block.address, block.requested, device, stream_name(device, block.stream));
        self.sizes.insert(block.address, block.requested);
    }
}

/// The addresses of which the first event is of this kind.
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
        Event { position: 0, kind, device: 0, lifetime: 0, stream: 0, address, size, time, turn: time }
    }

    fn block(address: u64, requested: u64) -> BlockEntry {
        BlockEntry { address, requested, size: requested, ..BlockEntry::default() }
    }

    const M: EventKind = EventKind::Malloc;
    const F: EventKind = EventKind::Free;

    #[test]
    fn lines_wait_until_no_older_event_can_come() {
        let mut follower = Follower::new(100, 10);
        follower.add(vec![event(M, 1, 7, 50)]);
        follower.apply(149);
        assert_eq!(follower.lines.take(), "");
        follower.add(vec![
            event(M, 2, 8, 40),
            event(EventKind::Step, 0, 1, 60),
            event(EventKind::Step, 0, 1, 61),
        ]);
        follower.apply(200);
        assert_eq!(follower.lines.take(), "a 1 8 0 0\na 2 7 0 0\nm step\n");
    }

    #[test]
    fn a_malloc_that_began_before_the_free_of_the_block_that_was_there_comes_after_it() {
        let mut follower = Follower::new(0, 10);
        follower.add(vec![event(M, 1, 7, 1), event(M, 1, 8, 5), event(F, 1, 7, 6), event(F, 1, 8, 9)]);
        follower.apply(u64::MAX);
        assert_eq!(follower.lines.take(), "a 1 7 0 0\nf 1\na 2 8 0 0\nf 2\n");
        assert_eq!(follower.tally, Tally { events: 4, ..Tally::default() });
    }

    #[test]
    fn of_several_mallocs_of_an_address_that_began_early_each_has_its_free() {
        let mut follower = Follower::new(0, 10);
        // In truth each free came before the next malloc, which had begun long before and was kept from its lock.
        let mallocs = [(1, 1), (2, 2), (3, 3)].map(|(size, time)| event(M, 1, size, time));
        let frees = [(1, 7), (2, 8), (3, 9)].map(|(size, time)| event(F, 1, size, time));
        follower.add([mallocs, frees].concat());
        follower.apply(u64::MAX);
        assert_eq!(follower.lines.take(), "a 1 1 0 0\nf 1\na 2 2 0 0\nf 2\na 3 3 0 0\nf 3\n");
        assert_eq!(follower.tally, Tally { events: 6, ..Tally::default() });
    }

    #[test]
    fn the_start_has_each_live_block_once() {
        let mut follower = Follower::new(0, 10);
        // 1 was there, 2 came while the map was read, 3 went, 4 went and came again.
        let since = vec![event(M, 2, 20, 1), event(F, 3, 30, 2), event(F, 4, 40, 3), event(M, 4, 44, 4)];
        follower.begin(&[block(1, 10), block(2, 20), block(4, 44)], &since);
        follower.add(since);
        follower.apply(u64::MAX);
        let text = follower.lines.take();
        assert_eq!(follower.tally.at_start, 2);
        assert!(text.starts_with("a 1 10 0 0\na 2 44 0 0\nm gruyere record: 2 blocks"), "{text}");
        assert!(text.ends_with("a 3 20 0 0\nf 2\na 4 44 0 0\n"), "{text}");
        assert_eq!(follower.tally.unknown_frees, 1);
    }

    #[test]
    fn after_a_loss_the_live_blocks_are_those_of_the_map() {
        let mut follower = Follower::new(0, 10);
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
            "m gruyere record: 5 events lost until here; 2 blocks came and 1 went\nf 3\nf 2\na 4 21 0 0\na 5 40 0 0\na 6 50 0 0\n"
        );
        assert_eq!((follower.tally.lost, follower.tally.mended), (5, 3));
    }
}
