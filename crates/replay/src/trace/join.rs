//! A long run: several traces one after the other in one process.

use super::jitter::mixed;
use super::{Damage, Op, Trace, TraceError};
use std::collections::HashMap;

impl Trace {
    /// Joins `pieces` one after the other: blocks and events get new numbers, streams with the same
    /// number are one stream, and the live blocks of a piece are freed, in the order of their
    /// allocation, before the next piece. A mark names each piece.
    ///
    /// # Errors
    /// If there is no piece, or the pieces together have more blocks, events or streams than a
    /// replay can number.
    pub fn joined(name: &str, pieces: &[&Self]) -> Result<Self, TraceError> {
        if pieces.iter().all(|piece| piece.ops.is_empty()) {
            return Err(TraceError::new(0, Damage::Empty));
        }
        let empty = Self {
            name: name.to_owned(),
            ops: Vec::with_capacity(pieces.iter().map(|piece| piece.ops.len()).sum()),
            streams: vec![0],
            marks: Vec::new(),
            ids: Vec::with_capacity(pieces.iter().map(|piece| piece.blocks()).sum()),
            events: 0,
            devices: 1,
            operations: 0,
            peak_live: 0,
        };
        let mut join = Join { trace: empty, streams: HashMap::from([(0, 0)]) };
        for piece in pieces {
            join.piece(piece)?;
        }
        let mut trace = join.trace;
        trace.peak_live = trace.highest_live();
        Ok(trace)
    }
}

/// `count` picks among `of` items, equally often to within one, in an order drawn from `seed`.
pub fn drawn_order(of: usize, count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).map(|index| index % of.max(1)).collect();
    // Fisher and Yates.
    for last in (1..order.len()).rev() {
        let chosen = mixed(mixed(seed) ^ last as u64) % (last as u64 + 1);
        order.swap(last, chosen as usize);
    }
    order
}

struct Join {
    trace: Trace,
    /// Stream numbers to indices.
    streams: HashMap<u64, u16>,
}

impl Join {
    fn piece(&mut self, piece: &Trace) -> Result<(), TraceError> {
        let too_many = |what, most: u64| TraceError::new(0, Damage::TooMany(what, most));
        let (first_block, first_event) = (self.trace.ids.len() as u64, self.trace.events);
        if first_block + piece.blocks() as u64 > u32::MAX.into() {
            return Err(too_many("allocations", u32::MAX.into()));
        }
        self.trace.events = first_event
            .checked_add(piece.events)
            .ok_or_else(|| too_many("events", u32::MAX.into()))?;
        let streams = piece
            .streams
            .iter()
            .map(|&number| self.stream(number))
            .collect::<Result<Vec<_>, _>>()?;
        let first_block = first_block as u32;
        self.mark(&piece.name);
        let first_mark = self.trace.marks.len() as u32;
        self.trace.marks.extend(piece.marks.iter().cloned());
        self.trace.devices = self.trace.devices.max(piece.devices);
        // Identifiers start at 1, as in a file.
        self.trace
            .ids
            .extend((0..piece.blocks() as u64).map(|block| u64::from(first_block) + block + 1));
        let mut live = vec![false; piece.blocks()];
        let new = |stream: u16| streams[stream as usize];
        for &op in &piece.ops {
            let op = match op {
                Op::Alloc { size, block, stream, device } => {
                    live[block as usize] = true;
                    self.trace.operations += 1;
                    Op::Alloc { size, block: first_block + block, stream: new(stream), device }
                }
                Op::Free { block } => {
                    live[block as usize] = false;
                    self.trace.operations += 1;
                    Op::Free { block: first_block + block }
                }
                Op::RecordStream { block, stream } => {
                    Op::RecordStream { block: first_block + block, stream: new(stream) }
                }
                Op::Kernels { count, stream } => Op::Kernels { count, stream: new(stream) },
                Op::EventRecord { event, stream } => {
                    Op::EventRecord { event: first_event + event, stream: new(stream) }
                }
                Op::StreamWait { event, stream } => {
                    Op::StreamWait { event: first_event + event, stream: new(stream) }
                }
                Op::HostWaitEvent { event } => Op::HostWaitEvent { event: first_event + event },
                Op::HostWaitStream { stream } => Op::HostWaitStream { stream: new(stream) },
                Op::HostWaitDevice => Op::HostWaitDevice,
                Op::Step => Op::Step,
                Op::Mark { mark } => Op::Mark { mark: first_mark + mark },
            };
            self.trace.ops.push(op);
        }
        for block in (0..piece.blocks() as u32).filter(|&block| live[block as usize]) {
            self.trace.operations += 1;
            self.trace.ops.push(Op::Free { block: first_block + block });
        }
        Ok(())
    }

