//! The layout in the terminal: rows of cells, a legend with the sums, and the reader's notes.

use std::fmt::Write as _;

use super::cells::{self, Cell, Place, Stretch};
use super::strokes::{By, CLASSES, Classes, Ink, STREAMS};
use gruyere_record::held::{IDLE, LOST};
use gruyere_record::picture::{Picture, Piece, Sums};
use gruyere_record::sites::Sites;
use gruyere_record::size::BinaryBytes;

/// Drawing style.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Width in columns.
    pub columns: usize,
    /// Rows of cells to fill.
    pub rows: usize,
    /// ASCII characters only.
    pub ascii: bool,
    /// Use escape codes of 256 colours.
    pub colour: bool,
    /// Order by physical pages.
    pub physical: bool,
    /// Property that colours live blocks.
    pub by: By,
}

/// Foreground of live classes (xterm's 256 colours). Each is visible on a white and on a black
/// background; none is red, the colour of lost memory. Lifetimes, then phases.
const LIFETIMES: [u8; 8] = [110, 150, 43, 24, 141, 93, 214, 65];
/// From new to old, and from small to large.
const RAMP: [u8; 6] = [150, 79, 37, 32, 26, 61];
const OF_STREAMS: [u8; STREAMS] = [32, 43, 150, 110, 68, 37, 72, 104];
/// Lines and modules; then "others" and "unknown".
const SITES: [u8; CLASSES] = [69, 136, 57, 214, 107, 43, 149, 73, 58, 25, 96, 243];
/// Unknown, then by [`gruyere_record::sites::Phase`].
const PHASES: [u8; 5] = [110, 141, 93, 214, 65];
const PENDING: u8 = 176;
/// Background of lost memory. Other free memory keeps the terminal's own background: a colour would
/// be dark on a light terminal, or light on a dark one.
const RED: u8 = 160;
const FAINT: u8 = 244;

/// By eighths of a cell that blocks take.
const FILL: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const LETTERS: [char; CLASSES] = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'o', 'x'];
const LIFETIME_LETTERS: [char; 8] = ['a', 't', 's', 'p', 'f', 'b', 'o', 'c'];
const PHASE_LETTERS: [char; 5] = ['x', 'f', 'b', 'o', 'c'];

/// Width of a row's label and the space behind it.
const LABEL: usize = 16;

impl Style {
    fn class_colour(&self, class: usize) -> u8 {
        match self.by {
            By::Lifetime => LIFETIMES[class],
            By::Age | By::Size => RAMP[class],
            By::Stream => OF_STREAMS[class],
            By::Site | By::Module => SITES[class],
            By::Phase => PHASES[class],
        }
    }

    fn class_letter(&self, class: usize) -> char {
        match self.by {
            By::Lifetime => LIFETIME_LETTERS[class],
            By::Phase => PHASE_LETTERS[class],
            _ => LETTERS[class],
        }
    }

    /// Whether to draw letters in place of fills: without colours, all fills would look alike.
    fn letters(&self) -> bool {
        self.ascii || !self.colour
    }

    fn paint(&self, text: &str, front: Option<u8>, back: Option<u8>) -> String {
        if !self.colour {
            return text.to_owned();
        }
        let mut codes = String::new();
        if let Some(front) = front {
            let _ = write!(codes, "\x1b[38;5;{front}m");
        }
        if let Some(back) = back {
            let _ = write!(codes, "\x1b[48;5;{back}m");
        }
        format!("{codes}{text}\x1b[0m")
    }

    /// The character of a cell and its colours.
    fn glyph(&self, cell: &Cell) -> (char, Option<u8>, Option<u8>) {
        let bytes = cell.bytes().max(1);
        let (taken, lost) = (cell.taken(), cell.unusable());
        // Lost bytes take an eighth of the cell, or most of its free bytes.
        let is_lost = lost > 0 && (lost * 8 >= bytes || lost * 2 > bytes - taken);
        let is_pending = cell.of(Ink::Pending) > cell.of(Ink::Live);
        let front = if is_pending { PENDING } else { self.class_colour(cell.class()) };
        if taken == 0 && !is_lost {
            return match (cell.of(Ink::Spare) * 2 > bytes, cell.of(Ink::Bound) * 2 > bytes) {
                (true, _) => (if self.letters() { '_' } else { ' ' }, None, None),
                (_, true) => (':', Some(FAINT), None),
                _ => (if self.letters() { '.' } else { '·' }, Some(FAINT), None),
            };
        }
        let back = is_lost.then_some(RED);
        let colours = |letter| (letter, Some(front), back);
        if !self.letters() {
            // Shows any free eighth, and any block.
            let eighths = (taken * 8 / bytes).clamp(u64::from(taken > 0), 8);
            return colours(FILL[eighths as usize]);
        }
        if lost * 4 > bytes {
            return colours('!');
        }
        if is_pending {
            return colours('~');
        }
        let letter = self.class_letter(cell.class());
        colours(if taken * 16 >= bytes * 15 { letter.to_ascii_uppercase() } else { letter })
    }
}

