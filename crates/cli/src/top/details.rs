//! Data read for the chosen process only: slabs by size class, live blocks by stream and by line of
//! the program, and the latest events.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use gruyere_record::calls::CallTime;
use gruyere_record::clock::Scale;
use gruyere_record::reader::Cursor;
use gruyere_record::ring::Event;
use gruyere_record::sites::{Line, lines, live_blocks};
use gruyere_record::{DeviceGauge, SegmentKind};

use super::app::Key;
use super::verdict::Verdict;
use crate::follow::Followed;
use crate::sites::{auto_by_phase, is_due, shares_of_phases};

/// The most events shown.
const EVENTS: usize = 200;
/// Lines of the program kept: of the largest, and of the fastest growing.
const LINES: usize = 20;
/// Time between two reads of the segments.
const SEGMENTS_EVERY: Duration = Duration::from_secs(2);

/// Sum over blocks or slabs of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Sum {
    fn add(&mut self, bytes: u64) {
        (self.count, self.bytes) = (self.count + 1, self.bytes.saturating_add(bytes));
    }
}

/// Data of the chosen device.
#[derive(Debug, Default)]
pub struct Details {
    /// Slabs by slot size.
    pub slabs: BTreeMap<u64, Sum>,
    /// Segments other than slabs, by the number of their kind.
    pub segments: BTreeMap<u8, Sum>,
    /// Live blocks by stream, largest sum first.
    pub streams: Vec<(u32, Sum)>,
    /// Live bytes when the blocks were read.
    pub live: u64,
    /// Live bytes by line of the program; `None`: the record keeps no sites.
    pub lines: Option<Vec<Line>>,
    /// Verdict on the device's memory.
    pub verdict: Verdict,
    /// Phases of the blocks without a lifetime; `None`: unknown.
    pub auto: Option<String>,
    /// When the blocks were read.
    pub streams_at: Option<Instant>,
    /// The latest events other than mallocs and frees, oldest first.
    pub events: VecDeque<Event>,
    /// Such events lost: overwritten before we could read them.
    pub lost: u64,
    /// Converts their ticks to time.
    pub scale: Option<Scale>,
    /// Time the process spent in driver calls, over all its devices.
    pub calls: Vec<CallTime>,
    key: Option<Key>,
    cursor: Cursor,
    segments_at: Option<Instant>,
    took: Duration,
    /// Read after the process ended: final.
    is_final: bool,
}

impl Details {
    /// Reads what is due of the device `key`.
    pub fn look(&mut self, key: &Key, followed: &Followed, now: Instant) {
        let reader = &followed.reader;
        let is_seen = self.key.as_ref() == Some(key);
        if !is_seen {
            *self = Self { key: Some(key.clone()), ..Self::default() };
        }
        if let Some(ending) = &followed.ending {
            // For a process that left no record, the last live sample says more than the remains.
            if self.is_final || (is_seen && ending.record.is_none()) {
                return;
            }
            (self.is_final, self.segments_at, self.streams_at) = (true, None, None);
        } else if std::mem::take(&mut self.is_final) {
            // It has gone on after the out-of-memory.
            (self.segments_at, self.streams_at) = (None, None);
        }
        let device = key.1;
        self.scale = reader.scale();
        let scaled =
            |scale| reader.driver_calls().iter().map(|calls| calls.in_time(scale)).collect();
        self.calls = self.scale.map_or_else(Vec::new, scaled);
        let is_first = self.cursor == Cursor::default();
        let events = reader.rare_events(&mut self.cursor);
        // Events from before the first read do not count as lost.
        self.lost += if is_first { 0 } else { events.lost };
        self.events
            .extend(events.entries.into_iter().filter(|event| u32::from(event.device) == device));
        while self.events.len() > EVENTS {
            self.events.pop_front();
        }
        if self.segments_at.is_none_or(|at| now.duration_since(at) >= SEGMENTS_EVERY) {
            self.segments_at = Some(now);
            (self.slabs, self.segments) = (BTreeMap::new(), BTreeMap::new());
            for segment in reader.segments().entries {
                if u32::from(segment.device) != device {
                    continue;
                }
                match segment.kind {
                    SegmentKind::Slab => {
                        self.slabs.entry(segment.slot).or_default().add(segment.bytes)
                    }
                    kind => self.segments.entry(kind as u8).or_default().add(segment.bytes),
                }
            }
        }
        if self.streams_at.is_none_or(|at| is_due(at, self.took, now)) {
            let begin = Instant::now();
            let mut streams: BTreeMap<u32, Sum> = BTreeMap::new();
            let live = live_blocks(&reader.blocks().entries, &reader.segments().entries, device);
            for block in &live {
                streams.entry(block.stream).or_default().add(block.size);
            }
            (self.lines, self.auto) = (None, None);
            self.verdict = Verdict::read(reader, device);
            let snapshot = reader.device(device).unwrap_or_default();
            // Blocks come and go during the read, and a record may hold any number: saturate.
            let sum = live.iter().fold(0u64, |sum, block| sum.saturating_add(block.size));
            self.live = snapshot.live.max(sum);
            if reader.keeps_sites() {
                let sites = reader.sites();
                let step = snapshot.gauge(DeviceGauge::Step);
                let mut found = lines(&live, &sites, step, LINES);
                self.verdict.name_caller(&mut found, &sites);
                self.lines = Some(found);
                self.auto = shares_of_phases(auto_by_phase(&live, &sites));
            }
            self.streams = streams.into_iter().collect();
            self.streams.sort_by_key(|(stream, sum)| (std::cmp::Reverse(sum.bytes), *stream));
            (self.streams_at, self.took) = (Some(now), begin.elapsed());
        }
    }
}
