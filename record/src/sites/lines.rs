//! What the lines of the program hold, for views and files.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::{By, Growth, Place, Sites, Usage, fill_from_slabs, usage};
use crate::{BlockEntry, BlockState, DeviceGauge, Reader, SegmentEntry};

/// Lines that files and metrics tell of at most.
pub const LISTED: usize = 10;

/// What a line of the program holds on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// As every view writes it.
    pub name: String,
    /// The module that most of it is of.
    pub module: Option<String>,
    /// Live bytes.
    pub live_bytes: u64,
    /// Live blocks.
    pub live_blocks: u64,
    /// What of it grows.
    pub growth: Option<LineGrowth>,
}

/// [`Growth`], as files have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineGrowth {
    /// What a step leaves, on average over the steps since, bytes.
    pub bytes_a_step: u64,
    /// The first step that left something.
    pub since_step: u32,
    /// What all of them have left, bytes.
    pub bytes: u64,
}

impl From<Growth> for LineGrowth {
    fn from(growth: Growth) -> Self {
        let Growth { bytes_a_step, since, bytes } = growth;
        Self { bytes_a_step, since_step: since, bytes }
    }
}

impl Line {
    fn new(usage: &Usage, sites: &Sites) -> Self {
        let module = match sites.module(usage.site) {
            Place::Module(path) => Some(path.to_owned()),
            _ => None,
        };
        Self {
            name: sites.place(usage.site).to_string(),
            module,
            live_bytes: usage.bytes,
            live_blocks: usage.blocks,
            growth: usage.growth.map(LineGrowth::from),
        }
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
    growing.sort_unstable_by_key(|&bytes| Reverse(bytes));
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