/// The whole picture as text; `head` comes first, `notes` last.
pub fn draw(
    picture: &Picture,
    sites: &Sites,
    head: &[String],
    notes: &[String],
    style: Style,
) -> String {
    let mut out = String::new();
    head.iter().for_each(|line| wrapped(&mut out, line, style.columns));
    let sums = picture.sums;
    if sums.held == 0 {
        let _ = writeln!(out, "nothing is held on device {}", picture.device);
        notes.iter().for_each(|note| wrapped(&mut out, note, style.columns));
        return out;
    }
    let width = style.columns.saturating_sub(LABEL).max(8);
    let cell = cell_bytes(sums.held, width, style.rows);
    let whole = picture.held();
    let of_free = |part: u64| share(part, sums.free());
    let held = format!(
        "held {}: live {} ({}), waiting for streams {}, {IDLE} {}, {LOST} {} ({})",
        bytes(sums.held),
        bytes(sums.live),
        share(sums.live, sums.held),
        bytes(sums.pending),
        bytes(whole.idle()),
        bytes(whole.lost()),
        share(whole.lost(), sums.held),
    );
    wrapped(&mut out, &held, style.columns);
    let view = if style.physical {
        "physical pages, by chunk and page"
    } else {
        "address space, by address"
    };
    wrapped(&mut out, &format!("{view}; a cell is {}", bytes(cell)), style.columns);
    out.push('\n');
    let classes = Classes::new(picture, sites, style.by);
    let stretches = if style.physical {
        cells::by_page(picture, &classes, cell)
    } else {
        // Many small ranges would each need a row of their own.
        let joined = picture.ranges.len() * 24 > width * style.rows;
        cells::by_address(picture, &classes, cell, joined)
    };
    rows(&mut out, &stretches, width, style);
    legend(&mut out, picture, &classes, &stretches, style);
    let longest = format!(
        "largest free run {}; idle and movable: {} ({} of free memory)",
        bytes(sums.largest_run),
        bytes(sums.movable()),
        of_free(sums.movable())
    );
    wrapped(&mut out, &longest, style.columns);
    let pages = format!(
        "pages: {} full, {} partly used, {} free, {} spare; address space: {} reserved, {} \
         mapped twice, {} about to be unmapped",
        sums.full_pages,
        sums.partial_pages,
        sums.free_pages,
        sums.spare_pages,
        bytes(sums.reserved_address),
        bytes(sums.stale_aliases),
        bytes(sums.retired)
    );
    wrapped(&mut out, &pages, style.columns);
    notes.iter().for_each(|note| wrapped(&mut out, note, style.columns));
    out
}

/// Bytes of a cell such that all held memory roughly fits the rows: eighths of a power of two, so
/// that the rows are used.
fn cell_bytes(held: u64, width: usize, rows: usize) -> u64 {
    let cells = (width * rows.max(1)) as u64;
    let least = held.div_ceil(cells).max(512);
    let step = (least.checked_next_power_of_two().unwrap_or(1 << 63) / 16).max(512);
    least.next_multiple_of(step)
}

/// Cells in rows; a bar marks a jump of the address.
fn rows(out: &mut String, stretches: &[Stretch], width: usize, style: Style) {
    let bar = if style.letters() { "|" } else { "│" };
    let mut column = 0;
    for (number, stretch) in stretches.iter().enumerate() {
        if number > 0 && column > 0 && column < width {
            out.push_str(&style.paint(bar, Some(FAINT), None));
            column += 1;
        }
        for cell in stretch {
            if column == 0 || column >= width {
                if column > 0 {
                    out.push('\n');
                }
                out.push_str(&style.paint(&label(cell.place), Some(FAINT), None));
                column = 0;
            }
            let (letter, front, back) = style.glyph(cell);
            out.push_str(&style.paint(letter.encode_utf8(&mut [0; 4]), front, back));
            column += 1;
        }
    }
    out.push_str("\n\n");
}

fn label(place: Place) -> String {
    match place {
        Place::Address(address) => format!("{:<LABEL$}", format!("{address:#x}")),
        Place::Page(chunk, page) => format!("{:<LABEL$}", format!("chunk {chunk}.{page}")),
    }
}

