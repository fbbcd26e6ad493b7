//! The layout as one HTML file that opens offline.
//!
//! Long lists are columns of numbers: concatenated, compressed (raw deflate) and embedded as
//! base64, which the page decodes into typed arrays. A million blocks take a few MiB and no JSON
//! parser. Text from the record is JSON with `<` escaped, and the page sets it as text only.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::io::{self, Write as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use gruyere_record::page::{self, fill};
use gruyere_record::picture::{Picture, Piece};
use gruyere_record::sites::{SiteId, Sites};
use gruyere_record::timeline::TimelineEntry;
use serde_json::{Map, Value, json};

use super::strokes::{Class, Ink, Stroke, of_range};

const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
/// The page's scripts, concatenated.
const SCRIPT: &str = concat!(
    include_str!("page/data.js"),
    include_str!("page/canvas.js"),
    include_str!("page/words.js"),
    include_str!("page/timeline.js"),
    include_str!("page/page.js"),
);

/// Marks a page of no chunk.
const NO_CHUNK: u32 = u32::MAX;

/// Columns of 32-bit numbers, keyed by the names that the page uses.
#[derive(Default)]
struct Columns {
    named: Vec<(&'static str, Vec<u32>)>,
}

impl Columns {
    fn add(&mut self, name: &'static str, numbers: Vec<u32>) {
        self.named.push((name, numbers));
    }

    /// Names and lengths, in the order of the bytes.
    fn facts(&self) -> Value {
        self.named
            .iter()
            .map(|(name, numbers)| json!({ "name": name, "count": numbers.len() }))
            .collect()
    }

    /// # Errors
    /// Never in practice: writing to memory cannot fail, although the encoder's signature allows
    /// it.
    fn encoded(&self) -> io::Result<String> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(4));
        let mut bytes = Vec::new();
        for (_, numbers) in &self.named {
            bytes.clear();
            bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            encoder.write_all(&bytes)?;
        }
        Ok(STANDARD.encode(encoder.finish()?))
    }
}

/// Properties that strokes share, stored once: (ink, lifetime, capture, stream, slot, site).
type Kind = (u8, u8, u8, u32, u64, u32);

/// The strokes, concatenated; ranges and pages refer to them by position.
struct Strokes {
    /// Unit of lengths, bytes.
    unit: u64,
    lengths: Vec<u32>,
    kinds: Vec<u32>,
    /// Of blocks: bytes beyond the request.
    slack: Vec<u32>,
    steps: Vec<u32>,
    table: Vec<Kind>,
    numbers: HashMap<Kind, u32>,
}

impl Strokes {
    fn push(&mut self, stroke: &Stroke<'_>) {
        let piece = stroke.piece;
        let Piece { lifetime, capture, stream: owner, slot, site, .. } = *piece;
        let kind = (stroke.ink as u8, lifetime, capture, owner, slot, site.0);
        let number = *self.numbers.entry(kind).or_insert_with(|| {
            self.table.push(kind);
            self.table.len() as u32 - 1
        });
        let is_block = matches!(stroke.ink, Ink::Live | Ink::Pending);
        let slack = if is_block { piece.bytes.saturating_sub(piece.requested) } else { 0 };
        let mut left = stroke.bytes / self.unit;
        while left > 0 {
            // A stroke too long for a column becomes several: only in a record whose lengths are
            // not whole units.
            let part = left.min(u64::from(u32::MAX));
            self.lengths.push(part as u32);
            self.kinds.push(number);
            self.slack.push(u32::try_from(slack).unwrap_or(u32::MAX));
            self.steps.push(piece.step);
            left -= part;
        }
    }
}

/// The page. `facts` describe the process and the device; this function adds the rest.
///
/// # Errors
/// As [`Columns::encoded`].
pub fn html(
    picture: &Picture,
    sites: &Sites,
    timeline: &[TimelineEntry],
    mut facts: Value,
) -> io::Result<String> {
    let whole =
        picture.pieces.iter().all(|piece| piece.address % 512 == 0 && piece.bytes % 512 == 0);
    let mut strokes = Strokes {
        unit: if whole { 512 } else { 1 },
        lengths: Vec::new(),
        kinds: Vec::new(),
        slack: Vec::new(),
        steps: Vec::new(),
        table: Vec::new(),
        numbers: HashMap::new(),
    };
    let mut columns = Columns::default();
    let (mut low, mut high, mut counts, mut range_facts) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for range in &picture.ranges {
        let before = strokes.lengths.len();
        of_range(picture, range).for_each(|stroke| strokes.push(&stroke));
        counts.push((strokes.lengths.len() - before) as u32);
        low.push(range.address as u32);
        high.push((range.address >> 32) as u32);
        range_facts.push(
            u32::from(range.kind as u8)
                | u32::from(range.lifetime) << 8
                | u32::from(range.capture) << 16,
        );
    }
    let pages = &picture.pages;
    columns.add("lengths", strokes.lengths);
    columns.add("kinds", strokes.kinds);
    columns.add("slack", strokes.slack);
    columns.add("steps", strokes.steps);
    columns.add("rangeLow", low);
    columns.add("rangeHigh", high);
    columns.add("rangeStrokes", counts);
    columns.add("rangeFacts", range_facts);
    columns.add("pageChunk", pages.iter().map(|page| page.chunk.unwrap_or(NO_CHUNK)).collect());
    columns.add("pageNumber", pages.iter().map(|page| page.number).collect());
    columns.add("pageBytes", pages.iter().map(|page| page.bytes).collect());
    let text = columns.encoded()?;
    facts["unit"] = json!(strokes.unit);
    facts["columns"] = columns.facts();
    facts["sites"] = site_table(&strokes.table.iter().map(|kind| SiteId(kind.5)).collect(), sites);
    facts["kinds"] = json!(strokes.table);
    facts["mapped_pages"] = json!(pages.iter().filter(|page| !page.is_spare()).count());
    facts["timeline"] = timeline_columns(timeline);
    // Only `<` could end the script element.
    let facts = facts.to_string().replace('<', "\\u003c");
    Ok(filled(&facts, &text))
}

