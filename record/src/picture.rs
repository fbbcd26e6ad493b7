//! The layout of a device's memory, put together from the record: what is mapped where, which
//! blocks lie in it, and what lies between them.
//!
//! Three levels, each a vector that the one above points into by index:
//!
//! ```text
//! range   contiguous address space with memory behind it: a span, or a row of stitched pages;
//!         tiled by pieces, made of pages
//! piece   a block, or what lies between two: by address, each begins where the one before ends
//! page    2 MiB of physical memory (a chunk's, or a part of a span): how much of it is what; also
//!         those that are mapped nowhere
//! ```
//!
//! A record is another process's data, and is read while it is written: a page may be found in two
//! views or in none, a block outside all ranges or upon another. Whatever does not fit together is
//! left out and counted ([`Misfits`]); nothing is allocated by a length that the record says, and
//! each step of the work consumes an entry that was read.
#![deny(unsafe_code, clippy::unwrap_used)]

mod pieces;
mod ranges;

use std::ops;

use super::held::Held;
use super::sites::SiteId;
use super::{BlockEntry, BlockState, DeviceGauge, LIFETIMES, Reader, SegmentEntry};

/// A page (bytes): the unit in which physical memory is mapped and moved.
pub const PAGE: u64 = 2 << 20;
pub use super::stream::NO_STREAM;
/// Pages that are looked at, mapped ones and stale aliases: 8 TiB. What a record says beyond is
/// counted in [`Misfits::segments`].
pub const MOST_PAGES: usize = 1 << 22;
/// Looks at a record that is being written, until one fits together.
const TRIES: usize = 3;

/// What a piece of address space is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PieceKind {
    /// A block in the program's hands.
    Live = 0,
    /// A block that the program freed and that waits for streams.
    Pending = 1,
    /// Free memory between blocks, which any request of its size can get.
    FreeRun = 2,
    /// Free slots of a slab that has blocks, next to each other: for small requests of its size
    /// class only.
    FreeSlots = 3,
    /// What a block leaves of its slot.
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
    /// Length. Of a block: as it was rounded up, which is what counts as live.
    pub bytes: u64,
    /// Of a block: what the program asked for; else 0.
    pub requested: u64,
    /// The size class (bytes of a slot) where it lies in a slab, else 0.
    pub slot: u64,
    /// The process-wide number of the stream, of a block and of what lies in a slab; else
    /// [`NO_STREAM`].
    pub stream: u32,
    /// Of a block: the training step of its allocation; else 0.
    pub step: u32,
    /// What it is.
    pub kind: PieceKind,
    /// The lifetime class of the block, the slab or the range.
    pub lifetime: u8,
    /// 0, or 1 + the index of the capture pool.
    pub capture: u8,
    /// Of a block: where in the program it came from, or its slab did.
    pub site: SiteId,
}

impl Piece {
    /// The byte behind its last.
    pub fn end(&self) -> u64 {
        self.address + self.bytes
    }
}

/// What a range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RangeKind {
    /// A span of a driver pool, or a plain allocation of the heap's: its pages cannot move.
    Span = 0,
    /// Pages of chunks, mapped next to each other inside one reservation: each can move.
    Stitched = 1,
    /// Blocks without a segment: those of `backing:passthrough`, or of a record that does not fit
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
    /// The lifetime class that it was taken for.
    pub lifetime: u8,
    /// 0, or 1 + the index of the capture pool.
    pub capture: u8,
    /// Which of [`Picture::pieces`] tile it.
    pub pieces: ops::Range<usize>,
    /// Which of [`Picture::pages`] lie behind it, in order: each holds [`PAGE`] bytes, the last one
    /// maybe less.
    pub pages: ops::Range<usize>,
}

