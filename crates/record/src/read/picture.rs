//! The layout of a device's memory, built from the record: mappings, their blocks, and the memory
//! between blocks.
//!
//! Three levels, each a vector that the one above points into by index:
//!
//! ```text
//! range   contiguous address space with memory behind it: a span, or a row of stitched pages;
//!         tiled by pieces, made of pages
//! piece   a block, or the memory between two: by address, each begins where the last one ends
//! page    2 MiB of physical memory (a chunk's, or a part of a span), with its bytes by use; also
//!         pages mapped nowhere
//! ```
//!
//! A record is another process's data and is read while it is written: a page may appear in two
//! views or in none, a block outside all ranges or upon another. Whatever does not fit together is
//! left out and counted ([`Misfits`]). No allocation follows a length in the record, and each step
//! of the work consumes an entry that was read.
#![deny(unsafe_code, clippy::unwrap_used)]

mod pieces;
mod ranges;

use std::ops;

use crate::held::Held;
use crate::sites::SiteId;
use crate::{BlockEntry, BlockState, DeviceGauge, LIFETIMES, Reader, SegmentEntry};

/// A page (bytes): the unit in which physical memory is mapped and moved.
pub const PAGE: u64 = 2 << 20;
pub use crate::stream::NO_STREAM;
/// Most pages shown, mapped ones and stale aliases: 8 TiB. [`Misfits::segments`] counts the rest.
pub const MOST_PAGES: usize = 1 << 22;
/// Looks at a record under write until one fits together.
const TRIES: usize = 3;

/// Kind of a piece of address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PieceKind {
    /// A block held by the program.
    Live = 0,
    /// A block freed by the program, waiting for streams.
    Pending = 1,
    /// Free memory between blocks, for any request that fits.
    FreeRun = 2,
    /// Adjacent free slots of a slab that has blocks: only for small requests of its size class.
    FreeSlots = 3,
    /// The part of a slot that its block does not fill.
    SlotRest = 4,
    /// The end of a slab, too short for a slot.
    SlabTail = 5,
    /// A slab without a block: it goes back to the arena when memory is short.
    IdleSlab = 6,
}

impl PieceKind {
    /// All of them, by number.
    pub const ALL: [PieceKind; 7] = [
        PieceKind::Live,
        PieceKind::Pending,
        PieceKind::FreeRun,
        PieceKind::FreeSlots,
        PieceKind::SlotRest,
        PieceKind::SlabTail,
        PieceKind::IdleSlab,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            PieceKind::Live => "live",
            PieceKind::Pending => "pending",
            PieceKind::FreeRun => "free_run",
            PieceKind::FreeSlots => "free_slots",
            PieceKind::SlotRest => "slot_rest",
            PieceKind::SlabTail => "slab_tail",
            PieceKind::IdleSlab => "idle_slab",
        }
    }

    /// A block: live or pending.
    pub fn is_block(self) -> bool {
        matches!(self, PieceKind::Live | PieceKind::Pending)
    }
}

/// A piece of a range. The pieces of a range tile it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub address: u64,
    /// Length. For a block: rounded up, as it counts as live.
    pub bytes: u64,
    /// For a block: bytes asked for by the program; else 0.
    pub requested: u64,
    /// The size class (bytes per slot) inside a slab, else 0.
    pub slot: u64,
    /// The process-wide number of the stream, for blocks and inside slabs; else [`NO_STREAM`].
    pub stream: u32,
    /// For a block: the training step of its allocation; else 0.
    pub step: u32,
    /// What it is.
    pub kind: PieceKind,
    /// The lifetime class of the block, the slab or the range.
    pub lifetime: u8,
    /// 0, or 1 + the index of the capture pool.
    pub capture: u8,
    /// For a block: whether it was sent to other processes.
    pub is_sent: bool,
    /// For a block: the site of its allocation, or of its slab's.
    pub site: SiteId,
}

impl Piece {
    /// The address after its last byte.
    pub fn end(&self) -> u64 {
        self.address + self.bytes
    }
}

/// Kind of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RangeKind {
    /// A span of a driver pool, or a plain allocation of the heap: its pages cannot move.
    Span = 0,
    /// Pages of chunks, mapped side by side in one reservation: each can move.
    Stitched = 1,
    /// Blocks without a segment: from `backing:passthrough`, or from a record that does not fit
    /// together.
    Alone = 2,
}

impl RangeKind {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            RangeKind::Span => "span",
            RangeKind::Stitched => "stitched",
            RangeKind::Alone => "alone",
        }
    }
}

/// Contiguous address space with memory behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// What it is.
    pub kind: RangeKind,
    /// The lifetime class it was taken for.
    pub lifetime: u8,
    /// 0, or 1 + the index of the capture pool.
    pub capture: u8,
    /// Its pieces in [`Picture::pieces`]; they tile it.
    pub pieces: ops::Range<usize>,
    /// Its pages in [`Picture::pages`], in order: each has [`PAGE`] bytes, the last maybe fewer.
    pub pages: ops::Range<usize>,
}

