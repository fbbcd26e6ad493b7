//! Sites: the origin of blocks in the program. A site is a Python stack with the running module and
//! the phase; each is kept once.
//!
//! A block has the id of its site; a slab that of the request that made it. Ids index a table that
//! only grows and has an end, so a reader needs no protocol but to stay below the published end.
//! Text and frames are kept once too: ten thousand stacks of one training share a few hundred
//! lines. A site without room in the table becomes [`SiteId::OTHER`], and is counted.
//!
//! A block's site lies beside the block map, not in it, so that blocks without one cost nothing.
//! The word names its life of the slot; a word of an earlier life counts for nothing.

mod lines;
mod show;
mod usage;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::layout::{Section, Shared};
use crate::plain;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
pub use lines::{LISTED, Line, lines, live_blocks, read_lines};
pub use show::{At, BEYOND, NOT_KNOWN, Place};
pub(crate) use usage::growth;
pub use usage::{By, Growth, Usage, fill_from_slabs, usage};

/// Sites per record at most; 112 bytes each, allocated as they come.
pub const MAX_SITES: u64 = 1 << 14;
/// Frames per record at most; 12 bytes each.
pub const MAX_FRAMES: u64 = 1 << 14;
/// Words of text per record at most: 1 MiB.
pub const MAX_TEXT: u64 = 1 << 17;
/// Frames per site at most: the innermost ones.
pub const DEPTH: usize = 24;
/// Bytes per text at most; a longer one keeps its end, the most telling part of a path.
const LONGEST_TEXT: usize = 1 << 10;
/// Entries of a table allocated together.
const STEP: u64 = 512;

/// A site's number on its record.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct SiteId(pub u32);
impl SiteId {
    /// Unknown: sites are off, or no Python ran.
    pub const NONE: Self = Self(0);
    /// A site that found no room in the table.
    pub const OTHER: Self = Self(u32::MAX);

    /// Whether it is [`SiteId::NONE`].
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// A frame's number on its record. 0: no room in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FrameId(pub u32);

/// The program's activity.
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
    /// All phases, in the order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::Unknown, Self::Forward, Self::Backward, Self::Optimizer, Self::Collective];

    /// The phase with this number in the record.
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

/// A new site for the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewSite<'a> {
    /// The stack, innermost frame first; frames beyond [`DEPTH`] are dropped.
    pub frames: &'a [FrameId],
    /// The path of the running module, as in `named_modules` (`layers.3.mlp`; a number has the
    /// class that gave it, `Sequential[3].mlp`); empty if unknown.
    pub module: &'a str,
    /// The program's activity.
    pub phase: Phase,
    /// For a backward: the site of its forward.
    pub forward: SiteId,
    /// Gradients were off (`torch.no_grad()`, `torch.inference_mode()`): no autograd graph keeps
    /// its blocks.
    pub no_grad: bool,
}

/// What stands between the name of a cell's file and that of the cell, `In[7]`, with its beginning.
const CELL: &str = "/In[";

/// The file of a frame that stands for a running node of autograd's; the function is its name.
pub const NODE: &str = "autograd";

/// A frame, for a reader.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Frame {
    /// The source file, by the interpreter's name.
    pub file: String,
    /// The function, qualified if the interpreter does so (`Block.forward`).
    pub function: String,
    /// The line that ran.
    pub line: u32,
}

impl Frame {
    /// Whether the frame is of a notebook's cell, by the file names of IPython, its Jupyter kernel
    /// and Colab. (`ipykernel_launcher.py` is the kernel's own.)
    pub fn is_cell(&self) -> bool {
        let names = ["/ipykernel_", "/ipython-input-", CELL];
        self.file.starts_with("<ipython-input-")
            || (self.is_own() && names.iter().any(|name| self.file.contains(name)))
    }

    /// The file by the interpreter's name alone, without that of a cell: a cell that runs again has
    /// another one.
    pub fn path(&self) -> &str {
        self.file.split_once(CELL).map_or(&self.file, |(path, _)| path)
    }

    /// Whether the two frames are of one function.
    pub fn is_of_function_of(&self, other: &Frame) -> bool {
        self.file == other.file && self.function == other.function
    }

    /// The name of the running node, where the frame stands for one: autograd's engine runs it, and
    /// no line.
    pub fn node(&self) -> Option<&str> {
        (self.file == NODE && self.line == 0).then_some(&*self.function)
    }

    /// Whether the frame belongs to the program, not to an installed package or Python's library.
    pub fn is_own(&self) -> bool {
        // The last is this package's own, run from its source.
        let installed = ["/site-packages/", "/dist-packages/", "/lib/python3", "/gruyere/_"];
        // An autograd node has a name and no line.
        self.line > 0
            // A cell with a name, or code of no file.
            && (!self.file.starts_with('<') || self.file.contains(CELL))
            && !installed.iter().any(|part| self.file.contains(part))
            && !self.is_generated()
    }

