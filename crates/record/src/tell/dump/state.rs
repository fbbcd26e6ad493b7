//! The state of a process's memory in files: dumps at an out-of-memory, and the output of
//! `gruyere snapshot --json`. Described by docs/schema/oom-dump.json.
//!
//! All sizes are in bytes, and all times in nanoseconds since 1970. Blocks are short lists, not
//! objects: there are many.
#![deny(unsafe_code)]

use super::concluded::Conclusion;
use super::origins::Origins;
use crate::facts::{Process, Uses};
use crate::held::{IDLE, LOST, Shares};
use crate::sites::{Frame, SiteId, Sites};
use crate::size::Bytes;
use crate::timeline::TimelineEntry;
use crate::{EventKind, LIFETIME_NAMES, counted, reader, ring};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// [`State::format`].
pub const FORMAT: &str = "gruyere-state";
/// [`State::version`].
pub const VERSION: u32 = 3;
/// The latest events that a dump lists.
pub const MOST_EVENTS: usize = 1 << 15;

/// A process's memory at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Always [`FORMAT`].
    pub format: String,
    /// Rises when a reader of the version before could go wrong.
    pub version: u32,
    /// The version of the library that wrote it.
    pub gruyere: String,
    /// The time of the dump.
    pub time_nanoseconds: u64,
    /// The conclusion, if asked for.
    pub conclusion: Option<Conclusion>,
    /// The process.
    pub process: ProcessState,
    /// The refused request, in the dump of an out-of-memory.
    pub out_of_memory: Option<OutOfMemory>,
    /// The sites of the blocks, by number from 1 on.
    pub sites: Sites,
    /// The process's training, as far as known.
    #[serde(default)]
    pub training: Training,
    /// The devices that the process uses.
    pub devices: Vec<DeviceState>,
    /// The last events.
    pub events: Events,
}

impl State {
    /// The live blocks that the record had no room for, of all devices.
    pub fn all_unrecorded(&self) -> Sum {
        let mut all = Sum::default();
        self.devices.iter().for_each(|device| all.add(device.unrecorded));
        all
    }

    /// What is missing because the record had no room for it, in a sentence.
    pub fn unrecorded(&self) -> Option<String> {
        let all = self.all_unrecorded();
        (all.blocks > 0).then(|| {
            format!(
                "Incomplete: the record had no room for {} ({}). Lists and sums lack them, and may \
                 lack their pages. Its folder was full (GRUYERE_RECORD_DIR names another), or \
                 record_blocks is too low.",
                counted(all.blocks, "live block"),
                Bytes(all.bytes)
            )
        })
    }
}

/// A program's training, as far as its sites show it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// Whether it has made an optimiser.
    pub has_optimizer: bool,
    /// The program's own lines whose forwards have had a backward, callers included.
    pub backward_lines: Vec<Frame>,
}

/// A process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessState {
    /// Its pid.
    pub pid: u64,
    /// Its rank, if it has one.
    pub rank: Option<u64>,
    /// Its rank on this machine.
    pub local_rank: Option<u64>,
    /// The number of ranks.
    pub world_size: Option<u64>,
    /// The machine.
    pub host: String,
    /// Its command line.
    pub command: String,
    /// `GRUYERE_CONF`.
    pub configuration: String,
    /// What the program is made of, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uses: Option<Uses>,
}

impl From<Process> for ProcessState {
    fn from(process: Process) -> Self {
        let Process {
            pid, rank, local_rank, world_size, host, command, configuration, uses, ..
        } = process;
        Self { pid, rank, local_rank, world_size, host, command, configuration, uses }
    }
}

/// A refused request, and the reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OutOfMemory {
    /// The whole text of the exception.
    pub message: String,
    /// Remedies.
    pub advice: Vec<String>,
    /// The device.
    pub device: u32,
    /// Refusals on the device, this one included.
    pub count: u64,
    /// Bytes asked for.
    pub asked_bytes: u64,
    /// The tag of the request.
    pub lifetime: String,
    /// The number of its stream.
    pub stream: u32,
    /// The handle of its stream.
    pub stream_handle: u64,
    /// The training step.
    pub step: u32,
    /// The site of the request.
    pub site: SiteId,
    /// The site that set the ceiling on reserved bytes, if a line of the program did.
    #[serde(default)]
    pub limit_site: SiteId,
    /// The requesting thread's context, a number of its loader's; 0: none.
    pub context: u64,
    /// The requesting thread, as the system names it.
    pub thread: String,
    /// The named pool of the request.
    pub pool: Option<String>,
    /// Whether a capture kept the allocator from asking the driver and waiting.
    pub capturing: bool,
    /// The causes.
    pub cause: Cause,
    /// Each rung of the reclaim ladder, with its uses and gains.
    pub ladder: Vec<Rung>,
}

