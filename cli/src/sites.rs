//! Where in the program memory came from, the same in every command: sites as JSON, the order of
//! lines, and how often they are read.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gruyere_record::sites::{Frame, LISTED, Line, NOT_KNOWN, Phase, SiteId, Sites, read_lines};
use gruyere_record::{BlockEntry, Reader};
use serde_json::{Value, json};

fn frame(frame: &Frame) -> Value {
    json!({ "file": frame.file, "line": frame.line, "function": frame.function })
}

/// What is known of a site; `null` where nothing is.
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

/// By what lines are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// What they hold.
    #[default]
    Bytes,
    /// What of it grows, by a step; then what they hold.
    Growth,
}

impl Order {
    /// Sorts them, the most first.
    pub fn sort(self, lines: &mut [Line]) {
        let grows = |line: &Line| match self {
            Self::Bytes => 0,
            Self::Growth => line.growth.map_or(0, |growth| growth.bytes_a_step.max(1)),
        };
        lines.sort_by_key(|line| std::cmp::Reverse((grows(line), line.live_bytes)));
    }
}

/// Between two looks at all blocks, at least; and so many times as long as the last look took:
/// never more than 2% of the time.
const BLOCKS_EVERY: Duration = Duration::from_secs(5);
const REST: u32 = 50;

/// Whether the blocks are to be looked at again, which was done `at` and `took` so long.
pub fn is_due(at: Instant, took: Duration, now: Instant) -> bool {
    now.duration_since(at) >= BLOCKS_EVERY.max(took * REST)
}

/// What is read of all blocks, by record and device, for views that look often: read anew only
/// where it is due.
pub struct SeldomRead<T = Option<Vec<Line>>>(HashMap<(PathBuf, u32), Look<T>>);

impl<T> Default for SeldomRead<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

/// When it was read, how long that took, what was found.
type Look<T> = (Instant, Duration, T);

impl<T> SeldomRead<T> {
    /// What `read` finds, or found a while ago.
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
            // Those of records that are gone, too.
            self.0.retain(|_, (at, ..)| now.duration_since(*at) < FORGOTTEN);
            let begin = Instant::now();
            let found = read(reader, device);
            self.0.insert(key.clone(), (now, begin.elapsed(), found));
        }
        self.0.get(&key).map(|(.., found)| found)
    }
}

impl SeldomRead {
    /// As [`read_lines`], of a while ago.
    pub fn lines(&mut self, reader: &Reader<'_>, device: u32, now: Instant) -> Option<&[Line]> {
        let read = |reader: &Reader<'_>, device| read_lines(reader, device, LISTED);
        self.look(reader, device, now, read)?.as_deref()
    }
}

/// Nobody has asked for so long: the record is gone.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Bytes by phase of the blocks that have no lifetime (`auto`).
pub fn auto_by_phase(blocks: &[BlockEntry], sites: &Sites) -> [u64; Phase::ALL.len()] {
    let mut bytes = [0u64; Phase::ALL.len()];
    for block in blocks.iter().filter(|block| block.lifetime == 0) {
        let sum = &mut bytes[sites.phase(block.site) as usize];
        *sum = sum.saturating_add(block.size);
    }
    bytes
}

/// In words what such blocks are; `None` where nothing is known.
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
