//! A map of the memory in a bounded number of cells: a device's heap in rows, by address.

use serde::Serialize;

use super::lines::{CLASSES, Lines};
use crate::dump::state::{Block, BlockKind, DeviceState, Segment};
use crate::picture::PAGE;

/// Cells of a row.
const COLUMNS: u64 = 128;
/// Rows at most.
const ROWS: u64 = 64;
/// Parts of a cell by which shares are counted.
const PARTS: u64 = 8;

/// The map. A cell is three digits: the line (see [`Lines`]) or [`PENDING`] with the most bytes of
/// its blocks; eighths taken by blocks; lost eighths.
#[derive(Debug, Serialize)]
pub struct Map {
    /// Bytes of a row.
    row_bytes: u64,
    /// The address of the first byte of each row.
    addresses: Vec<String>,
    rows: Vec<String>,
}

/// The class of cells filled by freed blocks that wait for streams.
const PENDING: usize = CLASSES;
/// Free parts of pages shared with blocks.
const LOST: usize = CLASSES + 1;
const PARTS_OF_CELL: usize = CLASSES + 2;

type Cell = [u64; PARTS_OF_CELL];

impl Map {
    /// The map of `device`. `None`: nothing is held.
    pub fn of(device: &DeviceState, lines: &Lines<'_>) -> Option<Self> {
        let mut segments: Vec<&Segment> = device.segments.iter().collect();
        segments.sort_by_key(|segment| segment.address);
        let total: u64 = segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.bytes));
        if total == 0 {
            return None;
        }
        let row_bytes = total.div_ceil(ROWS).max(COLUMNS * 512).checked_next_power_of_two()?;
        let cell_bytes = row_bytes / COLUMNS;
        let mut cells: Vec<Cell> = vec![[0; PARTS_OF_CELL]; total.div_ceil(cell_bytes) as usize];
        let mut at = 0u64;
        let mut starts = Vec::new();
        for segment in segments {
            starts.push((at, segment.address));
            let whole = Region { start: at, bytes: segment.bytes, cell_bytes };
            let mut inside = 0u64;
            for block in &segment.blocks {
                let left = segment.bytes.saturating_sub(inside);
                whole.add(&mut cells, segment.address, inside, block.0.min(left), block, lines);
                inside = inside.saturating_add(block.0);
            }
            at = at.saturating_add(segment.bytes);
        }
        let rows = cells.chunks(COLUMNS as usize);
        let address = |row: usize| {
            let at = (row as u64).saturating_mul(row_bytes);
            let known = starts.partition_point(|start| start.0 <= at).checked_sub(1);
            let (start, address) = known.and_then(|known| starts.get(known)).copied()?;
            Some(address.saturating_add(at - start))
        };
        Some(Self {
            row_bytes,
            addresses: (0..rows.len())
                .map(|row| address(row).map_or(String::new(), |at| format!("{at:#x}")))
                .collect(),
            rows: rows
                .map(|row| row.iter().flat_map(|cell| digits(cell, cell_bytes)).collect())
                .collect(),
        })
    }
}

/// A segment in the row of all memory.
struct Region {
    start: u64,
    bytes: u64,
    cell_bytes: u64,
}

impl Region {
    /// Adds a block that begins `inside` bytes behind the segment's start.
    fn add(
        &self,
        cells: &mut [Cell],
        address: u64,
        inside: u64,
        bytes: u64,
        block: &Block,
        lines: &Lines<'_>,
    ) {
        let class = match block.1 {
            BlockKind::Live => lines.number(block),
            BlockKind::Pending => PENDING,
            BlockKind::Free => LOST,
        };
        let (from, to) = (inside, inside.saturating_add(bytes));
        if class != LOST {
            return self.fill(cells, from, to, class);
        }
        // Whole pages serve any request; the memory beside them shares its page with a block.
        let page = |offset: u64| address.saturating_add(offset);
        let first = page(from).div_ceil(PAGE).saturating_mul(PAGE).saturating_sub(address);
        let last = (page(to) / PAGE * PAGE).saturating_sub(address);
        if from == 0 && to >= self.bytes {
            return;
        }
        if first >= last {
            return self.fill(cells, from, to, LOST);
        }
        self.fill(cells, from, first.min(to), LOST);
        self.fill(cells, last.max(from), to, LOST);
    }

    fn fill(&self, cells: &mut [Cell], from: u64, to: u64, class: usize) {
        let (mut at, end) = (self.start.saturating_add(from), self.start.saturating_add(to));
        while at < end {
            let number = at / self.cell_bytes;
            let stop = (number + 1).saturating_mul(self.cell_bytes).min(end);
            let Some(cell) = cells.get_mut(number as usize) else { return };
            cell[class] = cell[class].saturating_add(stop - at);
            at = stop;
        }
    }
}

/// A cell's three digits.
fn digits(cell: &Cell, bytes: u64) -> [char; 3] {
    let taken = cell[..LOST].iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
    let most = (0..LOST).max_by_key(|&class| (cell[class], std::cmp::Reverse(class))).unwrap_or(0);
    // Any share above 0 shows.
    let eighths = |part: u64| match part {
        0 => 0,
        _ => (part.saturating_mul(PARTS) / bytes.max(1)).clamp(1, PARTS),
    };
    let lost = eighths(cell[LOST]).min(PARTS - eighths(taken).min(PARTS));
    [most as u64, eighths(taken), lost]
        .map(|digit| char::from_digit(digit as u32, 36).unwrap_or('0'))
}