/// The causes when the request was refused. They overlap: memory held by CUDA graphs may be live,
/// too. [`Held`] counts each byte once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cause {
    /// Physical memory of the device.
    pub total_bytes: u64,
    /// Of it free, by the driver.
    pub free_bytes: Option<u64>,
    /// Taken by others on the device: processes, contexts, libraries with allocators of their own.
    pub others_bytes: Option<u64>,
    /// The ceiling on reserved bytes.
    pub limit_bytes: u64,
    /// Bytes held.
    pub reserved_bytes: u64,
    /// Live blocks.
    pub live_bytes: u64,
    /// Freed by the program, waiting for streams.
    pub pending_bytes: u64,
    /// Held for CUDA graphs.
    pub captured_bytes: u64,
    /// Held by named pools.
    pub pooled_bytes: u64,
    /// Free, on pages shared with blocks.
    pub partly_used_bytes: u64,
    /// The largest request that held memory could satisfy.
    pub largest_request_bytes: u64,
    /// Held because the driver refused to take it back.
    pub orphaned_bytes: u64,
}

/// A rung of the reclaim ladder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rung {
    /// Its name.
    pub name: String,
    /// Uses since the process began.
    pub all: RungUse,
    /// Uses for this request; `None`: the ladder was not tried for it.
    pub this_time: Option<RungUse>,
}

/// Uses of a rung.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RungUse {
    /// Times tried.
    pub calls: u64,
    /// Bytes gained.
    pub bytes: u64,
    /// Host time in it.
    pub nanoseconds: u64,
}

/// A device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceState {
    /// Its number in the process.
    pub device: u32,
    /// The driver's name for it.
    pub name: String,
    /// Its physical memory.
    pub total_bytes: u64,
    /// The ceiling on reserved bytes.
    pub limit_bytes: u64,
    /// The highest live bytes.
    pub live_peak_bytes: u64,
    /// The highest reserved bytes.
    pub reserved_peak_bytes: u64,
    /// The training step.
    pub step: u64,
    /// Shares of lost, idle and unused memory, in the words of every command.
    pub shares: Shares,
    /// Held bytes by use, each counted once.
    pub held: Held,
    /// The live blocks by common properties.
    pub live: Live,
    /// The gauges of the record, if it is on.
    pub gauges: BTreeMap<String, u64>,
    /// The course of the run.
    pub timeline: Vec<Stretch>,
    /// The memory by address.
    pub segments: Vec<Segment>,
    /// Small blocks merged into others, because there were too many.
    pub merged_blocks: u64,
    /// Blocks and segments that could not be read whole.
    pub torn: u64,
    /// Live blocks that the record had no room for: no other sum and no segment has them.
    #[serde(default)]
    pub unrecorded: Sum,
    /// Addresses of live blocks that were sent to other processes.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub sent: BTreeSet<u64>,
}

impl DeviceState {
    /// Whether the process holds or held memory on it.
    pub fn is_used(&self) -> bool {
        let most = self.reserved_peak_bytes.max(self.live_peak_bytes);
        most.max(self.held.reserved_bytes).max(self.live.all.bytes) > 0
    }

    /// The live blocks that were sent to other processes.
    pub fn sent(&self) -> Sum {
        let mut sent = Sum::default();
        for segment in &self.segments {
            let mut at = segment.address;
            for block in &segment.blocks {
                if block.1 == BlockKind::Live && self.sent.contains(&at) {
                    sent.add(Sum { blocks: 1, bytes: block.0, requested_bytes: block.2 });
                }
                at = at.saturating_add(block.0);
            }
        }
        sent
    }

    /// The live blocks by the step of their allocation, if known.
    pub fn live_by_step(&self) -> BTreeMap<u64, Sum> {
        let mut steps: BTreeMap<u64, Sum> = BTreeMap::new();
        for block in self.segments.iter().flat_map(|segment| &segment.blocks) {
            if let (BlockKind::Live, Some(step)) = (block.1, block.5) {
                let sum = Sum { blocks: 1, bytes: block.0, requested_bytes: block.2 };
                steps.entry(step.into()).or_default().add(sum);
            }
        }
        steps
    }

    /// Live bytes at the peak of each step of the timeline.
    pub fn peaks_by_step(&self) -> BTreeMap<u64, u64> {
        let mut peaks: BTreeMap<u64, u64> = BTreeMap::new();
        for stretch in &self.timeline {
            let peak = peaks.entry(stretch.step).or_default();
            *peak = (*peak).max(self.peak_of(stretch));
        }
        peaks
    }

