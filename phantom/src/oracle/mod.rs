//! The oracle: judges whether the allocator keeps the order of streams.
//!
//! The harness tells it of blocks ([`crate::Gpu::block_malloc`] after the allocator's malloc has
//! returned, [`crate::Gpu::block_free`] before the allocator's free is called,
//! [`crate::Gpu::block_record_stream`]); launches, event records, waits, host synchronisations,
//! pool calls and mappings it sees as they are made. It never looks at virtual time: what merely
//! happens to be done is not in order; only what the program or the allocator made sure of is.
//!
//! **Positions.** A stream is a sequence of positions; each launch and each free takes the next
//! one. A *free* means: the last possible use of the block is now, on its stream and on each stream
//! recorded on it. So an event proves a free only if it was recorded after it.
//!
//! **Clocks.** Each stream has a vector clock: the positions of other streams that come before its
//! next work. An event carries the clock of its stream at its record; a stream that waits for it
//! joins it. The host has one too, joined whenever the host has waited for an event, stream or
//! device, or has asked and heard yes: work enqueued from then on, on any stream, comes after all
//! of it, since it is done. (One clock for all host threads: they are taken to talk to each other.)
//!
//! **Bytes.** What the last uses of a byte were is kept by physical byte, so that remapping and
//! aliases change nothing, and for mappings by address as well, since unmapping an address is
//! judged by the work that went through that address. A pool orders its memory itself: what it
//! takes back must be in order before the free on that stream, and what it hands out is usable in
//! the order of the allocation's stream only.

mod blocks;
mod clock;
mod content;
mod driver;
mod fault;
mod graphs;
mod intervals;
mod touches;

use rustc_hash::FxHashMap;

pub use fault::{Fault, StreamName, Taker};

pub(crate) use clock::Clock;

use crate::streams::{StreamKey, Streams};
use blocks::Block;
pub(crate) use blocks::NewBlock;
use content::{Content, Use};
pub(crate) use driver::Taken;
use graphs::Group;
use intervals::Intervals;
pub(crate) use touches::Kernel;
use touches::Touches;

/// Faults kept; more are only counted.
const KEPT: usize = 10_000;

#[derive(Debug)]
struct Watched {
    name: StreamName,
    clock: Clock,
    destroyed: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Oracle {
    streams: Vec<Watched>,
    /// Streams of each device on which work may be that the host does not know to be done.
    open: Vec<Vec<StreamKey>>,
    host: Clock,
    blocks: FxHashMap<u64, Block>,
    physical: Intervals<Content>,
    mapped: Intervals<Content>,
    /// The group of each capture that ever was.
    captures: FxHashMap<u64, u64>,
    groups: FxHashMap<u64, Group>,
    /// What streams knew before a capture; captured waits order nothing outside of it.
    before_capture: FxHashMap<StreamKey, Clock>,
    faults: Vec<Fault>,
    fault_count: u64,
    pub(crate) touches: Touches,
    /// Faults are printed as they are found.
    pub(crate) loud: bool,
}

impl Oracle {
    /// Makes the acquaintance of streams that are new.
    pub(crate) fn meet(&mut self, streams: &Streams) {
        while self.streams.len() < streams.len() {
            let key = self.streams.len() as StreamKey;
            let stream = streams.get(key);
            let name =
                StreamName { id: u64::from(key) + 1, handle: stream.handle, device: stream.device };
            self.streams.push(Watched { name, clock: Clock::default(), destroyed: false });
            let device = stream.device as usize;
            if self.open.len() <= device {
                self.open.resize_with(device + 1, Vec::new);
            }
            self.open[device].push(key);
        }
    }

    fn name(&self, key: StreamKey) -> StreamName {
        self.streams[key as usize].name
    }

    fn clock(&mut self, key: StreamKey) -> &mut Clock {
        &mut self.streams[key as usize].clock
    }

    /// Takes the next position of a stream. A destroyed one gets no more work: it stays where it
    /// is.
    pub(crate) fn advance(&mut self, key: StreamKey) -> Use {
        let stream = &mut self.streams[key as usize];
        let mut position = stream.clock.of(key);
        if !stream.destroyed {
            position += 1;
            stream.clock.raise(key, position);
        }
        Use { stream: key, position }
    }

