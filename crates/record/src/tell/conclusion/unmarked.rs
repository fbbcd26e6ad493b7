//! Growth of a program that marks no steps, such as a server: a line that makes blocks again and
//! again between other work, all of which stay.
//!
//! The events know when a live block was made. The clock is the other requests, not time: however
//! long it takes to load a model, hardly anything else is asked for meanwhile, so its weights are
//! made in one part of the work.

use std::collections::HashMap;

use super::cells::cell;
use super::evidence::{Evidence, is_persistent};
use super::growth::place;
use super::words::of;
use super::{Advice, Cause, Finding};
use crate::dump::state::Event;
use crate::sites::{By, SiteId, Usage, usage};
use crate::{BlockEntry, EventKind};

/// Parts of the work in the events.
const PARTS: usize = 8;
/// Parts, at least, in which the line has made blocks.
const MOST_PARTS: usize = 6;
/// Such a part has at least this share of the line's bytes in the events (one part in so many), and
/// these are at least this share of the line's, unless it has made them for longer than the events
/// know.
const LEAST_PART: u64 = 4 * PARTS as u64;
const LEAST_MADE: u64 = 8;
/// Other requests, at least.
const LEAST_WORK: usize = 8 * PARTS;
/// The least share of live memory (one part in so many).
const LEAST_SHARE: u64 = 8;

/// The remedy where no step shows what grows, for the blocks of `site`.
pub fn advice(evidence: &Evidence<'_>, site: SiteId) -> Advice {
    match evidence.sites.get(site).and_then(cell) {
        Some(_) => IN_A_CELL,
        None => evidence.of_torch(UNMARKED, PLAIN),
    }
}

/// The remedy of a program without torch.
pub const PLAIN: Advice = &[
    "To do: find what keeps them, and give a bound to a cache, or to the number of requests under \
     way.",
];

const UNMARKED: &[&str] =
    &["To do: find what keeps them (a cache, a list, a reference cycle: gc.collect(), a caught \
     exception: keep str(error)), and give a bound to a cache, or to the number of requests under \
     way; move results to the host (.cpu()). gruyere.step() after each request shows what grows."];

/// A loop in a cell, or a cell that was run again and again, which has the same name.
const IN_A_CELL: &[&str] = &[
    "To do: find what keeps them, and give a list or a cache a bound, or move results to the host \
     (.cpu()). Of a cell that was run again, `Out` may keep the results: `%reset -f out` empties \
     it, `del NAME` a variable.",
];

/// The line whose blocks stay, if there is one.
pub fn find(evidence: &Evidence<'_>) -> Option<Finding> {
    if evidence.trains() {
        return None;
    }
    // What is made again and again leaves many blocks of one stack; a forward under way does not.
    let mut counts: HashMap<SiteId, usize> = HashMap::new();
    evidence.live.iter().for_each(|block| *counts.entry(block.site).or_default() += 1);
    let is_often = |block: &&BlockEntry| block.capture == 0 && counts[&block.site] >= MOST_PARTS;
    let live: Vec<BlockEntry> = evidence.live.iter().filter(is_often).copied().collect();
    let lines = usage(&live, evidence.sites, By::Line, 0);
    let much = evidence.live_bytes() / LEAST_SHARE;
    let mut lines = lines.into_iter().take_while(|line| line.bytes >= much);
    let line = lines.find(|line| grows(evidence, &live, line))?;
    Some(Finding {
        cause: Cause::Leak,
        bytes: line.bytes,
        says: format!(
            "{} keeps {} blocks, more as it goes (no step is marked): {}",
            place(evidence, line.site),
            line.blocks,
            of(line.bytes, evidence.live_bytes())
        ),
        advice: advice(evidence, line.site),
        names: line.site,
        ..Finding::default()
    })
}