    /// Live bytes at the peak of a stretch. A look sees the live bytes of its moment only, and a
    /// step that needs no memory from the driver has one look, at its end. The bytes in use have
    /// the peak between looks too, with the free slots of slabs; more than the exact peak of the
    /// run was never live.
    pub fn peak_of(&self, stretch: &Stretch) -> u64 {
        stretch.live_high_bytes.max(stretch.in_use_high_bytes.min(self.live_peak_bytes))
    }
}

/// Held bytes by use: `reserved_bytes` is the sum of the others, unless another thread allocates
/// meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The sum.
    pub reserved_bytes: u64,
    /// Live blocks, each rounded up to 512 B.
    pub live_bytes: u64,
    /// Freed by the program, waiting for streams.
    pub pending_bytes: u64,
    /// In slabs that have blocks: free slots, and the ends of slots and slabs.
    pub slab_free_bytes: u64,
    /// Free, on pages shared with blocks.
    pub between_bytes: u64,
    /// Free whole pages.
    pub whole_pages_bytes: u64,
    /// Free, and kept for CUDA graphs.
    pub captured_free_bytes: u64,
    /// Free, and kept for named pools.
    pub pooled_free_bytes: u64,
    /// Mapped nowhere.
    pub unmapped_bytes: u64,
    /// Held because the driver refused to take it back.
    pub orphaned_bytes: u64,
    /// Ends of spans too short for a page, and unexplained bytes.
    pub rest_bytes: u64,
}

impl Held {
    /// The parts with their descriptions.
    pub fn parts(&self) -> [(&'static str, u64); 9] {
        [
            ("live", self.live_bytes),
            ("freed, waiting for streams", self.pending_bytes),
            (LOST, self.slab_free_bytes.saturating_add(self.between_bytes)),
            (IDLE, self.whole_pages_bytes),
            ("free, kept for CUDA graphs", self.captured_free_bytes),
            ("free, kept for named pools", self.pooled_free_bytes),
            ("mapped nowhere", self.unmapped_bytes),
            ("not taken back by the driver", self.orphaned_bytes),
            ("the rest", self.rest_bytes),
        ]
    }
}

/// A number of blocks and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    /// Number of blocks.
    pub blocks: u64,
    /// Their bytes, each rounded up to 512.
    pub bytes: u64,
    /// Bytes asked for by the program.
    pub requested_bytes: u64,
}

impl Sum {
    /// Adds `other`.
    pub fn add(&mut self, other: Sum) {
        // Saturating: the numbers may come from a record.
        self.blocks = self.blocks.saturating_add(other.blocks);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.requested_bytes = self.requested_bytes.saturating_add(other.requested_bytes);
    }
}

/// A class of live blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Class {
    /// By size: the power of two that no block of it exceeds; by age: the most steps ago; else the
    /// step's or stream's number.
    pub class: u64,
    /// The blocks.
    #[serde(flatten)]
    pub sum: Sum,
}

/// The live blocks by common properties. Each list counts every live block once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Live {
    /// All live blocks.
    pub all: Sum,
    /// Live blocks by lifetime.
    pub lifetimes: BTreeMap<String, Sum>,
    /// Live blocks by size.
    pub sizes: Vec<Class>,
    /// By step of allocation: the steps with the most bytes.
    pub steps: Vec<Class>,
    /// Of other steps, or of unknown step.
    pub other_steps: Sum,
    /// By age in steps, if known.
    pub ages: Vec<Class>,
    /// Live blocks by stream.
    pub streams: Vec<Class>,
    /// The largest blocks.
    pub largest: Vec<Largest>,
}

/// A live block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Largest {
    /// Its address.
    pub address: u64,
    /// Bytes that the program asked for.
    pub requested_bytes: u64,
    /// Its lifetime.
    pub lifetime: String,
    /// The number of its stream.
    pub stream: u32,
    /// The step of its allocation.
    pub step: Option<u32>,
}

/// A device's memory between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stretch {
    /// End of the stretch.
    pub time_nanoseconds: u64,
    /// The training step of its highest memory.
    pub step: u64,
    /// Lowest live bytes at any look.
    pub live_low_bytes: u64,
    /// Highest live bytes at any look.
    pub live_high_bytes: u64,
    /// Highest bytes of blocks above 16 KiB and slabs.
    pub in_use_high_bytes: u64,
    /// Highest bytes held.
    pub reserved_high_bytes: u64,
    /// The lowest largest satisfiable request.
    pub largest_low_bytes: u64,
    /// Highest bytes waiting for streams.
    pub pending_high_bytes: u64,
}

/// Stretches per device in a file, at most.
pub const MOST_STRETCHES: usize = 512;