    /// Whether a library has written the file, wherever it lies: torch_geometric the message
    /// passing of a layer (`MODULE_LAYER_propagate_RANDOM.py`), torch.compile what it has compiled.
    /// By name, as in `_dryrun/lines.py`: a script may lie in the folder for temporary files too.
    fn is_generated(&self) -> bool {
        let (folder, name) = self.file.rsplit_once('/').unwrap_or(("", &self.file));
        let is_of_a_layer =
            ["torch_geometric.", "__main___"].iter().any(|part| name.starts_with(part))
                || (folder == "/tmp"
                    && ["_propagate_", "_edge_updater_"].iter().any(|part| name.contains(part)));
        is_of_a_layer || self.file.contains("/torchinductor_") || is_of_inductor(name)
    }

    /// Whether the frame is the forward of a function that torch.compile has made to train. It
    /// runs as a `torch.autograd.Function`, whose gradients are off while its backward will need
    /// what it allocates.
    fn is_compiled_forward(&self) -> bool {
        self.file.contains("/torch/_functorch/_aot_autograd/") && self.function.ends_with("forward")
    }
}

/// Whether a file's name is one that Inductor gives to what it has compiled, wherever its cache
/// lies: `c` and 51 digits of a hash in base 32 (`torch/_inductor/codecache.py`, `get_hash`).
fn is_of_inductor(name: &str) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'a'..=b'z' | b'2'..=b'7');
    name.strip_suffix(".py")
        .is_some_and(|hash| hash.len() == 52 && hash.starts_with('c') && hash.bytes().all(is_digit))
}

/// A site, for a reader.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// The stack, innermost frame first.
    pub frames: Vec<Frame>,
    /// The running module; empty if unknown.
    pub module: String,
    /// The program's activity.
    pub phase: Phase,
    /// For a backward: the site of its forward.
    pub forward: SiteId,
    /// Whether gradients were off, as far as known: not in the forward of a compiled function that
    /// trains, though they are off while it runs.
    #[serde(default)]
    pub no_grad: bool,
}

/// Bit of a site's phase word: gradients were off.
const NO_GRAD: u32 = 1 << 8;

impl Site {
    /// The line to look at: the innermost own frame of the program; without one, the outermost
    /// frame, which is nearest to it.
    pub fn line(&self) -> Option<&Frame> {
        self.frames.iter().find(|frame| frame.is_own()).or(self.frames.last())
    }
}

/// Words of a site in the record.
#[repr(C)]
#[derive(Debug, Default)]
pub struct SiteCell {
    frames: [AtomicU32; DEPTH],
    module: AtomicU32,
    forward: AtomicU32,
    /// Number of valid `frames`.
    depth: AtomicU32,
    /// Low eight bits: the phase. The next bit: [`NO_GRAD`].
    phase: AtomicU32,
}

/// Words of a frame in the record.
#[repr(C)]
#[derive(Debug, Default)]
pub struct FrameCell {
    file: AtomicU32,
    function: AtomicU32,
    line: AtomicU32,
}

