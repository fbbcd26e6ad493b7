//! The course of the run: what is live at the end, by line, over the time of its allocation, under
//! the highs of all live memory.
//!
//! The timeline has all live memory, but not by line; the block map has each block's line and the
//! step of its allocation. Together they show how the live memory of the end arose. A block counts
//! from the moment of its allocation, exact for the latest blocks, from the ring of events. The
//! other blocks of a step come in proportion, as fast as the lows of later live memory leave room:
//! memory that lives to the end was part of every low since.
//!
//! Without marked steps, only the ring knows when a block was allocated: before the ring's first
//! event, the parts of live memory are not known.
//!
//! The course begins at the first step, not with the loading before it.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::latest;
use super::lines::{CLASSES, Lines, live};
use crate::EventKind;
use crate::dump::state::{DeviceState, State, Stretch};

/// Shorter times are no gap between two parts: so many times a part's length, or one part of so
/// many of the run.
const LONG: u64 = 3;
const SEEN: u64 = 50;
/// Live memory above one part in so many of its peak has begun, if no steps are marked.
const BEGUN: u64 = 10;
/// Less than one part in so many of the run is not left out.
const LEFT_OUT: u64 = 10;

/// Live memory over time, in parts.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Course {
    /// Edges of the parts, in seconds before the end: one more than there are parts.
    pub edges: Vec<f64>,
    /// The step of each part.
    pub steps: Vec<u64>,
    /// By line, the others last: bytes live at the end that were there at the end of the part.
    pub layers: Vec<Vec<u64>>,
    /// The highest live bytes.
    pub high: Vec<u64>,
    /// The highest held bytes; empty if unknown.
    pub held: Vec<u64>,
    /// Parts before this one are not known by line.
    pub known_from: usize,
    /// Seconds of the run before the first part.
    pub left_out: f64,
}

/// The part with which the picture begins: that of the first step, or that in which live memory
/// begins to rise.
fn first_part(device: &DeviceState) -> usize {
    let timeline = &device.timeline;
    let (Some(first), Some(last)) = (timeline.first(), timeline.last()) else { return 0 };
    // The ends of the steps.
    let ends: Vec<u64> = timeline
        .chunk_by(|one, other| one.step == other.step)
        .filter_map(|step| Some(step.last()?.time_nanoseconds))
        .collect();
    let begin = match &ends[..] {
        // What came before the first step counts as part of it: it is given as long as the longest
        // of the others.
        [end, _, _, ..] => {
            let lasts = ends.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
            let part = timeline.partition_point(|part| part.time_nanoseconds <= *end);
            let begin = end.saturating_sub(lasts.max().unwrap_or(0));
            timeline.partition_point(|part| part.time_nanoseconds < begin).min(part)
        }
        _ => {
            let peak = timeline.iter().map(|part| part.live_high_bytes).max().unwrap_or(0);
            let has_begun = |part: &Stretch| part.live_high_bytes > peak / BEGUN;
            timeline.iter().position(has_begun).unwrap_or(0)
        }
    };
    let whole = last.time_nanoseconds.saturating_sub(first.time_nanoseconds);
    let before = timeline[begin].time_nanoseconds.saturating_sub(first.time_nanoseconds);
    if before < whole / LEFT_OUT { 0 } else { begin }
}

/// When the picture of a device's run begins, nanoseconds since 1970; 0: with the run.
pub fn begin(device: &DeviceState) -> u64 {
    match first_part(device) {
        0 => 0,
        part => {
            let shown = &device.timeline[part..];
            shown[0].time_nanoseconds.saturating_sub(part_length(shown))
        }
    }
}

/// The usual length of a part, nanoseconds.
fn part_length(timeline: &[Stretch]) -> u64 {
    let lasts =
        |pair: &[Stretch]| pair[1].time_nanoseconds.saturating_sub(pair[0].time_nanoseconds);
    let mut lengths: Vec<u64> = timeline.windows(2).map(lasts).collect();
    lengths.sort_unstable();
    lengths.get(lengths.len() / 2).copied().unwrap_or(0)
}

impl Course {
    /// The course of the whole run. `None`: there is no timeline.
    pub fn of(state: &State, device: &DeviceState, lines: &Lines<'_>) -> Option<Self> {
        let timeline = &device.timeline;
        if timeline.len() < 2 {
            return None;
        }
        let births = births(state, device);
        let mut added = vec![vec![0u64; timeline.len()]; CLASSES];
        // Blocks of unknown moment: bytes of each line by step.
        let mut by_step: BTreeMap<u64, [u64; CLASSES]> = BTreeMap::new();
        for (address, block) in live(device) {
            let line = lines.number(block);
            match births.get(&address) {
                Some(&time) => {
                    let part = timeline.partition_point(|part| part.time_nanoseconds < time);
                    let bytes = &mut added[line][part.min(timeline.len() - 1)];
                    *bytes = bytes.saturating_add(block.0);
                }
                None => {
                    let sums = by_step.entry(block.5.unwrap_or(0).into()).or_default();
                    sums[line] = sums[line].saturating_add(block.0);
                }
            }
        }
        let has_steps = timeline.iter().any(|part| part.step != timeline[0].step);
        let last = timeline.len() - 1;
        let known_from = match has_steps {
            true => {
                spread(&mut added, &by_step, timeline);
                0
            }
            false => {
                let since = latest::since(state, device, lines).unwrap_or(u64::MAX);
                let part = timeline.partition_point(|part| part.time_nanoseconds < since);
                let part = (part + usize::from(part > 0)).min(last);
                for (line, bytes) in by_step.values().flat_map(|sums| sums.iter().enumerate()) {
                    added[line][part] = added[line][part].saturating_add(*bytes);
                }
                part
            }
        };
        for line in &mut added {
            let mut sum = 0u64;
            for bytes in line {
                sum = sum.saturating_add(*bytes);
                *bytes = sum;
            }
        }
        let first = first_part(device);
        let layers: Vec<&[u64]> = added.iter().map(|line| &line[first..]).collect();
        let mut course = drawn(device, first, &layers);
        // Blocks of the ring before that are not all of a line's.
        let known = timeline[known_from].time_nanoseconds;
        let end = timeline[last].time_nanoseconds;
        let before = -(end.saturating_sub(known) as f64) / 1e9;
        course.known_from = match known_from {
            0 => 0,
            _ => course.edges[1..].partition_point(|&edge| edge < before),
        };
        for line in &mut course.layers {
            line[..course.known_from].fill(0);
        }
        Some(course)
    }
}