/// Meaning of each colour and letter, with the bytes.
fn legend(
    out: &mut String,
    picture: &Picture,
    classes: &Classes<'_>,
    stretches: &[Stretch],
    style: Style,
) {
    let sums: Sums = picture.sums;
    let mut entries: Vec<(String, String)> = Vec::new();
    let mut of_class = [0u64; CLASSES];
    for cell in stretches.iter().flatten() {
        of_class.iter_mut().zip(cell.classes).for_each(|(sum, more)| *sum += more);
    }
    for (class, name) in classes.names().iter().enumerate() {
        let amount = of_class[class];
        if amount == 0 {
            continue;
        }
        let letter = style.class_letter(class).to_ascii_uppercase();
        let mark = if style.letters() { letter } else { '█' };
        let mark = style.paint(&mark.to_string(), Some(style.class_colour(class)), None);
        // Lines and modules have long names: a row each, the amounts in columns.
        if matches!(style.by, By::Site | By::Module) {
            let amounts = format!("{:>11} {:>6}", bytes(amount), share(amount, sums.live));
            let amounts = amounts.replace('\u{a0}', " ");
            let name = within(name, style.columns.saturating_sub(22));
            let _ = writeln!(out, "{mark} {amounts}  {name}");
        } else {
            entries.push((mark, format!("{name} {}", bytes(amount))));
        }
    }
    let mut add = |ascii: char,
                   fine: char,
                   front: u8,
                   back: Option<u8>,
                   name: &str,
                   amount: u64,
                   always: bool| {
        if amount > 0 || always {
            let mark = if style.letters() { ascii } else { fine };
            entries.push((
                style.paint(&mark.to_string(), Some(front), back),
                format!("{name} {}", bytes(amount)),
            ));
        }
    };
    add('~', '█', PENDING, None, "pending", sums.pending, false);
    add('.', '·', FAINT, None, IDLE, sums.free_whole - sums.free_whole_bound, true);
    add(':', ':', FAINT, None, "idle, but usable only there", sums.free_whole_bound, false);
    add('_', ' ', FAINT, None, "idle, mapped nowhere", sums.spare, false);
    add('!', ' ', RED, Some(RED), LOST, sums.free_partial, true);
    let mut column = 0;
    for (mark, name) in &entries {
        // The mark, its space, and three spaces between two entries.
        let width = name.chars().count() + 2;
        if column > 0 && column + 3 + width <= style.columns {
            out.push_str("   ");
            column += 3;
        } else if column > 0 {
            out.push('\n');
            column = 0;
        }
        // If even a single entry is too long, its amount goes below.
        let (said, below) = match name.rsplit_once(' ') {
            Some((said, amount)) if width > style.columns => (said, Some(amount)),
            _ => (&**name, None),
        };
        let _ = write!(out, "{mark} {}", said.replace('\u{a0}', " "));
        column += width;
        if let Some(amount) = below {
            let _ = write!(out, "\n  {}", amount.replace('\u{a0}', " "));
            column = amount.chars().count() + 2;
        }
    }
    out.push('\n');
    if style.letters() {
        wrapped(out, "capital: at least 15/16 of the cell is taken; small: less", style.columns);
    }
    let beyond = |piece: &Piece| piece.kind.is_block() && piece.stream as usize >= STREAMS;
    if style.by == By::Stream && picture.pieces.iter().any(beyond) {
        wrapped(
            out,
            "streams from 8 on are drawn as their number minus 8, 16, and so on",
            style.columns,
        );
    }
    let parts = format!(
        "lost: gaps between blocks {}, free slots {}, rests of slots {}, tails of slabs {}",
        bytes(sums.gaps),
        bytes(sums.free_slots),
        bytes(sums.slot_rests),
        bytes(sums.slab_tails)
    );
    wrapped(out, &parts, style.columns);
}

/// A name in at most `columns` columns: drops the beginning of a longer name, since the end says
/// most.
fn within(name: &str, columns: usize) -> String {
    let excess = name.chars().count().saturating_sub(columns.max(1));
    match excess {
        0 => name.to_owned(),
        _ => format!("…{}", name.chars().skip(excess + 1).collect::<String>()),
    }
}

/// Breaks a line between words; a number and its unit are one word.
fn wrapped(out: &mut String, text: &str, columns: usize) {
    let mut column = 0;
    for word in text.split(' ') {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > columns {
            out.push('\n');
            column = 0;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(&word.replace('\u{a0}', " "));
        column += width;
    }
    out.push('\n');
}

fn bytes(value: u64) -> String {
    BinaryBytes(value).to_string().replace(' ', "\u{a0}")
}

fn share(part: u64, whole: u64) -> String {
    let percent = part as f64 * 100.0 / whole as f64;
    match (part, percent) {
        _ if whole == 0 => "-".to_owned(),
        (1.., ..0.05) => "<0.1%".to_owned(),
        _ => format!("{percent:.1}%"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Red, green and blue of an xterm colour (of 256), as linear light.
    fn light(colour: u8) -> [f64; 3] {
        let levels = [0u8, 95, 135, 175, 215, 255];
        let parts = match colour {
            232.. => [8 + 10 * (colour - 232); 3],
            _ => [36, 6, 1].map(|unit| levels[usize::from((colour - 16) / unit % 6)]),
        };
        parts.map(|part| match f64::from(part) / 255.0 {
            value if value <= 0.04045 => value / 12.92,
            value => ((value + 0.055) / 1.055).powf(2.4),
        })
    }

    fn luminance(colour: u8) -> f64 {
        light(colour).into_iter().zip([0.2126, 0.7152, 0.0722]).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn every_block_can_be_told_from_a_light_and_from_a_dark_ground() {
        let of_blocks = [&LIFETIMES[..], &RAMP, &OF_STREAMS, &SITES, &PHASES, &[PENDING, FAINT]];
        for &colour in of_blocks.into_iter().flatten() {
            let (on_white, on_black) =
                (1.05 / (luminance(colour) + 0.05), (luminance(colour) + 0.05) / 0.05);
            assert!(on_white >= 1.5 && on_black >= 2.0, "{colour}: {on_white} {on_black}");
        }
    }
}
