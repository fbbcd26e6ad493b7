//! Where in the program blocks came from: sites, which are Python stacks with the module that ran
//! and the phase, each kept once.
//!
//! A block has the id of its site; a slab that of the request it was made for. Ids are those of a
//! table that only grows and has an end, so a reader needs no protocol but to stay below what was
//! published. Text and frames are kept once too: ten thousand stacks of one training share a few
//! hundred lines. What the table has no room for has the site [`SiteId::OTHER`], and is counted.
//!
//! The site of a block lies beside the block map, and not in it, so that blocks without one cost
//! nothing: the word says of which life of the slot it speaks, and what is said of an earlier one
//! counts for nothing.

mod lines;
mod show;
mod usage;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::layout::{Section, Shared};
use super::plain;
use super::sync::{AtomicU32, AtomicU64, Ordering};
pub use lines::{LISTED, Line, lines, live_blocks, read_lines};
pub use show::{At, BEYOND, NOT_KNOWN, Place};
pub use usage::{By, Growth, Usage, fill_from_slabs, usage};

/// Sites that a record holds at most; 112 bytes each, allocated as they come.
pub const MAX_SITES: u64 = 1 << 14;
/// Frames that it holds at most; 12 bytes each.
pub const MAX_FRAMES: u64 = 1 << 14;
/// Words of text that it holds at most: 1 MiB.
pub const MAX_TEXT: u64 = 1 << 17;
/// Frames of a site at most: the innermost ones.
pub const DEPTH: usize = 24;
/// Bytes of a text at most; a longer one keeps its end, where a path says most.
const LONGEST_TEXT: usize = 1 << 10;
/// Entries of a table that are allocated together.
const STEP: u64 = 512;

/// A site's number on its record.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct SiteId(pub u32);
impl SiteId {
    /// Not known: nobody asked, or no Python ran.
    pub const NONE: Self = Self(0);
    /// One of those that the table had no room for.
    pub const OTHER: Self = Self(u32::MAX);

    /// Whether it is [`SiteId::NONE`].
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// A frame's number on its record. 0: the table had no room for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FrameId(pub u32);

/// What the program was doing.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Phase {
    /// Not known.
    #[default]
    Unknown = 0,
    /// A module's forward.
    Forward = 1,
    /// The autograd engine.
    Backward = 2,
    /// A step of an optimiser.
    Optimizer = 3,
    /// A collective of several ranks.
    Collective = 4,
}

impl Phase {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::Unknown, Self::Forward, Self::Backward, Self::Optimizer, Self::Collective];

    /// The one with this number in the record.
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or_default()
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
            Self::Collective => "collective",
        }
    }
}

/// A site, as it is told to the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewSite<'a> {
    /// The stack, the innermost frame first; what is beyond [`DEPTH`] is left out.
    pub frames: &'a [FrameId],
    /// The path of the module that ran, as `named_modules` has it (`layers.3.mlp`; a number
    /// has the class that gave it, `Sequential[3].mlp`); empty where none is known.
    pub module: &'a str,
    /// What the program was doing.
    pub phase: Phase,
    /// Of a backward: the site of the forward that it belongs to.
    pub forward: SiteId,
    /// Gradients were off (`torch.no_grad()`, `torch.inference_mode()`): no graph of autograd's
    /// keeps its blocks.
    pub no_grad: bool,
}

/// A frame, as a reader has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Frame {
    /// The source file, as the interpreter names it.
    pub file: String,
    /// The function, qualified where the interpreter says so (`Block.forward`).
    pub function: String,
    /// The line that ran.
    pub line: u32,
}

impl Frame {
    /// Whether the frame is of the program, and not of an installed package or of Python's own
    /// library.
    pub fn is_own(&self) -> bool {
        // The last: the package's own, where it is run from its source.
        let installed = ["/site-packages/", "/dist-packages/", "/lib/python3", "/gruyere/_"];
        // A node of autograd's has a name and no line.
        self.line > 0
            && !self.file.starts_with('<')
            && !installed.iter().any(|part| self.file.contains(part))
    }
}