/// Ends of the tables. All words only grow; each is written under the mutex of the tables, with
/// Release after what it publishes, and read with Acquire:
///
/// ```text
/// n    the entries before n are allocated and written; those of `block_sites` are allocated
/// ```
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct SiteReach {
    /// Slots of the block map with a word for their site.
    pub block_sites: AtomicU64,
    /// Sites, counting number 0, which is none.
    pub sites: AtomicU64,
    /// Frames, counting number 0.
    pub frames: AtomicU64,
    /// Words of text, counting the first, which is the empty text.
    pub text: AtomicU64,
    /// Sites that found no room in the tables.
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
pub(crate) fn block_word(state: u32, site: SiteId) -> u64 {
    u64::from(state) << 32 | u64::from(site.0)
}

/// The site in such a word, if it is of the life of `state`.
pub(crate) fn site_of_life(word: u64, state: u32) -> SiteId {
    // The low two bits are the state: live or pending.
    if (word >> 32) as u32 >> 2 == state >> 2 { SiteId(word as u32) } else { SiteId::NONE }
}

/// The tables of a record, for its writer.
pub(crate) struct Tables {
    known: Mutex<Known>,
}

/// The tables' contents so far.
#[derive(Default)]
struct Known {
    text: HashMap<String, u32>,
    frames: HashMap<[u32; 3], u32>,
    sites: HashMap<(Vec<FrameId>, [u32; 3]), u32>,
    /// Allocated entries: text, frames, sites.
    allocated: [u64; 3],
}

/// The tables' parts of the mapping.
pub(crate) trait Room {
    /// Makes `count` entries from `first` on safe to touch.
    fn allocate(&self, section: Section, first: u64, count: u64) -> bool;
    /// Number of entries of a section, at most.
    fn entries(&self, section: Section) -> u64;
    /// An allocated entry of a section.
    fn at<T: Shared>(&self, section: Section, index: u64) -> &T;
    /// The ends of the tables.
    fn reach(&self) -> &SiteReach;
}

impl Tables {
    pub(crate) fn new() -> Self {
        Self { known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`crate::Record::frame`].
    pub(crate) fn frame(&self, room: &impl Room, file: &str, function: &str, line: u32) -> FrameId {
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

    /// See [`crate::Record::site`].
    pub(crate) fn site(&self, room: &impl Room, site: &NewSite<'_>) -> SiteId {
        let mut known = self.known();
        let told = known.add_site(room, site);
        if told.is_none() {
            room.reach().untold.fetch_add(1, Ordering::Relaxed);
        }
        told.unwrap_or(SiteId::OTHER)
    }

    /// Makes the words beside the slots of the block map up to `slot` safe to touch.
    pub(crate) fn reach_block(&self, room: &impl Room, slot: u32) -> bool {
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

    /// The start of `text` among the words of text: its bytes, then as many words as they take.
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

    /// The next `count` entries of a table, allocated; skips number 0.
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

/// All sites of a record, for a reader.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sites(Vec<Site>);

impl Sites {
    /// The given sites, numbered from 1 on.
    pub fn new(sites: impl IntoIterator<Item = Site>) -> Self {
        Self(sites.into_iter().collect())
    }

    /// The site of a number. `None`: unknown, or without room.
    pub fn get(&self, id: SiteId) -> Option<&Site> {
        self.0.get(id.0.checked_sub(1)? as usize)
    }

    /// The line to look at: for a backward its forward's, if known.
    pub fn line(&self, id: SiteId) -> Option<&Frame> {
        let site = self.get(id)?;
        self.get(site.forward).unwrap_or(site).line()
    }

    /// Whether two sites are of one line; where lines are not known, whether they are one.
    pub fn are_of_one_line(&self, a: SiteId, b: SiteId) -> bool {
        match self.line(a) {
            Some(line) => self.line(b) == Some(line),
            None => a == b,
        }
    }

    /// All sites with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (SiteId, &Site)> {
        (1..).map(SiteId).zip(&self.0)
    }

    /// Whether there are none: sites are off.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads the tables as far as they make sense: another process wrote the words.
    pub(crate) fn read(sites: &[SiteCell], frames: &[FrameCell], text: &[AtomicU64]) -> Self {
        let text_at = |place: &AtomicU32| text_at(text, place.load(Ordering::Relaxed) as usize);
        let mut frames: Vec<Frame> = frames
            .iter()
            .map(|cell| Frame {
                file: text_at(&cell.file),
                function: text_at(&cell.function),
                line: cell.line.load(Ordering::Relaxed),
            })
            .collect();
        name_cells(&mut frames);
        let site = |cell: &SiteCell| {
            let depth = (cell.depth.load(Ordering::Relaxed) as usize).min(DEPTH);
            let phase = cell.phase.load(Ordering::Relaxed);
            let numbers = cell.frames[..depth].iter().map(|word| word.load(Ordering::Relaxed));
            let frames: Vec<Frame> = numbers
                .filter(|&number| number != 0)
                .filter_map(|number| frames.get(number as usize).cloned())
                .collect();
            let is_compiled = frames.iter().any(Frame::is_compiled_forward);
            Site {
                frames,
                module: text_at(&cell.module),
                phase: Phase::from_number(phase as u8),
                forward: SiteId(cell.forward.load(Ordering::Relaxed)),
                no_grad: phase & NO_GRAD != 0 && !is_compiled,
            }
        };
        Self(sites.iter().skip(1).map(site).collect())
    }
}

/// Puts the name of a cell, `In[7]`, behind the name of its file, which is a number to its user. A
/// frame without a line has it ([`crate::Record::cell`]); of a cell that has run again, the
/// highest.
fn name_cells(frames: &mut [Frame]) {
    let is_name = |frame: &&Frame| frame.line == 0 && frame.function.starts_with("In[");
    let named = frames.iter().filter(is_name);
    let names: HashMap<String, String> =
        named.map(|frame| (frame.file.clone(), frame.function.clone())).collect();
    if names.is_empty() {
        return;
    }
    for frame in frames.iter_mut().filter(|frame| frame.line > 0) {
        if let Some(name) = names.get(&frame.file) {
            frame.file = format!("{}/{name}", frame.file);
        }
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
