//! Where in the program memory came from, the same in every command: sites as JSON, and what each
//! line holds.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gruyere_record::sites::{
    By, Frame, Growth, NOT_KNOWN, Phase, Place, SiteId, Sites, Usage, fill_from_slabs, usage,
};
use gruyere_record::{BlockEntry, BlockState, DeviceGauge, Reader, SegmentEntry};
use serde_json::{Value, json};

fn frame(frame: &Frame) -> Value {
    json!({ "file": frame.file, "line": frame.line, "function": frame.function })
}

/// What is known of a site; `null` where nothing is.
pub fn value(sites: &Sites, id: SiteId) -> Value {
    let Some(site) = sites.get(id) else { return Value::Null };
    let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    json!({
        "id": id.0,
        "name": sites.place(id).to_string(),
        "module": known(&site.module),
        "phase": site.phase.name(),
        "line": site.line().map(frame),
        "frames": site.frames.iter().map(frame).collect::<Vec<_>>(),
        "forward": sites.get(site.forward).map(|_| site.forward.0),
    })
}

/// Lines that are told at most, in JSON and in metrics.
pub const LISTED: usize = 10;

/// What a line of the program holds on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// As every view writes it.
    pub name: String,
    /// The module that most of it is of.
    pub module: Option<String>,
    /// Live bytes.
    pub bytes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// What of it grows.
    pub growth: Option<Growth>,
}

impl Line {
    fn new(usage: &Usage, sites: &Sites) -> Self {
        let module = match sites.module(usage.site) {
            Place::Module(path) => Some(path.to_owned()),
            _ => None,
        };
        let name = sites.place(usage.site).to_string();
        Self { name, module, bytes: usage.bytes, blocks: usage.blocks, growth: usage.growth }
    }

    /// As JSON; bytes are bytes.
    pub fn value(&self) -> Value {
        let growth = self.growth.map(|growth| {
            json!({
                "bytes_a_step": growth.bytes_a_step,
                "since_step": growth.since,
                "bytes": growth.bytes,
            })
        });
        json!({
            "name": self.name, "module": self.module, "live_bytes": self.bytes,
            "live_blocks": self.blocks, "growth": growth,
        })
    }
}

/// By what lines are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// What they hold.
    #[default]
    Bytes,
    /// What of it grows, by a step; then what they hold.
    Growth,
}

impl Order {
    /// Sorts them, the most first.
    pub fn sort(self, lines: &mut [Line]) {
        let grows = |line: &Line| match self {
            Self::Bytes => 0,
            Self::Growth => line.growth.map_or(0, |growth| growth.bytes_a_step.max(1)),
        };
        lines.sort_by_key(|line| std::cmp::Reverse((grows(line), line.bytes)));
    }
}

/// The live blocks of a device, those in slabs with the sites of their slabs.
pub fn live_blocks(
    blocks: &[(BlockEntry, BlockState)],
    segments: &[SegmentEntry],
    device: u32,
) -> Vec<BlockEntry> {
    let is_live = |(block, state): &(BlockEntry, BlockState)| {
        (u32::from(block.device) == device && *state == BlockState::Live).then_some(*block)
    };
    let mut live: Vec<BlockEntry> = blocks.iter().filter_map(is_live).collect();
    fill_from_slabs(&mut live, segments);
    live
}

/// What each line holds of `blocks`, all live ones of a device whose step is `now`: the `most`
/// that hold most, and the `most` that grow most, the largest first.
pub fn lines(blocks: &[BlockEntry], sites: &Sites, now: u64, most: usize) -> Vec<Line> {
    let all = usage(blocks, sites, By::Line, u32::try_from(now).unwrap_or(u32::MAX));
    let mut growing: Vec<u64> =
        all.iter().filter_map(|usage| Some(usage.growth?.bytes_a_step)).collect();
    growing.sort_unstable_by_key(|&bytes| std::cmp::Reverse(bytes));
    let least = growing.get(most).copied().unwrap_or(0);
    let is_wanted = |(place, usage): &(usize, &Usage)| {
        *place < most || usage.growth.is_some_and(|growth| growth.bytes_a_step > least)
    };
    all.iter().enumerate().filter(is_wanted).map(|(_, usage)| Line::new(usage, sites)).collect()
}