/// Physical memory: a page of a chunk, or a part of a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The chunk's number; `None` for a span or a block of its own.
    pub chunk: Option<u32>,
    /// The page's number in the chunk or the span.
    pub number: u32,
    /// Its length: [`PAGE`]; less only at the end of a range that is no multiple of it.
    pub bytes: u32,
    /// Its address; `None`: spare, mapped nowhere (except perhaps in retired views).
    pub address: Option<u64>,
    /// Bytes of live blocks.
    pub live: u32,
    /// Bytes of blocks waiting for streams.
    pub pending: u32,
    /// Bytes of free runs and idle slabs.
    pub free: u32,
    /// Free bytes of slabs that have blocks: slots, rests of slots, tails.
    pub slab_free: u32,
}

impl Page {
    /// Whether it is mapped nowhere.
    pub fn is_spare(&self) -> bool {
        self.address.is_none()
    }

    /// Whether it is mapped and empty: no block, and no slab with a block.
    pub fn is_free(&self) -> bool {
        !self.is_spare() && self.free == self.bytes
    }

    /// Whether nothing in it is free.
    pub fn is_full(&self) -> bool {
        !self.is_spare() && self.free == 0 && self.slab_free == 0
    }
}

/// A part of a mapping without pages of the arena: its pages are reached elsewhere or are spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleAlias {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The mapped chunk.
    pub chunk: u32,
    /// The chunk's first page here.
    pub number: u32,
    /// Whether the whole mapping is retired: it goes once the device has finished with its old
    /// blocks.
    pub retired: bool,
}

/// Address space for stitched pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The lifetime class it was reserved for.
    pub lifetime: u8,
    /// 0, or 1 + the index of the capture pool.
    pub capture: u8,
}

/// Bytes by use. Always `live + pending + free_whole + free_partial + spare == held`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Physical bytes of spans and chunks (and of blocks without a segment).
    pub held: u64,
    /// Live blocks, rounded up.
    pub live: u64,
    /// Bytes asked for by live blocks.
    pub live_requested: u64,
    /// Number of live blocks.
    pub live_blocks: u64,
    /// Live bytes by lifetime class.
    pub live_by_lifetime: [u64; LIFETIMES],
    /// Blocks waiting for streams.
    pub pending: u64,
    /// Number of waiting blocks.
    pub pending_blocks: u64,
    /// Free in whole mapped pages: stitched ones can move to where a run is needed, or go back to
    /// the driver.
    pub free_whole: u64,
    /// Of that, immovable: whole pages of a span that also has blocks, and of capture pools. Only
    /// requests that fit there can use it.
    pub free_whole_bound: u64,
    /// Free in pages that have blocks: the only real fragmentation. The next four are its parts.
    pub free_partial: u64,
    /// Of that, gaps between large blocks; for any request that fits.
    pub gaps: u64,
    /// Of that, free slots of slabs that have blocks; for small requests of their class.
    pub free_slots: u64,
    /// Of that, rests of slots, unusable while their blocks live.
    pub slot_rests: u64,
    /// Of that, ends of slabs too short for a slot.
    pub slab_tails: u64,
    /// Physical memory mapped nowhere: a growing arena takes it first.
    pub spare: u64,
    /// Mapped pages without free bytes.
    pub full_pages: u64,
    /// Mapped pages with both blocks and free bytes.
    pub partial_pages: u64,
    /// Empty mapped pages.
    pub free_pages: u64,
    /// Pages mapped nowhere.
    pub spare_pages: u64,
    /// Address space of retired mappings.
    pub retired: u64,
    /// Address space of other mappings in which no page belongs to the arena.
    pub stale_aliases: u64,
    /// Address space reserved for stitching.
    pub reserved_address: u64,
    /// The longest free run (bytes), idle slabs included.
    pub largest_run: u64,
}

impl Sums {
    /// Free bytes held, anywhere.
    pub fn free(&self) -> u64 {
        self.free_whole + self.free_partial + self.spare
    }

    /// Free bytes that can become one run: movable whole pages and spare ones.
    pub fn movable(&self) -> u64 {
        self.free_whole - self.free_whole_bound + self.spare
    }
}