/// Whether a line's blocks have been made all along, and stay.
///
/// Bytes count, not blocks: a small block has the line that its slab was made for, so that among a
/// model's biases, made once, there are small results of all requests.
fn grows(evidence: &Evidence<'_>, live: &[BlockEntry], line: &Usage) -> bool {
    let is_own = |block: &&BlockEntry| evidence.sites.are_of_one_line(line.site, block.site);
    let blocks: Vec<&BlockEntry> = live.iter().filter(is_own).collect();
    if evidence.came_and_went(&blocks) {
        return false;
    }
    let own: HashMap<u64, u64> = blocks.iter().map(|block| (block.address, block.size)).collect();
    let mallocs: Vec<_> = evidence.events(EventKind::Malloc).map(|(_, event)| event).collect();
    // An address may have had other blocks before.
    let mut made = HashMap::new();
    for (number, event) in mallocs.iter().enumerate() {
        if own.contains_key(&event.address) {
            made.insert(event.address, number);
        }
    }
    let work = mallocs.len() - made.len();
    if work < LEAST_WORK {
        return false;
    }
    let (mut done, mut parts) = (0, [0u64; PARTS]);
    for (number, event) in mallocs.iter().enumerate() {
        if made.get(&event.address) == Some(&number) {
            let part = &mut parts[(done * PARTS / work).min(PARTS - 1)];
            *part = part.saturating_add(own[&event.address]);
        } else {
            done += 1;
        }
    }
    let bytes = parts.iter().copied().fold(0, u64::saturating_add);
    let is_much = |part: &&u64| **part > 0 && **part >= bytes / LEAST_PART;
    let since = mallocs.first().map_or(0, |event| event.time_nanoseconds);
    (bytes >= line.bytes / LEAST_MADE || has_long_grown(evidence, &blocks))
        && parts.iter().filter(is_much).count() >= MOST_PARTS
        && rise(evidence, since) >= bytes / 2
}

/// Whether blocks, of which the events know the latest only, have been made for long: they are no
/// weights, which are made once, and live memory has risen over the latest half of the run by much
/// of what they have.
fn has_long_grown(evidence: &Evidence<'_>, blocks: &[&BlockEntry]) -> bool {
    let sum = |is_meant: fn(&&&BlockEntry) -> bool| {
        blocks.iter().filter(is_meant).fold(0u64, |sum, block| sum.saturating_add(block.size))
    };
    let (all, weights) = (sum(|_| true), sum(|block| is_persistent(block)));
    let timeline = &evidence.device.timeline;
    let Some((first, last)) = timeline.first().zip(timeline.last()) else { return false };
    let half = first.time_nanoseconds.midpoint(last.time_nanoseconds);
    let late = &timeline[timeline.partition_point(|one| one.time_nanoseconds < half)..];
    let lows = late.iter().map(|one| one.live_low_bytes as i64);
    weights < all / 4 && late.len() >= PARTS && rise_of(lows) >= all / 4
}

/// The rise of live memory's lows since a time: from the first part of it to the last.
fn rise(evidence: &Evidence<'_>, since_nanoseconds: u64) -> u64 {
    let timeline = &evidence.device.timeline;
    let before = timeline.partition_point(|one| one.time_nanoseconds < since_nanoseconds);
    let (_, since) = timeline.split_at(before);
    // A loop of a hundred requests may take no longer than one stretch of the timeline.
    if since.len() < PARTS {
        return rise_of(live(evidence).into_iter());
    }
    rise_of(since.iter().map(|one| one.live_low_bytes as i64))
}

/// Live memory after each event, less that before the first. A malloc has the bytes asked for, a
/// free those of the block: they must not count as different.
fn live(evidence: &Evidence<'_>) -> Vec<i64> {
    let of_device = |event: &&Event| u32::from(event.device) == evidence.device.device;
    let mut asked: HashMap<u64, u64> = HashMap::new();
    let (mut live, mut after) = (0i64, Vec::new());
    for event in evidence.state.events.entries.iter().filter(of_device) {
        if event.is(EventKind::Malloc) {
            asked.insert(event.address, event.size);
            live += event.size as i64;
        } else if event.is(EventKind::Free) {
            live -= asked.remove(&event.address).unwrap_or(event.size) as i64;
        }
        after.push(live);
    }
    after
}

fn rise_of(values: impl Iterator<Item = i64> + Clone) -> u64 {
    let number = values.clone().count();
    let few = number.div_ceil(PARTS);
    let first = values.clone().take(few).min().unwrap_or(0);
    let last = values.skip(number - few).min().unwrap_or(0);
    u64::try_from(last - first).unwrap_or(0)
}
