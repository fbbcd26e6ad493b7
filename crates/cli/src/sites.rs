//! Origin of memory in the program, the same in every command: sites as JSON, the order of lines,
//! and how often they are read.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gruyere_record::sites::{Frame, LISTED, Line, NOT_KNOWN, Phase, SiteId, Sites, read_lines};
use gruyere_record::{BlockEntry, Reader};
use serde_json::{Value, json};

fn frame(frame: &Frame) -> Value {
    json!({ "file": frame.file, "line": frame.line, "function": frame.function })
}

/// Facts of a site; `null` if unknown.
pub fn value(sites: &Sites, id: SiteId) -> Value {
    let Some(site) = sites.get(id) else { return Value::Null };
    let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    json!({
        "id": id.0,
        "name": sites.place(id).to_string(),
        "module": known(&site.module),
        "phase": site.phase.name(),
        "line": site.line().map(frame),
        "frames": site.frames.iter().map(frame).collect::<Vec<_>>(),
        "forward": sites.get(site.forward).map(|_| site.forward.0),
    })
}

/// Order of lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// By live bytes.
    #[default]
    Bytes,
    /// By growth per step, then by live bytes.
    Growth,
}

impl Order {
    /// Sorts the lines, largest first.
    pub fn sort(self, lines: &mut [Line]) {
        let grows = |line: &Line| match self {
            Self::Bytes => 0,
            Self::Growth => line.growth.map_or(0, |growth| growth.bytes_a_step.max(1)),
        };
        lines.sort_by_key(|line| std::cmp::Reverse((grows(line), line.live_bytes)));
    }
}

/// The shortest time between two reads of all blocks. The factor on the last read's duration limits
/// reads to 2% of the time.
const BLOCKS_EVERY: Duration = Duration::from_secs(5);
const REST: u32 = 50;

/// Whether to read the blocks again, if the last read was `at` and `took` that long.
pub fn is_due(at: Instant, took: Duration, now: Instant) -> bool {
    now.duration_since(at) >= BLOCKS_EVERY.max(took * REST)
}

/// Results of reading all blocks, by record and device, for views that update often: read again
/// only when due.
pub struct SeldomRead<T = Option<Vec<Line>>>(HashMap<(PathBuf, u32), Look<T>>);

impl<T> Default for SeldomRead<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

/// Time of the read, its duration, and its result.
type Look<T> = (Instant, Duration, T);

impl<T> SeldomRead<T> {
    /// The result of `read`, or of a recent read.
    pub fn look(
        &mut self,
        reader: &Reader<'_>,
        device: u32,
        now: Instant,
        read: impl FnOnce(&Reader<'_>, u32) -> T,
    ) -> Option<&T> {
        let key = (reader.path().to_owned(), device);
        let is_fresh = |(at, took, _): &Look<T>| !is_due(*at, *took, now);
        if !self.0.get(&key).is_some_and(is_fresh) {
            // Also those of records that are gone.
            self.0.retain(|_, (at, ..)| now.duration_since(*at) < FORGOTTEN);
            let begin = Instant::now();
            let found = read(reader, device);
            self.0.insert(key.clone(), (now, begin.elapsed(), found));
        }
        self.0.get(&key).map(|(.., found)| found)
    }
}

impl SeldomRead {
    /// As [`read_lines`], possibly a while old.
    pub fn lines(&mut self, reader: &Reader<'_>, device: u32, now: Instant) -> Option<&[Line]> {
        let read = |reader: &Reader<'_>, device| read_lines(reader, device, LISTED);
        self.look(reader, device, now, read)?.as_deref()
    }
}

/// After this long without a request, the record counts as gone.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Bytes by phase, over the blocks without a lifetime (`auto`).
pub fn auto_by_phase(blocks: &[BlockEntry], sites: &Sites) -> [u64; Phase::ALL.len()] {
    let mut bytes = [0u64; Phase::ALL.len()];
    for block in blocks.iter().filter(|block| block.lifetime == 0) {
        let sum = &mut bytes[sites.phase(block.site) as usize];
        *sum = sum.saturating_add(block.size);
    }
    bytes
}

/// Such blocks in words; `None` if nothing is known.
pub fn shares_of_phases(bytes: [u64; Phase::ALL.len()]) -> Option<String> {
    let all: f64 = bytes.iter().map(|&bytes| bytes as f64).sum();
    let mut known: Vec<(u64, &str)> =
        Phase::ALL.iter().zip(bytes).skip(1).map(|(phase, bytes)| (bytes, phase.name())).collect();
    known.sort_by_key(|&(bytes, _)| std::cmp::Reverse(bytes));
    let parts = known.into_iter().chain([(bytes[0], NOT_KNOWN)]);
    let told: Vec<String> = parts
        .filter(|&(bytes, _)| bytes as f64 >= all / 200.0)
        .map(|(bytes, name)| format!("{name} {:.0}%", 100.0 * bytes as f64 / all))
        .collect();
    bytes[1..].iter().any(|&bytes| bytes > 0).then(|| told.join(", "))
}