/// The same, read: `None` where the record keeps no sites. It reads the whole block map.
pub fn read_lines(reader: &Reader<'_>, device: u32, most: usize) -> Option<Vec<Line>> {
    if !reader.keeps_sites() {
        return None;
    }
    let live = live_blocks(&reader.blocks().entries, &reader.segments().entries, device);
    let step = reader.device(device).map_or(0, |device| device.gauge(DeviceGauge::Step));
    // What a block says is known by now: the tables of sites only grow.
    Some(lines(&live, &reader.sites(), step, most))
}

/// Between two looks at all blocks, at least; and so many times as long as the last look took:
/// never more than 2% of the time.
const BLOCKS_EVERY: Duration = Duration::from_secs(5);
const REST: u32 = 50;

/// Whether the blocks are to be looked at again, which was done `at` and `took` so long.
pub fn is_due(at: Instant, took: Duration, now: Instant) -> bool {
    now.duration_since(at) >= BLOCKS_EVERY.max(took * REST)
}

/// What lines hold, by record and device, for who looks often: read anew only where it is due.
#[derive(Default)]
pub struct SeldomRead(HashMap<(PathBuf, u32), Look>);

/// When it was read, how long that took, what was found.
type Look = (Instant, Duration, Option<Vec<Line>>);

impl SeldomRead {
    /// As [`read_lines`], of a while ago.
    pub fn lines(&mut self, reader: &Reader<'_>, device: u32, now: Instant) -> Option<&[Line]> {
        let key = (reader.path().to_owned(), device);
        let is_fresh = |(at, took, _): &Look| !is_due(*at, *took, now);
        if !self.0.get(&key).is_some_and(is_fresh) {
            // Those of records that are gone, too.
            self.0.retain(|_, (at, ..)| now.duration_since(*at) < FORGOTTEN);
            let begin = Instant::now();
            let found = read_lines(reader, device, LISTED);
            self.0.insert(key.clone(), (now, begin.elapsed(), found));
        }
        self.0.get(&key)?.2.as_deref()
    }
}

/// Nobody has asked for so long: the record is gone.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Bytes by phase of the blocks that have no lifetime (`auto`).
pub fn auto_by_phase(blocks: &[BlockEntry], sites: &Sites) -> [u64; Phase::ALL.len()] {
    let mut bytes = [0u64; Phase::ALL.len()];
    for block in blocks.iter().filter(|block| block.lifetime == 0) {
        let sum = &mut bytes[sites.phase(block.site) as usize];
        *sum = sum.saturating_add(block.size);
    }
    bytes
}

/// In words what such blocks are; `None` where nothing is known.
pub fn shares_of_phases(bytes: [u64; Phase::ALL.len()]) -> Option<String> {
    let all: f64 = bytes.iter().map(|&bytes| bytes as f64).sum();
    let mut known: Vec<(u64, &str)> =
        Phase::ALL.iter().zip(bytes).skip(1).map(|(phase, bytes)| (bytes, phase.name())).collect();
    known.sort_by_key(|&(bytes, _)| std::cmp::Reverse(bytes));
    let parts = known.into_iter().chain([(bytes[0], NOT_KNOWN)]);
    let told: Vec<String> = parts
        .filter(|&(bytes, _)| bytes > 0)
        .map(|(bytes, name)| format!("{name} {:.0}%", 100.0 * bytes as f64 / all))
        .collect();
    bytes[1..].iter().any(|&bytes| bytes > 0).then(|| told.join(", "))
}
