//! Strokes: the pieces of a picture as drawn, in one row of all memory. Free memory is cut at the
//! bounds of whole pages: free bytes in partly used pages are lost, those in whole pages are not.

use std::collections::HashMap;
use std::fmt;

use clap::ValueEnum;
use gruyere_record::picture::{PAGE, Picture, Piece, PieceKind, Range, RangeKind};
use gruyere_record::sites::{NOT_KNOWN, Phase, Place, SiteId, Sites};
use gruyere_record::{LIFETIME_NAMES, LIFETIMES};

/// Kind of memory that a stroke shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ink {
    /// A live block.
    Live = 0,
    /// A freed block that waits for streams.
    Pending = 1,
    /// Free, in whole pages that can move or return to the driver.
    Whole = 2,
    /// Free, in whole pages that must stay: of a span in use, or of a capture.
    Bound = 3,
    /// Free between blocks, in partly used pages.
    Gap = 4,
    /// Free slots of a slab in use.
    Slots = 5,
    /// The rest of a slot behind its block.
    Rest = 6,
    /// The end of a slab, too short for a slot.
    Tail = 7,
    /// Not mapped.
    Spare = 8,
}

/// Kinds of ink.
pub const INKS: usize = 9;

impl Ink {
    /// All of them, by number.
    pub const ALL: [Ink; INKS] = [
        Ink::Live,
        Ink::Pending,
        Ink::Whole,
        Ink::Bound,
        Ink::Gap,
        Ink::Slots,
        Ink::Rest,
        Ink::Tail,
        Ink::Spare,
    ];

    /// Free memory in partly used pages: the only real fragmentation.
    pub fn is_unusable(self) -> bool {
        matches!(self, Ink::Gap | Ink::Slots | Ink::Rest | Ink::Tail)
    }
}

/// Part of a piece, of a single ink.
#[derive(Clone, Copy, Debug)]
pub struct Stroke<'a> {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// Kind of memory.
    pub ink: Ink,
    /// The piece that contains it.
    pub piece: &'a Piece,
}

/// The strokes that tile a range, by address.
pub fn of_range<'a>(picture: &'a Picture, range: &'a Range) -> impl Iterator<Item = Stroke<'a>> {
    let pages = picture.pages_of(range);
    let in_use = pages.iter().any(|page| !page.is_free());
    let stays = range.capture != 0 || (range.kind != RangeKind::Stitched && in_use);
    let whole = if stays { Ink::Bound } else { Ink::Whole };
    picture.pieces_of(range).iter().flat_map(move |piece| {
        let ink = match piece.kind {
            PieceKind::Live => Some(Ink::Live),
            PieceKind::Pending => Some(Ink::Pending),
            PieceKind::FreeSlots => Some(Ink::Slots),
            PieceKind::SlotRest => Some(Ink::Rest),
            PieceKind::SlabTail => Some(Ink::Tail),
            PieceKind::FreeRun | PieceKind::IdleSlab => None,
        };
        let page_at = move |address: u64| ((address - range.address) / PAGE) as usize;
        let is_free = move |page: usize| pages.get(page).is_some_and(|page| page.is_free());
        let mut at = piece.address;
        std::iter::from_fn(move || {
            if at >= piece.end() {
                return None;
            }
            let address = at;
            let ink = ink.unwrap_or_else(|| {
                let free = is_free(page_at(at));
                let mut page = page_at(at) + 1;
                at = range.address + page as u64 * PAGE;
                while at < piece.end() && is_free(page) == free {
                    page += 1;
                    at += PAGE;
                }
                if free { whole } else { Ink::Gap }
            });
            at = if at == address { piece.end() } else { at.min(piece.end()) };
            Some(Stroke { address, bytes: at - address, ink, piece })
        })
    })
}

/// What live blocks are coloured by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// The lifetime class; of a block without one (`auto`), the phase where that is known.
    #[default]
    Lifetime,
    /// Training steps since the block came.
    Age,
    /// Bytes of the block.
    Size,
    /// The stream it was allocated on; of more than eight, those whose numbers are a multiple of
    /// eight apart look alike.
    Stream,
    /// The line of the program that it came from (`blame:`): the ten that hold most, and others.
    Site,
    /// The module that ran, as `named_modules` calls it (`blame:`), or the line where none did;
    /// modules that differ in numbers only are one.
    Module,
    /// What the program was doing (`blame:`): forward, backward, an optimizer, a collective.
    Phase,
}

/// Upper bound of the number of classes.
pub const CLASSES: usize = NAMED + 2;
/// Lines or modules with a class of their own; then come "others" and "unknown".
const NAMED: usize = 10;
const OTHERS: usize = NAMED;
const UNKNOWN: usize = NAMED + 1;
/// Streams with distinct colours.
pub const STREAMS: usize = 8;
const AGES: [(u32, &str); 6] = [
    (0, "this step"),
    (1, "1 step"),
    (3, "2-3 steps"),
    (15, "4-15 steps"),
    (255, "16-255 steps"),
    (u32::MAX, "older"),
];
const SIZES: [(u64, &str); 6] = [
    (4 << 10, "to 4 KiB"),
    (64 << 10, "to 64 KiB"),
    (1 << 20, "to 1 MiB"),
    (16 << 20, "to 16 MiB"),
    (256 << 20, "to 256 MiB"),
    (u64::MAX, "larger"),
];