/// Physical memory: a page of a chunk, or of what is behind a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The chunk's number; `None` behind a span or a block of its own.
    pub chunk: Option<u32>,
    /// Which page of the chunk or of the span.
    pub number: u32,
    /// Its length: [`PAGE`], less only at the end of a range that is no multiple of it.
    pub bytes: u32,
    /// Where it is reached; `None`: it is spare, mapped nowhere (but in retired views, maybe).
    pub address: Option<u64>,
    /// Bytes of live blocks.
    pub live: u32,
    /// Bytes of blocks that wait for streams.
    pub pending: u32,
    /// Bytes of free runs and idle slabs.
    pub free: u32,
    /// Free bytes of slabs that have blocks: slots, rests of slots, tails.
    pub slab_free: u32,
}

impl Page {
    /// Mapped nowhere.
    pub fn is_spare(&self) -> bool {
        self.address.is_none()
    }

    /// Mapped, and nothing in it: no block, and no slab that has one.
    pub fn is_free(&self) -> bool {
        !self.is_spare() && self.free == self.bytes
    }

    /// Nothing free in it.
    pub fn is_full(&self) -> bool {
        !self.is_spare() && self.free == 0 && self.slab_free == 0
    }
}

/// A part of a mapping in which no page belongs to the arena: its pages are reached elsewhere, or
/// are spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleAlias {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The chunk that is mapped.
    pub chunk: u32,
    /// The first page of it.
    pub number: u32,
    /// The whole mapping is retired: it goes once the device is done with what was there.
    pub retired: bool,
}

/// Address space in which stitched pages are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The lifetime class that it was reserved for.
    pub lifetime: u8,
    /// 0, or 1 + the index of the capture pool.
    pub capture: u8,
}

/// Where the bytes are. `live + pending + free_whole + free_partial + spare == held`, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Physical bytes of spans and chunks (and of blocks that are alone).
    pub held: u64,
    /// Live blocks, as rounded.
    pub live: u64,
    /// What was asked for them.
    pub live_requested: u64,
    /// How many there are.
    pub live_blocks: u64,
    /// Live bytes by lifetime class.
    pub live_by_lifetime: [u64; LIFETIMES],
    /// Blocks that wait for streams.
    pub pending: u64,
    /// How many there are.
    pub pending_blocks: u64,
    /// Free in whole pages that are mapped: stitched ones can move to where a run is needed, or go
    /// back to the driver.
    pub free_whole: u64,
    /// Of that, what cannot move: whole pages of a span that also has blocks, and of capture pools.
    /// Only requests that fit there can have it.
    pub free_whole_bound: u64,
    /// Free in pages that have blocks: the only real fragmentation. The four that follow are its
    /// parts.
    pub free_partial: u64,
    /// Of that, gaps between large blocks; any request that fits can have one.
    pub gaps: u64,
    /// Of that, free slots of slabs that have blocks; small requests of their class can have them.
    pub free_slots: u64,
    /// Of that, what blocks leave of their slots; nobody can have it while the block lives.
    pub slot_rests: u64,
    /// Of that, ends of slabs that are too short for a slot.
    pub slab_tails: u64,
    /// Physical memory mapped nowhere: the first that a growing arena takes.
    pub spare: u64,
    /// Mapped pages with nothing free.
    pub full_pages: u64,
    /// Mapped pages with blocks and something free.
    pub partial_pages: u64,
    /// Mapped pages without anything.
    pub free_pages: u64,
    /// Pages mapped nowhere.
    pub spare_pages: u64,
    /// Address space of retired mappings.
    pub retired: u64,
    /// Address space of the other mappings in which no page belongs to the arena.
    pub stale_aliases: u64,
    /// Address space reserved for stitching.
    pub reserved_address: u64,
    /// The longest free run (bytes), idle slabs counted in.
    pub largest_run: u64,
}

impl Sums {
    /// Free bytes held, wherever they are.
    pub fn free(&self) -> u64 {
        self.free_whole + self.free_partial + self.spare
    }

    /// Free bytes that can become one run: whole pages that can move, and spare ones.
    pub fn movable(&self) -> u64 {
        self.free_whole - self.free_whole_bound + self.spare
    }
}