/// A timeline in at most [`MOST_STRETCHES`], oldest first.
pub fn timeline(entries: &[TimelineEntry]) -> Vec<Stretch> {
    let together = entries.len().div_ceil(MOST_STRETCHES).max(1);
    let stretch = |entries: &[TimelineEntry]| {
        let last = entries.last()?;
        let samples = entries.iter().map(|entry| entry.sample);
        let sample = samples.reduce(|earlier, later| earlier.and(later))?;
        Some(Stretch {
            time_nanoseconds: last.realtime_nanoseconds,
            step: sample.step,
            live_low_bytes: sample.live_low,
            live_high_bytes: sample.live_high,
            in_use_high_bytes: sample.in_use_high,
            reserved_high_bytes: sample.reserved_high,
            largest_low_bytes: sample.largest_low,
            pending_high_bytes: sample.pending_high,
        })
    };
    entries.chunks(together).filter_map(stretch).collect()
}

/// A contiguous range of memory held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The owner: the name of a lifetime, `captured`, `pool NAME`, `orphaned`, `direct`.
    pub holder: String,
    /// torch's id of the capture pool.
    pub pool_id: (u64, u64),
    /// Whether it may grow and shrink page by page.
    pub stitched: bool,
    /// Whether it serves small blocks only.
    pub small: bool,
    /// The blocks that tile the segment, by address.
    pub blocks: Vec<Block>,
}

/// Kind of a block.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum BlockKind {
    /// Free.
    #[default]
    Free,
    /// Held by the program.
    Live,
    /// Freed by the program, waiting for streams.
    Pending,
}

/// A piece of a segment: bytes, kind, bytes asked for, the lifetime's number, the stream, the step,
/// the site.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block(
    /// Length.
    pub u64,
    /// Its kind.
    pub BlockKind,
    /// Bytes that the program asked for.
    pub u64,
    /// The lifetime's number.
    pub u8,
    /// The stream: its handle in a dump, its number if read from outside.
    pub u64,
    /// The step of its allocation.
    pub Option<u32>,
    /// The site of its allocation.
    pub SiteId,
);

/// The last events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Events before the first in `entries`, and lost ones.
    pub earlier: u64,
    /// The events, by time.
    pub entries: Vec<Event>,
}

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The time of the event.
    pub time_nanoseconds: u64,
    /// Its kind.
    pub kind: String,
    /// The device.
    pub device: u8,
    /// The address.
    pub address: u64,
    /// Bytes; for a wait, nanoseconds; for a step, its number.
    pub size: u64,
    /// The number of the stream.
    pub stream: u32,
    /// The lifetime's name.
    pub lifetime: String,
    /// For an out-of-memory: the site of the request.
    #[serde(default, skip_serializing_if = "SiteId::is_none")]
    pub site: SiteId,
}

impl Event {
    /// Whether it is of this kind.
    pub fn is(&self, kind: EventKind) -> bool {
        self.kind == kind.name()
    }

    /// Whether it is a request for memory, served or refused.
    pub fn is_request(&self) -> bool {
        self.is(EventKind::Malloc) || self.is(EventKind::OutOfMemory)
    }
}

/// The last request, if refused: the end of a program that died of it.
pub fn last_refused(events: &[Event]) -> Option<&Event> {
    let last = events.iter().rev().find(|event| event.is_request());
    last.filter(|event| event.is(EventKind::OutOfMemory))
}

/// The name of a lifetime's number, which may be out of range.
pub fn lifetime_name(number: u8) -> String {
    LIFETIME_NAMES.get(number as usize).copied().unwrap_or("?").to_owned()
}

/// The latest `most` events of a record; `origins` numbers their sites.
pub fn events(reader: &reader::Reader<'_>, most: usize, origins: &mut Origins) -> Events {
    let mut found = reader.events(&mut reader::Cursor::default());
    let Some(scale) = reader.scale() else {
        return Events {
            earlier: found.lost.saturating_add(found.entries.len() as u64),
            entries: Vec::new(),
        };
    };
    let excess = found.entries.len().saturating_sub(most);
    let mut entry = |event: ring::Event| {
        let (address, site) = match event.kind {
            EventKind::OutOfMemory => {
                (0, u32::try_from(event.address).map_or(SiteId::OTHER, SiteId))
            }
            _ => (event.address, SiteId::NONE),
        };
        Event {
            time_nanoseconds: scale.realtime(event.time),
            kind: event.kind.name().to_owned(),
            device: event.device,
            address,
            size: event.size,
            stream: event.stream,
            lifetime: lifetime_name(event.lifetime),
            site: origins.number(site),
        }
    };
    let entries = found.entries.drain(excess..).map(&mut entry);
    Events { earlier: found.lost.saturating_add(excess as u64), entries: entries.collect() }
}