/// What did not fit together, by its treatment. All zero in a record at rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misfits {
    /// Entries that changed at every read.
    pub torn: u64,
    /// Segments left out or cut: upon another one, with impossible bounds, or beyond
    /// [`MOST_PAGES`].
    pub segments: u64,
    /// Pages found in two views; shown in the one at the lower address.
    pub pages_twice: u64,
    /// Mappings of a missing chunk; its length is taken from the mapping.
    pub chunks_missing: u64,
    /// Slabs left out or cut: outside all ranges, upon another one, or with an impossible slot.
    pub slabs: u64,
    /// Blocks outside all ranges, shown alone.
    pub blocks_alone: u64,
    /// Blocks left out: upon another one, or with impossible bounds.
    pub blocks_dropped: u64,
    /// Blocks cut at the end of their range or slab.
    pub blocks_cut: u64,
    /// Blocks in a slab that do not begin at a slot, or are longer than one.
    pub blocks_off_slot: u64,
}

impl Misfits {
    /// The sum of all.
    pub fn total(&self) -> u64 {
        self.parts().iter().map(|part| part.1).sum()
    }

    /// The parts with their names in reports.
    pub fn parts(&self) -> [(&'static str, u64); 9] {
        [
            ("torn", self.torn),
            ("segments", self.segments),
            ("pages_twice", self.pages_twice),
            ("chunks_missing", self.chunks_missing),
            ("slabs", self.slabs),
            ("blocks_alone", self.blocks_alone),
            ("blocks_dropped", self.blocks_dropped),
            ("blocks_cut", self.blocks_cut),
            ("blocks_off_slot", self.blocks_off_slot),
        ]
    }
}

/// The layout of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picture {
    /// The device's number in the process.
    pub device: u32,
    /// The training step now; 0 if unknown.
    pub step: u32,
    /// The request that lost is measured by; 0: by pages ([`Held::typical_request`]).
    pub typical_request: u64,
    /// The ranges, by address.
    pub ranges: Vec<Range>,
    /// By address; a range's pieces are adjacent.
    pub pieces: Vec<Piece>,
    /// Mapped pages by address, then spare ones by chunk.
    pub pages: Vec<Page>,
    /// The stale aliases, by address.
    pub stale_aliases: Vec<StaleAlias>,
    /// The reservations, by address.
    pub reservations: Vec<Reservation>,
    /// Bytes by use.
    pub sums: Sums,
    /// What did not fit together.
    pub misfits: Misfits,
}

impl Picture {
    /// The layout of `device` from the record; `None`: no such device. Looks at a record under
    /// write up to twice more if the first look does not fit together.
    pub fn read(reader: &Reader<'_>, device: u32) -> Option<Picture> {
        let recorded = reader.device(device)?;
        let step = recorded.gauge(DeviceGauge::Step);
        let mut best: Option<Picture> = None;
        for _ in 0..TRIES {
            let (blocks, segments) = (reader.blocks(), reader.segments());
            let mut picture = Picture::of(device, &segments.entries, &blocks.entries);
            picture.step = u32::try_from(step).unwrap_or(u32::MAX);
            picture.typical_request = recorded.gauge(DeviceGauge::TypicalRequest);
            picture.misfits.torn = blocks.torn + segments.torn;
            let misfits = picture.misfits.total();
            if best.as_ref().is_none_or(|best| misfits < best.misfits.total()) {
                best = Some(picture);
            }
            if misfits == 0 {
                break;
            }
        }
        best
    }

    /// The layout of `device` from these entries; skips those of other devices.
    pub fn of(
        device: u32,
        segments: &[SegmentEntry],
        blocks: &[(BlockEntry, BlockState)],
    ) -> Picture {
        let mut picture = Picture { device, ..Picture::default() };
        let mut blocks = pieces::blocks_of(&mut picture, blocks);
        let slabs = ranges::build(&mut picture, segments, &blocks);
        pieces::tile(&mut picture, &slabs, &mut blocks);
        picture.sum_up();
        picture
    }

    /// The pieces of a range.
    pub fn pieces_of(&self, range: &Range) -> &[Piece] {
        self.pieces.get(range.pieces.clone()).unwrap_or(&[])
    }

    /// The pages of a range.
    pub fn pages_of(&self, range: &Range) -> &[Page] {
        self.pages.get(range.pages.clone()).unwrap_or(&[])
    }

    /// The range containing `address`.
    pub fn range_at(&self, address: u64) -> Option<&Range> {
        let after = self.ranges.partition_point(|range| range.address <= address);
        let range = self.ranges.get(after.checked_sub(1)?)?;
        (address - range.address < range.bytes).then_some(range)
    }

    /// The piece containing `address`.
    pub fn piece_at(&self, address: u64) -> Option<&Piece> {
        let pieces = self.pieces_of(self.range_at(address)?);
        let after = pieces.partition_point(|piece| piece.address <= address);
        pieces.get(after.checked_sub(1)?)
    }

    /// The `most` largest live blocks, largest first.
    pub fn largest_live(&self, most: usize) -> Vec<Piece> {
        largest(self.pieces.iter().filter(|piece| piece.kind == PieceKind::Live).copied(), most)
    }

    /// The `most` longest free runs, longest first. A run includes idle slabs beside free memory.
    pub fn largest_runs(&self, most: usize) -> Vec<Piece> {
        largest(self.free_runs(), most)
    }