/// A site, as a reader has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// The stack, the innermost frame first.
    pub frames: Vec<Frame>,
    /// The module that ran; empty where none is known.
    pub module: String,
    /// What the program was doing.
    pub phase: Phase,
    /// Of a backward: the site of the forward that it belongs to.
    pub forward: SiteId,
    /// Gradients were off, as far as is known.
    #[serde(default)]
    pub no_grad: bool,
}

/// In the word of a site's phase: gradients were off.
const NO_GRAD: u32 = 1 << 8;

impl Site {
    /// The line to look at: the innermost frame of the program's own; where there is none, the
    /// outermost frame there is, which is nearest to it.
    pub fn line(&self) -> Option<&Frame> {
        self.frames.iter().find(|frame| frame.is_own()).or(self.frames.last())
    }
}

/// Where a site's words lie on the record.
#[repr(C)]
#[derive(Debug, Default)]
pub struct SiteCell {
    frames: [AtomicU32; DEPTH],
    module: AtomicU32,
    forward: AtomicU32,
    /// How many of `frames` count.
    depth: AtomicU32,
    /// The low eight bits: the phase. The next: [`NO_GRAD`].
    phase: AtomicU32,
}

/// Where a frame's words lie on the record.
#[repr(C)]
#[derive(Debug, Default)]
pub struct FrameCell {
    file: AtomicU32,
    function: AtomicU32,
    line: AtomicU32,
}

/// How far the tables reach. All words only grow; each is written under the mutex of the tables,
/// with Release after what it publishes, and read with Acquire:
///
/// ```text
/// n    the entries before n are allocated and written; those of `block_sites` are allocated
/// ```
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct SiteReach {
    /// Slots of the block map that have a word for their site.
    pub block_sites: AtomicU64,
    /// Sites, the one of number 0 with them, which is none.
    pub sites: AtomicU64,
    /// Frames, with number 0.
    pub frames: AtomicU64,
    /// Words of text, with the first, which is the empty text.
    pub text: AtomicU64,
    /// Sites that the tables had no room for.
    pub untold: AtomicU64,
    _room: [AtomicU64; 3],
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<SiteCell>() == 112);
    assert!(size_of::<FrameCell>() == 12);
    assert!(size_of::<SiteReach>() == 64);
};

// SAFETY: repr(C), atomics throughout; every bit pattern is a value.
unsafe impl Shared for SiteCell {}
// SAFETY: as above.
unsafe impl Shared for FrameCell {}

/// The word beside a slot of the block map: the slot's state word when it became live (high half),
/// and the site of that life. Written by the slot's holder while the block lives.
pub(super) fn block_word(state: u32, site: SiteId) -> u64 {
    u64::from(state) << 32 | u64::from(site.0)
}

/// What such a word says of the life that `state` is of.
pub(super) fn site_of_life(word: u64, state: u32) -> SiteId {
    // The low two bits are live or pending.
    if (word >> 32) as u32 >> 2 == state >> 2 { SiteId(word as u32) } else { SiteId::NONE }
}

/// The tables of a record, as its writer fills them.
pub(super) struct Tables {
    known: Mutex<Known>,
}

/// What is in the tables by now.
#[derive(Default)]
struct Known {
    text: HashMap<String, u32>,
    frames: HashMap<[u32; 3], u32>,
    sites: HashMap<(Vec<FrameId>, [u32; 3]), u32>,
    /// Entries allocated: text, frames, sites.
    allocated: [u64; 3],
}

/// The parts of the mapping that the tables are written to.
pub(super) trait Room {
    /// Makes `count` entries from `first` on safe to touch.
    fn allocate(&self, section: Section, first: u64, count: u64) -> bool;
    /// How many entries a section may have.
    fn entries(&self, section: Section) -> u64;
    /// An entry of a section, which was allocated.
    fn at<T: Shared>(&self, section: Section, index: u64) -> &T;
    /// How far the tables reach.
    fn reach(&self) -> &SiteReach;
}