    fn mark(&mut self, text: &str) {
        let mark = self.trace.marks.len() as u32;
        self.trace.marks.push(text.to_owned());
        self.trace.ops.push(Op::Mark { mark });
    }

    fn stream(&mut self, number: u64) -> Result<u16, TraceError> {
        if let Some(&stream) = self.streams.get(&number) {
            return Ok(stream);
        }
        let stream = u16::try_from(self.trace.streams.len())
            .map_err(|_| TraceError::new(0, Damage::TooMany("streams", u64::from(u16::MAX) + 1)))?;
        self.trace.streams.push(number);
        self.streams.insert(number, stream);
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(name: &str, text: &str) -> Trace {
        Trace::read(name, text.as_bytes()).expect("a trace")
    }

    fn two() -> [Trace; 2] {
        [
            trace("one", "a 7 1000 0 0\na 3 2048 0 9\ne 4 9\nw 0 4\nk 9 2\nf 3\nm eval\nm step\n"),
            trace("two", "a 1 512 0 5\nr 1 9\ne 1 5\nh e 1\na 2 4096 0 9\nm step\n"),
        ]
    }

    #[test]
    fn identifiers_are_unique_and_everything_is_freed_before_the_next_begins() {
        let [one, two] = two();
        let long = Trace::joined("long", &[&one, &two, &one]).expect("joined");
        assert_eq!(long.ids, [1, 2, 3, 4, 5, 6]);
        let mut live = std::collections::HashSet::new();
        let mut begun = 0;
        for op in &long.ops {
            match *op {
                Op::Alloc { block, .. } => assert!(live.insert(block), "block {block} twice"),
                Op::Free { block } => assert!(live.remove(&block), "block {block} is not live"),
                Op::Mark { mark }
                    if ["one", "two"].contains(&long.marks[mark as usize].as_str()) =>
                {
                    begun += 1;
                    assert!(live.is_empty(), "{live:?} are live where piece {begun} begins");
                }
                _ => {}
            }
        }
        assert!(live.is_empty() && begun == 3);
        assert_eq!(long.operations, 12);
    }

    #[test]
    fn streams_keep_their_numbers_and_events_are_apart() {
        let [one, two] = two();
        let long = Trace::joined("long", &[&one, &two]).expect("joined");
        assert_eq!(long.streams, [0, 9, 5]);
        let events: Vec<_> =
            long.ops.iter().filter(|op| matches!(op, Op::EventRecord { .. })).collect();
        assert_eq!(
            events,
            [&Op::EventRecord { event: 0, stream: 1 }, &Op::EventRecord { event: 1, stream: 2 }]
        );
        assert!(long.ops.contains(&Op::HostWaitEvent { event: 1 }));
        assert!(long.ops.contains(&Op::RecordStream { block: 2, stream: 1 }));
        assert_eq!(
            (long.events, long.marks),
            (2, ["one", "eval", "two"].map(str::to_owned).to_vec())
        );
    }

    #[test]
    fn the_peak_is_the_highest_of_the_pieces() {
        let [one, two] = two();
        let long = Trace::joined("long", &[&one, &two, &one]).expect("joined");
        assert_eq!(long.peak_live, one.peak_live.max(two.peak_live));
    }

    #[test]
    fn nothing_to_join_is_an_error() {
        assert!(Trace::joined("long", &[]).is_err());
    }

    #[test]
    fn an_order_is_even_drawn_from_its_seed_and_no_sequence() {
        let order = drawn_order(7, 50, 1);
        let times = |which| order.iter().filter(|&&piece| piece == which).count();
        assert!((0..7).all(|which| (7..=8).contains(&times(which))), "{order:?}");
        assert_eq!(order, drawn_order(7, 50, 1));
        assert_ne!(order, drawn_order(7, 50, 2));
        assert!(order.windows(7).any(|w| w.iter().enumerate().any(|(i, &p)| w[..i].contains(&p))));
    }
}
