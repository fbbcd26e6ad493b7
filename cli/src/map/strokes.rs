//! Strokes: the pieces of a picture as they are drawn, in one row of all memory. Free memory is cut
//! where whole pages begin and end, since what lies in partly used pages is lost and what lies in
//! whole ones is not.

use clap::ValueEnum;
use gruyere_record::picture::{PAGE, Picture, Piece, PieceKind, Range, RangeKind};
use gruyere_record::{LIFETIME_NAMES, LIFETIMES};

/// What a stroke shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ink {
    /// A live block.
    Live = 0,
    /// A block that waits for streams.
    Pending = 1,
    /// Free, in whole pages that can move or go back.
    Whole = 2,
    /// Free, in whole pages that stay: of a span in use, or of a capture.
    Bound = 3,
    /// Free between blocks, in partly used pages.
    Gap = 4,
    /// Free slots of a slab in use.
    Slots = 5,
    /// What a block leaves of its slot.
    Rest = 6,
    /// The end of a slab, too short for a slot.
    Tail = 7,
    /// Mapped nowhere.
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

/// A part of a piece, all of one ink.
#[derive(Clone, Copy, Debug)]
pub struct Stroke<'a> {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// What it shows.
    pub ink: Ink,
    /// The piece that it is a part of.
    pub piece: &'a Piece,
}

/// The strokes of a range, by address; they tile it.
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
    /// The lifetime class.
    #[default]
    Lifetime,
    /// Training steps since the block came.
    Age,
    /// Bytes of the block.
    Size,
    /// The stream it was allocated on; of more than eight, those whose numbers are a multiple of
    /// eight apart look alike.
    Stream,
}

/// Classes at the most.
pub const CLASSES: usize = 8;
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

impl By {
    /// The class of a block; below [`CLASSES`].
    pub fn class(self, piece: &Piece, step: u32) -> usize {
        match self {
            By::Lifetime => usize::from(piece.lifetime) % LIFETIMES,
            By::Age => AGES.partition_point(|age| age.0 < step.saturating_sub(piece.step)),
            By::Size => SIZES.partition_point(|size| size.0 < piece.bytes),
            By::Stream => piece.stream as usize % CLASSES,
        }
    }

    /// What the classes are called.
    pub fn names(self) -> Vec<String> {
        match self {
            By::Lifetime => LIFETIME_NAMES.iter().map(|name| (*name).to_owned()).collect(),
            By::Age => AGES.iter().map(|age| age.1.to_owned()).collect(),
            By::Size => SIZES.iter().map(|size| size.1.to_owned()).collect(),
            By::Stream => (0..CLASSES).map(|class| format!("stream {class}")).collect(),
        }
    }
}