impl Tables {
    pub(super) fn new() -> Self {
        Self { known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`super::Record::frame`].
    pub(super) fn frame(&self, room: &impl Room, file: &str, function: &str, line: u32) -> FrameId {
        let mut known = self.known();
        let told = known.text(room, file).zip(known.text(room, function));
        let Some((file, function)) = told else { return FrameId::default() };
        let key = [file, function, line];
        if let Some(&number) = known.frames.get(&key) {
            return FrameId(number);
        }
        let Some(number) = known.next(room, Section::Frames, 1) else {
            return FrameId::default();
        };
        let cell: &FrameCell = room.at(Section::Frames, number);
        for (word, value) in [&cell.file, &cell.function, &cell.line].into_iter().zip(key) {
            word.store(value, Ordering::Relaxed);
        }
        room.reach().frames.store(number + 1, Ordering::Release);
        known.frames.insert(key, number as u32);
        FrameId(number as u32)
    }

    /// See [`super::Record::site`].
    pub(super) fn site(&self, room: &impl Room, site: &NewSite<'_>) -> SiteId {
        let mut known = self.known();
        let told = known.add_site(room, site);
        if told.is_none() {
            room.reach().untold.fetch_add(1, Ordering::Relaxed);
        }
        told.unwrap_or(SiteId::OTHER)
    }

    /// Makes the words beside the slots of the block map up to `slot` safe to touch.
    pub(super) fn reach_block(&self, room: &impl Room, slot: u32) -> bool {
        let _turn = self.known();
        let reach = &room.reach().block_sites;
        let (there, slot) = (reach.load(Ordering::Relaxed), u64::from(slot));
        if slot < there {
            return true;
        }
        let wanted = (slot + 1).next_multiple_of(STEP).min(room.entries(Section::BlockSites));
        let is_done = slot < wanted && room.allocate(Section::BlockSites, there, wanted - there);
        if is_done {
            reach.store(wanted, Ordering::Release);
        }
        is_done
    }
}

impl Known {
    fn add_site(&mut self, room: &impl Room, site: &NewSite<'_>) -> Option<SiteId> {
        // A full table takes no new text either.
        let is_full = room.reach().sites.load(Ordering::Relaxed) >= room.entries(Section::Sites);
        if is_full && !self.text.contains_key(site.module) {
            return None;
        }
        let frames = &site.frames[..site.frames.len().min(DEPTH)];
        // A stack with a hole would name a line that made nothing.
        if frames.contains(&FrameId::default()) {
            return None;
        }
        let module = self.text(room, site.module)?;
        let phase = site.phase as u32 | if site.no_grad { NO_GRAD } else { 0 };
        let key = (frames.to_vec(), [module, site.forward.0, phase]);
        if let Some(&number) = self.sites.get(&key) {
            return Some(SiteId(number));
        }
        let number = self.next(room, Section::Sites, 1)?;
        let cell: &SiteCell = room.at(Section::Sites, number);
        for (word, frame) in cell.frames.iter().zip(frames) {
            word.store(frame.0, Ordering::Relaxed);
        }
        cell.depth.store(frames.len() as u32, Ordering::Relaxed);
        cell.module.store(module, Ordering::Relaxed);
        cell.forward.store(site.forward.0, Ordering::Relaxed);
        cell.phase.store(phase, Ordering::Relaxed);
        room.reach().sites.store(number + 1, Ordering::Release);
        self.sites.insert(key, number as u32);
        Some(SiteId(number as u32))
    }

