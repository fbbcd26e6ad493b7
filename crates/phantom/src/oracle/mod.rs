//! The oracle: checks that the allocator keeps the order of streams.
//!
//! The harness reports blocks ([`crate::Gpu::block_malloc`] after the allocator's malloc returns,
//! [`crate::Gpu::block_free`] before the allocator's free, [`crate::Gpu::block_record_stream`]);
//! the oracle sees launches, event records, waits, host synchronisations, pool calls and mappings
//! itself. It ignores virtual time: work that merely happens to be done is not ordered; only the
//! program or the allocator can order it.
//!
//! **Positions.** A stream is a sequence of positions; each launch and each free takes the next
//! one. A *free* marks the last possible use of the block, on its stream and on each stream
//! recorded on it. So an event proves a free only if recorded after it.
//!
//! **Clocks.** Each stream has a vector clock: the positions of other streams that come before its
//! next work. An event carries the clock of its stream at its record; a stream that waits for the
//! event joins that clock. The host has a clock too; it joins whenever the host waits for an event,
//! stream or device, or a query returns done: later work on any stream comes after all of that,
//! since it is done. (All host threads share one clock: the oracle assumes that they synchronise.)
//!
//! **Bytes.** The oracle keeps the last uses by physical byte, so that remapping and aliases change
//! nothing; for mappings also by address, since it judges an unmap by the work through that
//! address. A pool orders its memory itself: uses of memory that it takes back must be ordered
//! before the free on that stream, and memory that it hands out is usable only in the order of the
//! allocation's stream.

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

/// Faults kept; further ones are only counted.
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
    /// Streams of each device with work that the host may not know to be done.
    open: Vec<Vec<StreamKey>>,
    host: Clock,
    blocks: FxHashMap<u64, Block>,
    physical: Intervals<Content>,
    mapped: Intervals<Content>,
    /// The group of every capture so far.
    captures: FxHashMap<u64, u64>,
    groups: FxHashMap<u64, Group>,
    /// Clocks of streams from before a capture; captured waits order nothing outside it.
    before_capture: FxHashMap<StreamKey, Clock>,
    faults: Vec<Fault>,
    fault_count: u64,
    pub(crate) touches: Touches,
    /// Print faults as they are found.
    pub(crate) loud: bool,
}

impl Oracle {
    /// Adds new streams.
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

    /// Takes the next position of a stream. A destroyed stream gets no more work and keeps its
    /// position.
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

    /// Later work of `key` comes after the work behind an event.
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

    /// The host knows that the work behind an event is done.
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

    /// Whether a use on another stream comes before new work of `key`.
    fn is_before(&self, past: Use, key: StreamKey) -> bool {
        past.stream == key
            || self.host.of(past.stream) >= past.position
            || self.streams[key as usize].clock.of(past.stream) >= past.position
    }

    /// Whether the host knows that a use is over.
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

    /// The allocator made a call that is forbidden while `key` captures.
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

/// Adds one fault per pair of blocks, for any number of their pieces.
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
