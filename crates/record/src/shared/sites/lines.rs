//! Memory by line of the program, for views and files.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::{By, Frame, Growth, Place, SiteId, Sites, Usage, fill_from_slabs, usage};
use crate::{BlockEntry, BlockState, DeviceGauge, Reader, SegmentEntry};

/// Lines listed in files and metrics at most.
pub const LISTED: usize = 10;

/// A line of the program and its memory on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Its name in every view.
    pub name: String,
    /// The module of most of it.
    pub module: Option<String>,
    /// Live bytes.
    pub live_bytes: u64,
    /// Live blocks.
    pub live_blocks: u64,
    /// Its growing part.
    pub growth: Option<Growth>,
    /// The site of most of it.
    #[serde(skip)]
    pub site: SiteId,
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
            growth: usage.growth,
            site: usage.site,
        }
    }

    /// Whether `caller` called the line, or the forward of its backward, for most of its memory.
    pub fn is_called_from(&self, caller: &Frame, sites: &Sites) -> bool {
        let Some(site) = sites.get(self.site) else { return false };
        let site = sites.get(site.forward).unwrap_or(site);
        site.line() != Some(caller) && site.frames.contains(caller)
    }
}

/// The live blocks of a device; those in slabs have the sites of their slabs.
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

/// The memory of each line in `blocks`, all live ones of a device whose step is `now`: the `most`
/// largest lines and the `most` fastest growing ones, largest first.
pub fn lines(blocks: &[BlockEntry], sites: &Sites, now: u64, most: usize) -> Vec<Line> {
    let all = usage(blocks, sites, By::Place, now.try_into().unwrap_or(u32::MAX));
    let mut growing: Vec<u64> =
        all.iter().filter_map(|usage| Some(usage.growth?.bytes_a_step)).collect();
    growing.sort_unstable_by_key(|&bytes| Reverse(bytes));
    let least = growing.get(most).copied().unwrap_or(0);
    let is_wanted = |(place, usage): &(usize, &Usage)| {
        *place < most || usage.growth.is_some_and(|growth| growth.bytes_a_step > least)
    };
    all.iter().enumerate().filter(is_wanted).map(|(_, usage)| Line::new(usage, sites)).collect()
}

/// The same from a record. `None`: the record keeps no sites. Reads the whole block map.
pub fn read_lines(reader: &Reader<'_>, device: u32, most: usize) -> Option<Vec<Line>> {
    if !reader.keeps_sites() {
        return None;
    }
    let live = live_blocks(&reader.blocks().entries, &reader.segments().entries, device);
    let step = reader.device(device).map_or(0, |device| device.gauge(DeviceGauge::Step));
    // The sites of all read blocks are published by now: the tables only grow.
    Some(lines(&live, &reader.sites(), step, most))
}

#[cfg(test)]
mod tests {
    use super::super::{Frame, Phase, Site, SiteId};
    use super::*;

    /// Backwards as the native door reports them: the running node is their only frame.
    #[test]
    fn backwards_of_one_line_are_one_and_of_two_lines_are_two() {
        let frame = |file: &str, function: &str, line| Frame {
            file: file.into(),
            function: function.into(),
            line,
        };
        let forward = |line| Site {
            frames: vec![frame("train.py", "step", line)],
            phase: Phase::Forward,
            ..Site::default()
        };
        let backward = |node: &str, forward, module: &str| Site {
            frames: vec![frame("autograd", node, 0)],
            phase: Phase::Backward,
            forward: SiteId(forward),
            module: module.into(),
            ..Site::default()
        };
        let sites = Sites::new([
            forward(10),
            forward(20),
            backward("MmBackward0", 1, "a"),
            backward("AddBackward0", 1, "b"),
            backward("MmBackward0", 2, "c"),
        ]);
        let block = |site, size| BlockEntry { site: SiteId(site), size, ..BlockEntry::default() };
        let blocks = [block(3, 1), block(4, 4), block(5, 3), block(1, 16)];
        let told: Vec<(String, u64, Option<String>)> = lines(&blocks, &sites, 0, 10)
            .into_iter()
            .map(|line| (line.name, line.live_bytes, line.module))
            .collect();
        let line = |name: &str, bytes, module: Option<&str>| {
            (name.to_owned(), bytes, module.map(str::to_owned))
        };
        let expected = [
            line("train.py:10 in step", 16, None),
            line("backward of train.py:10 in step", 5, Some("b")),
            line("backward of train.py:20 in step", 3, Some("c")),
        ];
        assert_eq!(told, expected);
    }
}