    /// Where `text` begins among the words of text: its bytes, then as many words as they take.
    fn text(&mut self, room: &impl Room, text: &str) -> Option<u32> {
        let mut from = text.len().saturating_sub(LONGEST_TEXT);
        while !text.is_char_boundary(from) {
            from += 1;
        }
        let text = &text[from..];
        if let Some(&place) = self.text.get(text) {
            return Some(place);
        }
        let words = text.len().div_ceil(8) as u64 + 1;
        let first = self.next(room, Section::Text, words)?;
        room.at::<AtomicU64>(Section::Text, first).store(text.len() as u64, Ordering::Relaxed);
        for (index, bytes) in (first + 1..).zip(text.as_bytes().chunks(8)) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let cell: &AtomicU64 = room.at(Section::Text, index);
            cell.store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        room.reach().text.store(first + words, Ordering::Release);
        self.text.insert(text.to_owned(), first as u32);
        Some(first as u32)
    }

    /// The next `count` entries of a table, allocated; number 0 is left out.
    fn next(&mut self, room: &impl Room, section: Section, count: u64) -> Option<u64> {
        let reach = room.reach();
        let (reach, allocated) = match section {
            Section::Text => (&reach.text, &mut self.allocated[0]),
            Section::Frames => (&reach.frames, &mut self.allocated[1]),
            _ => (&reach.sites, &mut self.allocated[2]),
        };
        let first = reach.load(Ordering::Relaxed).max(1);
        let end = first + count;
        if end > room.entries(section) {
            return None;
        }
        if end > *allocated {
            let wanted = end.next_multiple_of(STEP).min(room.entries(section));
            if !room.allocate(section, *allocated, wanted - *allocated) {
                return None;
            }
            *allocated = wanted;
        }
        Some(first)
    }
}

/// All sites of a record, as a reader has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sites(Vec<Site>);

impl Sites {
    /// The sites of these, by number from 1 on.
    pub fn new(sites: impl IntoIterator<Item = Site>) -> Self {
        Self(sites.into_iter().collect())
    }

    /// The site of a number. `None`: not known, or one for which there was no room.
    pub fn get(&self, id: SiteId) -> Option<&Site> {
        self.0.get(id.0.checked_sub(1)? as usize)
    }

    /// The line to look at: of a backward, that of its forward, where it is known.
    pub fn line(&self, id: SiteId) -> Option<&Frame> {
        let site = self.get(id)?;
        self.get(site.forward).unwrap_or(site).line()
    }

    /// All of them, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (SiteId, &Site)> {
        (1..).map(SiteId).zip(&self.0)
    }

    /// Whether there is none: nobody asked for them.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What the tables say, as far as it makes sense: the words are somebody else's.
    pub(super) fn read(sites: &[SiteCell], frames: &[FrameCell], text: &[AtomicU64]) -> Self {
        let text_at = |place: &AtomicU32| text_at(text, place.load(Ordering::Relaxed) as usize);
        let frames: Vec<Frame> = frames
            .iter()
            .map(|cell| Frame {
                file: text_at(&cell.file),
                function: text_at(&cell.function),
                line: cell.line.load(Ordering::Relaxed),
            })
            .collect();
        let site = |cell: &SiteCell| {
            let depth = (cell.depth.load(Ordering::Relaxed) as usize).min(DEPTH);
            let phase = cell.phase.load(Ordering::Relaxed);
            let numbers = cell.frames[..depth].iter().map(|word| word.load(Ordering::Relaxed));
            Site {
                frames: numbers
                    .filter(|&number| number != 0)
                    .filter_map(|number| frames.get(number as usize).cloned())
                    .collect(),
                module: text_at(&cell.module),
                phase: Phase::from_number(phase as u8),
                forward: SiteId(cell.forward.load(Ordering::Relaxed)),
                no_grad: phase & NO_GRAD != 0,
            }
        };
        Self(sites.iter().skip(1).map(site).collect())
    }
}

fn text_at(text: &[AtomicU64], place: usize) -> String {
    let Some(length) = text.get(place).map(|word| word.load(Ordering::Relaxed) as usize) else {
        return String::new();
    };
    let length = length.min(LONGEST_TEXT);
    let words = text[place + 1..].iter().take(length.div_ceil(8));
    let mut bytes: Vec<u8> =
        words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    bytes.truncate(length);
    plain(&String::from_utf8_lossy(&bytes))
}