/// Texts, each stored once.
struct Texts<T> {
    numbers: HashMap<T, usize>,
    texts: Vec<String>,
}

impl<T: Clone + Eq + Hash + ToString> Texts<T> {
    fn new() -> Self {
        Self { numbers: HashMap::new(), texts: Vec::new() }
    }

    /// The number of a text.
    fn number(&mut self, of: T) -> usize {
        *self.numbers.entry(of).or_insert_with_key(|of| {
            self.texts.push(of.to_string());
            self.texts.len() - 1
        })
    }
}

/// Facts of these sites, by number: line and module (numbers of `places`), phase, stack (numbers of
/// `frames`), and the modules that share its module's colour.
fn site_table(of: &BTreeSet<SiteId>, sites: &Sites) -> Value {
    let (mut places, mut frames) = (Texts::<Class>::new(), Texts::<String>::new());
    let told = |id: SiteId| {
        let line = places.number(Class::of(sites.place(id)));
        let module = places.number(Class::of(sites.module(id)));
        let modules = places.number(Class::of_module(sites.module(id)));
        let stack = sites.stack(id).into_iter().map(|line| frames.number(line));
        let entry =
            json!([line, module, sites.phase(id) as u8, stack.collect::<Vec<_>>(), modules]);
        (id.0.to_string(), entry)
    };
    let by_number: Map<String, Value> =
        of.iter().filter(|&&id| id != SiteId::NONE).copied().map(told).collect();
    json!({ "places": places.texts, "frames": frames.texts, "by_number": by_number })
}

/// Each field as a list, times in milliseconds since 1970.
fn timeline_columns(entries: &[TimelineEntry]) -> Value {
    let list = |of: fn(&TimelineEntry) -> u64| entries.iter().map(of).collect::<Vec<u64>>();
    json!({
        "time": entries
            .iter()
            .map(|entry| entry.realtime_nanoseconds as f64 / 1e6)
            .collect::<Vec<f64>>(),
        "step": list(|entry| entry.sample.step),
        "liveLow": list(|entry| entry.sample.live_low),
        "liveHigh": list(|entry| entry.sample.live_high),
        "reserved": list(|entry| entry.sample.reserved_high),
        "pending": list(|entry| entry.sample.pending_high),
    })
}

/// The page with data and scripts inserted.
fn filled(facts: &str, columns: &str) -> String {
    fill(
        PAGE,
        &[
            ("/*SHARED STYLE*/", page::STYLE),
            ("/*STYLE*/", STYLE),
            ("/*FACTS*/", facts),
            ("/*COLUMNS*/", columns),
            ("/*SHARED*/", page::SHARED),
            ("/*SCRIPT*/", SCRIPT),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_a_mark_for_each_part_in_their_order() {
        let filled = filled("2", "3");
        for mark in ["SHARED STYLE", "STYLE", "FACTS", "COLUMNS", "SHARED", "SCRIPT"] {
            let mark = format!("/*{mark}*/");
            assert!(PAGE.contains(&mark) && !filled.contains(&mark), "{mark}");
        }
    }

    #[test]
    fn what_the_record_says_cannot_end_the_element_that_it_is_in() {
        let facts = json!({ "command": "</script><script>alert(1)</script><!--" });
        let page = html(&Picture::default(), &Sites::default(), &[], facts).unwrap();
        assert_eq!(page.matches("</script>").count(), PAGE.matches("</script>").count());
        assert!(!page.contains("<script>alert"));
    }

    #[test]
    fn nothing_of_the_page_comes_from_outside() {
        for part in [PAGE, STYLE, SCRIPT] {
            for word in ["http://", "https://", "import ", "@import", "url(", "src=", "fetch("] {
                assert!(!part.contains(word), "{word}");
            }
        }
        assert!(PAGE.contains("default-src 'none'"));
        assert!(!SCRIPT.contains("innerHTML"), "names of the record are set as text");
    }
}