/// Allocation times by address, for blocks whose last malloc is among the events.
fn births(state: &State, device: &DeviceState) -> HashMap<u64, u64> {
    let is_malloc = |kind: &str| kind == EventKind::Malloc.name();
    let entries = state.events.entries.iter();
    entries
        .filter(|event| u32::from(event.device) == device.device && is_malloc(&event.kind))
        .map(|event| (event.address, event.time_nanoseconds))
        .collect()
}

/// Adds the blocks of each step to the parts in which it ran.
fn spread(added: &mut [Vec<u64>], by_step: &BTreeMap<u64, [u64; CLASSES]>, timeline: &[Stretch]) {
    let last = timeline.len() - 1;
    // Bytes at the end of each part from blocks of known moment.
    let mut known = vec![0u64; timeline.len()];
    let mut sum = 0u64;
    for (part, known) in known.iter_mut().enumerate() {
        sum = added.iter().fold(sum, |sum, line| sum.saturating_add(line[part]));
        *known = sum;
    }
    // The lowest live bytes after each part: memory that lives to the end is no more.
    let mut least = vec![u64::MAX; timeline.len()];
    for part in (0..last).rev() {
        least[part] = least[part + 1].min(timeline[part + 1].live_low_bytes);
    }
    let mut before = 0u64;
    for (&step, sums) in by_step {
        let first = timeline.partition_point(|part| part.step < step).min(last);
        // The part that ends in the next step may have begun in this one.
        let end = timeline.partition_point(|part| part.step <= step).min(last);
        let whole = sums.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        let mut there = 0u64;
        for part in first..=end {
            let most = least[part].min(timeline[part].live_high_bytes);
            let room = most.saturating_sub(before.saturating_add(known[part]));
            let now = if part == end { whole } else { room.min(whole).max(there) };
            for (line, &bytes) in added.iter_mut().zip(sums) {
                // The same share of each line as of all.
                let share = |of: u64| u128::from(bytes) * u128::from(of) / u128::from(whole.max(1));
                line[part] = line[part].saturating_add((share(now) - share(there)) as u64);
            }
            there = now;
        }
        before = before.saturating_add(whole);
    }
}

/// The course with its times. If nothing was noted for longer than a part lasts, live memory stayed
/// as it was: that becomes a part of its own, or it would look like the next one.
fn drawn(device: &DeviceState, first: usize, layers: &[&[u64]]) -> Course {
    let timeline = &device.timeline[first..];
    let end = timeline.last().map_or(0, |last| last.time_nanoseconds);
    let before = |time: u64| -(end.saturating_sub(time) as f64) / 1e9;
    // The start of a part is unknown: parts have one length, except those that end early.
    let length = part_length(timeline);
    let began = timeline.first().map_or(0, |first| first.time_nanoseconds);
    let gap = (LONG * length).max(end.saturating_sub(began) / SEEN);
    let mut course = Course { layers: vec![Vec::new(); layers.len()], ..Course::default() };
    let mut add = |until: u64, step: u64, part: usize, high: u64, held: u64| {
        course.edges.push(before(until));
        course.steps.push(step);
        for (all, line) in course.layers.iter_mut().zip(layers) {
            all.push(line[part]);
        }
        course.high.push(high);
        course.held.push(held);
    };
    let mut earlier: Option<(usize, &Stretch)> = None;
    for (part, stretch) in timeline.iter().enumerate() {
        if let Some((number, last)) = earlier {
            let next = stretch.time_nanoseconds.saturating_sub(length);
            if next.saturating_sub(last.time_nanoseconds) > gap {
                let stayed =
                    stretch.live_low_bytes.max(last.live_low_bytes).min(last.live_high_bytes);
                add(next, last.step, number, stayed, last.reserved_high_bytes);
            }
        }
        let Stretch { time_nanoseconds, step, reserved_high_bytes, .. } = *stretch;
        add(time_nanoseconds, step, part, device.peak_of(stretch), reserved_high_bytes);
        earlier = Some((part, stretch));
    }
    course.edges.insert(0, before(began.saturating_sub(length)));
    let run = device.timeline.first().map_or(0, |first| first.time_nanoseconds);
    course.left_out = began.saturating_sub(run) as f64 / 1e9;
    course
}