/// What did not fit together, by what became of it. All zero in a record that nobody writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misfits {
    /// Entries that changed each time they were read.
    pub torn: u64,
    /// Segments left out or cut: upon another one, of impossible bounds, or beyond [`MOST_PAGES`].
    pub segments: u64,
    /// Pages found in two views; shown in the one at the lower address.
    pub pages_twice: u64,
    /// Mappings of a chunk that was not found; its length is taken from the mapping.
    pub chunks_missing: u64,
    /// Slabs left out or cut: outside of all ranges, upon another one, or of an impossible slot.
    pub slabs: u64,
    /// Blocks outside of all ranges, shown alone.
    pub blocks_alone: u64,
    /// Blocks left out: they begin upon another one, or have impossible bounds.
    pub blocks_dropped: u64,
    /// Blocks cut where their range or slab ends.
    pub blocks_cut: u64,
    /// Blocks in a slab that do not begin at a slot, or are longer than one.
    pub blocks_off_slot: u64,
}

impl Misfits {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.parts().iter().map(|part| part.1).sum()
    }

    /// With their names in reports.
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
    /// The training step now; 0 where it is not known.
    pub step: u32,
    /// The request by which is told what is lost; 0: by pages ([`Held::typical_request`]).
    pub typical_request: u64,
    /// The ranges, by address.
    pub ranges: Vec<Range>,
    /// By address; those of a range are next to each other.
    pub pieces: Vec<Piece>,
    /// The mapped ones by address; then the spare ones, by chunk.
    pub pages: Vec<Page>,
    /// The stale aliases, by address.
    pub stale_aliases: Vec<StaleAlias>,
    /// The reservations, by address.
    pub reservations: Vec<Reservation>,
    /// Where the bytes are.
    pub sums: Sums,
    /// What did not fit together.
    pub misfits: Misfits,
}

impl Picture {
    /// The layout of `device` as the record shows it; `None`: it has no such device. A record that
    /// is being written is looked at again, up to twice, where the first look does not fit
    /// together.
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

    /// The layout of `device` by these entries, of which those of other devices are passed over.
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

    /// The pages behind a range.
    pub fn pages_of(&self, range: &Range) -> &[Page] {
        self.pages.get(range.pages.clone()).unwrap_or(&[])
    }

    /// The range that has `address`.
    pub fn range_at(&self, address: u64) -> Option<&Range> {
        let after = self.ranges.partition_point(|range| range.address <= address);
        let range = self.ranges.get(after.checked_sub(1)?)?;
        (address - range.address < range.bytes).then_some(range)
    }

    /// The piece that has `address`.
    pub fn piece_at(&self, address: u64) -> Option<&Piece> {
        let pieces = self.pieces_of(self.range_at(address)?);
        let after = pieces.partition_point(|piece| piece.address <= address);
        pieces.get(after.checked_sub(1)?)
    }

    /// The `most` largest live blocks, largest first.
    pub fn largest_live(&self, most: usize) -> Vec<Piece> {
        largest(self.pieces.iter().filter(|piece| piece.kind == PieceKind::Live).copied(), most)
    }

    /// The `most` longest free runs, longest first. Idle slabs beside free memory are part of its
    /// run.
    pub fn largest_runs(&self, most: usize) -> Vec<Piece> {
        largest(self.free_runs(), most)
    }

    /// Free runs by address, idle slabs beside them counted in.
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

    /// What is held, and what of it serves nobody, as [`Held`] tells it.
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

/// The `most` largest, largest first, those of one size by address.
fn largest(pieces: impl Iterator<Item = Piece>, most: usize) -> Vec<Piece> {
    let mut found: Vec<Piece> = Vec::new();
    let order = |piece: &Piece| (std::cmp::Reverse(piece.bytes), piece.address);
    for piece in pieces {
        found.push(piece);
        // Twice as many as are wanted at the most, so a million of them cost a few sorts of few.
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