/// Assigns blocks to classes.
pub struct Classes<'a> {
    by: By,
    step: u32,
    sites: &'a Sites,
    /// By line or module: the class of each site that has its own.
    of_site: HashMap<SiteId, usize>,
    names: Vec<String>,
}

impl<'a> Classes<'a> {
    /// Classes of a picture whose blocks came from `sites`.
    pub fn new(picture: &Picture, sites: &'a Sites, by: By) -> Self {
        let named = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let phases = || Phase::ALL.iter().skip(1).map(|phase| phase.name());
        let mut of_site = HashMap::new();
        let names = match by {
            By::Lifetime => LIFETIME_NAMES.into_iter().chain(phases()).map(str::to_owned).collect(),
            By::Age => named(&AGES.map(|age| age.1)),
            By::Size => named(&SIZES.map(|size| size.1)),
            By::Stream => (0..STREAMS).map(|class| format!("stream {class}")).collect(),
            By::Phase => [NOT_KNOWN].into_iter().chain(phases()).map(str::to_owned).collect(),
            By::Site | By::Module => {
                let (names, classes) = largest_places(picture, sites, by);
                of_site = classes;
                names
            }
        };
        Self { by, step: picture.step, sites, of_site, names }
    }

    /// The class of a block; below [`CLASSES`].
    pub fn of(&self, piece: &Piece) -> usize {
        let phase = || self.sites.phase(piece.site) as usize;
        match self.by {
            By::Lifetime => match (usize::from(piece.lifetime) % LIFETIMES, phase()) {
                (0, phase @ 1..) => LIFETIMES - 1 + phase,
                (lifetime, _) => lifetime,
            },
            By::Age => AGES.partition_point(|age| age.0 < self.step.saturating_sub(piece.step)),
            By::Size => SIZES.partition_point(|size| size.0 < piece.bytes),
            By::Stream => piece.stream as usize % STREAMS,
            By::Site | By::Module => self.of_site.get(&piece.site).copied().unwrap_or(OTHERS),
            By::Phase => phase(),
        }
    }

    /// Names of the classes.
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

/// A coloured entity: a line, or modules that differ only in numbers.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class {
    /// The displayed name.
    pub name: String,
    /// Distinguishes entities with the same name: lines of files with one name.
    whole: String,
}

impl Class {
    /// Class of a line.
    pub fn of(place: Place<'_>) -> Self {
        Self { name: place.to_string(), whole: format!("{place:?}") }
    }

    /// Class of a module: `layers.*.mlp` for all layers, instead of a colour for each.
    pub fn of_module(place: Place<'_>) -> Self {
        let Place::Module(path) = place else { return Self::of(place) };
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit());
        // Numbers as `3` and as `Sequential[3]`.
        let alike = |part: &str| match part.strip_suffix(']').and_then(|part| part.split_once('['))
        {
            Some((class, number)) if is_number(number) => format!("{class}[*]"),
            _ if is_number(part) => "*".to_owned(),
            _ => part.to_owned(),
        };
        let parts: Vec<String> = path.split('.').map(alike).collect();
        Self { name: parts.join("."), whole: String::new() }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.name)
    }
}

/// The largest lines or modules as class names, and the class of each site.
fn largest_places(
    picture: &Picture,
    sites: &Sites,
    by: By,
) -> (Vec<String>, HashMap<SiteId, usize>) {
    let place = |id| match by {
        By::Module => Class::of_module(sites.module(id)),
        _ => Class::of(sites.place(id)),
    };
    let mut of_site: HashMap<SiteId, u64> = HashMap::new();
    for piece in picture.pieces.iter().filter(|piece| piece.kind == PieceKind::Live) {
        *of_site.entry(piece.site).or_default() += piece.bytes;
    }
    let mut of_place: HashMap<Class, u64> = HashMap::new();
    for (&id, &bytes) in &of_site {
        *of_place.entry(place(id)).or_default() += bytes;
    }
    let unknown = Class::of(Place::NotKnown);
    of_place.remove(&unknown);
    let mut order: Vec<(Class, u64)> = of_place.into_iter().collect();
    order.sort_by(|(a, more), (b, less)| less.cmp(more).then_with(|| a.cmp(b)));
    let others = format!("{} others", order.len().saturating_sub(NAMED));
    order.truncate(NAMED);
    let class = |id| match place(id) {
        place if place == unknown => UNKNOWN,
        place => order.iter().position(|named| named.0 == place).unwrap_or(OTHERS),
    };
    let classes = of_site.keys().map(|&id| (id, class(id))).collect();
    let mut names: Vec<String> = order.iter().map(|(place, _)| place.name.clone()).collect();
    names.resize(NAMED, String::new());
    names.extend([others, NOT_KNOWN.to_owned()]);
    (names, classes)
}