    /// The last work of a stream.
    pub(crate) fn last_use(&self, key: StreamKey) -> Use {
        Use { stream: key, position: self.streams[key as usize].clock.of(key) }
    }

    /// Later work of `key` comes after all work of `other` so far.
    pub(crate) fn follow(&mut self, key: StreamKey, other: StreamKey) {
        let clock = std::mem::take(self.clock(other));
        self.clock(key).join(&clock);
        *self.clock(other) = clock;
    }

    /// Later work of `key` comes after what an event stands for.
    pub(crate) fn wait(&mut self, key: StreamKey, event: &Clock) {
        self.clock(key).join(event);
    }

    /// An event is recorded on `key`.
    pub(crate) fn record(&mut self, key: StreamKey, event: &mut Clock) {
        event.assign(self.clock(key));
    }

    /// An event is recorded behind all work of `device`.
    pub(crate) fn record_device(&mut self, device: u32, event: &mut Clock) {
        *event = Clock::default();
        for &key in self.open.get(device as usize).into_iter().flatten() {
            event.join(&self.streams[key as usize].clock);
        }
    }

    /// The host knows that what an event stands for is done.
    pub(crate) fn host_saw(&mut self, event: &Clock) {
        self.host.join(event);
    }

    /// The host knows that everything on `key` is done.
    pub(crate) fn host_saw_stream(&mut self, key: StreamKey) {
        self.host.join(&self.streams[key as usize].clock);
    }

    /// The host knows that everything on `device` is done.
    pub(crate) fn host_saw_device(&mut self, device: u32) {
        let Some(open) = self.open.get_mut(device as usize) else { return };
        for &key in open.iter() {
            self.host.join(&self.streams[key as usize].clock);
        }
        open.retain(|&key| !self.streams[key as usize].destroyed);
    }

    pub(crate) fn destroyed(&mut self, key: StreamKey) {
        self.streams[key as usize].destroyed = true;
    }

    /// A use on another stream comes before new work of `key`.
    fn is_before(&self, past: Use, key: StreamKey) -> bool {
        past.stream == key
            || self.host.of(past.stream) >= past.position
            || self.streams[key as usize].clock.of(past.stream) >= past.position
    }

    /// The host knows that a use is over.
    fn is_over(&self, past: Use) -> bool {
        self.host.of(past.stream) >= past.position
    }

    pub(crate) fn report(&mut self, fault: Fault) {
        self.fault_count += 1;
        if self.loud {
            eprintln!("phantom oracle: {fault}");
        }
        if self.faults.len() < KEPT {
            self.faults.push(fault);
        }
    }

    /// The allocator called what it must not call while `key` captures.
    pub(crate) fn report_capturing(&mut self, call: &'static str, key: StreamKey, capture: u64) {
        let stream = self.name(key);
        self.report(Fault::Capturing { call, stream, capture });
    }

    pub(crate) fn faults(&self) -> &[Fault] {
        &self.faults
    }

    pub(crate) fn fault_count(&self) -> u64 {
        self.fault_count
    }

    pub(crate) fn take_faults(&mut self) -> Vec<Fault> {
        self.fault_count = 0;
        std::mem::take(&mut self.faults)
    }

    pub(crate) fn live_blocks(&self) -> usize {
        self.blocks.len()
    }
}

/// One fault about a pair of blocks says enough, however many pieces of them it was found in.
fn push_of_block(faults: &mut Vec<Fault>, fault: Fault) {
    let pair = |fault: &Fault| match *fault {
        Fault::HandedOutBusy { block, previous, on, .. }
        | Fault::Race { block, previous, on, .. } => (block, previous, on.id),
        Fault::TakenUnderWork { block, on, .. } => (0, block.unwrap_or(0), on.id),
        _ => (0, 0, 0),
    };
    let is_same = |known: &Fault| {
        std::mem::discriminant(known) == std::mem::discriminant(&fault)
            && pair(known) == pair(&fault)
    };
    if !faults.iter().any(is_same) {
        faults.push(fault);
    }
}
