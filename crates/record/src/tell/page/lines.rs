//! The lines of the program that hold live memory: the largest have a letter and a colour, the
//! others are joined.

use std::collections::HashMap;
use std::io;

use serde::Serialize;

use super::source::{self, Excerpt};
use crate::conclusion::holders;
use crate::dump::state::{Block, BlockKind, DeviceState, State};
use crate::plain;
use crate::sites::{By, Growth, SiteId, Sites};

/// Lines that have a letter.
pub const NAMED: usize = 8;
/// A line with fewer live bytes than one part in so many has none.
const LEAST_PART: u64 = 200;
/// The class of the others.
pub const OTHERS: usize = NAMED;
/// Lines with a letter, and the others.
pub const CLASSES: usize = NAMED + 1;
/// Lines of source shown before and after a line.
const AROUND: usize = 2;
/// Frames shown of a stack.
const MOST_FRAMES: usize = 16;
/// Characters shown of a frame.
const MOST_CHARACTERS: usize = 300;

/// Groups blocks. Without a site, only their size tells them apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Key<'a> {
    Line(&'a str, u32),
    Site(SiteId),
    Size(u64),
}

fn key<'a>(sites: &'a Sites, block: &Block) -> Key<'a> {
    match sites.is_empty() {
        true => Key::Size(block.0),
        false => key_of_site(sites, block.6),
    }
}

fn key_of_site(sites: &Sites, id: SiteId) -> Key<'_> {
    match sites.line(id) {
        Some(line) => Key::Line(&line.file, line.line),
        None => Key::Site(id),
    }
}

/// The sum of a line's blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bytes: u64,
    blocks: u64,
}

/// The lines of a device's live blocks.
pub struct Lines<'a> {
    sites: &'a Sites,
    named: Vec<(Key<'a>, Sum)>,
    numbers: HashMap<Key<'a>, usize>,
    /// Number of other lines, and their sum.
    others: (u64, Sum),
}

/// A line for the page.
#[derive(Debug, Serialize)]
pub struct Line {
    name: String,
    bytes: u64,
    blocks: u64,
    growth: Option<Growth>,
    source: Option<Excerpt>,
    /// For a line in a module's `forward`: its caller.
    called: Option<Called>,
    stack: Vec<String>,
}

/// The line that called a module's `forward`.
#[derive(Debug, Serialize)]
struct Called {
    name: String,
    source: Option<Excerpt>,
}

/// The live blocks of a device, with their addresses.
pub fn live(device: &DeviceState) -> impl Iterator<Item = (u64, &Block)> {
    device.segments.iter().flat_map(|segment| {
        let mut at = segment.address;
        segment.blocks.iter().filter_map(move |block| {
            let address = at;
            at = at.saturating_add(block.0);
            (block.1 == BlockKind::Live).then_some((address, block))
        })
    })
}

impl<'a> Lines<'a> {
    /// The lines of `device`.
    pub fn of(state: &'a State, device: &DeviceState) -> Self {
        let sites = &state.sites;
        let mut sums: HashMap<Key<'a>, Sum> = HashMap::new();
        for (_, block) in live(device) {
            let sum = sums.entry(key(sites, block)).or_default();
            sum.bytes = sum.bytes.saturating_add(block.0);
            sum.blocks += 1;
        }
        let mut named: Vec<(Key<'a>, Sum)> = sums.into_iter().collect();
        named.sort_unstable_by_key(|&(key, sum)| (std::cmp::Reverse(sum.bytes), key));
        let all = named.iter().fold(0u64, |all, line| all.saturating_add(line.1.bytes));
        let large = named.partition_point(|line| line.1.bytes >= all / LEAST_PART);
        let rest = named.split_off(large.clamp(1, NAMED).min(named.len()));
        let add = |mut all: Sum, other: &(Key<'_>, Sum)| {
            all.bytes = all.bytes.saturating_add(other.1.bytes);
            all.blocks = all.blocks.saturating_add(other.1.blocks);
            all
        };
        let others = (rest.len() as u64, rest.iter().fold(Sum::default(), add));
        let numbers = named.iter().enumerate().map(|(number, line)| (line.0, number)).collect();
        Self { sites, named, numbers, others }
    }

    /// The class of a block's line: below [`CLASSES`].
    pub fn number(&self, block: &Block) -> usize {
        self.numbers.get(&key(self.sites, block)).copied().unwrap_or(OTHERS)
    }

    /// Number and sum of the lines without a letter.
    pub fn others(&self) -> serde_json::Value {
        let (count, Sum { bytes, blocks, .. }) = self.others;
        serde_json::json!({ "count": count, "bytes": bytes, "blocks": blocks })
    }

    /// The lines with a letter, with their source if it can be read.
    ///
    /// # Errors
    /// The error of `in_time`.
    pub fn told(
        &self,
        state: &State,
        device: &DeviceState,
        in_time: &dyn Fn() -> io::Result<()>,
    ) -> io::Result<Vec<Line>> {
        let found =
            if self.sites.is_empty() { Vec::new() } else { holders(state, device, By::Line) };
        let mut names = HashMap::new();
        for holder in &found {
            names.entry(key_of_site(self.sites, holder.usage.site)).or_insert(holder);
        }
        let began = device.timeline.first().map(|stretch| stretch.time_nanoseconds);
        let mut told = Vec::new();
        for (key, sum) in &self.named {
            // A file may lie on a slow disk.
            in_time()?;
            let holder = names.get(key);
            let name = match (holder, key) {
                (Some(holder), _) => plain(&holder.name),
                (None, Key::Size(bytes)) => format!("blocks of {bytes} B"),
                (None, _) => "code that is not known".to_owned(),
            };
            let site = holder.map_or(SiteId::NONE, |holder| holder.usage.site);
            let line = self.sites.line(site).filter(|line| line.line > 0);
            let called = holder.and_then(|holder| holder.called.as_ref());
            let called = called.map(|(name, frame)| Called {
                name: plain(name),
                source: source::excerpt(&frame.file, frame.line, 0, began),
            });
            let cut = |frame: String| plain(&frame).chars().take(MOST_CHARACTERS).collect();
            told.push(Line {
                name,
                bytes: sum.bytes,
                blocks: sum.blocks,
                growth: holder.and_then(|holder| holder.usage.growth),
                source: line.and_then(|line| source::excerpt(&line.file, line.line, AROUND, began)),
                called,
                stack: self.sites.stack(site).into_iter().take(MOST_FRAMES).map(cut).collect(),
            });
        }
        Ok(told)
    }
}