    /// Free runs by address, idle slabs beside them included.
    pub fn free_runs(&self) -> impl Iterator<Item = Piece> {
        self.ranges.iter().flat_map(|range| {
            let is_free =
                |piece: &Piece| matches!(piece.kind, PieceKind::FreeRun | PieceKind::IdleSlab);
            let runs =
                self.pieces_of(range).chunk_by(move |one, next| is_free(one) && is_free(next));
            runs.filter(move |run| run.first().is_some_and(is_free)).map(|run| {
                let bytes = run.iter().map(|piece| piece.bytes).sum();
                let free =
                    Piece { kind: PieceKind::FreeRun, slot: 0, stream: NO_STREAM, bytes, ..run[0] };
                Piece { lifetime: range.lifetime, capture: range.capture, ..free }
            })
        })
    }

    /// The sums as [`Held`].
    pub fn held(&self) -> Held {
        let Picture { sums, typical_request, .. } = self;
        let typical_request = *typical_request;
        let found_lost = match typical_request {
            0 => sums.free_partial,
            least => {
                let runs = self.free_runs().map(|run| run.bytes).filter(|&bytes| bytes >= least);
                sums.free().saturating_sub(runs.sum::<u64>() + sums.spare)
            }
        };
        let Sums { held, live, pending: waiting, .. } = *sums;
        Held { held, live, waiting, found_lost, typical_request }
    }

    fn sum_up(&mut self) {
        let mut sums = Sums::default();
        for piece in &self.pieces {
            let bytes = piece.bytes;
            match piece.kind {
                PieceKind::Live => {
                    sums.live += bytes;
                    sums.live_requested = sums.live_requested.saturating_add(piece.requested);
                    sums.live_blocks += 1;
                    sums.live_by_lifetime[usize::from(piece.lifetime) % LIFETIMES] += bytes;
                }
                PieceKind::Pending => {
                    sums.pending += bytes;
                    sums.pending_blocks += 1;
                }
                PieceKind::FreeSlots => sums.free_slots += bytes,
                PieceKind::SlotRest => sums.slot_rests += bytes,
                PieceKind::SlabTail => sums.slab_tails += bytes,
                PieceKind::FreeRun | PieceKind::IdleSlab => {}
            }
        }
        for range in &self.ranges {
            let pages = &self.pages[range.pages.clone()];
            let whole: u64 =
                pages.iter().filter(|page| page.is_free()).map(|page| u64::from(page.bytes)).sum();
            let stays = range.kind == RangeKind::Span && whole < range.bytes;
            sums.free_whole += whole;
            sums.free_whole_bound += if stays || range.capture != 0 { whole } else { 0 };
        }
        for page in &self.pages {
            sums.held += u64::from(page.bytes);
            match page {
                page if page.is_spare() => {
                    sums.spare += u64::from(page.bytes);
                    sums.spare_pages += 1;
                }
                page if page.is_free() => sums.free_pages += 1,
                page if page.is_full() => sums.full_pages += 1,
                page => {
                    sums.gaps += u64::from(page.free);
                    sums.partial_pages += 1;
                }
            }
        }
        sums.free_partial = sums.gaps + sums.free_slots + sums.slot_rests + sums.slab_tails;
        let of = |retired: bool| {
            self.stale_aliases.iter().filter(move |stale_alias| stale_alias.retired == retired)
        };
        sums.retired = of(true).map(|stale_alias| stale_alias.bytes).sum();
        sums.stale_aliases = of(false).map(|stale_alias| stale_alias.bytes).sum();
        sums.reserved_address =
            self.reservations.iter().fold(0, |sum: u64, range| sum.saturating_add(range.bytes));
        sums.largest_run = self.free_runs().map(|run| run.bytes).max().unwrap_or(0);
        self.sums = sums;
    }
}

/// The `most` largest, largest first; equal sizes by address.
fn largest(pieces: impl Iterator<Item = Piece>, most: usize) -> Vec<Piece> {
    let mut found: Vec<Piece> = Vec::new();
    let order = |piece: &Piece| (std::cmp::Reverse(piece.bytes), piece.address);
    for piece in pieces {
        found.push(piece);
        // At most twice as many as wanted, so a million pieces cost a few sorts of few.
        if found.len() >= most.saturating_mul(2).max(64) {
            found.sort_unstable_by_key(order);
            found.truncate(most);
        }
    }
    found.sort_unstable_by_key(order);
    found.truncate(most);
    found
}

impl From<BlockState> for PieceKind {
    fn from(state: BlockState) -> PieceKind {
        match state {
            BlockState::Live => PieceKind::Live,
            BlockState::Pending => PieceKind::Pending,
            BlockState::Free => PieceKind::FreeRun,
        }
    }
}
